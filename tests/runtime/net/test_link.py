"""A connection's bytes over a pair of sockets: order, ends, and what its peer has taken."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from runtime.net.limits import Counters
from runtime.net.link import Link, TcpStream

SIZE = 3_000_000
"""More than the kernel takes for a peer that does not read."""


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


pytestmark = pytest.mark.anyio


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, trio.SocketStream, Counters]]:
    """Make a link, and its peer's end."""
    listener, counters = trio.socket.socket(), Counters()
    await listener.bind(("127.0.0.1", 0))
    listener.listen()
    peer = await trio.open_tcp_stream(*listener.getsockname())
    accepted, _ = await listener.accept()
    listener.close()
    link = Link(TcpStream(trio.SocketStream(accepted)), counters, "127.0.0.1")
    async with peer:
        yield link, peer, counters
        link.abort()


async def test_those_who_send_at_once_do_so_one_after_the_other() -> None:
    """A frame would have another amid it, or come behind the close that was said after it."""
    got = bytearray()
    async with linked() as (link, peer, _):
        async with trio.open_nursery() as nursery:
            for letter in b"abcde":
                nursery.start_soon(link.send_all, bytes([letter]) * SIZE)
                await wait_all_tasks_blocked()
            while len(got) < 5 * SIZE:
                got += await peer.receive_some(1 << 20)
        assert not link.is_sending
    assert bytes(got) == b"".join(bytes([letter]) * SIZE for letter in b"abcde")


async def test_who_gives_up_waiting_to_send_holds_nobody_up() -> None:
    """A ping that is not wanted any more would be the last thing that a connection sends."""
    async with linked() as (link, peer, _), trio.open_nursery() as nursery:
        nursery.start_soon(link.send_all, b"a" * SIZE)
        await wait_all_tasks_blocked()
        given_up = trio.CancelScope()
        with given_up:
            nursery.start_soon(link.send_all, b"c" * SIZE)
            given_up.cancel()
            await link.send_all(b"b" * SIZE)
        assert given_up.cancelled_caught
        got = bytearray()
        while len(got) < 2 * SIZE:
            got += await peer.receive_some(1 << 20)
    assert bytes(got) == b"a" * SIZE + b"c" * SIZE


async def test_what_was_put_back_is_read_first() -> None:
    """The first message of an eager client would be lost behind its request."""
    async with linked() as (link, peer, _):
        link.put_back(b"later")
        link.put_back(b"first, ")
        await peer.send_all(b", last")
        got = b""
        while len(got) < len(b"first, later, last"):
            got += await link.receive_some(3)
    assert got == b"first, later, last"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems wake a reader for any byte")
async def test_a_reader_is_woken_for_what_it_lacks_or_for_the_end() -> None:
    """A message that arrives slowly would cost a wakeup a packet, or its end never be read."""
    heard: list[int] = []

    async def read(link: Link) -> None:
        while data := await link.receive_some(1 << 20):
            heard.append(len(data))
            link.expect(3_000)

    async with linked() as (link, peer, _):
        link.expect(5_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, link)
            await wait_all_tasks_blocked()
            before = link.tcp.received_marker
            for _ in range(4):
                await peer.send_all(bytes(1_000))
                await wait_all_tasks_blocked(0.01)
            assert heard == []
            assert link.tcp.received_marker != before
            await peer.send_all(bytes(1_000))
            while not heard:
                await trio.lowlevel.checkpoint()
            await peer.send_all(bytes(7))
            await wait_all_tasks_blocked(0.01)
            assert heard == [5_000]
            await peer.send_eof()
    assert heard == [5_000, 7]


async def test_what_the_peer_took_is_what_it_read_and_its_kernel() -> None:
    """A peer that reads nothing would seem to take megabytes, and one that reads to stand still."""
    async with linked() as (link, peer, _), trio.open_nursery() as nursery:
        assert link.tcp.progress() == (False, 0)
        nursery.start_soon(link.send_all, bytes(SIZE))
        await wait_all_tasks_blocked(0.3)
        is_owed, taken = link.tcp.progress()
        assert is_owed
        assert taken < SIZE
        got = 0
        while got < SIZE:
            got += len(await peer.receive_some(1 << 20))
        while link.tcp.progress() != (False, SIZE):  # noqa: ASYNC110 - the kernel tells nobody
            await trio.sleep(0.01)


async def test_what_only_the_kernel_has_is_owed() -> None:
    """A session that says little would not be seen to stand still until its buffers are full."""
    async with linked() as (link, _, _counters):
        with trio.move_on_after(0.2):
            await link.send_all(bytes(SIZE))
        is_owed, taken = link.tcp.progress()
        assert is_owed
        assert taken < link.tcp._handed_bytes


async def test_a_drop_is_counted_once_and_wakes_who_sends_and_who_reads() -> None:
    """A task would wait for a peer that was given up, and be counted with each attempt."""
    woken = []

    async def wait_for(call: object) -> None:
        with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
            await call  # type: ignore[misc]
        woken.append(call)

    async with linked() as (link, _, counters):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, link.send_all(bytes(SIZE)))
            nursery.start_soon(wait_for, link.receive_some(10))
            await wait_all_tasks_blocked()
            link.drop("stalled")
            link.drop("silent")
        assert link.tcp.progress()[0] is False
        assert link.tcp.peer_has_left()
    assert counters.dropped == {"stalled": 1}
    assert len(woken) == 2


async def test_a_drop_wakes_who_is_held() -> None:
    """A client that was given up would be read on, at its rate, out of what is here already."""
    async with linked() as (link, _, _counters), trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError), link.holding():
                await trio.sleep_forever()

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert link.is_held
        link.drop("left")
        await wait_all_tasks_blocked()
        assert not link.is_held
        await wait()


async def test_the_peers_end_is_seen_behind_what_is_unread() -> None:
    """A client that left would be waited for as long as its last words are not read."""
    async with linked() as (link, peer, _):
        await peer.send_all(b"last words")
        assert not link.tcp.peer_has_left()
        await peer.send_eof()
        while not link.tcp.peer_has_left():  # noqa: ASYNC110
            await trio.sleep(0.001)
        assert await link.receive_some(100) == b"last words"
        assert await link.receive_some(100) == b""
