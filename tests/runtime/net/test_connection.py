"""A connection's two tasks against a WebSocket in memory, on both event loops.

Time is virtual where a limit is tested: trio's MockClock jumps when everybody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
import sniffio
from trio.testing import MockClock

from runtime.net import connection as module
from runtime.net.connection import (
    CLOSE_FLUSH_S,
    DRAIN_S,
    SEND_BYTES_PER_S_MIN,
    SEND_STALL_S,
    Connection,
    WebSocketClosed,
    WebSocketStalled,
    deliver_received,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    if request.param == "trio":
        return "trio", {"clock": MockClock(autojump_threshold=0)}
    return "asyncio"


only_virtual_time = pytest.mark.parametrize("anyio_backend", ["trio"], indirect=True)


class FakeWebSocket:
    """A WebSocket whose peer the test plays."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.calls: list[int] = []
        self.closed: tuple[int, str] | None = None
        self.aborts = 0
        self.stalled = False
        self.send_raises = False
        self.is_dropped = False
        self._incoming: deque[str | bytes | None] = deque()
        self._ended = False
        self._changed = anyio.Event()

    def say(self, *frames: str | bytes | None) -> None:
        self._incoming.extend(frames)
        self._change()

    def leave(self) -> None:
        self._ended = True
        self._change()

    def drop_as_stalled(self) -> None:
        self.is_dropped = True
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until_sent(self, count: int) -> None:
        while len(self.sent) < count:
            await self._changed.wait()

    deliver = deliver_received

    async def receive(self) -> str | bytes | None:
        await anyio.lowlevel.checkpoint()
        while not self._incoming:
            if self.is_dropped:
                raise WebSocketStalled(1006, "")
            if self._ended:
                raise WebSocketClosed(1006, "")
            await self._changed.wait()
        return self._incoming.popleft()

    async def send(self, *frames: str) -> None:
        await anyio.lowlevel.checkpoint()
        if self._ended or self.send_raises:
            raise WebSocketClosed(1006, "")
        while self.stalled:
            if self.is_dropped:
                raise WebSocketStalled(1006, "")
            await self._changed.wait()
        self.sent.extend(frames)
        self.calls.append(len(frames))
        self._change()

    async def close(self, code: int, reason: str) -> None:
        await anyio.lowlevel.checkpoint()
        if self.stalled:
            await anyio.sleep_forever()
        self.closed = self.closed or (code, reason)
        self._incoming.clear()
        self.leave()

    async def abort(self) -> None:
        self.aborts += 1
        self.leave()


class Session:
    """The driver's side: what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.held: anyio.Event | None = None

    async def on_frame(self, frame: str | bytes | None) -> None:
        if self.held is not None:
            await self.held.wait()
        self.told.append(frame)

    def on_gone(self, _code: int) -> None:
        self.told.append("GONE")

    def on_send_failed(self) -> None:
        self.told.append("SEND FAILED")


async def at_once() -> None:
    """Be ready: the log has it."""


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[FakeWebSocket, Session, Connection]]:
    """Run a connection; on leaving, wait until it ended by itself."""
    websocket, session = FakeWebSocket(), Session()
    connection = Connection(
        websocket,
        on_frames=session.on_frame,
        on_gone=session.on_gone,
        on_send_failed=session.on_send_failed,
    )
    virtual = sniffio.current_async_library() == "trio"
    with anyio.fail_after(1000 if virtual else 60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            yield websocket, session, connection
    assert websocket.aborts >= 1, "a socket was left open"


async def test_frames_arrive_in_order_and_verbatim_then_the_end() -> None:
    """A client's audio would be heard out of order, or its last words lost."""
    async with connected() as (websocket, session, _):
        websocket.say("a", b"b", None, "c")
        websocket.leave()
    assert session.told == ["a", b"b", None, "c", "GONE"]


async def test_frames_go_out_in_order_and_the_close_after_them() -> None:
    """A client would miss the last delta, or `session.closed`, before its socket closes."""
    async with connected() as (websocket, session, connection):
        for i in range(100):
            connection.send(str(i), at_once)
        connection.close(1000, "stopped", at_once)
        connection.send("late", at_once)
        connection.close(1011, "late", at_once)
    assert websocket.sent == [str(i) for i in range(100)]
    assert websocket.closed == (1000, "stopped")
    assert session.told == []


async def test_what_one_step_says_goes_out_in_one_call() -> None:
    """Each delta of a unit would cost a system call and a packet of its own."""
    text = "x" * (module.SEND_TOGETHER_BYTES_MAX // 2)
    async with connected() as (websocket, _session, connection):
        one_step, next_step = partial(at_once), partial(at_once)
        for frame, ready in (("text", one_step), ("sound", one_step), ("listen", next_step)):
            connection.send(frame, ready)
        for _ in range(3):
            connection.send(text, one_step)
        connection.close(1000, "", one_step)
    assert websocket.sent == ["text", "sound", "listen", text, text, text]
    assert websocket.calls == [2, 1, 2, 1]


async def test_nothing_is_sent_before_the_log_has_it() -> None:
    """A client would hold an answer that the recording lacks after a crash."""
    written, close_written = anyio.Event(), anyio.Event()
    async with connected() as (websocket, _session, connection):
        connection.send("a", written.wait)
        connection.close(1000, "", close_written.wait)
        await anyio.wait_all_tasks_blocked()
        assert websocket.sent == []
        written.set()
        await anyio.wait_all_tasks_blocked()
        assert websocket.sent == ["a"]
        assert websocket.closed is None
        close_written.set()
    assert websocket.closed == (1000, "")


async def test_a_held_reader_does_not_hold_the_writer() -> None:
    """While the recorder stalls, a client would hear silence although the model has spoken."""
    async with connected() as (websocket, session, connection):
        session.held = anyio.Event()
        websocket.say("a", "b")
        connection.send("speech", at_once)
        await websocket.until_sent(1)
        assert session.told == []
        session.held.set()
        websocket.leave()
    assert session.told == ["a", "b", "GONE"]


async def test_a_stalled_writer_does_not_hold_the_reader() -> None:
    """A client that reads slowly could not stop the session: its `session.close` went unseen."""
    async with connected() as (websocket, session, connection):
        websocket.stalled = True
        connection.send("speech", at_once)
        await anyio.wait_all_tasks_blocked()
        websocket.say("session.close")
        await anyio.wait_all_tasks_blocked()
        assert session.told == ["session.close"]
        websocket.leave()
    assert session.told == ["session.close", "GONE"]


async def test_a_peer_that_leaves_while_we_send_is_gone_after_its_last_words() -> None:
    """`session.close`, then leaving at once, would be logged as a lost client."""
    async with connected() as (websocket, session, connection):
        websocket.say("session.close")
        websocket.leave()
        connection.send("speech", at_once)
        connection.send("more", at_once)
    assert session.told == ["session.close", "GONE"]


async def test_a_full_outbox_fails_once_and_drops_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that never reads would fill the server's memory with speech."""
    monkeypatch.setattr(module, "SEND_BUFFER_BYTES", 1000)
    async with connected() as (websocket, session, connection):
        websocket.stalled = True
        for _ in range(5):
            connection.send("x" * 400, at_once)
            await anyio.wait_all_tasks_blocked()
    assert session.told == ["SEND FAILED"]


async def test_small_frames_count_as_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that never reads could hoard millions of tiny frames below the byte limit."""
    monkeypatch.setattr(module, "SEND_BUFFER_BYTES", 1000)
    async with connected() as (websocket, session, connection):
        websocket.stalled = True
        for _ in range(5):
            connection.send("x", at_once)
    assert session.told == ["SEND FAILED"]


async def test_what_was_sent_makes_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every long session would be dropped after its first eight megabytes of speech."""
    monkeypatch.setattr(module, "SEND_BUFFER_BYTES", 1000)
    async with connected() as (websocket, session, connection):
        for i in range(20):
            connection.send("é" * 300, at_once)
            await websocket.until_sent(i + 1)
        connection.close(1000, "", at_once)
    assert session.told == []


@only_virtual_time
async def test_a_peer_that_takes_nothing_is_dropped_after_the_stall_limit() -> None:
    """A client whose laptop sleeps would hold a slot of the model until the session's limit."""
    async with connected() as (websocket, session, connection):
        websocket.stalled = True
        start = anyio.current_time()
        connection.send("speech", at_once)
    assert anyio.current_time() - start == pytest.approx(SEND_STALL_S, abs=0.1)
    assert session.told == ["SEND FAILED"]


@only_virtual_time
async def test_a_large_answer_to_a_slow_line_is_waited_for() -> None:
    """A chat's answer of ten megabytes would be cut off amid its way over a mobile network."""
    async with connected() as (websocket, session, connection):
        websocket.stalled = True
        start = anyio.current_time()
        connection.send("x" * 10_000_000, at_once)
    waited_s = anyio.current_time() - start
    assert waited_s == pytest.approx(SEND_STALL_S + 10_000_000 / SEND_BYTES_PER_S_MIN, abs=1)
    assert session.told == ["SEND FAILED"]


@pytest.mark.parametrize("sends", [False, True])
async def test_what_the_websocket_drops_as_stalled_has_failed(sends: bool) -> None:
    """The log would say that a client left that had only stopped reading."""
    async with connected() as (websocket, session, connection):
        websocket.stalled = True
        if sends:
            connection.send("speech", at_once)
        await anyio.wait_all_tasks_blocked()
        websocket.drop_as_stalled()
    assert session.told == ["SEND FAILED"]


@only_virtual_time
async def test_a_slow_log_is_no_stall_of_the_peer() -> None:
    """A disk that hiccups for twenty seconds would cost every client its connection."""
    async with connected() as (websocket, session, connection):

        async def written_late() -> None:
            await anyio.sleep(2 * SEND_STALL_S)

        connection.send("speech", written_late)
        await websocket.until_sent(1)
        connection.close(1000, "", at_once)
    assert session.told == []
    assert websocket.closed == (1000, "")


@only_virtual_time
async def test_silence_is_no_stall() -> None:
    """A client that waits in the queue for a minute would be dropped."""
    async with connected() as (websocket, session, connection):
        await anyio.sleep(10 * SEND_STALL_S)
        connection.send("queue_done", at_once)
        await websocket.until_sent(1)
        connection.close(1000, "", at_once)
    assert session.told == []


@only_virtual_time
async def test_a_close_is_bounded_with_all_that_waits_before_it() -> None:
    """A shutdown would hang on the one client that reads a frame every nine seconds."""
    async with connected() as (websocket, session, connection):
        start = anyio.current_time()
        for _ in range(50):
            connection.send("speech", partial(anyio.sleep, SEND_STALL_S - 1))
        connection.close(1012, "server_shutdown", at_once)
    assert anyio.current_time() - start == pytest.approx(SEND_STALL_S + CLOSE_FLUSH_S, abs=1)
    assert session.told == ["SEND FAILED"]
    assert websocket.closed is None


@only_virtual_time
async def test_a_close_that_never_ends_is_cut_off() -> None:
    """A WebSocket that breaks its promise would keep a session, and its slot, for ever."""
    async with connected() as (websocket, session, connection):
        connection.close(1000, "", at_once)
        websocket.stalled = True
    assert session.told == []


@only_virtual_time
async def test_a_held_reader_is_not_waited_for_when_the_peer_left() -> None:
    """With a stalled recorder a departed client would keep its session, and its slot."""
    async with connected() as (websocket, session, connection):
        session.held = anyio.Event()
        websocket.say("a")
        await anyio.wait_all_tasks_blocked()
        websocket.leave()
        start = anyio.current_time()
        connection.send("speech", at_once)
    assert anyio.current_time() - start == pytest.approx(DRAIN_S)
    assert session.told == ["SEND FAILED"]


@only_virtual_time
async def test_a_send_that_fails_while_reading_goes_on_is_told() -> None:
    """A socket that is broken in one direction only would look alive for ever."""
    async with connected() as (websocket, session, connection):
        websocket.send_raises = True
        connection.send("speech", at_once)
    assert session.told == ["SEND FAILED"]


async def test_a_held_reader_is_given_up_after_our_own_close() -> None:
    """A session that ended would never return while a late frame waits for its closed inbox."""
    async with connected() as (websocket, session, connection):
        session.held = anyio.Event()
        websocket.say("late")
        await anyio.wait_all_tasks_blocked()
        connection.close(1000, "", at_once)
    assert session.told == []
    assert websocket.closed == (1000, "")


async def test_everything_is_ignored_after_the_end() -> None:
    """A model's late answer would raise in the driver of a client that left."""
    async with connected() as (websocket, session, connection):
        websocket.leave()
        await anyio.wait_all_tasks_blocked()
        connection.send("late", at_once)
        connection.close(1000, "", at_once)
    assert session.told == ["GONE"]
    assert websocket.sent == []
    assert websocket.closed is None


async def test_cancelling_aborts_the_socket() -> None:
    """A server that is killed would leave its clients listening to a dead socket."""
    with anyio.CancelScope() as scope:
        async with connected() as (websocket, session, connection):
            websocket.stalled = True
            connection.send("speech", at_once)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert websocket.aborts >= 1
    assert session.told == []


async def test_an_error_of_the_session_is_raised_and_drops_the_connection() -> None:
    """A bug in the driver would be swallowed, and its client wait for ever."""

    async def broken(_frame: str | bytes | None) -> None:
        raise ZeroDivisionError

    websocket, session = FakeWebSocket(), Session()
    connection = Connection(
        websocket, on_frames=broken, on_gone=session.on_gone, on_send_failed=session.on_send_failed
    )
    websocket.say("a")
    with pytest.raises(ExceptionGroup) as caught:
        await connection.run()
    assert caught.group_contains(ZeroDivisionError)
    assert websocket.aborts == 1
    assert session.told == []
