"""A model on an engine as an async `Backend`: its sessions' units run together.

Rules:

- A call has a deadline: a unit is due a second after it was asked for, and so is the rest; what is
  due first goes first. A unit that ends later is counted (`Engine.statistics`).
- What one unit needs of the host alone (decoding and cutting its pictures) is done in a thread of
  its own, before it is handed to the engine.
- `interrupt` takes effect before the unit's next step. Where it comes while its unit still waits
  for the engine, the unit is cut before its first step, as the log tells and a replay repeats.
- A call that has begun is never abandoned: cancelling waits for it, so that nothing of it can run
  beside what comes next (B4). One that never ends is its worker's end: the driver condemns it.
- A turn of chat that is cut goes no further than its next picture, block or token: also where it
  waits for the engine. Before its answer began it fails.
- Chat is nobody's deadline: it is `BACKGROUND` work, computed with the units of sessions or where
  no unit waits. Its pieces cross from the engine's thread to the event loop in their order, through
  the thread that waits for the answer. Where the task that waits is cancelled, the answer is cut.
- What a model raises by mistake is logged here and becomes a `BackendError` without its text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import anyio
import attrs
from anyio import from_thread, to_thread

from protocol.errors import LocalProtocolError
from protocol.model import Cut, Finalized, Opened, Opening, Unit, UnitResult
from protocol.turn import Prefill, Turn, TurnChunk, TurnResult

from ..backends.base import BackendError, BackendInfo
from ..backends.forcing import Forced, ForcedResult
from ..backends.streams import Anchoring
from .engine import Engine
from .scheduler import BACKGROUND
from .stepped import (
    SteppedChats,
    SteppedForces,
    SteppedModel,
    SteppedSession,
    SteppedStreams,
    SteppedTranscribes,
    SteppedTurn,
)
from .streams import EngineAnchor, EngineTranscript

Result = TypeVar("Result")
Piece = TypeVar("Piece")

DUE_NS: Final = 1_000_000_000
"""A unit is due when the next second of sound has come."""
BATCH_MAX: Final = 64
"""Requests answered together; more sessions than one engine is expected to hold."""
THREADS_A_SLOT: Final = 2
"""Calls of a session that wait at once: one, and a release that waits behind it."""

_log = logging.getLogger(__name__)


def _at_once(call: Callable[[], Result]) -> Generator[Any, Any, Result]:
    """A call without requests, as a generator."""
    return call()
    yield


class EngineBackend:
    """A model behind the `Backend` protocol.

    Args:
        model: shared by all sessions.
        batch_max: most requests answered together; 1 runs one at a time.
    """

    def __init__(self, model: SteppedModel, *, batch_max: int = BATCH_MAX) -> None:
        self._model = model
        self.engine = Engine(model.compute, batch_max=batch_max)
        self._threads = anyio.CapacityLimiter(THREADS_A_SLOT * model.info.slots)

    @property
    def info(self) -> BackendInfo:
        """What it is; constant while it runs."""
        return self._model.info

    async def aclose(self) -> None:
        """Stop the engine (`Closes`); calls that wait fail, one that hangs goes on hanging."""
        self.engine.stop()

    async def open(self, opening: Opening, *, slot: int) -> EngineSession:
        """Open a session, as `Backend.open` says.

        Cancelled while the model opens it, it is opened nevertheless, returned, and the caller's.
        """
        self._check(slot)
        session = EngineSession(self._model.session(opening, slot=slot), self)
        await self.call("open", session.stepped.open)
        return session

    async def chat(self, turn: Turn, *, slot: int) -> EngineTurn:
        """Take a turn of chat, as `Chats.chat` says.

        Raises:
            BackendError: the model does not chat.
        """
        self._check(slot)
        if not isinstance(self._model, SteppedChats):
            raise BackendError(f"model {self.info.name} does not chat")
        return EngineTurn(self._model.chat(turn, slot=slot), self)

    async def anchor(self, anchoring: Anchoring, *, slot: int) -> EngineAnchor:
        """Take a request with streaming input, as `Streams.anchor` says.

        Raises:
            BackendError: the model takes none.
        """
        self._check(slot)
        return EngineAnchor(self._streams().anchor(anchoring, slot=slot), self)

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name, as `Streams.token_id` says.

        Raises:
            BackendError: the model takes no streaming input.
        """
        return self._streams().token_id(name)

    async def transcribe(self, *, slot: int) -> EngineTranscript:
        """Take a transcription, as `Transcribes.transcribe` says.

        Raises:
            BackendError: the model does not transcribe.
        """
        self._check(slot)
        model = self._model
        if "transcription" not in self.info.modes or not isinstance(model, SteppedTranscribes):
            raise BackendError(f"model {self.info.name} does not transcribe")
        return EngineTranscript(model.transcript(slot=slot), self)

    def _streams(self) -> SteppedStreams:
        if not isinstance(self._model, SteppedStreams):
            raise BackendError(f"model {self.info.name} takes no streaming input")
        return self._model

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.info.slots:
            raise LocalProtocolError(f"slot {slot} of {self.info.slots}")

    async def call(
        self,
        name: str,
        steps: Callable[[], Generator[Any, Any, Result]],
        *,
        due_ns: float = DUE_NS,
    ) -> Result:
        """Run a generator on the engine.

        Args:
            name: of the call, for the log and the error.
            steps: makes the generator, in a thread of its own.
            due_ns: nanoseconds until its result is due, or `BACKGROUND`.

        Raises:
            BackendError: it failed: as the model raised it, or in place of its mistake.
        """
        return await self.work(name, lambda: self.engine.submit(steps(), due_ns=due_ns).result())

    async def at_once(self, name: str, call: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread, between batches; it raises as `call` does."""
        return await self.call(name, lambda: _at_once(call))

    async def tell(
        self,
        name: str,
        steps: Callable[[Callable[[Piece], None]], Generator[Any, Any, Result]],
        emit: Callable[[Piece], None],
        interrupt: Callable[[], None],
        *,
        due_ns: float = BACKGROUND,
    ) -> Result:
        """Run a generator that tells pieces as it goes, and hand these to the event loop.

        Args:
            name: of the call, for the log and the error.
            steps: makes the generator, in a thread of its own; it is given whom to tell.
            emit: told each piece, in order, from the event loop.
            interrupt: cuts the generator: where this is cancelled, or `emit` fails.
            due_ns: as of `call`.

        Raises:
            BackendError: it failed: as the model raised it, or in place of its mistake.
        """

        def tell() -> Result:
            pieces: SimpleQueue[Piece | None] = SimpleQueue()
            future = self.engine.submit(steps(pieces.put), due_ns=due_ns)
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

        return await self.work(name, tell)

    async def work(self, name: str, work: Callable[[], Result]) -> Result:
        """Run a function in a thread of its own; cancelling waits for it.

        Args:
            name: of the call, for the log and the error.
            work: the function.

        Raises:
            BackendError: it failed: as the model raised it, or in place of its mistake.
        """
        try:
            return await to_thread.run_sync(work, limiter=self._threads)
        except BackendError:
            raise
        except Exception as mistake:
            _log.exception("the model's %s failed", name)
            raise BackendError(f"{name} failed") from mistake


@attrs.define(eq=False)
class EngineSession:
    """One session on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedSession
    _backend: EngineBackend

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        return self.stepped.opened

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit, as `BackendSession.run_unit` says."""

        def steps() -> Generator[Any, Any, UnitResult]:
            return self.stepped.unit(unit, self.stepped.look(unit), cut)

        return await self._backend.call("run_unit", steps)

    async def run_forced(self, unit: Unit, forced: Forced, cut: Cut | None = None) -> ForcedResult:
        """Prefill and generate one unit as it was recorded, as `Forces.run_forced` says.

        Raises:
            BackendError: it failed, or the model cannot be forced.
        """
        stepped = self.stepped
        if not isinstance(stepped, SteppedForces):
            raise BackendError(f"model {self._backend.info.name} cannot be forced")

        def steps() -> Generator[Any, Any, ForcedResult]:
            return stepped.forced_unit(unit, stepped.look(unit), cut, forced)

        return await self._backend.call("run_forced", steps)

    def interrupt(self, index: int) -> None:
        """Cut unit `index`, whether it runs or waits for the engine; never blocks."""
        self.stepped.interrupt(index)

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit, as `BackendSession.finalize` says."""
        return await self._backend.call(
            "finalize", lambda: self.stepped.finalize(index, interrupted=interrupted)
        )

    async def rollback(self, index: int) -> None:
        """Undo the failed unit, as `BackendSession.rollback` says."""
        await self._backend.at_once("rollback", lambda: self.stepped.rollback(index))

    async def release(self) -> None:
        """Give back everything the session holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._backend.at_once("release", self.stepped.release)


@attrs.define(eq=False)
class EngineTurn:
    """One turn of chat on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedTurn
    _backend: EngineBackend

    async def prefill(self) -> Prefill:
        """Feed the conversation, as `TurnSession.prefill` says; pictures are seen one by one."""
        stepped, backend = self.stepped, self._backend

        def look(place: int) -> Generator[Any, Any, None]:
            return stepped.see(place, stepped.look(place))

        for place in range(await backend.work("measure", stepped.measure)):
            await backend.call("see", partial(look, place), due_ns=BACKGROUND)
        return await backend.call("prefill", stepped.prefill, due_ns=BACKGROUND)

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Answer, as `TurnSession.generate` says."""

        def steps(put: Callable[[TurnChunk], None]) -> Generator[Any, Any, TurnResult]:
            return self.stepped.generate(put, cut)

        return await self._backend.tell("generate", steps, emit, self.interrupt)

    def interrupt(self) -> None:
        """Cut the turn at its next step, whether it runs or waits for the engine; never blocks."""
        self.stepped.interrupt()

    async def release(self) -> None:
        """Give back everything the turn holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._backend.at_once("release", self.stepped.release)
