"""Full replay of a transcription: the model hears each chunk again, and its text is compared.

A chunk is run at its recorded result. A chunk that failed is not run again: it ended its utterance,
and the next utterance starts without context.
"""

from __future__ import annotations

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from runtime.model.backends.base import BackendError, Transcribes, TranscriptSession

from .outputs import compare_outputs
from .verdicts import Rerun, Verdict, finding_of


class ChunkReplay(Rerun[TranscriptSession]):
    """The chunks of one session, run again."""

    name = "chunks"

    async def renew(self, event: ev.Event) -> Verdict:
        """Run a chunk at its result."""
        match event:
            case ev.ChunkDone():
                return await self._hear(event)
            case ev.ChunkFailed() | ev.BackendLost():
                self.asked.clear()
        return Verdict()

    async def _hear(self, event: ev.ChunkDone) -> Verdict:
        asked, recorded = self.asked.pop(ef.RunChunk, None), event.result
        if asked is None or (asked.chunk.utterance, asked.chunk.index) != (
            recorded.utterance,
            recorded.index,
        ):
            return Verdict()
        if self.held is None:
            if not isinstance(self.backend, Transcribes):
                raise BackendError("the model does not transcribe")
            self.held = await self.backend.transcribe(slot=0)
        made = await self.held.run_chunk(asked.chunk)
        self.made += 1
        return Verdict(
            event=attrs.evolve(event, result=attrs.evolve(made, costs=recorded.costs)),
            finding=finding_of(compare_outputs(recorded, made)),
            index=self.made - 1,
        )
