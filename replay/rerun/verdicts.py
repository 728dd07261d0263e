"""The findings of a full replay so far: the first difference, and each unit that differs.

A `Rerun` makes the calls of one kind again, and gives a `Verdict` on each; `Verdicts` keeps a
bounded number. `outputs` compares.
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
"""Units that differ, listed one by one; for some models all of them do."""


@attrs.frozen(kw_only=True)
class Finding:
    """A difference between the model's output and the recorded one.

    `snr_db` is for PCM (`outputs.snr_db`), `choice` for a forced decision that differs.
    """

    difference: Difference
    snr_db: float | None = None
    choice: Choice | None = None


def finding_of(
    difference: Difference | None, snr: float | None = None, choice: Choice | None = None
) -> Finding | None:
    """Make a finding; None if there is no difference."""
    if difference is None:
        return None
    return Finding(difference=difference, snr_db=snr, choice=choice)


@attrs.frozen(kw_only=True)
class Verdict:
    """The verdict on a recorded event.

    `event` has the model's new output, if any, to replace it; `index` is of its call, if it has
    one.
    """

    event: ev.Event | None = None
    finding: Finding | None = None
    index: int | None = None


class ModelUnavailableError(Exception):
    """The log does not name its model, or the model is not available here or cannot be forced."""


Held = TypeVar("Held", bound=ModelSession)
ASKED: Final = (ef.OpenBackend, ef.StartUnit, ef.StartFinalize, ef.StartTurn, ef.RunChunk)
"""The calls of the model that are compared."""


class Rerun(Generic[Held]):
    """The calls of one session, made again; a class for each kind.

    `held_units` units, from the first on, were held to another recording (`held`).

    Attributes:
        name: the report's name of the calls.
        made: the number of calls made again.
        asked: calls that wait for their answer.
        held: the model's state of the session.
    """

    name: ClassVar[str]

    def __init__(self, backend: Backend, held_units: int = 0) -> None:
        self.backend: Final = backend
        self.held_units: Final = held_units
        self.made = 0
        self.asked: dict[type[ef.Effect], Any] = {}
        self.held: Held | None = None

    def counts(self, changed: int) -> dict[str, Any]:
        """Count for the report."""
        return {self.name: self.made, f"{self.name}_changed": changed}

    def note(self, effect: ef.Effect) -> None:
        """Keep a call of the model."""
        if isinstance(effect, ASKED):
            self.asked[type(effect)] = effect

    async def renew(self, event: ev.Event) -> Verdict:
        """Make the model's part of an event again; any exception of the model's passes on."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release the model's state."""
        held, self.held = self.held, None
        if held is not None:
            await held.release()


class Verdicts:
    """The first difference, the first `UNITS_KEPT` units that differ, and all their indices."""

    def __init__(self) -> None:
        self.divergence: Divergence | None = None
        self.changed: list[UnitDifference] = []
        self.indices: Final[set[int]] = set()

    def take(self, step: Step, verdict: Verdict, last_unit: int | None) -> None:
        """Take a verdict; a unit keeps its first difference. `last_unit` is None without units."""
        finding, index = verdict.finding, verdict.index
        if finding is None:
            return
        if index is None or last_unit is None:
            self.first(step, finding, unit=last_unit)
        else:
            if index not in self.indices and len(self.changed) < UNITS_KEPT:
                self.changed.append(_changed(finding, index, step.record.seq))
            self.first(step, finding, unit=index)
        if index is not None:
            self.indices.add(index)

    def first(
        self, step: Step, finding: Finding, *, unit: int | None, kind: Kind = "model"
    ) -> None:
        """Keep a difference in a recorded event if it is the first; `unit` is the last started."""
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
    found = finding.difference
    return {
        "field": found.path,
        "recorded": found.recorded,
        "came_out": found.came_out,
        "snr_db": finding.snr_db,
    }


def _changed(finding: Finding, unit: int, seq: int) -> UnitDifference:
    choice = finding.choice
    return UnitDifference(
        unit=unit,
        seq=seq,
        margin=None if choice is None else choice.margin,
        draw_gap=None if choice is None else choice.draw_gap,
        near_tie=None if choice is None else is_near_tie(choice),
        **_told(finding),
    )
