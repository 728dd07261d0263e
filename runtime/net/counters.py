"""A listener's counts: open connections, and refused and dropped ones by cause.

The listener's parts write `Counters`; a status has a copy. Causes are labels of metrics.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import attrs

Refusal = Literal["full", "address", "rate", "tls", "silent", "head"]
"""No place in all, no place for its address, too many of its address lately, no TLS, no byte in
time, no HTTP in time."""
Drop = Literal["stalled", "silent", "slow", "left"]
"""It took nothing, or too slowly; sent nothing; delayed others' large messages with a slow one; or
left while it was held to its rate."""


@attrs.define(kw_only=True, eq=False)
class Counters:
    """The counts of one listener, all from zero: open now, and since the start by cause.

    `websockets` are part of `connections`; `pauses` of readers above their rate.
    """

    connections: int = 0
    websockets: int = 0
    refused: Counter[Refusal] = attrs.field(factory=Counter)
    dropped: Counter[Drop] = attrs.field(factory=Counter)
    pauses: int = 0
    receiving_bytes: int = 0

    def copy(self) -> Counters:
        """Copy the current counts."""
        return attrs.evolve(self, refused=self.refused.copy(), dropped=self.dropped.copy())
