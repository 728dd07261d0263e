"""Watches all connections of a listener each `CHECK_S`: drops bad ones, and pings.

- `stalled`: bytes wait for the peer, whose machine has acknowledged none for `stall_s`: a slow but
  steady client may take its time. An HTTP answer is kept in memory until it is acknowledged: while
  a send waits, `HTTP_BYTES_PER_S_MIN` must be.
- `silent`: a WebSocket from which no byte, not even a pong, came in `pong_wait_s` while we read;
  without pings none is.
- `slow`: a message that keeps others waiting for room for too long (`budget`).
- `left`: held to its rate, and its end arrived `LEAVE_S` ago after unread bytes.
- A late look drops none: the loop was held up, and new bytes are unread.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final

import attrs
import trio

from ..settings.settings import Settings
from .limits import RECEIVING_BYTES_MAX, Budget, Counters, PartyRates, Share
from .link import Link
from .memory import HEAP_SPARE_BYTES, give_back

CHECK_S: Final = 0.5
"""A client is dropped close to its limit; 500 of them cost a millisecond."""
LATE_S: Final = 1.5
"""Two missed looks: the event loop was held up."""
LATE_CHECKS_MAX: Final = 4
"""In a row: a loop that is always late must still drop connections."""
HTTP_BYTES_PER_S_MIN: Final = 16 * 1024
"""A bad mobile network; a slower download is cut, and can be resumed in ranges."""
LEAVE_S: Final = 10.0
"""For a client's messages before it left, at its rate."""

PING: Final = b"\x89\x00"
"""A ping without a payload (RFC 6455, 5.5.2); the codec ignores its pong."""


@attrs.define(kw_only=True, eq=False)
class WatchedConnection:
    """A connection under watch; without `share` it is HTTP: not pinged, and may be silent."""

    link: Link
    share: Share | None = None
    pings: bool = True
    _acknowledged: int = 0
    _progress_at_s: float = 0.0
    _signs: tuple[int, int] = (-1, 0)
    _received_at_s: float = 0.0
    _ping_at_s: float = 0.0
    _left_at_s: float | None = None
    _held: tuple[float, int] | None = None

    def start(self, now_s: float, settings: Settings) -> None:
        """Begin at the present time."""
        self._progress_at_s = self._received_at_s = now_s
        self._ping_at_s = now_s + settings.ping_s

    def look(self, now_s: float, settings: Settings, *, judges: bool) -> None:
        """Check its progress since the last look; drop it if there is none."""
        self._check_sending(now_s, settings.stall_s, judges=judges)
        if self.share is None:
            self._check_pace(now_s, settings.stall_s, judges=judges)
        else:
            self._check_receiving(now_s, settings, judges=judges)
            self._check_leaving(now_s)

    def _check_sending(self, now_s: float, stall_s: float, *, judges: bool) -> None:
        is_owed, acknowledged = self.link.tcp.progress()
        # Less than before: the kernel has counted a send, and we have not yet.
        if not is_owed or acknowledged > self._acknowledged:
            self._acknowledged = acknowledged
            self._progress_at_s = now_s
        elif judges and now_s - self._progress_at_s >= stall_s - CHECK_S:
            self.link.drop("stalled")

    def _check_pace(self, now_s: float, stall_s: float, *, judges: bool) -> None:
        """Drop a peer that takes an HTTP answer below the least rate, after a while."""
        if not self.link.is_sending:
            self._held = None
            return
        _, acknowledged = self.link.tcp.progress()
        since_s, before = self._held = self._held or (now_s, acknowledged)
        due = (now_s - since_s - stall_s) * HTTP_BYTES_PER_S_MIN
        if judges and acknowledged - before < due:
            self.link.drop("stalled")

    def _check_receiving(self, now_s: float, settings: Settings, *, judges: bool) -> None:
        tcp = self.link.tcp
        signs = tcp.received_marker
        if signs != self._signs or not tcp.is_reading:
            self._signs = signs
            self._received_at_s = now_s
        elif judges and settings.ping_s and now_s - self._received_at_s >= settings.pong_wait_s:
            self.link.drop("silent")

    def _check_leaving(self, now_s: float) -> None:
        if not self.link.is_held or not self.link.tcp.peer_has_left():
            return
        if self._left_at_s is None:
            self._left_at_s = now_s
        if now_s - self._left_at_s >= LEAVE_S:
            self.link.drop("left")

    def is_due(self, now_s: float, ping_s: float) -> bool:
        """Whether to ping it now; then it is due again in `ping_s`.

        Not during a send: a peer that takes it is alive, another is dropped as stalled.
        """
        if not ping_s or self.share is None or now_s < self._ping_at_s or self.link.is_sending:
            return False
        self._ping_at_s = now_s + ping_s
        return True

    async def ping(self) -> None:
        """Ping, unless a frame or a close came first; an ended connection is not an error."""
        if self.pings and not self.link.is_sending:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.link.send_all(PING)


class ConnectionMonitor:
    """Watches the connections of one listener, and holds their shared state."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self.settings = settings
        self.counters = counters
        self.budget = Budget(RECEIVING_BYTES_MAX, counters)
        self.rates = PartyRates(settings)
        self._connections: dict[WatchedConnection, None] = {}
        self._height_bytes = 0

    def add(self, watched: WatchedConnection) -> None:
        """Watch a connection from now on."""
        watched.start(trio.current_time(), self.settings)
        self._connections[watched] = None

    def discard(self, watched: WatchedConnection) -> None:
        """Stop watching; safe to repeat."""
        self._connections.pop(watched, None)

    async def run(self) -> None:
        """Look until cancelled."""
        before_s, late_looks = trio.current_time(), 0
        giving = trio.CapacityLimiter(1)  # its own: other threads may hang on a disk
        async with trio.open_nursery() as pings:
            while True:
                await trio.sleep(CHECK_S)
                now_s = trio.current_time()
                late_looks = late_looks + 1 if now_s - before_s > LATE_S else 0
                before_s = now_s
                judges = not 0 < late_looks <= LATE_CHECKS_MAX
                for watched in list(self._connections):
                    watched.look(now_s, self.settings, judges=judges)
                    if watched.is_due(now_s, self.settings.ping_s):
                        pings.start_soon(watched.ping)
                self._check_messages(now_s)
                if self._memory_has_fallen():
                    pings.start_soon(partial(trio.to_thread.run_sync, give_back, limiter=giving))

    def _memory_has_fallen(self) -> bool:
        """Whether messages took much memory since the last time, and take little now."""
        bytes_now = self.counters.receiving_bytes
        self._height_bytes = max(self._height_bytes, bytes_now)
        if self._height_bytes < HEAP_SPARE_BYTES or bytes_now > self._height_bytes // 4:
            return False
        self._height_bytes = bytes_now
        return True

    def _check_messages(self, now_s: float) -> None:
        laggards = self.budget.laggards(now_s)
        for watched in list(self._connections) if laggards else ():
            if watched.share in laggards:
                watched.link.drop("slow")
