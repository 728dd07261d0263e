"""How many sessions a key may have: at once, and begun within any hour.

`enter` gives a pass for one session, or none; `leave` gives it back. A session that was refused
does not count. The hour slides: a session counts for an hour from its beginning, whatever became of
it. What a key has used goes by its name, so that a key that is changed, or made anew, keeps its
count.

It belongs to one event loop and takes its clock from outside. A server that starts again starts
to count again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

import anyio
import attrs

from .principal import Principal

HOUR_S: Final = 3_600.0
PLACE_WAIT_S: Final = 2.5
"""What a session that ends takes for its last words, its log and its close."""
PLACE_LOOK_S: Final = 0.1


@attrs.define
class _Used:
    """What one key has used."""

    now: int = 0
    begun: deque[float] = attrs.field(factory=deque)


class Pass:
    """One session's place in the quota of its key; a context manager that leaves at the end.

    Args:
        on_leave: called once.
    """

    def __init__(self, on_leave: Callable[[bool], None]) -> None:
        self._on_leave: Callable[[bool], None] | None = on_leave

    def leave(self, *, is_refund: bool = False) -> None:
        """Give the place back; once is enough, and more do nothing.

        Args:
            is_refund: the session was refused: it does not count for its hour either.
        """
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave(is_refund)

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()


class Quotas:
    """What all keys have used.

    Args:
        clock: seconds, of a clock that does not go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used: dict[str, _Used] = {}

    def enter(self, principal: Principal) -> Pass | None:
        """Take a place for one more session.

        Args:
            principal: whose; the limits are those that it has now.

        Returns:
            The pass; None where its key has as many as it may.
        """
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

    async def enter_soon(self, principal: Principal) -> Pass | None:
        """Likewise, but wait a moment for a place: a session that has just ended is not gone yet.

        A client that lost its line and comes back finds its old session being cleaned up.
        """
        place = self.enter(principal)
        with anyio.move_on_after(PLACE_WAIT_S):
            while place is None:
                await anyio.sleep(PLACE_LOOK_S)
                place = self.enter(principal)
        return place

    def sessions(self, name: str) -> int:
        """Sessions that a key has now."""
        used = self._used.get(name)
        return 0 if used is None else used.now

    def __len__(self) -> int:
        """Keys that something is kept of."""
        return len(self._used)

    def _forget(self) -> None:
        """Forget what is older than an hour, and keys of which nothing is left."""
        hour_ago = self._clock() - HOUR_S
        for name, used in list(self._used.items()):
            while used.begun and used.begun[0] <= hour_ago:
                used.begun.popleft()
            if used.now == 0 and not used.begun:
                del self._used[name]
