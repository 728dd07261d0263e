"""A server's state as gauges, asked of it at each scrape; a recorder's counts are counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from protocol.machine.session import Connected
from protocol.values.modes import Mode
from protocol.values.state import State
from recorder.keep.retention import Cause, RetentionStatistics

from ..access.gate import Reason
from ..net.limits import Counters, Drop, Refusal
from ..slots.workers import WorkersStatistics
from .catalogue import Metric
from .watching import ServerStatus

Labels = tuple[str, ...]
NO_LABELS: Final[Labels] = ()
READINESS: Final = ("loading", "ready", "full", "draining", "condemned")
"""The server's states; each is a series, so that its changes can be plotted."""


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=f"antiphon_{name}", kind="gauge", meaning=meaning, labels=labels)


def _count(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=f"antiphon_{name}_total", kind="counter", meaning=meaning, labels=labels)


BUILD: Final = _gauge("build_info", "Always 1; what runs.", "version", "model", "speech")
UPTIME: Final = _gauge("uptime_seconds", "Since the server began.")
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
RECORDINGS: Final = _gauge("recordings", "Logs in the folder, when they were counted last.")
RECORDINGS_BYTES: Final = _gauge("recordings_bytes", "What these take.")
RECORDINGS_REMOVED: Final = _count(
    "recordings_removed", "Logs that the server removed: by age, by the size of all.", "cause"
)
RECORDINGS_REMOVED_BYTES: Final = _count("recordings_removed_bytes", "What these took.")
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
ALL: Final[tuple[Metric, ...]] = tuple(
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
        yield _family(BUILD, {(status.version, status.model, speech): 1})
        yield _family(UPTIME, {NO_LABELS: status.uptime_s})
        yield _family(READY, {NO_LABELS: int(status.readiness == "ready")})
        states = dict.fromkeys((*READINESS, status.readiness), 0) | {status.readiness: 1}
        yield _family(READINESS_GAUGE, {(state,): value for state, value in states.items()})
        yield _family(CONNECTIONS, {NO_LABELS: status.connections})
        yield _family(TASKS, {NO_LABELS: status.tasks})
        yield _family(QUEUE, {NO_LABELS: status.queue_length})
        if status.slots is not None:
            places = ("free", "leased", "condemned")
            yield _family(SLOTS, {(place,): getattr(status.slots, place) for place in places})
        reasons = get_args(Reason)
        yield _family(DENIED, {(reason,): status.denied.get(reason, 0) for reason in reasons})
        yield from _of_sessions(status)
        if status.listener is not None:
            yield from _of_listener(status.listener)
        if status.workers is not None:
            yield from _of_workers(status.workers)
        if status.workers_wanted is not None:
            yield _family(WORKERS_WANTED, {NO_LABELS: status.workers_wanted})
        for name, metric in RECORDER.items():
            if name in status.recorder:
                yield _family(metric, {NO_LABELS: status.recorder[name]})
        if status.retention is not None:
            yield from _of_recordings(status.retention)
        for name, metric in STORE.items():
            if name in status.store:
                yield _family(metric, {NO_LABELS: status.store[name]})


def _of_sessions(status: ServerStatus) -> Iterator[Family]:
    found = Counter[Labels]((at.mode, at.state.value) for at in status.sessions)
    pairs: list[Labels] = [(mode, state.value) for mode in get_args(Mode) for state in State]
    yield _family(SESSIONS, {pair: found[pair] for pair in pairs})
    away = Counter(session.connection for session in status.sessions)
    states: tuple[Connected, ...] = ("detached", "asleep")
    yield _family(SESSIONS_DETACHED, {(state,): away[state] for state in states})
    held = [session.kv_tokens for session in status.sessions]
    yield _family(KV, {NO_LABELS: sum(held)})
    yield _family(KV_LARGEST, {NO_LABELS: max(held, default=0)})


def _of_listener(seen: Counters) -> Iterator[Family]:
    yield _family(WEBSOCKETS, {NO_LABELS: seen.websockets})
    yield _family(REFUSED, {(cause,): seen.refused.get(cause, 0) for cause in get_args(Refusal)})
    yield _family(CUT, {(cause,): seen.dropped.get(cause, 0) for cause in get_args(Drop)})
    yield _family(PAUSES, {NO_LABELS: seen.pauses})
    yield _family(RECEIVING, {NO_LABELS: seen.receiving_bytes})


def _of_recordings(seen: RetentionStatistics) -> Iterator[Family]:
    yield _family(RECORDINGS, {NO_LABELS: seen.logs})
    yield _family(RECORDINGS_BYTES, {NO_LABELS: seen.file_bytes})
    causes = get_args(Cause)
    yield _family(RECORDINGS_REMOVED, {(cause,): seen.removed.get(cause, 0) for cause in causes})
    yield _family(RECORDINGS_REMOVED_BYTES, {NO_LABELS: seen.removed_bytes})
    yield _family(REMOVALS_FAILED, {NO_LABELS: seen.failures})


def _of_workers(seen: WorkersStatistics) -> Iterator[Family]:
    serving = seen.workers - seen.condemned
    yield _family(WORKERS, {("serving",): serving, ("condemned",): seen.condemned})
    yield _family(WORKERS_REPLACED, {NO_LABELS: seen.replaced})
    yield _family(WORKER_LOADS_FAILED, {NO_LABELS: seen.failures})


def _family(metric: Metric, values: Mapping[Labels, float]) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
