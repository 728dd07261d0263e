"""The limits of connections: an operator's as one value, and fixed ones."""

from __future__ import annotations

from typing import Final

import attrs

from ..settings.settings import Settings

RECEIVING_BYTES_MAX: Final = 256 * 1024 * 1024
"""Messages on their way in, over all connections: two or three of the largest, or a dozen videos
from phones. Until it is decoded a message costs three times this."""
LARGE_MESSAGE_BYTES: Final = 1024 * 1024
"""A second of sound with pictures is less, and must arrive within seconds."""
UNCOUNTED_BYTES: Final = 16 * 1024
"""Of a message in progress: 64 MiB for the most connections."""


@attrs.frozen(kw_only=True)
class Limits:
    """The limits of one listener; `Settings` describes them.

    Attributes:
        connections_per_address_max: at once, from one address (IPv6: from one /64).
        connections_per_address_per_s_max: new ones, on average; a burst may take all places.
        messages_per_s_max, bytes_per_s_max: on average, for one WebSocket.
        ping_s: 0 sends no pings, and then no connection is dropped as silent.
        receiving_bytes_max: messages on their way in, over all connections.
    """

    connections_max: int
    connections_per_address_max: int
    connections_per_address_per_s_max: float
    messages_per_s_max: int
    bytes_per_s_max: int
    handshake_s: float
    stall_s: float
    ping_s: float
    pong_wait_s: float
    receiving_bytes_max: int = RECEIVING_BYTES_MAX

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits of an operator's settings."""
        return cls(
            connections_max=settings.connections_max,
            connections_per_address_max=settings.connections_per_address_max,
            connections_per_address_per_s_max=settings.connections_per_address_per_s_max,
            messages_per_s_max=settings.messages_per_s_max,
            bytes_per_s_max=settings.bytes_per_s_max,
            handshake_s=settings.handshake_s,
            stall_s=settings.stall_s,
            ping_s=settings.ping_s,
            pong_wait_s=settings.pong_wait_s,
        )
