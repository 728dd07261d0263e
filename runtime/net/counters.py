"""A listener's counts: open connections, and refused and dropped ones by cause.

The listener's parts write `Counters`; `statistics` is a copy. Causes are labels of metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import attrs

Refusal = Literal["full", "address", "rate", "tls", "silent", "head"]
"""No place in all, no place for its address, too many of its address lately, no TLS, no byte in
time, no HTTP in time."""
Drop = Literal["stalled", "silent", "slow", "left"]
"""It took nothing, or too slowly; sent nothing; delayed others' large messages with a slow one; or
left while it was held to its rate."""


@attrs.frozen(kw_only=True)
class Statistics:
    """The counts of a listener: open now, and since the start by cause.

    `websockets` are part of `connections`; `pauses` of readers above their rate.
    """

    connections: int
    websockets: int
    refused: Mapping[Refusal, int]
    dropped: Mapping[Drop, int]
    pauses: int
    receiving_bytes: int


@attrs.define(kw_only=True, eq=False)
class Counters:
    """The counts of one listener, all from zero."""

    connections: int = 0
    websockets: int = 0
    refused: Counter[Refusal] = attrs.field(factory=Counter)
    dropped: Counter[Drop] = attrs.field(factory=Counter)
    pauses: int = 0
    receiving_bytes: int = 0

    def statistics(self) -> Statistics:
        """Copy the current counts."""
        return Statistics(
            connections=self.connections,
            websockets=self.websockets,
            refused=MappingProxyType(dict(self.refused)),
            dropped=MappingProxyType(dict(self.dropped)),
            pauses=self.pauses,
            receiving_bytes=self.receiving_bytes,
        )
