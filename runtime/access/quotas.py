"""A key's sessions: at once, and started within any hour.

A refused session does not count. The hour slides from each session's start. Counts belong to the
key's name, so a renewed key keeps them; a restarted server starts at zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio
import attrs

from .keys import Key

HOUR_S: Final = 3_600.0
PLACE_WAIT_S: Final = 2.5
"""The time in which an ending session sends its last frames and closes."""
PLACE_LOOK_S: Final = 0.1


@attrs.define
class _Used:
    now: int = 0
    begun: deque[float] = attrs.field(factory=deque)


class Pass:
    """One session's place in its key's quota."""

    def __init__(self, on_leave: Callable[[bool], None]) -> None:
        self._on_leave: Callable[[bool], None] | None = on_leave

    def leave(self, *, is_refund: bool = False) -> None:
        """Give the place back; a second call does nothing. A refund takes it off the hour too."""
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave(is_refund)


class Quotas:
    """The sessions of all keys; `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used: dict[str, _Used] = {}

    def enter(self, principal: Key) -> Pass | None:
        """Take a place for a session; None where the key has reached a limit."""
        self._forget()
        used = self._used.get(principal.name, _Used())
        if principal.sessions_max is not None and used.now >= principal.sessions_max:
            return None
        per_hour = principal.sessions_per_hour
        if per_hour is not None and len(used.begun) >= per_hour:
            return None
        self._used[principal.name] = used
        used.now += 1
        begun_s = self._clock()
        if per_hour is not None:
            used.begun.append(begun_s)

        def leave(is_refund: bool) -> None:
            used.now -= 1
            assert used.now >= 0
            if is_refund and begun_s in used.begun:
                used.begun.remove(begun_s)

        return Pass(leave)

    async def enter_soon(self, principal: Key) -> Pass | None:
        """As `enter`, but wait briefly: after a reconnect the old session may still end."""
        place = self.enter(principal)
        with anyio.move_on_after(PLACE_WAIT_S):
            while place is None:
                await anyio.sleep(PLACE_LOOK_S)
                place = self.enter(principal)
        return place

    def _forget(self) -> None:
        """Drop starts older than an hour, and keys without counts."""
        hour_ago = self._clock() - HOUR_S
        for name, used in list(self._used.items()):
            while used.begun and used.begun[0] <= hour_ago:
                used.begun.popleft()
            if used.now == 0 and not used.begun:
                del self._used[name]
