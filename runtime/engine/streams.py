"""Requests with streaming input, and transcriptions, on an engine.

Their generators share the scheduler with units and turns of chat: a chunk of sound has a deadline
as a unit does, other chunks are background work unless whoever asks says otherwise. Tokens cross
from the engine's thread to the event loop in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from protocol.limits import NS_PER_S
from protocol.model import INPUT_RATE_HZ, UNIT_SAMPLES
from protocol.transcript import Chunk, ChunkResult

from ..backends.streams import Extended, Part, Sampled, SamplingParams
from .pace import Pace
from .scheduler import BACKGROUND
from .stepped import SteppedAnchor, SteppedTranscript

if TYPE_CHECKING:
    from .backend import EngineBackend

CHUNK_S: Final = UNIT_SAMPLES / INPUT_RATE_HZ
"""Seconds of a transcription's chunk."""


@attrs.define(eq=False)
class EngineAnchor:
    """One request with streaming input on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedAnchor
    _backend: EngineBackend

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
        return await self._backend.tell("extend", steps, emit, self.interrupt, due_ns=due_ns)

    def interrupt(self) -> None:
        """Cut the request, whether a chunk of it runs or waits for the engine; never blocks."""
        self.stepped.interrupt()

    async def release(self) -> None:
        """Give back everything the request holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._backend.at_once("release", self.stepped.release)


@attrs.define(eq=False)
class EngineTranscript:
    """One transcription on an engine.

    Attributes:
        stepped: its state.
    """

    stepped: SteppedTranscript
    _backend: EngineBackend
    _pace: Pace = attrs.field(factory=Pace)

    async def run_chunk(self, chunk: Chunk) -> ChunkResult:
        """Hear a second of an utterance, as `TranscriptSession.run_chunk` says."""
        now_s = anyio.current_time()
        due_s = self._pace.due_s(now_s, CHUNK_S) - now_s
        return await self._backend.call(
            "run_chunk", lambda: self.stepped.chunk(chunk), due_ns=due_s * NS_PER_S
        )

    async def release(self) -> None:
        """Give back everything the transcription holds.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        await self._backend.at_once("release", self.stepped.release)
