"""Looks after all connections of a listener: who stands still, who is silent, whom to ping.

One task looks at every connection each `LOOK_S`; a connection costs a few microseconds then, and
nothing between. What it drops:

- `stalled`: there is something for the peer to take, and for `stall_s` it has taken nothing. That
  is judged by what its machine has acknowledged, not by how long a frame takes: a client that is
  slow but steady may take its time. An answer of HTTP may not take it for ever, for there what is
  sent is kept until it is taken: while sending waits, `HTTP_BYTES_PER_S_MIN` must be taken.
- `silent`: a WebSocket on which we waited `pong_wait_s` for any byte at all, pongs included. While
  we do not read, it is not silent.
- `slow`: a message that keeps others waiting for room for too long (`budget`).
- `left`: it is held to its rate, and its end has been here for `LEAVE_S` behind what is unread.

When much of what was on its way in has come or is dropped, memory goes back to the system.

A look that comes late judges nobody: the event loop was held up, and what has come is unread yet.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final

import attrs
import trio

from ..memory import HEAP_SPARE_BYTES, give_back
from .budget import Budget, Share
from .counters import Counters
from .limits import Limits
from .link import Link

LOOK_S: Final = 0.5
"""A client is dropped within its limit, not a second after it; 500 of them cost a millisecond."""
LATE_S: Final = 1.5
"""Two looks that were missed: something held the event loop up."""
LATE_LOOKS_MAX: Final = 4
"""In a row: a loop that is always late would judge nobody ever."""
HTTP_BYTES_PER_S_MIN: Final = 16 * 1024
"""A mobile network at its worst; what is slower is cut, and can be asked for in ranges."""
LEAVE_S: Final = 10.0
"""For what a client said before it left, at its rate."""

PING: Final = b"\x89\x00"
"""A ping without a payload (RFC 6455, 5.5.2); its pong is read by the codec, which ignores it."""


@attrs.define(kw_only=True, eq=False)
class Line:
    """A connection that is looked after.

    Attributes:
        link: the connection.
        share: of the room for large messages; None for what is no WebSocket: it is not pinged, and
            may be silent.
        pings: it may be pinged: no close was sent.
    """

    link: Link
    share: Share | None = None
    pings: bool = True
    _taken: int = 0
    _taken_at_s: float = 0.0
    _signs: tuple[int, int] = (-1, 0)
    _heard_at_s: float = 0.0
    _ping_at_s: float = 0.0
    _left_at_s: float | None = None
    _held: tuple[float, int] | None = None

    def start(self, now_s: float, limits: Limits) -> None:
        """Begin at the present time."""
        self._taken_at_s = self._heard_at_s = now_s
        self._ping_at_s = now_s + limits.ping_s

    def look(self, now_s: float, limits: Limits, *, judges: bool) -> None:
        """See how far it has come since the last look; drop it if that is nowhere."""
        self._look_at_sending(now_s, limits.stall_s, judges=judges)
        if self.share is None:
            self._look_at_pace(now_s, limits.stall_s, judges=judges)
        else:
            self._look_at_hearing(now_s, limits, judges=judges)
            self._look_at_leaving(now_s)

    def _look_at_sending(self, now_s: float, stall_s: float, *, judges: bool) -> None:
        is_owed, taken = self.link.tcp.progress()
        # Less than before: a send is counted by the kernel already, and by us in a moment.
        if not is_owed or taken > self._taken:
            self._taken = taken
            self._taken_at_s = now_s
        elif judges and now_s - self._taken_at_s >= stall_s - LOOK_S:
            self.link.drop("stalled")

    def _look_at_pace(self, now_s: float, stall_s: float, *, judges: bool) -> None:
        """Drop a peer that is sent an answer, has held that up for a while and is too slow."""
        if not self.link.is_sending:
            self._held = None
            return
        _, taken = self.link.tcp.progress()
        since_s, before = self._held = self._held or (now_s, taken)
        due = (now_s - since_s - stall_s) * HTTP_BYTES_PER_S_MIN
        if judges and taken - before < due:
            self.link.drop("stalled")

    def _look_at_hearing(self, now_s: float, limits: Limits, *, judges: bool) -> None:
        tcp = self.link.tcp
        signs = tcp.signs_of_life
        if signs != self._signs or not tcp.is_reading:
            self._signs = signs
            self._heard_at_s = now_s
        elif judges and limits.ping_s and now_s - self._heard_at_s >= limits.pong_wait_s:
            self.link.drop("silent")

    def _look_at_leaving(self, now_s: float) -> None:
        if not self.link.is_held or not self.link.tcp.peer_has_left():
            return
        if self._left_at_s is None:
            self._left_at_s = now_s
        if now_s - self._left_at_s >= LEAVE_S:
            self.link.drop("left")

    def is_due(self, now_s: float, ping_s: float) -> bool:
        """Say whether it is to be pinged now; then it is due again in `ping_s`.

        While a frame is being sent it is not: who takes that is known to be there, and who does
        not is dropped as stalled.
        """
        if not ping_s or self.share is None or now_s < self._ping_at_s or self.link.is_sending:
            return False
        self._ping_at_s = now_s + ping_s
        return True

    async def ping(self) -> None:
        """Ping, unless a frame or a close came first; a connection that is over does not matter."""
        if self.pings and not self.link.is_sending:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.link.send_all(PING)


class Keeper:
    """Looks after the connections of one listener, and holds what they share.

    Args:
        limits: what is allowed.
        counters: what is counted.
    """

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self.limits = limits
        self.counters = counters
        self.budget = Budget(limits.receiving_bytes_max, counters)
        self._lines: dict[Line, None] = {}
        self._height_bytes = 0

    def add(self, line: Line) -> None:
        """Look after a connection from now on."""
        line.start(trio.current_time(), self.limits)
        self._lines[line] = None

    def discard(self, line: Line) -> None:
        """Look no more; safe to repeat."""
        self._lines.pop(line, None)

    async def run(self) -> None:
        """Look until cancelled."""
        before_s, late_looks = trio.current_time(), 0
        giving = trio.CapacityLimiter(1)  # its own: other threads may hang on a disk
        async with trio.open_nursery() as pings:
            while True:
                await trio.sleep(LOOK_S)
                now_s = trio.current_time()
                late_looks = late_looks + 1 if now_s - before_s > LATE_S else 0
                before_s = now_s
                judges = not 0 < late_looks <= LATE_LOOKS_MAX
                for line in list(self._lines):
                    line.look(now_s, self.limits, judges=judges)
                    if line.is_due(now_s, self.limits.ping_s):
                        pings.start_soon(line.ping)
                self._look_at_messages(now_s)
                if self._has_fallen():
                    pings.start_soon(partial(trio.to_thread.run_sync, give_back, limiter=giving))

    def _has_fallen(self) -> bool:
        """Whether messages took much memory since this was last so, and take little now."""
        bytes_now = self.counters.receiving_bytes
        self._height_bytes = max(self._height_bytes, bytes_now)
        if self._height_bytes < HEAP_SPARE_BYTES or bytes_now > self._height_bytes // 4:
            return False
        self._height_bytes = bytes_now
        return True

    def _look_at_messages(self, now_s: float) -> None:
        laggards = self.budget.laggards(now_s)
        for line in list(self._lines) if laggards else ():
            if line.share in laggards:
                line.link.drop("slow")
