"""Measures the turns of one chat: from each turn's start on its slot to the end of its answer.

The wait for the slot is the queue's (`queue_wait_seconds` of mode `chat`).
"""

from __future__ import annotations

from typing import Final

from protocol import effects as ef
from protocol import events as ev
from protocol.limits import NS_PER_S
from protocol.session import Session

from .books import Books, TurnBooks
from .unit_meter import SPEECH_BYTES_PER_S

NONE: Final = -1
"""No turn runs."""


class TurnMeter:
    """Counts the turns of one session.

    Args:
        books: of the mode `chat`.
        turns: the part of them that is about turns.

    Attributes:
        kv_tokens: what the turn under way holds in the model's cache.
    """

    def __init__(self, books: Books, turns: TurnBooks) -> None:
        self._books = books
        self._to = turns
        self._now_ns = self._began_ns = 0
        self._index = NONE
        self._has_begun_to_answer = False
        self._ended = False
        self._lease: int | None = None
        self.kv_tokens = 0

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session) -> None:
        """Count what an event and its effects mean to turns."""
        self._now_ns = event.at_ns
        match event:
            case ev.TurnPrefilled() if event.prefill.index == self._index:
                self._to.stages["prefill"].observe(self._taken())
                self._books.tokens["prompt"].inc(event.prefill.input_tokens)
                self.kv_tokens = event.prefill.input_tokens
            case ev.TurnProgress() if event.chunk.index == self._index:
                self._progressed(event)
            case ev.TurnDone() if event.result.index == self._index:
                self._done(event)
            case ev.TurnFailed() if event.index == self._index:
                self._finish("failed")
            case ev.SlotLeased():
                self._lease = event.lease
            case ev.BackendLost() if event.lease == self._lease:
                self._finish("failed")
            case ev.BackendReleased() if event.lease == self._lease:
                self._lease = None
                self.kv_tokens = 0
        for effect in effects:
            if isinstance(effect, ef.StartTurn):
                self._index, self._began_ns = effect.turn.index, self._now_ns
                self._has_begun_to_answer = False
        self._ended = session.end_reason is not None

    def over(self) -> None:
        """Count a turn that nobody waits for any more."""
        self._ended = True
        self._finish("ended")
        self.kv_tokens = 0

    def _taken(self) -> float:
        return (self._now_ns - self._began_ns) / NS_PER_S

    def _progressed(self, event: ev.TurnProgress) -> None:
        chunk = event.chunk
        if not self._has_begun_to_answer:
            self._has_begun_to_answer = True
            self._to.stages["first"].observe(self._taken())
        self._spoke(chunk.pcm, len(chunk.codec_ids))

    def _done(self, event: ev.TurnDone) -> None:
        result = event.result
        self._to.stages["end"].observe(self._taken())
        self._books.tokens["text"].inc(result.generated_tokens)
        self._spoke(result.pcm, len(result.codec_ids))
        self.kv_tokens = result.kv_length
        self._finish(result.reason)

    def _spoke(self, pcm: bytes, codes: int) -> None:
        if pcm or codes:
            self._books.speech_s.inc(len(pcm) / SPEECH_BYTES_PER_S)
            self._books.tokens["speech"].inc(codes)

    def _finish(self, outcome: str) -> None:
        if self._index != NONE:
            self._to.outcomes["ended" if self._ended else outcome].inc()
            self._index = NONE
