"""Full replay of a transcription: the model hears each chunk again, and what it writes is compared.

A chunk is run when the log tells what the recorded model wrote of it; one that failed is not run
again, for the utterance ends with it, and the next begins afresh.
"""

from __future__ import annotations

from typing import Final

import attrs

from protocol import effects as ef
from protocol import events as ev
from runtime.backends.base import Backend, BackendError, Transcribes, TranscriptSession

from .full_turns import Verdict
from .outputs import compare_heard


class ChunkReplay:
    """The chunks of one session, run again.

    Args:
        backend: the model.

    Attributes:
        chunks: how many it has heard.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend: Final = backend
        self._asked: ef.RunChunk | None = None
        self._held: TranscriptSession | None = None
        self.chunks = 0

    def note(self, effect: ef.Effect) -> None:
        """Keep what the machine asks the model for."""
        if isinstance(effect, ef.RunChunk):
            self._asked = effect

    async def renew(self, event: ev.Event) -> Verdict:
        """Make the model's part of an event again.

        Raises:
            Exception: whatever the model raises, a bug of its own too.
        """
        match event:
            case ev.ChunkDone():
                return await self._heard(event)
            case ev.ChunkFailed() | ev.BackendLost():
                self._asked = None
        return Verdict()

    async def close(self) -> None:
        """Give the transcription back to the model."""
        held, self._held = self._held, None
        if held is not None:
            await held.release()

    async def _heard(self, event: ev.ChunkDone) -> Verdict:
        asked, self._asked, recorded = self._asked, None, event.result
        if asked is None or (asked.chunk.utterance, asked.chunk.index) != (
            recorded.utterance,
            recorded.index,
        ):
            return Verdict()
        if self._held is None:
            if not isinstance(self._backend, Transcribes):
                raise BackendError("the model does not transcribe")
            self._held = await self._backend.transcribe(slot=0)
        made = await self._held.run_chunk(asked.chunk)
        self.chunks += 1
        return Verdict(
            event=attrs.evolve(event, result=attrs.evolve(made, costs=recorded.costs)),
            found=compare_heard(recorded, made),
        )
