"""The metrics of one server: a registry of its own, and the answer of `/metrics`.

A session's `Meter` counts into `books`; `gauges` asks the server for its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final, get_args
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_CONTENT_TYPE
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protocol.values.events import ConnectionOpened
from protocol.values.modes import Mode

from .catalogue import Metric
from .gauges import ServerGauges
from .instruments import Books, Instruments, Labels, Series
from .later import Backlog, Later
from .meter import Meter
from .watching import ServerStatus

TEXT_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_MEDIA_TYPE: Final = "application/openmetrics-text"


class Metrics:
    """All metrics of a server and its sessions; without `status` only those of sessions.

    `process` adds the process's memory, CPU and files, and Python's garbage collector.
    """

    def __init__(
        self, *, status: Callable[[], ServerStatus] | None = None, process: bool = False
    ) -> None:
        self.registry: Final = CollectorRegistry()
        made = Instruments()
        self._backlog: Final = Backlog()
        self.registry.register(Counted(made, self._backlog))
        self._books: Final = {mode: Books(made, mode) for mode in get_args(Mode)}
        self._meters: Final[WeakValueDictionary[str, Meter]] = WeakValueDictionary()
        if status is not None:
            self.registry.register(ServerGauges(status))
        if process:
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def watch(self, opened: ConnectionOpened, owner: str) -> Later:  # noqa: ARG002
        """As `Telemetry`; the owner is not counted."""
        meter = Meter(self._books[opened.mode], opened)
        self._meters[opened.recording_id] = meter
        return Later(meter, self._backlog)

    def kv_tokens(self, recording_id: str) -> int:
        """A session's tokens in the model's cache; 0 if it does not run."""
        self._backlog.count()
        meter = self._meters.get(recording_id)
        return 0 if meter is None else meter.kv_tokens

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Format all metrics, as OpenMetrics if the `Accept` header asks; and the content type.

        From the event loop only, because it asks for the server's status.
        """
        wanted = (part.split(";")[0].strip().lower() for part in accept.split(","))
        if OPEN_MEDIA_TYPE in wanted:
            body: bytes = generate_open(self.registry)  # type: ignore[no-untyped-call]
            return body, OPEN_CONTENT_TYPE
        return generate_latest(self.registry), TEXT_CONTENT_TYPE


class Counted(Collector):
    """Formats a server's instruments."""

    def __init__(self, made: Instruments, backlog: Backlog) -> None:
        self._made = made
        self._backlog = backlog

    def collect(self) -> Iterator[Family]:
        """The current values."""
        self._backlog.count()
        for metric, made in self._made.all():
            yield _family(metric, made)


def _family(metric: Metric, made: Mapping[Labels, Series]) -> Family:
    if metric.kind == "counter":
        counter = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, series in made.items():
            counter.add_metric(labels, series.total)
        return counter
    family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
    for labels, series in made.items():
        bounds = [*map(floatToGoString, series.bounds), "+Inf"]
        buckets = zip(bounds, accumulate(series.counts), strict=True)
        family.add_metric(labels, list(buckets), series.total)
    return family
