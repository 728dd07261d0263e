"""What the tests of connections share: a clock that they push, a listener, and clients of bytes.

A module that imports `pushed_clock` and `on_pushed_clock` runs on real sockets and trio, with time
that passes by itself and can be pushed forward; with `nothing_is_logged` it fails for a warning.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import attrs
import pytest
import trio
from starlette.applications import Starlette
from trio.testing import MockClock, wait_all_tasks_blocked

from runtime.net.http import error_body, make_app
from runtime.net.limits import Counters
from runtime.net.link import CHECK_S
from runtime.net.listener import Address, WebSocketRequest, bind, serve
from runtime.net.tls import Certificate
from runtime.settings.settings import Settings

SETTLE_S = 0.01
"""For the kernel's loopback, which is not part of trio's idea of everybody waiting."""
TEST_S = 200.0
"""A test that hangs fails; no test takes a second, but some push the clock by a hundred."""


@pytest.fixture(name="clock")
def pushed_clock() -> MockClock:
    """Real time that the test may push forward."""
    return MockClock(rate=1.0)


@pytest.fixture(name="anyio_backend")
def on_pushed_clock(clock: MockClock) -> object:
    """Run a module's tests on trio, on that clock."""
    return "trio", {"clock": clock}


@pytest.fixture(autouse=True)
def nothing_is_logged(caplog: pytest.LogCaptureFixture) -> object:
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


def limits(**changes: float) -> Settings:
    """Make limits as an operator gets them, with a few of the test's own."""
    return attrs.evolve(Settings(), **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(
    on_websocket: Callable[[WebSocketRequest], Awaitable[None]] = echo,
    app: Starlette | None = None,
    *,
    allowed: Settings | None = None,
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
        settings=allowed,
        certificate=certificate,
        counters=counters,
    )
    with trio.fail_after(TEST_S):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(start)
            yield address
            nursery.cancel_scope.cancel()


async def pass_time(clock: MockClock, seconds: float) -> None:
    """Let time pass as the monitor sees it: a look that comes late would judge nobody."""
    for _ in range(round(seconds / CHECK_S) + 1):
        await wait_all_tasks_blocked(SETTLE_S / 10)
        clock.jump(CHECK_S)
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
async def raw_client(
    address: Address, early: bytes = b"", *, buffer_bytes: int = 0
) -> AsyncIterator[RawClient]:
    """Connect and shake hands by hand; `early` is sent along with the request.

    `buffer_bytes` of what comes are held by the kernel; 0: as many as it likes.
    """
    client = trio.socket.socket()
    if buffer_bytes:
        client.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, buffer_bytes)
    await client.connect((address.host, address.port))
    stream = trio.SocketStream(client)
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
