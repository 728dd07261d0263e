"""Places for connections: in all, for one address, and new ones a second for it.

An IPv6 address counts by its /64, one household's or machine's; an IPv4 address written as IPv6
counts as IPv4. New ones are counted on average: a burst may take all places of an address. Nothing
here waits.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Final

from ..settings.settings import Settings
from .arrivals import Arrivals
from .counters import Counters, Refusal

NETWORK_BITS: Final = 64
"""Of an IPv6 address: the network's owner chooses the rest freely."""


class Places:
    """The places of one listener; `has_files`: descriptors are left for another connection."""

    def __init__(
        self, settings: Settings, counters: Counters, has_files: Callable[[], bool] = lambda: True
    ) -> None:
        self._settings = settings
        self._has_files = has_files
        self._counters = counters
        self._taken: dict[str, int] = {}
        self._arrivals = Arrivals(
            settings.connections_per_address_per_s_max, settings.connections_per_address_max
        )

    def enter(self, host: str, now_s: float) -> Refusal | None:
        """Take a place for a connection from `host`, or return the cause of the refusal."""
        origin = origin_of(host)
        taken = self._taken.get(origin, 0)
        refusal: Refusal | None = None
        if self._counters.connections >= self._settings.connections_max or not self._has_files():
            refusal = "full"
        elif taken >= self._settings.connections_per_address_max:
            refusal = "address"
        elif not self._arrivals.take(origin, now_s):
            refusal = "rate"
        if refusal is not None:
            self._counters.refused[refusal] += 1
            return refusal
        self._taken[origin] = taken + 1
        self._counters.connections += 1
        return None

    def leave(self, host: str) -> None:
        """Give back the place that `enter` took for `host`."""
        origin = origin_of(host)
        self._counters.connections -= 1
        self._taken[origin] -= 1
        if not self._taken[origin]:
            del self._taken[origin]


def origin_of(host: str) -> str:
    """The address by which a client counts: its own, or its /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))
