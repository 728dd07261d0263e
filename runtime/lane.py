"""The lane of large messages: those of all sessions pass one after the other, at a bounded rate.

The event loop reads a message in one go: 5 ms and more for each megabyte, in which no other session
is served. So between two large messages there is time for all others, however many clients send
them. A session has one message in the lane at a time, and they pass in the order in which they
came: sessions take turns. Realtime messages are not large, and never wait here.

It knows no sessions, and looks into no message.
"""

from __future__ import annotations

from typing import Final

import anyio

LARGE_BYTES_MIN: Final = 1 << 20
"""A second of sound with its pictures is less."""
BYTES_PER_S_MAX: Final = 32 << 20
"""A fifth of a core: what two sessions may send by their own rate (`bytes_per_s_max`)."""


class Lane:
    """The lane of one server."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._free_at_s = 0.0

    async def enter(self, size_bytes: int) -> None:
        """Wait until a message may be taken; one that is not large may be at once."""
        if size_bytes <= LARGE_BYTES_MIN:
            return
        async with self._turn:
            now_s = anyio.current_time()
            if now_s < self._free_at_s:
                await anyio.sleep_until(self._free_at_s)
            self._free_at_s = max(now_s, self._free_at_s) + size_bytes / BYTES_PER_S_MAX
