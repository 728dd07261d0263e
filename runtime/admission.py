"""One queue, first in first out, for the slots of a pool.

A session that asks gets a slot at once, a place in the queue, or a refusal with its wire code.
The one that has waited longest gets the next slot that is given back.

Rules:

- Nobody waits while a slot is free, and nobody overtakes, whatever the mode.
- At most `queue_max` wait; one more is refused, and told so (`queue_full`).
- While no worker can be leased, they wait for one that is being replaced; where none is on its way
  all are refused (`service_unavailable`).
- Whoever waits is told its place when it changes, and by `refresh` when only the estimate did.
- Callbacks are called one after the other, in the same order for the same calls: new leases first,
  oldest ticket first; then places, front of the queue first. Where a callback calls back in here,
  what that leads to is told after it, never within it.

Callbacks only post events and must not raise. The clock and the ids are injected. It does not
decide how often an estimate is sent on (the session does), time out those who wait (their session's
timer does), or replace workers (`runtime.workers`). It is not thread-safe: the event loop's thread
alone calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import attrs

from protocol.errors import ErrorCode
from protocol.limits import NS_PER_S
from protocol.messages import Mode, QueuePlace

from .estimates import Durations, waits_ns
from .pool import Lease, Pool
from .settings import QUEUE_MAX

QUEUE_TOLD_MAX: Final = 8
"""In a longer queue its length alone is no news but for `refresh`: else whoever comes and goes at
its end would have all others told, each time."""
ESTIMATE_S_MIN: Final = 1
"""Somebody who waits is never told to wait 0 seconds, however overdue a slot is."""

AdmissionState = Literal["loading", "open", "draining"]


class Refused(Exception):  # noqa: N818 - a fact about the asker, not a fault
    """There is no slot and no place in the queue.

    Args:
        code: `queue_full`, `worker_busy` or `service_unavailable`.
    """

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.value)
        self.code = code


@attrs.frozen(kw_only=True)
class Ticket:
    """Names one request for a slot.

    Attributes:
        ticket_id: `ticket_` and 12 hex digits.
        mode: what the session carries.
        owner: the name of the key that the session came with; empty where there are no keys.
    """

    ticket_id: str
    mode: Mode
    owner: str = ""


@attrs.frozen(kw_only=True)
class TicketStatus:
    """Somebody who waits.

    Attributes:
        ticket: who.
        place: where in the queue, and how long it may still take.
        waited_s: whole seconds in the queue so far.
    """

    ticket: Ticket
    place: QueuePlace
    waited_s: int


@attrs.frozen(kw_only=True)
class RunningTask:
    """A slot that is held.

    Attributes:
        lease: the slot.
        mode: what its session carries.
        held_s: whole seconds so far.
        left_s: seconds until it comes back, as estimated.
    """

    lease: Lease
    mode: Mode
    held_s: int
    left_s: int


@attrs.define(kw_only=True)
class _Waiting:
    """A ticket in the queue, since when, whom to tell, and what it was told last."""

    ticket: Ticket
    since_ns: int
    on_leased: Callable[[Lease], None]
    on_moved: Callable[[QueuePlace], None]
    on_cancelled: Callable[[], None]
    on_refused: Callable[[ErrorCode], None]
    told: QueuePlace | None = None


class Admission:
    """The queue over one pool.

    Args:
        pool: its slots; from now on only this object leases them and gives them back.
        clock_ns: monotonic nanoseconds, for estimates and what is told of waits alone.
        new_ticket_id: gives `ticket_` and 12 hex digits, another one each time.
        queue_max: most sessions that wait; 0 turns queueing off (`worker_busy`).
        state: `loading` refuses everybody until `open` is called.
        more_to_come: whether a worker is on its way in place of one that was condemned; whenever
            that changes, or a worker came, `review` is called.
        limit_s: how many seconds a session of a mode may last in all, for estimates; 0: no limit.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        clock_ns: Callable[[], int],
        new_ticket_id: Callable[[], str],
        queue_max: int = QUEUE_MAX,
        state: AdmissionState = "open",
        more_to_come: Callable[[], bool] = lambda: False,
        limit_s: Callable[[Mode], int] = lambda _: 0,
    ) -> None:
        self._pool = pool
        self._more_to_come = more_to_come
        self._clock_ns = clock_ns
        self._new_ticket_id = new_ticket_id
        self._queue_max = queue_max
        self._state: AdmissionState = state
        self._waiting: dict[str, _Waiting] = {}
        self._held: dict[Lease, tuple[Mode, int]] = {}
        self._durations = Durations(limit_s)
        self._untold: deque[Callable[[], None]] = deque()
        self._telling = False

    # -- for sessions ---------------------------------------------------------------------------

    def enter(
        self,
        mode: Mode,
        *,
        owner: str = "",
        on_leased: Callable[[Lease], None],
        on_moved: Callable[[QueuePlace], None],
        on_cancelled: Callable[[], None],
        on_refused: Callable[[ErrorCode], None],
    ) -> Ticket:
        """Ask for a slot.

        One of `on_leased` and `on_moved` is called before this returns.

        Args:
            mode: what the session carries; the queue is one for all modes.
            owner: the name of the key that it came with; empty where there are no keys.
            on_leased: called at most once, with the session's slot; it is then the session's to
                `release`.
            on_moved: called with each new place.
            on_cancelled: called at most once, when an operator deletes the ticket.
            on_refused: called at most once, when no slot will come any more.

        Returns:
            The ticket, for `leave`.

        Raises:
            Refused: there is no slot and no place in the queue.
        """
        self._refuse_where_full()
        ticket = Ticket(ticket_id=self._new_ticket_id(), mode=mode, owner=owner)
        self._waiting[ticket.ticket_id] = _Waiting(
            ticket=ticket,
            since_ns=self._clock_ns(),
            on_leased=on_leased,
            on_moved=on_moved,
            on_cancelled=on_cancelled,
            on_refused=on_refused,
        )
        self._hand_out()
        return ticket

    def leave(self, ticket: Ticket) -> bool:
        """Wait no more.

        Returns:
            True: it was waiting and is out, no callback will come. False: it waited no more; its
            slot, or its cancellation, is told.
        """
        if self._waiting.pop(ticket.ticket_id, None) is None:
            return False
        self._hand_out()
        return True

    def release(self, lease: Lease, *, condemned: bool = False) -> None:
        """Give a slot back and hand it to the next in line (B5).

        Args:
            lease: as `on_leased` got it.
            condemned: its worker hangs or is lost, and is lent to nobody any more (B4).

        Raises:
            LocalProtocolError: it was released already.
        """
        self._pool.give_back(lease, condemned=condemned)
        mode, since_ns = self._held.pop(lease)
        if not condemned:  # what hung tells nothing of how long the next will take
            self._durations.add(mode, self._clock_ns() - since_ns)
        self.review()

    # -- for operators and the server -----------------------------------------------------------

    def cancel(self, ticket_id: str, owner: str | None = None) -> bool:
        """Delete a ticket; its session is told.

        Args:
            ticket_id: whose.
            owner: the name of a key, which deletes none but its own; None deletes any.

        Returns:
            False: nobody waits under that id, or it is not the owner's.
        """
        waiting = self._waiting.get(ticket_id)
        if waiting is None or owner not in (None, waiting.ticket.owner):
            return False
        del self._waiting[ticket_id]
        self._untold.append(waiting.on_cancelled)
        self._hand_out()
        return True

    def refresh(self) -> None:
        """Tell all who wait their place; a task of the server calls it now and then.

        Also those whose estimate is as it was told: their session may have kept it to itself then.
        """
        self._tell(estimates=True)

    def review(self) -> None:
        """Workers came or went: hand their slots out, or refuse those who wait where none will."""
        if self._is_hopeless():
            for waiting in self._waiting.values():
                self._untold.append(partial(waiting.on_refused, ErrorCode.SERVICE_UNAVAILABLE))
            self._waiting.clear()
        self._hand_out()

    def open(self) -> None:
        """Admit from now on: the model is loaded."""
        self._state = "open"
        self._hand_out()

    def drain(self) -> None:
        """Admit nobody any more; those who wait stay until they leave, and get no slot."""
        self._state = "draining"

    @property
    def state(self) -> AdmissionState:
        """Whether it admits."""
        return self._state

    @property
    def queue_length(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def places(self) -> tuple[QueuePlace, ...]:
        """Everybody's place, front of the queue first."""
        waits_s = self._estimates_s()
        return tuple(
            QueuePlace(
                position=position,
                estimated_wait_s=waits_s[position - 1],
                ticket_id=ticket_id,
                queue_length=len(self._waiting),
            )
            for position, ticket_id in enumerate(self._waiting, start=1)
        )

    def tickets(self, owner: str | None = None) -> tuple[TicketStatus, ...]:
        """Say who waits, front of the queue first.

        Args:
            owner: the name of a key, which sees none but its own; None sees all.
        """
        now_ns = self._clock_ns()
        return tuple(
            TicketStatus(
                ticket=waiting.ticket,
                place=place,
                waited_s=(now_ns - waiting.since_ns) // NS_PER_S,
            )
            for place, waiting in zip(self.places(), self._waiting.values(), strict=True)
            if owner in (None, waiting.ticket.owner)
        )

    def running(self) -> tuple[RunningTask, ...]:
        """Say who holds a slot, in the order in which they got it."""
        now_ns = self._clock_ns()
        return tuple(
            RunningTask(
                lease=lease,
                mode=mode,
                held_s=(now_ns - since_ns) // NS_PER_S,
                left_s=-(-self._durations.mean_left_ns(mode, now_ns - since_ns) // NS_PER_S),
            )
            for lease, (mode, since_ns) in self._held.items()
        )

    # -- inside ---------------------------------------------------------------------------------

    def _refuse_where_full(self) -> None:
        if self._state != "open" or self._is_hopeless():
            raise Refused(ErrorCode.SERVICE_UNAVAILABLE)
        if self._pool.counts.free:
            return
        if self._queue_max == 0:
            raise Refused(ErrorCode.WORKER_BUSY)
        if len(self._waiting) >= self._queue_max:
            raise Refused(ErrorCode.QUEUE_FULL)

    def _is_hopeless(self) -> bool:
        """No worker can be leased, nor is one on its way."""
        counts = self._pool.counts
        return counts.condemned == counts.slots and not self._more_to_come()

    def _hand_out(self) -> None:
        """Lease what is free to those in front, then tell everybody what changed."""
        while self._state == "open" and self._waiting and (lease := self._pool.lease()):
            waiting = self._waiting.pop(next(iter(self._waiting)))
            self._held[lease] = (waiting.ticket.mode, self._clock_ns())
            self._untold.append(partial(waiting.on_leased, lease))
        self._tell(estimates=False)

    def _tell(self, *, estimates: bool) -> None:
        """Call the callbacks that are due; a nested call leaves them to the outer one."""
        self._untold.append(partial(self._tell_places, estimates=estimates))
        if self._telling:
            return
        self._telling = True
        try:
            while self._untold:
                self._untold.popleft()()
        finally:
            self._telling = False

    def _tell_places(self, *, estimates: bool) -> None:
        for place in self.places():
            waiting = self._waiting.get(place.ticket_id)
            if waiting is not None and _differs(waiting.told, place, estimates=estimates):
                waiting.told = place
                waiting.on_moved(place)

    def _estimates_s(self) -> list[int]:
        """Estimate everybody's wait, in whole seconds by position."""
        now_ns = self._clock_ns()
        held = [
            (mode, now_ns - since_ns)
            for lease, (mode, since_ns) in self._held.items()
            if not self._pool.is_condemned(lease.worker)
        ]
        waiting = [(each.ticket.mode, now_ns - each.since_ns) for each in self._waiting.values()]
        return [
            max(ESTIMATE_S_MIN, -(-wait_ns // NS_PER_S))
            for wait_ns in waits_ns(self._durations, held, waiting)
        ]


def _differs(told: QueuePlace | None, place: QueuePlace, *, estimates: bool) -> bool:
    if told is None or estimates:
        return True
    if place.queue_length > QUEUE_TOLD_MAX and told.queue_length > QUEUE_TOLD_MAX:
        return told.position != place.position
    return (told.position, told.queue_length) != (place.position, place.queue_length)
