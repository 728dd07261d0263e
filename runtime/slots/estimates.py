"""Estimates of the wait in the queue, from how long slots were held before; whole nanoseconds.

The queue is played through: each slot in use comes free, the next in line takes it for an average
session of its mode, and so on. Averages are kept per mode: a turn of chat takes seconds, a duplex
session minutes. The rest of a slot in use is drawn from past sessions of its mode that took longer.
The first of several slots comes free sooner than the mean: slots are sorted, and the k-th of n gets
the k/(n + 1) quantile, where the k-th of n random draws lies. No session is expected to outlast its
limit, which counts from its connection, the queue included.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from protocol.values.limits import NS_PER_S
from protocol.values.modes import OF_MODE, Mode

SESSION_S_ASSUMED: Final = 90
"""Assumed until a session has ended: the context lasts about that long (000)."""
TURN_S_ASSUMED: Final = 10
"""Assumed until a turn of chat has ended: a few hundred tokens and their prefill."""
SESSIONS_AVERAGED: Final = 32
"""Past sessions kept for each mode: enough to be steady, few enough to follow the day."""
OVERDUE_SHARE: Final = 0.5
"""Share of the average that is left to a session longer than all that are kept."""


def _assumed_ns(mode: Mode) -> int:
    is_turn = OF_MODE[mode].work == "turn"
    return (TURN_S_ASSUMED if is_turn else SESSION_S_ASSUMED) * NS_PER_S


class Durations:
    """How long slots were held recently, by mode; `limit_s` 0 means no limit."""

    def __init__(self, limit_s: Callable[[Mode], int] = lambda _: 0) -> None:
        self._limit_s = limit_s
        self._recent_ns: dict[Mode, deque[int]] = {}
        self._sorted_ns: dict[Mode, list[int]] = {}

    def add(self, mode: Mode, held_ns: int) -> None:
        """Add the time of a slot that came back."""
        recent_ns = self._recent_ns.setdefault(mode, deque(maxlen=SESSIONS_AVERAGED))
        recent_ns.append(held_ns)
        self._sorted_ns[mode] = sorted(recent_ns)

    def average_ns(self, mode: Mode) -> int:
        """The running average of a mode; an assumed value before the first end."""
        recent_ns = self._recent_ns.get(mode)
        average_ns = sum(recent_ns) // len(recent_ns) if recent_ns else _assumed_ns(mode)
        return self.within_limit_ns(mode, average_ns)

    def within_limit_ns(self, mode: Mode, left_ns: int, lasted_ns: int = 0) -> int:
        """Bound the rest of a session by its limit; it has `lasted_ns`, the queue included."""
        limit_ns = self._limit_s(mode) * NS_PER_S
        return min(left_ns, max(limit_ns - lasted_ns, 0)) if limit_ns else left_ns

    def left_ns(self, mode: Mode, held_ns: int) -> list[int]:
        """The rests of past sessions that took longer than `held_ns`: rising, never empty."""
        took_ns = self._sorted_ns.get(mode) or [_assumed_ns(mode)]
        left_ns = [longer_ns - held_ns for longer_ns in took_ns[bisect_right(took_ns, held_ns) :]]
        left_ns = left_ns or [round(self.average_ns(mode) * OVERDUE_SHARE)]
        return [self.within_limit_ns(mode, each_ns, held_ns) for each_ns in left_ns]

    def mean_left_ns(self, mode: Mode, held_ns: int) -> int:
        """Estimate how much longer a session holds its slot, held for `held_ns` so far."""
        left_ns = self.left_ns(mode, held_ns)
        return sum(left_ns) // len(left_ns)


def waits_ns(
    durations: Durations,
    held: Iterable[tuple[Mode, int]],
    waiting: Sequence[tuple[Mode, int]],
) -> list[int]:
    """Estimate every session's wait: nanoseconds by position, never falling.

    Args:
        held: each slot in use: its session's mode, and nanoseconds held.
        waiting: each queued session: its mode, and nanoseconds waited; front first.
    """
    if not waiting:
        return []
    left = [durations.left_ns(mode, held_ns) for mode, held_ns in held]
    left.sort(key=lambda left_ns: sum(left_ns) / len(left_ns))
    free_in_ns = [_quantile(left_ns, k / (len(left) + 1)) for k, left_ns in enumerate(left, 1)]
    if not free_in_ns:  # no slot is in use or free: one will come, at an unknown time
        free_in_ns = [durations.average_ns(waiting[0][0])]
    heapq.heapify(free_in_ns)
    waits = []
    for mode, waited_ns in waiting:
        wait_ns = free_in_ns[0]
        waits.append(wait_ns)
        lasted_ns = waited_ns + wait_ns
        held_ns = durations.within_limit_ns(mode, durations.average_ns(mode), lasted_ns)
        heapq.heapreplace(free_in_ns, wait_ns + held_ns)
    return waits


def _quantile(rising: Sequence[int], share: float) -> int:
    """The quantile at `share`, interpolated between neighbours."""
    place = min(max(share * len(rising) - 0.5, 0), len(rising) - 1)
    low = int(place)
    high = min(low + 1, len(rising) - 1)
    return round(rising[low] + (rising[high] - rising[low]) * (place - low))
