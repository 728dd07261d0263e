"""Measures the chunks of one transcription: from each one's start on its slot to what was written.

How long sound waited for the model before is the session's backlog, and no chunk's.
"""

from __future__ import annotations

from protocol import effects as ef
from protocol import events as ev
from protocol.limits import NS_PER_S
from protocol.session import Session

from .books import Books, ChunkBooks


class ChunkMeter:
    """Counts the chunks of one session.

    Args:
        books: of the mode `transcription`.
        chunks: the part of them that is about chunks.

    Attributes:
        kv_tokens: what the utterance under way holds in the model's cache.
    """

    def __init__(self, books: Books, chunks: ChunkBooks) -> None:
        self._books = books
        self._to = chunks
        self._now_ns = self._began_ns = 0
        self._running: tuple[int, int] | None = None
        self._lease: int | None = None
        self._ended = False
        self.kv_tokens = 0

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session) -> None:
        """Count what an event and its effects mean to chunks."""
        self._now_ns = event.at_ns
        match event:
            case ev.ChunkDone(result=result) if (result.utterance, result.index) == self._running:
                self._to.chunk_s.observe((self._now_ns - self._began_ns) / NS_PER_S)
                self._books.tokens["prompt"].inc(result.prompt_tokens)
                self._books.tokens["text"].inc(result.generated_tokens)
                self.kv_tokens = result.kv_length
                self._finish("heard")
            case ev.ChunkFailed() if (event.utterance, event.index) == self._running:
                self._finish("context_full" if event.context_full else "failed")
            case ev.SlotLeased():
                self._lease = event.lease
            case ev.BackendLost() if event.lease == self._lease:
                self._finish("failed")
            case ev.BackendReleased() if event.lease == self._lease:
                self._lease = None
                self.kv_tokens = 0
        for effect in effects:
            if isinstance(effect, ef.RunChunk):
                chunk, self._began_ns = effect.chunk, self._now_ns
                self._running = (chunk.utterance, chunk.index)
                if chunk.index == 0:
                    self._to.utterances.inc()
        self._ended = session.end_reason is not None

    def over(self) -> None:
        """Count a chunk that nobody waits for any more."""
        self._ended = True
        self._finish("ended")
        self.kv_tokens = 0

    def _finish(self, outcome: str) -> None:
        if self._running is not None:
            self._to.outcomes["ended" if self._ended else outcome].inc()
            self._running = None
