"""The full-duplex conversation: appends in, units through the model, listens and speech out.

Each append becomes units (`units`), each unit passes the barrier (`unit_loop`), and each started
unit has exactly one outcome: listen, speech, `inference_error`, or the session's end (B9).
`beginning` opens the model; `session` reads the client's frames.
"""

from __future__ import annotations

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.digest import derive_id
from ..values.errors import ErrorCode
from ..values.limits import (
    NS_PER_MS,
    UNIT_FAILURES_MAX,
    UNITS_PENDING_MAX,
)
from ..values.messages import Interrupted, Listen, Metrics, Paused, Pending, Resumed, Speech
from ..values.model import UnitResult
from ..values.requests import Append, Init, Interrupt, Pause, Resume
from ..values.state import Course, Gate, State
from .barge_in import BargeIn
from .lockstep import Lockstep
from .unit_loop import Phase, UnitLoop
from .units import Attachments, PendingUnit


@attrs.define(kw_only=True, eq=False)
class Duplex(BargeIn):
    """A duplex session's state between events.

    Attributes:
        call: the unit loop, with the model call in progress.
        held: an outcome that waits for its finalize, if that is not deferred (B2).
        ended_id: an ended turn that no listen has followed.
        units_dropped: waiting units lost to newer input (B7).
        is_paused: no unit starts until the client resumes (002).
        lockstep: results owed to chunks, if each is owed one (002).
    """

    course = Course.DUPLEX

    call: UnitLoop = attrs.Factory(UnitLoop)
    held: Listen | Speech | None = None
    responses: int = 0
    appends: int = 0
    units_dropped: int = 0
    max_slice_nums: int = 1
    deferred_finalize: bool = True
    is_paused: bool = False
    ended_id: str | None = None
    lockstep: Lockstep | None = None

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return Gate.PAUSED if self.is_paused else super().gate

    @property
    def units_waiting(self) -> int:
        """Full seconds of input that wait for the model."""
        return len(self.waiting)

    @property
    def counts(self) -> dict[str, int]:
        """Units started and dropped, and appends."""
        started, dropped = self.call.index + 1, self.units_dropped
        return {"units": started, "units_dropped": dropped, "appends": self.appends}

    def forget_client(self) -> None:
        """Forget the unit that was lost, and what the client was owed."""
        super().forget_client()
        self.assembler.ordinal = self.call.index + 1 + self.units_dropped
        self.call.unit, self.held, self.lockstep = None, None, None
        self.call.failures, self.is_paused = 0, False
        self.is_speaking, self.is_hushed, self.over_samples = False, False, 0

    def configure(self, init: Init) -> None:
        """Take the settings of an init."""
        self.max_slice_nums = init.max_slice_nums
        self.deferred_finalize = init.config.deferred_finalize

    def ready(self, prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        if self.opened.endpoint == "duplex":
            self.lockstep = Lockstep(kv_length=prompt_length)
        super().ready(prompt_length)

    def cut(self) -> ef.Interrupt | None:
        """Cut the running unit."""
        return self.call.interrupt()

    # -- in -------------------------------------------------------------------------------------

    def append(self, message: Append) -> None:
        """Take an append: force first, then cut it into units, and start a unit if one may."""
        input_id = message.input_id or derive_id("input", self.opened.recording_id, self.appends)
        self.appends += 1
        message = self.search(message)
        if message.force_listen:
            self._force_listen()
        attached = Attachments(
            input_id=input_id,
            frames=self.seen + self.decode_all(message),
            force_listen=message.force_listen,
            max_slice_nums=message.max_slice_nums,
        )
        self.seen = ()
        units = self.assembler.add(message.pcm, attached)
        for unit in units:
            dropped = self.waiting.push(unit)
            if self.lockstep is not None:
                self.lockstep.owe(unit.ordinal, self.appends)
            if dropped is not None:
                self.drop(dropped)
                if self.lockstep is not None:
                    self._say_pending(self.lockstep.drop(dropped.ordinal))
            self.start_if_due()
        if self.lockstep is not None and not units:
            self._say_pending(self.lockstep.wait())

    def drop(self, unit: PendingUnit) -> None:
        """Report a dropped unit, and forget its frames (B7)."""
        self.units_dropped += 1
        self.do(
            ef.DropUnit(
                ordinal=unit.ordinal,
                input_id=unit.attached.input_id,
                force_listen_passed=unit.attached.force_listen,
            )
        )
        for frame in unit.attached.frames:
            if frame.media in self.undecided_media:
                self.undecided_media.discard(frame.media)
                self.do(ef.CancelDecode(media=frame.media))

    def interrupt(self, _message: Interrupt) -> None:
        """Have the unit in flight listen, else the next one (002, interrupt)."""
        if self.call.unit is not None or isinstance(self.held, Speech):
            self._withhold()
        elif not self.waiting.force_next():
            self.assembler.force_listen()
        self.say(Interrupted())

    def pause(self, message: Pause) -> None:
        """Start no unit until the client resumes; waiting units are kept (002, pause)."""
        most_s = float(self.opened.limits.pause_s)
        timeout_s = most_s if message.timeout_s is None else min(message.timeout_s, most_s)
        self.is_paused = True
        self.set_timer("pause", timeout_s)
        self.say(Paused(timeout_s=timeout_s))

    def resume(self, _message: Resume) -> None:
        """Go on (002, resume)."""
        self.is_paused = False
        self.cancel_timer("pause")
        self.say(Resumed())
        self.start_if_due()

    def fall_silent(self) -> None:
        """Have the model listen from now on: the next unit, if none is there."""
        if self.call.unit is None and not self.waiting:
            self.assembler.force_listen()
        self._force_listen()

    def _force_listen(self) -> None:
        """Force the unit in flight and all waiting ones to listen (B6)."""
        self._withhold()
        self.waiting.force_listen()

    def _withhold(self) -> None:
        """Cut the unit in flight, or withhold its outcome if it is done."""
        interrupt = self.call.interrupt()
        if interrupt is not None:
            self.do(interrupt)
        if isinstance(self.held, Speech):  # not said yet, so it is not said at all
            self.response_id = None
            self.held = Listen(
                session_id=self.held.session_id,
                input_id=self.held.input_id,
                metrics=self.held.metrics,
                response_id=self.held.response_id,
            )

    def start_if_due(self) -> None:
        """Start the oldest waiting unit if the barrier is open (B1) and its media is decoded."""
        if self.move_if_due():
            return
        if not self.is_closed and self.call.is_idle and not self.is_paused:
            unit = self.waiting.pop_ready(self.undecided_media)
            if unit is not None:
                speaks = self.must_speak
                self.do(self.call.start(unit, self.max_slice_nums, force_speak=speaks))
            self._catch_up()

    @property
    def must_speak(self) -> bool:
        """Whether the next unit may not listen."""
        return False

    def _catch_up(self) -> None:
        """Let no more units wait than usual, once no more do."""
        if len(self.waiting) <= UNITS_PENDING_MAX:
            self.waiting.most = UNITS_PENDING_MAX

    # -- out ------------------------------------------------------------------------------------

    def unit_done(self, event: ev.UnitDone) -> None:
        """Send a unit's outcome, then finalize it; not deferred, the other way round (B2)."""
        result = event.result
        if not self.call.awaits(Phase.RUNNING, result.index):
            return
        self.answered()
        if self.is_closed:
            self.go_on()
            return
        outcome = self._outcome(result)
        if result.kv_length >= self.opened.limits.context_tokens:
            self.tell(outcome)
            self.call.settle()
            self.end("context_full")
            return
        if self.deferred_finalize:
            self._say_outcome(outcome)
        else:
            self.held = outcome
        self.do(self.call.finalize(result))

    def tell(self, outcome: Listen | Speech) -> None:
        """Send a unit's outcome."""
        self.say(outcome)

    def miss(self) -> None:
        """Go on after a unit that failed, and has no outcome."""

    def _say_outcome(self, outcome: Listen | Speech) -> None:
        self.tell(outcome)
        if self.lockstep is not None:
            self.lockstep.kv_length = outcome.metrics.kv_cache_length
            self._say_pending(self.lockstep.answer())

    def _say_pending(self, count: int) -> None:
        for _ in range(count):
            assert self.lockstep is not None
            metrics = self._timed(Metrics(kv_cache_length=self.lockstep.kv_length))
            self.say(Pending(is_speaking=self.response_id is not None, metrics=metrics))

    def _outcome(self, result: UnitResult) -> Listen | Speech:
        """Turn a result into the message to the client (B9)."""
        metrics = self._metrics(result)
        if result.is_listen or self.call.is_withheld(result):
            return Listen(
                session_id=self.session_id,
                input_id=self.call.input_id,
                metrics=metrics,
                response_id=self._listened(),
            )
        if self.response_id is None:
            self.response_id = self._next_response_id
            self.responses += 1
        speech = Speech(
            session_id=self.session_id,
            response_id=self.response_id,
            input_id=self.call.input_id,
            text=result.text,
            pcm=result.pcm,
            end_of_turn=result.end_of_turn,
            metrics=metrics,
        )
        self.ended_id = None
        if result.end_of_turn:
            self.ended_id = self.response_id
            self.response_id = None
        return speech

    @property
    def _next_response_id(self) -> str:
        return derive_id("resp", self.opened.recording_id, self.responses)

    def _listened(self) -> str:
        """End the spoken turn; returns the turn that the listen ends, else the one it precedes."""
        ended = self.response_id or self.ended_id or self._next_response_id
        self.response_id = self.ended_id = None
        return ended

    def _metrics(self, result: UnitResult) -> Metrics:
        costs = result.costs
        metrics = Metrics(
            kv_cache_length=result.kv_length,
            prefill_ms=costs.prefill_us / 1000,
            generate_ms=costs.generate_us / 1000,
            wall_clock_ms=costs.wall_us / 1000,
            cost_llm_ms=costs.llm_us / 1000,
            cost_tts_ms=costs.tts_us / 1000,
            cost_token2wav_ms=costs.token2wav_us / 1000,
            n_tokens=len(result.decided_ids),
            n_tts_tokens=len(result.codec_ids),
            vision_slices=result.vision_slices,
            vision_tokens=result.vision_tokens,
            recording="off",
        )
        return self._timed(metrics)

    def _timed(self, metrics: Metrics) -> Metrics:
        """Add the facts other than a unit's costs; only 002 has the time of a message."""
        told_ms = self.now_ns / NS_PER_MS if self.opened.endpoint == "duplex" else 0.0
        return attrs.evolve(
            metrics,
            dropped_units=self.units_dropped,
            recording=self.recording,
            session_ms=told_ms,
            wall_ms=self.opened.created_ms + told_ms if told_ms else 0.0,
        )

    def finalize_done(self, event: ev.FinalizeDone) -> None:
        """Open the barrier (B1)."""
        if self.call.awaits(Phase.FINALIZING, event.finalized.index):
            self._say_held()
            self.go_on()

    def _say_held(self) -> None:
        if self.held is not None and not self.is_closed:
            self._say_outcome(self.held)
        self.held = None

    def rollback_done(self, event: ev.RollbackDone) -> None:
        """Go on after the failed unit is undone (B3)."""
        if self.call.awaits(Phase.ROLLING_BACK, event.index):
            self.go_on()

    def unit_failed(self, event: ev.UnitFailed) -> None:
        """Undo a failed unit, or end the session if that cannot help (B3, B10)."""
        index = event.index
        if not self.call.awaits(Phase.RUNNING, index):
            return
        self.call.failures += 1
        self.answered()
        if self.is_closed:
            self.go_on()
        elif event.context_full:
            self.call.settle()
            self.end("context_full")
        elif not self.opened.limits.can_rollback or self.call.failures >= UNIT_FAILURES_MAX:
            self.call.settle()
            self.end("backend_error")
        else:
            self.response_id = None
            self.complain(ErrorCode.INFERENCE_ERROR, f"unit {index} failed and was undone")
            self.miss()
            if self.lockstep is not None:
                self._say_pending(self.lockstep.answer())
            self.do(self.call.rollback())

    def finalize_failed(self, event: ev.FinalizeFailed) -> None:
        """End the session: no unit may run on what is left (B3)."""
        if self.call.awaits(Phase.FINALIZING, event.index) and self.settle():
            self.give_up("the model was lost")

    def rollback_failed(self, event: ev.RollbackFailed) -> None:
        """End the session: no unit may run on what is left (B3)."""
        if self.call.awaits(Phase.ROLLING_BACK, event.index) and self.settle():
            self.give_up("the model was lost")

    # -- another slot ---------------------------------------------------------------------------

    def past_s(self) -> int | None:
        """Return the seconds that the model was fed; none before it was opened."""
        return self.call.index + 1 if self.state is State.ACTIVE else None

    def leave(self) -> None:
        """Move to another slot; meanwhile more units may wait than usual."""
        self.waiting.most = max(self.opened.limits.rebuild_units, UNITS_PENDING_MAX)
        super().leave()

    def take_up(self) -> None:
        """Send what waited for its finalize, and start the unit again that was lost."""
        self._say_held()
        if self.call.unit is not None and not self.is_closed:
            self.do(self.call.start_again())
            self._catch_up()
        elif self.pending is not None:
            super().take_up()
        else:
            self.start_if_due()

    def go_on(self) -> None:
        """Go on after a model call: start the next unit, or release the slot."""
        if self.settle():
            self.start_if_due()
