"""A client's identity and rights, made at admission; a changed key affects new connections."""

from __future__ import annotations

from typing import Final

import attrs

from protocol.values.modes import Mode

from .keys import Key, Scope


@attrs.frozen(kw_only=True)
class Principal:
    """An admitted client, with the limits of its key (`keys.Key`); no name without keys."""

    name: str
    scope: Scope
    sessions_max: int | None = None
    sessions_per_hour: int | None = None
    modes: tuple[Mode, ...] | None = None
    record_always: bool = False

    @property
    def is_admin(self) -> bool:
        """Whether it may see and change what belongs to others."""
        return self.scope == "admin"

    def may_see(self, owner: str) -> bool:
        """Whether it may see what belongs to the key `owner` (empty: to none)."""
        return self.is_admin or (owner != "" and owner == self.name)

    def may_use(self, mode: Mode) -> bool:
        """Whether it may have a session of the mode."""
        return self.modes is None or mode in self.modes


ANYONE: Final = Principal(name="", scope="admin")
"""Any client of a server without keys; all of them share everything."""


def principal_of(key: Key) -> Principal:
    """The principal of a key."""
    return Principal(
        name=key.name,
        scope=key.scope,
        sessions_max=key.sessions_max,
        sessions_per_hour=key.sessions_per_hour,
        modes=key.modes,
        record_always=key.record_always is True,
    )
