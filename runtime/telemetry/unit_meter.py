"""Measures the units of one duplex session: when each was whole, started, answered and closed.

    last sample -> whole -> [pictures, barrier] -> started -> result -> answered -> finalized

A second of input is whole when the append that completes it is taken. It is late when its answer
comes more than `DEADLINE_NS` after that: then the next second is whole too, and the session falls
behind. Waiting units keep their order (B7), and so does the queue of their times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_S
from protocol.values.model import UnitResult

from .books import Books, UnitBooks
from .call_meter import CallMeter

DEADLINE_NS: Final = NS_PER_S
"""A unit is one second of input, so the next is whole one second after it."""
US_PER_S: Final = 1_000_000
_BRING_SOUND: Final = (ev.FrameReceived, ev.MediaDecoded, ev.MediaRejected, ev.TimerFired)
"""Events after which a second may be whole: a client's sound may be resampled first, or missing."""


class UnitMeter(CallMeter[UnitBooks]):
    """Counts the units of one session, and its tokens in the model's cache."""

    def __init__(self, books: Books, work: UnitBooks) -> None:
        super().__init__(books, work)
        self._whole_ns: deque[int] = deque()
        self._due_ns = 0
        self._interrupted = False
        self._unanswered = False  # its answer waits for its finalize (B2)
        self._closing: int | None = None  # the unit that is finalized, or undone
        self._barrier_ns = (0, 0)  # from when to when that was, or of the one before
        self._kv_settled = 0

    def _heard(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session) -> None:
        note = _EVENTS.get(type(event))
        if note is not None:
            note(self, event, effects)
        if type(event) in _BRING_SOUND:
            self._take_in(effects, session.units_waiting)

    def _asked(self, effect: ef.Effect) -> None:
        match effect:
            case ef.StartUnit():
                self._start(effect.unit.index)
            case ef.DropUnit():
                self._whole_ns.popleft()
                self._to.dropped.inc()
            case ef.Interrupt() if not self._ended:  # else the session's end cuts it
                self._interrupted = True
                self._to.interrupts.inc()
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
        self._to.wait_s.observe(self._since(whole_ns))
        self._to.barrier_s.observe(max(0, open_ns - max(whole_ns, closed_ns)) / NS_PER_S)

    def _answer(self) -> None:
        self._unanswered = False
        self._to.answer_s.observe(self._since(self._due_ns - DEADLINE_NS))
        if self._now_ns > self._due_ns:
            self._to.late.inc()

    def _unit_done(self, event: ev.UnitDone, effects: tuple[ef.Effect, ...]) -> None:
        result = event.result
        if result.index != self._running:
            return
        self._finish(self._outcome(result))
        self._to.wall_s.observe(self._since(self._began_ns))
        self._count_costs(result)
        self.kv_tokens = result.kv_length
        if self._ended:
            return
        self._unanswered = True
        if any(isinstance(effect, ef.Send) for effect in effects):
            self._answer()

    def _outcome(self, result: UnitResult) -> str:
        if self._interrupted and (result.cut is not None or not result.is_listen):
            return "cut"
        return "listen" if result.is_listen else "speech"

    def _count_costs(self, result: UnitResult) -> None:
        costs, stages = result.costs, self._to.stages
        stages["prefill"].observe(costs.prefill_us / US_PER_S)
        stages["generate"].observe(costs.generate_us / US_PER_S)
        stages["llm"].observe(costs.llm_us / US_PER_S)
        if not result.is_listen:
            stages["tts"].observe(costs.tts_us / US_PER_S)
            stages["token2wav"].observe(costs.token2wav_us / US_PER_S)
        self._spoke(result.pcm, len(result.codec_ids))
        self._books.tokens["text"].inc(len(result.decided_ids))
        if result.vision_tokens:
            self._books.tokens["picture"].inc(result.vision_tokens)

    def _unit_failed(self, event: ev.UnitFailed, _effects: tuple[ef.Effect, ...]) -> None:
        if event.index == self._running:
            self._finish("failed")
            self.kv_tokens = self._kv_settled

    # -- the barrier ----------------------------------------------------------------------------

    def _finalize_done(self, event: ev.FinalizeDone, _effects: tuple[ef.Effect, ...]) -> None:
        done = event.finalized
        if self._is_closed(done.index):
            self._to.stages["finalize"].observe(done.cost_us / US_PER_S)
            self.kv_tokens = self._kv_settled = done.kv_length
            if self._unanswered and not self._ended:
                self._answer()

    def _finalize_failed(self, event: ev.FinalizeFailed, _effects: tuple[ef.Effect, ...]) -> None:
        if self._is_closed(event.index):
            self._to.finalizes_failed.inc()

    def _rollback_done(self, event: ev.RollbackDone, _effects: tuple[ef.Effect, ...]) -> None:
        if self._is_closed(event.index):
            self._to.rollbacks["done"].inc()

    def _rollback_failed(self, event: ev.RollbackFailed, _effects: tuple[ef.Effect, ...]) -> None:
        if self._is_closed(event.index):
            self._to.rollbacks["failed"].inc()

    def _is_closed(self, index: int) -> bool:
        """Whether it is the unit that is being closed; ends its closing."""
        if self._closing != index:
            return False
        self._closing = None
        self._barrier_ns = (self._barrier_ns[0], self._now_ns)
        return True

    # -- the slot -------------------------------------------------------------------------------

    def _backend_opened(self, event: ev.BackendOpened, _effects: tuple[ef.Effect, ...]) -> None:
        if event.lease == self._lease:
            self.kv_tokens = self._kv_settled = event.opened.prompt_length

    def _lost(self, *, goes_on: bool) -> None:
        if not goes_on:
            self._finish("ended")
        super()._lost(goes_on=goes_on)
        self._closing = None

    def _rebuilt(self, _event: ev.Rebuilt, effects: tuple[ef.Effect, ...]) -> None:
        if self._unanswered and any(isinstance(effect, ef.Send) for effect in effects):
            self._answer()


_EVENTS: Final[Mapping[type[ev.Event], Callable[[UnitMeter, Any, Any], None]]] = {
    ev.UnitDone: UnitMeter._unit_done,
    ev.UnitFailed: UnitMeter._unit_failed,
    ev.FinalizeDone: UnitMeter._finalize_done,
    ev.FinalizeFailed: UnitMeter._finalize_failed,
    ev.RollbackDone: UnitMeter._rollback_done,
    ev.RollbackFailed: UnitMeter._rollback_failed,
    ev.BackendOpened: UnitMeter._backend_opened,
    ev.Rebuilt: UnitMeter._rebuilt,
}
