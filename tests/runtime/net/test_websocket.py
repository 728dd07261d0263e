"""The WebSocket over real loopback sockets: against trio-websocket's client and against raw TCP."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from hashlib import blake2b
from importlib.metadata import version

import pytest
import trio
import trio_websocket
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.values.frames import KEPT_CHARS, Received, Shortened, Utf8Text
from protocol.wire.codec import frame_bytes
from runtime.net.connection import WebSocket, WebSocketClosed
from runtime.net.link import READ_BYTES
from runtime.net.listener import Address, WebSocketRequest
from runtime.net.websocket import CLOSE_WAIT_S, FastMasker
from tests.network.transport import (
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    SETTLE_S,
    TEXT,
    RawClient,
    on_pushed_clock,  # noqa: F401
    plain_mask,
    pushed_clock,  # noqa: F401
    raw_client,
    raw_frame,
    reset_when_closed,
    serving,
)

pytestmark = pytest.mark.anyio


Play = Callable[[WebSocket], Awaitable[None]]


@asynccontextmanager
async def client(address: Address) -> AsyncIterator[trio_websocket.WebSocketConnection]:
    """Connect as a client program does."""
    url = f"ws://{address.host}:{address.port}/v1/realtime"
    async with trio_websocket.open_websocket_url(url, max_message_size=1 << 26) as connection:
        yield connection
        # Where the server closed first, the library's client forgets to close its socket.
        await trio.aclose_forcefully(connection._stream)


def playing(play: Play, frame_bytes_max: int = 1 << 20) -> AbstractAsyncContextManager[Address]:
    """Serve one test: each WebSocket is accepted and played by `play`."""

    async def accept_and_play(request: WebSocketRequest) -> None:
        await play(await request.accept(frame_bytes_max=frame_bytes_max))

    return serving(accept_and_play)


class Heard:
    """Plays a server that listens, keeps what it heard, and parts as a session does (1009)."""

    def __init__(self) -> None:
        self.frames: list[Received] = []
        self.how = (0, "")
        self.done = trio.Event()

    async def __call__(self, websocket: WebSocket) -> None:
        try:
            while True:
                self.frames.append(await websocket.receive())
                if isinstance(self.frames[-1], Shortened):
                    await websocket.send("that was too big")
                    await websocket.close(1009, "too big")
        except WebSocketClosed as closed:
            self.how = (closed.code, closed.reason)
        finally:
            self.done.set()


async def echo(websocket: WebSocket) -> None:
    while True:
        frame = await websocket.receive()
        await websocket.send(frame if isinstance(frame, str) else repr(frame))


# -- the mask -----------------------------------------------------------------------------------


def test_the_mask_is_that_of_the_rfc() -> None:
    """No client at all could be understood."""
    masked = FastMasker(bytes.fromhex("37fa213d")).process(b"Hello")
    assert masked == bytes.fromhex("7f9f4d5158")


@given(st.binary(min_size=4, max_size=4), st.lists(st.binary(max_size=40)))
def test_a_mask_goes_on_over_pieces_of_any_size(key: bytes, pieces: list[bytes]) -> None:
    """Audio that arrives in odd pieces would turn into noise, or into invalid UTF-8."""
    masker = FastMasker(key)
    masked = b"".join(masker.process(piece) for piece in pieces)
    assert masked == plain_mask(key, b"".join(pieces))


async def test_each_connection_unmasks_with_ours() -> None:
    """An update of wsproto would silently make every message several times as expensive."""
    assert version("wsproto").startswith("1.3."), "check the names, then move this pin"
    maskers: list[object] = []

    async def look(websocket: WebSocket) -> None:
        codec = websocket._connection._wsproto.connection  # type: ignore[attr-defined]
        while not maskers:
            await trio.lowlevel.checkpoint()
            if codec._proto._frame_decoder.masker is not None:
                maskers.append(codec._proto._frame_decoder.masker)

    async with playing(look) as address, raw_client(address) as raw:
        await raw.stream.send_all(raw_frame(TEXT, b"Hello")[:-1])
        await wait_all_tasks_blocked()
    assert isinstance(maskers[0], FastMasker)


def test_sizes_are_bytes_not_characters() -> None:
    """A Chinese text three times the limit would be taken, and its memory with it."""
    assert [frame_bytes(it) for it in ("abc", "你好", b"\xff\xfe", "")] == [3, 6, 2, 0]


# -- messages -----------------------------------------------------------------------------------


async def test_messages_come_back_as_they_were() -> None:
    """Text in any language would be damaged on the way."""
    async with playing(echo) as address, client(address) as ours:
        for text in ("", "hello", "你好 🎵", "x" * 200_000):
            await ours.send_message(text)
            assert await ours.get_message() == text
        await ours.send_message(b"\x00\xff")
        assert await ours.get_message() == repr(b"\x00\xff")


async def test_a_message_may_arrive_slowly() -> None:
    """A client on a mobile network, whose second of audio comes in 3 KB pieces, is not heard."""
    text = "audio " * 20_000
    async with playing(echo) as address, raw_client(address) as raw:
        data = raw_frame(TEXT, text.encode())
        for start in range(0, len(data), 3000):
            await raw.stream.send_all(data[start : start + 3000])
            await trio.lowlevel.checkpoint()
        assert await raw.frame() == (TEXT, text.encode())


async def test_a_message_may_be_fragmented_around_pings() -> None:
    """Clients that stream a message in fragments, as browsers may, would get errors."""
    async with playing(echo) as address, raw_client(address) as raw:
        payload = "你好, fragmented".encode()
        await raw.send(TEXT, payload[:4], fin=False)
        await raw.send(PING, b"are you there")
        assert await raw.frame() == (PONG, b"are you there")
        await raw.send(CONTINUATION, b"", fin=False)
        for byte in payload[4:]:
            await raw.send(CONTINUATION, bytes([byte]), fin=False)
        await raw.send(CONTINUATION)
        assert await raw.frame() == (TEXT, payload)


# -- too big ------------------------------------------------------------------------------------


HUGE = struct.pack("!BBQ", 0x81, 0xFF, 100_000_000) + b"\0\0\0\0"


async def told_too_big(raw: RawClient) -> None:
    """Hold the server to its last words about a message that was too big."""
    assert await raw.frame() == (TEXT, b"that was too big")
    assert await raw.frame() == (CLOSE, struct.pack("!H", 1009) + b"too big")


async def test_text_arrives_as_it_was_sent_whatever_its_size() -> None:
    """A question in any script would be mangled, or one emoji in a large one cost gigabytes."""
    large = "x" * 300_000 + "\U0001f600é" * 200_000
    small, heard = "\U0001f600é", list[object]()

    async def listen(websocket: WebSocket) -> None:
        with suppress(WebSocketClosed):
            while True:
                heard.append(await websocket.receive())

    async with playing(listen, frame_bytes_max=1 << 24) as address, client(address) as connection:
        for text in (small, large, small, "x" * len(large)):
            await connection.send_message(text)
        await connection.aclose()
    assert heard == [small, Utf8Text(large.encode()), small, "x" * len(large)]


async def test_a_huge_frame_is_told_at_once_and_never_held_in_memory() -> None:
    """One client could take the server's memory with a single 100 MB frame."""
    heard = Heard()
    async with playing(heard, frame_bytes_max=1 << 20) as address, raw_client(address) as raw:
        tracemalloc.start()
        await raw.stream.send_all(HUGE)
        piece = bytes(1 << 20)

        async def flood() -> None:
            with suppress(trio.BrokenResourceError):
                while True:
                    await raw.stream.send_all(piece)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await told_too_big(raw)
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            nursery.cancel_scope.cancel()
        assert peak_bytes < 12 << 20
        await raw.stream.aclose()
        await heard.done.wait()
    (told,) = heard.frames
    assert isinstance(told, Shortened)
    assert told.size_bytes == 100_000_000
    assert told.read_bytes is not None
    assert told.read_bytes <= READ_BYTES
    assert told.blake2b == blake2b(bytes(told.read_bytes), digest_size=16).hexdigest()
    assert told.head == "\0" * min(told.read_bytes, KEPT_CHARS)


async def test_after_1009_the_connection_ends_in_peace(clock: MockClock) -> None:
    """On systems that drop what a reset overtakes, a client would not learn what was too big."""
    async with playing(Heard(), frame_bytes_max=1 << 20) as address, raw_client(address) as raw:
        await raw.stream.send_all(HUGE + bytes(3_000_000))
        await told_too_big(raw)
        await wait_all_tasks_blocked(SETTLE_S)
        clock.jump(CLOSE_WAIT_S)
        with pytest.raises(EOFError):
            await raw.frame()


async def test_a_close_is_shaken_on_after_a_message_that_was_too_big(clock: MockClock) -> None:
    """A client that answers our 1009 as it should would be waited for, two seconds each."""
    clock.rate = 0.0  # So that nothing ends because its time is up.
    async with playing(Heard(), frame_bytes_max=100) as address, raw_client(address) as raw:
        await raw.send(TEXT, b"x" * 101)
        await told_too_big(raw)
        await raw.send(CLOSE, struct.pack("!H", 1009))
        with pytest.raises(EOFError):
            await raw.frame()


async def test_too_many_fragments_are_too_big_as_well() -> None:
    """The limit could be walked around by sending a huge message in small fragments."""
    heard = Heard()
    async with playing(heard, frame_bytes_max=10_000) as address, raw_client(address) as raw:
        await raw.send(TEXT, b"before")
        await raw.send(TEXT, b"x" * 1000, fin=False)
        for _ in range(10):
            await raw.send(CONTINUATION, "é".encode() * 500, fin=False)
        await told_too_big(raw)
    before, told = heard.frames
    assert before == "before"
    assert isinstance(told, Shortened)
    whole = b"x" * 1000 + "é".encode() * 5000
    assert (told.size_bytes, told.read_bytes) == (len(whole), len(whole))
    assert told.blake2b == blake2b(whole, digest_size=16).hexdigest()
    assert told.head == "x" * 1000 + "é" * 24


async def test_a_size_that_no_message_can_have_is_told_as_the_largest() -> None:
    """A number of more than 63 bits would stand in the log, which many readers do not take."""
    heard = Heard()
    async with playing(heard) as address, raw_client(address) as raw:
        await raw.stream.send_all(struct.pack("!BBQ", 0x81, 0xFF, (1 << 64) - 1) + b"abcd")
        await told_too_big(raw)
    assert heard.frames == [
        Shortened(
            size_bytes=(1 << 63) - 1, blake2b=blake2b(digest_size=16).hexdigest(), read_bytes=0
        )
    ]


async def test_a_message_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    """A client that keeps to the documented limit would be thrown out."""
    heard = Heard()
    async with playing(heard, frame_bytes_max=3000) as address, raw_client(address) as raw:
        await raw.send(TEXT, b"x" * 3000)
        await raw.send(TEXT, ("é" * 1500).encode())
        await raw.send(TEXT, ("é" * 1500 + "x").encode())
        await raw.send(TEXT, b"after")
        await raw.stream.send_eof()
        await heard.done.wait()
    *taken, told = heard.frames
    assert taken == ["x" * 3000, "é" * 1500]
    assert isinstance(told, Shortened)
    assert (told.size_bytes, told.read_bytes, told.head) == (3001, 3001, "é" * KEPT_CHARS)


async def test_what_came_before_a_message_that_is_too_big_is_heard_first() -> None:
    """A client's last good second would be lost to the one that it should not have sent."""
    heard, held = Heard(), trio.Event()

    async def listen_late(websocket: WebSocket) -> None:
        await held.wait()
        await heard(websocket)

    async with playing(listen_late, frame_bytes_max=100) as address, raw_client(address) as raw:
        for text in (b"one", b"two", b"x" * 101, b"three"):
            await raw.send(TEXT, text)
        await wait_all_tasks_blocked(SETTLE_S)
        held.set()
        await told_too_big(raw)
    assert heard.frames[:2] == ["one", "two"]
    assert isinstance(heard.frames[2], Shortened)


@pytest.mark.parametrize(
    ("data", "close"),
    [
        (raw_frame(TEXT, b"\xff"), struct.pack("!H", 1007) + b"invalid UTF-8"),
        (raw_frame(3, b""), struct.pack("!H", 1002) + b"no frame of RFC 6455"),
        (raw_frame(PING, b"x" * 126), struct.pack("!H", 1002) + b"no frame of RFC 6455"),
        (raw_frame(CLOSE, b"x"), struct.pack("!H", 1002) + b"no frame of RFC 6455"),
        (raw_frame(CONTINUATION, b"x"), struct.pack("!H", 1002) + b"no frame of RFC 6455"),
        (
            raw_frame(TEXT, b"x", fin=False) + raw_frame(TEXT, b"x"),
            struct.pack("!H", 1002) + b"no frame of RFC 6455",
        ),
    ],
)
async def test_whoever_breaks_the_protocol_is_told_which_rule(data: bytes, close: bytes) -> None:
    """The author of a client would see a connection that is lost for no reason (7.1.7)."""
    heard = Heard()
    async with playing(heard) as address, raw_client(address) as raw:
        await raw.send(TEXT, b"one")
        await raw.stream.send_all(data)
        assert await raw.frame() == (CLOSE, close)
    assert heard.frames == ["one"]


async def test_bytes_made_by_chance_end_only_their_own_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some sequence of bytes that nobody thought of would take everybody's sessions down."""
    chance = random.Random(0)
    heard = Heard()
    async with playing(heard, frame_bytes_max=1000) as address:
        for _ in range(100):
            async with raw_client(address) as raw:
                frames = [
                    raw_frame(
                        chance.choice([TEXT, CONTINUATION, CLOSE, PING, PONG, 2, 3]),
                        chance.randbytes(chance.choice([0, 1, 2, 20, 600])),
                        fin=chance.random() < 0.7,
                    )
                    for _ in range(4)
                ]
                with suppress(trio.BrokenResourceError):
                    await raw.stream.send_all(b"".join(frames) + chance.randbytes(8))
                    await raw.stream.send_eof()
                    await raw.stream.receive_some(65536)
    assert not caplog.records


# -- the end ------------------------------------------------------------------------------------


async def test_the_peers_close_is_told_after_its_messages() -> None:
    """A client's last message, sent just before it closes, would be lost."""
    heard = Heard()
    async with playing(heard) as address:
        async with client(address) as ours:
            await ours.send_message("last words")
            await ours.aclose(1000, "bye")
        await heard.done.wait()
    assert heard.frames == ["last words"]
    assert heard.how == (1000, "bye")


@pytest.mark.parametrize("how", ["eof", "reset"])
async def test_a_lost_peer_is_told_as_1006(how: str) -> None:
    """The slot of a client that crashed would never be given to the next one."""
    heard = Heard()
    async with playing(heard) as address, raw_client(address) as raw:
        await raw.send(TEXT, b"then nothing")
        await wait_all_tasks_blocked(SETTLE_S)
        if how == "reset":
            reset_when_closed(raw.stream)
            await raw.stream.aclose()
        else:
            await raw.stream.send_eof()
        await heard.done.wait()
    assert heard.frames == ["then nothing"]
    assert heard.how[0] == 1006


async def test_our_close_reaches_the_client_after_all_that_was_sent() -> None:
    """A client would not learn why its session ended."""

    async def say_goodbye(websocket: WebSocket) -> None:
        for i in range(20):
            await websocket.send(f"{i}" * 10_000)
        await websocket.close(1013, "queue_full")
        with pytest.raises(WebSocketClosed):
            await websocket.send("late")
        with pytest.raises(WebSocketClosed):
            await websocket.receive()
        await websocket.close(1000, "again")
        await websocket.abort()

    async with playing(say_goodbye) as address, client(address) as ours:
        got = [await ours.get_message() for _ in range(20)]
        with pytest.raises(trio_websocket.ConnectionClosed) as closed:
            await ours.get_message()
    assert got == [f"{i}" * 10_000 for i in range(20)]
    assert (closed.value.reason.code, closed.value.reason.reason) == (1013, "queue_full")


async def test_a_peer_that_never_answers_a_close_is_not_waited_for(clock: MockClock) -> None:
    """A shutdown would wait for ever for one client that hangs."""
    closed = trio.Event()

    async def close(websocket: WebSocket) -> None:
        await websocket.close(1000, "stopped")
        closed.set()

    async with playing(close) as address, raw_client(address) as raw:
        assert await raw.frame() == (CLOSE, struct.pack("!H", 1000) + b"stopped")
        await wait_all_tasks_blocked(SETTLE_S)
        assert not closed.is_set()
        clock.jump(CLOSE_WAIT_S)
        await closed.wait()
        with pytest.raises(EOFError):
            await raw.frame()


async def test_a_ping_after_our_close_hurts_nobody(
    clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's keepalive at the wrong moment would take the server's task down (library bug)."""
    closed = trio.Event()

    async def close(websocket: WebSocket) -> None:
        await websocket.close(1000, "")
        closed.set()

    async with playing(close) as address, raw_client(address) as raw:
        assert (await raw.frame())[0] == CLOSE
        await raw.send(PING, b"?")
        await wait_all_tasks_blocked(SETTLE_S)
        clock.jump(CLOSE_WAIT_S)
        await closed.wait()
    assert not caplog.records


@pytest.mark.parametrize(
    "data", [b"\x81\x85", b"\xff\xff\xff\xff", b"\x81\x05Hello", raw_frame(TEXT, b"\xff\xff")]
)
async def test_a_broken_frame_ends_only_its_own_connection(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A client with a bug in its codec would take others down, or hang."""
    heard = Heard()
    async with playing(heard) as address:
        async with raw_client(address) as raw:
            await raw.stream.send_all(data)
            await wait_all_tasks_blocked(SETTLE_S)
        await heard.done.wait()
        heard.done = trio.Event()
        async with client(address) as another:
            await another.send_message("fine")
        await heard.done.wait()
    assert heard.frames == ["fine"]
    assert not caplog.records


async def test_abort_drops_at_once_whatever_is_unsent(caplog: pytest.LogCaptureFixture) -> None:
    """A client that reads nothing would keep our buffers, and its socket, for minutes."""

    async def give_up(websocket: WebSocket) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(websocket.send, "x" * 30_000_000)
            await wait_all_tasks_blocked(SETTLE_S)
            await websocket.abort()

    async with playing(give_up) as address, raw_client(address) as raw:
        await wait_all_tasks_blocked(10 * SETTLE_S)
        with pytest.raises((trio.BrokenResourceError, EOFError)):
            await raw.read(30_000_000)
    assert not caplog.records


async def test_a_cancelled_send_aborts() -> None:
    """Half a frame followed by another would be garbage in the client's ears."""
    cancelled = trio.Event()

    async def send_half(websocket: WebSocket) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(websocket.send, "x" * 30_000_000)
                await wait_all_tasks_blocked(SETTLE_S)
                scope.cancel()
        with pytest.raises(WebSocketClosed):
            await websocket.send("next")
        cancelled.set()

    async with playing(send_half) as address, raw_client(address) as raw:
        await cancelled.wait()
        with pytest.raises((trio.BrokenResourceError, EOFError)):
            await raw.read(30_000_000)


async def test_an_unfinished_message_goes_with_its_connection() -> None:
    """The pieces of messages that broke off would wait in memory for the garbage collector."""
    kept: list[weakref.ref[object]] = []

    async def look(websocket: WebSocket) -> None:
        kept.append(weakref.ref(websocket._connection))  # type: ignore[attr-defined]
        with suppress(WebSocketClosed):
            await websocket.receive()

    gc.disable()
    try:
        async with playing(look) as address:
            async with raw_client(address) as raw:
                await raw.send(TEXT, b"half", fin=False)
                await wait_all_tasks_blocked(SETTLE_S)
            await wait_all_tasks_blocked(SETTLE_S)
            assert [it() for it in kept] == [None]
    finally:
        gc.enable()
