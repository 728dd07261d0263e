"""The rate of new connections from an address: a token bucket for each.

- An admitted connection costs one token; a refused one is free, so that a refused client is
  admitted again at the rate.
- The addresses seen last are kept; a forgotten one has a full bucket again, as after a short rest.
- Time comes from the caller, in seconds; nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

ADDRESSES_MAX: Final = 16_384
"""A bucket takes 300 bytes: five megabytes in all. The places of all bound a client with more
addresses."""


class Arrivals:
    """The buckets of one listener, for `per_s` new connections on average.

    A bucket is full at first, with `burst`; the last `addresses_max` are kept.
    """

    def __init__(self, per_s: float, burst: int, addresses_max: int = ADDRESSES_MAX) -> None:
        assert per_s > 0
        self._per_s = per_s
        self._burst = max(1, burst)
        self._addresses_max = addresses_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, origin: str, now_s: float) -> bool:
        """Pay for a new connection from `places.origin_of`'s address; False if it cannot."""
        left, at_s = self._buckets.pop(origin, (float(self._burst), now_s))
        left = min(float(self._burst), left + (now_s - at_s) * self._per_s)
        is_enough = left >= 1.0
        self._buckets[origin] = (left - is_enough, now_s)
        if len(self._buckets) > self._addresses_max:
            self._buckets.popitem(last=False)
        return is_enough
