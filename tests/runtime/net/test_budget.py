"""Room for large messages: on virtual time, with connections of many characters."""

from __future__ import annotations

import random

import anyio
import pytest

from runtime.net.budget import LARGE_WAIT_S, Budget, Share
from runtime.net.counters import Counters
from tests.sessions.in_memory import on_virtual_time

ROOM = 100
MESSAGE_MAX = 60
PIECE = 5


async def receive_one(share: Share, number: int, size: int, piece_s: float) -> None:
    """Let one message come in, piece by piece."""
    for come in range(PIECE, size + 1, PIECE):
        await share.hold(come)
        await anyio.sleep(piece_s)
    share.finish(number)


@pytest.mark.parametrize("seed", range(20))
def test_every_message_comes_in_and_the_room_is_kept(seed: int) -> None:
    """Twenty clients with a video each would take the server's memory, or wait for ever."""

    async def body() -> None:
        chance, counters = random.Random(seed), Counters()
        budget, come_in = Budget(ROOM, counters), 0

        async def connection() -> None:
            nonlocal come_in
            share = Share(budget)
            for number in range(3):
                await anyio.sleep(chance.random() * 20)
                size = chance.randrange(PIECE, MESSAGE_MAX + 1, PIECE)
                await receive_one(share, number, size, chance.random())
                come_in += 1
                assert counters.receiving_bytes <= 2 * ROOM + MESSAGE_MAX
                await anyio.sleep(chance.random() * 2)
                share.release(number)
            share.close()

        with anyio.fail_after(3600):
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(connection)
        assert come_in == 60
        assert counters.receiving_bytes == 0

    on_virtual_time(body, seed=seed)


def test_room_is_given_in_the_order_in_which_messages_began() -> None:
    """A client could be overtaken for ever by others that are faster."""

    async def body() -> None:
        budget, order = Budget(ROOM, Counters()), []

        async def connection(name: int) -> None:
            await anyio.sleep(name)
            share = Share(budget)
            await receive_one(share, 0, MESSAGE_MAX, 10.0)
            order.append(name)
            share.release(0)
            share.close()

        async with anyio.create_task_group() as tasks:
            for name in range(6):
                tasks.start_soon(connection, name)
        assert order == sorted(order)

    on_virtual_time(body)


def test_whole_messages_that_are_unread_let_nobody_exceed_the_room() -> None:
    """Each connection in turn would be the eldest, and exceed it by a message of its own."""

    async def body() -> None:
        counters = Counters()
        budget = Budget(ROOM, counters)
        shares = [Share(budget) for _ in range(5)]
        async with anyio.create_task_group() as tasks:
            for share in shares:
                tasks.start_soon(receive_one, share, 0, MESSAGE_MAX, 1.0)
            await anyio.sleep(1000)
            assert counters.receiving_bytes <= 2 * ROOM + MESSAGE_MAX
            for _ in range(10):
                for share in shares:
                    share.release(0)
                await anyio.sleep(100)
        assert counters.receiving_bytes == 0

    on_virtual_time(body)


def test_only_a_slow_message_that_others_wait_for_is_a_laggard() -> None:
    """A patient client would be cut off for nothing; or one that trickles would stop all others."""

    async def body() -> None:
        budget = Budget(ROOM, Counters())
        slow, next_ = Share(budget), Share(budget)
        await slow.hold(ROOM)
        await anyio.sleep(10 * LARGE_WAIT_S)
        assert budget.laggards(anyio.current_time()) == ()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(next_.hold, ROOM)
            await anyio.sleep(1)
            assert budget.laggards(anyio.current_time()) == (slow,)
            slow.close()
        assert budget.laggards(anyio.current_time()) == ()

    on_virtual_time(body)


def test_who_gives_up_while_waiting_leaves_nothing_behind() -> None:
    """A client that leaves while it waits would be the eldest for ever."""

    async def body() -> None:
        counters = Counters()
        budget = Budget(ROOM, counters)
        first, gone, last = Share(budget), Share(budget), Share(budget)
        await first.hold(ROOM)
        with anyio.move_on_after(1):
            await gone.hold(PIECE)
        gone.close()
        first.close()
        await last.hold(2 * ROOM)
        last.close()
        assert counters.receiving_bytes == 0

    on_virtual_time(body)
