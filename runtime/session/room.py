"""What the sessions of a server may hold together, before they have slots."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from protocol.values.errors import ErrorCode

from ..settings.bounds import MIB
from ..slots.admission import Admission
from .driver import Driver

EARLY_SUM_BYTES_MAX: Final = 128 * MIB
"""Opening messages kept while clients wait for a slot: fifty with 30 s of reference audio; half of
the budget of large messages."""
EARLY_BYTES_UNCOUNTED: Final = 64 * 1024
"""An opening message without voices is always kept: a queue of a thousand takes 64 MB."""


class Room:
    """Says whether there is room for another one; `drivers` changes meanwhile."""

    def __init__(self, drivers: Collection[Driver], admission: Admission, chats_max: int) -> None:
        self._drivers = drivers
        self._admission = admission
        self._chats_max = chats_max

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
        if len(self._drivers) <= self._chats_max:
            return None
        is_full = sum(driver.is_chat for driver in self._drivers) > self._chats_max
        return ErrorCode.QUEUE_FULL if is_full else None
