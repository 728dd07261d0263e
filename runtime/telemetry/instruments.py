"""Counters and histograms, formatted by `prometheus_client`.

A unit makes a dozen observations: each is two lookups, a bisection and two additions, without a
lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protocol.values.modes import Mode

from .catalogue import ALL, Metric

Labels = tuple[str, ...]


class Count:
    """A number that only rises."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to it."""
        self.value += amount


class Spread:
    """A histogram; `bounds` are the rising upper bounds of its buckets, with one bucket above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add a value to the first bucket whose bound it does not exceed, and to the sum."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Instruments(Collector):
    """The instruments of one server, one for each series of the catalogue."""

    def __init__(self) -> None:
        self._made: Final[dict[Metric, dict[Labels, Count | Spread]]] = {
            metric: {
                labels: Spread(metric.buckets) if metric.buckets else Count()
                for labels in metric.series
            }
            for metric in ALL
        }

    def count(self, metric: Metric, *labels: str) -> Count:
        """A counter; the values of its labels in the order of their names."""
        found = self._made[metric][labels]
        assert isinstance(found, Count)
        return found

    def spread(self, metric: Metric, *labels: str) -> Spread:
        """A histogram; labels as of `count`."""
        found = self._made[metric][labels]
        assert isinstance(found, Spread)
        return found

    def collect(self) -> Iterator[Family]:
        """The current values (`Collector`)."""
        for metric, series in self._made.items():
            yield _family(metric, series.items())


class Books:
    """The instruments of a server, as the meters of one mode's sessions use them.

    The mode is the first label of a metric that has it, and is not given.
    """

    def __init__(self, made: Instruments, mode: Mode) -> None:
        self._made = made
        self._mode = mode

    def add(self, metric: Metric, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        self._made.count(metric, *self._of_mode(metric), *labels).inc(amount)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        self._made.spread(metric, *self._of_mode(metric), *labels).observe(value)

    def _of_mode(self, metric: Metric) -> Labels:
        return (self._mode,) if "mode" in metric.labels else ()


def _family(metric: Metric, series: Iterable[tuple[Labels, Count | Spread]]) -> Family:
    if metric.kind == "counter":
        counter = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, count in series:
            assert isinstance(count, Count)
            counter.add_metric(labels, count.value)
        return counter
    family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
    for labels, spread in series:
        assert isinstance(spread, Spread)
        bounds = [*map(floatToGoString, spread.bounds), "+Inf"]
        buckets = zip(bounds, accumulate(spread.counts), strict=True)
        family.add_metric(labels, list(buckets), spread.total)
    return family
