"""A session whose key was removed does not wait for its client."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import anyio
import pytest
from websockets.sync.client import connect

from runtime.access.keys import Key, change_key_file, hash_key
from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import init_frame, on_virtual_time, world

CLIENT_KEY = "antiphon_anna"
ADMIN_KEY = "antiphon_root"
WAIT_S = 20


@pytest.mark.parametrize("away_s", [1, 60])
def test_a_session_without_its_client_ends_with_its_key(tmp_path: Path, away_s: int) -> None:
    """A slot was kept for a client that could not come back."""

    async def body() -> None:
        keys = {""}
        async with world(record_to=tmp_path, has_key=keys.__contains__) as server:
            peer = await server.activate("audio", resumable=True)
            other = await server.activate("audio", resumable=True)
            peer.vanish()
            await anyio.sleep(away_s)
            keys.clear()
            server.server.end_revoked()
            await anyio.sleep(0.1)
            assert server.server.sessions == 1
            assert not other.is_over
            late = server.come_back(*peer.way_back)
            await late.over()
            assert late.closed is not None
            assert late.closed[0] == 1008

    on_virtual_time(body)


def test_a_session_whose_key_is_gone_ends_with_its_connection(tmp_path: Path) -> None:
    """A client whose key was removed before kept its slot when it left."""

    async def body() -> None:
        keys = {""}
        async with world(record_to=tmp_path, has_key=keys.__contains__) as server:
            peer = await server.activate("audio", resumable=True)
            keys.clear()
            server.server.end_revoked()
            await anyio.sleep(5)
            assert not peer.is_over
            peer.vanish()
            await anyio.sleep(0.1)
            assert server.server.sessions == 0

    on_virtual_time(body)


def wait_until_connections(server: LiveServer, wanted: list[str]) -> None:
    """Wait until the sessions of a server are connected in these ways."""
    host, port = server.address
    request = urllib.request.Request(f"http://{host}:{port}/api/sessions")
    request.add_header("Authorization", f"Bearer {ADMIN_KEY}")
    give_up = time.monotonic() + WAIT_S
    found = None
    while found != wanted:
        assert time.monotonic() < give_up, found
        time.sleep(0.1)  # the API has a rate limit
        with urllib.request.urlopen(request) as answer:
            found = [session["connection"] for session in json.load(answer)["sessions"]]


def test_a_key_is_removed_while_the_server_runs(tmp_path: Path) -> None:
    """The change of the file did not reach the sessions."""
    path = tmp_path / "keys.toml"
    root = Key(name="root", hash=hash_key(ADMIN_KEY), scope="admin")
    anna = Key(name="anna", hash=hash_key(CLIENT_KEY))
    change_key_file(path, lambda _: (root, anna), create=True)
    with live_server("--keys", str(path), "--record", str(tmp_path / "logs")) as server:
        headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
        with connect(f"{server.url}?mode=audio&resumable=1", additional_headers=headers) as socket:
            socket.recv()
            socket.recv()
            socket.send(init_frame())
            while json.loads(socket.recv())["type"] != "session.created":
                pass
            socket.close(1001)
        wait_until_connections(server, ["detached"])
        change_key_file(path, lambda _: (root,))
        wait_until_connections(server, [])
