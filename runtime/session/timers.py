"""The timers of one session: `SetTimer` -> `TimerFired`; a cancelled one posts nothing.

One task sleeps for all of them, since a session that waits for its client is little but timers.
"""

from __future__ import annotations

import math
from typing import Final

import anyio
import attrs

from protocol.values import effects as ef
from protocol.values import events as ev

from .model_calls import Inbox

ROUNDING_NS: Final = 1_000
"""The event loop's clock is a float: a sleep may seem to end this much too early."""


class Timers:
    """The times that the session set; `run` sleeps until the next one."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._pending: dict[str, ef.SetTimer] = {}
        self._sleep: anyio.CancelScope | None = None

    def set(self, effect: ef.SetTimer) -> None:
        """Set a timer; one that is due fires at once."""
        assert effect.name not in self._pending, "a timer is cancelled before it is set again"
        self._pending[effect.name] = effect
        self._sleep_until_next()

    def cancel(self, effect: ef.CancelTimer) -> None:
        """Cancel a timer, unless it has fired: the machine ignores it by its generation."""
        if self._pending.pop(effect.name, None) is not None:
            self._sleep_until_next()

    def expire(self, name: ev.TimerName) -> None:
        """Have a timer fire now, if it is set."""
        if (effect := self._pending.get(name)) is not None:
            self._pending[name] = attrs.evolve(effect, at_ns=self._inbox.now_ns())
            self._sleep_until_next()

    async def run(self) -> None:
        """Post each timer when it is due, until cancelled."""
        while True:
            with anyio.CancelScope() as self._sleep:
                self._sleep_until_next()
                await anyio.sleep_forever()
            self._fire()

    def _sleep_until_next(self) -> None:
        if self._sleep is None:
            return
        next_ns = min((it.at_ns for it in self._pending.values()), default=math.inf)
        self._sleep.deadline = anyio.current_time() + (next_ns - self._inbox.now_ns()) / 1e9

    def _fire(self) -> None:
        now_ns = self._inbox.now_ns()
        due = [it for it in self._pending.values() if it.at_ns <= now_ns + ROUNDING_NS]
        for it in sorted(due, key=lambda it: it.at_ns):
            del self._pending[it.name]
            fired = ev.TimerFired(at_ns=now_ns, name=it.name, generation=it.generation)
            self._inbox.post(fired)
