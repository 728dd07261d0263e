"""What a WebSocket delivers: most messages without the codec, all of them in order, over loopback.

A client's bytes are made here, and arrive in pieces of any size.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
from trio.lowlevel import Task, checkpoint
from trio.testing import wait_all_tasks_blocked

from protocol.values.frames import Frame, Shortened, Utf8Text
from runtime.net.connection import WebSocket, WebSocketClosed
from runtime.net.listener import WebSocketRequest
from runtime.net.websocket import MESSAGES_A_READ, TOGETHER_BYTES_MAX, WHOLE_BYTES_MAX
from tests.network.transport import (
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    SETTLE_S,
    TEXT,
    on_pushed_clock,  # noqa: F401
    pushed_clock,  # noqa: F401
    raw_client,
    raw_frame,
    serving,
)

pytestmark = pytest.mark.anyio

BINARY = 0x2
PIECES = 100
MESSAGE_MAX = 1 << 20
LARGER = b"y" * (TOGETHER_BYTES_MAX + 1)
"""A message that is taken by itself."""
TEXTS = ("{}", "x" * 2_000, "é" * 900, "a😀b", "", "y" * 70_000, "z" * (WHOLE_BYTES_MAX + 7))


class Session:
    """Takes what is delivered; some messages make the next one wait."""

    def __init__(self, waits_for: Callable[[Frame], Awaitable[None] | None] | None = None) -> None:
        self.taken: list[Frame] = []
        self.together: list[int] = []
        self.is_waiting = False
        self.code = 0
        self.failure: Exception | None = None
        self.done = trio.Event()
        self.websocket: WebSocket
        self._waits_for = waits_for

    async def __call__(self, request: WebSocketRequest) -> None:
        self.websocket = await request.accept(frame_bytes_max=MESSAGE_MAX)
        try:
            await self.websocket.deliver(self.take)
        except WebSocketClosed as closed:
            self.code = closed.code
        except ValueError as error:
            self.failure = error
        finally:
            self.done.set()

    def take(self, *messages: Frame) -> Awaitable[None] | None:
        assert not self.is_waiting, "the next message came while this one holds the reader"
        self.together.append(len(messages))
        waits = list[Awaitable[None]]()
        for message in messages:
            self.taken.append(message)
            wait = None if self._waits_for is None else self._waits_for(message)
            waits += [] if wait is None else [wait]
        return self._wait(waits) if waits else None

    async def _wait(self, waits: list[Awaitable[None]]) -> None:
        self.is_waiting = True
        try:
            for wait in waits:
                await wait
        finally:
            self.is_waiting = False


async def for_ever() -> None:
    await trio.sleep_forever()


def plain(message: Frame) -> str | bytes | None:
    return message.data.decode() if isinstance(message, Utf8Text) else message


def drawn(rng: random.Random) -> tuple[bytes, list[str | bytes]]:
    """Draw what a client sends, and what its server must hear."""
    data, heard = b"", list[str | bytes]()
    for _ in range(rng.randrange(1, 30)):
        text = rng.choice(TEXTS)
        payload = text.encode()
        match rng.randrange(6):
            case 0:
                cut = rng.randrange(len(payload) + 1)
                data += raw_frame(TEXT, payload[:cut], fin=False)
                data += raw_frame(PING, b"amid") if rng.random() < 0.5 else b""
                data += raw_frame(CONTINUATION, payload[cut:])
            case 1:
                data += raw_frame(BINARY, b"\xff\x00")
                heard.append(b"\xff\x00")
                continue
            case 2:
                data += raw_frame(PING, b"p") + raw_frame(PONG, b"")
                continue
            case _:
                data += raw_frame(TEXT, payload)
        heard.append(text)
    return data, heard


@pytest.mark.parametrize("seed", range(12))
async def test_all_messages_come_in_order_however_they_arrive(seed: int) -> None:
    """Sound overtakes the message that was sent before it, or is lost between two ways in."""
    rng = random.Random(seed)
    data, heard = drawn(rng)
    held = rng.random() < 0.5

    def waits_for(message: Frame) -> Awaitable[None] | None:
        return rest() if held and len(plain(message) or "") % 2 == 0 else None

    async def rest() -> None:
        await trio.sleep(0.0005)

    session = Session(waits_for)
    async with serving(session) as address, raw_client(address) as raw:
        at = 0
        while at < len(data):
            step = rng.choice((1, 3, 7, 1_500, 40_000, 300_000))
            await raw.stream.send_all(data[at : at + step])
            at += step
            if rng.random() < 0.2:
                await wait_all_tasks_blocked(SETTLE_S / 10)
        await raw.stream.send_all(raw_frame(CLOSE, (1001).to_bytes(2, "big")))
        await session.done.wait()
    assert [plain(message) for message in session.taken] == heard
    assert session.code == 1001


async def test_a_piece_of_sound_wakes_one_task_once() -> None:
    """A core holds fifty telephones, where it could hold three hundred."""
    steps = Counter[str]()

    class Counts(trio.abc.Instrument):
        def before_task_step(self, task: Task) -> None:
            steps[task.name] += 1

    session = Session()
    piece = raw_frame(TEXT, b'{"type":"input_audio_buffer.append","audio":"%s"}' % (b"A" * 856))
    async with serving(session) as address, raw_client(address) as raw:
        await wait_all_tasks_blocked(SETTLE_S)
        trio.lowlevel.add_instrument(counts := Counts())
        for count in range(1, PIECES + 1):
            await raw.stream.send_all(piece)
            while len(session.taken) < count:
                await checkpoint()
        trio.lowlevel.remove_instrument(counts)
    ours = {name: count for name, count in steps.items() if not name.startswith("anyio.")}
    assert ours == {"trio_websocket._impl.WebSocketConnection._reader_task": PIECES}


async def test_small_messages_of_one_read_are_taken_together() -> None:
    """A busy core spends on each of fifty pieces a second what one second costs."""
    session = Session()
    async with serving(session) as address, raw_client(address) as raw:
        await wait_all_tasks_blocked(SETTLE_S)
        pieces, late = raw_frame(TEXT, b"piece") * 6, raw_frame(TEXT, b"late")
        await raw.stream.send_all(pieces + raw_frame(TEXT, LARGER) + late[:-1])
        await wait_all_tasks_blocked(SETTLE_S)
        await raw.stream.send_all(late[-1:])
        await wait_all_tasks_blocked(SETTLE_S)
        assert session.together == [6, 1, 1]
        assert session.taken == ["piece"] * 6 + [LARGER.decode(), "late"]
        await raw.stream.send_all(raw_frame(TEXT, b"x") * (2 * int(MESSAGES_A_READ)))
        await wait_all_tasks_blocked(SETTLE_S)
        assert max(session.together) == MESSAGES_A_READ


@pytest.mark.parametrize("frame", [raw_frame(TEXT, b"bad"), raw_frame(BINARY, b"bad")])
async def test_what_breaks_at_a_message_is_raised(frame: bytes) -> None:
    """A bug in a session leaves its connection open and unread, without a trace."""

    def waits_for(message: Frame) -> None:
        if plain(message) in ("bad", b"bad"):
            raise ValueError("a bug")

    session = Session(waits_for)
    async with serving(session) as address, raw_client(address) as raw:
        await raw.stream.send_all(raw_frame(TEXT, b"good") + frame + raw_frame(TEXT, b"late"))
        await session.done.wait()
    assert isinstance(session.failure, ValueError)
    assert len(session.taken) == 2


async def test_what_breaks_while_it_waits_is_raised() -> None:
    """As above, where the session had to wait."""

    async def fails() -> None:
        await checkpoint()
        raise ValueError("a bug")

    session = Session(lambda _: fails())
    async with serving(session) as address, raw_client(address) as raw:
        await raw.stream.send_all(raw_frame(TEXT, b"one") + raw_frame(TEXT, LARGER))
        await session.done.wait()
    assert isinstance(session.failure, ValueError)
    assert len(session.taken) == 1


async def test_a_close_of_ours_does_not_wait_for_a_session_that_holds_the_reader() -> None:
    """A session that is over keeps its connection for two seconds more."""
    session = Session(lambda _: for_ever())
    async with serving(session) as address, raw_client(address) as raw:
        await raw.stream.send_all(raw_frame(TEXT, b"one") + raw_frame(TEXT, LARGER))
        await wait_all_tasks_blocked(SETTLE_S)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.websocket.close, 1000, "over")
            await wait_all_tasks_blocked(SETTLE_S)
            await raw.stream.send_all(raw_frame(CLOSE, (1000).to_bytes(2, "big")))
            with suppress(trio.BrokenResourceError):
                while await raw.stream.receive_some(4096):
                    pass
        await session.done.wait()
        assert trio.current_time() - began < 1
    assert session.taken == ["one"]


async def test_who_stops_listening_gives_up_the_message_under_way() -> None:
    """A message is worked on for a connection that is gone."""
    ended: list[str] = []

    async def held() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("given up")

    session = Session(lambda _: held())
    scope = trio.CancelScope()

    async def cancelled(request: WebSocketRequest) -> None:
        with scope:
            await session(request)

    async with serving(cancelled) as address, raw_client(address) as raw:
        await raw.stream.send_all(raw_frame(TEXT, b"one"))
        await wait_all_tasks_blocked(SETTLE_S)
        scope.cancel()
        await session.done.wait()
        await wait_all_tasks_blocked(SETTLE_S)
        assert ended == ["given up"]


async def test_bytes_that_are_no_text_end_it_with_1007() -> None:
    """A client's noise reaches the session as text, or its end is not said."""
    session = Session()
    async with serving(session) as address, raw_client(address) as raw:
        await raw.stream.send_all(raw_frame(TEXT, b"good") + raw_frame(TEXT, b"\xff\xfe"))
        data = b""
        with suppress(trio.BrokenResourceError):
            while more := await raw.stream.receive_some(4096):
                data += more
        await session.done.wait()
    assert data[:4] == bytes([0x80 | CLOSE, len(data) - 2]) + (1007).to_bytes(2, "big")
    assert session.taken == ["good"]


@pytest.mark.parametrize(
    "wrong",
    [
        [raw_frame(TEXT, b"", fin=False), raw_frame(TEXT, b"late")],
        [raw_frame(TEXT, b"", fin=False) + raw_frame(PING, b""), raw_frame(TEXT, b"late")],
        [b"\x81\xfe\x00\x04\x00\x00\x00\x00late"],
        [b"\x81\xff" + bytes(6) + b"\x00\xc8" + bytes(4) + b"l" * 200],
    ],
)
async def test_text_that_the_rfc_forbids_ends_it_with_1002(wrong: list[bytes]) -> None:
    """What the codec refuses reaches the session, if it looks like a whole message."""
    session = Session()
    async with serving(session) as address, raw_client(address) as raw:
        for piece in [raw_frame(TEXT, b"good"), *wrong, raw_frame(TEXT, b"late")]:
            with suppress(trio.BrokenResourceError):
                await raw.stream.send_all(piece)
            await wait_all_tasks_blocked(SETTLE_S)
        await session.done.wait()
    assert session.taken == ["good"]
    assert session.code == 1002


async def test_a_message_above_the_limit_comes_shortened_in_its_place() -> None:
    """A client hears nothing of its mistake, or of one that came later first."""
    session = Session()
    async with serving(session) as address, raw_client(address) as raw:
        small, large = raw_frame(TEXT, b"one"), raw_frame(TEXT, b"x" * (MESSAGE_MAX + 1))
        await raw.stream.send_all(small + large + small)
        await wait_all_tasks_blocked(SETTLE_S)
        first, taken = session.taken
        assert (first, isinstance(taken, Shortened)) == ("one", True)
        assert taken.size_bytes == MESSAGE_MAX + 1
