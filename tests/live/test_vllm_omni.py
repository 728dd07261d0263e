"""A client of vLLM-Omni's duplex protocol, written from its page, at a real server."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from recorder.read.reader import LogReader, read
from recorder.storage.store import Store
from replay.rerun.logic import replay
from tests.live.servers import LiveServer, live_server

RATE_HZ: Final = 16_000
WAIT_S: Final = 60.0
ADDRESS: Final = "/v1/realtime?duplex=1&autostart=0"
PIECE: Final = base64.b64encode(
    (np.sin(np.arange(RATE_HZ // 2) / 8) * 9000).astype("<i2").tobytes()
).decode()
"""Half a second."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server that records, whose model plays a script."""
    folder = tmp_path_factory.mktemp("recordings")
    with live_server("--record", str(folder)) as live:
        yield live, folder


@pytest.fixture(scope="module")
def unrecorded() -> Iterator[LiveServer]:
    """A server that does not record."""
    with live_server("--no-record") as live:
        yield live


class Client:
    """A connection; `seq` is the last event that arrived."""

    def __init__(self, socket: ClientConnection, seq: int = 0) -> None:
        self.socket, self.seq = socket, seq
        self.heard: list[dict[str, Any]] = []

    async def say(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self, kind: str) -> dict[str, Any]:
        """Wait for an event; numbers go up by one."""
        async with asyncio.timeout(WAIT_S):
            while True:
                event = json.loads(await self.socket.recv())
                number = event.get("server_event_seq")
                if number is not None:
                    assert number == self.seq + 1
                    self.seq = number
                self.heard.append(event)
                if event["type"] == kind:
                    return event

    async def begin(self, **settings: Any) -> dict[str, Any]:
        """Set a session up; returns `session.created`."""
        await self.say("session.update", session=settings)
        created = await self.hear("session.created")
        await self.hear("session.updated")
        return created

    async def sound(self, seconds: int) -> None:
        """Send sound."""
        for _ in range(2 * seconds):
            await self.say("input_audio_buffer.append", audio=PIECE, format="pcm16")


def address(server: LiveServer, path: str = ADDRESS) -> str:
    """Where a client connects."""
    return f"ws://{urlsplit(server.url).netloc}{path}"


def replays(folder: Path) -> bool:
    """Whether all recordings replay."""
    found = []
    for info in Store(folder).logs():
        with LogReader(info.path) as log:
            found.append(replay(log).identical)
    return all(found)


def test_a_conversation_with_a_lost_connection(recorded: tuple[LiveServer, Path]) -> None:
    """A client is told something twice or never, or may not come back."""
    server, folder = recorded

    async def talk() -> None:
        async with connect(address(server)) as socket:
            client = Client(socket)
            created = await client.begin(model="scripted")
            assert created["session"]["capabilities"]["supports_session_resume"]
            await client.sound(2)
            await client.hear("response.listen")
            socket.transport.abort()
        resume = {
            "session_id": created["session"]["id"],
            "resume_token": created["resume_token"],
            "last_received_server_event_seq": client.seq,
        }
        async with connect(address(server)) as socket:
            again = Client(socket, client.seq)
            await again.say("session.resume", **resume)
            back = await again.hear("session.resumed")
            assert (back["attachment_generation"], back["session_id"]) == (2, resume["session_id"])
            assert back["resume_token"] not in ("", created["resume_token"])
            await again.sound(6)
            await again.say("input_audio_buffer.commit")
            done = await again.hear("response.done")
            assert done["response"]["status"] == "completed"
            await again.say("playback.ack", played_ms=500, response_id=done["response_id"])
            event = (await again.hear("playback.acknowledged"))["event"]
            assert event["playback"]["played_ms"] == 500
            assert event["item_id"] == done["response"]["output"][0]["id"]
            await again.say("session.close")
            assert (await again.hear("session.closed"))["reason"] == "client_close"
            assert not [it for it in client.heard + again.heard if it["type"] == "error"]
        async with connect(address(server)) as socket:  # a session that is over, and an old token
            late = Client(socket)
            await late.say("session.resume", **resume)
            assert (await late.hear("error"))["error"]["code"] == "session_resume_expired"
            with pytest.raises(ConnectionClosed):
                await socket.recv()

    asyncio.run(talk())
    assert replays(folder)
    (log,) = Store(folder).logs()
    frames = [str(record.fields.get("frame")) for record in read(log.path)]
    assert any('"resume_token":"$token"' in frame for frame in frames)


def test_a_client_that_takes_its_session_over(recorded: tuple[LiveServer, Path]) -> None:
    """Two connections share a session, or the new one is taken for a wrong one."""
    server, _ = recorded

    async def talk() -> None:
        async with connect(address(server)) as first, connect(address(server)) as second:
            old, new = Client(first), Client(second)
            created = await old.begin()
            token = created["resume_token"]
            name = created["session"]["id"]
            await new.say("session.resume", session_id=name, resume_token=token)
            new.seq = 2  # what comes before the token is of no use without it: it is not sent again
            await new.hear("session.resumed")
            await old.hear("session.replaced")
            new.seq = 1
            await new.hear("session.updated")
            await new.say("session.heartbeat")
            await new.hear("session.heartbeat_ack")
            await new.say("session.close")
            await new.hear("session.closed")

    asyncio.run(talk())


@pytest.mark.parametrize("fields", [{}, {"session_id": "duplex-x", "resume_token": "x"}])
def test_a_session_that_is_not_there(unrecorded: LiveServer, fields: dict[str, str]) -> None:
    """A client that comes back in vain waits for ever."""

    async def talk() -> None:
        async with connect(address(unrecorded)) as socket:
            client = Client(socket)
            await client.say("session.resume", **fields)
            assert (await client.hear("error"))["error"]["code"] == "session_resume_expired"

    asyncio.run(talk())


def test_a_session_without_a_recording_has_no_token(unrecorded: LiveServer) -> None:
    """A client is promised that it may come back, and may not."""

    async def talk() -> None:
        path = "/v1/duplex?model=scripted&mode=audio"
        async with connect(address(unrecorded, path)) as socket:
            client = Client(socket)
            created = await client.hear("session.created")
            assert "resume_token" not in created
            assert not created["session"]["capabilities"]["supports_session_resume"]
            await client.say("close")
            await client.hear("session.closed")

    asyncio.run(talk())
