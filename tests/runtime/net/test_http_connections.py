"""Requests on one connection: bodies, streams, clients that leave, and what follows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from trio.testing import MockClock, wait_all_tasks_blocked

from runtime.net import http
from runtime.net.http import BODY_WAIT_S, make_app
from runtime.net.link import CARRIED_BYTES
from tests.network.transport import (
    SETTLE_S,
    body_of,
    exchange,
    on_pushed_clock,  # noqa: F401
    pushed_clock,  # noqa: F401
    read_to_end,
    request_head,
    reset_when_closed,
    serving,
    still_serves,
    tcp,
)

pytestmark = pytest.mark.anyio

LAST = request_head("/ready", Connection="close")
OK = b"HTTP/1.1 200 "


async def hello(request: Request) -> Response:
    return PlainTextResponse(f"{request.method} {(await request.body()).decode()}")


async def unread(_request: Request) -> Response:
    return PlainTextResponse("unread")


async def counted(_request: Request) -> Response:
    async def count() -> AsyncIterator[bytes]:
        for i in range(3):
            yield b"%d," % i

    return StreamingResponse(count())


APP = make_app(
    lambda: "ready",
    [
        Route("/hello", hello, methods=["GET", "POST"]),
        Route("/unread", unread, methods=["GET", "POST"]),
        Route("/counted", counted),
    ],
)


def post(target: str, body: bytes = b"", length: int | None = None, more: str = "") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\n{more}"
    return (
        f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body
    )


Answers = Callable[[Receive, Send], Awaitable[None]]


@asynccontextmanager
async def answering(answers: Answers) -> AsyncIterator[trio.SocketStream]:
    """A connection to a server whose application is the test's."""

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await answers(receive, send)

    async with serving(app=app) as address, await tcp(address) as stream:  # type: ignore[arg-type]
        yield stream


async def start(send: Send, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def write(send: Send, body: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


# -- bodies ------------------------------------------------------------------------------------


async def test_a_body_in_chunks_is_put_together() -> None:
    """A client that does not know the length of what it sends would be refused."""
    head = b"POST /hello HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(app=APP) as address:
        answer = await exchange(address, head + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n" + LAST)
    assert b"POST abc" in answer
    assert answer.count(OK) == 2


async def test_a_client_that_waits_is_told_to_continue_when_the_body_is_read() -> None:
    """`curl` would wait a second before each upload."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(post("/hello", length=4, more="Expect: 100-continue\r\n"))
        assert await stream.receive_some(4096) == b"HTTP/1.1 100 \r\n\r\n"
        await stream.send_all(b"body" + LAST)
        answer = await read_to_end(stream)
    assert b"POST body" in answer
    assert answer.count(OK) == 2


async def test_a_client_that_waits_sends_nothing_that_is_not_read() -> None:
    """An upload that is refused would be sent whole, or be taken for the next request."""
    async with serving(app=APP) as address:
        head = post("/unread", length=4, more="Expect: 100-continue\r\n")
        answer = await exchange(address, head)
    assert answer.startswith(OK)
    assert b"connection: close" in answer.lower()
    assert b" 100 " not in answer


@pytest.mark.parametrize(
    "body",
    [
        b"POST /hello HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
        post("/hello", b"ab", length=3),
    ],
)
async def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    """Half an upload would be taken for a whole one."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(body)
        await stream.send_eof()
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert body_of(answer)["error"] == "bad_request"
        await still_serves(address)


async def test_a_request_of_two_lengths_is_refused() -> None:
    """A proxy sees another end of it, and a client's request in another's body."""
    head = post("/hello", b"0\r\n\r\n", more="Transfer-Encoding: chunked\r\n")
    async with serving(app=APP) as address:
        answer = await exchange(address, request_head("/ready") + head)
    assert answer.count(OK) == 1
    assert b"HTTP/1.1 400 " in answer


async def test_a_body_waits_in_the_network_until_it_is_asked_for() -> None:
    """An upload that is not wanted yet would fill the server's memory."""
    asked, got = trio.Event(), list[Message]()

    async def read_late(receive: Receive, send: Send) -> None:
        await asked.wait()
        while not got or got[-1]["more_body"]:
            got.append(await receive())
        await start(send)
        await write(send, b"")

    size = 30_000_000
    async with answering(read_late) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, post("/", bytes(size), more="Connection: close\r\n"))
        await wait_all_tasks_blocked(SETTLE_S)
        assert nursery.child_tasks, "the kernel took it all"
        asked.set()
        assert (await read_to_end(stream)).startswith(OK)
    assert sum(len(it["body"]) for it in got) == size
    assert max(len(it["body"]) for it in got) <= CARRIED_BYTES


async def test_a_short_body_that_is_not_read_does_not_end_the_connection() -> None:
    """Each request that is refused would cost a new connection, with TLS."""
    async with serving(app=APP) as address:
        answer = await exchange(address, post("/unread", b"x" * 1000) + LAST)
    assert answer.count(OK) == 2


async def test_a_long_body_that_is_not_read_leaves_the_answer_whole() -> None:
    """The reset for unread bytes would overtake the refusal, and the client would not see why."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, post("/unread", bytes(3_000_000)) + LAST)
            answer = await read_to_end(stream)
        assert answer.count(OK) == 1
        assert answer.endswith(b"unread")
        await still_serves(address)


async def test_the_time_for_a_body_ends_with_it(clock: MockClock) -> None:
    """A handler that works for a minute would be told that its client has left."""
    is_whole, left = trio.Event(), list[bool]()

    async def wait_long(receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        is_whole.set()
        with trio.move_on_after(2 * BODY_WAIT_S) as scope:
            await receive()
        left.append(not scope.cancelled_caught)
        await start(send)
        await write(send, b"")

    async with answering(wait_long) as stream:
        await stream.send_all(post("/", b"body", more="Connection: close\r\n"))
        await is_whole.wait()
        clock.jump(3 * BODY_WAIT_S)
        assert (await read_to_end(stream)).startswith(OK)
    assert left == [False]


# -- answers -----------------------------------------------------------------------------------


async def test_an_answer_to_head_has_no_body_and_the_next_one_follows() -> None:
    """The body would be read as the answer to the next request."""
    head = b"HEAD /hello HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(app=APP) as address:
        answer = await exchange(address, head + LAST)
    first, second = answer.split(b"\r\n\r\n", 1)
    assert b"content-length: 5" in first.lower()
    assert second.startswith(OK)


async def test_a_stream_is_chunked_and_the_next_request_follows() -> None:
    """Each recording that is streamed would cost its client the connection."""
    async with serving(app=APP) as address:
        answer = await exchange(address, request_head("/counted") + LAST)
    assert b"transfer-encoding: chunked" in answer.lower()
    assert b"2\r\n0,\r\n2\r\n1,\r\n2\r\n2,\r\n0\r\n\r\n" in answer
    assert answer.count(OK) == 2


async def test_a_stream_to_http_1_0_ends_with_the_connection() -> None:
    """An old proxy would read the sizes of chunks as a part of the recording."""
    async with serving(app=APP) as address:
        answer = await exchange(address, b"GET /counted HTTP/1.0\r\nHost: x\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n0,1,2,")


async def test_the_head_of_a_stream_is_sent_before_its_first_piece() -> None:
    """A page that follows a session would not know that it is connected."""
    goes_on = trio.Event()

    async def speak_late(_receive: Receive, send: Send) -> None:
        await start(send)
        await goes_on.wait()
        await write(send, b"late")

    async with answering(speak_late) as stream:
        await stream.send_all(LAST)
        assert (await stream.receive_some(4096)).startswith(OK)
        goes_on.set()
        assert b"late" in await read_to_end(stream)


async def test_a_request_without_an_answer_gets_one() -> None:
    """A route that forgets to answer would leave its client waiting."""

    async def forget(_receive: Receive, _send: Send) -> None:
        return

    async with answering(forget) as stream:
        await stream.send_all(request_head("/"))
        answer = await read_to_end(stream)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert body_of(answer)["error"] == "internal_error"


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half a recording would look like all of it."""

    async def fail(_receive: Receive, send: Send) -> None:
        await start(send)
        await write(send, b"half", more=True)
        raise ZeroDivisionError

    async with answering(fail) as stream:
        await stream.send_all(request_head("/") * 2)
        answer = await read_to_end(stream)
    assert answer.endswith(b"4\r\nhalf\r\n")
    assert [it.name for it in caplog.records] == ["antiphon.http"]
    caplog.clear()


# -- clients that leave ------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("is_writing", [False, True])
async def test_an_application_learns_that_its_client_has_left(
    reset: bool, is_writing: bool
) -> None:
    """Whatever is made for a client would be made to its end after it has gone."""
    learned = trio.Event()

    async def stream_on(receive: Receive, send: Send) -> None:
        async def go_on() -> None:
            while True:
                await write(send, bytes(100_000), more=True)

        async with trio.open_nursery() as nursery:
            await start(send)
            if is_writing:
                nursery.start_soon(go_on)
            while (await receive())["type"] != "http.disconnect":
                pass
            learned.set()
            nursery.cancel_scope.cancel()

    async with answering(stream_on) as stream:
        await stream.send_all(request_head("/"))
        assert (await stream.receive_some(4096)).startswith(OK)
        if reset:
            reset_when_closed(stream)
        await stream.aclose()
        with trio.fail_after(30):
            await learned.wait()


async def test_a_request_that_follows_a_stream_waits_for_its_end() -> None:
    """A pipelined request would be lost, or be taken for a client that leaves."""
    goes_on, got = trio.Event(), list[str]()

    async def stream_on(receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while True:
                got.append((await receive())["type"])

        async with trio.open_nursery() as nursery:
            await start(send)
            nursery.start_soon(listen)
            await goes_on.wait()
            nursery.cancel_scope.cancel()
        await write(send, b"end")

    async with answering(stream_on) as stream:
        await stream.send_all(request_head("/") + LAST)
        await wait_all_tasks_blocked(SETTLE_S)
        goes_on.set()
        assert (await read_to_end(stream)).count(OK) == 2
    assert got == ["http.request"] * 2


async def test_a_disconnect_follows_the_end_of_the_answer() -> None:
    """A task that waits for the client's leaving would hold up the next request."""
    got = list[str]()

    async def listen_after(receive: Receive, send: Send) -> None:
        await start(send)
        await write(send, b"")
        got.append((await receive())["type"])

    async with answering(listen_after) as stream:
        await stream.send_all(request_head("/") + LAST)
        assert (await read_to_end(stream)).count(OK) == 2
    assert got == ["http.disconnect"] * 2


# -- connections -------------------------------------------------------------------------------


async def test_a_connection_ends_after_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load balancer that keeps its connections would send all requests to the oldest server."""
    monkeypatch.setattr(http, "REQUESTS_MAX", 3)
    async with serving(app=APP) as address:
        answer = await exchange(address, request_head("/ready") * 5)
    assert answer.count(OK) == 3
    assert answer.lower().count(b"connection: close") == 1


async def test_an_application_gets_the_request_as_it_came() -> None:
    """A route would see another path than the client's, or trust an address that is none."""
    scopes = list[Scope]()

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await start(send)
        await write(send, b"")

    served: ASGIApp = app
    async with serving(app=served) as address, await tcp(address) as stream:  # type: ignore[arg-type]
        ours = stream.socket.getsockname()
        await stream.send_all(request_head("/a%20b/c?d=%20", Connection="close", X_Own="1"))
        assert (await read_to_end(stream)).startswith(OK)
        (scope,) = scopes
        assert (scope["client"], scope["server"]) == (ours, (address.host, address.port))
    assert (scope["path"], scope["raw_path"]) == ("/a b/c", b"/a%20b/c")
    assert scope["query_string"] == b"d=%20"
    assert (scope["method"], scope["scheme"], scope["http_version"]) == ("GET", "http", "1.1")
    assert (b"x-own", b"1") in scope["headers"]
