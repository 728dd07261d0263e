"""A server's status as JSON."""

from __future__ import annotations

import json

import attrs

from runtime.slots.admission import RunningTask
from runtime.slots.workers import Lease
from runtime.telemetry.watching import ServerStatus, SessionStatus, session_json, status_json
from tests.runtime.telemetry.test_metrics import server_status, session_status

OF_SLOTS = {"total_workers", "idle_workers", "busy_workers", "duplex_workers"}


def test_scripts_are_told_everything() -> None:
    """A script would have to search the metrics for the rest."""
    told = status_json(server_status(session_status(7)))
    assert set(told) - OF_SLOTS == {field.name for field in attrs.fields(ServerStatus)}
    (session,) = told["sessions"]
    assert set(session) == {field.name for field in attrs.fields(SessionStatus)}
    assert session == session_json(session_status(7))
    assert session["state"] == "ACTIVE"
    assert told["slots"] == {"slots": 8, "free": 4, "leased": 3, "condemned": 1}
    assert told["listener"]["refused"] == {"full": 4}
    assert told["workers"]["replaced"] == 3
    assert told["workers_wanted"] == 4
    assert told["denied"] == {"wrong_key": 6}
    assert told["retention"]["removed"] == {"age": 2}
    assert json.loads(json.dumps(told)) == told


def test_the_demo_s_pages_find_what_they_read() -> None:
    """A page that shows how many can be served, and how long the queue takes, reads it here."""
    tasks = tuple(
        RunningTask(lease=Lease(slot=at, generation=at), mode=mode, held_s=20, left_s=70)
        for at, mode in enumerate(("video", "chat", "audio"))
    )
    told = status_json(server_status(max_queue_size=64, running_tasks=tasks))
    names = ("total_workers", "idle_workers", "busy_workers", "queue_length", "max_queue_size")
    assert [told[name] for name in names] == [8, 4, 3, 2, 64]
    assert told["duplex_workers"] == 2
    assert told["running_tasks"][1] == {
        "worker_id": "0.1",
        "request_type": "chat",
        "elapsed_s": 20,
        "estimated_remaining_s": 70,
    }
    assert status_json(server_status(slots=None))["total_workers"] == 0


def test_a_server_that_loads_has_a_status() -> None:
    """The first minute of a server would be an error page."""
    status = server_status(readiness="loading", slots=None, speech=None, recorder={}, workers=None)
    assert status_json(status)["slots"] is None


def test_a_transcription_shows_the_seconds_that_it_heard() -> None:
    """A transcription that works would look like one that hears nothing."""
    talks = session_status(1, mode="transcription", units=0, chunks=1234)
    assert session_json(talks)["chunks"] == 1234
