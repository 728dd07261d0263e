"""Measures the units of one duplex session: when each was whole, started, answered and closed.

    last sample -> whole -> [pictures, barrier] -> started -> result -> answered -> finalized

A second of input is whole when the append that completes it is taken. It is late when its answer
comes more than `DEADLINE_NS` after that: then the next second is whole too, and the session falls
behind. Waiting units keep their order (B7), and so does the queue of their times.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import MS_PER_S, NS_PER_S
from protocol.values.model import UnitResult

from . import catalogue as c
from .call_meter import CallMeter
from .instruments import Books
from .watching import Shown

DEADLINE_NS: Final = NS_PER_S
"""A unit is one second of input, so the next is whole one second after it."""
US_PER_S: Final = 1_000_000


class UnitMeter(CallMeter):
    """Counts the units of one session, and its tokens in the model's cache."""

    outcomes = c.UNITS

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._whole_ns: deque[int] = deque()
        self._due_ns = 0
        self._interrupted = False
        self._unanswered = False  # its answer waits for its finalize (B2)
        self._closing: int | None = None  # the unit that is finalized, or undone
        self._barrier_ns = (0, 0)  # from when to when that was, or of the one before
        self._kv_settled = 0
        self._amid_turn = False  # the model goes on to speak
        self._overlap_ms: int | None = None  # where speech began that is over the model's

    def _heard(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        is_sent = any(isinstance(effect, ef.Send) for effect in effects)
        match event:
            case ev.FrameReceived() | ev.MediaDecoded() | ev.MediaRejected() | ev.TimerFired():
                # A client's sound may be resampled first, or missing.
                self._take_in(effects, session.units_waiting)
            case ev.UnitDone(result=result) if result.index == self._running:
                self._unit_done(result, is_sent=is_sent)
            case ev.UnitFailed() if event.index == self._running:
                self._finish("failed")
                self.kv_tokens = self._kv_settled
            case ev.FinalizeDone(finalized=done) if self._is_closed(done.index):
                self._stage("finalize", done.cost_us)
                self.kv_tokens = self._kv_settled = done.kv_length
                if self._unanswered and not self._ended:
                    self._answer()
            case ev.FinalizeFailed() if self._is_closed(event.index):
                self._books.add(c.FINALIZES_FAILED)
            case ev.RollbackDone() if self._is_closed(event.index):
                self._books.add(c.ROLLBACKS, "done")
            case ev.RollbackFailed() if self._is_closed(event.index):
                self._books.add(c.ROLLBACKS, "failed")
            case ev.BackendOpened() if event.lease == self._lease:
                self.kv_tokens = self._kv_settled = event.opened.prompt_length
            case ev.Rebuilt() if self._unanswered and is_sent:
                self._answer()
            case ev.SpeechStarted(at_ms=at_ms) if self._amid_turn and not self._ended:
                self._overlap_ms = at_ms
            case ev.SpeechStopped(at_ms=at_ms) if self._overlap_ms is not None:
                self._books.observe(c.OVERLAP_SECONDS, (at_ms - self._overlap_ms) / MS_PER_S)
                self._overlap_ms = None

    def _asked(self, effect: ef.Effect) -> None:
        match effect:
            case ef.StartUnit():
                self._start(effect.unit.index)
            case ef.DropUnit():
                self._whole_ns.popleft()
                self._books.add(c.UNITS_DROPPED)
            case ef.Interrupt() if not self._ended:  # else the session's end cuts it
                self._interrupted = True
                self._books.add(c.INTERRUPTS)
            case ef.StartFinalize() | ef.Rollback():
                self._closing = effect.index
                self._barrier_ns = (self._now_ns, self._now_ns)

    def _take_in(self, effects: tuple[ef.Effect, ...], waiting: int) -> None:
        """Note the time of new whole units: those waiting and those gone, less those before."""
        left = sum(isinstance(effect, ef.StartUnit | ef.DropUnit) for effect in effects)
        for _ in range(waiting + left - len(self._whole_ns)):
            self._whole_ns.append(self._now_ns)

    # -- one unit -------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        if not self._begin(index):
            self._interrupted = self._unanswered = False
            return
        self._due_ns = self._whole_ns.popleft() + DEADLINE_NS
        self._interrupted = self._unanswered = False
        whole_ns = self._due_ns - DEADLINE_NS
        closed_ns, open_ns = self._barrier_ns
        self._books.observe(c.UNIT_WAIT_SECONDS, self._since(whole_ns))
        self._books.observe(
            c.UNIT_BARRIER_SECONDS, max(0, open_ns - max(whole_ns, closed_ns)) / NS_PER_S
        )

    def _answer(self) -> None:
        self._unanswered = False
        self._books.observe(c.UNIT_ANSWER_SECONDS, self._since(self._due_ns - DEADLINE_NS))
        if self._now_ns > self._due_ns:
            self._books.add(c.UNITS_LATE)

    def _unit_done(self, result: UnitResult, *, is_sent: bool) -> None:
        self._finish(self._outcome(result))
        self._books.observe(c.UNIT_SECONDS, self._since(self._began_ns))
        self._count_costs(result)
        self.kv_tokens = result.kv_length
        self._amid_turn = not (result.is_listen or result.end_of_turn)
        if self._ended:
            return
        self._unanswered = True
        if is_sent:
            self._answer()

    def _outcome(self, result: UnitResult) -> str:
        if self._interrupted and (result.cut is not None or not result.is_listen):
            return "cut"
        return "listen" if result.is_listen else "speech"

    def _count_costs(self, result: UnitResult) -> None:
        costs = result.costs
        self._stage("prefill", costs.prefill_us)
        self._stage("generate", costs.generate_us)
        self._stage("llm", costs.llm_us)
        if not result.is_listen:
            self._stage("tts", costs.tts_us)
            self._stage("token2wav", costs.token2wav_us)
        self._spoke(result.pcm, len(result.codec_ids))
        self._books.add(c.TOKENS, "text", amount=len(result.decided_ids))
        self._books.add(c.TOKENS, "picture", amount=result.vision_tokens)

    def _stage(self, stage: str, cost_us: int) -> None:
        self._books.observe(c.UNIT_STAGE_SECONDS, cost_us / US_PER_S, stage)

    def _is_closed(self, index: int) -> bool:
        """Whether it is the unit that is being closed; ends its closing."""
        if self._closing != index:
            return False
        self._closing = None
        self._barrier_ns = (self._barrier_ns[0], self._now_ns)
        return True

    def _lost(self, *, goes_on: bool) -> None:
        if not goes_on:
            self._finish("ended")
        super()._lost(goes_on=goes_on)
        self._closing = None
