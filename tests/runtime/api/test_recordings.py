"""Recordings over HTTP: who sees which, what is handed out of a log, and its live tail."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from websockets.sync.client import ClientConnection, connect

from protocol.values.records import session_id_of
from recorder.format.format import SUFFIX
from recorder.read.reader import read
from recorder.repair import verify
from recorder.storage.store import INDEX_NAME, Store
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.api.recordings import TAILS_PER_KEY_MAX, Recordings
from runtime.api.requests import part_of
from runtime.cli import main
from tests.golden.logs import FOLDER
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import WAIT_S, Answer, request
from tests.recorder.test_listing import HEAD, write_log
from tests.sessions.in_memory import append_frame, close_frame, init_frame

KEYS = {"anna": "antiphon_anna", "bert": "antiphon_bert", "root": "antiphon_root"}
QUESTION = '{"type":"input.append","input":{"messages":[{"role":"user","content":"who are you?"}]}}'
ONE = "/api/recordings/of-bert"
SESSION = "/api/sessions/of-bert"
OF_ONE = (ONE, f"{ONE}/log", f"{ONE}/live", f"{ONE}/view", f"{ONE}/digest")
OF_ONE += (f"{SESSION}/recording", f"{SESSION}/view")
OF_ONE += ("/v1/live/sessions/of-bert/content",)
TRICKS = (
    *("..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "a%00b", "a.b", "a" * 65),
    *("../../etc/passwd", "..%5c..", "of-bert.session.zst", "%ff", "elsewhere%2fof-anna", "link"),
)


@attrs.frozen
class Shop:
    """A server with recordings of three keys, and of nobody."""

    server: LiveServer
    folder: Path

    def ask(self, path: str, key: str = "root", method: str = "GET", **headers: str) -> Answer:
        """Ask for exactly this path."""
        bearer = KEYS[key] if key else ""
        return request(self.server.address, path, method=method, key=bearer, headers=headers)

    def ids(self, query: str = "", key: str = "root") -> list[str]:
        """The ids that are listed."""
        told = self.ask(f"/api/recordings{query}", key).said
        return [it["recording_id"] for it in told["recordings"]]

    @contextmanager
    def session(self, key: str = "anna", mode: str = "audio") -> Iterator[tuple[Any, str]]:
        """Have a session that has begun; with its recording's id."""
        headers = {"Authorization": f"Bearer {KEYS[key]}"}
        url = f"{self.server.url}?mode={mode}"
        with connect(url, additional_headers=headers, compression=None) as websocket:
            hear(websocket, "session.queue_done")
            websocket.send(init_frame())
            hear(websocket, "session.created")
            (session,) = self.ask("/api/sessions", key).said["sessions"]
            yield websocket, session["recording_id"]

    @contextmanager
    def live(self, recording_id: str, query: str = "", **headers: str) -> Iterator[Iterator[Any]]:
        """Follow a recording; yields what is told."""
        connection = http.client.HTTPConnection(*self.server.address, timeout=WAIT_S)
        headers["Authorization"] = f"Bearer {KEYS['root']}"
        connection.request("GET", f"/api/recordings/{recording_id}/live{query}", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200
        lines = iter(answer.readline, b"")
        try:
            yield (json.loads(line.removeprefix(b"data: ")) for line in lines if b"{" in line)
        finally:
            connection.close()


def hear(websocket: ClientConnection, kind: str) -> dict[str, Any]:
    """Wait for an event of a type."""
    while True:
        event: dict[str, Any] = json.loads(websocket.recv(timeout=WAIT_S))
        if kind in (event["type"], event.get("kind")):
            return event


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Serve with keys; logs of anna, bert and nobody are there, and one that cannot be read."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    scopes: dict[str, Any] = {"root": "admin"}
    keys = tuple(
        Key(name=name, hash=hash_key(key), scope=scopes.get(name, "use"))
        for name, key in KEYS.items()
    )
    change_key_file(path, lambda _: keys, create=True)
    folder = tmp_path_factory.mktemp("recordings")
    for age, owner in enumerate(["anna", "bert", ""]):
        head = {
            "wall_ms": 1_700_000_000_000 - age,
            "config": {"mode": "audio", "model": "x", "owner": owner},
        }
        write_log(folder, f"of-{owner or 'nobody'}", head)
    write_log(folder, "killed", HEAD, fin=None)
    Store(folder).path("junk").write_bytes(b"no log")
    (folder / "elsewhere").mkdir()
    write_log(folder / "elsewhere", "of-anna")
    Store(folder).path("link").symlink_to(Store(folder).path("of-bert"))
    options = ("--keys", str(path), "--record", str(folder), "--slots", "4")
    with live_server(*options) as server:
        yield Shop(server, folder)
        assert "Traceback" not in server.errors.read_text()


# -- who sees what --------------------------------------------------------------------------------


def test_a_key_sees_its_own_recordings(shop: Shop) -> None:
    """A client could list what others said, or not find what it said itself."""
    assert shop.ids(key="bert") == ["of-bert"]
    assert set(shop.ids()) >= {"of-anna", "of-bert", "of-nobody", "killed", "junk"}
    assert shop.ids("?owner=bert", key="anna") == []
    assert set(shop.ids("?owner=anna", key="anna")) >= {"of-anna", "killed"}
    told = shop.ask(ONE, "bert").said
    assert (told["owner"], told["state"], told["units"]) == ("bert", "finished", 2)


@pytest.mark.parametrize("path", OF_ONE)
def test_what_is_another_s_is_not_there(shop: Shop, path: str) -> None:
    """A client that guesses an id could hear another, or find out that there is one."""
    answer, nothing = shop.ask(path, "anna"), shop.ask(path.replace("of-bert", "none"), "anna")
    assert (answer.status, answer.body) == (nothing.status, nothing.body)
    assert answer.status == 404
    assert shop.ask(path, "").status == 401
    assert shop.ask(path, "bert").status == 200


@pytest.mark.parametrize("key", ["anna", "root"])
@pytest.mark.parametrize("trick", TRICKS)
def test_an_id_is_never_a_path(shop: Shop, trick: str, key: str) -> None:
    """A client could read, or an operator's slip remove, any file of the machine."""
    for path in ("", "/log", "/live", "/view"):
        assert shop.ask(f"/api/recordings/{trick}{path}", key).status == 404
    for path in ("/recording", "/view"):
        assert shop.ask(f"/api/sessions/{trick}{path}", key).status == 404
    assert shop.ask(f"/v1/live/sessions/{trick}/content", key).status == 404
    assert shop.ask(f"/api/recordings/{trick}", key, "DELETE").status == 404
    assert Store(shop.folder).path("of-bert").exists()


def test_what_has_no_owner_that_can_be_read_is_the_operator_s(shop: Shop) -> None:
    """A log whose head is damaged would be everybody's."""
    assert shop.ask("/api/recordings/junk", "anna").status == 404
    assert shop.ask("/api/recordings/junk").said["state"] == "unreadable"
    assert shop.ask("/api/recordings/junk/view").status == 422
    assert shop.ask("/api/recordings/junk/log").body == b"no log"


# -- the list -------------------------------------------------------------------------------------


def test_the_list_has_pages_and_filters(shop: Shop) -> None:
    """A client with many recordings could not get at the older ones."""
    everything = shop.ids()
    seen: list[str] = []
    query = "?limit=2"
    for _ in range(len(everything)):
        told = shop.ask(f"/api/recordings{query}").said
        seen += [it["recording_id"] for it in told["recordings"]]
        if told["next"] is None:
            break
        query = f"?limit=2&after={told['next']}"
    assert seen == everything
    assert shop.ids("?state=unreadable") == ["junk"]
    assert "of-nobody" in shop.ids("?owner=&reason=client&mode=audio")
    assert "of-bert" not in shop.ids("?since_ms=1700000000000")


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "limit=x", "limit=", "since_ms=-1", "since_ms=" + "9" * 30),
        *("mode=radio", "state=gone", "after=x", "after=%ff.a", "limt=3", "limit=%D9%A3"),
    ],
)
def test_a_wrong_parameter_is_told(shop: Shop, query: str) -> None:
    """A filter with a typing error would be none, and a script take all for some."""
    answer = shop.ask(f"/api/recordings?{query}")
    assert (answer.status, answer.said["error"]) == (400, "bad_request")


# -- the log --------------------------------------------------------------------------------------


def test_a_log_is_handed_out_as_it_is(shop: Shop) -> None:
    """What is downloaded would not verify, or every download begin anew."""
    data = Store(shop.folder).path("of-bert").read_bytes()
    answer = shop.ask(f"{ONE}/log", "bert")
    assert (answer.status, answer.body) == (200, data)
    assert answer.headers["content-disposition"] == f'attachment; filename="of-bert{SUFFIX}"'
    tag = answer.headers["etag"]
    head = shop.ask(f"{ONE}/log", "bert", "HEAD")
    assert (head.status, head.body, head.headers["etag"]) == (200, b"", tag)
    assert head.headers["content-length"] == str(len(data))
    part = shop.ask(f"{ONE}/log", Range="bytes=100-", If_Range=tag)
    assert (part.status, part.body) == (206, data[100:])
    assert part.headers["content-range"] == f"bytes 100-{len(data) - 1}/{len(data)}"
    assert shop.ask(f"{ONE}/log", Range="bytes=100-", If_Range='"other"').body == data
    same = shop.ask(f"{ONE}/log", If_None_Match=f'"x", W/{tag}')
    assert (same.status, same.body) == (304, b"")
    outside = shop.ask(f"{ONE}/log", Range=f"bytes={len(data)}-")
    assert (outside.status, outside.headers["content-range"]) == (416, f"bytes */{len(data)}")


def test_a_session_leads_to_its_recording(shop: Shop) -> None:
    """A client that knows its session finds the log and the page of it, also while it runs."""
    data = Store(shop.folder).path("of-bert").read_bytes()
    for name in ("of-bert", session_id_of("of-bert")):
        answer = shop.ask(f"/api/sessions/{name}/recording", "bert")
        assert (answer.status, answer.body) == (200, data)
        assert shop.ask(f"/api/sessions/{name}/recording", "anna").status == 404
    assert shop.ask(f"/api/sessions/{session_id_of('none')}/recording", "bert").status == 404
    part = shop.ask(f"{SESSION}/recording", "bert", Range="bytes=-10")
    assert (part.status, part.body) == (206, data[-10:])
    outside = shop.ask(f"{SESSION}/recording", "bert", Range=f"bytes={len(data)}-")
    assert outside.status == 416
    assert shop.ask(f"{SESSION}/recording", "bert", "HEAD").headers["content-length"] == str(
        len(data)
    )
    page = shop.ask(f"{SESSION}/view", "bert")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    with shop.session("anna") as (_, recording_id):
        mine = f"/api/sessions/{recording_id}/recording"
        assert shop.ask(mine, "anna").status == 200
        assert shop.ask(mine, "bert").status == 404
    assert shop.ask(f"{SESSION}/recording", "root", "DELETE").status == 405


def expected(asked: tuple[int | None, int | None], size: int) -> tuple[int, range]:
    """What RFC 9110 says of a range, in other words."""
    first, last = asked
    everything = range(size)
    if first is None and last is None:
        return 200, everything
    if first is None:
        found = everything[-last:] if last else range(0)
    elif last is None:
        found = everything[first:]
    elif last < first:
        return 200, everything
    else:
        found = everything[first : last + 1]
    return (206, found) if found else (416, range(0))


BOUND = st.none() | st.integers(0, 12)


@settings(max_examples=3 * settings.default.max_examples)
@given(first=BOUND, last=BOUND, size=st.integers(0, 10))
@example(first=None, last=0, size=5)
@example(first=0, last=None, size=0)
def test_ranges_are_those_of_the_rule(first: int | None, last: int | None, size: int) -> None:
    """A client that goes on with a download would put the wrong bytes together."""
    text = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    part = part_of(Headers({"range": text}), size=size, etag='"t"')
    status, found = expected((first, last), size)
    assert (part.status, range(size)[part.start : part.end]) == (status, found)
    assert part.headers["Content-Length"] == str(len(found))


@pytest.mark.parametrize("text", ["bytes=0-1,3-4", "lines=0-1", "bytes=a-b", "bytes 0-1", "bytes="])
def test_what_is_no_range_gives_all(text: str) -> None:
    """An odd client would get an error for what a server may ignore."""
    part = part_of(Headers({"range": text}), size=9, etag='"t"')
    assert (part.status, part.end) == (200, 9)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", OF_ONE)
def test_an_answer_ends_with_its_connection_where_that_is_asked(
    shop: Shop, path: str, method: str, version: str
) -> None:
    """A client that reads to the end of the stream, as HTTP/1.0 does, would wait for ever."""
    if (method, path) == ("HEAD", f"{ONE}/live"):
        return  # Only GET.
    head = (
        f"{method} {path} HTTP/{version}",
        *("Host: localhost", "Connection: close", f"Authorization: Bearer {KEYS['root']}"),
    )
    with socket.create_connection(shop.server.address, timeout=WAIT_S) as stream:
        stream.sendall("\r\n".join((*head, "", "")).encode())
        got = b""
        while more := stream.recv(65536):
            got += more
    assert got.split(b"\r\n")[0].endswith(b" 200 ")


def test_the_log_of_a_session_that_runs_ends_with_a_whole_block(shop: Shop) -> None:
    """Who looks at a session amid its life would get a log that seems to be damaged."""
    with shop.session() as (websocket, recording_id):
        path = f"/api/recordings/{recording_id}"
        assert shop.ask(path, "anna").said["state"] == "open"
        websocket.send(append_frame())
        hear(websocket, "listen")
        first = shop.ask(f"{path}/log", "anna")
        assert verify(first.body).state == "open"
        assert verify(first.body).tail_bytes == 0
        assert shop.ask(path, "root", "DELETE").status == 409
        websocket.send(close_frame())
        hear(websocket, "session.closed")
    ended = wait_for_end(shop, recording_id)
    assert (ended["reason"], ended["units"], ended["dialect"]) == ("client", 1, "realtime")
    rest = shop.ask(f"{path}/log", "anna", Range=f"bytes={len(first.body)}-")
    assert (rest.status, verify(first.body + rest.body).state) == (206, "finished")


def wait_for_end(shop: Shop, recording_id: str) -> Any:
    """Wait until a session's log has its end; the device may be slow."""
    with shop.live(recording_id) as told:
        assert list(told)[-1] == {"type": "end", "state": "finished"}
    return shop.ask(f"/api/recordings/{recording_id}").said


# -- the live tail --------------------------------------------------------------------------------


def test_a_session_is_told_while_it_runs(shop: Shop) -> None:
    """Nobody could watch a session, or would see other things than its log holds."""
    with shop.session() as (websocket, recording_id), shop.live(recording_id) as told:
        assert next(told)["kind"] == "session"
        websocket.send(append_frame())
        hear(websocket, "listen")
        seen = [next(told)]
        while seen[-1]["kind"] != "unit":  # it comes, though the session goes on
            seen.append(next(told))
        websocket.send(close_frame())
        hear(websocket, "session.closed")
        seen += list(told)
    assert seen.pop() == {"type": "end", "state": "finished"}
    records = list(read(Store(shop.folder).path(recording_id)))[1:]
    assert [(it["seq"], it["kind"], it["at_ns"]) for it in seen if it["type"] == "record"] == [
        (it.seq, it.kind, it.at_ns) for it in records
    ]
    (frame,) = [
        it["fields"]["frame"]
        for it in seen
        if it.get("kind") == "rx" and "append" in it["fields"]["frame"]
    ]
    assert json.loads(frame)["input"]["audio"] == "<64000 bytes>"


def test_bytes_are_told_where_they_are_asked_for(shop: Shop) -> None:
    """A viewer that wants the sound would have to fetch the whole log."""
    with shop.live("of-anna") as told, shop.live("of-anna", "?blobs=1&from_seq=2") as whole:
        short = [it["fields"]["result"]["pcm"] for it in told if it.get("kind") == "unit"]
        seen = list(whole)
    assert short == [{"$bytes": 2000}] * 2
    assert [it.get("seq") for it in seen] == [2, 3, None]
    assert len(seen[0]["fields"]["result"]["pcm"]["$base64"]) == 2668


def test_events_go_on_where_the_last_one_was(shop: Shop) -> None:
    """A page that lost its connection would be told all of it again, or miss some."""
    answer = shop.ask("/api/recordings/of-anna/live", "anna", Accept="text/event-stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.body.decode().split("\n\n")
    assert [event.split("\n")[0] for event in events[:-2]] == [f"id: {seq}" for seq in range(4)]
    again = shop.ask(
        "/api/recordings/of-anna/live", "anna", Accept="text/event-stream", Last_Event_ID="2"
    )
    assert again.body.decode().split("\n\n") == events[3:]


def test_whoever_heard_all_of_it_is_told_that_it_is_over(shop: Shop) -> None:
    """A page that lost its connection at the very end would say that the session crashed."""
    for from_seq in (4, 5000):
        with shop.live("of-anna", f"?from_seq={from_seq}") as told:
            assert list(told) == [{"type": "end", "state": "finished"}]


def test_a_killed_session_s_tail_ends(shop: Shop) -> None:
    """Who follows a session whose server was killed would wait for ever."""
    with shop.live("killed") as told:
        assert list(told)[-1] == {"type": "end", "state": "crashed"}
    with shop.live("junk") as told:
        assert list(told) == [{"type": "end", "state": "unreadable"}]


def follow_and_get_stuck(shop: Shop, recording_id: str) -> socket.socket:
    """Follow a recording, and read no more than that it is told."""
    stuck = socket.socket()
    stuck.settimeout(WAIT_S)
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(shop.server.address)
    path = f"/api/recordings/{recording_id}/live?blobs=1"
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS['anna']}\r\n\r\n"
    stuck.sendall(head.encode())
    assert stuck.recv(12) == b"HTTP/1.1 200"
    return stuck


def test_who_does_not_read_holds_nothing_up(shop: Shop) -> None:
    """Whoever watches a session over a bad line would slow it down, or its recording."""
    with shop.session() as (websocket, recording_id), follow_and_get_stuck(shop, recording_id):
        for _ in range(8):
            websocket.send(append_frame())
            hear(websocket, "response.output.delta")
        websocket.send(close_frame())
        hear(websocket, "session.closed")
        ended = wait_for_end(shop, recording_id)
    assert ended["state"] == "finished"
    assert ended["units"] >= 4


def test_places_are_few_and_come_back(shop: Shop) -> None:
    """One client could have every thread follow its session; or, having left, follow none again."""
    with shop.session() as (_, recording_id), ExitStack() as stuck:
        path = f"/api/recordings/{recording_id}/live"
        for _ in range(TAILS_PER_KEY_MAX):
            stuck.enter_context(follow_and_get_stuck(shop, recording_id))
        refused = shop.ask(path, "anna")
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert shop.ask("/api/recordings/killed/live", "root").status == 200
        stuck.close()
        for _ in range(500):  # That they have left is seen a moment later.
            if shop.ask("/api/recordings/killed/live", "anna").status == 200:
                break
            time.sleep(0.02)
        else:
            raise AssertionError("the places do not come back")


# -- what else is done with them ------------------------------------------------------------------


def test_only_an_operator_removes(shop: Shop) -> None:
    """A key that leaked could take away what was recorded of it."""
    path = write_log(shop.folder, "spare")
    url = "/api/recordings/spare"
    assert shop.ask(url, "bert", "DELETE").status == 404
    assert shop.ask(url, "anna", "DELETE").status == 403
    assert path.exists()
    assert shop.ask(url, "root", "DELETE").status == 204
    assert not path.exists()
    assert shop.ask(url).status == 404
    assert "spare" not in shop.ids()


def test_a_page_of_a_recording_runs_no_script_but_its_own(shop: Shop) -> None:
    """What a log makes of its page could use the server as whoever looks at it."""
    answer = shop.ask(f"{ONE}/view", "bert")
    policy = answer.headers["content-security-policy"]
    assert (answer.status, answer.body[:15].lower()) == (200, b"<!doctype html>")
    for rule in ("default-src 'none'", "connect-src 'self'", "trusted-types 'none'"):
        assert f"{rule};" in f"{policy};"
    assert "require-trusted-types-for 'script'" in policy
    assert policy.count("'sha256-") == 2  # its script and its style
    assert "unsafe" not in policy
    diff = shop.ask(f"{ONE}/view?diff=of-bert", "bert").headers["content-security-policy"]
    assert "sandbox allow-scripts allow-downloads" in diff  # it asks for nothing
    assert "connect-src" not in diff


def test_a_page_leads_to_the_sessions_around_it(shop: Shop) -> None:
    """One would go back to the list for each, or be led to what another key's session is."""
    views = [f"/api/recordings/{name}/view" for name in shop.ids() if name != "junk"]
    for newer, older in pairwise(views):
        for page, to, expected in ((newer, "previous", older), (older, "next", newer)):
            answer = shop.ask(f"{page}?to={to}")
            assert (answer.status, answer.headers["location"]) == (303, expected)
    assert shop.ask(f"{views[0]}?to=next").status == 404
    assert shop.ask(f"{ONE}/view?to=previous", "bert").status == 404
    assert shop.ask(f"{ONE}/view?to=sideways", "bert").status == 400
    talk = shop.ask(f"{SESSION}/view?to=talk&unit=3", "bert")
    assert (talk.status, talk.headers["location"]) == (303, "/console#talk/of-bert/3")
    assert shop.ask(f"{SESSION}/view?to=talk").headers["location"] == "/console#talk/of-bert"


def test_a_page_shows_where_another_session_differs(shop: Shop) -> None:
    """What another key's session holds could be learnt from the differences to one's own."""
    answer = shop.ask(f"{ONE}/view?diff=of-anna")
    assert answer.status == 200
    assert b'"compared":{"name":"of-anna"' in answer.body
    assert shop.ask(f"{ONE}/view?diff=of-anna", "bert").status == 404
    assert shop.ask(f"{ONE}/view?diff=junk").status == 422


def test_a_digest_has_words_and_measures(shop: Shop) -> None:
    """A list would show when sessions were, and not what they were about."""
    log = shop.folder / "spoken.session.zst"
    shutil.copy(FOLDER / "v1-realtime-chat.session.zst", log)
    index, there = shop.folder / INDEX_NAME, "/api/recordings/spoken/digest"
    while "spoken" not in shop.ids():
        time.sleep(0.05)
    answer = shop.ask(there)
    assert b"what is it?" in index.read_bytes()  # it is kept
    again = shop.ask(there)
    assert (again.body, again.headers["content-type"]) == (answer.body, "application/json")
    assert again.headers["etag"] == answer.headers["etag"]
    assert shop.ask("/api/recordings/spoken", method="DELETE").status == 204
    assert b"what is it?" not in index.read_bytes()
    assert shop.ask(there).status == 404
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    texts = [(it["voice"], it["text"]) for it in answer.said["said"]]
    assert texts[0] == ("user", "hello")
    assert texts[1][1].startswith("turn 0: hello")
    assert ("user", "what is it?") in texts
    assert "chat_response_delay" in answer.said["measures"]
    assert [it["at_ms"] for it in answer.said["said"]] == sorted(
        it["at_ms"] for it in answer.said["said"]
    )


def test_a_redacted_copy_is_that_of_the_command(shop: Shop, tmp_path: Path) -> None:
    """Somebody would be shown what was to be taken out, or the recording itself would lose it."""
    log = Store(shop.folder).path("talked")
    shutil.copy(FOLDER / f"v1-realtime-audio{SUFFIX}", log)
    before, there = log.read_bytes(), "/api/recordings/talked/redacted"
    copy = tmp_path / "copy.session.zst"
    for query, options in (("", ()), ("?kinds=audio,text", ("--kind", "audio", "--kind", "text"))):
        CliRunner().invoke(
            main, ["recordings", "redact", str(log), "--output", str(copy), *options]
        )
        answer = shop.ask(there + query)
        assert (answer.status, answer.body) == (200, copy.read_bytes())
        assert "talked.redacted.session.zst" in answer.headers["content-disposition"]
        copy.unlink()
    page = shop.ask(f"{there}?as=page")
    assert (page.status, b'"redacted":[{' in page.body) == (200, True)
    assert b"be brief" not in page.body
    assert b"be brief" in shop.ask("/api/recordings/talked/view").body
    assert log.read_bytes() == before
    log.write_bytes(before[: len(before) // 3] + b"\0" * 64 + before[len(before) // 3 + 64 :])
    assert "damaged at byte" in shop.ask(there).said["message"]
    for query in ("kinds=x", "kinds=", "as=x", "as=page&as=log"):
        assert shop.ask(f"{there}?{query}").status == 400
    log.unlink()
    for key, status in (("anna", 404), ("", 401), ("bert", 422)):  # that of bert does not replay
        assert shop.ask(f"{ONE}/redacted", key).status == status
    with shop.session() as (_, name):
        assert shop.ask(f"/api/recordings/{name}/redacted").status == 409


def test_a_server_that_records_nothing_has_no_recordings() -> None:
    """A server that was told to record nothing would show what is in some folder."""
    assert Recordings(None).routes() == []


# -- what is kept ---------------------------------------------------------------------------------


def count_logs(folder: Path) -> int:
    return len(Store(folder).logs())


@pytest.mark.parametrize(("flags", "logs"), [((), 2), (("--record-refused",), 3)])
def test_a_refused_session_leaves_nothing_unless_asked_to(
    tmp_path: Path, flags: tuple[str, ...], logs: int
) -> None:
    """Whoever knocks at a full server would fill its disk; or who asks for these would see none."""
    options = ("--record", str(tmp_path), "--slots", "1", "--queue-max", "0", *flags)
    with live_server(*options) as server:
        chat = f"{server.url}?mode=chat"
        audio = f"{server.url}?mode=audio"
        with connect(audio, compression=None) as first, connect(chat, compression=None) as asks:
            hear(first, "session.queue_done")
            with connect(audio, compression=None) as second:
                hear(second, "error")
            hear(asks, "session.queue_done")
            asks.send('{"type": "session.init", "payload": {}}')
            hear(asks, "session.created")
            asks.send(QUESTION)
            hear(asks, "error")  # it is refused too, but something was said before
        assert server.stop() == 0
    assert count_logs(tmp_path) == logs
