"""Plays a case to a server over any connection, and to a server in memory.

- The client sends, waits, breaks, and closes as the case says. The judge finds wrong answers, this
  one missing ones. A well-behaved client, the probe, must get a session after any case.
- The server in memory (`LocalTarget`) is the real one with a scripted model and all its telemetry,
  without sockets; each case gets a new one, so that findings repeat. Its clock leaps when no task
  can run. After a case every slot must be back, no model rule broken, and no error logged.
"""

from __future__ import annotations

import json
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.lowlevel
import attrs

from protocol.values.effects import DecodeMedia
from protocol.values.limits import MODES, OF_MODE, Mode
from protocol.values.model import UNIT_SAMPLES, Unit
from protocol.values.state import SessionKind
from protocol.wire.codec import frame_bytes
from recorder.write.writer import Recorder
from runtime.media.decoder import Client, MediaDecoder
from runtime.media.values import Decoded
from runtime.model.backends.scripted import (
    SLOTS,
    Script,
    ScriptedBackend,
    Speaks,
    calling,
    default_script,
)
from runtime.model.backends.scripted import Step as ModelStep
from runtime.model.backends.scripted_chat import tone
from runtime.net.connection import WebSocket, WebSocketClosed, deliver_received
from runtime.serve.routing import Route, route
from runtime.session.server import Server
from runtime.session.setup import SessionSpec
from runtime.settings.settings import Settings
from runtime.telemetry.metrics import make_telemetry
from runtime.telemetry.watching import ServerStatus
from tests.fuzz.case import (
    MATERIAL_BYTES_MAX,
    OPENAI_DIALECTS,
    SENDS,
    TOLD,
    Case,
    Finding,
    Outcome,
    Step,
    fill,
)
from tests.fuzz.judge import ABNORMAL, Judge
from tests.sessions.identities import CountedIdentities

# -- a client that plays a case -------------------------------------------------------------------

PROBE_AUDIO: Final = {"$pcm": UNIT_SAMPLES}
PROBE_AUDIO16: Final = {"$wav": 2}
"""Samples of 16 bits, after a head that is heard as a click; more than a second at any rate."""
WAIT_S_MAX: Final = 700.0
"""Longer than any session may last."""
SILENCE_S: Final = 1.0
"""After the end: time for messages that must not come."""


class Broken(Exception):  # noqa: N818 - an end, not an error
    """The connection takes nothing more; the judge knows why."""


class FuzzerError(BaseException):
    """The fuzzer itself is broken; no `Exception`, so that no server or Hypothesis handles it."""


@contextmanager
def ours() -> Iterator[None]:
    """Turn an error within the block into `FuzzerError`."""
    try:
        yield
    except Broken:
        raise
    except Exception as error:
        raise FuzzerError(f"{type(error).__name__}: {error}") from error


def own_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The fuzzer's own error in a group, or the group."""
    for error in group.exceptions:
        found = own_of(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, FuzzerError):
            return found
    return group


class Wire(Protocol):
    """One connection to a server; its judge gets what arrives."""

    async def send(self, frame: str | bytes | None) -> None:
        """Send a message; None is one above every limit. Raises `Broken`."""

    async def raw(self, data: bytes, /) -> None:
        """Put bytes on the connection unchanged. Raises `Broken`."""

    async def fault(self, name: str) -> None:
        """Cause one of `case.FAULTS`. Raises `Broken`."""

    async def leave(self) -> None:
        """Close in order, if it is open."""


Connect = Callable[[str, Judge], AbstractAsyncContextManager[Wire]]
"""Opens a connection to a path and query, for a judge."""


@attrs.frozen(kw_only=True)
class Pace:
    """Time limits.

    Attributes:
        answer_s: for an answer; longer is a hang.
        quiet_s: after messages in a row, before the next wait.
        wait_scale: multiplies a case's waits.
        silence_s: after the end, for messages that must not come.
    """

    answer_s: float
    quiet_s: float
    wait_scale: float = 1.0
    silence_s: float = SILENCE_S


class Player:
    """Plays one case."""

    def __init__(self, case: Case, judge: Judge, connect: Connect, pace: Pace) -> None:
        self._case = case
        self._judge = judge
        self._connect = connect
        self._pace = pace
        self._is_deaf = False
        self._is_mute = False
        self._is_left = False
        self._occupant: AbstractAsyncContextManager[Wire] | None = None

    async def play(self) -> None:
        """Play it to the end of its connection."""
        try:
            if self._case.steps and self._case.steps[0].kind == "occupy":
                await self._occupy()
            async with self._connect(self._case.connect, self._judge) as wire:
                try:
                    for step in self._case.steps:
                        await self._do(step, wire)
                    await self._finish(wire)
                except Broken:
                    await self._judge.until(lambda: False, self._pace.answer_s)
                await anyio.sleep(self._pace.silence_s)
                await wire.leave()
        finally:
            await self._vacate()

    async def _do(self, step: Step, wire: Wire) -> None:
        judge = self._judge
        if judge.is_over or self._is_left or step.kind in TOLD:
            return
        judge.did(step)
        match step.kind:
            case kind if kind in SENDS:
                with ours():
                    bytes_max = OF_MODE[self._case.mode].frame_bytes_max
                    frame = frame_of(step, bytes_max, judge.calls)
                    judge.says(frame)
                await wire.send(frame)
            case "await" if step.value == "turn":
                await self._await_turn()
            case "await":
                await self._await_answer()
            case "raw":
                judge.broke = True
                await wire.raw(bytes.fromhex(step.value))
            case "wait_s":
                await anyio.sleep(min(float(step.value), WAIT_S_MAX) * self._pace.wait_scale)
            case "fault":
                await self._break(step.value, wire)
            case "leave":
                self._is_left = judge.broke = True
                await wire.leave()
            case "vacate":
                await self._vacate()

    async def _break(self, name: str, wire: Wire) -> None:
        self._is_left |= name == "reset"
        self._is_mute |= name == "half_close"
        self._is_deaf |= name == "stall"
        self._judge.broke |= name in {"reset", "half_close", "stall"}
        await wire.fault(name)

    # -- waiting --------------------------------------------------------------------------------

    async def _await_turn(self) -> None:
        judge = self._judge
        if self._is_deaf or judge.holds_slot or self._case.session_kind is SessionKind.REQUEST:
            return
        begun = await judge.until(lambda: judge.has_slot, self._pace.answer_s)
        if not begun and not judge.queued:
            judge.found("hang", "no answer to a connection")

    async def _await_answer(self) -> None:
        judge = self._judge
        if self._is_deaf or judge.owed is None:
            return
        if not judge.is_sure:
            await judge.until(lambda: False, self._pace.quiet_s)
            judge.settle()
        elif not await judge.until(lambda: judge.owed is None, self._pace.answer_s):
            judge.miss()

    # -- the end --------------------------------------------------------------------------------

    async def _finish(self, wire: Wire) -> None:
        """Close as a client should, unless the case has left; the server must follow."""
        judge = self._judge
        if self._is_left or self._is_deaf:
            return
        if self._case.session_kind is SessionKind.REQUEST and not judge.said:
            judge.broke = True
            await wire.leave()
            return
        await self._await_answer()
        if (
            self._case.session_kind is SessionKind.TRANSCRIPTION
            or self._case.dialect in OPENAI_DIALECTS
        ):
            # These have no goodbye.
            judge.broke = True
            await wire.leave()
            return
        if (
            not judge.is_over
            and not self._is_mute
            and self._case.session_kind is not SessionKind.REQUEST
        ):
            goodbye = close_of(self._case.dialect)
            judge.did(Step(kind="bye", value=goodbye))
            judge.says(json.dumps(goodbye))
            await wire.send(json.dumps(goodbye))
        if not await judge.until(lambda: False, self._pace.answer_s):
            judge.found("hang", f"no end in {judge.state}")

    # -- the other client -----------------------------------------------------------------------

    async def _occupy(self) -> None:
        other = Judge(attrs.evolve(self._case, steps=()))
        self._occupant = self._connect(self._case.connect, other)
        await self._occupant.__aenter__()
        await other.until(lambda: other.has_slot, self._pace.answer_s)
        self._judge.holds_slot = other.has_slot

    async def _vacate(self) -> None:
        self._judge.holds_slot = False
        occupant, self._occupant = self._occupant, None
        if occupant is not None:
            await occupant.__aexit__(None, None, None)


def frame_of(step: Step, bytes_max: int, calls: Sequence[str] = ()) -> str | bytes | None:
    """A step's message, with its markers replaced, or `MarkerError`; None above `bytes_max`."""
    match step.kind:
        case "send":
            frame: str | bytes = json.dumps(fill(step.value, calls), ensure_ascii=False)
        case "send_text":
            frame = str(step.value)
        case "send_binary":
            frame = bytes(min(int(step.value), MATERIAL_BYTES_MAX))
        case _:
            size = int(step.value)
            return None if size > bytes_max else "\u00e9" * (size // 2)
    return None if frame_bytes(frame) > bytes_max else frame


def close_of(dialect: str) -> dict[str, Any]:
    """A dialect's message that ends a session."""
    return {"type": "stop" if dialect == "legacy-duplex" else "session.close"}


# -- afterwards -----------------------------------------------------------------------------------


def probe_case(case: Case, *, with_sound: bool) -> Case:
    """The case of a well-behaved client after another case, with a second of sound if wanted."""
    steps = [Step(kind="await", value="turn"), Step(kind="send", value=init_of(case))]
    steps.append(Step(kind="await", value="answer"))
    if (
        with_sound
        and case.session_kind is SessionKind.DUPLEX
        and case.script in {"default", "speaks"}
    ):
        steps += [Step(kind="send", value=append_of(case)), Step(kind="await", value="answer")]
    if case.session_kind is SessionKind.TRANSCRIPTION:
        steps += [Step(kind="send", value=append_of(case))] if with_sound else []
        commit = {"type": "input_audio_buffer.commit", "final": True}
        steps += [Step(kind="send", value=commit), Step(kind="await", value="answer")]
    return attrs.evolve(case, steps=tuple(steps), slots=None)


async def probe(
    case: Case, judge: Judge, connect: Connect, pace: Pace, *, with_sound: bool
) -> None:
    """Play a well-behaved client after a case, and add its findings to the case's."""
    good = probe_case(case, with_sound=with_sound)
    other = Judge(good)
    await Player(good, other, connect, pace).play()
    for finding in other.findings:
        judge.found(finding.kind, f"afterwards: {finding.label}", finding.detail)


def init_of(case: Case, tools: Sequence[Any] = ()) -> dict[str, Any]:
    """The shortest first message of a session; tools are for `realtime` and `duplex-v1`."""
    offered = {"tools": [*tools]} if tools else {}
    match case.dialect:
        case "duplex-v1":
            return {"type": "session.update", "session": {"instructions": "", **offered}}
        case "legacy-duplex":
            return {"type": "prepare", "system_prompt": ""}
        case "legacy-chat":
            return {"messages": [{"role": "user", "content": "hello"}], "tts": {"enabled": False}}
        case "transcription":
            return {"type": "session.update", "model": "tiny"}
        case "transcription-responses":
            return {"type": "session.create", "model": "tiny"}
        case "live":
            return {"type": "session.start", "session": {"model": "tiny"}}
        case "openai":
            return {"type": "session.update", "session": {"type": "realtime"}}
        case "openai-transcription":
            return {"type": "session.update", "session": {"type": "transcription"}}
        case "vllm-omni":
            return {"type": "session.update", "session": {}}
    return {"type": "session.init", "payload": offered}


def append_of(case: Case) -> dict[str, Any]:
    """A message with a second of sound."""
    match case.dialect:
        case "legacy-duplex":
            return {"type": "audio_chunk", "audio": PROBE_AUDIO}
        case "live":
            return {"type": "session.input_audio.append", "audio": PROBE_AUDIO16}
        case "realtime":
            return {"type": "input.append", "input": {"audio": PROBE_AUDIO}}
        case "duplex-v1":
            return {"type": "input_audio_buffer.append", "audio": PROBE_AUDIO}
    return {"type": "input_audio_buffer.append", "audio": PROBE_AUDIO16}


# -- a server in memory ---------------------------------------------------------------------------

PACE: Final = Pace(answer_s=12.0, quiet_s=4.0)
"""Below the 30 s after which an idle session is closed, so that a hang is seen as one."""
NAMED: Final[Mapping[str, Any]] = {"served_model_names": ("tiny",)}
"""The model name of every case's transcription, on any server."""
EMPTY_WAIT_S: Final = 60.0
"""Longer than the waits for a stalled reader and then a hanging call."""
DETAIL_CHARS: Final = 400
"""Of a log record: a line or two."""
CPU_S_MAX: Final = 20.0
"""Of one case, which takes a hundredth; a slower parser could be made slower still."""


def _speaks(unit: Unit, seed: int) -> ModelStep:
    """Speak a word a unit from the first on; every third ends the turn."""
    pcm = tone(unit.index, seed, samples=24_000)
    speech = Speaks(text=f"word {unit.index} ", pcm=pcm, end_of_turn=unit.index % 3 == 2)
    return ModelStep(speech=speech, generate_s=0.4, steps=8)


SCRIPTS: Final[Mapping[str, Script]] = MappingProxyType(
    {
        "default": default_script,
        "speaks": _speaks,
        "fails": lambda _unit, _seed: ModelStep(fault="fail"),
        "lost": lambda _unit, _seed: ModelStep(fault="gone"),
        "full": lambda _unit, _seed: ModelStep(fault="context_full"),
        "calls": lambda unit, _seed: ModelStep(silent_fails=unit.index % 9 == 8),
    }
)
"""The model's behaviour; three are faults, and the last calls tools in each second."""

Handle = Callable[[WebSocket, Route], Coroutine[Any, Any, None]]
"""Serves one WebSocket to its end."""


class LeapingClock:
    """A clock for trio that leaps to the next deadline when no task can run."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def start_clock(self) -> None:
        """Nothing to do."""

    def current_time(self) -> float:
        """The time in seconds."""
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Leap to a deadline; 0 seconds of sleep are left."""
        if math.isinf(deadline):
            return deadline
        self._now_s = max(self._now_s, deadline)
        return 0.0


class MemoryWire:
    """One WebSocket in memory: the client's end, and in `server_end` the server's.

    The server gets None for a message above `bytes_max`, as from a real WebSocket.
    """

    def __init__(self, judge: Judge, bytes_max: int) -> None:
        self._judge = judge
        self._bytes_max = bytes_max
        self._to_server: list[str | bytes | None] = []
        self._is_mute = self._is_gone = self._is_deaf = self._is_closed = False
        self._changed = anyio.Event()

    # -- the client's end -----------------------------------------------------------------------

    async def send(self, frame: str | bytes | None) -> None:
        """As `Wire`."""
        if self._is_mute or self._is_gone or self._is_closed:
            raise Broken
        is_too_big = frame is not None and frame_bytes(frame) > self._bytes_max
        self._to_server.append(None if is_too_big else frame)
        self._notify()

    async def raw(self, _data: bytes, /) -> None:
        """Drop the connection: in memory invalid bytes can do no more."""
        await self.fault("reset")

    async def fault(self, name: str) -> None:
        """As `Wire`; faults of sockets have no effect."""
        self._is_gone |= name == "reset"
        self._is_mute |= name == "half_close"
        self._is_deaf |= name == "stall"
        self._notify()

    async def leave(self) -> None:
        """As `Wire`."""
        self._is_gone = True
        self._notify()

    # -- the server's end: see `runtime.net.connection.WebSocket`
    # -------------------------------------

    async def receive(self) -> str | bytes | None:
        """The server's next message."""
        while not self._to_server:
            if self._is_gone or self._is_mute or self._is_closed:
                raise WebSocketClosed(ABNORMAL, "")
            changed = self._changed
            await changed.wait()
        await anyio.lowlevel.checkpoint()
        return self._to_server.pop(0)

    async def take(self, *frames: str) -> None:
        """Take messages of the server."""
        await anyio.lowlevel.checkpoint()
        if self._is_gone or self._is_closed:
            raise WebSocketClosed(ABNORMAL, "")
        if self._is_deaf:
            await anyio.sleep_forever()
        for frame in frames:
            with ours():
                self._judge.heard(frame)

    async def close(self, code: int, reason: str) -> None:
        """Take the server's close."""
        if not self._is_closed and not self._is_gone:
            with ours():
                self._judge.closed(code, reason)
        self._is_closed = True
        self._notify()
        await anyio.lowlevel.checkpoint()

    async def abort(self) -> None:
        """The server aborts."""
        await self.close(ABNORMAL, "")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def server_end(self) -> WebSocket:
        """The `WebSocket` for the server."""
        return _ServerEnd(self)


class _ServerEnd:
    deliver = deliver_received

    def __init__(self, wire: MemoryWire) -> None:
        self.receive = wire.receive
        self.send = wire.take
        self.close = wire.close
        self.abort = wire.abort


class _ErrorLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[Finding] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, named by its exception or by its unformatted text."""
        error = record.exc_info[1] if record.exc_info else None
        label, detail = str(record.msg), record.getMessage()
        if error is not None:
            label, detail = _named(error), f"{detail}: {error}"
        self.found.append(Finding(kind="crash", label=label, detail=detail[:DETAIL_CHARS]))


def _named(error: BaseException) -> str:
    """An exception's class and the function that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}"


class LocalTarget:
    """Plays cases to servers in memory, with logs in `record_to`; tests plant bugs with `wrap`."""

    is_local = True

    def __init__(
        self,
        wrap: Callable[[Handle], Handle] = lambda handle: handle,
        record_to: Path | None = None,
    ) -> None:
        self._wrap = wrap
        self._record_to = record_to
        self._watching = make_telemetry(_nobody_asks, version="", traces=False).hub

    def run(self, case: Case) -> Outcome:
        """Play one case to a new server; raises `FuzzerError` if the fuzzer is broken."""
        log, judge = _ErrorLog(), Judge(case)
        root = logging.getLogger()
        quiet = logging.getLogger("antiphon")
        was = quiet.propagate
        root.addHandler(log)
        quiet.addHandler(log)
        quiet.propagate = False
        began_s = time.process_time()
        options: dict[str, Any] = {"clock": LeapingClock()}
        try:
            anyio.run(self._run, case, judge, backend="trio", backend_options=options)
        except BaseExceptionGroup as group:
            raise own_of(group) from group
        finally:
            root.removeHandler(log)
            quiet.removeHandler(log)
            quiet.propagate = was
        took_s = time.process_time() - began_s
        if took_s > CPU_S_MAX:
            judge.found("hang", "a case takes too long to compute", f"{took_s:.1f} s")
        return Outcome(
            findings=(*log.found, *judge.findings), told=tuple(judge.told), pairs=judge.pairs
        )

    async def _run(self, case: Case, judge: Judge) -> None:
        backend = ScriptedBackend(
            SCRIPTS[case.script],
            slots=case.slots or SLOTS,
            duplex_tools=case.script == "calls",
            calls=calling(at=0, every=1),
        )
        is_recorded = self._record_to is not None
        recorder = Recorder(clock=lambda: 0.0, inline=True) if is_recorded else None
        try:
            async with anyio.create_task_group() as tasks:
                server = Server(
                    Settings(model="scripted", record_to=self._record_to, **NAMED),
                    backend,
                    tasks=tasks,
                    recorder=recorder,
                    identities=CountedIdentities(),
                    decode_media=_decode_here,
                    telemetry=self._watching,
                )
                tasks.start_soon(server.refresh)
                serve = self._wrap(_handler(server))
                connect = partial(_connect, tasks, serve)
                with ours():
                    await Player(case, judge, connect, PACE).play()
                await _check_left(server, backend, judge)
                with ours():
                    await probe(case, judge, connect, PACE, with_sound=True)
                await _check_left(server, backend, judge)
                tasks.cancel_scope.cancel()
        except Exception as error:
            judge.found("crash", _named(error), str(error))
        finally:
            if recorder is not None:
                recorder.close()


def _handler(server: Server) -> Handle:
    async def handle(websocket: WebSocket, to: Route) -> None:
        await server.handle(
            websocket, SessionSpec(mode=to.mode, endpoint=to.endpoint, label=to.label)
        )

    return handle


@asynccontextmanager
async def _connect(
    tasks: anyio.abc.TaskGroup, serve: Handle, address: str, judge: Judge
) -> AsyncIterator[Wire]:
    parts = urlsplit(address)
    default: Mode = "video"
    to = route(parts.path, parse_qs(parts.query), MODES, default=default)
    wire = MemoryWire(judge, OF_MODE[to.mode].frame_bytes_max)
    tasks.start_soon(serve, wire.server_end, to)
    try:
        yield wire
    finally:
        await wire.leave()


async def _check_left(server: Server, backend: ScriptedBackend, judge: Judge) -> None:
    """After a session its slot must be back, and no rule broken (B5)."""
    with anyio.move_on_after(EMPTY_WAIT_S) as scope:
        await server.wait_until_empty()
    if scope.cancelled_caught:
        judge.found("leak", "a session goes on without its client")
    if backend.held_slots:
        judge.found("leak", "a slot is not back", f"slots {sorted(backend.held_slots)}")
    if server.readiness != "ready":
        judge.found("leak", f"the server is {server.readiness}")
    for rule in backend.violations:
        judge.found("crash", "a rule of the model is broken", rule)


def _nobody_asks() -> ServerStatus:
    raise AssertionError("a server in memory has no readers of metrics")


async def _decode_here(effect: DecodeMedia, _client: Client) -> Decoded:
    """Decode in this thread: with another one the clock would run ahead."""
    await anyio.lowlevel.checkpoint()
    return MediaDecoder().decode_here(effect)
