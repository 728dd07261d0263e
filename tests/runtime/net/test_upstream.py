"""A request to another server, over real sockets, on asyncio and on trio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from runtime.net import upstream
from runtime.net.upstream import Address, UpstreamError, UpstreamRequest, ask

pytestmark = pytest.mark.anyio

GET = UpstreamRequest(
    method="GET",
    target="/a%20b?c=d",
    headers=(("host", "public.example"), ("connection", "keep-alive"), ("x-own", "1")),
)
SWITCH = UpstreamRequest(
    method="GET",
    target="/v1/realtime?resume=x",
    headers=(("host", "a"), ("upgrade", "websocket"), ("sec-websocket-key", "k")),
    is_websocket=True,
)


@asynccontextmanager
async def answering(*pieces: bytes, heard: list[bytes] | None = None) -> AsyncIterator[Address]:
    """A server that reads a head, says `pieces`, and leaves."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")

    async def serve(stream: SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                with suppress(anyio.EndOfStream):
                    head += await stream.receive()
                    continue
                return
            if heard is not None:
                heard.append(head)
            for piece in pieces:
                await stream.send(piece)
                await anyio.lowlevel.checkpoint()

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield Address(host="127.0.0.1", port=listener.extra(SocketAttribute.local_port))
        tasks.cancel_scope.cancel()


async def test_a_request_goes_as_the_client_wrote_it() -> None:
    """A relayed request asked for something else, or kept the client's connection headers."""
    heard = list[bytes]()
    async with answering(b"HTTP/1.1 204 No Content\r\n\r\n", heard=heard) as address:
        answer = await ask(address, GET, (("antiphon-relayed", "1"),))
        await answer.aclose()
    lines = heard[0].lower().split(b"\r\n")
    assert lines[0] == b"get /a%20b?c=d http/1.1"
    assert b"host: public.example" in lines
    assert b"x-own: 1" in lines
    assert b"antiphon-relayed: 1" in lines
    assert [line for line in lines if line.startswith(b"connection")] == [b"connection: close"]


async def test_an_answer_comes_whole() -> None:
    """A client of a relayed request got other bytes than the owner sent."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: x\r\n\r\n"
    async with answering(b"HTTP/1.1 103 Early\r\n\r\n" + head, b"3\r\nabc\r\n", b"0\r\n\r\n") as it:
        answer = await ask(it, GET)
        assert (answer.status, answer.headers) == (200, (("etag", "x"),))
        assert b"".join([piece async for piece in answer.body()]) == b"abc"
        await answer.aclose()


async def test_bytes_after_a_handshake_are_the_websockets() -> None:
    """The first frame of the owner, sent with its handshake, was lost."""
    said = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    heard = list[bytes]()
    async with answering(said + b"\x81\x02hi", heard=heard) as address:
        answer = await ask(address, SWITCH)
        assert answer.status == 101
        assert answer.switched() == said
        assert await answer.stream.read(99) == b"\x81\x02hi"
        await answer.aclose()
    assert b"connection: upgrade" in heard[0].lower()


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000]
)
async def test_a_server_that_speaks_no_http_has_no_answer(said: bytes) -> None:
    """A gateway failed instead of taking the other one for away."""
    async with answering(said) as address:
        with pytest.raises(UpstreamError):
            await ask(address, GET)


async def test_a_body_that_breaks_off_is_no_whole_one() -> None:
    """Half a recording was taken for a whole one."""
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc") as address:
        answer = await ask(address, GET)
        with pytest.raises(UpstreamError):
            _ = [piece async for piece in answer.body()]
        await answer.aclose()


async def test_a_server_that_is_not_there_has_no_answer() -> None:
    """A gateway failed where the other one was restarted."""
    async with answering() as address:
        pass
    with pytest.raises(UpstreamError, match="does not answer"):
        await ask(address, GET)


async def test_a_server_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that hangs held the clients of all others."""
    monkeypatch.setattr(upstream, "ANSWER_WAIT_S", 0.05)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener:
        port = listener.extra(SocketAttribute.local_port)
        with pytest.raises(UpstreamError, match="does not answer"):
            await ask(Address(host="127.0.0.1", port=port), GET)


async def test_a_header_that_cannot_be_sent_is_refused() -> None:
    """A client's odd header broke the gateway's task."""
    odd = UpstreamRequest(method="GET", target="/", headers=(("host", "a"), ("x", "a\nb")))
    async with answering() as address:
        with pytest.raises(UpstreamError, match="cannot be relayed"):
            await ask(address, odd)
