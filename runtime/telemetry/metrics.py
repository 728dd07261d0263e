"""The metrics of one server: a registry of its own, and what `/metrics` answers.

There are no globals: two servers in one process count apart. A session's `Meter` counts into what
`books` gives it, children with their labels resolved once. What is a matter of the moment, slots,
queue, recorder, is asked of the server when somebody looks (`gauges`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_CONTENT_TYPE
from prometheus_client.openmetrics.exposition import generate_latest as generate_open

from protocol.events import ConnectionOpened
from protocol.messages import Mode

from .books import Books
from .gauges import ServerGauges
from .instruments import Instruments
from .meter import Meter
from .watching import ServerStatus

TEXT_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_MEDIA_TYPE: Final = "application/openmetrics-text"


class Metrics:
    """All that is counted of a server and its sessions.

    Args:
        status: asks the server how it stands, when somebody looks; None shows sessions alone.
        process: show the process's memory, CPU and files, and Python's garbage collector, too.
    """

    def __init__(
        self, *, status: Callable[[], ServerStatus] | None = None, process: bool = False
    ) -> None:
        self.registry: Final = CollectorRegistry()
        made = Instruments()
        self.registry.register(made)
        self._books: Final = {mode: Books.of(made, mode) for mode in get_args(Mode)}
        self._meters: Final[WeakValueDictionary[str, Meter]] = WeakValueDictionary()
        if status is not None:
            self.registry.register(ServerGauges(status))
        if process:
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def watch(self, opened: ConnectionOpened, owner: str) -> Meter:  # noqa: ARG002
        """Begin to measure a session (`Telemetry.watch`); whose it is, is not counted."""
        meter = Meter(self._books[opened.mode], opened)
        self._meters[opened.recording_id] = meter
        return meter

    def kv_tokens(self, recording_id: str) -> int:
        """Say what a session holds in the model's cache; 0 for one that does not run."""
        meter = self._meters.get(recording_id)
        return 0 if meter is None else meter.kv_tokens

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Write all metrics; from the event loop alone, for the server is asked how it stands.

        Args:
            accept: the request's `Accept` header; nothing of it is given back.

        Returns:
            The body and its content type: OpenMetrics where that was asked for.
        """
        wanted = (part.split(";")[0].strip().lower() for part in accept.split(","))
        if OPEN_MEDIA_TYPE in wanted:
            body: bytes = generate_open(self.registry)  # type: ignore[no-untyped-call]
            return body, OPEN_CONTENT_TYPE
        return generate_latest(self.registry), TEXT_CONTENT_TYPE
