"""What a full replay has found so far: the first difference, and each unit that differs.

A `Rerun` makes the calls of one kind again, and gives a `Verdict` on each; `Verdicts` keeps them,
in bounds. What is compared is `outputs`'.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Generic, TypeVar

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from runtime.model.backends.base import Backend, ModelSession
from runtime.model.backends.forcing import Choice

from .difference import Difference
from .outputs import is_near_tie
from .report import Divergence, Kind, UnitDifference
from .words import Step, cause_of, name_of

UNITS_KEPT: Final = 100
"""Units that differ, told one by one; a model that does other work differs in all of them."""


@attrs.frozen(kw_only=True)
class Finding:
    """A difference between what the model made and what was recorded.

    Attributes:
        difference: where, and what stands there.
        snr_db: of PCM that differs (`outputs.snr_db`).
        choice: the decision that it is; None where it is no decision, or none was forced.
    """

    difference: Difference
    snr_db: float | None = None
    choice: Choice | None = None


def finding_of(
    difference: Difference | None, snr: float | None = None, choice: Choice | None = None
) -> Finding | None:
    """Give what was found; None: there is no difference."""
    if difference is None:
        return None
    return Finding(difference=difference, snr_db=snr, choice=choice)


@attrs.frozen(kw_only=True)
class Verdict:
    """What a recorded event is worth, and what it is to be replaced by.

    Attributes:
        event: the event with the model's new output; None where there is none.
        finding: the first difference, or None.
        index: of the call that it is of; None: it is of none.
    """

    event: ev.Event | None = None
    finding: Finding | None = None
    index: int | None = None


class ModelUnavailableError(Exception):
    """The log does not name its model, or it cannot be had here, or not be forced."""


Held = TypeVar("Held", bound=ModelSession)
ASKED: Final = (ef.OpenBackend, ef.StartUnit, ef.StartFinalize, ef.StartTurn, ef.RunChunk)
"""What the machine asks of a model that is compared."""


class Rerun(Generic[Held]):
    """The calls of one session, made again: those of one kind.

    Args:
        backend: the model.
        teacher_forced: make it decide what was recorded.
        held_units: units that were held to another recording (`held`), from the first on.

    Attributes:
        name: what the report calls them.
        made: how many were made again.
        asked: what the machine asks the model for, until its answer comes.
        held: what the model holds for the session.
    """

    name: ClassVar[str]

    def __init__(self, backend: Backend, teacher_forced: bool = False, held_units: int = 0) -> None:
        self.backend: Final = backend
        self.teacher_forced: Final = teacher_forced
        self.held_units: Final = held_units
        self.made = 0
        self.asked: dict[type[ef.Effect], Any] = {}
        self.held: Held | None = None

    def counts(self, changed: int) -> dict[str, Any]:
        """Say what the report counts."""
        return {self.name: self.made, f"{self.name}_changed": changed}

    def note(self, effect: ef.Effect) -> None:
        """Keep what the machine asks the model for."""
        if isinstance(effect, ASKED):
            self.asked[type(effect)] = effect

    async def renew(self, event: ev.Event) -> Verdict:
        """Make the model's part of an event again.

        Raises:
            Exception: whatever the model raises, a bug of its own too.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Give back to the model what it holds."""
        held, self.held = self.held, None
        if held is not None:
            await held.release()


class Verdicts:
    """The findings of one full replay.

    Attributes:
        divergence: the first difference.
        changed: how units differ, the first `UNITS_KEPT` of them.
        indices: the units, turns or chunks that differ.
    """

    def __init__(self) -> None:
        self.divergence: Divergence | None = None
        self.changed: list[UnitDifference] = []
        self.indices: Final[set[int]] = set()

    def take(self, step: Step, verdict: Verdict, last_unit: int | None) -> None:
        """Take a verdict; of a unit that differs the first difference is kept.

        Args:
            step: the recorded event that it is on.
            verdict: what was found.
            last_unit: the last unit started by then; None in a session without units.
        """
        finding, index = verdict.finding, verdict.index
        if finding is None:
            return
        if index is None or last_unit is None:
            self.first(step, finding, unit=last_unit)
        else:
            if index not in self.indices and len(self.changed) < UNITS_KEPT:
                told = _told(finding)
                self.changed.append(UnitDifference(unit=index, seq=step.record.seq, **told))
            self.first(step, finding, unit=index)
        if index is not None:
            self.indices.add(index)

    def first(
        self, step: Step, finding: Finding, *, unit: int | None, kind: Kind = "model"
    ) -> None:
        """Keep a difference where it is the first.

        Args:
            step: the recorded event that it shows in.
            finding: the difference.
            unit: the last unit started by then.
            kind: `model` or `model_failed`.
        """
        if self.divergence is None:
            self.divergence = Divergence(
                kind=kind,
                seq=step.record.seq,
                record=name_of(step.record),
                at_ns=step.record.at_ns,
                unit=unit,
                cause=cause_of(step),
                **_told(finding),
            )


def _told(finding: Finding) -> dict[str, Any]:
    found, choice = finding.difference, finding.choice
    return {
        "field": found.path,
        "recorded": found.recorded,
        "came_out": found.came_out,
        "snr_db": finding.snr_db,
        "margin": None if choice is None else choice.margin,
        "draw_gap": None if choice is None else choice.draw_gap,
        "near_tie": None if choice is None else is_near_tie(choice),
    }
