"""How many new connections an address may open: a bucket each, filled by time.

- A connection that is let in costs one; one that is refused costs nothing, so that who is refused
  is let in again at the rate.
- So many addresses are remembered, those seen last; one that is forgotten has a full bucket again,
  as it would have by its own rest soon.

Time comes from the caller, in seconds; nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

ADDRESSES_MAX: Final = 16_384
"""A bucket takes 300 bytes: five megabytes in all. Who has more addresses is bounded by the places
of all."""


class Arrivals:
    """The buckets of one listener.

    Args:
        per_s: new connections, on average.
        burst: and so many at once; a bucket is full at first.
        addresses_max: remembered.
    """

    def __init__(self, per_s: float, burst: int, addresses_max: int = ADDRESSES_MAX) -> None:
        assert per_s > 0
        self._per_s = per_s
        self._burst = max(1, burst)
        self._addresses_max = addresses_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, origin: str, now_s: float) -> bool:
        """Pay for a new connection; False where there is not enough for it.

        Args:
            origin: what its address counts as.
            now_s: the time, which never goes back.
        """
        left, at_s = self._buckets.pop(origin, (float(self._burst), now_s))
        left = min(float(self._burst), left + (now_s - at_s) * self._per_s)
        is_enough = left >= 1.0
        self._buckets[origin] = (left - is_enough, now_s)
        if len(self._buckets) > self._addresses_max:
            self._buckets.popitem(last=False)
        return is_enough
