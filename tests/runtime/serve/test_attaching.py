"""Clients that attach to a session of `live`: who may, what they get, and when they are dropped."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import attrs
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from protocol.values.records import session_id_of
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.serve.gateway import ATTACHED_MAX, ATTACHED_PER_KEY_MAX
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import WAIT_S, request
from tests.runtime.api.test_sideband import TYPES

KEYS: Final = {name: f"antiphon_{name}" for name in ("anna", "bert", "carl", "dora", "root")}
SLOTS: Final = 4
SECOND: Final = base64.b64encode(bytes(48_000)).decode()
SOUND: Final = json.dumps({"type": "session.input_audio.append", "audio": SECOND})
CLOSE: Final = '{"type": "session.close"}'
PIECE_S: Final = 10
STUCK_S: Final = 60
"""Seconds of sound: far more than the buffers of both ends hold."""


@attrs.frozen
class Shop:
    """A server with keys."""

    server: LiveServer

    def connect(self, path: str, key: str = "anna", **options: Any) -> ClientConnection:
        """Open a WebSocket."""
        host, port = self.server.address
        headers = {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
        url = f"ws://{host}:{port}/v1/{path}"
        return connect(url, additional_headers=headers, compression=None, **options)

    def attach(self, name: str, key: str = "anna", **options: Any) -> ClientConnection:
        """Attach to a session."""
        return self.connect(f"live/sessions/{name}/attach", key, **options)

    def may_attach(self, name: str, key: str = "anna") -> bool:
        """Whether a client is attached; it leaves at once."""
        try:
            with self.attach(name, key):
                return True
        except InvalidStatus:
            return False

    def status_of(self, name: str, key: str = "anna") -> tuple[int, Any]:
        """The answer to a client that may not attach."""
        with pytest.raises(InvalidStatus) as refused, self.attach(name, key):
            pass
        return refused.value.response.status_code, json.loads(refused.value.response.body)

    def running(self, key: str, dialect: str) -> Any:
        """The one session of a key that is not over; others may be ending."""
        told = request(self.server.address, "/api/sessions", key=KEYS[key], headers={}).said
        sessions = [it for it in told["sessions"] if it["state"] != "CLOSED"]
        (found,) = (it for it in sessions if it["dialect"] == dialect)
        return found

    @contextmanager
    def session(self, key: str = "anna", **more: Any) -> Iterator[tuple[ClientConnection, str]]:
        """Have a session that has begun; with its id."""
        with self.connect("live/sessions", key) as it:
            it.send(json.dumps({"type": "session.start", "session": {"model": "scripted", **more}}))
            yield it, until(it, "session.started")["session"]["id"]


def until(websocket: ClientConnection, kind: str) -> Any:
    """Wait for an event of a type."""
    while (event := json.loads(websocket.recv(timeout=WAIT_S)))["type"] != kind:
        pass
    return event


def rest(websocket: ClientConnection) -> tuple[list[Any], int]:
    """All events to the end, each of the API's types, and the code of the close."""
    events = []
    try:
        while True:
            event = TYPES.validate_json(websocket.recv(timeout=WAIT_S), strict=True)
            assert not event.model_extra
            events.append(event)
    except ConnectionClosed as closed:
        return events, closed.rcvd.code if closed.rcvd else 1006


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Serve with keys, and drop early who reads nothing."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = tuple(
        Key(name=name, hash=hash_key(key), scope="admin" if name == "root" else "use")
        for name, key in KEYS.items()
    )
    change_key_file(path, lambda _: keys, create=True)
    folder = tmp_path_factory.mktemp("recordings")
    options = (
        "--keys",
        str(path),
        "--record",
        str(folder),
        "--slots",
        str(SLOTS),
        "--stall-s",
        "2",
    )
    with live_server(*options) as server:
        yield Shop(server)
        assert "Traceback" not in server.errors.read_text()


def test_it_hears_both_voices_until_the_session_ends(shop: Shop) -> None:
    """An operator could not listen to a session, or would hear something else than its client."""
    with shop.session() as (session, name), shop.attach(name) as attached:
        heard = []
        for _ in range(6):
            session.send(SOUND)
            heard.append(until(session, "session.output_audio.delta")["delta"])
        session.send(CLOSE)
        closed = until(session, "session.closed")
        events, code = rest(attached)
    assert code == 1000
    assert [it.type for it in (events[0], events[-1])] == ["session.started", "session.closed"]
    assert events[-1].to_dict() == closed
    sounds = [it for it in events if it.type == "session.output_audio.delta"]
    assert [it.delta for it in sounds] == heard
    assert [it.start_ms for it in sounds] == [1000 * second for second in range(6)]
    asked = [it.audio for it in events if it.type == "session.input_audio.append"]
    assert asked == [SECOND] * 6


def test_one_that_comes_later_hears_what_follows(shop: Shop) -> None:
    """It would be sent all that is past, or the wrong times."""
    with shop.session() as (session, name):
        for _ in range(3):
            session.send(SOUND)
            until(session, "session.output_audio.delta")
        recordings = request(
            shop.server.address, f"/api/sessions/{name}", key=KEYS["anna"], headers={}
        ).said
        time.sleep(1.6)  # All records are in the log within a second and a half.
        with shop.attach(recordings["recording_id"], "root") as attached:
            assert until(attached, "session.started")["session"]["id"] == name
            session.send(SOUND)
            until(session, "session.output_audio.delta")
            assert until(attached, "session.output_audio.delta")["start_ms"] == 3000
            session.send(CLOSE)
            assert rest(attached)[1] == 1000


def test_a_session_that_lost_its_client_ends_it(shop: Shop) -> None:
    """An attached client would wait for a session that is over."""
    with shop.session() as (session, name), shop.attach(name) as attached:
        session.send(SOUND)
        until(session, "session.output_audio.delta")
        session.close()
        events, code = rest(attached)
    assert code == 1000
    assert (events[-1].type, events[-1].reason) == ("session.closed", "connection_lost")


def test_it_can_change_nothing(shop: Shop) -> None:
    """Who listens to a session could end it, or speak for its client."""
    with shop.session() as (session, name), shop.attach(name, "root") as attached:
        for kind in ("session.close", "session.update", "session.input_audio.mute"):
            attached.send(json.dumps({"type": kind, "event_id": kind}))
            error = until(attached, "error")["error"]
            assert (error["code"], error["client_event_id"]) == ("unsupported", kind)
        attached.send("no json")
        assert rest(attached)[1] == 1003
        session.send(SOUND)
        until(session, "session.output_audio.delta")


def test_only_its_own_key_and_an_operator_may(shop: Shop) -> None:
    """A client that guesses an id could hear another, or find out that there is one."""
    with shop.session("bert") as (_, name):
        unknown = shop.status_of("sess_000000000000")
        assert (unknown[0], unknown[1]["error"]) == (404, "not_found")
        assert shop.status_of(name) == unknown
        assert shop.status_of(name, "")[0] == 401
        for key in ("bert", "root"):
            assert shop.may_attach(name, key)
        assert shop.status_of(f"{name}/x")[0] == 404
        assert shop.status_of("..%2f..")[0] == 404
    assert shop.status_of("", "root")[0] == 404


def test_only_a_session_of_live_that_is_recorded_has_it(shop: Shop) -> None:
    """A client would hear what was to be kept nowhere, or events that it does not know."""
    unknown = shop.status_of("sess_000000000000")
    with shop.session(store=False) as (_, name):
        assert shop.status_of(name) == unknown
    with shop.connect("realtime?mode=audio") as other:
        until(other, "session.queue_done")
        name = shop.running("anna", "opening")["recording_id"]
        assert shop.status_of(name) == shop.status_of(session_id_of(name)) == unknown


def test_a_server_that_records_nothing_has_none() -> None:
    """A client would attach to a session whose log is never written."""
    with live_server("--no-record") as server:
        shop = Shop(server)
        with shop.connect("live/sessions", "") as session:
            session.send('{"type": "session.start", "session": {"model": "scripted"}}')
            name = until(session, "session.started")["session"]["id"]
            assert shop.status_of(name, "")[0] == 404


def test_a_server_that_ends_tells_its_attached_clients() -> None:
    """A client would take the end of a session for a network that failed."""
    with live_server("--drain-s", "0") as server:
        shop = Shop(server)
        with shop.connect("live/sessions", "") as session:
            session.send('{"type": "session.start", "session": {"model": "scripted"}}')
            name = until(session, "session.started")["session"]["id"]
            with shop.attach(name, "") as attached:
                assert server.stop() == 0
                events, code = rest(attached)
    assert (events[-1].type, events[-1].reason, code) == ("session.closed", "connection_lost", 1000)


def test_one_that_comes_early_hears_the_queue_and_the_beginning(shop: Shop) -> None:
    """An operator could not see that a client waits for its slot, or would never hear it begin."""
    with ExitStack() as full:
        for _ in range(SLOTS):
            full.enter_context(shop.session("dora"))
        with shop.connect("live/sessions", "carl") as waiting:
            until(waiting, "info")
            name = shop.running("carl", "live")["session_id"]
            with shop.attach(name, "carl") as attached:
                full.close()
                until(waiting, "info")
                waiting.send('{"type": "session.start", "session": {"model": "scripted"}}')
                until(waiting, "session.started")
                waiting.send(CLOSE)
                events, code = rest(attached)
    kinds = [it.type for it in events]
    assert (kinds[-2:], code) == (["session.started", "session.closed"], 1000)
    assert events[-3].code == "slot_assigned"


def test_places_are_few_and_come_back(shop: Shop) -> None:
    """One client could take them all, or many every thread."""
    with shop.session() as (_, name), ExitStack() as attached:
        for number in range(ATTACHED_PER_KEY_MAX):
            attached.enter_context(shop.attach(name))
            assert number < ATTACHED_MAX
        status, body = shop.status_of(name)
        assert (status, body["error"]) == (503, "service_unavailable")
        assert shop.may_attach(name, "root")
        attached.close()
        for _ in range(500):  # That they have left is seen a moment later.
            if shop.may_attach(name):
                break
            time.sleep(0.02)
        else:
            raise AssertionError("the places do not come back")


def test_one_that_reads_nothing_is_dropped_and_holds_nothing_up(shop: Shop) -> None:
    """A slow reader would slow the session down, or take memory for as long as it likes."""

    def websockets() -> int:
        told = request(shop.server.address, "/status", key=KEYS["root"], headers={}).said
        return int(told["listener"]["websockets"])

    piece = base64.b64encode(bytes(48_000 * PIECE_S)).decode()
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.connect(shop.server.address)
    with shop.session() as (session, name), shop.attach(name, sock=narrow, max_queue=1) as stuck:
        before = websockets()
        for _ in range(0, STUCK_S, PIECE_S):
            session.send(json.dumps({"type": "session.input_audio.append", "audio": piece}))
            for _ in range(PIECE_S):
                until(session, "session.output_audio.delta")
        end_s = time.monotonic() + WAIT_S
        while websockets() == before:
            assert time.monotonic() < end_s, "it is not dropped"
            time.sleep(0.1)
        session.send(CLOSE)
        assert until(session, "session.closed")["usage"]["seconds"] == STUCK_S
        assert rest(stuck)[1] == 1006
