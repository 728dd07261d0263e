"""A model on an engine as an async `Backend`: its sessions' units run in batches.

*The model's* calls are generators of requests, as those of `DuplexModel` and of what it makes; its
`info` says which of them it has. They run only in the engine's thread, unless marked as safe from
any thread. A call that makes a generator is safe from any thread: first it prepares pictures and
prompts, without changing anything.

*Rules*:
- A unit, as any call of its session, is due a second after the request; `Scheduler` has who goes
  first. Missed deadlines are counted (`Engine.statistics`). Streamed sound is due a second after it
  came; sound that comes faster than real time, such as a file, is due as if it had come in real
  time: it is answered as fast as possible, but after live clients.
- Each call waits in its own thread. Host work of a unit (decoding and slicing its pictures) runs
  there, before the engine.
- `interrupt` takes effect before the unit's next step, also while it waits for the engine.
- A running call is never abandoned: cancelling waits for it, so it cannot overlap the next (B4).
  For a call that never ends, the driver condemns the worker.
- A cut chat turn stops at its next picture, block or token, also while it waits; before its answer
  it fails. Chat is `BACKGROUND` work without a deadline, as are chunks of streaming requests
  without sound or a deadline of their own, and the past units of a rebuild, each a call.
- Pieces of an answer reach the event loop in order, through the waiting thread; if the waiting task
  is cancelled, the answer is cut.
- An unexpected exception of a model is logged and becomes a `BackendError` without its text.

Work that is not real-time may be gathered: calls are held back until every open session has one, so
that the engine's batches are large. Units wait until nothing shorter does (opening, closing a unit,
releasing), so sessions that were opened at different times come into step: all units together, then
all that closes them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
import attrs
from anyio import from_thread, to_thread

from protocol.values import model as md
from protocol.values.errors import LocalProtocolError
from protocol.values.limits import NS_PER_S

from ..backends.base import BackendError, BackendInfo, Emit, Forced, ForcedResult, ignore
from ..backends.streams import Anchoring, Extended, Part, Sampled, SamplingParams
from .engine import BACKGROUND, Engine

if TYPE_CHECKING:
    from ..backends.minicpmo.anchor import Anchor, Transcript
    from ..backends.minicpmo.chat import ChatTurn
    from ..backends.minicpmo.model import DuplexModel
    from ..backends.minicpmo.session import SteppedSession

# -- deadlines of streamed sound ----------------------------------------------------------------

DUE_S: Final = 1.0
"""Sound is due when its next second has come."""


@attrs.define
class Pace:
    """The pace of one stream; `came_s` is when its last chunk came, or was due in real time."""

    came_s: float = -math.inf

    def due_s(self, came_s: float, sound_s: float) -> float:
        """Take a chunk of `sound_s` seconds that came at `came_s`; return its deadline in s."""
        self.came_s = max(came_s, self.came_s + sound_s)
        return self.came_s + DUE_S


# -- sessions that wait for each other ----------------------------------------------------------

BARRIER_S: Final = 5.0
"""A call waits at most so long for others: a session may be open and ask for nothing."""
UNITS: Final = frozenset({"run_unit", "run_forced"})


class CallBarrier:
    """The waiting calls of all sessions of one engine, which may `expect` as many at once."""

    def __init__(self, expect: Callable[[int], None]) -> None:
        self._open, self._expect = 0, expect
        self._units, self._others = deque[anyio.Event](), deque[anyio.Event]()

    def opened(self) -> None:
        """Count a session that is about to be opened."""
        self._open += 1

    def released(self) -> None:
        """Count a session out."""
        self._open -= 1
        self._look()

    async def turn(self, name: str) -> None:
        """Wait until every open session has a call waiting, at most `BARRIER_S`."""
        waiting = self._units if name in UNITS else self._others
        turn = anyio.Event()
        waiting.append(turn)
        self._look()
        try:
            with anyio.move_on_after(BARRIER_S):
                await turn.wait()
        finally:
            if turn in waiting:
                waiting.remove(turn)

    def _look(self) -> None:
        if len(self._units) + len(self._others) >= self._open:
            waiting = self._others or self._units
            self._expect(len(waiting))
            while waiting:
                waiting.popleft().set()


# -- awaiting calls -----------------------------------------------------------------------------

Result = TypeVar("Result")
Piece = TypeVar("Piece")

THREADS_A_SLOT: Final = 2
"""Concurrent calls of a session: one, and a waiting release."""

_log = logging.getLogger("antiphon.model")


def _at_once(call: Callable[[], Result]) -> Generator[Any, Any, Result]:
    """A call without requests, as a generator."""
    return call()
    yield


class EngineCalls:
    """The calls of all sessions of one engine; `info` is the model's."""

    def __init__(
        self, engine: Engine, info: BackendInfo, barrier: CallBarrier | None = None
    ) -> None:
        self.info = info
        self._engine, self._barrier = engine, barrier
        self._threads = anyio.CapacityLimiter(THREADS_A_SLOT * info.slots)

    def opened(self) -> None:
        """Note that a session is about to be opened."""
        if self._barrier is not None:
            self._barrier.opened()

    def released(self) -> None:
        """Note that a session is released, or was not opened."""
        if self._barrier is not None:
            self._barrier.released()

    async def call(
        self,
        name: str,
        steps: Callable[[], Generator[Any, Any, Result]],
        *,
        due_ns: float = DUE_S * NS_PER_S,
    ) -> Result:
        """Run the generator that `steps` makes in its own thread, due in `due_ns` or `BACKGROUND`.

        `BackendError` is the model's own, or in place of an unexpected exception of `name`.
        """
        if self._barrier is not None:
            await self._barrier.turn(name)
            due_ns = BACKGROUND
        return await self.work(name, lambda: self._engine.submit(steps(), due_ns=due_ns).result())

    async def at_once(self, name: str, call: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread, between batches; it raises as `call` does."""
        return await self.call(name, lambda: _at_once(call))

    async def stream(
        self,
        name: str,
        steps: Callable[[Callable[[Piece], None]], Generator[Any, Any, Result]],
        emit: Callable[[Piece], None],
        interrupt: Callable[[], None],
        *,
        due_ns: float = BACKGROUND,
    ) -> Result:
        """Run a generator that emits pieces, and pass these to the event loop; see `call`.

        `steps` gets the taker of pieces; `interrupt` follows cancelling or a failed `emit`.
        """

        def run() -> Result:
            pieces: SimpleQueue[Piece | None] = SimpleQueue()
            future = self._engine.submit(steps(pieces.put), due_ns=due_ns)
            future.add_done_callback(lambda _: pieces.put(None))
            try:
                while (piece := pieces.get()) is not None:
                    from_thread.run_sync(emit, piece)
                    from_thread.check_cancelled()
            except BaseException:  # Cancelled, by the event loop's own exception, or `emit` failed.
                interrupt()
                wait((future,))
                raise
            return future.result()

        return await self.work(name, run)

    async def work(self, name: str, work: Callable[[], Result]) -> Result:
        """Run a function in its own thread; cancelling waits for it. It raises as `call` does."""
        try:
            return await to_thread.run_sync(work, limiter=self._threads)
        except BackendError:
            raise
        except Exception as mistake:
            _log.exception("the model's %s failed", name)
            raise BackendError(f"{name} failed") from mistake


# -- the backend --------------------------------------------------------------------------------

BATCH_MAX: Final = 64
"""Maximum requests per batch; more sessions than one engine is expected to hold."""
CHUNK_S: Final = md.UNIT_SAMPLES / md.INPUT_RATE_HZ
"""Seconds of a transcription's chunk."""


class EngineBackend:
    """A model behind the `Backend` protocol; `batch_max` 1 runs one request at a time.

    Unless `is_live`, the calls of open sessions wait for each other (`CallBarrier`).
    """

    def __init__(
        self, model: DuplexModel, *, batch_max: int = BATCH_MAX, is_live: bool = True
    ) -> None:
        self._model = model
        self.engine = Engine(model.compute, batch_max=batch_max)
        barrier = None if is_live else CallBarrier(self.engine.expect)
        self._calls = EngineCalls(self.engine, model.info, barrier)

    @property
    def info(self) -> BackendInfo:
        """The model's metadata."""
        return self._model.info

    async def aclose(self) -> None:
        """Stop the engine; waiting calls fail, a hanging one keeps hanging."""
        self.engine.stop()

    async def open(self, opening: md.Opening, *, slot: int) -> EngineSession:
        """Open a session; if cancelled meanwhile, it is still opened and returned to the caller."""
        self._check(slot)
        session = EngineSession(self._model.session(opening, slot=slot), self._calls)
        self._calls.opened()
        try:
            await self._calls.call("open", session.stepped.open)
        except BaseException:
            self._calls.released()
            raise
        return session

    async def chat(self, *, slot: int) -> EngineTurn:
        """Take a slot for a turn; `BackendError` if the model does not chat."""
        self._check(slot, "chat", "does not chat")
        return EngineTurn(self._model.chat(slot=slot), self._calls)

    async def anchor(self, anchoring: Anchoring, *, slot: int) -> EngineAnchor:
        """Take a streaming request; `BackendError` if the model takes none."""
        self._check(slot)
        return EngineAnchor(self._streams().anchor(anchoring, slot=slot), self._calls)

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name; `BackendError` if the model takes no streaming input."""
        return self._streams().token_id(name)

    async def transcribe(self, *, slot: int) -> EngineTranscript:
        """Take a transcription; `BackendError` if the model does not transcribe."""
        self._check(slot, "transcription", "does not transcribe")
        return EngineTranscript(self._model.transcript(slot=slot), self._calls)

    def _streams(self) -> DuplexModel:
        if not hasattr(self._model, "anchor"):
            raise BackendError(f"model {self.info.name} takes no streaming input")
        return self._model

    def _check(self, slot: int, mode: str = "", lacks: str = "") -> None:
        """Check a slot, and if given that the model has a mode, else `lacks` says it in words."""
        if not 0 <= slot < self.info.slots:
            raise LocalProtocolError(f"slot {slot} of {self.info.slots}")
        if mode and mode not in self.info.modes:
            raise BackendError(f"model {self.info.name} {lacks}")


Held = TypeVar("Held", bound="SteppedSession | ChatTurn | Anchor | Transcript")


@attrs.define(eq=False)
class _OnEngine(Generic[Held]):
    """What an engine holds for a session; `stepped` is its state."""

    stepped: Held
    _calls: EngineCalls

    def interrupt(self, index: int = -1) -> None:
        """Cut unit `index`, or all else, running or waiting for the engine; never blocks."""
        self.stepped.interrupt(index)

    async def release(self) -> None:
        """Free everything it holds; after a `BackendError` the slot is unsafe to reuse."""
        await self._calls.at_once("release", self.stepped.release)


@attrs.define(eq=False)
class EngineSession(_OnEngine["SteppedSession"]):
    """One session on an engine; `stepped` is its state."""

    @property
    def opened(self) -> md.Opened:
        """The result of opening."""
        return self.stepped.opened

    async def release(self) -> None:
        """As `_OnEngine.release`; other sessions wait for this one no more."""
        try:
            await super().release()
        finally:
            self._calls.released()

    async def run(self, unit: md.Unit, cut: md.Cut | None = None) -> md.UnitResult:
        """Prefill and generate one unit."""
        return await self._calls.call("run_unit", partial(self.stepped.unit, unit, cut))

    async def run_forced(
        self, unit: md.Unit, forced: Forced, cut: md.Cut | None = None
    ) -> ForcedResult:
        """Prefill and generate one unit as recorded."""
        steps = partial(self.stepped.forced_unit, unit, cut, forced)
        return await self._calls.call("run_forced", steps)

    async def finalize(self, index: int, *, interrupted: bool) -> md.Finalized:
        """Close the unit."""
        steps = partial(self.stepped.finalize, index, interrupted=interrupted)
        return await self._calls.call("finalize", steps)

    async def finalize_again(
        self, index: int, *, interrupted: bool, silent: md.Silent | None, forced: bool
    ) -> md.Finalized:
        """Close the unit, with its silent part as it was recorded."""
        steps = partial(
            self.stepped.finalize_again,
            index,
            interrupted=interrupted,
            silent=silent,
            forced=forced,
        )
        return await self._calls.call("finalize", steps)

    async def rollback(self, index: int) -> None:
        """Undo the failed unit."""
        await self._calls.at_once("rollback", lambda: self.stepped.rollback(index))

    async def rebuild(self, past: Sequence[md.PastUnit], *, exact: bool) -> md.Finalized:
        """Feed past units, unit by unit in the background; `BackendError` if the model cannot."""
        if not 1 <= len(past) <= md.PAST_UNITS_MAX:
            raise LocalProtocolError(f"{len(past)} past units, not 1 to {md.PAST_UNITS_MAX}")
        if not self._calls.info.can_rebuild:
            raise BackendError(f"model {self._calls.info.name} cannot be rebuilt")
        for each in past:
            steps = partial(self.stepped.rebuild, each, exact=exact, is_last=each is past[-1])
            finalized = await self._calls.call("rebuild", steps, due_ns=BACKGROUND)
        return finalized


@attrs.define(eq=False)
class EngineTurn(_OnEngine["ChatTurn"]):
    """One chat turn on an engine; `stepped` is its state."""

    async def run(
        self, turn: md.Turn, cut: md.Cut | None = None, *, emit: Emit = ignore
    ) -> md.TurnResult:
        """Feed the conversation, its pictures one by one, and answer."""
        stepped, calls = self.stepped, self._calls
        for place in range(await calls.work("measure", partial(stepped.measure, turn))):
            await calls.call("see", partial(stepped.see, place), due_ns=BACKGROUND)
        emit(await calls.call("prefill", stepped.prefill, due_ns=BACKGROUND))
        steps = partial(stepped.generate, cut=None if cut is None else cut.step)
        return await calls.stream("generate", steps, emit, stepped.interrupt)


@attrs.define(eq=False)
class EngineAnchor(_OnEngine["Anchor"]):
    """One streaming request on an engine; `stepped` is its state."""

    async def extend(
        self,
        prompt: Sequence[Part],
        params: SamplingParams,
        emit: Callable[[Sampled], None],
        *,
        due_s: float | None = None,
    ) -> Extended:
        """Extend the cumulative prompt and sample after it."""
        steps = partial(self.stepped.extend, prompt, params)
        due_ns = BACKGROUND if due_s is None else due_s * NS_PER_S
        return await self._calls.stream("extend", steps, emit, self.interrupt, due_ns=due_ns)


@attrs.define(eq=False)
class EngineTranscript(_OnEngine["Transcript"]):
    """One transcription on an engine; `stepped` is its state."""

    _pace: Pace = attrs.field(factory=Pace)

    async def run(self, chunk: md.Chunk, cut: md.Cut | None = None) -> md.ChunkResult:  # noqa: ARG002
        """Transcribe a second of an utterance."""
        now_s = anyio.current_time()
        due_s = self._pace.due_s(now_s, CHUNK_S) - now_s
        steps = partial(self.stepped.chunk, chunk)
        return await self._calls.call("run_chunk", steps, due_ns=due_s * NS_PER_S)
