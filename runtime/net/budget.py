"""Room for incoming messages, shared by all connections of a listener.

- A connection reserves the bytes of its message in progress; without room its reading pauses, and
  TCP slows the sender. A message keeps its room until its reader asks for the next one.
- A message within its share, the room divided by the messages in progress, always gets room: a
  second of sound waits for no video. So does the oldest incomplete one once no complete one is
  unread: none waits for ever. That exceeds the room by as much again, and one message, at most.
- While others wait, the oldest has `LARGE_WAIT_S` to complete, and each small one `SMALL_WAIT_S`;
  then its connection is dropped.
"""

from __future__ import annotations

from typing import Final

import anyio
import anyio.lowlevel

from .counters import Counters
from .limits import LARGE_MESSAGE_BYTES

LARGE_WAIT_S: Final = 120.0
"""The largest message over a home's uplink, 6 Mbit/s."""
SMALL_WAIT_S: Final = 10.0
"""A megabyte over an uplink of 1 Mbit/s; later it is of no use to a call."""


class Budget:
    """The room of `bytes_max`; `counters.receiving_bytes` is kept here."""

    def __init__(self, bytes_max: int, counters: Counters) -> None:
        self._bytes_max = bytes_max
        self._counters = counters
        self._in_progress: dict[Share, None] = {}
        self._unread_bytes = 0
        self._freed = anyio.Event()
        self._waiting: dict[Share, None] = {}

    @property
    def is_tight(self) -> bool:
        """More than half of the room is taken, what waits for it apart: read little at a time."""
        return self._counters.receiving_bytes > self._bytes_max // 2

    def laggards(self, now_s: float) -> tuple[Share, ...]:
        """The shares whose messages keep others waiting and have had their time."""
        if not self._waiting:
            return ()
        eldest = next(iter(self._in_progress))
        return tuple(
            share
            for share in self._in_progress
            if share not in self._waiting and share.is_overdue(now_s, is_eldest=share is eldest)
        )

    # -- for `Share` ----------------------------------------------------------------------------

    async def take(self, share: Share, size_bytes: int) -> None:
        """Wait for room and take it, in the order in which messages began."""
        if share not in self._in_progress:
            self._in_progress[share] = None
            share.since_s = anyio.current_time()
        if self._fits(share, size_bytes):
            self._counters.receiving_bytes += size_bytes
            return
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
        if share.held_bytes + size_bytes <= self._bytes_max // len(self._in_progress):
            return True
        return not self._unread_bytes and next(iter(self._in_progress)) is share

    def finish(self, share: Share, size_bytes: int) -> None:
        """A message of so many bytes is complete, and is to be read."""
        del self._in_progress[share]
        self._unread_bytes += size_bytes
        self._wake()

    def free(self, unread_bytes: int) -> None:
        """Free the room of messages that were read, or will not be."""
        self._counters.receiving_bytes -= unread_bytes
        self._unread_bytes -= unread_bytes
        self._wake()

    def give_up(self, share: Share, held_bytes: int) -> None:
        """Free the room of an incomplete message, if there is one."""
        self._counters.receiving_bytes -= held_bytes
        self._in_progress.pop(share, None)
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._freed.set()
            self._freed = anyio.Event()


class Share:
    """What one connection holds of a budget.

    `since_s` is when its message in progress began to take room, `held_bytes` are of that message.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.held_bytes = 0
        self._unread: dict[int, int] = {}
        self.since_s = 0.0

    def is_overdue(self, now_s: float, *, is_eldest: bool) -> bool:
        """Whether its message in progress has had its time; among large ones only the eldest's."""
        if self.held_bytes > LARGE_MESSAGE_BYTES:
            return is_eldest and now_s - self.since_s >= LARGE_WAIT_S
        return now_s - self.since_s >= SMALL_WAIT_S

    async def hold(self, size_bytes: int) -> None:
        """Wait until there is room for the message in progress, `size_bytes` of which are here."""
        more = size_bytes - self.held_bytes
        if more > 0:
            await self.budget.take(self, more)
            self.held_bytes += more

    def finish(self, number: int) -> None:
        """The message in progress, the `number`-th, is complete."""
        if self.held_bytes:
            self._unread[number] = self.held_bytes
            self.budget.finish(self, self.held_bytes)
            self.held_bytes = 0

    def release(self, number: int) -> None:
        """Free the `number`-th message's room: it was read, and the next is asked for."""
        if self._unread:
            unread_bytes = self._unread.pop(number, 0)
            if unread_bytes:
                self.budget.free(unread_bytes)

    def close(self) -> None:
        """Free everything: the connection is over, and `hold` is not called any more."""
        self.budget.free(sum(self._unread.values()))
        self.budget.give_up(self, self.held_bytes)
        self._unread.clear()
        self.held_bytes = 0
