"""Measures a session's turns or chunks; `unit_meter` measures units, which pass a barrier.

They are measured from their start on the slot. The wait for a turn's slot is the queue's
(`queue_wait_seconds` of mode `chat`); the wait of sound for the model is the session's backlog.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, Final

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_S
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES

from . import catalogue as c
from .instruments import Books
from .watching import Shown

SPEECH_BYTES_PER_S: Final = OUTPUT_RATE_HZ * SAMPLE_BYTES


class CallMeter:
    """Counts the calls of one session by `outcomes`, and its tokens in the model's cache."""

    outcomes: ClassVar[c.Metric]

    def __init__(self, books: Books) -> None:
        self._books: Final = books
        self._now_ns = self._began_ns = 0
        self._running: Hashable = None
        self._again: Hashable = None  # a call that was lost, if it will be made again
        self._lease: int | None = None
        self._ended = False
        self.kv_tokens = 0

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """Count an event and its effects."""
        self._now_ns = event.at_ns
        match event:
            case ev.SlotLeased():
                self._lease = event.lease
            case ev.BackendLost() if event.lease == self._lease:
                self._lost(goes_on=session.end_reason is None)
            case ev.BackendReleased() if event.lease == self._lease:
                self._lease = None
                self.kv_tokens = 0
            case _:
                self._heard(event, effects, session)
        self._ended = session.end_reason is not None
        for effect in effects:
            self._asked(effect)

    def over(self) -> None:
        """Count a running call as ended, or one that was lost."""
        if self._running is None:
            self._running = self._again
        self._finish("ended")
        self.kv_tokens = 0

    def _heard(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        raise NotImplementedError

    def _asked(self, effect: ef.Effect) -> None:
        raise NotImplementedError

    def _lost(self, *, goes_on: bool) -> None:
        """Count the call that was lost with the worker, unless it will be made again."""
        if goes_on and self._running is not None:
            self._again, self._running = self._running, None
        self._finish("failed")

    def _begin(self, call: Hashable) -> bool:
        """Note a call that begins; whether it does for the first time."""
        is_new, self._running, self._again = call != self._again, call, None
        if is_new:
            self._began_ns = self._now_ns
        return is_new

    def _since(self, at_ns: int) -> float:
        return max(0, self._now_ns - at_ns) / NS_PER_S

    def _spoke(self, pcm: bytes, codes: int) -> None:
        if pcm or codes:
            self._books.add(c.SPEECH_SECONDS, amount=len(pcm) / SPEECH_BYTES_PER_S)
            self._books.add(c.TOKENS, "speech", amount=codes)

    def _finish(self, outcome: str) -> None:
        if self._running is not None:
            self._books.add(self.outcomes, "ended" if self._ended else outcome)
            self._running = None


class TurnMeter(CallMeter):
    """Counts the turns of a chat, from each start to the end of its answer."""

    outcomes = c.TURNS
    _has_begun_to_answer = False

    def _heard(self, event: ev.Event, _effects: object, _session: Shown) -> None:
        match event:
            case ev.TurnPrefilled(prefill=prefill) if prefill.index == self._running:
                self._books.observe(c.TURN_STAGE_SECONDS, self._since(self._began_ns), "prefill")
                self._books.add(c.TOKENS, "prompt", amount=prefill.input_tokens)
                self.kv_tokens = prefill.input_tokens
            case ev.TurnProgress(chunk=chunk) if chunk.index == self._running:
                if not self._has_begun_to_answer:
                    self._has_begun_to_answer = True
                    self._books.observe(c.TURN_STAGE_SECONDS, self._since(self._began_ns), "first")
                self._spoke(chunk.pcm, len(chunk.codec_ids))
            case ev.TurnDone(result=result) if result.index == self._running:
                self._books.observe(c.TURN_STAGE_SECONDS, self._since(self._began_ns), "end")
                self._books.add(c.TOKENS, "text", amount=result.generated_tokens)
                self._spoke(result.pcm, len(result.codec_ids))
                self.kv_tokens = result.kv_length
                self._finish(result.reason)
            case ev.TurnFailed() if event.index == self._running:
                self._finish("failed")

    def _asked(self, effect: ef.Effect) -> None:
        if isinstance(effect, ef.StartTurn) and self._begin(effect.turn.index):
            self._has_begun_to_answer = False


class ChunkMeter(CallMeter):
    """Counts the chunks of a transcription, from each start to its text."""

    outcomes = c.CHUNKS

    def _heard(self, event: ev.Event, _effects: object, _session: Shown) -> None:
        match event:
            case ev.ChunkDone(result=result) if (result.utterance, result.index) == self._running:
                self._books.observe(c.CHUNK_SECONDS, self._since(self._began_ns))
                self._books.add(c.TOKENS, "prompt", amount=result.prompt_tokens)
                self._books.add(c.TOKENS, "text", amount=result.generated_tokens)
                self.kv_tokens = result.kv_length
                self._finish("heard")
            case ev.ChunkFailed() if (event.utterance, event.index) == self._running:
                self._finish("context_full" if event.context_full else "failed")

    def _asked(self, effect: ef.Effect) -> None:
        if isinstance(effect, ef.RunChunk):
            is_new = self._begin((effect.chunk.utterance, effect.chunk.index))
            if is_new and effect.chunk.index == 0:
                self._books.add(c.UTTERANCES)
