"""The clients of a simulation: good ones, and those that a server on the internet also meets.

A client is a plan, drawn by numbers, and two tasks: one says what the plan says, one hears. What it
hears goes through `protocol.machine.client`, which knows what a server may say when; whose words
and sound they are is checked by the number that the model put in them (`simulated_backend`).

| character | does |
|---|---|
| good | sends a second every second, or asks and waits; then closes |
| hasty | the same without waiting for anything |
| flooding | sends more at once than may wait |
| forcing | interrupts at any moment |
| garbage | says what is no message, or none of this dialect, amid others |
| silent | says nothing at all |
| idle | sets its session up, and says nothing more |
| pausing | pauses, for ever (legacy-duplex) |
| deaf | reads nothing from some moment on |
| slow | reads slowly |

Any of them may vanish at any moment (`leaves_s`), and any await of the server's may be the one in
which its connection breaks (`LinkPlan.trap`). Some come back to their sessions (`simulated_way`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Final, Literal

import anyio
import attrs
import numpy as np
import simplejpeg

from protocol.machine.client import ClientConnection
from protocol.values import requests as rq
from protocol.values.errors import RemoteProtocolError
from protocol.values.events import PIECES, Endpoint
from protocol.values.limits import Mode
from protocol.values.messages import (
    Closed,
    Created,
    Delta,
    ErrorReport,
    Listen,
    Paused,
    QueueDone,
    Response,
    Resumed,
    ServerMessage,
    Speech,
    ToolCalled,
    TranscriptDelta,
    TranscriptDone,
)
from protocol.values.model import DuplexConfig, Tool, ToolCall, ToolResult
from protocol.values.state import Gate
from protocol.wire.dialects import DIALECTS
from tests.generated.clients import BAD_FIELDS, GARBAGE
from tests.simulation.simulated_backend import SAID, TAG, mark, strangers
from tests.simulation.simulated_socket import Link, LinkPlan
from tests.simulation.simulated_way import Visit, Way

Character = Literal[
    "good", "slow", "hasty", "flooding", "forcing", "garbage", "silent", "idle", "pausing", "deaf"
]
VOICE_SAMPLES: Final = 8_000
TURN_S: Final = 40.0
"""A client that asked waits so long for its answer."""
RUBBISH: Final = tuple(
    frame for frame in BAD_FIELDS if '"payload":{}' not in frame and "video_frames" not in frame
)
"""Without an init, if a poor one, that would set up a session of nobody's; and without an append
that mode=audio takes, whose silence is nobody's."""
NOTICED_S: Final = 20.0
"""A client that has left is noticed by then, also behind a slow disk and a full inbox."""
ANSWER_S: Final = 5.0
"""A good client that has said all waits so long for what is not answered yet."""


@attrs.frozen(kw_only=True)
class ClientPlan:
    """All that one client does.

    Attributes:
        number: what its sound and words say.
        arrives_s: when it connects.
        dialect: how it speaks.
        mode: what for.
        character: see above.
        rounds: seconds of sound, or questions.
        leaves_s: so long after it came it vanishes; None: it stays to its end.
        config: of its init.
        has_voice: it sends a reference voice.
        has_frames: it sends pictures, every third of them torn.
        link: its connection.
        resumable: it asks for a session to which it may come back.
        lasts_s: so long after it came such a client loses its connection.
        visits: its connections after that.
    """

    number: int
    arrives_s: float
    dialect: str
    mode: Mode
    character: Character = "good"
    rounds: int = 3
    leaves_s: float | None = None
    config: DuplexConfig = DuplexConfig()
    has_voice: bool = False
    has_frames: bool = False
    link: LinkPlan = attrs.Factory(LinkPlan)
    resumable: bool = False
    lasts_s: float = float("inf")
    visits: tuple[Visit, ...] = ()

    @property
    def endpoint(self) -> Endpoint:
        """Where it connects."""
        if self.dialect == "legacy-duplex":
            return "duplex"
        if self.dialect == "openai-transcription":
            return "openai"
        if self.dialect == "vllm-omni":
            return "omni"
        if self.dialect in PIECES:
            return self.dialect
        return "chat" if self.dialect == "legacy-chat" else "realtime"

    @property
    def label(self) -> str:
        """Its own name for its session, where the address has one."""
        if self.endpoint == "openai":
            return "scripted"
        return f"adx_{self.number}" if self.endpoint == "duplex" else ""


@cache
def _jpegs() -> tuple[bytes, bytes]:
    """A picture, and a torn one that only decoding finds out."""
    good = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    return good, good[: len(good) // 2]


def tagged(number: int, samples: int) -> bytes:
    """Sound to be transcribed that says whose it is: each sample is the client's number, plus 1."""
    return np.full(samples, number + 1, "<i2").tobytes()


class Client:
    """A client at work.

    Args:
        plan: what it does.
        link: its connection.
        report: told of what the server may not do.
        on_init: told each init before it is sent.
        dice: of its own.

    Attributes:
        said: what it heard, by class name, in order.
        errors: the codes that it heard.
        answers: units or turns that were answered.
        units: what was said in each unit that was answered; empty for a listen.
        queue_done_s: when it was given its slot; None before.
    """

    def __init__(
        self,
        plan: ClientPlan,
        link: Link | Way,
        *,
        report: Callable[[str], None],
        on_init: Callable[[rq.Init], None],
        dice: Random,
    ) -> None:
        self.plan, self.link = plan, link
        self._report, self._on_init, self._dice = report, on_init, dice
        self._dialect = DIALECTS[plan.dialect]
        self._connection = ClientConnection(plan.dialect, plan.mode)
        self._appends = 0
        self._heard_closed = False
        self._changed = anyio.Event()
        self._over = False
        self.is_deaf = False
        self.said: list[str] = []
        self.errors: list[str] = []
        self.answers = 0
        self.paused = False
        self._written = ""
        self._last = -1
        self.units: list[str] = []
        self._has_chosen = False
        self._calls: list[rq.ClientMessage] = []
        self._tool_dice = Random(plan.number)

    # -- hearing --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Do all of it, until there is nothing more to say or to hear; cancelled, hang up."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hear)
                with anyio.CancelScope() as scope:
                    if self.plan.leaves_s is not None:
                        scope.deadline = anyio.current_time() + self.plan.leaves_s
                    await self._act()
                    if not self._goes_by_itself:
                        await self._until(lambda: False)
                if not self.link.is_over:
                    await self._vanish()
                tasks.cancel_scope.cancel()
        finally:
            self.link.reset()

    @property
    def _goes_by_itself(self) -> bool:
        """Whether it hangs up once it has what it came for: 003 knows no goodbye."""
        return self.plan.mode == "transcription" and self.plan.character in {"good", "slow"}

    async def _vanish(self) -> None:
        """Go, in one way or another; the server has to notice."""
        link = self.link
        self._dice.choice((link.reset, link.leave, link.half_close))()
        with anyio.move_on_after(NOTICED_S) as scope:
            await link.until_let_go()
        if scope.cancelled_caught:
            self._report(f"{NOTICED_S} s after it left the server still holds its connection")

    async def _hear(self) -> None:
        while True:
            if self.is_deaf:
                await self.link.until_let_go()
                break
            if self.plan.character == "slow":
                await anyio.sleep(self._dice.random())
            frame = await self.link.hear()
            if frame is None:
                break
            self._take(frame)
            self._notify()
        self._over = True
        self._notify()

    def _take(self, frame: str) -> None:
        if self._heard_closed:
            self._report(f"the server said {frame[:80]} after its last word")
        if self._has_chosen and self._connection.gate is Gate.UNCHOSEN:
            self._connection.send(rq.ChooseModel(model=""))  # the hasty say so before they may
        try:
            messages = self._connection.receive(frame)
        except RemoteProtocolError as error:
            self._report(f"the server may not say {frame[:80]}: {error}")
            return
        for message in messages:
            self.said.append(type(message).__name__)
            self._note(message)

    def _note(self, message: ServerMessage) -> None:
        match message:
            case Speech() | Delta() | Response():
                self._check(message.text, message.pcm)
                self._check_order(message)
                self.answers += not isinstance(message, Delta)
            case TranscriptDelta(text=text):
                self._check(text, b"")
                self._follow(text)
                self._written += text
            case TranscriptDone(text=text):
                if text != self._written:
                    self._report(f"it was told {self._written!r}, and then that it was {text!r}")
                self._written, self._last = "", -1
                self.answers += 1
            case ToolCalled(call=call):
                self._answer_call(call)
            case Listen():
                self.answers += 1
                self.units.append("")
            case ErrorReport():
                self.errors.append(message.code)
                self._last = -1 if self.plan.mode == "chat" else self._last
            case Paused():
                self.paused = True
            case Resumed():
                self.paused = False
            case Closed():
                # 002 says how it ended, and then `stopped`.
                self._heard_closed = self.plan.dialect != "legacy-duplex"

    def _check(self, text: str, pcm: bytes) -> None:
        others = {tag for tag in TAG.findall(text) if int(tag) != self.plan.number}
        if others:
            self._report(f"B8: client {self.plan.number} was told the words of {sorted(others)}")
        # A chat's speech is scripted, and its pitch says the session's seed.
        if self.plan.mode != "chat" and strangers(pcm, self.plan.number):
            self._report(f"B8: client {self.plan.number} heard somebody else's sound")

    def _check_order(self, message: Speech | Delta | Response) -> None:
        """See that nothing is said twice."""
        if isinstance(message, Speech):
            self.units.append(message.text)
            self._follow(message.text)
        elif isinstance(message, Delta):
            self._follow(message.text)
        else:
            self._last = -1

    def _follow(self, text: str) -> None:
        for number in map(int, SAID.findall(text)):
            if number <= self._last:
                self._report(f"B11: it is told {number} after {self._last}: {text!r}")
            self._last = number

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to be so, or for the end."""
        while not (self._over or condition()):
            changed = self._changed
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def has_heard(self, *kinds: type[ServerMessage]) -> bool:
        """Whether any of these was said."""
        return any(kind.__name__ in self.said for kind in kinds)

    # -- saying ---------------------------------------------------------------------------------

    def _say(self, message: rq.ClientMessage) -> None:
        self._has_chosen |= isinstance(message, rq.ChooseModel)
        self.link.say(self._dialect.encode_request(message))

    def _say_rubbish(self) -> None:
        if self._dice.random() < 0.05:
            self.link.say(self._dice.choice(GARBAGE))
        else:
            self.link.say(self._dice.choice(RUBBISH))

    async def _act(self) -> None:
        if self.plan.character == "silent":
            return
        if self.plan.mode == "transcription":
            await self._dictate()
            return
        if self.plan.character == "hasty" or self.plan.dialect == "legacy-chat":
            await anyio.sleep(self._dice.random() / 10)
        else:
            await self._until(lambda: self.has_heard(QueueDone))
        if self.plan.dialect != "legacy-chat":
            await self._set_up()
        if self.plan.character == "idle" or self._over:
            return
        await (self._chat() if self.plan.mode == "chat" else self._stream())
        if self.plan.character == "good" and self.plan.mode != "chat":
            with anyio.move_on_after(ANSWER_S):
                await self._until(lambda: self.answers >= self._appends)
        if self.plan.character == "deaf" or self.plan.dialect == "legacy-chat":
            return
        reason = "enough" if self.plan.dialect == "realtime" else None
        if not self.paused or self.plan.character != "pausing":
            self._say(rq.CloseRequest(reason=reason))
            for result in self._calls:  # they are too late
                self._say(result)

    async def _set_up(self) -> None:
        if self.plan.character == "garbage":
            self._say_rubbish()
        init = self._init()
        self._on_init(init)
        self._say(init)
        if self.plan.character != "hasty":
            await self._until(lambda: self.has_heard(Created))

    def _init(self) -> rq.Init:
        if self.plan.mode == "chat":
            return rq.Init(instructions="")
        voice = None
        if self.plan.has_voice:
            pcm = mark(self.plan.number, 0, VOICE_SAMPLES)
            voice = rq.ReferenceAudio(data=pcm, is_file=False)
        return rq.Init(
            instructions=f"<{self.plan.number}> be brief",
            ref_audio=voice,
            config=self.plan.config,
            tools=self._tools * self._has_tools,
        )

    @property
    def _tools(self) -> tuple[Tool]:
        return (Tool(name="clock", description=f"<{self.plan.number}>"),)

    @property
    def _has_tools(self) -> bool:
        return self.plan.dialect in ("realtime", "duplex-v1")

    def _answer_call(self, call: ToolCall) -> None:
        """Answer a call, twice, of another session, late or never."""
        if f"<{self.plan.number}>" not in call.arguments:
            self._report(f"B8: client {self.plan.number} was asked for {call.arguments}")
        dice = self._tool_dice.random()
        result = self._result(call.id, f"<{self.plan.number}> nine")
        if dice < 0.3:
            self._calls.append(result)  # it goes with later sound
        elif dice < 0.7:
            unknown = self._result("call_000000000000", "ten")
            for each in [result] * 2 if dice < 0.5 else [result, unknown]:
                self._say_if_open(each)

    def _result(self, call_id: str, output: str) -> rq.ClientMessage:
        return ToolResult(call_id=call_id, output=output)

    def _say_if_open(self, message: rq.ClientMessage) -> None:
        if self._connection.gate is Gate.ACTIVE:
            self._say(message)

    async def _stream(self) -> None:
        """Send sound, a second or another length at a time."""
        for number in range(self.plan.rounds):
            if self._over:
                return
            if self.plan.character == "garbage" and self._dice.random() < 0.4:
                self._say_rubbish()
            if self.plan.character == "deaf" and number == self.plan.rounds // 2:
                self.is_deaf = True
            if self.plan.character == "pausing" and number == self.plan.rounds // 2:
                self._say(rq.Pause(timeout_s=self._dice.choice((None, 1.0, 1000.0))))
                if self._dice.random() < 0.5:
                    return
                await anyio.sleep(self._dice.random() * 3)
                self._say(rq.Resume())
            is_after = self.plan.character == "forcing"
            if self._calls and not is_after:
                self._say_if_open(self._calls.pop(0))
            for append in self._appended():
                self._say(append)
            if self._calls and is_after:
                self._say_if_open(self._calls.pop(0))
            await anyio.sleep(0 if self.plan.character == "hasty" else self._pause_s())

    def _pause_s(self) -> float:
        return self._dice.choice((1.0, 1.0, 1.0, 0.3, self._dice.random() * 2))

    def _appended(self) -> Iterator[rq.ClientMessage]:
        dice, plan = self._dice, self.plan
        lengths = (16_000, 16_000, 16_000, 4_000, 8_000 + dice.randrange(24_000))
        samples = 16_000 if plan.character == "good" else dice.choice(lengths)
        if plan.character == "flooding":
            samples = 64_000 + dice.randrange(64_000)
        force = plan.character == "forcing" and dice.random() < 0.5
        if force and plan.dialect == "legacy-duplex" and dice.random() < 0.5:
            yield rq.Interrupt()
        frames = (_jpegs()[self._appends % 3 == 2],) if plan.has_frames else ()
        yield rq.Append(
            pcm=mark(plan.number, self._appends % 1000, samples), frames=frames, force_listen=force
        )
        self._appends += 1

    async def _chat(self) -> None:
        """Ask, wait for the answer, ask again."""
        for number in range(self.plan.rounds):
            if self._over:
                return
            if self.plan.character == "garbage" and self._dice.random() < 0.4:
                self._say_rubbish()
            before = self.answers + len(self.errors)
            self._say(self._question(number))
            if self.plan.character == "deaf" and number == self.plan.rounds // 2:
                self.is_deaf = True
            if self.plan.character == "forcing":
                await anyio.sleep(self._dice.random())
                self._say(self._question(number))
            if self.plan.character != "hasty":
                with anyio.move_on_after(TURN_S):
                    await self._until(
                        lambda before=before: self.answers + len(self.errors) > before
                    )
            if self.plan.dialect == "legacy-chat":
                return
            await anyio.sleep(self._dice.random() * 2)

    async def _dictate(self) -> None:
        """Choose a model and say utterances; 003 knows no goodbye, so the server ends it."""
        plan = self.plan
        if plan.character != "hasty":
            await self._until(lambda: self.has_heard(Created))
        if plan.character == "idle" or self._over:
            return
        if plan.character == "garbage":
            self._say_rubbish()
        self._choose()
        for number in range(plan.rounds):
            if self._over:
                return
            if plan.character == "deaf" and number == plan.rounds // 2:
                self.is_deaf = True
            self._say_utterance()
            self._appends += 1
            await anyio.sleep(0 if plan.character in {"hasty", "flooding"} else self._pause_s())
        if plan.character == "good":
            with anyio.move_on_after(ANSWER_S):
                await self._until(lambda: self.answers >= self._appends)

    def _choose(self) -> None:
        """Say what a transcription needs before its first utterance."""
        self._say(rq.ChooseModel(model="scripted"))

    def _say_utterance(self) -> None:
        dice = self._dice
        if dice.random() < 0.5:
            self._say(rq.Commit())
        for samples in (16_000, dice.randrange(1, 20_000))[: 1 + dice.randrange(2)]:
            self._say(rq.AppendSound(pcm16=tagged(self.plan.number, samples)))
        self._say(rq.Commit(final=True))

    def _question(self, number: int) -> rq.Ask:
        parts: list[rq.Part] = [rq.TextPart(text=f"<{self.plan.number}> {number}")]
        if self.plan.has_frames:
            parts.append(rq.ImagePart(data=_jpegs()[self._appends % 3 == 2]))
        self._appends += 1
        message = rq.ChatMessage(role="user", content=tuple(parts))
        return rq.Ask(
            messages=(message,),
            streaming=self._dice.random() < 0.7,
            speech=rq.SpeechRequest() if self._dice.random() < 0.3 else None,
        )
