"""Identities that repeat from run to run."""

from __future__ import annotations

import attrs

from runtime.session.setup import Identity


@attrs.define
class CountedIdentities:
    """Draws from a counter: for tests and simulations that must repeat."""

    drawn: int = 0
    tickets: int = 0
    tokens: int = 0

    def draw(self) -> Identity:
        """As `Identities`."""
        self.drawn += 1
        return Identity(
            recording_id=f"rec-{self.drawn:06}",
            created_ms=1_700_000_000_000 + self.drawn,
            seed=self.drawn,
        )

    def ticket_id(self) -> str:
        """As `Identities`."""
        self.tickets += 1
        return f"ticket_{self.tickets:012x}"

    def token(self) -> str:
        """As `Identities`."""
        self.tokens += 1
        return f"token_{self.tokens:037}"
