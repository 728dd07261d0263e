"""What the codec gets, and when: a client in memory, on virtual time."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import trio
import trio.testing

from runtime.net.limits import (
    BURST_S,
    LARGE_BYTES_MIN,
    LARGE_WAIT_S,
    RECEIVING_BYTES_MAX,
    SMALL_WAIT_S,
    Budget,
    Counters,
    PartyRates,
    Share,
)
from runtime.net.link import Link, TcpStream
from runtime.net.websocket import FrameScanner, Intake
from tests.network.transport import CLOSE, CONTINUATION, PING, TEXT, limits, raw_frame
from tests.sessions.in_memory import on_virtual_time

MESSAGE_MAX = 24 << 20
ALLOWED = limits()


class _Wire:
    """A connection in memory, whose reader is woken by every byte."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self.receive_some = stream.receive_some

    def expect(self, count: int) -> None:
        """Be told how much is missing."""
        assert count >= 1


class Client:
    """Both ends of one connection: the test sends, and drains the intake as the codec does.

    Attributes:
        passed: each piece that passed, with the time.
    """

    def __init__(self, budget: Budget, message_bytes_max: int = MESSAGE_MAX) -> None:
        self.ours, theirs = trio.testing.memory_stream_pair()
        self.counters = Counters()
        self.too_big: list[int] = []
        self.passed: list[tuple[float, bytes]] = []
        self.share = Share(budget)
        self.intake = Intake(
            Link(cast(TcpStream, _Wire(theirs)), self.counters),
            head=b"",
            rate=PartyRates(ALLOWED).of("", message_bytes_max, trio.current_time()),
            message_bytes_max=message_bytes_max,
            share=self.share,
            counters=self.counters,
            on_too_big=lambda *_: self.too_big.append(self.intake.scanner.finished),
            last_words=bytes,
        )
        self.intake.open()

    async def drain(self) -> None:
        """Read to the end, and each message as it comes in."""
        read = 0
        while data := await self.intake.receive_some(262_144):
            self.passed.append((trio.current_time(), data))
            while read < self.intake.scanner.finished:
                self.share.release(read)
                read += 1
        self.share.close()

    @property
    def bytes_passed(self) -> int:
        return sum(len(data) for _, data in self.passed)


def large_frame(size: int) -> bytes:
    """Write a frame whose mask changes nothing."""
    return struct.pack("!BBQ", 0x81, 0xFF, size) + bytes(4 + size)


def played(body: Callable[[Client], Awaitable[None]]) -> Client:
    """Let a client say what `body` sends, and then leave."""
    made: list[Client] = []

    async def run() -> None:
        client = Client(Budget(RECEIVING_BYTES_MAX, Counters()))
        made.append(client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.drain)
            await body(client)
            await client.ours.aclose()

    on_virtual_time(run)
    return made[0]


def messages_by(client: Client, time_s: float) -> int:
    """Count the messages that had begun to pass by a time."""
    data = b"".join(data for at, data in client.passed if at <= time_s)
    return round(FrameScanner(1 << 40).run(data, 0, 1e9).cost)


def test_a_client_in_real_time_is_never_held_up() -> None:
    """Sound would come late to the model that was sent on time."""

    async def talk(client: Client) -> None:
        sound, picture = raw_frame(TEXT, b"s" * 1_800), raw_frame(TEXT, b"p" * 60_000)
        for i in range(60 * 50):
            await client.ours.send_all(sound)
            if i % 12 == 0:
                await client.ours.send_all(picture)
            await trio.sleep(0.02)

    client = played(talk)
    assert client.counters.pauses == 0
    assert client.intake.scanner.finished == 60 * 50 + 250
    assert all(abs(at * 50 - round(at * 50)) < 1e-6 for at, _ in client.passed)


def test_a_flood_is_held_to_the_rate() -> None:
    """One client that sends as fast as it can would take the time of all others."""

    async def flood(client: Client) -> None:
        await client.ours.send_all(raw_frame(TEXT, b"{}") * 5_000)

    client = played(flood)
    per_s = ALLOWED.messages_per_s_max
    assert client.intake.scanner.finished == 5_000
    for time_s in (0, 1, 5, 20):
        expected = per_s * (BURST_S + time_s)
        assert expected - 8 <= messages_by(client, time_s) <= expected + 1


def test_a_flood_that_passes_by_the_codec_is_held_to_the_rate() -> None:
    """The way past the codec would be a way past the limit."""
    times: list[float] = []

    async def flood(client: Client) -> None:
        def take(messages: Sequence[str]) -> None:
            times.extend([trio.current_time()] * len(messages))
            client.intake.seen += len(messages)

        client.intake.take = take
        await client.ours.send_all(raw_frame(TEXT, b"{}") * 5_000)

    client = played(flood)
    per_s = ALLOWED.messages_per_s_max
    assert (len(times), client.bytes_passed) == (5_000, 0)
    assert client.counters.pauses > 0
    for time_s in (0, 1, 5, 20):
        expected = per_s * (BURST_S + time_s)
        assert expected - 8 <= sum(at <= time_s for at in times) <= expected + 1


def test_a_flood_of_bytes_is_held_to_the_rate() -> None:
    """One client on the server's own network would fill its memory and its disk."""

    async def flood(client: Client) -> None:
        frame = large_frame(1_000_000)
        for _ in range(100):
            await client.ours.send_all(frame)

    client = played(flood)
    per_s = ALLOWED.bytes_per_s_max
    for time_s in (0, 1, 2, 3):
        got = sum(len(data) for at, data in client.passed if at <= time_s)
        assert got <= per_s * (BURST_S + time_s) + 1_100_000
    assert client.intake.scanner.finished == 100


def test_a_flood_of_fragments_or_pings_is_held_to_the_rate() -> None:
    """The limit could be walked around with what is no message of its own."""

    async def fragments(client: Client) -> None:
        await client.ours.send_all(raw_frame(TEXT, b"x", fin=False))
        await client.ours.send_all(raw_frame(CONTINUATION, b"x", fin=False) * 20_000)

    async def pings(client: Client) -> None:
        await client.ours.send_all(raw_frame(PING, b"?") * 5_000)

    per_s = ALLOWED.messages_per_s_max
    assert messages_by(played(fragments), 1) <= per_s * (BURST_S + 1) + 1
    assert messages_by(played(pings), 1) <= per_s * (BURST_S + 1) + 1


def test_what_follows_a_burst_is_not_held_up_for_long() -> None:
    """A close behind a few seconds of sound at once would be seen after the session is over."""

    async def burst(client: Client) -> None:
        await client.ours.send_all(raw_frame(TEXT, b"x") * 700)

    client = played(burst)
    assert client.passed[-1][0] <= 0.6
    assert client.counters.pauses > 0


def test_a_message_that_is_too_big_is_told_after_those_before_it() -> None:
    """The session would end for a message while better ones before it are unread."""

    async def say(client: Client) -> None:
        await client.ours.send_all(raw_frame(TEXT, b"good") * 3)
        await client.ours.send_all(large_frame(MESSAGE_MAX + 1)[:100])

    client = played(say)
    assert client.too_big == [3]
    assert client.bytes_passed == 3 * len(raw_frame(TEXT, b"good"))


def test_a_close_right_behind_a_message_that_is_too_big_passes() -> None:
    """Our own close would not be answered, and its client waited for."""

    async def run() -> None:
        client = Client(Budget(1, Counters()), message_bytes_max=100)
        close = raw_frame(CLOSE, b"\x03\xf1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.drain)
            await client.ours.send_all(raw_frame(TEXT, b"x" * 101) + close)
            await trio.testing.wait_all_tasks_blocked()
            assert [data for _, data in client.passed] == [close]
            await client.ours.aclose()

    on_virtual_time(run)


def test_large_messages_share_their_room_and_all_come_in() -> None:
    """Twenty clients with a large video each would take the server's memory at once."""

    async def run() -> None:
        counters = Counters()
        room = Budget(4 * LARGE_BYTES_MIN, counters)
        clients, held = [Client(room) for _ in range(12)], [0]

        async def send(client: Client) -> None:
            frame = large_frame(3 * LARGE_BYTES_MIN)
            for start in range(0, len(frame), 500_000):
                await client.ours.send_all(frame[start : start + 500_000])
                await trio.sleep(0.1)
                held.append(counters.receiving_bytes)
            await client.ours.aclose()

        with trio.fail_after(LARGE_WAIT_S):
            async with trio.open_nursery() as nursery:
                for client in clients:
                    nursery.start_soon(client.drain)
                    nursery.start_soon(send, client)
        assert [client.intake.scanner.finished for client in clients] == [1] * 12
        assert 3 * LARGE_BYTES_MIN < max(held) <= 7 * LARGE_BYTES_MIN
        assert counters.receiving_bytes == 0

    on_virtual_time(run)


def test_room_comes_back_when_a_message_was_read() -> None:
    """A connection would take room with each large message, until there is none for anybody."""

    async def run() -> None:
        counters = Counters()
        client = Client(Budget(4 * LARGE_BYTES_MIN, counters))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.drain)
            for _ in range(5):
                frame = large_frame(3 * LARGE_BYTES_MIN)
                await client.ours.send_all(frame[:-1])
                await trio.sleep(1)
                assert counters.receiving_bytes >= 2 * LARGE_BYTES_MIN
                await client.ours.send_all(frame[-1:])
                await trio.sleep(1)
                assert counters.receiving_bytes == 0
            await client.ours.aclose()
        assert client.intake.scanner.finished == 5

    on_virtual_time(run)


def test_small_messages_wait_for_no_video() -> None:
    """Calls would wait for another client's video."""

    async def run() -> None:
        room = Budget(4 * LARGE_BYTES_MIN, Counters())
        blocker = Share(room)
        await blocker.hold(8 * LARGE_BYTES_MIN)
        client = Client(room)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.drain)
            for _ in range(5):
                await client.ours.send_all(large_frame(LARGE_BYTES_MIN))
            await client.ours.aclose()
        assert client.intake.scanner.finished == 5

    on_virtual_time(run)


def test_unfinished_small_messages_are_counted_and_bounded() -> None:
    """Hundreds of clients that send most of a megabyte and stop would take the memory of all."""

    async def run() -> None:
        counters = Counters()
        room = Budget(8 * LARGE_BYTES_MIN, counters)
        clients = [Client(room) for _ in range(40)]
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.drain)
                nursery.start_soon(client.ours.send_all, large_frame(LARGE_BYTES_MIN)[:-1])
            await trio.sleep(1)
            assert 4 * LARGE_BYTES_MIN < counters.receiving_bytes <= 16 * LARGE_BYTES_MIN
            assert room.laggards(trio.current_time()) == ()
            await trio.sleep(SMALL_WAIT_S)
            stopped = room.laggards(trio.current_time())
            assert stopped, "those that stopped keep others waiting"
            for share in stopped:
                share.close()
            await trio.testing.wait_all_tasks_blocked()
            assert counters.receiving_bytes <= 16 * LARGE_BYTES_MIN
            nursery.cancel_scope.cancel()
        for client in clients:
            client.share.close()
        assert counters.receiving_bytes == 0

    on_virtual_time(run)
