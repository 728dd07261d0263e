"""Who tries to get into a session that is not his, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import append_frame, init_frame

NO_SESSION = "there is no such session, or this is not its token"
ASKED = {"type": "session.resume", "token": "x" * 43, "last_seq": -1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that records."""
    folder: Path = tmp_path_factory.mktemp("logs")
    with live_server("--record", str(folder), "--slots", "8") as made:
        yield made


def closed(socket: ClientConnection) -> tuple[int, str]:
    """How the server closed."""
    with suppress(ConnectionClosed):
        while True:
            socket.recv(timeout=20)
    assert socket.close_code is not None
    return socket.close_code, socket.close_reason or ""


def hear(socket: ClientConnection, kind: str) -> dict[str, Any]:
    """Wait for an event of a type."""
    while True:
        event: dict[str, Any] = json.loads(socket.recv(timeout=20))
        if kind in (event["type"], event.get("kind")):
            return event


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (json.dumps(ASKED), NO_SESSION),
        (append_frame(), "above 4096 bytes"),
        ("{", "JSON"),
        (b"\0", "binary"),
        ('{"type": "session.init"}', "session.resume"),
        (json.dumps({**ASKED, "token": 5}), "$.token"),
        (json.dumps({**ASKED, "token": "y" * 65}), "$.token"),
        (json.dumps({**ASKED, "last_seq": -2}), "$.last_seq"),
        (json.dumps({"type": "session.resume"}), "$.token"),
    ],
)
def test_what_is_no_right_to_come_back_is_refused(
    server: LiveServer, said: str | bytes, reason: str
) -> None:
    """A stranger got in, or was left waiting."""
    with connect(f"{server.url}?mode=audio&resume=20261123T000000-000000000000") as socket:
        socket.send(said)
        code, words = closed(socket)
    assert code == 1008
    assert reason in words


@pytest.mark.parametrize(
    "query", ["resumable=2", "resumable=", "resume=a&resume=b", "resume=" + "a" * 65]
)
def test_an_address_that_means_nothing_is_refused(server: LiveServer, query: str) -> None:
    """A mistake in the address led into another session than the client meant."""
    with pytest.raises(InvalidStatus) as refused, connect(f"{server.url}?mode=audio&{query}"):
        pass
    assert refused.value.response.status_code == 400


def test_wrong_tokens_harm_no_session(server: LiveServer) -> None:
    """Guesses slowed a conversation down, or ended it."""
    with connect(f"{server.url}?mode=audio&resumable=1") as talking:
        greeting = hear(talking, "session.resumable")
        hear(talking, "session.queue_done")
        talking.send(init_frame())
        hear(talking, "session.created")
        address = f"{server.url}?mode=audio&resume={greeting['recording_id']}"
        for _ in range(40):
            with connect(address) as thief:
                thief.send(json.dumps(ASKED))
                assert closed(thief) == (1008, NO_SESSION)
        talking.send(append_frame())
        assert hear(talking, "listen")["seq"] == 2
