"""The times of a recording: each model call and each timer, with its request and its answer.

A fork runs on the recording's own clock: events come at their recorded times, and a call takes as
long as the same call did. So a fork without a change lasts exactly as long as its parent, to the
nanosecond, and the same fork made twice is identical.

Rules:
- A call that the recording does not have takes the median time of its kind.
- A call without an answer, in a session that ended anyway, hung: it hangs again. If the recording
  itself breaks off, its answer counts as coming after the end.
- A unit that failed in the recording fails again, without the model: the environment caused it. A
  prompt or a unit that did not fit the context is an answer of the model, and requested again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import UNIT_SAMPLES, Costs, Cut
from recorder.format.errors import LogDamaged
from recorder.format.records import Record
from recorder.read.scan import Damage

from ..rerun.logic import Replayer
from ..rerun.words import Step
from ..story.questions import Call, answered, asked
from .values import CannotForkError, Decisions, ForkRefusedError, decisions_of

LAST_SEQ: Final = 1 << 63
"""For events that the recording does not have: they follow recorded events of equal time."""


@attrs.frozen(kw_only=True)
class Answer:
    """The answer to a call, `after_ns` its request.

    Attributes:
        seq: the record that holds the answer; `LAST_SEQ` without one.
        event: the answer, if it was a failure that the environment caused; else None.
        cut: where the unit was interrupted.
        costs: the measured costs of the unit.
        cost_us: the measured cost of finalizing, or of a rebuild.
        steps: the units that a rebuild fed.
    """

    seq: int
    after_ns: int
    event: ev.Event | None = None
    cut: Cut | None = None
    costs: Costs = Costs()
    cost_us: int = 0
    steps: int = 0


class RecordedTimes:
    """The times of a recording; it is replayed, which proves that it is sound.

    `items` are its records in order, and its damage; `at` is the unit of the fork, which began by
    the event `begin_seq`, and in the client's sound at `begin_sample`; `end_ns`: its last record;
    `decided`: of each unit, what its model decided.

    Raises:
        LogDamaged: it is damaged.
        CannotForkError: it does not replay.
        ForkRefusedError: it has no such unit, or is a chat.
    """

    def __init__(self, items: Iterable[Record | Damage], at: int) -> None:
        self.at: Final = at
        self.begin_seq = -1
        self.begin_sample = self._openings = self._dropped = 0
        self._answers: dict[Call, Answer] = {}
        self._asked_ns: dict[Call, int] = {}
        self._timers: dict[int, int] = {}
        self._fired: dict[tuple[int, int], tuple[int, int]] = {}
        self.decided: dict[int, Decisions] = {}
        replayer = Replayer()
        for item in items:
            step = replayer.feed(item)
            if step is not None:
                self._note_answer(step)
                for effect in step.effects:
                    self._note_question(step.record, effect)
        report = replayer.report()
        if report.damage_count:
            raise LogDamaged("damaged: a model that missed an input cannot be taken up again")
        if report.divergence is not None:
            text = f"the recording does not replay, from record {report.divergence.seq} on"
            raise CannotForkError(f"{text} (see `antiphon replay`)")
        if replayer.session is None:
            raise CannotForkError("the recording holds no session yet")
        self.end_ns, self.units = report.span_ns, report.units
        self._is_finished: Final = replayer.session.is_finished
        if self.connected.mode == "chat":
            raise ForkRefusedError("a chat is not forked: each of its turns stands by itself")
        if self.connected.mode == "transcription":
            text = "a transcription is not forked: transcribe its sound again"
            raise ForkRefusedError(text)
        if self.begin_seq < 0:
            there = f"units 0 to {report.units - 1}" if report.units else "no units"
            raise ForkRefusedError(f"there is no unit {at}: the recording has {there}")

    def answer(self, call: Call) -> Answer | None:
        """Return the answer to a call; None: it never comes."""
        recorded = self._answers.get(call)
        if recorded is not None:
            return recorded
        asked_ns = self._asked_ns.get(call)
        if asked_ns is not None and self._is_finished:
            return None
        not_before_ns = 0 if asked_ns is None else self.end_ns - asked_ns
        alike = [answer for (name, _), answer in self._answers.items() if name == call[0]]
        usual = sorted((a for a in alike if a.event is None), key=lambda answer: answer.after_ns)
        if not usual:
            return Answer(seq=LAST_SEQ, after_ns=not_before_ns)
        middle = usual[(len(usual) - 1) // 2]
        after_ns = max(middle.after_ns, not_before_ns)
        return attrs.evolve(middle, seq=LAST_SEQ, after_ns=after_ns, cut=None)

    def firing(self, timer: ef.SetTimer) -> tuple[int, int]:
        """Return the time at which a timer fires, and its record."""
        return self._fired.get((timer.generation, timer.at_ns), (timer.at_ns, LAST_SEQ))

    # -- requests ------------------------------------------------------------------------------

    def _note_question(self, record: Record, effect: ef.Effect) -> None:
        match effect:
            case ef.StartUnit(unit=unit) if unit.index == self.at:
                # Units start in order of arrival, and dropped units came before.
                self.begin_seq = record.seq
                self.begin_sample = (self.at + self._dropped) * UNIT_SAMPLES
            case ef.DropUnit():
                self._dropped += 1
            case ef.SetTimer():
                self._timers[effect.generation] = effect.at_ns
            case ef.OpenBackend():
                self._openings += 1
        call = numbered(asked(effect), self._openings)
        if call is not None:
            self._asked_ns[call] = record.at_ns

    def _note_answer(self, step: Step) -> None:
        event = step.event
        facts: dict[str, Any] = {}
        match event:
            case ev.ConnectionOpened():
                self.connected = event
            case ev.UnitDone(result=result):
                facts = {"cut": result.cut, "costs": result.costs}
                self.decided[result.index] = decisions_of(result)
            case ev.FinalizeDone(finalized=made):
                facts = {"cost_us": made.cost_us}
            case ev.BackendOpenFailed(context_full=False) | ev.UnitFailed(context_full=False):
                facts = {"event": event}
            case ev.Rebuilt(steps=steps, cost_us=cost_us):
                facts = {"steps": steps, "cost_us": cost_us}
            case ev.FinalizeFailed() | ev.RollbackFailed() | ev.RebuildFailed():
                facts = {"event": event}
            case ev.TimerFired(at_ns=at_ns, generation=generation) if generation in self._timers:
                due_ns = self._timers.pop(generation)
                self._fired[generation, due_ns] = (at_ns, step.record.seq)
        call = numbered(answered(event), self._openings)
        asked_ns = None if call is None else self._asked_ns.get(call)
        if call is not None and asked_ns is not None and call not in self._answers:
            after_ns = step.record.at_ns - asked_ns
            self._answers[call] = Answer(seq=step.record.seq, after_ns=after_ns, **facts)


def numbered(call: Call | None, openings: int) -> Call | None:
    """Number an opening by how often it was asked for by then: a lease may be opened again."""
    return call if call is None or call[0] != "open" else ("open", openings)
