"""Counters and histograms, formatted by `prometheus_client`.

A unit makes a dozen observations: each is a bisection and two additions, without a lock.
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
    """The instruments of one server, each made on first use."""

    def __init__(self) -> None:
        self._counts: Final[dict[Metric, dict[Labels, Count]]] = {}
        self._spreads: Final[dict[Metric, dict[Labels, Spread]]] = {}

    def count(self, metric: Metric, *labels: str) -> Count:
        """A counter; the values of its labels in the order of their names."""
        assert metric.kind == "counter"
        assert len(labels) == len(metric.labels)
        return self._counts.setdefault(metric, {}).setdefault(labels, Count())

    def spread(self, metric: Metric, *labels: str) -> Spread:
        """A histogram; labels as of `count`."""
        assert metric.kind == "histogram"
        assert len(labels) == len(metric.labels)
        return self._spreads.setdefault(metric, {}).setdefault(labels, Spread(metric.buckets))

    def describe(self) -> Iterable[Family]:
        """The families, without values (`Collector`)."""
        return [self._family(metric) for metric in ALL]

    def collect(self) -> Iterator[Family]:
        """The current values (`Collector`)."""
        for metric in ALL:
            yield self._family(metric)

    def _family(self, metric: Metric) -> Family:
        if metric.kind == "counter":
            counter = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            for labels, count in self._counts.get(metric, {}).items():
                counter.add_metric(labels, count.value)
            return counter
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, spread in self._spreads.get(metric, {}).items():
            bounds = [*map(floatToGoString, spread.bounds), "+Inf"]
            buckets = zip(bounds, accumulate(spread.counts), strict=True)
            family.add_metric(labels, list(buckets), spread.total)
        return family
