"""A server's status as JSON, `/status`; the page Server of the console shows it to people.

It names sessions and keys, so its route asks for an `admin` key where there are keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from protocol.values.modes import OF_MODE

from ..net.limits import Counters
from ..slots.admission import RunningTask
from ..slots.pool import PoolCounts
from .watching import ServerStatus, SessionStatus


def status_json(status: ServerStatus) -> dict[str, Any]:
    """A server's status as plain values for JSON; times are in seconds."""
    slots, workers = status.slots, status.workers
    return {
        "readiness": status.readiness,
        "version": status.version,
        "model": status.model,
        "speech": status.speech,
        "uptime_s": round(status.uptime_s, 1),
        "connections": status.connections,
        "tasks": status.tasks,
        "queue_length": status.queue_length,
        "max_queue_size": status.max_queue_size,
        **_workers_json(slots, status.running_tasks),
        "slots": None if slots is None else attrs.asdict(slots),
        "workers": None if workers is None else attrs.asdict(workers),
        "workers_wanted": status.workers_wanted,
        "recorder": dict(status.recorder),
        "retention": None if status.retention is None else attrs.asdict(status.retention),
        "store": dict(status.store),
        "listener": None if status.listener is None else _listener_json(status.listener),
        "denied": dict(status.denied),
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


def _listener_json(seen: Counters) -> dict[str, Any]:
    told = attrs.asdict(seen, recurse=False)
    return told | {"refused": dict(seen.refused), "dropped": dict(seen.dropped)}


def session_json(session: SessionStatus) -> dict[str, Any]:
    """One session's status as plain values for JSON."""
    told = {"state": session.state.value, "age_s": round(session.age_s, 1)}
    return attrs.asdict(session) | told
