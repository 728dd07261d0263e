"""When things happened in a recording: each call of the model and each timer, asked and answered.

A fork runs on the recording's own clock. What a client and a server did comes when it came; a call
takes as long as the same call took then. So a fork without a change lasts to the nanosecond as long
as its parent, and the same fork made twice is the same.

Rules:
- A call that the recording does not have takes as long as the middle one of its kind.
- A call that was asked for and never answered, in a session that ended all the same, hung: it hangs
  again. Where the recording itself breaks off, the answer is taken to have come after its end.
- A unit that failed then fails again, without the model: it was the environment's doing. A prompt
  or a unit that did not fit the context is the model's own answer, and asked for again.

It keeps a few numbers for each call, and no sound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from protocol import effects as ef
from protocol import events as ev
from protocol.model import UNIT_SAMPLES, Costs, Cut
from recorder.errors import LogDamaged
from recorder.records import Record
from recorder.scan import Damage

from ..logic import Replayer
from ..story.questions import Call, answered, asked
from ..words import Step
from .values import CannotForkError, ForkRefusedError

LAST_SEQ: Final = 1 << 63
"""Of what the recording does not have: at the same time it comes after all that it has."""


@attrs.frozen(kw_only=True)
class Answer:
    """How a call was answered.

    Attributes:
        seq: the record that holds the answer; `LAST_SEQ` where there is none.
        after_ns: how long after the question.
        event: the answer, where it was a failure that the model has no part in; else None.
        cut: where the unit was interrupted.
        costs: the unit's, as measured.
        cost_us: of finalizing, likewise.
    """

    seq: int
    after_ns: int
    event: ev.Event | None = None
    cut: Cut | None = None
    costs: Costs = Costs()
    cost_us: int = 0


@attrs.frozen(kw_only=True)
class Timeline:
    """One recording's times.

    Attributes:
        connected: its first event.
        at: the unit of the fork.
        begin_seq: the event by which the unit of the fork began.
        begin_sample: where that unit's sound begins in what the client sent, in samples.
        end_ns: when its last record was written.
        units: units started.
    """

    connected: ev.ConnectionOpened
    at: int
    begin_seq: int
    begin_sample: int
    end_ns: int
    units: int
    _answers: dict[Call, Answer]
    _asked_ns: dict[Call, int]
    _fired: dict[tuple[int, int], tuple[int, int]]
    _is_finished: bool

    def answer(self, call: Call) -> Answer | None:
        """Say how a call is to be answered; None: never."""
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
        """Say when a timer fires, and the record that tells of it."""
        return self._fired.get((timer.generation, timer.at_ns), (timer.at_ns, LAST_SEQ))


def survey(items: Iterable[Record | Damage], at: int) -> Timeline:
    """Read the times of a recording; it is replayed for that, so that it is known to be sound.

    Args:
        items: its records in order, and its damage.
        at: the unit at which it is to be forked.

    Raises:
        LogDamaged: it is damaged.
        CannotForkError: it does not replay.
        ForkRefusedError: it has no such unit, or is a chat.
    """
    surveyor = Surveyor(at)
    for item in items:
        surveyor.feed(item)
    return surveyor.timeline()


class Surveyor:
    """Reads the times of a recording, record by record."""

    def __init__(self, at: int) -> None:
        self._at: Final = at
        self._replayer: Final = Replayer()
        self._connected: ev.ConnectionOpened | None = None
        self._begin: tuple[int, int] | None = None
        self._dropped = 0
        self._answers: dict[Call, Answer] = {}
        self._asked_ns: dict[Call, int] = {}
        self._openings = 0
        self._timers: dict[int, int] = {}
        self._fired: dict[tuple[int, int], tuple[int, int]] = {}

    def feed(self, item: Record | Damage) -> None:
        """Take the next record, or damage."""
        step = self._replayer.feed(item)
        if step is None:
            return
        if isinstance(step.event, ev.ConnectionOpened):
            self._connected = step.event
        self._note_answer(step)
        for effect in step.effects:
            self._note_question(step.record, effect)

    def timeline(self) -> Timeline:
        """Give what was found.

        Raises:
            LogDamaged: the recording is damaged.
            CannotForkError: it does not replay.
            ForkRefusedError: it has no such unit, or is a chat.
        """
        report, session = self._replayer.report(), self._replayer.session
        if report.damage_count:
            raise LogDamaged("damaged: a model that missed an input cannot be taken up again")
        if report.divergence is not None:
            text = f"the recording does not replay, from record {report.divergence.seq} on"
            raise CannotForkError(f"{text} (see `antiphon replay`)")
        if self._connected is None or session is None:
            raise CannotForkError("the recording holds no session yet")
        if self._connected.mode == "chat":
            raise ForkRefusedError("a chat is not forked: each of its turns stands by itself")
        if self._connected.mode == "transcription":
            text = "a transcription is not forked: have its sound transcribed anew"
            raise ForkRefusedError(text)
        if self._begin is None:
            there = f"units 0 to {report.units - 1}" if report.units else "no units"
            raise ForkRefusedError(f"there is no unit {self._at}: the recording has {there}")
        return Timeline(
            connected=self._connected,
            at=self._at,
            begin_seq=self._begin[0],
            begin_sample=self._begin[1],
            end_ns=report.span_ns,
            units=report.units,
            answers=self._answers,
            asked_ns=self._asked_ns,
            fired=self._fired,
            is_finished=session.is_finished,
        )

    # -- what was asked -------------------------------------------------------------------------

    def _note_question(self, record: Record, effect: ef.Effect) -> None:
        match effect:
            case ef.StartUnit(unit=unit) if unit.index == self._at:
                # Units start in the order in which they came, and what was dropped came before.
                seconds = self._at + self._dropped
                self._begin = (record.seq, seconds * UNIT_SAMPLES)
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
            case ev.UnitDone(result=result):
                facts = {"cut": result.cut, "costs": result.costs}
            case ev.FinalizeDone(finalized=made):
                facts = {"cost_us": made.cost_us}
            case ev.BackendOpenFailed(context_full=False) | ev.UnitFailed(context_full=False):
                facts = {"event": event}
            case ev.FinalizeFailed() | ev.RollbackFailed():
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
