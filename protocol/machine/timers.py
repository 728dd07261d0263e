"""The timers of a session: which are set, by generation, so that a stale one can do nothing."""

from __future__ import annotations

import attrs

from ..values.effects import CancelTimer, SetTimer
from ..values.events import TimerName


@attrs.define
class Timers:
    """Generations of the timers that are set; the runtime holds the clock."""

    pending: dict[TimerName, int] = attrs.Factory(dict)
    generation: int = 0

    def set(self, name: TimerName, at_ns: int) -> SetTimer:
        """Set a timer, in place of any of its name."""
        self.generation += 1
        self.pending[name] = self.generation
        return SetTimer(name=name, generation=self.generation, at_ns=at_ns)

    def cancel(self, name: TimerName) -> CancelTimer | None:
        """Forget a timer; None where none was set."""
        generation = self.pending.pop(name, None)
        return None if generation is None else CancelTimer(name=name, generation=generation)

    def fire(self, name: TimerName, generation: int) -> bool:
        """Whether this is a timer that is set, and not a stale one; it is set no more then."""
        if self.pending.get(name) != generation:
            return False
        del self.pending[name]
        return True
