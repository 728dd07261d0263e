"""Counters and histograms of a server, or of a recording that is measured.

A unit makes a dozen observations: each is a lookup, a bisection and two additions, without a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

from protocol.values.modes import Mode

from .catalogue import ALL, Metric

Labels = tuple[str, ...]


class Series:
    """The sum of a counter or a histogram, and how many observations each bucket has.

    `bounds` are the rising upper bounds of the buckets, with one bucket above.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, amount: float) -> None:
        """Add to a counter."""
        self.total += amount

    def observe(self, value: float) -> None:
        """Add a value to the first bucket whose bound it does not exceed, and to the sum."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Instruments:
    """The instruments of one server, one for each series of the catalogue."""

    def __init__(self) -> None:
        self._made: Final = {
            metric: {labels: Series(metric.buckets) for labels in metric.series} for metric in ALL
        }

    def series(self, metric: Metric, *labels: str) -> Series:
        """A counter or a histogram; the values of its labels in the order of their names."""
        return self._made[metric][labels]

    def all(self) -> Iterator[tuple[Metric, Mapping[Labels, Series]]]:
        """Each metric, with its series by the values of their labels."""
        yield from self._made.items()


class Books:
    """The instruments of a server, as the meters of one mode's sessions use them.

    The mode is the first label of a metric that has it, and is not given.
    """

    def __init__(self, made: Instruments, mode: Mode) -> None:
        self._made = made
        self._mode = mode
        self._known: dict[tuple[Metric, Labels], Series] = {}

    def add(self, metric: Metric, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        self._series(metric, labels).add(amount)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        self._series(metric, labels).observe(value)

    def _series(self, metric: Metric, labels: Labels) -> Series:
        series = self._known.get((metric, labels))
        if series is None:
            mode = (self._mode,) if "mode" in metric.labels else ()
            series = self._known[metric, labels] = self._made.series(metric, *mode, *labels)
        return series
