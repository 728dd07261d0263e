"""Where figures are added up: a number to count in, and a histogram to spread over.

A unit makes a dozen observations, so each is a bisection and two additions. There is no lock: the
event loop's thread counts, and it reads too. How they are written is `prometheus_client`'s.
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
    """A histogram.

    Args:
        bounds: the upper bounds of its buckets, rising; what is above all of them has one more.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add a value: to the first bucket whose bound it does not pass, and to their sum."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Instruments(Collector):
    """The instruments of one server, each made when it is first asked for."""

    def __init__(self) -> None:
        self._counts: Final[dict[Metric, dict[Labels, Count]]] = {}
        self._spreads: Final[dict[Metric, dict[Labels, Spread]]] = {}

    def count(self, metric: Metric, *labels: str) -> Count:
        """Give a counter; the values of its labels in the order of their names."""
        assert metric.kind == "counter"
        assert len(labels) == len(metric.labels)
        return self._counts.setdefault(metric, {}).setdefault(labels, Count())

    def spread(self, metric: Metric, *labels: str) -> Spread:
        """Give a histogram, likewise."""
        assert metric.kind == "histogram"
        assert len(labels) == len(metric.labels)
        return self._spreads.setdefault(metric, {}).setdefault(labels, Spread(metric.buckets))

    def describe(self) -> Iterable[Family]:
        """Name what there may be (`Collector`)."""
        return [self._family(metric) for metric in ALL]

    def collect(self) -> Iterator[Family]:
        """Give all figures as they are now (`Collector`)."""
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
