"""Marks next to the log of an ended session, and its replay: who may, and what is refused."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.from_thread
import anyio.to_thread
import attrs
import pytest
from starlette.routing import Route
from websockets.sync.client import connect

from recorder.format.format import SUFFIX, recording_id_of
from recorder.storage.marks import MARKS_MAX, Mark, add_mark, marks_path
from recorder.storage.store import Store
from runtime.access.gate import PRINCIPAL
from runtime.access.keys import ANYONE, Key, change_key_file, hash_key
from runtime.api.recordings import BODY_BYTES_MAX, WRITING_MAX, Marks, Recordings
from runtime.net.http import make_app
from tests.golden.logs import FOLDER
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import WAIT_S, Answer, request
from tests.recorder.test_listing import write_log
from tests.replay.test_logs import busy_scene, renumbered
from tests.replay.test_logs import write_log as write_records
from tests.sessions.in_memory import init_frame

KEYS: Final = {"anna": "antiphon_anna", "bert": "antiphon_bert", "root": "antiphon_root"}
MARK: Final = {"at_ms": 1200, "end_ms": 2500, "text": "<b>late</b> \u00e9"}


@attrs.frozen
class Shop:
    """A server with keys, and its folder."""

    server: LiveServer
    folder: Path

    def ask(
        self, path: str, key: str = "anna", method: str = "GET", body: Any = None, **headers: str
    ) -> Answer:
        """Ask, with JSON where the body is no bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        bearer = KEYS[key] if key else ""
        return request(
            self.server.address, path, method=method, key=bearer, body=data, headers=headers
        )

    def mark(self, name: str, body: Any = MARK, key: str = "anna", **headers: str) -> Answer:
        """Write a mark next to a log."""
        return self.ask(f"/api/recordings/{name}/marks", key, "POST", body, **headers)

    def marks(self, name: str) -> Any:
        """The marks next to a log."""
        return self.ask(f"/api/recordings/{name}/marks").said["marks"]

    def own(self, name: str) -> Path:
        """Put a log of anna's into the folder."""
        config = {"mode": "audio", "model": "x", "owner": "anna"}
        return write_log(self.folder, name, {"wall_ms": 1_700_000_000_000, "config": config})

    def begun(self, websocket: Any) -> str:
        """Begin a session; its recording."""
        websocket.send(init_frame())
        while (said := json.loads(websocket.recv(timeout=WAIT_S)))["type"] != "session.created":
            pass
        name: str = said["recording_id"]
        return name


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A server with keys, and a log of anna's."""
    folder = tmp_path_factory.mktemp("marks")
    keys = tuple(
        Key(name=name, hash=hash_key(key), scope="admin" if name == "root" else "use")
        for name, key in KEYS.items()
    )
    change_key_file(folder / "keys.toml", lambda _: keys, create=True)
    options = ("--keys", str(folder / "keys.toml"), "--record", str(folder))
    with live_server(*options) as server:
        shop = Shop(server, folder)
        shop.own("own")
        yield shop
        assert "Traceback" not in server.errors.read_text()


def test_a_mark_is_written_shown_and_removed(shop: Shop) -> None:
    """Remarks on a recording would be kept elsewhere, or for ever."""
    log = Store(shop.folder).path("own")
    before = log.read_bytes()
    made = shop.mark("own")
    assert made.status == 201
    assert made.said == {**MARK, "number": 1, "by": "anna", "written_ms": made.said["written_ms"]}
    other = shop.mark("own", {**MARK, "at_ms": 0}, "root").said
    assert shop.marks("own") == [other, made.said]
    page = shop.ask("/api/recordings/own/view")
    assert b"\\u003cb\\u003elate\\u003c/b\\u003e \\u00e9" in page.body
    assert b"<b>late" not in page.body
    assert shop.ask("/api/recordings/own/marks/2", method="DELETE").status == 403
    assert shop.ask("/api/recordings/own/marks/1", "bert", "DELETE").status == 404
    for number, key, status in ((1, "anna", 204), (1, "anna", 404), (2, "root", 204)):
        where = f"/api/recordings/own/marks/{number}"
        assert shop.ask(where, key, "DELETE").status == status
    assert shop.marks("own") == []
    for odd in ("x", "0", "-1", "%C2%B2", "9" * 30):
        assert shop.ask(f"/api/recordings/own/marks/{odd}", method="DELETE").status == 404
    assert shop.mark("own", key="root").said["number"] == 3
    assert shop.ask("/api/recordings/own/marks/3", "root", "DELETE").status == 204
    assert log.read_bytes() == before


def test_a_page_writes_with_a_key_that_its_user_gives(shop: Shop) -> None:
    """Another site's page could write with the password that a browser sends by itself."""
    basic = "Basic " + b64encode(f"me:{KEYS['anna']}".encode()).decode()
    assert shop.mark("own", key="", Authorization=basic).status == 401
    assert shop.mark("own", Origin="https://elsewhere.example").status == 403
    assert shop.mark("own", Origin="null").status == 403
    page = shop.ask("/api/recordings/own/view", "", Authorization=basic)
    assert page.status == 200
    assert b'"asks_key":true' in page.body
    assert b"connect-src &#x27;self&#x27;" in page.body


def test_who_may_not_see_a_recording_may_not_mark_it(shop: Shop) -> None:
    """A client could read marks of another's session, write some, or learn that it exists."""
    for name in ("own", "none", "..%2f..%2fetc"):
        assert shop.mark(name, key="bert").status == 404
        assert shop.ask(f"/api/recordings/{name}/marks", "bert").status == 404
        assert shop.ask(f"/api/recordings/{name}/replay", "bert").status == 404
    for path in ("marks", "replay"):
        assert shop.ask(f"/api/recordings/own/{path}", "").status == 401


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({}, 400, "$.at_ms: required field is missing"),
        ({**MARK, "end_ms": 1199}, 400, "$.end_ms: "),
        ({**MARK, "at_ms": -1}, 400, "$.at_ms: "),
        ({**MARK, "at_ms": 1.5}, 400, "$.at_ms: "),
        ({**MARK, "end_ms": 10**9 + 1}, 400, "$.end_ms: "),
        ({**MARK, "text": ""}, 400, "$.text: 0 characters, allowed is 1 to 1000"),
        ({**MARK, "text": "x" * 1001}, 400, "$.text: 1001 characters, allowed is 1 to 1000"),
        ({**MARK, "by": "root"}, 400, "$.by: unknown field"),
        (b'{"text": "\\ud800"}', 400, "$: "),
        (b" " * (BODY_BYTES_MAX + 1), 413, "the body has more than"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(shop: Shop, body: Any, status: int, why: str) -> None:
    """A slip would be a mark without words, or elsewhere."""
    answer = shop.mark("own", body)
    assert (answer.status, answer.said["message"].startswith(why)) == (status, True), answer
    assert shop.marks("own") == []


def test_a_running_session_is_marked_in_its_log(shop: Shop) -> None:
    """A log that is not wanted is removed by its client, and such a mark would stay."""
    headers = {"Authorization": f"Bearer {KEYS['anna']}"}
    with connect(f"{shop.server.url}?mode=audio", additional_headers=headers) as websocket:
        name = shop.begun(websocket)
        refused = shop.mark(name)
        assert refused.status == 409
        assert refused.said["message"].startswith("this session runs: write into its log")
        assert shop.ask(f"/api/recordings/{name}/replay").status == 409
        page = shop.ask(f"/api/recordings/{name}/view").body
        assert b'"writes":"log"' in page


def test_marks_are_bounded_and_go_with_their_recording(shop: Shop) -> None:
    """A script would fill the disk, and what was said of a session would outlive it."""
    log = shop.own("full")
    line = {"number": MARKS_MAX, "at_ms": 0, "end_ms": 0, "text": "x", "by": "", "written_ms": 0}
    marks_path(log).write_text(json.dumps(line) + "\n{cut")
    assert shop.mark("full").status == 429
    assert shop.ask("/api/recordings/full/marks").said["damaged"] == 1
    assert b'"damaged":1' in shop.ask("/api/recordings/full/view").body
    assert shop.ask("/api/recordings/full", "root", "DELETE").status == 204
    assert not marks_path(log).exists()


def test_a_mark_goes_with_a_log_that_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said of a session would outlive it for ever."""
    log = write_log(tmp_path, "one")

    def late(path: Path, **fields: Any) -> Mark:
        (info,) = Store(tmp_path).logs()
        Store(tmp_path).remove(info)
        return add_mark(path, **fields)

    monkeypatch.setattr("recorder.storage.marks.add_mark", late)
    routes = Marks(lambda: None, Recordings(tmp_path)).routes()
    assert anyio.run(answered, routes, backend="trio") == 404
    assert not marks_path(log).exists()


async def answered(routes: Sequence[Route]) -> int:
    """Write a mark next to the log `one`, without a server; the status."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(MARK).encode()}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    statuses, path = list[Any](), "/api/recordings/one/marks"
    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "headers": [], "client": ("::1", 1), PRINCIPAL: ANYONE},
    }
    await make_app(lambda: "ready", routes)(scope, receive, send)
    status: int = statuses[0]
    return status


def test_writers_that_wait_leave_threads_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client that writes many marks at once would hold up what all others read."""
    begun, free, made = anyio.Semaphore(0), threading.Event(), list[Path]()

    def slow(path: Path, **fields: Any) -> Mark:
        anyio.from_thread.run_sync(begun.release)
        free.wait(WAIT_S)
        made.append(path)
        return add_mark(path, **fields)

    monkeypatch.setattr("recorder.storage.marks.add_mark", slow)
    write_log(tmp_path, "one")
    routes = Marks(lambda: None, Recordings(tmp_path)).routes()

    async def write() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(WRITING_MAX + 3):
                tasks.start_soon(answered, routes)
            for _ in range(WRITING_MAX):
                await begun.acquire()
            assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            free.set()

    anyio.run(write, backend="trio")
    assert len(made) == WRITING_MAX + 3


def test_a_redacted_copy_has_no_marks(shop: Shop) -> None:
    """A mark can repeat the very words that a copy leaves out."""
    log = Store(shop.folder).path("shared")
    log.write_bytes((FOLDER / "v1-realtime-video.session.zst").read_bytes())
    assert shop.mark("shared", key="root").status == 201
    for path, has_marks in (("view", True), ("redacted?as=page", False)):
        page = shop.ask(f"/api/recordings/shared/{path}", "root")
        assert (page.status, b"late" in page.body.split(b"data-part=")[1]) == (200, has_marks)


def test_a_disk_that_refuses_is_told(shop: Shop) -> None:
    """A mark that is not kept would look as if it were."""
    marks_path(shop.own("other")).mkdir()
    refused = shop.mark("other")
    assert (refused.status, refused.said["message"]) == (507, "the server cannot keep the mark now")


# -- replay ---------------------------------------------------------------------------------------


def replayed(shop: Shop, log: Path) -> Any:
    """Put a log into the folder, and replay it there."""
    path = Store(shop.folder).path(log.name.removesuffix(SUFFIX))
    path.write_bytes(log.read_bytes())
    return shop.ask(f"/api/recordings/{recording_id_of(path)}/replay", "root").said


@pytest.mark.parametrize("name", ["v1-realtime-video", "v1-realtime-chat"])
def test_a_recording_is_replayed(shop: Shop, name: str) -> None:
    """Whether a recording is one that this server would make could be seen on its machine only."""
    said = replayed(shop, FOLDER / f"{name}.session.zst")
    assert (said["result"], said["divergence"], said["lines"][0]) == (
        "identical",
        None,
        "identical",
    )
    assert said["frames"] > 0
    assert said["elapsed_ms"] > 0


def test_a_recording_that_was_tampered_with_diverges(shop: Shop, tmp_path: Path) -> None:
    """A frame that the server never sent would be taken for its own."""
    records = busy_scene().records
    sent = [it for it in records if it.kind == "tx"][-1]
    frame = str(sent.fields["frame"]).replace("type", "typo", 1)
    other = attrs.evolve(sent, fields={**sent.fields, "frame": frame})
    tampered = renumbered([other if it is sent else it for it in records])
    log = write_records(tmp_path, tampered)
    said = replayed(shop, log)
    assert said["result"] == "diverged"
    assert said["divergence"]["seq"] == sent.seq
    assert said["lines"][0] == f"diverged at record {sent.seq}"
    assert any("typo" in line for line in said["lines"])


def test_a_damaged_recording_is_told(shop: Shop) -> None:
    """Damage would be taken for a fault of the server."""
    said = replayed(shop, FOLDER / "v1-damaged-twice.session.zst")
    assert (said["result"], said["damage_count"]) == ("damaged", 1)
