"""Clients made by numbers: what they say and do is drawn, played to a server in memory, recorded.

    a number -> Dice -> ClientScript -> play on virtual time -> its log

`client_script` draws a client from any source of numbers: `SeededDice` makes the same client of the
same seed for ever, on any machine; `client_scripts` is the same as a Hypothesis strategy, which
shrinks. `record_scripted` and `record_model` play a client to a server in memory and keep the log;
`test_replay_generated.judge` holds a log to what must be true of every recording.

`DirectBackend` runs a blocking model in the event loop's own thread: time is virtual, so that what
a model computes takes none, and a session lasts as long as its script says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import anyio
import attrs
import numpy as np
import simplejpeg
from hypothesis import strategies as st

from protocol.values.limits import Mode
from protocol.values.model import SAMPLE_BYTES, Cut, Finalized, Opened, Opening, Unit, UnitResult
from protocol.values.records import digest
from runtime.media.sound import read_wav
from runtime.model.backends.base import BackendError
from runtime.model.backends.scripted import Call, ScriptedBackend
from tests.golden.stage import without_loss
from tests.sessions.in_memory import Peer, World, base64, init_frame, on_virtual_time, world
from tests.strategies.messages import jpeg_header, wav
from tests.strategies.random_scripts import random_script

if TYPE_CHECKING:
    from runtime.model.backends.minicpmo.model import DuplexModel
    from tests.models.blocking import BlockingSession

ROOT: Final = Path(__file__).parents[2]
HELDOUT: Final = ROOT / "fixtures" / "speech" / "heldout"
RATE_HZ: Final = 16_000
IDENTITIES_A_WORLD: Final = 10
"""So many sessions at most in one world: the names and seeds of the next seed's are others."""
ACTIONS_MAX: Final = 24

T = TypeVar("T")


class Dice(Protocol):
    """A source of choices."""

    def below(self, bound: int) -> int:
        """Give a number from 0 to `bound` - 1."""
        ...


class SeededDice:
    """Choices by a seed and a counter, the same in every process."""

    def __init__(self, *names: str | int) -> None:
        self._names = names
        self._counter = count()

    def below(self, bound: int) -> int:
        """Give a number from 0 to `bound` - 1."""
        return int(digest((*self._names, next(self._counter)))[:12], 16) % bound


@attrs.frozen
class _DrawnDice:
    """Choices that Hypothesis makes, and shrinks towards 0."""

    draw: st.DrawFn

    def below(self, bound: int) -> int:
        return self.draw(st.integers(0, bound - 1))


def pick(dice: Dice, *options: T) -> T:
    """Choose one; simple ones come first, for shrinking."""
    return options[dice.below(len(options))]


# -- what a client does ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Wait:
    """Nothing, for a while."""

    ms: int


@attrs.frozen(kw_only=True)
class Append:
    """Sound, and what is seen; `sound` and `frames` name what is made of them when it is sent."""

    samples: int
    sound: str = "speech"
    force_listen: bool = False
    frames: tuple[str, ...] = ()
    slices: int | None = None


@attrs.frozen(kw_only=True)
class Say:
    """A frame of its own, by its place in `BAD_FIELDS` or `GARBAGE`."""

    table: str
    number: int


@attrs.frozen(kw_only=True)
class Close:
    """A `session.close`; what follows it is sent all the same."""

    reason: str | None = None


@attrs.frozen
class Vanish:
    """The connection is lost."""


@attrs.frozen
class Stall:
    """Nothing more is read."""


Action = Wait | Append | Say | Close | Vanish | Stall


@attrs.frozen(kw_only=True)
class ClientScript:
    """All that one client does.

    Attributes:
        mode: of the connection.
        dialect: `realtime` or `duplex-v1`.
        early: before there is a slot, and before the init.
        inits: the init, after others that are refused.
        actions: once the session is set up.
        rival_ms: somebody else holds the only slot for so long; 0: nobody.
        limit_s: the server's limit on the session.
        voice: what the sound is made from, for `append_pcm`.
    """

    mode: Mode = "video"
    dialect: str = "realtime"
    early: tuple[Action, ...] = ()
    inits: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    rival_ms: int = 0
    limit_s: int = 300
    voice: int = 0


def client_script(dice: Dice, *, audio_s_max: int = 10) -> ClientScript:
    """Draw a client.

    Args:
        dice: where choices come from.
        audio_s_max: seconds of sound, after which it sends none.
    """
    dialect = pick(dice, "realtime", "realtime", "realtime", "duplex-v1")
    actions: list[Action] = []
    left = audio_s_max * RATE_HZ
    while len(actions) < ACTIONS_MAX:
        new = _exchange(dice, left)
        actions += new
        left -= sum(action.samples for action in new if isinstance(action, Append))
        if left <= 0 or any(isinstance(action, Vanish | Stall) for action in new):
            break
    ending = pick(dice, "close", "close", "vanish", "drain", "stall", "late")
    actions += _ending(dice, ending)
    return ClientScript(
        mode=pick(dice, "video", "video", "audio"),
        dialect=dialect,
        early=(_blunder(dice),) if dice.below(8) == 7 else (),
        inits=_inits(dice, dialect),
        actions=tuple(actions),
        rival_ms=dice.below(9000) if dice.below(6) == 5 else 0,
        limit_s=5 + dice.below(12) if dice.below(10) == 9 else 300,
        voice=dice.below(1000),
    )


@st.composite
def client_scripts(draw: st.DrawFn, *, audio_s_max: int = 6) -> ClientScript:
    """Draw a client, as a Hypothesis strategy."""
    return client_script(_DrawnDice(draw), audio_s_max=audio_s_max)


def _exchange(dice: Dice, left: int) -> tuple[Action, ...]:
    """Draw what a client does next: mostly a second of sound and a second of waiting."""
    kind = dice.below(40)
    if kind < 26:
        append = _append(dice, left)
        pause = pick(dice, append.samples // 16, append.samples // 16, 0, dice.below(3000))
        return (append, Wait(ms=pause))
    if kind < 29:  # a flood: all at once, more than may wait
        return tuple(_append(dice, left) for _ in range(2 + dice.below(4)))
    if kind < 33:  # an interruption at any moment
        before = Wait(ms=dice.below(1200))
        return (before, attrs.evolve(_append(dice, left), force_listen=True))
    if kind < 37:
        return (_blunder(dice),)
    if kind < 39:
        return (Wait(ms=dice.below(4000)),)
    return (
        pick(dice, Wait(ms=1), Say(table="garbage", number=dice.below(len(GARBAGE))), Vanish()),
    )


def _append(dice: Dice, left: int) -> Append:
    samples = pick(
        dice,
        16_000,
        16_000,
        16_000,
        4_000,
        4_000 + dice.below(28_000),
        9 * 16_000 - dice.below(4_000),
    )
    frames = ("good", "torn", "header", "huge", "empty")
    shown = tuple(pick(dice, "good", *frames) for _ in range(1 + dice.below(3)))
    return Append(
        samples=max(4_000, min(samples, left)),
        sound=pick(dice, "speech", "speech", "speech", "silence", "noise", "tone", "wild"),
        force_listen=dice.below(10) == 9,
        frames=shown if dice.below(4) == 3 else (),
        slices=1 + dice.below(9) if dice.below(6) == 5 else None,
    )


def _blunder(dice: Dice) -> Say:
    return Say(table="bad_fields", number=dice.below(len(BAD_FIELDS)))


def _ending(dice: Dice, ending: str) -> tuple[Action, ...]:
    pause = Wait(ms=dice.below(3000))
    if ending == "close":
        return (pause, Close(reason=pick(dice, None, "user_stop", "x" * 80)))
    if ending == "late":  # and goes on talking, as a client may that has not heard of it yet
        return (pause, Close(), Append(samples=16_000), Close(reason="again"))
    if ending == "stall":
        return (Stall(), Append(samples=16_000), Wait(ms=1000), Append(samples=32_000))
    return (pause,) if ending == "drain" else (pause, Vanish())


# -- what is sent for it --------------------------------------------------------------------------

BAD_FIELDS: Final[tuple[str, ...]] = (
    '{"type":"nope"}',
    '{"type":7}',
    "{}",
    '{"type":"input.append"}',
    '{"type":"input.append","input":{"audio":"not base64"}}',
    '{"type":"input.append","input":{"audio":"AAAA"}}',
    '{"type":"input.append","input":{"audio":"' + "AAAA" * 15 + '"}}',
    '{"type":"input.append","input":{"audio":null},"input_id":"' + "i" * 65 + '"}',
    '{"type":"input.append","input":{"audio":"' + base64(b"\0\0\xc0\x7f" * 4000) + '"}}',
    '{"type":"input.append","input":{"audio":"' + base64(bytes(16_000)) + '","force_listen":"no"}}',
    '{"type":"input.append","input":{"audio":"' + base64(bytes(16_000)) + '","video_frames":[""]}}',
    '{"type":"input_audio_buffer.append","audio":"' + base64(bytes(15_999)) + '"}',
    '{"type":"session.init","payload":{}}',
    '{"type":"session.init","payload":{"config":{"temperature":"hot"}}}',
    '{"type":"session.update","session":{"instructions":7}}',
    '{"type":"session.update","model":"other"}',
    '{"type":"h\\u00e9llo \\ud800","\\ud800":1}',
)
"""Each is answered by an error, at most, and the session goes on."""

GARBAGE: Final[tuple[str | bytes | None, ...]] = (
    "no JSON",
    "",
    "[" * 40 + "]" * 40,
    '{"type":"nope","type":"nope"}',
    '{"a":NaN}',
    "[]",
    b"\x00\x01",
    b"\xff" * 3000,
    None,
)
"""Nothing that could be an event: the session ends."""


def _inits(dice: Dice, dialect: str) -> tuple[str, ...]:
    voice = base64(wav(8_000 + dice.below(8_000)))
    words = pick(dice, "be brief", "", "h\u00e9llo \U0001f600", "word " * 300)
    if dialect == "duplex-v1":
        session: dict[str, object] = {"instructions": words}
        if dice.below(4) == 3:
            session["ref_audio"] = voice
        return (json.dumps({"type": "session.update", "session": session}),)
    payload: dict[str, Any] = {"system_prompt": words}
    if dice.below(4) == 3:
        payload["voice"] = {pick(dice, "ref_audio_base64", "tts_ref_audio_base64"): voice}
    if dice.below(3) != 0:
        payload["config"] = {
            "force_listen_count": dice.below(4),
            "temperature": pick(dice, 0, 0.7, 1.5),
            "top_k": 1 + dice.below(40),
            "max_new_speak_tokens_per_chunk": 2 + dice.below(19),
            "generate_audio": dice.below(6) != 5,
            "listen_prob_scale": pick(dice, 1, 0, 0.3),
        }
    good = json.dumps({"type": "session.init", "payload": payload})
    torn = {"system_prompt": "", "voice": {"ref_audio_base64": base64(b"RIFF....WAVEjunk")}}
    bad = json.dumps({"type": "session.init", "payload": torn})
    return (bad, good) if dice.below(6) == 5 else (good,)


@cache
def _good_jpeg() -> bytes:
    at = np.arange(48, dtype=np.uint8)
    picture = np.stack([np.add.outer(at, 3 * at), np.add.outer(5 * at, at), at * at[:, None]], 2)
    return simplejpeg.encode_jpeg(np.ascontiguousarray(picture.astype(np.uint8)))


def _jpeg(name: str) -> bytes:
    match name:
        case "good":
            return _good_jpeg()
        case "torn":  # it passes the check of its header, and fails to decode
            return _good_jpeg()[: len(_good_jpeg()) // 2]
        case "header":
            return jpeg_header(64, 48)
        case "huge":
            return jpeg_header(60_000, 60_000)
    return b""


@cache
def _files() -> list[Path]:
    return sorted(HELDOUT.glob("*.flac"))


@cache
def _read(path: Path) -> bytes:
    return read_wav(path)


def _phrase(number: int) -> bytes:
    return _read(_files()[number % len(_files())])


@cache
def tape(voice: int) -> bytes:
    """Return half a minute of somebody who asks, waits and asks again, in a quiet room."""
    room = np.random.default_rng(voice).normal(0, 0.0008, 30 * RATE_HZ).astype("<f4")
    at = (RATE_HZ // 2, 7 * RATE_HZ // 2)[voice % 2]  # some wait until the model may speak at all
    for number in range(4):
        phrase = np.frombuffer(_phrase(voice * 7 + number), "<f4")[: len(room) - at]
        room[at : at + len(phrase)] += phrase
        at += len(phrase) + (3 + voice % 3) * RATE_HZ
    return room.tobytes()


def append_pcm(sound: str, samples: int, voice: int, begin: int) -> bytes:
    """Make the sound of an append.

    Args:
        sound: what kind.
        samples: how much.
        voice: who speaks.
        begin: how much was sent before, so that speech goes on where it was.
    """
    at = np.arange(begin, begin + samples)
    match sound:
        case "speech":
            spoken = np.frombuffer(tape(voice), "<f4")
            return spoken[at % len(spoken)].astype("<f4").tobytes()
        case "noise":
            return np.random.default_rng(begin).uniform(-1, 1, samples).astype("<f4").tobytes()
        case "tone":
            return (0.3 * np.sin(at * (voice % 100 + 1) / 160)).astype("<f4").tobytes()
        case "wild":  # finite, and nothing else
            extremes = np.array([3.4e38, -3.4e38, 1e-45, -0.0, 1e20, -1.0], "<f4")
            return extremes[at % len(extremes)].tobytes()
    return bytes(samples * SAMPLE_BYTES)


def _append_frame(append: Append, script: ClientScript, begin: int) -> str:
    fields: dict[str, object] = {
        "audio": base64(append_pcm(append.sound, append.samples, script.voice, begin))
    }
    if append.frames:
        fields["video_frames"] = [base64(_jpeg(name)) for name in append.frames]
    if append.force_listen:
        fields["force_listen"] = True
    if append.slices is not None:
        fields["max_slice_nums"] = append.slices
    if script.dialect == "duplex-v1":
        return json.dumps({"type": "input_audio_buffer.append", **fields})
    return json.dumps({"type": "input.append", "input": fields})


# -- playing it -----------------------------------------------------------------------------------


async def play(server: World, script: ClientScript) -> None:
    """Play a client to its end; what it leaves open is ended by the server."""
    if script.rival_ms:
        rival = server.connect()
        await rival.heard("session.queue_done")
        rival.send(init_frame())
        peer = server.connect(script.mode)
        await peer.heard("session.queued")
        _say(peer, script.early)
        await anyio.sleep(script.rival_ms / 1000)
        rival.vanish()
    else:
        peer = server.connect(script.mode)
        _say(peer, script.early)
    await peer.until(lambda: bool(peer.all("session.queue_done")))
    for init in script.inits:
        errors = len(peer.all("error"))
        peer.send(init)
        await peer.until(
            lambda before=errors: (
                bool(peer.all("session.created")) or len(peer.all("error")) > before
            )
        )
    await _act(peer, script)


def _say(peer: Peer, actions: tuple[Action, ...]) -> None:
    tables = {"bad_fields": BAD_FIELDS, "garbage": GARBAGE}
    for action in actions:
        assert isinstance(action, Say)
        peer.send(tables[action.table][action.number])


async def _act(peer: Peer, script: ClientScript) -> None:
    begin = 0
    for action in script.actions:
        if peer.is_over:
            return
        match action:
            case Wait(ms=ms):
                await anyio.sleep(ms / 1000)
            case Append():
                peer.send(_append_frame(action, script, begin))
                begin += action.samples
            case Say():
                _say(peer, (action,))
            case Close(reason=reason):
                body = {"type": "session.close"} | ({"reason": reason} if reason else {})
                peer.send(json.dumps(body))
            case Vanish():
                peer.vanish()
            case Stall():
                peer.stall()
    if script.actions and isinstance(script.actions[-1], Close):
        await peer.over()
    await anyio.sleep(0.5)


def _record(script: ClientScript, backend: Any, folder: Path, number: int) -> list[Path]:
    """Play a client to a server of its own; return the logs that came of it."""
    before = set(folder.iterdir())

    async def body() -> None:
        limits = {"limit_video_s": script.limit_s, "limit_audio_s": script.limit_s}
        async with world(backend, record_to=folder, **limits) as server:
            server.server._identities.drawn = number * IDENTITIES_A_WORLD
            await play(server, script)

    on_virtual_time(body)
    return sorted(set(folder.iterdir()) - before)


def scripted_backend(number: int, *, slots: int = 1) -> ScriptedBackend:
    """Make a scripted backend in which everything happens that can; `number` decides."""
    dice = SeededDice("backend", number)
    delay_s = dice.below(2000) / 1000
    fault = pick(dice, *[None] * 20, "fail", "gone", "context_full")
    return ScriptedBackend(
        random_script(number),
        slots=slots,
        opening=lambda _: Call(duration_s=delay_s, fault=fault),
        context_limit=pick(dice, 8192, 8192, 8192, 400),
        can_rollback=dice.below(8) != 7,
    )


def steady_backend(number: int) -> ScriptedBackend:
    """The same backend for a replay: its worker is not lost while it finalizes."""
    backend, script = scripted_backend(number), random_script(number)
    backend.script = lambda unit, seed: without_loss(script(unit, seed))
    return backend


def record_scripted(script: ClientScript, folder: Path, number: int) -> list[Path]:
    """Record a client of a scripted backend."""
    return _record(script, scripted_backend(number), folder, number)


def record_model(script: ClientScript, model: DuplexModel, folder: Path, number: int) -> list[Path]:
    """Record a client of a real model."""
    return _record(script, DirectBackend(model, number), folder, number)


# -- a model on virtual time ----------------------------------------------------------------------

STEPS: Final = 10
"""An interrupt is noticed within a tenth of the time that generating takes."""


class DirectBackend:
    """A blocking model as a `Backend`, without a thread; what goes wrong is drawn by `number`.

    A unit takes virtual time, during which it can be interrupted; then the model runs, cut at a
    place that is drawn. Some units fail, before the model has run or after it.
    """

    def __init__(self, model: DuplexModel, number: int) -> None:
        self.info = attrs.evolve(model.info, slots=1)
        self.violations: list[str] = []
        self._model = model
        self._number = number

    async def open(self, opening: Opening, *, slot: int) -> DirectSession:
        """Open a session, as `Backend.open` says."""
        dice = SeededDice("direct", self._number, opening.seed)
        await anyio.sleep(dice.below(1500) / 1000)
        from tests.models.blocking import open_session  # Here, as it loads torch.

        return DirectSession(open_session(self._model, opening), dice)


class DirectSession:
    """One session of a `DirectBackend`."""

    def __init__(self, session: BlockingSession, dice: Dice) -> None:
        self._session = session
        self._dice = dice
        self._interrupted = -1
        self._fed = False

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        return self._session.opened

    async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Let virtual time pass, then run the unit."""
        assert cut is None, "it only records"
        duration_s = pick(self._dice, 0.3, 0.6, 0.9, 1.6)
        fault = pick(self._dice, *[None] * 12, "before", "after")
        place = pick(self._dice, ("llm", 0), ("llm", 1), ("llm", 3), ("tts", 4), ("token2wav", 0))
        self._fed = False
        for _ in range(STEPS):
            await anyio.sleep(duration_s / STEPS)
            if self._interrupted == unit.index:
                break
        if fault == "before":
            raise BackendError("as was drawn, before the model has run")
        self._fed = True
        interrupted = self._interrupted == unit.index
        where = Cut(stage=place[0], step=place[1]) if interrupted else None
        result = self._session.run_unit(unit, where)
        if fault == "after":
            raise BackendError("as was drawn, after the model has run")
        return result

    def interrupt(self, index: int) -> None:
        """Cut unit `index`."""
        self._interrupted = index

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Finalize the unit."""
        await anyio.sleep(0.037)
        return self._session.finalize(index, interrupted=interrupted)

    async def rollback(self, index: int) -> None:
        """Undo the unit."""
        await anyio.sleep(0.01)
        if self._fed:
            self._session.rollback(index)

    async def release(self) -> None:
        """Give everything back."""
        await anyio.sleep(0.01)
        self._session.release()


def draw_and_record(
    number: int,
    folder: Path,
    record: Callable[[ClientScript, Path, int], list[Path]],
    *,
    audio_s_max: int = 10,
) -> list[Path]:
    """Record the client of a number."""
    script = client_script(SeededDice("client", number), audio_s_max=audio_s_max)
    return record(script, folder, number)
