"""Holding calls back until every open session has one, so that the engine's batches are large.

For work that is not real-time: a live session would be held up by the others. Units wait until
nothing shorter does (opening, closing a unit, releasing), so sessions that were opened at different
times come into step: all units together, then all that closes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio

GATHER_S: Final = 5.0
"""A call waits at most so long for others: a session may be open and ask for nothing."""
UNITS: Final = frozenset({"run_unit", "run_forced"})


class Gathering:
    """The waiting calls of all sessions of one engine, which may `expect` as many at once."""

    def __init__(self, expect: Callable[[int], None]) -> None:
        self._open, self._expect = 0, expect
        self._units, self._others = deque[anyio.Event](), deque[anyio.Event]()

    def opened(self) -> None:
        """Count a session that is about to be opened."""
        self._open += 1

    def released(self) -> None:
        """Count a session out."""
        self._open -= 1
        self._look()

    async def turn(self, name: str) -> None:
        """Wait until every open session has a call waiting, at most `GATHER_S`."""
        waiting = self._units if name in UNITS else self._others
        turn = anyio.Event()
        waiting.append(turn)
        self._look()
        try:
            with anyio.move_on_after(GATHER_S):
                await turn.wait()
        finally:
            if turn in waiting:
                waiting.remove(turn)

    def _look(self) -> None:
        if len(self._units) + len(self._others) >= self._open:
            waiting = self._others or self._units
            self._expect(len(waiting))
            while waiting:
                waiting.popleft().set()
