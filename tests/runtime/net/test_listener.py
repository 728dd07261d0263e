"""One port for WebSockets and HTTP: what clients, and what is no client at all, get from it."""

from __future__ import annotations

import gc
import json
import os
from contextlib import AsyncExitStack, suppress
from functools import partial

import pytest
import trio
import trio_websocket
from trio.testing import wait_all_tasks_blocked
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_sync

from runtime.net.connection import WebSocketClosed
from runtime.net.listener import WebSocketRequest
from tests.network.transport import (
    SETTLE_S,
    TEXT,
    UPGRADE,
    exchange,
    nothing_is_logged,  # noqa: F401
    on_pushed_clock,  # noqa: F401
    pushed_clock,  # noqa: F401
    raw_client,
    raw_frame,
    read_to_end,
    request_head,
    reset_when_closed,
    serving,
    still_serves,
    tcp,
)

pytestmark = pytest.mark.anyio


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
    gc.collect()  # of other tests
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
