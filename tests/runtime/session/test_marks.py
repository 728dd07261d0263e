"""Marks: what somebody says of a running session is in its log, and nothing else is changed."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from websockets.sync.client import ClientConnection, connect

from protocol.values.events import DrainBegan
from recorder.format.format import LogFailed, Record
from recorder.read.reader import read
from recorder.repair import verify
from recorder.storage.store import Store
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder
from replay.rerun.logic import replay
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.api.recordings import BODY_BYTES_MAX
from runtime.session.journal import MARK_WAIT_S, MARKS_MAX, Journal, MarkRefused
from tests.live.servers import LiveServer, live_server
from tests.recorder.test_samples import PATH, MemoryDisk
from tests.sessions.in_memory import append_frame, close_frame, init_frame, on_virtual_time, world

KEYS = {"anna": "antiphon_anna", "bert": "antiphon_bert", "root": "antiphon_root"}
WAIT_S = 20


def marks_in(records: list[Record]) -> list[Any]:
    """Give what the marks say."""
    return [record.fields for record in records if record.kind == "mark"]


# -- what a mark does to a session ----------------------------------------------------------------


def recorded(folder: Path, marked_s: tuple[float, ...]) -> list[Record]:
    """Record a session of a dozen units and a flood, marked at some times."""
    folder.mkdir()

    async def mark(server: Any, at_s: float) -> None:
        await anyio.sleep(at_s)
        await server.mark("rec-000001", {"text": f"at {at_s}"})

    async def body() -> None:
        async with world(record_to=folder) as running, anyio.create_task_group() as tasks:
            peer = await running.activate()
            for at_s in marked_s:
                tasks.start_soon(mark, running.server, at_s)
            for _ in range(16):
                peer.send(append_frame(0.75))
                await anyio.sleep(0.75)
            peer.send(append_frame(3.0), append_frame(3.0), close_frame())
            await peer.over()
            await running.quiet()

    on_virtual_time(body)
    (path,) = folder.iterdir()
    assert (verify(path).state, verify(path).exit_code) == ("finished", 0)
    return list(read(path))


def told(records: list[Record]) -> list[Any]:
    """Give all that a log says but for marks, numbers of records, and what its file is made of."""
    own = {"blocks", "chain", "counts"}
    return [
        (it.kind, it.at_ns, {name: it.fields[name] for name in it.fields if name not in own})
        for it in records
        if it.kind != "mark"
    ]


def test_a_marked_session_is_the_same_session(tmp_path: Path) -> None:
    """Whoever marks what is odd would change it, or nobody could replay it any more."""
    plain = recorded(tmp_path / "plain", ())
    marked = recorded(tmp_path / "marked", (0.0, 0.1, 0.1, 3.3, 7.5, 9.0))
    assert len(marks_in(marked)) == 6
    assert told(marked) == told(plain)
    assert [record.seq for record in marked] == [*range(len(marked))]
    assert all(first.at_ns <= second.at_ns for first, second in pairwise(marked))
    report, before = replay(marked), replay(plain)
    assert report.identical
    assert (report.states, report.effects) == (before.states, before.effects)
    assert report.states > 0


def test_a_mark_stands_before_what_is_not_stepped_yet(tmp_path: Path) -> None:
    """Times in a log would go back, and a reader that looks for one would miss it."""

    async def body() -> None:
        async with world(record_to=tmp_path) as running:
            peer = await running.activate()
            driver = next(iter(running.server._drivers))
            await anyio.sleep(1)
            came_ns = driver.now_ns()
            driver.post(DrainBegan(at_ns=came_ns, wait_s=5))
            driver._began_ns -= 1000  # the loop was held up
            _, at_ns = await running.server.mark("rec-000001", {"text": "now"})
            assert at_ns == came_ns
            peer.send(close_frame())
            await peer.over()

    on_virtual_time(body)
    records = list(read(next(tmp_path.iterdir())))
    assert replay(records).identical
    assert all(first.at_ns <= second.at_ns for first, second in pairwise(records))


def refused(journal: Journal) -> str:
    """Say why a mark is not taken."""
    reasons: list[str] = []

    async def body() -> None:
        with pytest.raises(MarkRefused) as raised:
            await journal.append_mark(1, {"text": "x"})
        reasons.append(raised.value.reason)

    on_virtual_time(body)
    return reasons[0]


def test_without_a_log_there_is_no_mark() -> None:
    """One would be told of a mark that is nowhere."""
    assert refused(Journal(None, on_failure=lambda: None)) == "not_recorded"


def test_a_mark_never_costs_a_recording() -> None:
    """A remark would be what a recording is given up for, or be said to be there when it is not."""
    disk = MemoryDisk()
    failures: list[LogFailed] = []

    async def body() -> None:
        with Recorder(disk=disk, clock=lambda: 0.0, inline=True) as recorder:
            logs: list[SessionLog] = []

            def open_log(told: Any) -> SessionLog:
                logs.append(recorder.open(PATH, {}, at_ns=0, on_failure=told))
                return logs[0]

            journal = Journal(open_log, on_failure=lambda: failures.append(LogFailed("told")))
            for _ in range(MARKS_MAX - 1):
                await journal.append_mark(1, {"text": "x"})
            disk.failing.add("write")
            with pytest.raises(MarkRefused, match="not_recorded"):
                await journal.append_mark(1, {"text": "lost"})
            assert len(failures) == 1, "the disk, not the mark"

    on_virtual_time(body)


@attrs.define
class _Stuck:
    """A log whose disk takes for ever, and which may be full."""

    is_full: bool
    appended: int = 0

    def append(self, *records: Record, urgent: bool) -> None:
        assert urgent
        self.appended += len(records)

    async def written(self, _seq: int) -> None:
        await anyio.sleep_forever()


@pytest.mark.parametrize("is_full", [True, False])
def test_a_recorder_that_is_behind_is_not_waited_for_for_ever(is_full: bool) -> None:
    """Whoever marks would wait with the disk, or fill a backlog that is full already."""
    stuck: Any = _Stuck(is_full)
    waited_s: list[float] = []

    async def body() -> None:
        journal, began_s = Journal(lambda _: stuck, on_failure=pytest.fail), anyio.current_time()
        with pytest.raises(MarkRefused, match="behind"):
            await journal.append_mark(1, {"text": "x"})
        waited_s.append(anyio.current_time() - began_s)

    on_virtual_time(body)
    assert (waited_s, stuck.appended) == ([0.0 if is_full else MARK_WAIT_S], not is_full)


# -- over HTTP ------------------------------------------------------------------------------------


@attrs.frozen
class Shop:
    """A server with keys, and its recordings."""

    server: LiveServer
    folder: Path

    def mark(self, recording_id: str, body: object, key: str = "anna") -> tuple[int, Any]:
        """Mark a session; returns the status and what is said."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
        connection = http.client.HTTPConnection(*self.server.address, timeout=WAIT_S)
        try:
            connection.request("POST", f"/api/sessions/{recording_id}/marks", data, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    @contextmanager
    def session(self, key: str = "anna") -> Iterator[tuple[ClientConnection, str]]:
        """Have a session that has begun; with its recording's id."""
        headers = {"Authorization": f"Bearer {KEYS[key]}"}
        url = f"{self.server.url}?mode=audio"
        with connect(url, additional_headers=headers, compression=None) as websocket:
            hear(websocket, "session.queue_done")
            websocket.send(init_frame())
            hear(websocket, "session.created")
            yield websocket, self.running(headers)

    def running(self, headers: dict[str, str]) -> str:
        """Name the session of a key that came last."""
        connection = http.client.HTTPConnection(*self.server.address, timeout=WAIT_S)
        try:
            connection.request("GET", "/api/sessions", headers=headers)
            sessions = json.loads(connection.getresponse().read())["sessions"]
        finally:
            connection.close()
        found: str = sessions[-1]["recording_id"]
        return found

    def records(self, recording_id: str) -> list[Record]:
        """Read a log."""
        return list(read(Store(self.folder).path(recording_id)))


def hear(websocket: ClientConnection, kind: str) -> dict[str, Any]:
    """Wait for an event of a type."""
    while True:
        event: dict[str, Any] = json.loads(websocket.recv(timeout=WAIT_S))
        if event["type"] == kind:
            return event


def goodbye(websocket: ClientConnection) -> list[Any]:
    """Close a session; returns all that was heard until it was over."""
    websocket.send(close_frame())
    return [json.loads(frame) for frame in websocket]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Serve with keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = tuple(
        Key(name=name, hash=hash_key(key), scope="admin" if name == "root" else "use")
        for name, key in KEYS.items()
    )
    change_key_file(path, lambda _: keys, create=True)
    folder = tmp_path_factory.mktemp("recordings")
    options = ("--keys", str(path), "--record", str(folder), "--slots", "4")
    with live_server(*options) as server:
        yield Shop(server, folder)
        assert "Traceback" not in server.errors.read_text()


def test_a_mark_is_in_the_log_when_it_is_answered(shop: Shop) -> None:
    """What somebody saw would be marked somewhere else, or be lost with the server."""
    with shop.session() as (websocket, name):
        websocket.send(append_frame(1.0))
        text = 'odd: "ünit" 0\n\x1b[31m😀'
        status, said = shop.mark(name, {"text": text})
        assert (status, said.keys()) == (201, {"recording_id", "seq", "at_ms"})
        record = shop.records(name)[said["seq"]]
        assert (record.kind, record.fields) == ("mark", {"text": text, "by": "anna"})
        assert said == {
            "recording_id": name,
            "seq": record.seq,
            "at_ms": round(record.at_ns / 1e6, 3),
        }
        assert shop.mark(name, {"text": "seen"}, "root")[0] == 201
        heard = goodbye(websocket)
    records = shop.records(name)
    assert [fields["by"] for fields in marks_in(records)] == ["anna", "root"]
    assert verify(Store(shop.folder).path(name)).exit_code == 0
    assert replay(records).identical
    assert "odd" not in json.dumps(heard)


def test_who_may_not_see_a_session_may_not_mark_it(shop: Shop) -> None:
    """A client could write into another's log, or find out that there is one."""
    with shop.session() as (websocket, name):
        stranger, nobody = shop.mark(name, {"text": "x"}, "bert"), shop.mark("rec-none", {}, "bert")
        assert stranger == nobody
        assert stranger[0] == 404
        assert shop.mark(name, {"text": "x"}, "")[0] == 401
        assert shop.mark("..%2f..%2fetc", {"text": "x"}, "root")[0] == 404
        goodbye(websocket)
    assert marks_in(shop.records(name)) == []
    assert shop.mark(name, {"text": "late"})[0] == 409
    assert shop.mark(name, {"text": "late"}, "root")[0] == 409
    assert shop.mark(name, {"text": "late"}, "bert")[0] == 404


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({}, 400, "$.text: required field is missing"),
        ({"text": ""}, 400, "$.text: 0 characters, allowed is 1 to 1000"),
        ({"text": "x" * 1001}, 400, "$.text: 1001 characters, allowed is 1 to 1000"),
        ({"text": 7}, 400, "$.text: "),
        ({"text": None}, 400, "$.text: required field is missing"),
        ({"text": "x", "unit": 3}, 400, "$.unit: unknown field, known are text"),
        ([], 400, "$: "),
        (b"", 400, "$: "),
        (b'{"text": "x", "text": "y"}', 400, "$: "),
        (b'{"text": "\\ud800"}', 400, "$: "),
        (b'{"text": "\xff"}', 400, "$: this is not utf-8"),
        (b" " * (BODY_BYTES_MAX + 1), 413, "the body has more than"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(shop: Shop, body: object, status: int, why: str) -> None:
    """A slip would be a mark without words, or cost the session."""
    with shop.session() as (websocket, name):
        answer = shop.mark(name, body)
        assert (answer[0], answer[1]["message"].startswith(why)) == (status, True), answer
        goodbye(websocket)
    assert marks_in(shop.records(name)) == []


def test_there_are_so_many_marks_and_no_more(shop: Shop) -> None:
    """A script that marks for ever would fill the disk."""
    with shop.session() as (websocket, name):
        text = "\U0001f600" * 1000
        statuses = [shop.mark(name, {"text": text})[0] for _ in range(MARKS_MAX + 2)]
        assert statuses == [201] * MARKS_MAX + [429] * 2
        goodbye(websocket)
    assert len(marks_in(shop.records(name))) == MARKS_MAX


def test_a_session_without_a_log_takes_no_mark() -> None:
    """One would be told that it is marked."""
    with live_server("--no-record") as server:
        shop = Shop(server, Path())
        with connect(f"{server.url}?mode=audio", compression=None) as websocket:
            hear(websocket, "session.queue_done")
            assert shop.mark(shop.running({}), {"text": "x"}, "")[0] == 409
        assert shop.mark("rec-none", {"text": "x"}, "")[0] == 404
