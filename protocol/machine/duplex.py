"""The full-duplex conversation (000, 001, 002): appends in, units through the model, results out.

`setup` opens the model, `unit_loop` has the units and their outcomes, `input` what waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import attrs

from ..values import events as ev
from ..values.behaviour import SENDS_USER_WORDS
from ..values.errors import ErrorCode
from ..values.limits import UNIT_FRAMES_MAX
from ..values.live import UserWords
from ..values.messages import Interrupted, Listen, Paused, Resumed, Speech, ToolCalled, ToolsState
from ..values.model import UNIT_BYTES, ToolResult
from ..values.requests import Append, ClientMessage, Init, Interrupt, Pause, Resume, See, TellModel
from ..values.state import Gate, SessionKind
from ..values.utf8 import Refused
from .input import Attachments
from .kind import Handlers, Kind
from .setup import DUPLEX_HANDLERS, Setup, duplex_parts
from .unit_loop import Lockstep, UnitLoop


@attrs.define(eq=False)
class Duplex(Kind):
    """A session of units, each of which is answered by a message."""

    session_kind = SessionKind.DUPLEX
    opens_model = True
    handlers: ClassVar[Handlers] = {
        **DUPLEX_HANDLERS,
        Init: attrgetter("setup.init"),
        Append: attrgetter("loop.append"),
        ToolResult: attrgetter("loop.tools.returned"),
        TellModel: attrgetter("loop.tools.add_text"),
        See: attrgetter("loop.input.see"),
        Interrupt: attrgetter("interrupt"),
        Pause: attrgetter("pause"),
        Resume: attrgetter("resume"),
        ev.Forked: attrgetter("setup.forked"),
        ev.SpeechStarted: attrgetter("loop.speech_started"),
        ev.SpeechStopped: attrgetter("loop.speech_stopped"),
        ev.UserTranscribed: attrgetter("user_transcribed"),
    }

    setup: Setup = attrs.field(init=False)
    loop: UnitLoop = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.setup = duplex_parts(self)
        self.loop, self.slot_user = self.setup.loop, self.setup.migration

    # -- the session ----------------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        if self.loop.is_paused:
            return Gate.PAUSED
        return super().gate if self.setup.pending is None else Gate.OPENING

    @property
    def samples_waiting(self) -> int:
        """Samples of the client's sound that no unit in the model has yet."""
        return self.loop.input.samples_waiting

    def ready(self, prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        if self.step.opened.endpoint == "duplex":
            self.loop.lockstep = Lockstep(kv_length=prompt_length)
        self.send_created(prompt_length)

    def send_created(self, prompt_length: int = 0) -> None:
        """Tell the client that the session is set up."""
        tools: ToolsState = ""
        if self.loop.tools.offered:
            tools = "called" if self.step.limits.duplex_tools else "not_called"
        self.peer.send_created(prompt_length=prompt_length, tools=tools)

    def init_rejected(self, message: str) -> None:
        """Return to CONNECTED: the client may send a better init."""
        self.peer.send_error(ErrorCode.INVALID_PAYLOAD, message)
        self.timers.set("init", self.step.limits.init_wait_s)

    def forget_client(self) -> None:
        """Forget the client of the session that a fork began from."""
        self.loop.forget_client()

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse an init that a fork may not have, a result not due, a picture without room."""
        match message:
            case Init():
                return self.setup.refusal(message)
            case See():
                return self.loop.input.refusal(message)
            case ToolResult() | TellModel():
                return self.loop.tools.refusal(message)
        return None

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer: calls whose time is over end, and not the session."""
        if name == "calls":
            self.loop.tools.expire()
        else:
            super().timed_out(name)

    # -- in -------------------------------------------------------------------------------------

    def room_bytes(self) -> int:
        """Return the bytes of sound that are only kept, in a second without pictures to come."""
        loop, assembler = self.loop, self.loop.input.assembler
        is_plain = not (loop.input.pictures or loop.lockstep or loop.speech.must_listen)
        is_right = len(assembler.attached.frames) <= UNIT_FRAMES_MAX  # else the client is told
        if not is_plain or not is_right or self.step.limits.barge_in:
            return 0
        return UNIT_BYTES - 1 - len(assembler.remainder)

    def keep(self, messages: Sequence[Append]) -> None:
        """Keep sound for the next unit."""
        self.loop.appends += len(messages)
        last = messages[-1]
        slices = [it.max_slice_nums for it in messages if it.max_slice_nums is not None]
        attached = Attachments(
            input_id=last.input_id or self.step.derive("input", self.loop.appends - 1),
            max_slice_nums=slices[-1] if slices else None,
        )
        pcm = b"".join([message.pcm for message in messages])
        self.loop.input.assembler.add(pcm, attached)

    def interrupt(self, _message: Interrupt) -> None:
        """Have the unit in flight listen, else the next one (002, interrupt)."""
        self.loop.interrupt_next()
        self.peer.send(Interrupted())

    def pause(self, message: Pause) -> None:
        """Start no unit until the client resumes; waiting units are kept (002, pause)."""
        most_s = float(self.step.limits.pause_s)
        timeout_s = most_s if message.timeout_s is None else min(message.timeout_s, most_s)
        self.loop.is_paused = True
        self.timers.set("pause", timeout_s)
        self.peer.send(Paused(timeout_s=timeout_s))

    def resume(self, _message: Resume) -> None:
        """Go on (002, resume)."""
        self.loop.is_paused = False
        self.timers.cancel("pause")
        self.peer.send(Resumed())
        self.loop.start_if_due()

    # -- out ------------------------------------------------------------------------------------

    def has_model(self) -> bool:
        """Whether the model is open: input comes only then."""
        return True

    def must_speak(self) -> bool:
        """Whether the next unit may not listen."""
        return False

    def must_listen(self) -> bool:
        """Whether the next unit may only listen."""
        return False

    def send_outcome(self, outcome: Listen | Speech) -> None:
        """Send a unit's outcome."""
        self.peer.send(outcome)

    def send_calls(self, calls: Sequence[ToolCalled]) -> None:
        """Send the calls of tools that the model made in a unit."""
        for call in calls:
            self.peer.send(call)

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Send what the user said, to a client that asked for it."""
        peer = self.peer
        is_wanted = peer.wants_notices and self.step.behaves(SENDS_USER_WORDS)
        if is_wanted and peer.is_active and peer.dialect.name == "realtime" and event.text:
            peer.send(UserWords(text=event.text, start_ms=event.start_ms, end_ms=event.end_ms))

    def unit_dropped(self) -> None:
        """Go on after a waiting unit was dropped."""

    def unit_undone(self) -> None:
        """Go on after a unit that failed, and has no outcome."""
