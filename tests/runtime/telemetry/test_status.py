"""A server's status: as JSON for scripts, as a page for people."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.state import State
from runtime.slots.admission import RunningTask
from runtime.slots.pool import Lease
from runtime.telemetry.page import PAGE_CSP, SESSIONS_SHOWN_MAX, duration, status_html
from runtime.telemetry.status import session_json, status_json
from runtime.telemetry.watching import ServerStatus, SessionStatus
from tests.runtime.telemetry.test_metrics import server_status, session_status

VOID = {"meta", "rect"}
OF_SLOTS = {"total_workers", "idle_workers", "busy_workers", "duplex_workers"}


class Page(HTMLParser):
    """Reads a page: what is in which element, and whether all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.style = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.style += data
        else:
            self.texts.append(data)


def test_scripts_are_told_everything() -> None:
    """A script would have to read the page for people."""
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
    assert "is being loaded" in status_html(status)


def test_people_see_who_was_denied() -> None:
    """An operator would have to search the log for why a client gets no answer."""
    page = Page(status_html(server_status()))
    assert "denied: wrong key" in page.texts


def test_a_transcription_shows_the_seconds_that_it_heard() -> None:
    """A transcription that works would look like one that hears nothing."""
    talks = session_status(1, mode="transcription", units=0, chunks=1234)
    assert "1,234" in Page(status_html(server_status(talks))).texts
    assert session_json(talks)["chunks"] == 1234


@pytest.mark.parametrize("count", [0, 3, 200])
def test_people_see_the_sessions(count: int) -> None:
    """An operator would not see who is served, or a page too long to read."""
    status = server_status(*(session_status(number) for number in range(count)))
    page = Page(status_html(status))
    shown = sum(text.startswith("rec-") for text in page.texts)
    assert shown == min(count, SESSIONS_SHOWN_MAX)
    assert any("ready" in text for text in page.texts)
    assert (f"and {count - shown} newer ones" in page.texts) is (count > SESSIONS_SHOWN_MAX)


@given(
    st.builds(
        session_status,
        recording_id=st.text(),
        owner=st.text(),
        dialect=st.none() | st.text(),
        mode=st.sampled_from(["video", "audio", "chat"]),
        state=st.sampled_from(State),
    ),
    st.text(),
)
def test_a_name_is_text_whatever_is_in_it(session: SessionStatus, name: str) -> None:
    """A key's or a model's name would run as a script in an operator's browser."""
    plain = Page(status_html(server_status(session_status())))
    trap = f"</td><script>{name}</script><img src=x onerror=y>\"'&{name}"
    hostile = attrs.evolve(session, owner=f"{session.owner}{trap}", recording_id=trap)
    status = server_status(hostile, model=trap, version=trap, readiness=trap)
    page = Page(status_html(status))
    assert page.tags == plain.tags
    assert {name for name, _ in page.attributes} == {name for name, _ in plain.attributes}


def test_the_page_needs_nothing_but_itself() -> None:
    """The page would be blank under its own policy, or load something from elsewhere."""
    page = Page(status_html(server_status(session_status())))
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in PAGE_CSP
    assert "default-src 'none'" in PAGE_CSP
    names = {name for name, _ in page.attributes}
    assert not names & {"style", "src", "href", "onload", "onclick"}
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import|https?:", page.style)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0 s"), (9.9, "9 s"), (303, "5 min 3 s"), (7500, "2 h 5 min"), (273_700, "3 d 4 h")],
)
def test_a_duration_is_told_in_two_parts(seconds: float, told: str) -> None:
    """A person would have to divide by 3600."""
    assert duration(seconds) == told
