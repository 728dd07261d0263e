"""Room for large messages on their way in, shared by all connections of a listener.

A connection holds the bytes of its message in progress here; where there is no room its reading
pauses, and TCP slows the sender.

- A message keeps its room until whoever reads it comes for the next one.
- The eldest that has not come in whole always gets room once none is left that has and is unread:
  so one of them ends, and none waits for ever. The budget is exceeded by one message at most.
- While others wait, the eldest has `LARGE_WAIT_S` to come in whole; then it is to be dropped.
  While nobody waits, it may take as long as it likes.

It knows bytes and no sockets; the times are the event loop's.
"""

from __future__ import annotations

from typing import Final

import anyio
import anyio.lowlevel

from .counters import Counters

LARGE_WAIT_S: Final = 120.0
"""For the largest message over a home's uplink, 6 Mbit/s."""


class Budget:
    """The room.

    Args:
        bytes_max: of it.
        counters: `receiving_bytes` is kept there.
    """

    def __init__(self, bytes_max: int, counters: Counters) -> None:
        self._bytes_max = bytes_max
        self._counters = counters
        self._in_progress: dict[Share, None] = {}
        self._unread_bytes = 0
        self._freed = anyio.Event()
        self._waiting: dict[Share, None] = {}

    def laggard(self, now_s: float) -> Share | None:
        """Say whose message keeps others waiting and has had its time; None: nobody's."""
        eldest = next(iter(self._in_progress), None)
        others_wait = any(share is not eldest for share in self._waiting)
        if eldest is None or not others_wait or eldest in self._waiting:
            return None
        return eldest if now_s - eldest.since_s >= LARGE_WAIT_S else None

    # -- for `Share` ----------------------------------------------------------------------------

    async def take(self, share: Share, size_bytes: int) -> None:
        """Wait for room and take it, in the order in which messages began."""
        if share not in self._in_progress:
            self._in_progress[share] = None
            share.since_s = anyio.current_time()
        self._waiting[share] = None
        try:
            while not self._fits(share, size_bytes):
                freed = self._freed
                await freed.wait()
        finally:
            del self._waiting[share]
        self._counters.receiving_bytes += size_bytes

    def _fits(self, share: Share, size_bytes: int) -> bool:
        if self._counters.receiving_bytes + size_bytes <= self._bytes_max:
            return True
        return not self._unread_bytes and next(iter(self._in_progress)) is share

    def finish(self, share: Share, size_bytes: int) -> None:
        """Note that a message of so many bytes has come in whole, and is to be read."""
        del self._in_progress[share]
        self._unread_bytes += size_bytes
        self._wake()

    def free(self, unread_bytes: int) -> None:
        """Take back the room of messages that were read, or will not be."""
        self._counters.receiving_bytes -= unread_bytes
        self._unread_bytes -= unread_bytes
        self._wake()

    def give_up(self, share: Share, held_bytes: int) -> None:
        """Take back the room of a message that will not come in whole, if there is one."""
        self._counters.receiving_bytes -= held_bytes
        self._in_progress.pop(share, None)
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._freed.set()
            self._freed = anyio.Event()


class Share:
    """What one connection holds of a budget.

    Args:
        budget: the room.

    Attributes:
        since_s: when its message in progress began to take room.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self._unread: dict[int, int] = {}
        self.since_s = 0.0

    async def hold(self, size_bytes: int) -> None:
        """Wait until there is room for the message in progress, `size_bytes` of which are here."""
        more = size_bytes - self._held_bytes
        if more > 0:
            await self._budget.take(self, more)
            self._held_bytes += more

    def finish(self, number: int) -> None:
        """Note that the message in progress, the `number`-th, has come in whole."""
        if self._held_bytes:
            self._unread[number] = self._held_bytes
            self._budget.finish(self, self._held_bytes)
            self._held_bytes = 0

    def release(self, number: int) -> None:
        """Give back what the `number`-th message held: it was read, and the next is asked for."""
        if self._unread:
            unread_bytes = self._unread.pop(number, 0)
            if unread_bytes:
                self._budget.free(unread_bytes)

    def close(self) -> None:
        """Give everything back: the connection is over, and `hold` is not called any more."""
        self._budget.free(sum(self._unread.values()))
        self._budget.give_up(self, self._held_bytes)
        self._unread.clear()
        self._held_bytes = 0
