"""What a listener counts: connections that are open, and why others were refused or dropped.

`Counters` is written by the listener's own parts; `statistics` is a copy for whoever shows it.
Every cause is one of a few words, so that it can be a label of a metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import attrs

Refusal = Literal["full", "address", "rate", "tls", "silent", "head"]
"""Why there was no request: no place in all, none for its address, too many of its address lately,
no TLS, not a word, no HTTP in time."""
Drop = Literal["stalled", "silent", "slow", "left"]
"""Why a connection was cut: it took nothing, or too slowly; said nothing; kept others from sending
large messages by being slow with its own; or left while it was held to its rate."""


@attrs.frozen(kw_only=True)
class Statistics:
    """One look at a listener.

    Attributes:
        connections: that have a place now.
        websockets: of these, open WebSockets.
        refused: connections that never came to a request, by cause, since the start.
        dropped: connections that were cut, by cause, since the start.
        pauses: how often a WebSocket's reading was paused because it was above its rate.
        receiving_bytes: of messages on their way in now.
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
        """Copy the counts as they are now."""
        return Statistics(
            connections=self.connections,
            websockets=self.websockets,
            refused=MappingProxyType(dict(self.refused)),
            dropped=MappingProxyType(dict(self.dropped)),
            pauses=self.pauses,
            receiving_bytes=self.receiving_bytes,
        )
