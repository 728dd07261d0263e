"""All metrics of a server and its sessions, for Prometheus, and all that watches sessions.

- The server's state is gauges, asked of it at each scrape; a recorder's counts are counters.
- Sessions are counted later, many steps at once (`meters.Backlog`).

What watches the sessions of a server, as its operator configured it (traces are optional):

- `Hub` shows several watchers every session. A watcher that raises is logged once and dropped: that
  is a bug of ours, and costs figures, never a session.
- Each session logs its start, its end with its counts, and what an operator may act on
  (`SessionLogger`). A client's texts and labels are never logged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, get_args
from weakref import WeakValueDictionary

import attrs
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_CONTENT_TYPE
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protocol.machine.session import Connected, Session
from protocol.values import events as ev
from protocol.values.effects import DropUnit, Effect, ForgetRecording
from protocol.values.events import ConnectionOpened
from protocol.values.limits import NS_PER_S, Mode
from protocol.values.records import session_id_of
from protocol.values.requests import ClientMessage
from protocol.values.state import State
from recorder.storage.store import Cause, RetentionStatistics

from ..access.gate import Reason
from ..net.limits import Counters, Drop, Refusal
from ..settings.extras import install
from ..slots.workers import WorkersStatistics
from .catalogue import BROKEN_OFF, OUR_FAULTS, Metric
from .meters import Backlog, DeferredMeter, Instruments, Labels, Meter, ModeInstruments, Series
from .watching import ServerStatus, Telemetry, Watcher

if TYPE_CHECKING:
    from .traces import Traces

# -- the server's state ----------------------------------------------------------------------------


LabelValues = tuple[str, ...]
NO_LABELS: Final[LabelValues] = ()
READINESS: Final = ("loading", "ready", "full", "draining", "condemned")
"""The server's states; each is a series, so that its changes can be plotted."""


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=f"antiphon_{name}", kind="gauge", meaning=meaning, labels=labels)


def _count(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=f"antiphon_{name}_total", kind="counter", meaning=meaning, labels=labels)


BUILD: Final = _gauge(
    "build_info", "Always 1; version, model and speech are labels.", "version", "model", "speech"
)
UPTIME: Final = _gauge("uptime_seconds", "Seconds since the server started.")
READY: Final = _gauge("ready", "1 where `/ready` answers 200, else 0.")
READINESS_GAUGE: Final = _gauge(
    "readiness", "1 for the current state of the server, 0 for the others.", "state"
)
CONNECTIONS: Final = _gauge("connections", "Open connections of any kind.")
TASKS: Final = _gauge("tasks", "Tasks of the event loop; a constant number while idle.")
WEBSOCKETS: Final = _gauge("websockets", "Of these, WebSockets.")
REFUSED: Final = _count(
    "connections_refused",
    "Connections closed before a request: full (connection limit), address (limit per address), "
    "rate (rate limit per address), tls, silent (no data in time), head (no request in time).",
    "cause",
)
CUT: Final = _count(
    "connections_dropped",
    "Connections cut by the server: stalled (read nothing, or too slowly), silent (sent "
    "nothing), slow (with a large message), left (gone during a wait for their rate limit).",
    "cause",
)
DENIED: Final = _count(
    "requests_denied",
    "Requests, also for WebSockets, that were answered with 401 or 403: host, origin, no_key, "
    "wrong_key (or more than one), mode and scope (a valid key without the permission).",
    "reason",
)
PAUSES: Final = _count("reading_pauses", "Times that a client waited because of its rate limit.")
RECEIVING: Final = _gauge("receiving_bytes", "Bytes of large messages that are on their way in.")
SESSIONS: Final = _gauge("sessions", "Sessions that run.", "mode", "state")
SESSIONS_DETACHED: Final = _gauge(
    "sessions_detached",
    "Sessions whose clients are away and may come back: detached, with a slot, or asleep, without.",
    "state",
)
QUEUE: Final = _gauge("queue_length", "Sessions and turns that wait for a slot.")
SLOTS: Final = _gauge("slots", "Slots of the model: free, leased, condemned.", "state")
WORKERS: Final = _gauge("workers", "Workers: serving, condemned.", "state")
WORKERS_WANTED: Final = _gauge(
    "workers_wanted",
    "Workers that the load asks for, at least 1, for autoscaling: the busy slots by 0.8 of a "
    "worker's slots, rounded up, and one more if the first in the queue has waited over 10 s.",
)
WORKERS_REPLACED: Final = _count("workers_replaced", "Condemned workers that were replaced.")
WORKER_LOADS_FAILED: Final = _count("worker_loads_failed", "Failed attempts to load a replacement.")
KV: Final = _gauge("kv_tokens", "Tokens that all sessions hold in the KV cache.")
KV_LARGEST: Final = _gauge("kv_tokens_largest", "Tokens of the session that holds most.")
RECORDER_LOGS: Final = _gauge("recorder_logs", "Session logs that are open.")
RECORDER_BACKLOG: Final = _gauge(
    "recorder_backlog_bytes", "Bytes of logs that are not yet written: how far the recorder lags."
)
RECORDER_BLOCKS: Final = _count("recorder_blocks", "Blocks written to logs.")
RECORDER_WRITTEN: Final = _count("recorder_written_bytes", "Bytes written to logs.")
RECORDER_FAILURES: Final = _count("recorder_failures", "Logs that failed.")
RECORDINGS: Final = _gauge("recordings", "Logs in the folder at the last count.")
RECORDINGS_BYTES: Final = _gauge("recordings_bytes", "Their bytes.")
RECORDINGS_REMOVED: Final = _count(
    "recordings_removed", "Logs that the server removed: by age, by the size of all.", "cause"
)
RECORDINGS_REMOVED_BYTES: Final = _count("recordings_removed_bytes", "Their bytes.")
REMOVALS_FAILED: Final = _count(
    "recordings_removals_failed", "Times that a log should have been removed and could not be."
)
STORED: Final = _count("recordings_stored", "Logs copied to the object store, and read back.")
STORED_BYTES: Final = _count("recordings_stored_bytes", "Their bytes.")
STORE_WAITING: Final = _gauge(
    "recordings_store_waiting", "Complete logs of the folder that the object store does not have."
)
STORE_FAILURES: Final = _count(
    "recordings_store_failures",
    "Failed uploads, and requests that the object store refused or did not answer.",
)

RECORDER: Final = {
    "logs": RECORDER_LOGS,
    "backlog_bytes": RECORDER_BACKLOG,
    "blocks": RECORDER_BLOCKS,
    "file_bytes": RECORDER_WRITTEN,
    "failures": RECORDER_FAILURES,
}
"""By the names of `RecorderStatistics`."""
STORE: Final = {
    "uploaded": STORED,
    "uploaded_bytes": STORED_BYTES,
    "waiting": STORE_WAITING,
    "failures": STORE_FAILURES,
}
"""By the names of `StoreStatistics`."""
SERVER_METRICS: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""In the order of this file."""


class ServerGauges(Collector):
    """Asks a server for its status, in the caller's thread, each time that metrics are written."""

    def __init__(self, status: Callable[[], ServerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Family]:
        """The families, with the current status."""
        status = self._status()
        speech = status.speech or "unknown"
        yield _gauge_family(BUILD, {(status.version, status.model, speech): 1})
        yield _gauge_family(UPTIME, {NO_LABELS: status.uptime_s})
        yield _gauge_family(READY, {NO_LABELS: int(status.readiness == "ready")})
        states = dict.fromkeys((*READINESS, status.readiness), 0) | {status.readiness: 1}
        yield _gauge_family(READINESS_GAUGE, {(state,): value for state, value in states.items()})
        yield _gauge_family(CONNECTIONS, {NO_LABELS: status.connections})
        yield _gauge_family(TASKS, {NO_LABELS: status.tasks})
        yield _gauge_family(QUEUE, {NO_LABELS: status.queue_length})
        if status.slots is not None:
            places = ("free", "leased", "condemned")
            yield _gauge_family(SLOTS, {(place,): getattr(status.slots, place) for place in places})
        reasons = get_args(Reason)
        yield _gauge_family(DENIED, {(reason,): status.denied.get(reason, 0) for reason in reasons})
        yield from _of_sessions(status)
        if status.listener is not None:
            yield from _of_listener(status.listener)
        if status.workers is not None:
            yield from _of_workers(status.workers)
        if status.workers_wanted is not None:
            yield _gauge_family(WORKERS_WANTED, {NO_LABELS: status.workers_wanted})
        for name, metric in RECORDER.items():
            if name in status.recorder:
                yield _gauge_family(metric, {NO_LABELS: status.recorder[name]})
        if status.retention is not None:
            yield from _of_recordings(status.retention)
        for name, metric in STORE.items():
            if name in status.store:
                yield _gauge_family(metric, {NO_LABELS: status.store[name]})


def _of_sessions(status: ServerStatus) -> Iterator[Family]:
    found = Counter[LabelValues]((at.mode, at.state.value) for at in status.sessions)
    pairs: list[LabelValues] = [(mode, state.value) for mode in get_args(Mode) for state in State]
    yield _gauge_family(SESSIONS, {pair: found[pair] for pair in pairs})
    away = Counter(session.connection for session in status.sessions)
    states: tuple[Connected, ...] = ("detached", "asleep")
    yield _gauge_family(SESSIONS_DETACHED, {(state,): away[state] for state in states})
    held = [session.kv_tokens for session in status.sessions]
    yield _gauge_family(KV, {NO_LABELS: sum(held)})
    yield _gauge_family(KV_LARGEST, {NO_LABELS: max(held, default=0)})


def _of_listener(seen: Counters) -> Iterator[Family]:
    yield _gauge_family(WEBSOCKETS, {NO_LABELS: seen.websockets})
    yield _gauge_family(
        REFUSED, {(cause,): seen.refused.get(cause, 0) for cause in get_args(Refusal)}
    )
    yield _gauge_family(CUT, {(cause,): seen.dropped.get(cause, 0) for cause in get_args(Drop)})
    yield _gauge_family(PAUSES, {NO_LABELS: seen.pauses})
    yield _gauge_family(RECEIVING, {NO_LABELS: seen.receiving_bytes})


def _of_recordings(seen: RetentionStatistics) -> Iterator[Family]:
    yield _gauge_family(RECORDINGS, {NO_LABELS: seen.logs})
    yield _gauge_family(RECORDINGS_BYTES, {NO_LABELS: seen.file_bytes})
    causes = get_args(Cause)
    yield _gauge_family(
        RECORDINGS_REMOVED, {(cause,): seen.removed.get(cause, 0) for cause in causes}
    )
    yield _gauge_family(RECORDINGS_REMOVED_BYTES, {NO_LABELS: seen.removed_bytes})
    yield _gauge_family(REMOVALS_FAILED, {NO_LABELS: seen.failures})


def _of_workers(seen: WorkersStatistics) -> Iterator[Family]:
    serving = seen.workers - seen.condemned
    yield _gauge_family(WORKERS, {("serving",): serving, ("condemned",): seen.condemned})
    yield _gauge_family(WORKERS_REPLACED, {NO_LABELS: seen.replaced})
    yield _gauge_family(WORKER_LOADS_FAILED, {NO_LABELS: seen.failures})


def _gauge_family(metric: Metric, values: Mapping[LabelValues, float]) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


# -- the metrics -----------------------------------------------------------------------------------


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
        self.registry.register(InstrumentCollector(made, self._backlog))
        self._instruments: Final = {mode: ModeInstruments(made, mode) for mode in get_args(Mode)}
        self._meters: Final[WeakValueDictionary[str, Meter]] = WeakValueDictionary()
        if status is not None:
            self.registry.register(ServerGauges(status))
        if process:
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def watch(self, opened: ConnectionOpened, owner: str) -> DeferredMeter:  # noqa: ARG002
        """As `Telemetry`; the owner is not counted."""
        meter = Meter(self._instruments[opened.mode], opened)
        self._meters[opened.recording_id] = meter
        return DeferredMeter(meter, self._backlog)

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


class InstrumentCollector(Collector):
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


# -- several watchers as one -----------------------------------------------------------------------


_logger = logging.getLogger("antiphon.telemetry")


class Hub:
    """Shows every session to several watchers, in order (`Telemetry`)."""

    def __init__(self, watching: Sequence[Telemetry]) -> None:
        self._watching = tuple(watching)

    def watch(self, opened: ev.ConnectionOpened, owner: str) -> Watcher:
        """As `Telemetry`."""
        watchers: list[Watcher] = []
        for telemetry in self._watching:
            try:
                watchers.append(telemetry.watch(opened, owner))
            except Exception:
                _logger.exception("%s cannot watch a session", type(telemetry).__name__)
        return Watchers(watchers)


class Watchers:
    """The watchers of one session, in order (`Watcher`)."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = list(watchers)

    def saw(self, event: ev.Event, effects: tuple[Effect, ...], session: Session) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.saw(event, effects, session)
            except Exception:
                self._drop(watcher)

    def received(
        self,
        events: Sequence[ev.FrameReceived],
        messages: Sequence[ClientMessage],
        session: Session,
    ) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.received(events, messages, session)
            except Exception:
                self._drop(watcher)

    def over(self, reason: str | None) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.over(reason)
            except Exception:
                self._drop(watcher)

    def _drop(self, watcher: Watcher) -> None:
        """Log the exception that a watcher raised, and show it nothing more."""
        _logger.exception("%s failed, and no longer watches this session", type(watcher).__name__)
        self._watchers = [it for it in self._watchers if it is not watcher]


# -- the lines of a session ------------------------------------------------------------------------


_lines = logging.getLogger("antiphon.session")


class SessionsLogger:
    """Logs every session (`Telemetry`)."""

    def watch(self, opened: ev.ConnectionOpened, owner: str) -> SessionLogger:
        """As `Telemetry`."""
        return SessionLogger(opened, owner)


class SessionLogger:
    """Logs one session (`Watcher`); `owner` is the name of its key, or empty."""

    def __init__(self, opened: ev.ConnectionOpened, owner: str) -> None:
        self._session: Session | None = None
        self._at_ns = 0
        self._has_dropped = self._is_forking = False
        self._named: Final = {
            "session": opened.recording_id,
            "session_id": session_id_of(opened.recording_id),
            **({"key": owner} if owner else {}),
        }
        self._of: Final = {"mode": opened.mode, "endpoint": opened.endpoint}
        self._log(logging.INFO, "session opened", **self._of)

    def saw(self, event: ev.Event, effects: tuple[Effect, ...], session: Session) -> None:
        """Log what an operator may have to act on."""
        self._session, self._at_ns = session, event.at_ns
        match event:
            case ev.RecordingFailed():
                self._log(logging.ERROR, "the session is no longer recorded")
            case ev.Flooded():
                self._log(logging.WARNING, "the client sends more than can be recorded")
            case ev.BackendLost():
                self._log(logging.WARNING, "the model was lost")
            case ev.Forked():
                self._is_forking = True
            case ev.Rebuilt() if self._is_forking:
                self._is_forking = False
                self._log(logging.INFO, "the fork begins", steps=event.steps)
            case ev.Rebuilt():
                self._log(logging.WARNING, "the session moved", steps=event.steps)
        for effect in effects:
            if isinstance(effect, ForgetRecording):
                self._log(logging.INFO, "the client asked not to be recorded")
            elif isinstance(effect, DropUnit) and not self._has_dropped:
                self._has_dropped = True
                self._log(logging.INFO, "input comes too fast: seconds of it are dropped")

    def received(
        self, events: Sequence[ev.FrameReceived], _messages: object, session: Session
    ) -> None:
        """As `Watcher`; nothing is logged."""
        self._session, self._at_ns = session, events[-1].at_ns

    def over(self, reason: str | None) -> None:
        """Log the session's end, with its counts."""
        why = reason or BROKEN_OFF
        level = logging.WARNING if why in OUR_FAULTS else logging.INFO
        fields: dict[str, object] = {"reason": why, **self._of}
        if self._session is not None:
            fields |= {"dialect": self._session.dialect_name}
            fields |= {"seconds": round(self._at_ns / NS_PER_S, 3), **self._session.counts}
        self._log(level, "session over", **fields)

    def _log(self, level: int, text: str, **fields: object) -> None:
        if _lines.isEnabledFor(level):
            _lines.log(level, text, extra={**self._named, **fields})


# -- the telemetry of a server ---------------------------------------------------------------------


class TracesMissingError(Exception):
    """Traces are set, and their package is not installed."""


@attrs.frozen(kw_only=True)
class ServerTelemetry:
    """A server's telemetry; `hub` sees every session, and `traces` may be `None`."""

    metrics: Metrics
    hub: Hub
    traces: Traces | None

    def close(self) -> None:
        """Send the last spans, after all sessions; blocks for the exporter: call it in a thread."""
        if self.traces is not None:
            self.traces.close()


def make_telemetry(
    status: Callable[[], ServerStatus], *, version: str, traces: bool
) -> ServerTelemetry:
    """Make a server's telemetry; `status` is called when metrics are read, not before.

    `TracesMissingError`: the extra `traces` is not installed.
    """
    metrics = Metrics(status=status, process=True)
    watching: list[Telemetry] = [metrics, SessionsLogger()]
    made = _open_traces(version) if traces else None
    if made is not None:
        watching.append(made)
    return ServerTelemetry(metrics=metrics, hub=Hub(watching), traces=made)


def _open_traces(version: str) -> Traces:
    try:
        from .traces import Traces, make_provider

        return Traces(make_provider(version))
    except ImportError as error:
        raise TracesMissingError(
            f"traces need the extra: {install('traces')} ({error.name} is missing)"
        ) from error
