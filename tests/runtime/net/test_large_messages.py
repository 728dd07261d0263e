"""The limiter of large messages, on virtual time."""

from __future__ import annotations

import anyio

from runtime.net.limits import BYTES_PER_S_MAX, LARGE_BYTES_MIN, LargeMessageLimiter
from tests.sessions.in_memory import on_virtual_time

MESSAGE = BYTES_PER_S_MAX // 2
"""Half a second's worth."""


def test_large_messages_pass_at_the_rate_and_in_turn() -> None:
    """Clients that send 20 MB over and over would keep the event loop from all others."""

    async def body() -> None:
        limiter, passed = LargeMessageLimiter(), list[tuple[float, int]]()

        async def client(number: int) -> None:
            for _ in range(3):
                await limiter.wait(MESSAGE)
                passed.append((anyio.current_time(), number))

        began_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(client, number)
        assert [at - began_s for at, _ in passed] == [n / 2 for n in range(12)]
        numbers = [number for _, number in passed]
        assert all(set(numbers[at : at + 4]) == {0, 1, 2, 3} for at in (0, 4, 8))

    on_virtual_time(body)


def test_realtime_messages_never_wait() -> None:
    """Calls would stutter behind another client's video."""

    async def body() -> None:
        limiter = LargeMessageLimiter()
        await limiter.wait(10 * BYTES_PER_S_MAX)
        began_s = anyio.current_time()
        await limiter.wait(LARGE_BYTES_MIN)
        await limiter.wait(0)
        assert anyio.current_time() == began_s

    on_virtual_time(body)


def test_who_leaves_while_it_waits_holds_nobody_up() -> None:
    """A client that is gone would keep the limiter for ever."""

    async def body() -> None:
        limiter = LargeMessageLimiter()
        await limiter.wait(MESSAGE)
        began_s = anyio.current_time()
        with anyio.move_on_after(0.1):
            await limiter.wait(MESSAGE)
        await limiter.wait(MESSAGE)
        assert anyio.current_time() - began_s == 0.5

    on_virtual_time(body)
