"""A session's way to a slot, as its effects ask for it.

Admit -> Admitted | AdmissionRefused
EnterQueue -> TicketMoved..., then SlotLeased | TicketCancelled | AdmissionRefused
LeaveQueue -> TicketLeft, unless a slot was leased just before
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import ErrorCode
from protocol.values.messages import QueuePlace

from ..slots.admission import Admission, Refused, Ticket
from ..slots.pool import Lease
from .calls import Inbox


@attrs.define(eq=False, kw_only=True)
class Entry:
    """One session's place in the queue.

    Attributes:
        on_leased: takes the slot.
        admit: refuses a connection without a slot, with its code, where there is no room.
        owner: the name of the session's key; empty where the server has no keys.
        refusal: the code with which it is refused a slot; None: it may have one.
    """

    _admission: Admission
    _inbox: Inbox
    _on_leased: Callable[[Lease], None]
    _admit: Callable[[], ErrorCode | None]
    _owner: str
    _refusal: ErrorCode | None
    _ticket: Ticket | None = attrs.field(default=None, init=False)

    def ask_for_room(self) -> None:
        """Ask for room for a session without a slot."""
        refused = self._refusal or self._admit()
        if refused is None:
            self._inbox.post(ev.Admitted(at_ns=self._inbox.now_ns()))
        else:
            self._refuse(refused)

    def queue(self, effect: ef.EnterQueue) -> None:
        """Wait for a slot."""
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        try:
            self._ticket = self._admission.enter(
                effect.mode,
                ahead=effect.ahead,
                owner=self._owner,
                on_leased=self._on_leased,
                on_moved=self._move,
                on_cancelled=self._cancelled,
                on_refused=self._refuse,
            )
        except Refused as refused:
            self._refuse(refused.code)

    def leave(self) -> None:
        """Wait no longer, as the session says."""
        if self._ticket is not None and self._admission.leave(self._ticket):
            self._inbox.post(ev.TicketLeft(at_ns=self._inbox.now_ns()))

    def give_up(self) -> None:
        """Wait no longer, and post nothing."""
        if self._ticket is not None:
            self._admission.leave(self._ticket)

    def _refuse(self, code: ErrorCode) -> None:
        self._inbox.post(ev.AdmissionRefused(at_ns=self._inbox.now_ns(), code=code))

    def _move(self, place: QueuePlace) -> None:
        self._inbox.post(ev.TicketMoved(at_ns=self._inbox.now_ns(), place=place))

    def _cancelled(self) -> None:
        self._inbox.post(ev.TicketCancelled(at_ns=self._inbox.now_ns()))
