"""The client's WebSocket over real sockets, on both event loops, against peers that misbehave."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import anyio
import pytest
from websockets.sync.server import ServerConnection

from protocol.values.errors import LocalProtocolError
from runtime.client.errors import (
    AddressError,
    CannotConnectError,
    HandshakeRejectedError,
    SessionClosedError,
)
from runtime.client.websocket import PIECE_BYTES, open_socket
from tests.network.peers import WAIT_S, peer, raw_peer, reset

pytestmark = pytest.mark.anyio

LIMIT = 8 * 1024 * 1024


def echo(websocket: ServerConnection) -> None:
    """Send back whatever comes."""
    for message in websocket:
        websocket.send(message)


@pytest.mark.parametrize("size", [0, 1, 125, 65_536, PIECE_BYTES, PIECE_BYTES + 1, LIMIT])
async def test_messages_of_any_size_pass(size: int) -> None:
    """A long recording or a short word would arrive cut, or not at all."""
    message = "x" * (size - 2) + "é" if size > 2 else "x" * size
    with peer(echo) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            await websocket.send(message)
            assert await websocket.receive() == message
            assert websocket.closed is None


async def test_a_message_in_pieces_is_joined() -> None:
    """A server that streams its message would be heard in fragments."""
    with peer(lambda websocket: websocket.send(["one ", "two ", "three"])) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            assert await websocket.receive() == "one two three"


async def test_pings_are_answered_while_nobody_receives() -> None:
    """A server that pings would drop a client that is busy with what it heard."""
    answered = threading.Event()

    def ping(websocket: ServerConnection) -> None:
        if websocket.ping().wait(WAIT_S):
            answered.set()

    with peer(ping) as url:
        async with open_socket(url, frame_bytes_max=LIMIT):
            assert await anyio.to_thread.run_sync(answered.wait, WAIT_S)


async def test_what_came_before_the_close_is_heard() -> None:
    """The last words of a session would be lost when its end comes with them."""

    def say_and_leave(websocket: ServerConnection) -> None:
        websocket.send("one")
        websocket.send("two")
        websocket.close(1012, "restarting")

    with peer(say_and_leave) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            assert [await websocket.receive(), await websocket.receive()] == ["one", "two"]
            with pytest.raises(SessionClosedError, match="code 1012, restarting"):
                await websocket.receive()
            with pytest.raises(SessionClosedError, match="code 1012, restarting"):
                await websocket.send("hello?")
            assert websocket.closed == (1012, "restarting")


async def test_a_message_above_the_limit_is_not_taken() -> None:
    """A broken server could fill a client's memory."""
    told: list[int | None] = []

    def say_too_much(websocket: ServerConnection) -> None:
        websocket.send("x" * (LIMIT + 1))
        websocket.close()
        told.append(websocket.close_code)

    with peer(say_too_much) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            with pytest.raises(SessionClosedError) as closed:
                await websocket.receive()
    assert closed.value.code == 1009
    assert told == [1009]


async def test_a_message_above_the_limit_is_not_sent() -> None:
    """A caller would lose the session for it, and learn so from a close code."""
    with peer(echo) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            with pytest.raises(LocalProtocolError, match=f"{LIMIT + 1} bytes, at most {LIMIT}"):
                await websocket.send("x" * (LIMIT + 1))
            await websocket.send("still here")
            assert await websocket.receive() == "still here"


async def test_text_that_is_no_text_is_handed_on_as_bytes() -> None:
    """A reader task would die of it, and the client wait for ever."""
    with raw_peer(lambda tcp: tcp.sendall(b"\x81\x02\xff\xfe")) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            assert await websocket.receive() == b"\xff\xfe"


@pytest.mark.parametrize("answer", [reset, lambda tcp: tcp.sendall(b"\x81\x7dhalf a message")])
async def test_a_lost_connection_is_told(answer) -> None:  # type: ignore[no-untyped-def]
    """A crashed server would be waited for, or be taken for one that has finished."""
    with raw_peer(answer) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            with pytest.raises(SessionClosedError, match="connection lost") as closed:
                await websocket.receive()
            assert closed.value.code == 1006


async def test_bytes_that_are_no_frame_end_it() -> None:
    """A peer that speaks something else after the handshake would be listened to."""
    with raw_peer(lambda tcp: tcp.sendall(b"\xff\xff\xff\xff")) as url:
        async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
            with pytest.raises(SessionClosedError) as closed:
                await websocket.receive()
            assert closed.value.code == 1002


async def test_a_peer_that_never_says_goodbye_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program would hang on its way out."""
    monkeypatch.setattr("runtime.client.websocket.CLOSE_WAIT_S", 0.05)
    left = threading.Event()
    with raw_peer(lambda tcp: left.wait(WAIT_S)) as url:
        async with open_socket(url, frame_bytes_max=LIMIT):
            pass
        left.set()


async def test_a_send_that_is_cancelled_drops_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a message would be followed by another, and the server take both for garbage."""
    monkeypatch.setattr("runtime.client.websocket.CLOSE_WAIT_S", 0.05)
    left = threading.Event()

    def read_nothing(tcp: socket.socket) -> None:
        left.wait(WAIT_S)

    with raw_peer(read_nothing) as url:
        async with open_socket(url, frame_bytes_max=64 * LIMIT) as websocket:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(websocket.send, "x" * 64 * LIMIT)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
            with pytest.raises(SessionClosedError, match="lost"):
                await websocket.send("more")
            left.set()


async def test_leaving_says_goodbye() -> None:
    """Each end of a program would look like a lost connection in the server's log."""
    told: list[int | None] = []

    def wait(websocket: ServerConnection) -> None:
        with pytest.raises(Exception, match="1000"):
            websocket.recv(WAIT_S)
        told.append(websocket.close_code)

    with peer(wait) as url:
        async with open_socket(url, frame_bytes_max=LIMIT):
            pass
    assert told == [1000]


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    """Callers would have to unpack exception groups to catch their own errors."""
    with peer(echo) as url, pytest.raises(KeyError, match="mine"):
        async with open_socket(url, frame_bytes_max=LIMIT):
            raise KeyError("mine")


async def test_a_block_that_is_cancelled_is_left() -> None:
    """A deadline around a session would not end it."""
    with peer(echo) as url:
        with anyio.move_on_after(0) as scope:
            async with open_socket(url, frame_bytes_max=LIMIT) as websocket:
                scope.deadline = -1
                await websocket.receive()
        assert scope.cancelled_caught


# -- opening ------------------------------------------------------------------------------------


async def test_what_answers_without_http() -> None:
    """A port of another service would be waited for, or be a traceback."""
    with raw_peer(lambda tcp: tcp.sendall(b"SSH-2.0-x\r\n\r\n"), opens=False) as url:
        with pytest.raises(CannotConnectError, match="does not speak WebSocket") as cannot:
            async with open_socket(url, frame_bytes_max=LIMIT):
                pass
        assert not cannot.value.may_pass


async def test_http_without_websockets() -> None:
    """A web server's page would be taken for a WebSocket."""
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    rejected = pytest.raises(HandshakeRejectedError, match=r"hello \(HTTP 200\)")
    with raw_peer(lambda tcp: (tcp.recv(4096), tcp.send(page)), opens=False) as url, rejected:
        async with open_socket(url, frame_bytes_max=LIMIT):
            pass


async def test_a_peer_that_leaves_at_once() -> None:
    """A server that is being stopped would be a traceback, and not be tried again."""
    with raw_peer(lambda tcp: tcp.recv(4096), opens=False) as url:
        with pytest.raises(CannotConnectError) as cannot:
            async with open_socket(url, frame_bytes_max=LIMIT):
                pass
        assert cannot.value.may_pass


async def test_a_silent_port_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that swallows everything would hang the client."""
    monkeypatch.setattr("runtime.client.websocket.CONNECT_WAIT_S", 0.05)
    left = threading.Event()
    with raw_peer(lambda tcp: left.wait(WAIT_S), opens=False) as url:
        with pytest.raises(CannotConnectError, match="no WebSocket within"):
            async with open_socket(url, frame_bytes_max=LIMIT):
                pass
        left.set()


@pytest.mark.parametrize("url", ["ws://user@h", "ws://h/a#b", "http://h", "ws://"])
async def test_no_address(url: str) -> None:
    """A typing error would be a traceback of a library."""
    with pytest.raises(AddressError):
        async with open_socket(url, frame_bytes_max=LIMIT):
            pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1, with its key in the same file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = path.with_suffix(".key")
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(path)], check=True, capture_output=True
    )
    path.write_text(path.read_text() + key.read_text())
    return path


async def test_tls(certificate: Path) -> None:
    """Nobody could talk to a server through a public network."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    message = "x" * LIMIT
    with peer(echo, serving) as url:
        secure = url.replace("ws:", "wss:")
        trusting = ssl.create_default_context(cafile=certificate)
        async with open_socket(secure, frame_bytes_max=LIMIT, tls=trusting) as websocket:
            await websocket.send(message)
            assert await websocket.receive() == message
        with pytest.raises(CannotConnectError, match=r"no TLS, .*self-signed") as cannot:
            async with open_socket(secure, frame_bytes_max=LIMIT):
                pass
        assert not cannot.value.may_pass
