"""What a session and a server show to watchers, which cannot change either; and the status as JSON.

A watcher sees what the log has, so each figure can be found again in a recording. The status
(`/status`) names sessions and keys, so its route asks for an `admin` key where there are keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from protocol.machine.session import Connected, Session
from protocol.values.effects import Effect
from protocol.values.events import ConnectionOpened, Event, FrameReceived
from protocol.values.limits import OF_MODE, Mode
from protocol.values.messages import EndReason, ServerMessage
from protocol.values.requests import ClientMessage
from protocol.values.state import State
from recorder.storage.store import RetentionStatistics

from ..net.limits import Counters
from ..slots.admission import RunningTask
from ..slots.workers import PoolCounts, WorkersStatistics

if TYPE_CHECKING:
    from ..access.gate import Reason


@attrs.define
class SessionSnapshot:
    """A session after a step, as far as a meter reads it; each attribute as `Session` has it."""

    dialect_name: str
    end_reason: EndReason | None
    sent: Sequence[ServerMessage]
    state: State
    accepted: ClientMessage | None
    units_waiting: int
    samples_waiting: int


Shown = Session | SessionSnapshot
"""What a meter is shown of a session."""


class Watcher(Protocol):
    """Sees one session, from the event loop; it must return at once and raise nothing."""

    def saw(self, event: Event, effects: tuple[Effect, ...], session: Session) -> None:
        """See an event and its effects, in order, after they were performed.

        The first event is `ConnectionOpened`; `event.at_ns` counts from it. The stepped machine is
        read only.
        """
        ...

    def received(
        self, events: Sequence[FrameReceived], messages: Sequence[ClientMessage], session: Session
    ) -> None:
        """See events, and the messages that they brought, in place of `saw` for each.

        They came together and had no effects: sound that is only kept.
        """
        ...

    def over(self, reason: str | None) -> None:
        """See the session's end; `reason` is `None` where it was broken off."""
        ...


class Telemetry(Protocol):
    """Sees all sessions of a server."""

    def watch(self, opened: ConnectionOpened, owner: str) -> Watcher:
        """Begin to watch a session; `saw` gets `opened` too. `owner`: its key's name, or empty."""
        ...


@attrs.frozen(kw_only=True)
class SessionStatus:
    """One running session.

    Attributes:
        owner: the name of its key; empty where the server has no keys.
        dialect: its wire protocol; None before the client has chosen.
        connection: as in `Session.connection`.
        units: units that the model began.
        chunks: seconds of a transcription.
        dropped_units: units dropped because they came too fast.
        kv_tokens: its tokens in the model's cache; 0 without a slot.
    """

    recording_id: str
    session_id: str
    owner: str
    mode: Mode
    dialect: str | None
    state: State
    connection: Connected = "connected"
    age_s: float
    units: int
    chunks: int
    dropped_units: int
    kv_tokens: int


@attrs.frozen(kw_only=True)
class ServerStatus:
    """A server at one moment.

    Attributes:
        readiness: as `/ready` says.
        speech: `on`, or `off` where the model gives only text; None while unknown.
        sessions: the running ones, oldest first.
        queue_length: sessions and turns that wait for a slot; at most `max_queue_size`.
        running_tasks: the slots in use, longest first.
        slots, workers: None while the model loads.
        workers_wanted: as many as the load asks for, at least 1; None while the model loads.
        tasks: of the event loop: an idle server returns to the same number.
        recorder: the `RecorderStatistics` by name; empty where nothing is recorded.
        listener: the port's counts; None where unknown.
        retention: the recordings; None where nothing is recorded.
        store: the `StoreStatistics` by name; empty without an object store.
    """

    readiness: str
    version: str
    model: str
    speech: str | None
    uptime_s: float
    sessions: tuple[SessionStatus, ...]
    queue_length: int
    slots: PoolCounts | None
    connections: int
    tasks: int
    recorder: Mapping[str, int | float]
    listener: Counters | None = None
    workers: WorkersStatistics | None = None
    workers_wanted: int | None = None
    retention: RetentionStatistics | None = None
    store: Mapping[str, int] = MappingProxyType({})
    denied: Mapping[Reason, int] = MappingProxyType({})
    max_queue_size: int = 0
    running_tasks: tuple[RunningTask, ...] = ()


# -- as JSON ---------------------------------------------------------------------------------------


def status_json(status: ServerStatus) -> dict[str, Any]:
    """A server's status as plain values for JSON; times are in seconds."""
    counts = {name: dict(getattr(status, name)) for name in ("recorder", "store", "denied")}
    others = {"running_tasks", "sessions", *counts}
    plain = attrs.asdict(status, filter=lambda at, _: at.name not in others)
    return {
        **plain,
        **counts,
        **_workers_json(status.slots, status.running_tasks),
        "uptime_s": round(status.uptime_s, 1),
        "sessions": [session_json(session) for session in status.sessions],
    }


def _workers_json(slots: PoolCounts | None, tasks: Sequence[RunningTask]) -> dict[str, Any]:
    """The slots for the pages of MiniCPM-o's demo, where a worker has one slot."""
    return {
        "total_workers": 0 if slots is None else slots.slots,
        "idle_workers": 0 if slots is None else slots.free,
        "busy_workers": 0 if slots is None else slots.leased,
        "duplex_workers": sum(OF_MODE[task.mode].work == "unit" for task in tasks),
        "running_tasks": [
            {
                "worker_id": f"{task.lease.worker}.{task.lease.slot}",
                "request_type": task.mode,
                "elapsed_s": task.held_s,
                "estimated_remaining_s": task.left_s,
            }
            for task in tasks
        ],
    }


def session_json(session: SessionStatus) -> dict[str, Any]:
    """One session's status as plain values for JSON."""
    plain = {"state": session.state.value, "age_s": round(session.age_s, 1)}
    return attrs.asdict(session) | plain
