"""One port for WebSockets and HTTP: what clients, and what is no client at all, get from it."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import attrs
import pytest
import trio
import trio_websocket
from starlette.applications import Starlette
from trio.testing import MockClock, wait_all_tasks_blocked
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_sync

from runtime.http import error_body, make_app
from runtime.listener import Address, WebSocketRequest, bind, serve
from runtime.settings import Settings
from runtime.transport.counters import Counters
from runtime.transport.keeper import LOOK_S
from runtime.transport.limits import Limits
from runtime.transport.tls import Certificate
from runtime.websocket import WebSocketClosed

pytestmark = pytest.mark.anyio

SETTLE_S = 0.01
"""For the kernel's loopback, which is not part of trio's idea of everybody waiting."""
TEST_S = 200.0
"""A test that hangs fails; no test takes a second, but some push the clock by a hundred."""


@pytest.fixture
def clock() -> MockClock:
    """Real time that the test may push forward."""
    return MockClock(rate=1.0)


@pytest.fixture
def anyio_backend(clock: MockClock) -> object:
    return "trio", {"clock": clock}


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> object:
    """Whatever a peer does, the server's log shows no error, unless a test takes it out."""
    yield
    assert [it for it in caplog.records if it.levelno >= logging.WARNING] == []


async def echo(request: WebSocketRequest) -> None:
    """Play a server with one mode."""
    if request.path != "/v1/realtime":
        await request.reject(404, error_body("not_found", "no such path"))
    elif request.query.get("mode", ("audio",)) != ("audio",):
        await request.reject(400, error_body("invalid_mode", "no such mode", allowed=["audio"]))
    else:
        websocket = await request.accept()
        while True:
            await websocket.send(str(await websocket.receive()))


def limits(**changes: float) -> Limits:
    """Make limits as an operator gets them, with a few of the test's own."""
    return attrs.evolve(Limits.of(Settings()), **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(
    on_websocket: Callable[[WebSocketRequest], Awaitable[None]] = echo,
    app: Starlette | None = None,
    *,
    allowed: Limits | None = None,
    certificate: Certificate | None = None,
    counters: Counters | None = None,
) -> AsyncIterator[Address]:
    """Serve a test on a port of its own, and stop at the end."""
    app = app or make_app(lambda: "ready")
    listeners = await bind("127.0.0.1", 0)
    start = partial(
        serve,
        listeners,
        on_websocket=on_websocket,
        app=app,
        limits=allowed,
        certificate=certificate,
        counters=counters,
    )
    with trio.fail_after(TEST_S):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(start)
            yield address
            nursery.cancel_scope.cancel()


async def pass_time(clock: MockClock, seconds: float) -> None:
    """Let time pass as the keeper sees it: a look that comes late would judge nobody."""
    for _ in range(round(seconds / LOOK_S) + 1):
        await wait_all_tasks_blocked(SETTLE_S / 10)
        clock.jump(LOOK_S)
    await wait_all_tasks_blocked(SETTLE_S)


async def tcp(address: Address) -> trio.SocketStream:
    return await trio.open_tcp_stream(address.host, address.port)


async def read_to_end(stream: trio.SocketStream) -> bytes:
    """Read until the server closes; a reset is an end as well."""
    data = b""
    with suppress(trio.BrokenResourceError):
        while more := await stream.receive_some(65536):
            data += more
    return data


async def exchange(address: Address, data: bytes) -> bytes:
    """Send bytes on a new connection and read all that comes back until the server closes."""
    async with await tcp(address) as stream:
        await stream.send_all(data)
        return await read_to_end(stream)


def request_head(target: str = "/health", **headers: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", "Host: x"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


TEXT, CONTINUATION, CLOSE, PING, PONG = 0x1, 0x0, 0x8, 0x9, 0xA
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class RawClient:
    """A client that says whatever the test wants, byte by byte."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()

    async def send(self, opcode: int, payload: bytes = b"", *, fin: bool = True) -> None:
        await self.stream.send_all(raw_frame(opcode, payload, fin=fin))

    async def read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await self.stream.receive_some(65536)
            if not data:
                raise EOFError
            self._buffer += data
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def read_some(self, size: int) -> bytes:
        if self._buffer:
            return await self.read(len(self._buffer))
        return bytes(await self.stream.receive_some(size))

    async def frame_head(self) -> tuple[int, int]:
        first, size = await self.read(2)
        if size == 126:
            (size,) = struct.unpack("!H", await self.read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self.read(8))
        return first & 0x0F, size

    async def frame(self) -> tuple[int, bytes]:
        opcode, size = await self.frame_head()
        return opcode, await self.read(size)


def raw_frame(
    opcode: int, payload: bytes, *, fin: bool = True, key: bytes = b"\x01\x02\x03\x04"
) -> bytes:
    """Write a client's frame."""
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", (fin << 7) | opcode, 0x80 | size)
    elif size < 65536:
        head = struct.pack("!BBH", (fin << 7) | opcode, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", (fin << 7) | opcode, 0x80 | 127, size)
    return head + key + plain_mask(key, payload)


def plain_mask(key: bytes, data: bytes) -> bytes:
    """The definition of RFC 6455, 5.3, word by word."""
    return bytes(byte ^ key[i % 4] for i, byte in enumerate(data))


@asynccontextmanager
async def raw_client(address: Address, early: bytes = b"") -> AsyncIterator[RawClient]:
    """Connect and shake hands by hand; `early` is sent along with the request."""
    stream = await trio.open_tcp_stream(address.host, address.port)
    async with stream:
        await stream.send_all(request_head("/v1/realtime", **UPGRADE) + early)
        raw = RawClient(stream)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += await raw.read(1)
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer
        assert b"permessage-deflate" not in answer.lower()
        yield raw


def reset_when_closed(stream: trio.SocketStream) -> None:
    """Let a stream's close be a crash rather than a farewell."""
    linger = struct.pack("ii", 1, 0)
    stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger)


def body_of(answer: bytes) -> dict[str, object]:
    """Parse the JSON body of the one response in `answer`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert f"content-length: {len(body)}".encode() in head.lower()
    parsed = json.loads(body)
    assert isinstance(parsed, dict)
    return parsed


async def still_serves(address: Address) -> None:
    answer = await exchange(address, request_head(Connection="close"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert body_of(answer) == {"status": "alive"}


# -- both on one port ---------------------------------------------------------------------------


async def test_http_is_answered_beside_open_websockets() -> None:
    """A health check would fail exactly when the server has work to do."""
    async with serving() as address:
        url = f"ws://{address.host}:{address.port}/v1/realtime?mode=audio"
        async with AsyncExitStack() as stack:
            open_ = [
                await stack.enter_async_context(trio_websocket.open_websocket_url(url))
                for _ in range(5)
            ]
            for i, connection in enumerate(open_):
                await still_serves(address)
                await connection.send_message(f"{i}")
                assert await connection.get_message() == f"{i}"


async def test_a_request_carries_path_query_headers_and_subprotocols() -> None:
    """Sessions would be opened in the wrong mode, or keys not be found."""
    seen: list[WebSocketRequest] = []

    async def look(request: WebSocketRequest) -> None:
        seen.append(request)
        await request.accept(subprotocol="antiphon")

    async with serving(look) as address:
        answer = await exchange(
            address,
            request_head(
                "/ws/duplex/a%20b?mode=audio&x=1&mode=video&empty=",
                **UPGRADE,
                Sec_WebSocket_Protocol="antiphon, antiphon.key.k",
                Authorization="Bearer t",
            )
            + b"\x88\x80\x00\x00\x00\x00",
        )
    assert b"Sec-WebSocket-Protocol: antiphon\r\n" in answer
    (request,) = seen
    assert request.path == "/ws/duplex/a b"
    assert request.query == {"mode": ("audio", "video"), "x": ("1",), "empty": ("",)}
    assert dict(request.headers)["authorization"] == "Bearer t"
    assert request.subprotocols == ("antiphon", "antiphon.key.k")
    assert request.peer.host == "127.0.0.1"


async def test_a_rejected_handshake_shows_its_json_to_the_client() -> None:
    """A client author with a wrong mode would only see `connection failed`."""

    def connect(path: str) -> InvalidStatus:
        with pytest.raises(InvalidStatus) as rejected:
            connect_sync(f"ws://{address.host}:{address.port}{path}", proxy=None)
        return rejected.value

    async with serving() as address:
        mode = await trio.to_thread.run_sync(connect, "/v1/realtime?mode=smell")
        path = await trio.to_thread.run_sync(connect, "/nowhere")
    assert mode.response.status_code == 400
    assert json.loads(mode.response.body or b"")["allowed"] == ["audio"]
    assert path.response.status_code == 404


async def test_port_0_is_told_and_every_address_bound() -> None:
    """Tests and supervisors could not find a server on a port of the kernel's choice."""
    async with serving() as address:
        assert address.port > 0
        await still_serves(address)


# -- handshakes that are none ---------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "data", [b"", b"GET /v1", request_head("/v1/realtime", **UPGRADE), request_head()]
)
async def test_peers_that_leave_in_any_phase_leave_nothing_behind(data: bytes, reset: bool) -> None:
    """Each client that is cut off would leave a task, a socket and in the end no server."""
    open_before = len(os.listdir("/proc/self/fd"))
    async with serving() as address:
        for _ in range(3):
            stream = await tcp(address)
            await stream.send_all(data)
            await wait_all_tasks_blocked(SETTLE_S)
            if reset:
                reset_when_closed(stream)
            await stream.aclose()
            await wait_all_tasks_blocked(SETTLE_S)
        assert len(os.listdir("/proc/self/fd")) == open_before + 1
        await still_serves(address)


async def test_a_peer_that_left_before_it_was_accepted_is_told_at_once() -> None:
    """A session, and a place in the queue, would be given to nobody."""
    gone, told = trio.Event(), trio.Event()

    async def accept_late(request: WebSocketRequest) -> None:
        await gone.wait()
        with pytest.raises(WebSocketClosed):
            await request.accept()
        told.set()

    async with serving(accept_late) as address:
        stream = await trio.open_tcp_stream(address.host, address.port)
        await stream.send_all(request_head("/v1/realtime", **UPGRADE))
        await wait_all_tasks_blocked(SETTLE_S)
        reset_when_closed(stream)
        await stream.aclose()
        await wait_all_tasks_blocked(SETTLE_S)
        gone.set()
        await told.wait()


async def test_cancelling_the_server_drops_open_websockets() -> None:
    """A stopped server would leave its clients talking to nobody."""
    async with serving() as address:
        stream = await trio.open_tcp_stream(address.host, address.port)
        await stream.send_all(request_head("/v1/realtime", **UPGRADE))
        assert (await stream.receive_some(4096)).startswith(b"HTTP/1.1 101")
        await wait_all_tasks_blocked(SETTLE_S)
    async with stream:
        with suppress(trio.BrokenResourceError):
            assert await stream.receive_some(4096) == b""


@pytest.mark.parametrize("attempt", range(8))
async def test_what_is_sent_along_with_the_handshake_is_kept(attempt: int) -> None:
    """The first message of an eager client would vanish, and its session time out."""
    early = raw_frame(TEXT, b"first") + raw_frame(TEXT, b"second")[: attempt + 1]
    async with serving() as address, raw_client(address, early) as raw:
        await raw.stream.send_all(raw_frame(TEXT, b"second")[attempt + 1 :])
        assert await raw.frame() == (TEXT, b"first")
        assert await raw.frame() == (TEXT, b"second")


# -- errors of our own ----------------------------------------------------------------------------


async def test_a_broken_handler_ends_only_its_own_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One bug in one session would end everybody's."""

    async def break_(request: WebSocketRequest) -> None:
        if request.path == "/after":
            await request.accept()
        if request.path != "/silent":
            raise ZeroDivisionError

    async with serving(break_) as address:
        upgrade = partial(request_head, **UPGRADE)
        for path in ("/before", "/silent"):
            assert (await exchange(address, upgrade(path))).startswith(b"HTTP/1.1 500 ")
        client_close = b"\x88\x80\x00\x00\x00\x00"
        async with await tcp(address) as stream:
            await stream.send_all(upgrade("/after"))
            answer = b""
            while b"\x03\xf3" not in answer:  # 1011
                answer += await stream.receive_some(4096)
            await stream.send_all(client_close)
            await read_to_end(stream)
        await still_serves(address)
    assert [it.name for it in caplog.records] == ["antiphon.listener"] * 2
    caplog.clear()
