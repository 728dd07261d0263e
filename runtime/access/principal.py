"""Who a client is, for all that asks what it may do and see.

A principal is made when a client is admitted, and stays what it was: a key that is changed or
removed meets the next connection.
"""

from __future__ import annotations

from typing import Final

import attrs

from protocol.messages import Mode

from .keys import Key, Scope


@attrs.frozen(kw_only=True)
class Principal:
    """A client that was admitted.

    Attributes:
        name: of its key; empty where there are no keys.
        scope: of its key.
        sessions_max: sessions at once, or None.
        sessions_per_hour: sessions that may begin within any hour, or None.
        modes: those that it may use; None is all.
        record_always: it is recorded, whatever it asks for.
    """

    name: str
    scope: Scope
    sessions_max: int | None = None
    sessions_per_hour: int | None = None
    modes: tuple[Mode, ...] | None = None
    record_always: bool = False

    @property
    def is_admin(self) -> bool:
        """Whether it sees and may do what is not its own."""
        return self.scope == "admin"

    def may_see(self, owner: str) -> bool:
        """Whether a recording, a ticket or a session is for its eyes.

        Args:
            owner: the name of the key that it belongs to; empty where it came without one.
        """
        return self.is_admin or (owner != "" and owner == self.name)

    def may_use(self, mode: Mode) -> bool:
        """Whether it may have a session of the mode."""
        return self.modes is None or mode in self.modes


ANYONE: Final = Principal(name="", scope="admin")
"""Whoever comes to a server without keys: everything is everybody's there."""


def principal_of(key: Key) -> Principal:
    """Make the principal of a key."""
    return Principal(
        name=key.name,
        scope=key.scope,
        sessions_max=key.sessions_max,
        sessions_per_hour=key.sessions_per_hour,
        modes=key.modes,
        record_always=key.record_always is True,
    )
