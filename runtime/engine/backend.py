"""A model on an engine as an async `Backend`: its sessions' units run together.

Rules:

- A call has a deadline: a unit is due a second after it was asked for, and so is the rest; what is
  due first goes first. A unit that ends later is counted (`Engine.statistics`).
- What one unit needs of the host alone (decoding and cutting its pictures) is done in a thread of
  its own, before it is handed to the engine.
- `interrupt` takes effect before the unit's next step. Where it comes while its unit still waits
  for the engine, the unit is cut before its first step, as the log tells and a replay repeats.
- A call that has begun is never abandoned (`calls`), so that nothing of it can run beside what
  comes next (B4). One that never ends is its worker's end: the driver condemns it.
- A turn of chat that is cut goes no further than its next picture, block or token: also where it
  waits for the engine. Before its answer began it fails.
- Chat is nobody's deadline: it is `BACKGROUND` work, computed with the units of sessions or where
  no unit waits. So are chunks of a request with streaming input, but those of sound, unless whoever
  asks says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final

import anyio
import attrs

from protocol.errors import LocalProtocolError
from protocol.limits import NS_PER_S
from protocol.model import (
    INPUT_RATE_HZ,
    UNIT_SAMPLES,
    Cut,
    Finalized,
    Opened,
    Opening,
    Unit,
    UnitResult,
)
from protocol.transcript import Chunk, ChunkResult
from protocol.turn import Prefill, Turn, TurnChunk, TurnResult

from ..backends.base import BackendError, BackendInfo
from ..backends.forcing import Forced, ForcedResult
from ..backends.streams import Anchoring, Extended, Part, Sampled, SamplingParams
from .calls import EngineCalls
from .engine import Engine
from .pace import Pace
from .scheduler import BACKGROUND
from .stepped import (
    SteppedAnchor,
    SteppedChats,
    SteppedForces,
    SteppedModel,
    SteppedSession,
    SteppedStreams,
    SteppedTranscribes,
    SteppedTranscript,
    SteppedTurn,
)

BATCH_MAX: Final = 64
"""Requests answered together; more sessions than one engine is expected to hold."""
CHUNK_S: Final = UNIT_SAMPLES / INPUT_RATE_HZ
"""Seconds of a transcription's chunk."""


class EngineBackend:
    """A model behind the `Backend` protocol.

    Args:
        model: shared by all sessions.
        batch_max: most requests answered together; 1 runs one at a time.
    """

    def __init__(self, model: SteppedModel, *, batch_max: int = BATCH_MAX) -> None:
        self._model = model
        self.engine = Engine(model.compute, batch_max=batch_max)
        self._calls = EngineCalls(self.engine, model.info)

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
        session = EngineSession(self._model.session(opening, slot=slot), self._calls)
        await self._calls.call("open", session.stepped.open)
        return session

    async def chat(self, turn: Turn, *, slot: int) -> EngineTurn:
        """Take a turn of chat, as `Chats.chat` says.

        Raises:
            BackendError: the model does not chat.
        """
        self._check(slot)
        if not isinstance(self._model, SteppedChats):
            raise BackendError(f"model {self.info.name} does not chat")
        return EngineTurn(self._model.chat(turn, slot=slot), self._calls)

    async def anchor(self, anchoring: Anchoring, *, slot: int) -> EngineAnchor:
        """Take a request with streaming input, as `Streams.anchor` says.

        Raises:
            BackendError: the model takes none.
        """
        self._check(slot)
        return EngineAnchor(self._streams().anchor(anchoring, slot=slot), self._calls)

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
        return EngineTranscript(model.transcript(slot=slot), self._calls)

    def _streams(self) -> SteppedStreams:
        if not isinstance(self._model, SteppedStreams):
            raise BackendError(f"model {self.info.name} takes no streaming input")
        return self._model

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.info.slots:
            raise LocalProtocolError(f"slot {slot} of {self.info.slots}")


@attrs.define(eq=False)
class EngineSession:
    """One session on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedSession
    _calls: EngineCalls

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        return self.stepped.opened

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit, as `BackendSession.run_unit` says."""

        def steps() -> Generator[Any, Any, UnitResult]:
            return self.stepped.unit(unit, self.stepped.look(unit), cut)

        return await self._calls.call("run_unit", steps)

    async def run_forced(self, unit: Unit, forced: Forced, cut: Cut | None = None) -> ForcedResult:
        """Prefill and generate one unit as it was recorded, as `Forces.run_forced` says.

        Raises:
            BackendError: it failed, or the model cannot be forced.
        """
        stepped = self.stepped
        if not isinstance(stepped, SteppedForces):
            raise BackendError(f"model {self._calls.info.name} cannot be forced")

        def steps() -> Generator[Any, Any, ForcedResult]:
            return stepped.forced_unit(unit, stepped.look(unit), cut, forced)

        return await self._calls.call("run_forced", steps)

    def interrupt(self, index: int) -> None:
        """Cut unit `index`, whether it runs or waits for the engine; never blocks."""
        self.stepped.interrupt(index)

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit, as `BackendSession.finalize` says."""
        return await self._calls.call(
            "finalize", lambda: self.stepped.finalize(index, interrupted=interrupted)
        )

    async def rollback(self, index: int) -> None:
        """Undo the failed unit, as `BackendSession.rollback` says."""
        await self._calls.at_once("rollback", lambda: self.stepped.rollback(index))

    async def release(self) -> None:
        """Give back everything the session holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._calls.at_once("release", self.stepped.release)


@attrs.define(eq=False)
class EngineTurn:
    """One turn of chat on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedTurn
    _calls: EngineCalls

    async def prefill(self) -> Prefill:
        """Feed the conversation, as `TurnSession.prefill` says; pictures are seen one by one."""
        stepped, calls = self.stepped, self._calls

        def look(place: int) -> Generator[Any, Any, None]:
            return stepped.see(place, stepped.look(place))

        for place in range(await calls.work("measure", stepped.measure)):
            await calls.call("see", partial(look, place), due_ns=BACKGROUND)
        return await calls.call("prefill", stepped.prefill, due_ns=BACKGROUND)

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Answer, as `TurnSession.generate` says."""

        def steps(put: Callable[[TurnChunk], None]) -> Generator[Any, Any, TurnResult]:
            return self.stepped.generate(put, cut)

        return await self._calls.tell("generate", steps, emit, self.interrupt)

    def interrupt(self) -> None:
        """Cut the turn at its next step, whether it runs or waits for the engine; never blocks."""
        self.stepped.interrupt()

    async def release(self) -> None:
        """Give back everything the turn holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._calls.at_once("release", self.stepped.release)


@attrs.define(eq=False)
class EngineAnchor:
    """One request with streaming input on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedAnchor
    _calls: EngineCalls

    async def extend(
        self,
        prompt: Sequence[Part],
        params: SamplingParams,
        emit: Callable[[Sampled], None],
        *,
        due_s: float | None = None,
    ) -> Extended:
        """Extend the cumulative prompt and sample behind it, as `AnchorSession.extend` says."""
        stepped = self.stepped

        def steps(put: Callable[[Sampled], None]) -> Generator[Any, Any, Extended]:
            return stepped.extend(stepped.look(prompt, params), params, put)

        due_ns = BACKGROUND if due_s is None else due_s * NS_PER_S
        return await self._calls.tell("extend", steps, emit, self.interrupt, due_ns=due_ns)

    def interrupt(self) -> None:
        """Cut the request, whether a chunk of it runs or waits for the engine; never blocks."""
        self.stepped.interrupt()

    async def release(self) -> None:
        """Give back everything the request holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._calls.at_once("release", self.stepped.release)


@attrs.define(eq=False)
class EngineTranscript:
    """One transcription on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedTranscript
    _calls: EngineCalls
    _pace: Pace = attrs.field(factory=Pace)

    async def run_chunk(self, chunk: Chunk) -> ChunkResult:
        """Hear a second of an utterance, as `TranscriptSession.run_chunk` says."""
        now_s = anyio.current_time()
        due_s = self._pace.due_s(now_s, CHUNK_S) - now_s
        return await self._calls.call(
            "run_chunk", lambda: self.stepped.chunk(chunk), due_ns=due_s * NS_PER_S
        )

    async def release(self) -> None:
        """Give back everything the transcription holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._calls.at_once("release", self.stepped.release)
