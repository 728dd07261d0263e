"""Who is pinged, who is dropped and who is not: on real loopback sockets, with time pushed on."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial

import pytest
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from trio.testing import MockClock, wait_all_tasks_blocked

from runtime.net.connection import WebSocketClosed, WebSocketStalled
from runtime.net.http import make_app
from runtime.net.limits import BURST_S, LARGE_BYTES_MIN, LARGE_WAIT_S, Counters
from runtime.net.link import LATE_S, LEAVE_S, WatchedConnection
from runtime.net.listener import WebSocketRequest
from tests.network.transport import (
    CLOSE,
    PING,
    PONG,
    SETTLE_S,
    TEXT,
    UPGRADE,
    RawClient,
    limits,
    nothing_is_logged,  # noqa: F401
    on_pushed_clock,  # noqa: F401
    pass_time,
    pushed_clock,  # noqa: F401
    raw_client,
    raw_frame,
    request_head,
    serving,
    tcp,
)

pytestmark = pytest.mark.anyio

PING_S = 2.0
PONG_WAIT_S = 6.0
ALLOWED = limits(ping_s=PING_S, pong_wait_s=PONG_WAIT_S, stall_s=1000.0)
STALLS = limits(ping_s=0, stall_s=5.0)
"""Apart, for TCP may take 40 ms to acknowledge a ping, which is many seconds of pushed time."""


class Listens:
    """Plays a server that only listens."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.how: WebSocketClosed | None = None
        self.over = trio.Event()

    async def __call__(self, request: WebSocketRequest) -> None:
        websocket = await request.accept(frame_bytes_max=1 << 26)
        try:
            while True:
                self.heard.append(len(await websocket.receive() or ""))
        except WebSocketClosed as closed:
            self.how = closed
        finally:
            self.over.set()


class Sends(Listens):
    """Plays a server that sends one large frame."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    async def __call__(self, request: WebSocketRequest) -> None:
        websocket = await request.accept()
        try:
            await websocket.send("x" * self._size)
            await websocket.close(1000, "")
        except WebSocketClosed as closed:
            self.how = closed
        finally:
            self.over.set()


async def gone(raw: RawClient) -> bool:
    """Say whether the server has dropped the connection; reads what is there."""
    with suppress(EOFError, trio.BrokenResourceError):
        while True:
            with trio.move_on_after(SETTLE_S) as scope:
                await raw.frame()
            if scope.cancelled_caught:
                return False
    return True


# -- pings --------------------------------------------------------------------------------------


async def test_a_client_that_answers_pings_stays(clock: MockClock) -> None:
    """A client that waits in the queue, or in a pause, for minutes would be dropped."""
    play = Listens()
    async with serving(play, allowed=ALLOWED) as address, raw_client(address) as raw:
        for _ in range(8):
            await pass_time(clock, PING_S)
            opcode, payload = await raw.frame()
            assert opcode == PING
            await raw.send(PONG, payload)
        assert not play.over.is_set()


async def test_a_client_that_says_nothing_at_all_is_dropped(clock: MockClock) -> None:
    """A pulled cable, or a client that hangs, would hold a slot of the model for minutes."""
    play, counters = Listens(), Counters()
    async with (
        serving(play, allowed=ALLOWED, counters=counters) as address,
        raw_client(address) as raw,
    ):
        await pass_time(clock, PONG_WAIT_S - 1)
        assert not play.over.is_set()
        await pass_time(clock, 2)
        assert play.over.is_set()
        assert await gone(raw)
    assert counters.dropped == {"silent": 1}
    assert type(play.how) is WebSocketClosed


async def test_a_client_busy_with_a_large_frame_is_alive(clock: MockClock) -> None:
    """An upload of a video over a slow line would be cut off, for it leaves no room for pongs."""
    play = Listens()
    async with serving(play, allowed=ALLOWED) as address, raw_client(address) as raw:
        frame = raw_frame(TEXT, b"x" * 3_000)
        for start in range(0, len(frame), 100):
            await raw.stream.send_all(frame[start : start + 100])
            await pass_time(clock, PONG_WAIT_S / 3)
        assert play.heard == [3_000]


async def test_a_client_is_not_silent_while_nobody_listens(clock: MockClock) -> None:
    """Who sent more than we could take would be dropped for our own slowness."""
    over, held = trio.Event(), trio.Event()

    async def listen_late(request: WebSocketRequest) -> None:
        websocket = await request.accept()
        with suppress(WebSocketClosed):
            await held.wait()
        await websocket.receive()
        over.set()

    async with serving(listen_late, allowed=ALLOWED) as address, raw_client(address) as raw:
        for _ in range(20):
            await raw.send(TEXT, b"more than the queue takes")
        await pass_time(clock, 3 * PONG_WAIT_S)
        assert not await gone(raw)
        held.set()
        await over.wait()


async def test_pings_can_be_turned_off(clock: MockClock) -> None:
    """A client that knows no pings, as small devices have, could not be served."""
    play = Listens()
    allowed = limits(ping_s=0, pong_wait_s=1)
    async with serving(play, allowed=allowed) as address, raw_client(address) as raw:
        await pass_time(clock, 20)
        with trio.move_on_after(SETTLE_S) as scope:
            await raw.frame()
        assert scope.cancelled_caught
        assert not play.over.is_set()


async def test_no_ping_follows_a_close(clock: MockClock) -> None:
    """A client's codec would take it for a violation, and the farewell for an error."""

    async def part(request: WebSocketRequest) -> None:
        websocket = await request.accept()
        await websocket.close(1000, "bye")

    allowed = limits(ping_s=0.5, pong_wait_s=60)
    async with serving(part, allowed=allowed) as address, raw_client(address) as raw:
        assert (await raw.frame())[0] == CLOSE
        await pass_time(clock, 3)
        with pytest.raises(EOFError):
            await raw.frame()


async def test_a_late_look_drops_nobody(clock: MockClock) -> None:
    """A server that was held up for a minute would then drop all its clients at once."""
    play = Listens()
    async with serving(play, allowed=ALLOWED) as address, raw_client(address) as raw:
        await pass_time(clock, 1)
        clock.jump(max(LATE_S, PONG_WAIT_S) + 1)
        for _ in range(10):
            await trio.lowlevel.checkpoint()  # The look comes before what was sent is read.
        await raw.send(TEXT, b"I was here all the time")
        await pass_time(clock, 1)
        assert not play.over.is_set()


# -- what is taken --------------------------------------------------------------------------------


async def test_a_client_that_takes_nothing_is_dropped(clock: MockClock) -> None:
    """A client whose laptop sleeps would hold its slot until the session's limit."""
    play, counters = Sends(30_000_000), Counters()
    async with serving(play, allowed=STALLS, counters=counters) as address, raw_client(address):
        while not play.over.is_set():
            await pass_time(clock, 1)
    assert counters.dropped == {"stalled": 1}
    assert isinstance(play.how, WebSocketStalled)


async def test_what_the_kernel_took_is_not_what_the_client_took(clock: MockClock) -> None:
    """A client that reads nothing would be sent megabytes before anybody sees it."""
    play, over = Listens(), trio.Event()

    async def talk(request: WebSocketRequest) -> None:
        websocket = await request.accept()
        with suppress(WebSocketClosed):
            while True:
                await websocket.send("x" * 500)
                await trio.sleep(1)  # So little that the kernel takes it for half a minute.
        over.set()

    started = clock.current_time()
    async with serving(talk, allowed=STALLS) as address:
        stream = trio.socket.socket()
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
        await stream.connect((address.host, address.port))
        await stream.send(request_head("/v1/realtime", **UPGRADE))
        while not over.is_set():
            await pass_time(clock, 1)
        stream.close()
    assert not play.over.is_set()
    assert clock.current_time() - started < 30


async def test_a_slow_but_steady_client_is_not_dropped(clock: MockClock) -> None:
    """A long answer of a chat would be cut off on its way over a mobile network."""
    size = 6_000_000
    play = Sends(size)
    client = partial(raw_client, buffer_bytes=100_000)
    async with serving(play, allowed=STALLS) as address, client(address) as raw:
        got = 0
        assert (await raw.frame_head()) == (TEXT, size)
        while got < size:
            # More than the kernel holds: a busy one is waited for, before the clock is pushed.
            got += len(await raw.read(min(400_000, size - got)))
            await trio.sleep(SETTLE_S)
            await pass_time(clock, 2)
    assert clock.current_time() > 6 * STALLS.stall_s
    assert play.how is None


@pytest.mark.parametrize(("bytes_per_s", "is_dropped"), [(2_000, True), (60_000, False)])
async def test_an_answer_of_http_is_taken_at_a_lowest_rate(
    clock: MockClock, bytes_per_s: int, is_dropped: bool
) -> None:
    """A client that takes a byte now and then would have its answer kept for ever."""
    counters, got, seconds = Counters(), 0, 60

    async def answer(_: Request) -> Response:
        return Response(bytes(20_000_000))

    app = make_app(lambda: "ready", [Route("/large", answer)])
    async with serving(app=app, allowed=STALLS, counters=counters) as address:
        with trio.socket.socket() as client:
            client.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
            await client.connect((address.host, address.port))
            await client.send(request_head("/large"))
            with suppress(ConnectionError):
                while got < seconds * bytes_per_s:
                    got += len(await client.recv(bytes_per_s - got % bytes_per_s))
                    if got % bytes_per_s == 0:
                        await pass_time(clock, 1)
    assert counters.dropped == ({"stalled": 1} if is_dropped else {})


async def test_a_ping_waits_for_the_frame_before_it(clock: MockClock) -> None:
    """A ping amid a frame would be two bytes of noise in a client's speech."""
    size = 6_000_000

    async def talk_and_wait(request: WebSocketRequest) -> None:
        websocket = await request.accept()
        await websocket.send("x" * size)
        with suppress(WebSocketClosed):
            await websocket.receive()

    allowed = limits(ping_s=10, pong_wait_s=1000, stall_s=1000)
    async with serving(talk_and_wait, allowed=allowed) as address, raw_client(address) as raw:
        await wait_all_tasks_blocked(SETTLE_S)
        await pass_time(clock, 11)  # It is due amid the frame, and again once that is out.
        assert await raw.frame() == (TEXT, b"x" * size)
        await pass_time(clock, 1)
        with trio.fail_after(30):
            assert await raw.frame() == (PING, b"")


# -- what is held -------------------------------------------------------------------------------


async def test_a_flooder_that_left_is_not_read_to_its_end(clock: MockClock) -> None:
    """It would hold its slot for as long as the rest of its flood takes at the rate."""
    play, counters = Listens(), Counters()
    allowed = limits(messages_per_s_max=1, ping_s=0)
    async with serving(play, allowed=allowed, counters=counters) as address:
        async with raw_client(address) as raw:
            await raw.stream.send_all(raw_frame(TEXT, b"!") * 1000)
        await pass_time(clock, LEAVE_S - 1)
        assert not play.over.is_set()
        await pass_time(clock, 3)
        assert play.over.is_set()
    assert counters.dropped == {"left": 1}
    assert BURST_S < len(play.heard) < 20


async def test_a_slow_large_message_does_not_keep_others_out_for_ever(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client that trickles a video would stop all others' for as long as it likes."""
    play, counters = Listens(), Counters()
    allowed = limits(ping_s=0)
    monkeypatch.setattr("runtime.net.link.RECEIVING_BYTES_MAX", 1)
    frame = raw_frame(TEXT, b"x" * (LARGE_BYTES_MIN + 500_000))
    async with (
        serving(play, allowed=allowed, counters=counters) as address,
        raw_client(address) as slow,
        raw_client(address) as waits,
    ):
        await slow.stream.send_all(frame[:-1])
        await wait_all_tasks_blocked(SETTLE_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits.stream.send_all, frame)
            await pass_time(clock, LARGE_WAIT_S - 10)
            assert not counters.dropped
            assert play.heard == []
            await pass_time(clock, 12)
        await wait_all_tasks_blocked(SETTLE_S)
        assert counters.dropped == {"slow": 1}
        assert play.heard == [LARGE_BYTES_MIN + 500_000]
    assert counters.receiving_bytes == 0


async def test_an_open_connection_keeps_no_room_of_messages_that_were_read() -> None:
    """Chats that sent a video, and are idle now, would keep others from sending theirs."""
    play, counters = Listens(), Counters()
    frame = raw_frame(TEXT, b"x" * (2 * LARGE_BYTES_MIN))
    async with serving(play, counters=counters) as address, raw_client(address) as raw:
        for count in range(1, 4):
            await raw.stream.send_all(frame[:-1])
            await wait_all_tasks_blocked(SETTLE_S)
            assert counters.receiving_bytes > LARGE_BYTES_MIN
            await raw.stream.send_all(frame[-1:])
            await wait_all_tasks_blocked(SETTLE_S)
            assert (len(play.heard), counters.receiving_bytes) == (count, 0)


async def test_who_has_left_is_not_looked_at_any_more() -> None:
    """Each client that ever came would cost memory, and time twice a second."""
    counters = Counters()
    # Those of tests that failed are left out.
    before = {
        id(it) for it in gc.get_objects() if type(it) is WatchedConnection
    }  # of tests that failed
    async with serving(counters=counters) as address:
        for _ in range(3):
            async with raw_client(address) as raw:
                await raw.send(CLOSE)
            async with await tcp(address) as stream:
                await stream.send_all(request_head("/health", Connection="close"))
                await stream.receive_some(4096)
        await wait_all_tasks_blocked(SETTLE_S)
        assert (counters.connections, counters.websockets) == (0, 0)
        gc.collect()
        assert not {id(it) for it in gc.get_objects() if type(it) is WatchedConnection} - before


def test_what_is_counted_can_be_shown() -> None:
    """A metric would show numbers of a moment that never was."""
    counters = Counters()
    counters.refused["full"] += 1
    seen = counters.copy()
    counters.refused["full"] += 1
    counters.websockets += 1
    assert (seen.refused, seen.websockets) == ({"full": 1}, 0)
