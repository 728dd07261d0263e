"""The timers of a session, by generation, so that a stale one has no effect."""

from __future__ import annotations

from typing import Final

import attrs

from ..values.effects import CancelTimer, SetTimer
from ..values.events import TimerName

LIFE_TIMERS: Final[tuple[TimerName, ...]] = (
    "session",
    "init",
    "idle",
    "pause",
    "watchdog",
    "rebuild",
    "detach",
    "resume",
    "silence",
)
"""Timers that bound a session's life, and end with it."""


@attrs.define
class Timers:
    """Generations of the timers that are set; the runtime holds the clock."""

    pending: dict[TimerName, int] = attrs.Factory(dict)
    generation: int = 0

    def set(self, name: TimerName, at_ns: int) -> SetTimer:
        """Set a timer, in place of any with its name."""
        self.generation += 1
        self.pending[name] = self.generation
        return SetTimer(name=name, generation=self.generation, at_ns=at_ns)

    def cancel(self, name: TimerName) -> CancelTimer | None:
        """Cancel a timer; None if it was not set."""
        generation = self.pending.pop(name, None)
        return None if generation is None else CancelTimer(name=name, generation=generation)

    def fire(self, name: TimerName, generation: int) -> bool:
        """Whether this timer is set and not stale; it is not set afterwards."""
        if self.pending.get(name) != generation:
            return False
        del self.pending[name]
        return True
