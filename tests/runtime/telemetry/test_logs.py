"""The server's own log: what is written, whatever a client has in its words."""

from __future__ import annotations

import io
import json
import logging
from datetime import datetime
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.values.model import Unit
from runtime.model.backends.scripted import ScriptedBackend, Step
from runtime.session.model_calls import name_unit
from runtime.telemetry.logs import (
    FIELDS_MAX,
    REPEATED_MAX,
    TEXT_CHARS_MAX,
    Format,
    bound_session,
    configure,
    printable,
)
from runtime.telemetry.metrics import Hub, Metrics, SessionsLogger
from tests.sessions.in_memory import append_frame, close_frame, init_frame, on_virtual_time
from tests.sessions.telemetry import Figures, watched
from tests.simulation.test_simulation_chat import prepare_frame

TRAPS = "a\nb\r\x1b[2J\x1b]0;x\x07\u2028\u202e\x85\x00\ud800\t\x7f"
_log = logging.getLogger("antiphon.test")


def written(form: Format = "json", level: Any = "info") -> io.StringIO:
    """Configure the log to write where it can be read."""
    stream = io.StringIO()
    configure(form, level, stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def boom(secret: str) -> None:
    raise ValueError(f"bad: {secret[0]}")


def test_a_line_of_json_says_when_where_and_what() -> None:
    """A log collector could not sort, filter or count."""
    stream = written()
    _log.info("unit %d failed: %s", 3, "why", extra={"slot": 2})
    (line,) = lines(stream)
    moment = datetime.fromisoformat(line.pop("timestamp"))
    assert moment.utcoffset() is not None
    assert line == {
        "level": "info",
        "logger": "antiphon.test",
        "event": "unit 3 failed: why",
        "slot": 2,
    }


def test_a_line_of_text_says_the_same() -> None:
    """A person at a terminal would read JSON."""
    stream = written("text")
    _log.warning("unit %d failed", 3, extra={"slot": 2, "why": "no room = none"})
    _, _, rest = stream.getvalue().partition(" ")
    assert rest == "warning antiphon.test unit 3 failed slot=2 why='no room = none'\n"


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_is_ours_and_libraries_keep_still(level: str) -> None:
    """The log would drown in a library's chatter, or hide its errors."""
    stream = written(level=level)
    for name in ("antiphon.x", "runtime.model.engine.engine", "hypercorn.x"):
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(number, "%s", name)
    told = [(line["logger"], line["level"]) for line in lines(stream)]
    levels = ["debug", "info", "warning", "error"]
    ours = levels[levels.index(level) :]
    theirs = [one for one in ours if one in ("warning", "error")]
    assert [at for name, at in told if name == "antiphon.x"] == ours
    assert [at for name, at in told if name == "runtime.model.engine.engine"] == ours
    assert [at for name, at in told if name == "hypercorn.x"] == theirs


@pytest.mark.parametrize("level", ["warning", "error"])
def test_a_warning_that_is_repeated_does_not_fill_the_disk(level: str) -> None:
    """Whoever can cause one, could cause a million; other warnings are written meanwhile."""
    stream, second = written(), 1_800_000_000
    for at_s, times in ((second, 1000), (second + 1, 1)):
        for number in range(times):
            record = _log.makeRecord(
                _log.name, getattr(logging, level.upper()), "", 0, "from %d", (number,), None
            )
            record.created = at_s + number / 1000
            _log.handle(record)
        _log.warning("another")
    found = lines(stream)
    repeated = [line for line in found if line["event"].startswith("from ")]
    assert [line.get("repeated") for line in repeated] == [*[None] * REPEATED_MAX, 980]
    assert [line["event"] for line in found].count("another") == 2


def test_configuring_again_replaces_what_was() -> None:
    """Every line would be written twice after a reload."""
    first = written()
    second = written("text")
    _log.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


# -- hostile words --------------------------------------------------------------------------------


@given(st.text())
@example(TRAPS)
@example("x" * (TEXT_CHARS_MAX + 1))
def test_what_is_printed_is_printable_and_short(text: str) -> None:
    """A client could clear an operator's screen, or fill a disk."""
    safe = printable(text)
    assert safe.isprintable()
    assert len(safe) <= 10 * TEXT_CHARS_MAX + 30
    if text.isprintable() and len(text) <= TEXT_CHARS_MAX:
        assert safe == text


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_client_cannot_forge_a_line(form: Format) -> None:
    """An intruder could write a log that tells another story."""
    # pytest-xdist cannot hand a lone surrogate on with what was logged; `printable`'s test has it.
    traps = TRAPS.replace("\ud800", "")
    forged = "x\n2026-01-01T00:00:00Z info antiphon.access key accepted" + traps
    stream = written(form)
    with bound_session(forged):
        _log.info("said %s", forged, extra={"field": forged, "a\nb": [forged, {"c\n": forged}]})
    text = stream.getvalue()
    assert text.endswith("\n")
    assert text[:-1].isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_exception_cannot_forge_a_line(form: Format) -> None:
    """An error's words are a client's, sometimes, and a trace has many lines."""
    stream = written(form)
    secret = "the-api-key"
    try:
        try:
            boom(secret)
        except ValueError as error:
            raise ExceptionGroup("in\nforged", [error, OSError("two\x1b[2J\nforged")]) from error
    except ExceptionGroup:
        _log.exception("it broke")
    head, *trace = stream.getvalue().splitlines()
    assert "it broke" in head
    assert all(line.startswith("  | ") and line.isprintable() for line in trace)
    assert bool(trace) is (form == "text")
    told = stream.getvalue()
    assert "boom" in told
    assert "forged" in told
    assert secret not in told


def test_an_exception_is_structured_in_json() -> None:
    """A search for an error's type would have to read traces."""
    stream = written()
    try:
        boom("x")
    except ValueError:
        _log.exception("it broke")
    (line,) = lines(stream)
    (told,) = line["exception"]
    assert (told["type"], told["text"]) == ("ValueError", "bad: x")
    assert told["frames"][-1].endswith(" boom")


def test_fields_are_bounded() -> None:
    """One line could take a collector down."""
    stream = written()
    many = {f"field{number}": "x" * 10_000 for number in range(100)}
    _log.info("many", extra=many | {"number": 1 << 200, "list": ["x"] * 10_000})
    (line,) = lines(stream)
    assert len(line) <= FIELDS_MAX
    assert len(stream.getvalue()) < FIELDS_MAX * (TEXT_CHARS_MAX + 100)


# -- where it was logged --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_tasks_and_threads_know_their_session() -> None:
    """A line of a model call could not be told from another session's."""
    stream = written()

    async def call(index: int) -> None:
        name_unit(index)
        await anyio.lowlevel.checkpoint()
        await anyio.to_thread.run_sync(lambda: _log.info("in a thread"))
        name_unit(None)
        _log.info("of no unit")

    async def session(name: str, index: int) -> None:
        with bound_session(name):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, index)
            _log.info("after")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session, "rec-1", 1)
        tasks.start_soon(session, "rec-2", 2)
    _log.info("outside")
    told = {(line["event"], line.get("session"), line.get("unit")) for line in lines(stream)}
    assert told == {
        ("in a thread", "rec-1", 1),
        ("in a thread", "rec-2", 2),
        ("of no unit", "rec-1", None),
        ("of no unit", "rec-2", None),
        ("after", "rec-1", None),
        ("after", "rec-2", None),
        ("outside", None, None),
    }


def test_a_session_is_told_in_two_lines() -> None:
    """An operator would not know who was served, for how long, and why it ended."""
    stream = written()

    async def body() -> None:
        async with watched(Hub([SessionsLogger()])) as server:
            peer = server.connect("audio", label="the client's label")
            await peer.heard("session.queue_done")
            peer.send(init_frame(system_prompt="what the client said"))
            await peer.heard("session.created")
            peer.send(append_frame(9.5))
            await peer.heard("audio", 2)
            await anyio.sleep(1)
            peer.send(close_frame("its own reason"))
            await peer.over()

    on_virtual_time(body)
    (over,) = (line for line in lines(stream) if line["event"] == "session over")
    assert (over["level"], over["session"]) == ("info", "rec-000001")
    assert {over[name] for name in ("mode", "dialect", "reason")} == {"audio", "realtime", "client"}
    assert (over["units"], over["units_dropped"]) == (6, 3)
    assert 1 < over["seconds"] < 5
    opened = [line for line in lines(stream) if line["event"] == "session opened"]
    assert [line["session"] for line in opened] == ["rec-000001"]
    text = stream.getvalue()
    assert not any(word in text for word in ("label", "what the client", "own reason"))


def test_a_session_s_own_name_is_not_told() -> None:
    """A client could write into the log what it likes."""
    stream = written(level="debug")

    async def body() -> None:
        async with watched(Hub([SessionsLogger()])) as server:
            peer = server.connect("audio", endpoint="duplex", label="secret-label")
            await peer.heard("queue_done")
            peer.send(prepare_frame())
            await peer.heard("prepared")
            peer.vanish()

    on_virtual_time(body)
    assert "session over" in stream.getvalue()
    assert "secret-label" not in stream.getvalue()


def test_a_session_that_we_broke_is_a_warning() -> None:
    """At the default level an operator would hear nothing of a failing model."""
    stream = written(level="warning")

    def gone(unit: Unit, seed: int) -> Step:
        return Step(fault="gone")

    async def body() -> None:
        async with watched(Hub([SessionsLogger()]), ScriptedBackend(gone)) as server:
            peer = await server.activate()
            peer.send(append_frame())
            await peer.over()
            await server.quiet()

    on_virtual_time(body)
    told = [line["event"] for line in lines(stream)]
    assert told.count("the model was lost") == 1
    assert told.count("session over") == 1


# -- those who watch ------------------------------------------------------------------------------


class Broken:
    """Watches, and breaks."""

    def __init__(self, place: str) -> None:
        self.place = place

    def watch(self, opened: Any, owner: str) -> Any:
        if self.place == "watch":
            raise RuntimeError("cannot watch")
        return self

    def saw(self, event: Any, effects: Any, session: Any) -> None:
        if self.place == "saw":
            raise RuntimeError("cannot see")

    def received(self, events: Any, messages: Any, session: Any) -> None:
        if self.place == "saw":
            raise RuntimeError("cannot hear")

    def over(self, reason: str | None) -> None:
        if self.place == "over":
            raise RuntimeError("cannot end")


@pytest.mark.parametrize("place", ["watch", "saw", "over"])
def test_a_watcher_that_breaks_harms_nobody(place: str) -> None:
    """A bug in a metric would end every session, or fill the log."""
    stream = written(level="error")
    before, after = Metrics(), Metrics()

    async def body() -> None:
        async with watched(Hub([before, Broken(place), after])) as server:
            peer = await server.activate()
            peer.send(append_frame())
            await peer.heard("listen")
            peer.send(close_frame())
            await peer.over()

    on_virtual_time(body)
    assert len(lines(stream)) == 1
    assert lines(stream)[0]["logger"] == "antiphon.telemetry"
    for metrics in (before, after):
        seen = Figures(metrics)
        assert seen.all_of("units_total") == 1
        assert seen("sessions_ended_total", mode="video", reason="client") == 1
