"""HTTP: the application called as ASGI, then on its port, and what the port says to no-requests."""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from typing import Any

import pytest
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from trio.testing import MockClock, wait_all_tasks_blocked

from runtime.net.http import BODY_WAIT_S, HEADERS_MAX, HTTP_IDLE_S, error_body, make_app
from runtime.settings.settings import HANDSHAKE_S, STALL_S
from tests.network.transport import (
    SETTLE_S,
    UPGRADE,
    body_of,
    exchange,
    on_pushed_clock,  # noqa: F401
    pass_time,
    pushed_clock,  # noqa: F401
    read_to_end,
    request_head,
    reset_when_closed,
    serving,
    still_serves,
    tcp,
)

BIG_BYTES = 30_000_000

pytestmark = pytest.mark.anyio


async def get(app: Starlette, path: str, method: str = "GET") -> tuple[int, dict[str, str], Any]:
    """Ask the application; its status, headers and parsed body."""
    sent: list[Any] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }
    with suppress(ZeroDivisionError):  # Starlette answers 500 and raises on, for the log.
        await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], headers, json.loads(body) if body else None


async def test_health_says_alive_whatever_the_state() -> None:
    """An orchestrator would kill a server that is only loading its model, again and again."""
    status, headers, body = await get(make_app(lambda: "loading"), "/health")
    assert (status, body) == (200, {"status": "alive"})
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize("speech", ["on", "off"])
async def test_health_says_whether_the_model_speaks(speech: str) -> None:
    """A server that has lost its vocoder would look well, and nobody would hear it."""
    app = make_app(lambda: "ready", speech=lambda: speech)
    assert (await get(app, "/health"))[2] == {"status": "alive", "speech": speech}


@pytest.mark.parametrize(
    ("state", "status"), [("ready", 200), ("loading", 503), ("full", 503), ("draining", 503)]
)
async def test_ready_says_what_the_server_is(state: str, status: int) -> None:
    """A load balancer would send clients to a server that cannot take them."""
    assert (await get(make_app(lambda: state), "/ready"))[::2] == (status, {"status": state})


async def test_ready_is_asked_anew_each_time() -> None:
    """A server that was loading once would never get a client."""
    states = iter(["loading", "ready"])
    app = make_app(lambda: next(states))
    assert [(await get(app, "/ready"))[0] for _ in range(2)] == [503, 200]


async def test_an_unknown_path_is_a_404_in_json() -> None:
    """A client author who mistypes a path would have to parse a page of text."""
    status, headers, body = await get(make_app(lambda: "ready"), "/v1/realtme")
    assert (status, body["error"]) == (404, "not_found")
    assert headers["content-type"] == "application/json"


async def test_a_wrong_method_is_told_the_right_ones() -> None:
    """A client author would not see that the path is right and the method is not."""
    status, headers, body = await get(make_app(lambda: "ready"), "/health", "POST")
    assert (status, body["error"]) == (405, "method_not_allowed")
    assert "GET" in headers["allow"]


async def test_a_plain_get_of_a_websocket_path_is_told_so() -> None:
    """A person who opens the URL in a browser would think that the server is not there."""
    status, headers, body = await get(make_app(lambda: "ready"), "/v1/realtime")
    assert (status, body["error"]) == (426, "websocket_required")
    assert headers["upgrade"] == "websocket"


async def test_a_broken_route_answers_without_internal_text() -> None:
    """A stranger would be shown the server's stack, and a client a body that is not JSON."""

    async def broken(_request: Request) -> Response:
        raise ZeroDivisionError("secret")

    app = make_app(lambda: "ready", [Route("/api/broken", broken)])
    status, _headers, body = await get(app, "/api/broken")
    assert (status, body["error"]) == (500, "internal_error")
    assert "secret" not in str(body)


def test_an_error_body_carries_what_a_program_needs() -> None:
    """A client of an unknown mode could not read which ones there are."""
    body = json.loads(error_body("invalid_mode", "no such mode", allowed=["audio", "video"]))
    assert body == {
        "error": "invalid_mode",
        "message": "no such mode",
        "allowed": ["audio", "video"],
    }


# -- on its port -------------------------------------------------------------------------------


async def hello(request: Request) -> Response:
    return PlainTextResponse(f"{request.method} {(await request.body()).decode()}")


async def big(_request: Request) -> Response:
    return Response(bytes(BIG_BYTES))


async def broken(_request: Request) -> Response:
    raise ZeroDivisionError


APP = make_app(
    lambda: "ready",
    [Route("/hello", hello, methods=["GET", "POST"]), Route("/big", big), Route("/broken", broken)],
)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), b"400"),
        (b"\x00" * 100, b"400"),
        (b"HELO example.com\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 30_000, b"431"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50), b"505"),
        (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", b"505"),
    ],
)
async def test_what_is_no_request_is_refused(data: bytes, status: bytes) -> None:
    """A browser that speaks TLS to the port, or a scanner, would disturb everybody's sessions."""
    async with serving(app=APP) as address:
        assert (await exchange(address, data)).startswith(b"HTTP/1.1 " + status + b" ")
        await still_serves(address)


async def test_a_slow_head_is_timed_out(clock: MockClock) -> None:
    """A handful of slow-loris clients would hold all the server's sockets."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        for byte in b"GET /health HT":
            await stream.send_all(bytes([byte]))
            await wait_all_tasks_blocked(0.001)
        clock.jump(HANDSHAKE_S)
        answer = await read_to_end(stream)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert body_of(answer)["error"] == "request_timeout"


async def test_a_silent_connection_is_closed_without_a_word(clock: MockClock) -> None:
    """A browser's spare connection would get a 408 as the answer to its next request."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await wait_all_tasks_blocked(SETTLE_S)
        clock.jump(HANDSHAKE_S)
        assert await read_to_end(stream) == b""


async def test_requests_may_be_pipelined_on_a_kept_connection() -> None:
    """A metrics scraper that keeps its connection would get every second answer wrong."""
    post = b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
    last = request_head("/nowhere", Connection="close")
    async with serving(app=APP) as address:
        answer = await exchange(address, request_head("/ready") + post + last)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert b'{"status":"ready"}' in answer
    assert b"POST body" in answer
    assert b"HTTP/1.1 404 " in answer
    assert b"hypercorn" not in answer


async def test_headers_are_counted_in_each_request_of_a_connection() -> None:
    """What a first request may not have, a second on the same connection would."""
    many = b"GET /ready HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * HEADERS_MAX + b"\r\n"
    async with serving(app=APP) as address:
        answer = await exchange(address, request_head("/ready") + many)
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert b"HTTP/1.1 431 " in answer


async def test_a_body_may_come_later_than_its_head() -> None:
    """An upload of a voice over a slow line would arrive empty."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(b"POST /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        await stream.send_all(b"Content-Length: 8\r\n\r\nlong")
        await wait_all_tasks_blocked(SETTLE_S)
        await stream.send_all(b"body")
        assert (await read_to_end(stream)).endswith(b"POST longbody")


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_body_that_never_comes_is_given_up(clock: MockClock, leaves: bool) -> None:
    """A client that trickles a body would hold a handler, and each lost upload fill the log."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nlo")
        await wait_all_tasks_blocked(SETTLE_S)
        if leaves:
            reset_when_closed(stream)
            await stream.aclose()
        else:
            clock.jump(BODY_WAIT_S - 1)
            await stream.send_all(b"n")
            await wait_all_tasks_blocked(SETTLE_S)
            clock.jump(1)
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 408 ")
        await still_serves(address)


async def test_half_closing_after_the_request_still_gets_the_answer() -> None:
    """`curl` through some proxies, and `nc -N`, would get an empty reply."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(request_head("/ready"))
        await stream.send_eof()
        assert (await read_to_end(stream)).endswith(b'{"status":"ready"}')


async def test_h2c_upgrades_are_answered_in_http_1() -> None:
    """Java's HTTP client, which always asks for HTTP/2, would get no health check."""
    h2c = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABk"}
    async with serving(app=APP) as address:
        first = request_head("/ready", **h2c)
        answer = await exchange(address, first + first + request_head(Connection="close"))
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert b" 101 " not in answer


@pytest.mark.parametrize(
    ("second", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (request_head("/v1/realtime", **UPGRADE), b"400"),
        (b"\x00\x01garbage\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 90_000, b"431"),
    ],
)
async def test_a_kept_connection_has_no_back_door(second: bytes, status: bytes) -> None:
    """HTTP/2 and unbounded WebSockets could be had through the second request."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(request_head("/ready"))
        await wait_all_tasks_blocked(SETTLE_S)
        first = await stream.receive_some(4096)
        assert first.endswith(b'{"status":"ready"}')
        await stream.send_all(second)
        assert (await read_to_end(stream)).startswith(b"HTTP/1.1 " + status + b" ")
        await still_serves(address)


async def test_an_idle_connection_is_closed(clock: MockClock) -> None:
    """Clients that keep connections and forget them would use them all up."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(request_head("/ready") + b"GET /slow-lo")
        await wait_all_tasks_blocked(SETTLE_S)
        clock.jump(HTTP_IDLE_S)
        assert (await read_to_end(stream)).count(b"HTTP/1.1") == 1


async def test_a_download_that_stands_still_is_dropped(clock: MockClock) -> None:
    """A client that stops reading a recording would hold it in memory for ever."""
    async with serving(app=APP) as address, await tcp(address) as stream:
        await stream.send_all(request_head("/big"))
        await wait_all_tasks_blocked(10 * SETTLE_S)
        await pass_time(clock, 2 * STALL_S)  # On a busy machine, loopback takes some more late.
        assert len(await read_to_end(stream)) < BIG_BYTES // 2


async def test_cancelling_drops_a_download_that_stands_still() -> None:
    """The server would not stop while one client holds a download open."""
    with trio.fail_after(20):
        async with serving(app=APP) as address:
            stream = await tcp(address)
            await stream.send_all(request_head("/big"))
            await wait_all_tasks_blocked(10 * SETTLE_S)
        await stream.aclose()


async def test_a_broken_route_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in one route would leave its caller without an answer, and us without a trace."""
    async with serving(app=APP) as address:
        answer = await exchange(address, request_head("/broken", Connection="close"))
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert body_of(answer)["error"] == "internal_error"
        await still_serves(address)
    assert [it.name for it in caplog.records] == ["antiphon.http"]
    caplog.clear()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_download_that_is_given_up_leaves_nothing_behind(reset: bool) -> None:
    """Each aborted download would keep its socket and its memory for a while."""
    open_before = len(os.listdir("/proc/self/fd"))
    async with serving(app=APP) as address:
        for _ in range(5):
            stream = await tcp(address)
            await stream.send_all(request_head("/big"))
            await wait_all_tasks_blocked(SETTLE_S)
            if reset:
                reset_when_closed(stream)
            await stream.aclose()
            await wait_all_tasks_blocked(SETTLE_S)
        assert len(os.listdir("/proc/self/fd")) == open_before + 1


# -- what is no request -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"Sec_WebSocket_Version": "8"}, 426),
        ({"Sec_WebSocket_Key": "short"}, 400),
        ({"Sec_WebSocket_Key": "%%%"}, 400),
        ({"Content_Length": "5"}, 400),
        ({"Transfer_Encoding": "chunked"}, 400),
    ],
)
async def test_a_wrong_handshake_is_told_what_is_wrong(change: dict[str, str], status: int) -> None:
    """An author of a WebSocket library would see a dropped connection and no reason."""
    async with serving() as address:
        answer = await exchange(address, request_head("/v1/realtime", **(UPGRADE | change)))
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert body_of(answer)["message"]
        assert (b"sec-websocket-version: 13" in answer.lower()) == (status == 426)
        await still_serves(address)


@pytest.mark.parametrize("target", ["*", "http://x/v1/realtime", "/?" + "a&" * 1 + "b=1&" * 40])
async def test_an_odd_target_is_a_400(target: str) -> None:
    """A target that no code expects would end in an error of the server."""
    async with serving() as address:
        answer = await exchange(address, request_head(target, **UPGRADE))
        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_an_odd_host_is_no_matter() -> None:
    """One header that the library cannot decode would take the server's task down."""
    async with serving() as address, await tcp(address) as stream:
        head = request_head("/v1/realtime", **UPGRADE).replace(b"Host: x", b"Host: \xff\xfe..a")
        await stream.send_all(head)
        assert (await stream.receive_some(4096)).startswith(b"HTTP/1.1 101 ")


async def test_bytes_made_by_chance_end_only_their_own_connection() -> None:
    """Some request that nobody thought of would take everybody's sessions down."""
    chance = random.Random(0)
    good = request_head("/v1/realtime", **UPGRADE) + request_head("/ready") + b"\x81\x85abcdHello"
    async with serving() as address:
        for _ in range(100):
            data = bytearray(good[chance.randrange(len(good)) // 2 :])
            for _ in range(chance.choice([0, 1, 5])):
                data[chance.randrange(len(data))] = chance.randrange(256)
            async with await tcp(address) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(data[: chance.randrange(len(data)) + 1])
                    await stream.send_eof()
                    await read_to_end(stream)
        await still_serves(address)


async def test_a_refusal_ends_in_peace() -> None:
    """On systems that drop what a reset overtakes, a client would not learn what was wrong."""
    async with serving() as address, await tcp(address) as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 200_000)
        answer = b""
        while more := await stream.receive_some(65536):
            answer += more
        assert body_of(answer)["error"] == "bad_request"
