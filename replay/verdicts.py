"""What a full replay has found so far: the first difference, and each unit that differs.

It compares nothing itself; it keeps what `outputs` found, in bounds.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from runtime.backends.forcing import Choice, ForcedResult

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


class Verdicts:
    """The findings of one full replay.

    Attributes:
        divergence: the first difference.
        changed: how units differ, the first `UNITS_KEPT` of them.
        units_changed: units that differ.
        turns_changed: turns of chat that differ.
        chunks_changed: chunks of a transcription that differ.
        decisions: that were forced.
        decisions_changed: those of them that the model would have decided otherwise.
        near_ties: those of these that rounding could have turned.
    """

    def __init__(self) -> None:
        self.divergence: Divergence | None = None
        self.changed: list[UnitDifference] = []
        self.decisions = self.decisions_changed = self.near_ties = 0
        self._units: Final[set[int]] = set()
        self._turns: Final[set[int]] = set()
        self._chunks: Final[set[int]] = set()

    @property
    def units_changed(self) -> int:
        """Units that differ."""
        return len(self._units)

    @property
    def turns_changed(self) -> int:
        """Turns of chat that differ."""
        return len(self._turns)

    @property
    def chunks_changed(self) -> int:
        """Chunks of a transcription that differ."""
        return len(self._chunks)

    def count(self, forced: ForcedResult) -> None:
        """Count a forced unit's decisions."""
        made = forced.result
        self.decisions += len(made.decided_ids) + len(made.codec_ids)
        self.decisions_changed += len(forced.choices)
        self.near_ties += sum(is_near_tie(choice) is True for choice in forced.choices)

    def unit(self, step: Step, index: int, finding: Finding) -> None:
        """Take a unit that differs; the first difference of each is kept."""
        if index not in self._units and len(self.changed) < UNITS_KEPT:
            told = _told(finding)
            self.changed.append(UnitDifference(unit=index, seq=step.record.seq, **told))
        self._units.add(index)
        self.first(step, finding, unit=index)

    def turn(self, step: Step, index: int, finding: Finding, *, unit: int | None) -> None:
        """Take a turn of chat that differs."""
        self._turns.add(index)
        self.first(step, finding, unit=unit)

    def chunk(self, step: Step, index: int, finding: Finding) -> None:
        """Take a chunk of a transcription that differs."""
        self._chunks.add(index)
        self.first(step, finding, unit=None)

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
