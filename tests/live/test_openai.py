"""Clients of OpenAI's Realtime API at another address, or of its beta, at a real server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from runtime.serve.routing import SPOKEN
from tests.live.servers import LiveServer, live_server
from tests.protocol.test_openai import UPDATE
from tests.sessions.in_memory import init_frame

WAIT_S: Final = 60
KEY: Final = "sk-verysecretandneverlogged"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server with one slot that tells all that it may."""
    with live_server("--no-record", "--slots", "1", "--log-level", "debug") as live:
        yield live


def refused(server: LiveServer, path: str, **options: Any) -> tuple[int, Any]:
    """Be refused; the status and the body."""
    host, port = server.address
    with pytest.raises(InvalidStatus) as error:
        connect(f"ws://{host}:{port}{path}", **options)
    response = error.value.response
    return response.status_code, json.loads(response.body or b"{}")


def receive(socket: ClientConnection) -> Any:
    """Receive an event."""
    return json.loads(socket.recv(WAIT_S))


def ended(socket: ClientConnection) -> tuple[int, str]:
    """The code and the reason of the close that comes next."""
    with pytest.raises(ConnectionClosed) as caught:
        socket.recv(WAIT_S)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


def code_of(body: Any) -> str:
    """The code of an error, in the words of any dialect."""
    error = body["error"]
    return str(error["code"] if isinstance(error, dict) else body["code"])


def status_of(server: LiveServer) -> Any:
    """What `/status` says."""
    host, port = server.address
    request = urllib.request.Request(
        f"http://{host}:{port}/status", headers={"Accept": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.loads(answer.read())


HANDSHAKES: Final = [
    pytest.param(
        "/v1/realtime", {"additional_headers": {"OpenAI-Beta": "realtime=v1"}}, id="header"
    ),
    pytest.param(
        "/v1/realtime?mode=audio",
        {"additional_headers": {"OpenAI-Beta": "realtime=v1"}},
        id="header with a mode",
    ),
]


@pytest.mark.parametrize(("path", "options"), HANDSHAKES)
def test_a_handshake_is_refused_with_the_dialects(
    server: LiveServer, path: str, options: dict[str, Any]
) -> None:
    """A client waits for `session.created`, and its user for an answer."""
    status, body = refused(server, path, **options)
    assert (status, body["error"]) == (400, "dialect_not_served")
    assert [each["dialect"] for each in body["dialects"]] == list(SPOKEN)
    assert KEY not in json.dumps(body)


@pytest.mark.parametrize("mode", ["video", "audio", "chat", "transcription"])
def test_its_first_message_is_refused_and_the_slot_is_free(server: LiveServer, mode: str) -> None:
    """It holds the slot for half a minute, and its sound is read as something else."""
    with connect(f"{server.url}?mode={mode}") as socket:
        receive(socket)
        socket.send(UPDATE)
        error = receive(socket)
        assert code_of(error) == "invalid_event"
        assert "session.init" in json.dumps(error)
        assert ended(socket) == (1000, "invalid_event")
    with connect(f"{server.url}?mode=audio") as other:
        assert receive(other)["type"] == "session.queue_done"


@pytest.mark.parametrize("mode", ["video", "audio", "transcription"])
def test_it_does_not_wait_for_a_slot(server: LiveServer, mode: str) -> None:
    """It takes a place in the queue before clients that could use the slot."""
    with connect(f"{server.url}?mode=audio") as holder:
        assert receive(holder)["type"] == "session.queue_done"
        holder.send(init_frame())
        assert receive(holder)["type"] == "session.created"
        with connect(f"{server.url}?mode={mode}") as socket:
            socket.send(UPDATE)
            while (body := receive(socket))["type"] != "error":
                assert body["type"] in {"session.queued", "session.queue_update"}
            assert code_of(body) == "invalid_event"
            assert ended(socket) == (1000, "invalid_event")
        assert status_of(server)["queue_length"] == 0


def test_its_key_is_not_logged(server: LiveServer) -> None:
    """A reader of the server's log can spend the client's money."""
    offered = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{KEY}")]
    refused(server, "/nothing", subprotocols=offered)
    for query in ("", "?model=scripted"):
        with connect(f"{server.url}{query}", subprotocols=offered) as it:
            assert it.subprotocol == "realtime"
            assert receive(it)["type"] == "session.created"
    bearer = {"Authorization": f"Bearer {KEY}", "OpenAI-Beta": "realtime=v1"}
    refused(server, "/v1/realtime?model=m", additional_headers=bearer)
    assert KEY not in server.errors.read_text()
