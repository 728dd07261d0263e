"""The rate limiter of large messages: one at a time over all sessions, at a bounded rate.

The event loop reads a message in one go: 5 ms or more for each megabyte, in which no other session
is served. The limiter leaves time for the others. One message of a session waits at a time, and
they pass in order of arrival. Realtime messages are not large and never wait here.
"""

from __future__ import annotations

from typing import Final

import anyio

LARGE_BYTES_MIN: Final = 1 << 20
"""More than a second of sound with its pictures."""
BYTES_PER_S_MAX: Final = 32 << 20
"""A fifth of a core: two sessions at their own rate limit (`bytes_per_s_max`)."""


class RateLimiter:
    """Limits the large messages of one server."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._free_at_s = 0.0

    async def wait(self, size_bytes: int) -> None:
        """Wait until a message may be read; a small one never waits."""
        if size_bytes <= LARGE_BYTES_MIN:
            return
        async with self._lock:
            now_s = anyio.current_time()
            if now_s < self._free_at_s:
                await anyio.sleep_until(self._free_at_s)
            self._free_at_s = max(now_s, self._free_at_s) + size_bytes / BYTES_PER_S_MAX
