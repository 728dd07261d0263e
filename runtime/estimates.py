"""How long somebody in the queue will wait, from how long slots were held before.

The queue is played through: each slot in use comes free, the next in line takes it for an average
session of its mode, and so on. The averages run per mode, for a turn of chat takes seconds and a
duplex session minutes.

What is left of a slot in use is judged by the sessions of its mode that took longer than it has
taken so far: what is left of theirs. Of several slots the one that comes free first does so sooner
than each of them on average; so the slots are put in order, and the k-th of n is given not the mean
of what may be left but its k/(n + 1) quantile, where the k-th of n drawn at random lies.

No session is expected to last longer than its limit, which counts from its connection, the wait in
the queue included: so nobody is told to wait longer than the limits of those before allow.

It holds no clock, tickets or slots. Times are whole nanoseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from protocol.limits import NS_PER_S
from protocol.messages import Mode

SESSION_S_ASSUMED: Final = 90
"""How long a session takes until one has ended: the context lasts about that long (000)."""
TURN_S_ASSUMED: Final = 10
"""How long a turn of chat takes until one has ended: a few hundred tokens, and their prefill."""
SESSIONS_AVERAGED: Final = 32
"""Sessions of a mode that are looked back on: enough to be steady, few enough to follow the day."""
OVERDUE_SHARE: Final = 0.5
"""Where nobody that is remembered took as long, all that is known is that the mode is unlike its
average; half of it is told rather than a moment that would be told again and again."""

_ASSUMED_NS: Final[Mapping[Mode, int]] = MappingProxyType(
    {
        "video": SESSION_S_ASSUMED * NS_PER_S,
        "audio": SESSION_S_ASSUMED * NS_PER_S,
        "chat": TURN_S_ASSUMED * NS_PER_S,
        "transcription": SESSION_S_ASSUMED * NS_PER_S,
    }
)


class Durations:
    """How long slots were held of late, by mode.

    Args:
        limit_s: how many seconds a session of a mode may last in all; 0: there is no limit.
    """

    def __init__(self, limit_s: Callable[[Mode], int] = lambda _: 0) -> None:
        self._limit_s = limit_s
        self._recent_ns: dict[Mode, deque[int]] = {}
        self._sorted_ns: dict[Mode, list[int]] = {}

    def add(self, mode: Mode, held_ns: int) -> None:
        """Take note of a slot that came back."""
        recent_ns = self._recent_ns.setdefault(mode, deque(maxlen=SESSIONS_AVERAGED))
        recent_ns.append(held_ns)
        self._sorted_ns[mode] = sorted(recent_ns)

    def average_ns(self, mode: Mode) -> int:
        """The running average of a mode; what is assumed where nobody has ended yet."""
        recent_ns = self._recent_ns.get(mode)
        average_ns = sum(recent_ns) // len(recent_ns) if recent_ns else _ASSUMED_NS[mode]
        return self.within_limit_ns(mode, average_ns)

    def within_limit_ns(self, mode: Mode, left_ns: int, lasted_ns: int = 0) -> int:
        """Bound what is left of a session by its limit.

        Args:
            mode: of the session.
            left_ns: what would be left without a limit.
            lasted_ns: how long it has lasted, in the queue and out of it.
        """
        limit_ns = self._limit_s(mode) * NS_PER_S
        return min(left_ns, max(limit_ns - lasted_ns, 0)) if limit_ns else left_ns

    def left_ns(self, mode: Mode, held_ns: int) -> list[int]:
        """What was left of sessions that took longer.

        Args:
            mode: of the session.
            held_ns: how long it has held its slot.

        Returns:
            Of each that took longer, how much, in rising order; never empty.
        """
        took_ns = self._sorted_ns.get(mode) or [_ASSUMED_NS[mode]]
        left_ns = [longer_ns - held_ns for longer_ns in took_ns[bisect_right(took_ns, held_ns) :]]
        left_ns = left_ns or [round(self.average_ns(mode) * OVERDUE_SHARE)]
        return [self.within_limit_ns(mode, each_ns, held_ns) for each_ns in left_ns]

    def mean_left_ns(self, mode: Mode, held_ns: int) -> int:
        """Estimate how much longer a session holds its slot; arguments as above."""
        left_ns = self.left_ns(mode, held_ns)
        return sum(left_ns) // len(left_ns)


def waits_ns(
    durations: Durations,
    held: Iterable[tuple[Mode, int]],
    waiting: Sequence[tuple[Mode, int]],
) -> list[int]:
    """Estimate everybody's wait.

    Args:
        durations: what is known of sessions.
        held: of each slot in use its session's mode, and how long it has been held, in ns.
        waiting: of each in the queue its mode, and how long it has waited, in ns; front first.

    Returns:
        Nanoseconds by position, never falling from one position to the next.
    """
    if not waiting:
        return []
    left = [durations.left_ns(mode, held_ns) for mode, held_ns in held]
    left.sort(key=lambda left_ns: sum(left_ns) / len(left_ns))
    free_in_ns = [_quantile(left_ns, k / (len(left) + 1)) for k, left_ns in enumerate(left, 1)]
    if not free_in_ns:  # no slot is in use, and none free: one will come, nobody knows when
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
    """The value below which that share lies, between neighbours in proportion."""
    place = min(max(share * len(rising) - 0.5, 0), len(rising) - 1)
    low = int(place)
    high = min(low + 1, len(rising) - 1)
    return round(rising[low] + (rising[high] - rising[low]) * (place - low))
