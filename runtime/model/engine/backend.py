"""A model on an engine as an async `Backend`: its sessions' units run in batches.

Rules:
- A unit, as any call of its session, is due a second after the request; `scheduler` has who goes
  first. Missed deadlines are counted (`Engine.statistics`).
- Host work of a unit (decoding and slicing its pictures) runs in its own thread, before the engine.
- `interrupt` takes effect before the unit's next step, also while it waits for the engine.
- A running call is never abandoned (`calls`), so it cannot overlap the next (B4). For a call that
  never ends, the driver condemns the worker.
- A cut chat turn stops at its next picture, block or token, also while it waits; before its answer
  it fails. Chat is `BACKGROUND` work without a deadline, as are chunks of streaming requests
  without sound or a deadline of their own, and the past units of a rebuild, each a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

import anyio
import attrs

from protocol.values.errors import LocalProtocolError
from protocol.values.limits import NS_PER_S
from protocol.values.model import (
    INPUT_RATE_HZ,
    PAST_UNITS_MAX,
    UNIT_SAMPLES,
    Chunk,
    ChunkResult,
    Cut,
    Finalized,
    Opened,
    Opening,
    PastUnit,
    Prefill,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
)

from ..backends.base import BackendError, BackendInfo, require_tools
from ..backends.forcing import Forced, ForcedResult
from ..backends.streams import Anchoring, Extended, Part, Sampled, SamplingParams
from .calls import EngineCalls
from .engine import Engine
from .gathering import Gathering
from .pace import Pace
from .scheduler import BACKGROUND
from .stepped import (
    Stepped,
    SteppedAnchor,
    SteppedModel,
    SteppedSession,
    SteppedStreams,
    SteppedTranscript,
    SteppedTurn,
)

BATCH_MAX: Final = 64
"""Maximum requests per batch; more sessions than one engine is expected to hold."""
CHUNK_S: Final = UNIT_SAMPLES / INPUT_RATE_HZ
"""Seconds of a transcription's chunk."""


class EngineBackend:
    """A model behind the `Backend` protocol; `batch_max` 1 runs one request at a time.

    Unless `is_live`, the calls of open sessions wait for each other (`gathering`).
    """

    def __init__(
        self, model: SteppedModel, *, batch_max: int = BATCH_MAX, is_live: bool = True
    ) -> None:
        self._model = model
        self.engine = Engine(model.compute, batch_max=batch_max)
        gathering = None if is_live else Gathering(self.engine.expect)
        self._calls = EngineCalls(self.engine, model.info, gathering)

    @property
    def info(self) -> BackendInfo:
        """The model's metadata."""
        return self._model.info

    async def aclose(self) -> None:
        """Stop the engine; waiting calls fail, a hanging one keeps hanging."""
        self.engine.stop()

    async def open(self, opening: Opening, *, slot: int) -> EngineSession:
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

    async def chat(self, turn: Turn, *, slot: int) -> EngineTurn:
        """Take a chat turn; `BackendError` if the model does not chat, or not with tools."""
        self._check(slot, "chat", "does not chat")
        require_tools(self.info, turn)
        return EngineTurn(self._model.chat(turn, slot=slot), self._calls)

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

    def _streams(self) -> SteppedStreams:
        if not isinstance(self._model, SteppedStreams):
            raise BackendError(f"model {self.info.name} takes no streaming input")
        return self._model

    def _check(self, slot: int, mode: str = "", lacks: str = "") -> None:
        """Check a slot, and if given that the model has a mode, else `lacks` says it in words."""
        if not 0 <= slot < self.info.slots:
            raise LocalProtocolError(f"slot {slot} of {self.info.slots}")
        if mode and mode not in self.info.modes:
            raise BackendError(f"model {self.info.name} {lacks}")


Held = TypeVar("Held", bound=Stepped)


@attrs.define(eq=False)
class _OnEngine(Generic[Held]):
    """What an engine holds for a session; `stepped` is its state."""

    stepped: Held
    _calls: EngineCalls

    async def release(self) -> None:
        """Free everything it holds; after a `BackendError` the slot is unsafe to reuse."""
        await self._calls.at_once("release", self.stepped.release)


@attrs.define(eq=False)
class EngineSession(_OnEngine[SteppedSession]):
    """One session on an engine; `stepped` is its state."""

    @property
    def opened(self) -> Opened:
        """The result of opening."""
        return self.stepped.opened

    async def release(self) -> None:
        """As `_OnEngine.release`; other sessions wait for this one no more."""
        try:
            await super().release()
        finally:
            self._calls.released()

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit."""
        return await self._calls.call("run_unit", partial(self.stepped.unit, unit, cut))

    async def run_forced(self, unit: Unit, forced: Forced, cut: Cut | None = None) -> ForcedResult:
        """Prefill and generate one unit as recorded."""
        steps = partial(self.stepped.forced_unit, unit, cut, forced)
        return await self._calls.call("run_forced", steps)

    def interrupt(self, index: int) -> None:
        """Cut unit `index`, running or waiting for the engine; never blocks."""
        self.stepped.interrupt(index)

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit."""
        steps = partial(self.stepped.finalize, index, interrupted=interrupted)
        return await self._calls.call("finalize", steps)

    async def rollback(self, index: int) -> None:
        """Undo the failed unit."""
        await self._calls.at_once("rollback", lambda: self.stepped.rollback(index))

    async def rebuild(self, past: Sequence[PastUnit], *, exact: bool) -> Finalized:
        """Feed past units, unit by unit in the background; `BackendError` if the model cannot."""
        if not 1 <= len(past) <= PAST_UNITS_MAX:
            raise LocalProtocolError(f"{len(past)} past units, not 1 to {PAST_UNITS_MAX}")
        if not self._calls.info.can_rebuild:
            raise BackendError(f"model {self._calls.info.name} cannot be rebuilt")
        for each in past:
            steps = partial(self.stepped.rebuild, each, exact=exact, is_last=each is past[-1])
            finalized = await self._calls.call("rebuild", steps, due_ns=BACKGROUND)
        return finalized


@attrs.define(eq=False)
class EngineTurn(_OnEngine[SteppedTurn]):
    """One chat turn on an engine; `stepped` is its state."""

    async def prefill(self) -> Prefill:
        """Feed the conversation; pictures are encoded one by one."""
        stepped, calls = self.stepped, self._calls
        for place in range(await calls.work("measure", stepped.measure)):
            await calls.call("see", partial(stepped.see, place), due_ns=BACKGROUND)
        return await calls.call("prefill", stepped.prefill, due_ns=BACKGROUND)

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Answer the turn."""
        steps = partial(self.stepped.generate, cut=cut)
        return await self._calls.tell("generate", steps, emit, self.interrupt)

    def interrupt(self) -> None:
        """Cut the turn at its next step, running or waiting for the engine; never blocks."""
        self.stepped.interrupt()


@attrs.define(eq=False)
class EngineAnchor(_OnEngine[SteppedAnchor]):
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
        return await self._calls.tell("extend", steps, emit, self.interrupt, due_ns=due_ns)

    def interrupt(self) -> None:
        """Cut the request, running or waiting for the engine; never blocks."""
        self.stepped.interrupt()


@attrs.define(eq=False)
class EngineTranscript(_OnEngine[SteppedTranscript]):
    """One transcription on an engine; `stepped` is its state."""

    _pace: Pace = attrs.field(factory=Pace)

    async def run_chunk(self, chunk: Chunk) -> ChunkResult:
        """Transcribe a second of an utterance."""
        now_s = anyio.current_time()
        due_s = self._pace.due_s(now_s, CHUNK_S) - now_s
        steps = partial(self.stepped.chunk, chunk)
        return await self._calls.call("run_chunk", steps, due_ns=due_s * NS_PER_S)
