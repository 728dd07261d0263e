"""One slot of a shared model, as a backend of its own: a replay or a fork opens it as slot 0.

So several sessions run at once, each on its slot, and the engine computes their steps together.
"""

from __future__ import annotations

from typing import Final

from protocol.values.model import Opening
from runtime.model.backends.base import Backend, BackendInfo, BackendSession


class OnSlot:
    """A backend of one slot; it is not closed with its sessions."""

    def __init__(self, backend: Backend, slot: int) -> None:
        self._backend: Final = backend
        self._slot: Final = slot

    @property
    def info(self) -> BackendInfo:
        """The model's, with all its slots."""
        return self._backend.info

    async def open(self, opening: Opening, *, slot: int) -> BackendSession:
        """Open a session on this one's slot; `slot` is 0."""
        assert slot == 0, slot
        return await self._backend.open(opening, slot=self._slot)
