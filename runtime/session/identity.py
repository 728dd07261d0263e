"""Names, seeds and wall time that a server draws for a session's first event."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import Protocol

import attrs


@attrs.frozen(kw_only=True)
class Identity:
    """One session's name, time and seed.

    Attributes:
        recording_id: sorts by time and names the log; letters, digits, `-` and `_` only.
        created_ms: wall clock, Unix milliseconds, unique on this server.
        seed: 63 bits that key every random choice of the session.
    """

    recording_id: str
    created_ms: int
    seed: int


class Identities(Protocol):
    """Draws identities."""

    def draw(self) -> Identity:
        """Draw the next session's identity; no two are equal."""
        ...

    def ticket_id(self) -> str:
        """Draw a ticket's id, `ticket_` and 12 hex digits."""
        ...

    def token(self) -> str:
        """Draw a client's right to come back: 32 random bytes, in base64 for addresses."""
        ...


@attrs.define
class SystemIdentities:
    """Draws from the system's clock and entropy."""

    last_ms: int = 0

    def draw(self) -> Identity:
        """As `Identities`; two sessions never share a millisecond."""
        self.last_ms = max(time.time_ns() // 1_000_000, self.last_ms + 1)
        moment = datetime.fromtimestamp(self.last_ms / 1000, UTC)
        recording_id = f"{moment:%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"
        return Identity(
            recording_id=recording_id, created_ms=self.last_ms, seed=secrets.randbits(63)
        )

    def ticket_id(self) -> str:
        """As `Identities`."""
        return f"ticket_{secrets.token_hex(6)}"

    def token(self) -> str:
        """As `Identities`."""
        return secrets.token_urlsafe(32)
