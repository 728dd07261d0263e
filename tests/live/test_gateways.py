"""Two servers behind a balancer: clients reach what one of them has through the other one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anyio
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from recorder.read.reader import LogReader, read
from replay.rerun.logic import replay
from tests.live.servers import LiveServer, live_server
from tests.network.cutting import cutting
from tests.sessions.in_memory import init_frame
from tests.sessions.resumed import Told, converse, cuts_of, heard_and_said
from tests.soak.cuts import Gateways, gateways
from tests.soak.restarts import free_port

WAIT_S = 30
KINDS_SHOWN = ("realtime, audio", "duplex-v1", "legacy-duplex", "realtime, chat", "transcription")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    """Two gateways that know each other, and themselves: they have the same list."""
    with gateways(tmp_path_factory.mktemp("logs"), "--slots", "8") as made:
        yield made


def get(server: LiveServer, path: str, **headers: str) -> tuple[int, bytes]:
    """Ask over HTTP; status and body."""
    host, port = server.address
    try:
        with urlopen(
            Request(f"http://{host}:{port}{path}", headers=headers), timeout=WAIT_S
        ) as said:
            return said.status, said.read()
    except HTTPError as error:
        return error.code, error.read()


def hear(socket: ClientConnection, kind: str) -> dict[str, Any]:
    """Wait for an event of a type."""
    while True:
        event: dict[str, Any] = json.loads(socket.recv(timeout=WAIT_S))
        if event["type"] == kind:
            return event


@pytest.mark.parametrize("kind", KINDS_SHOWN)
def test_a_conversation_goes_on_through_any_gateway(house: Gateways, kind: str) -> None:
    """A client that came to the wrong gateway lost its session, a frame or a message."""
    rng, told = random.Random(kind), Told()
    addresses = [server.address for server in house.servers]
    with cutting(*addresses, cuts=cuts_of(kind, rng)) as cutter:
        anyio.run(converse, kind, f"ws://127.0.0.1:{cutter.port}", told, rng)
        assert cutter.connections > 1
    log = house.log_of(told.recording_id)
    heard, said = heard_and_said(log)
    assert told.heard == said
    assert told.sent == heard
    with LogReader(log) as reader:
        assert replay(reader).identical


def test_a_recording_is_found_from_any_gateway(house: Gateways) -> None:
    """A person who looks for a recording would have to know which server has it."""
    told = Told()
    host, port = house.servers[0].address
    anyio.run(converse, "legacy-chat", f"ws://{host}:{port}", told, random.Random(1))
    name = told.recording_id
    assert house.log_of(name).parent == house.folders[0]
    for path in ("", "/log", "/view"):
        asked = f"/api/recordings/{name}{path}"
        here, there = (get(server, asked) for server in house.servers)
        assert here[0] == 200
        assert here == there
    part = {"Range": "bytes=10-19"}
    here, there = (get(it, f"/api/recordings/{name}/log", **part) for it in house.servers)
    assert (here[0], len(here[1])) == (206, 10)
    assert here == there


def test_a_live_session_is_seen_and_marked_from_any_gateway(house: Gateways) -> None:
    """A session could be watched only at the server that has it."""
    with connect(f"{house.servers[0].url}?mode=audio&resumable=1") as socket:
        name = hear(socket, "session.resumable")["recording_id"]
        here, there = (get(server, f"/api/sessions/{name}") for server in house.servers)
        assert there[0] == 200
        assert json.loads(here[1])["session_id"] == json.loads(there[1])["session_id"]
        host, port = house.servers[1].address
        body = json.dumps({"text": "look here"}).encode()
        asked = Request(f"http://{host}:{port}/api/sessions/{name}/marks", data=body, method="POST")
        with urlopen(asked, timeout=WAIT_S) as said:
            assert said.status == 201
        hear(socket, "session.queue_done")
        socket.send(init_frame())
        hear(socket, "session.created")
    marks = [record.fields for record in read(house.log_of(name)) if record.kind == "mark"]
    assert [mark.get("text") for mark in marks] == ["look here"]


def test_a_session_of_live_is_attached_to_and_downloaded_from_any_gateway(house: Gateways) -> None:
    """A client would have to know which server has the session."""
    here, there = (f"{it.url.removesuffix('/realtime')}/live/sessions" for it in house.servers)
    with connect(f"{here}?resumable=1") as socket:
        socket.send('{"type": "session.start", "session": {"model": "scripted"}}')
        name = hear(socket, "session.started")["session"]["id"]
        with connect(f"{there}/{name}/attach") as attached:
            assert "seq" not in hear(attached, "session.started")
            socket.send('{"type": "session.close"}')
            assert "seq" in hear(socket, "session.closed")
            assert "seq" not in hear(attached, "session.closed")
    found = [get(it, f"/v1/live/sessions/{name}/content") for it in house.servers]
    assert (found[0][0], found[0][1][:4]) == (200, b"RIFF")
    assert found[0] == found[1]
    nowhere = f"{there}/sess_000000000000/attach"
    with pytest.raises(InvalidStatus) as refused, connect(nowhere):
        pass
    assert refused.value.response.status_code == 404


def test_what_no_gateway_has_is_said_to_be_nowhere(house: Gateways) -> None:
    """A wrong name was relayed in a circle, or left a client waiting."""
    name = "20261123T000000-000000000000"
    for server in house.servers:
        status, body = get(server, f"/api/recordings/{name}")
        assert (status, json.loads(body)["error"]) == (404, "not_found")
        with connect(f"{server.url}?mode=audio&resume={name}") as socket:
            socket.send('{"type": "session.resume", "token": "x", "last_seq": -1}')
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=WAIT_S)
            assert socket.close_code == 1008


def test_a_request_that_was_relayed_is_not_relayed_again(house: Gateways) -> None:
    """Two gateways would send a request to each other for ever."""
    told = Told()
    host, port = house.servers[0].address
    anyio.run(converse, "legacy-chat", f"ws://{host}:{port}", told, random.Random(2))
    relayed, other = {"Antiphon-Relayed": "1"}, house.servers[1]
    status, body = get(other, f"/api/recordings/{told.recording_id}", **relayed)
    assert (status, json.loads(body)["error"]) == (421, "not_here")
    address = f"{other.url}?mode=chat&resume={told.recording_id}"
    with pytest.raises(InvalidStatus) as refused, connect(address, additional_headers=relayed):
        pass
    assert refused.value.response.status_code == 421


def test_the_owner_judges_a_client_that_another_gateway_relayed(house: Gateways) -> None:
    """A stranger took a session over through the other gateway."""
    with connect(f"{house.servers[0].url}?mode=audio&resumable=1") as socket:
        greeting = hear(socket, "session.resumable")
        address = f"{house.servers[1].url}?mode=audio&resume={greeting['recording_id']}"
        with connect(address) as stranger:
            stranger.send('{"type": "session.resume", "token": "guessed", "last_seq": -1}')
            with pytest.raises(ConnectionClosed):
                stranger.recv(timeout=WAIT_S)
            assert stranger.close_code == 1008
        asked = {"type": "session.resume", "token": greeting["token"], "last_seq": -1}
        with connect(address) as owner:
            owner.send(json.dumps(asked))
            assert hear(owner, "session.resumable")["recording_id"] == greeting["recording_id"]
            hear(socket, "session.replaced")


def test_a_client_is_told_to_try_again_while_the_owner_is_away(tmp_path: Path) -> None:
    """A client gave up a session whose server was restarted, or its gateway forgot it."""
    ports = [free_port(), free_port()]
    flags = [
        (
            "--port",
            str(port),
            "--record",
            str(tmp_path / str(port)),
            "--resumable",
            "--drain-s",
            "0",
        )
        for port in ports
    ]
    to_first = ("--gateway", f"http://127.0.0.1:{ports[0]}")
    with live_server(*flags[1], *to_first) as other:
        with live_server(*flags[0]) as first, connect(f"{first.url}?mode=audio&resumable=1") as at:
            greeting = hear(at, "session.resumable")
            hear(at, "session.queue_done")
            at.send(init_frame())
            hear(at, "session.created")
            first.kill()
        name = greeting["recording_id"]
        address = f"{other.url}?mode=audio&resume={name}"
        with pytest.raises(InvalidStatus) as refused, connect(address):
            pass
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["Retry-After"] == "2"
        assert get(other, f"/api/recordings/{name}")[0] == 503
        with live_server(*flags[0]), connect(address) as back:
            asked = {"type": "session.resume", "token": greeting["token"], "last_seq": -1}
            back.send(json.dumps(asked))
            assert hear(back, "session.resumable")["next_seq"] == 0
            hear(back, "session.created")
        assert other.errors.read_text().count("a gateway is away") == 1
