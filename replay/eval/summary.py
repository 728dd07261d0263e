"""Sums up measures over recordings, and puts them into numbers for people and scripts.

Percentiles are by the nearest rank: a value that was measured. Sums and shares are made of the
integers of all recordings, so they do not depend on the order. Each value takes 8 bytes: it is an
integer that a float holds exactly (nanoseconds of a hundred days), or a recording's ratio.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import fsum
from statistics import median_low
from typing import Final

import attrs

from runtime.measures.measure import SCALES, Measure, Ratio, Scores, Times, Total, Value

from .table import MEASURES

DIGITS: Final = 6
"""Microseconds, where a sample takes 42 or 63."""
P90: Final = 90

Json = dict[str, object]


@attrs.frozen(kw_only=True)
class Statistics:
    """A measure over several recordings, in its unit.

    Attributes:
        recordings: how many have it.
        count: values that were measured; of a share, the cases that it is a share of.
        value: of single moments the median, of amounts the sum, of ratios that of all recordings
            together.
        median, p90: of all single moments, else of the recordings.
        worst_log: the recording with the worst value.
    """

    recordings: int
    count: int
    value: float
    median: float
    p90: float
    worst: float
    worst_log: str

    def has_worst(self, measure: Measure) -> bool:
        """Whether it is worth saying where the worst is: not if it is nothing."""
        return bool(self.worst) or measure.better == "higher"


STATISTICS: Final = ("value", "median", "p90", "worst", "count", "recordings")
"""Those that a condition can name."""


@attrs.define
class _Tally:
    """One measure so far; `values` are raw, and of recordings if it has no single moments."""

    measure: Measure
    values: array[float] = attrs.Factory(lambda: array("d"))
    recordings: int = 0
    part: int = 0
    whole: int = 0
    worst: float | None = None
    worst_log: str = ""

    def add(self, value: Value, log: str) -> None:
        self.recordings += 1
        raws = raw_values(value)
        if isinstance(value, Ratio):
            self.part += value.part
            self.whole += value.whole
        self.values.extend(raws)
        worst = worst_of(self.measure, raws)
        if self.worst is None or worst_of(self.measure, [self.worst, worst]) != self.worst:
            self.worst, self.worst_log = worst, log

    def statistics(self) -> Statistics:
        ordered, kind = sorted(self.values), self.measure.kind
        value: float = median_low(ordered)
        if kind == "total":
            value = fsum(ordered)
        elif kind == "ratio":
            value = self.part / self.whole
        assert self.worst is not None
        is_share = self.measure.unit == "share"
        return Statistics(
            recordings=self.recordings,
            count=self.whole if is_share else len(ordered),
            value=scaled(self.measure, value),
            median=scaled(self.measure, median_low(ordered)),
            p90=scaled(self.measure, percentile(ordered, P90)),
            worst=scaled(self.measure, self.worst),
            worst_log=self.worst_log,
        )


class Summary:
    """Measures over recordings, added one by one."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    @classmethod
    def of(cls, log: str, scores: Scores) -> dict[str, Statistics]:
        """Return the statistics of one recording."""
        summary = cls()
        summary.add(log, scores)
        return summary.statistics()

    def add(self, log: str, scores: Scores) -> None:
        """Add a recording."""
        for name, value in scores.items():
            if name not in self._tallies:
                self._tallies[name] = _Tally(MEASURES[name])
            self._tallies[name].add(value, log)

    def statistics(self) -> dict[str, Statistics]:
        """Return the measures that any recording has, in the order of the table."""
        return {
            name: self._tallies[name].statistics() for name in MEASURES if name in self._tallies
        }


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted values: the least that so many do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def worst_of(measure: Measure, values: Sequence[float]) -> float:
    """Return the worst value; the largest of a measure that only describes."""
    return min(values) if measure.better == "higher" else max(values)


def raw_values(value: Value) -> list[float]:
    """List what a recording has of a measure: its single moments, or one number."""
    match value:
        case Times(values=values):
            return [amount for _, amount in values]
        case Total(amount=amount):
            return [amount]
        case Ratio(part=part, whole=whole):
            return [part / whole]


def own_value(value: Value) -> float:
    """Return what a recording has of a measure, as one raw number."""
    return median_low(raw_values(value))


def scaled(measure: Measure, value: float) -> float:
    """Write a raw value in the measure's unit."""
    return round(value * SCALES[measure.unit], DIGITS)


def own_values(scores: Scores) -> dict[str, float]:
    """Return the value of each measure in its unit; none of a forged log with endless numbers."""
    try:
        return {name: scaled(MEASURES[name], own_value(it)) for name, it in scores.items()}
    except OverflowError:  # numbers of a server fit
        return {}


def scores_json(scores: Scores) -> dict[str, Json]:
    """Write a recording's measures as plain values, in the order of the table."""
    return {
        name: _value_json(measure, scores[name])
        for name, measure in MEASURES.items()
        if name in scores
    }


def _value_json(measure: Measure, value: Value) -> Json:
    body: Json = {"value": scaled(measure, own_value(value))}
    if isinstance(value, Ratio) and measure.unit == "share":
        body["count"] = value.whole
    if isinstance(value, Times):
        amounts = sorted(amount for _, amount in value.values)
        worst = worst_of(measure, amounts)
        at_ns = next(at_ns for at_ns, amount in value.values if amount == worst)
        body |= {
            "count": len(amounts),
            "p90": scaled(measure, percentile(amounts, P90)),
            "worst": scaled(measure, worst),
            "worst_at_s": round(at_ns * SCALES["s"], DIGITS),
        }
    return body


def statistics_json(found: Mapping[str, Statistics]) -> dict[str, Json]:
    """Write the summary as plain values."""
    return {name: {"unit": MEASURES[name].unit, **attrs.asdict(it)} for name, it in found.items()}
