"""What the sessions of a server may hold together while they have no slot, or no client."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import attrs

from protocol.values.errors import ErrorCode
from protocol.values.state import State

from ..settings.settings import MIB, Settings
from ..slots.admission import Admission
from .driver import Driver

EARLY_SUM_BYTES_MAX: Final = 128 * MIB
"""Opening messages kept while clients wait for a slot: fifty with 30 s of reference audio; half of
the budget of large messages."""
EARLY_BYTES_UNCOUNTED: Final = 64 * 1024
"""An opening message without voices is always kept: a queue of a thousand takes 64 MB."""


@attrs.define(eq=False)
class Room:
    """Says whether there is room for another one, and ends what may not wait any longer.

    Attributes:
        drivers: all sessions; it changes meanwhile.
        has_key: whether there is still a key of this name.
    """

    _drivers: Collection[Driver]
    _admission: Admission
    _settings: Settings
    _has_key: Callable[[str], bool]

    def for_frame(self, frame_bytes: int) -> bool:
        """Whether a frame that comes early may be kept with the others."""
        if frame_bytes <= EARLY_BYTES_UNCOUNTED:
            return True
        sessions = (driver.session for driver in self._drivers)
        kept = sum(session.early_bytes or 0 for session in sessions if session is not None)
        return kept + frame_bytes <= EARLY_SUM_BYTES_MAX

    def for_chat(self) -> ErrorCode | None:
        """Why a new chat, already among the drivers, has no room; None if it has."""
        if self._admission.state != "open":
            return ErrorCode.SERVICE_UNAVAILABLE
        if len(self._drivers) <= self._settings.chats_max:
            return None
        is_full = sum(map(_is_chat, self._drivers)) > self._settings.chats_max
        return ErrorCode.QUEUE_FULL if is_full else None

    def let_the_oldest_end(self) -> None:
        """Keep no more sessions without a connection than may be kept."""
        waiting = self._without_client()
        excess = len(waiting) - self._settings.detached_max
        if excess > 0:
            for driver in sorted(waiting, key=lambda it: it.now_ns() - (it.away_ns or 0))[-excess:]:
                driver.wait_no_longer()

    def end_revoked(self) -> None:
        """End sessions that wait for a client whose key was removed."""
        for driver in self._without_client():
            if not self._has_key(driver.owner):
                driver.wait_no_longer()

    def _without_client(self) -> list[Driver]:
        return [it for it in self._drivers if it.away_ns is not None and it.is_resumable]


def _is_chat(driver: Driver) -> bool:
    """Whether it is a chat that goes on: connected, with a slot for its turns only."""
    over = driver.session is not None and driver.session.state is State.CLOSED
    return not over and driver.mode == "chat"
