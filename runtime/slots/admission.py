"""The admission queue for the slots of one pool: first in, first out.

- A session gets a slot, a place in the queue, or a refusal: `queue_full` above `queue_max`, and
  `service_unavailable` if no worker can be leased and none is coming.
- A full queue takes one more of a party (a key, or an address) that has at least two fewer in it
  than another one, whose last is refused: so one client cannot keep others out.
- No session waits while a slot is free; none overtakes another, in any mode, but for those that
  lost the slot that they had (`ahead`).
- A waiting session's place is reported to it when it changes, and by `refresh`.
- Callbacks only post events, must not raise, and run in a fixed order: new leases, oldest ticket
  first; then places, front first. A nested call's callbacks run after the outer one's.
- The clock and the ids are injected. Only the event loop's thread may call it.

A wait is estimated from how long slots were held before, in whole nanoseconds. The queue is played
through: each slot in use comes free, the next in line takes it for an average session of its mode,
and so on. Averages are kept per mode: a turn of chat takes seconds, a duplex session minutes. The
rest of a slot in use is drawn from past sessions of its mode that took longer. The first of several
slots comes free sooner than the mean: slots are sorted, and the k-th of n gets the k/(n + 1)
quantile, where the k-th of n random draws lies. No session is expected to outlast its limit, which
counts from its connection, the queue included.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import attrs

from protocol.values.errors import ErrorCode
from protocol.values.limits import NS_PER_S, OF_MODE, Mode
from protocol.values.messages import QueuePlace

from ..settings.settings import QUEUE_MAX
from .workers import Lease, Pool

QUEUE_REPORTED_MAX: Final = 8
"""In a longer queue only `refresh` reports its length: each arrival would be sent to all."""
ESTIMATE_S_MIN: Final = 1
"""Seconds; an estimate is never 0, even for an overdue slot."""
SESSION_S_ASSUMED: Final = 90
"""Assumed until a session has ended: the context lasts about that long (000)."""
TURN_S_ASSUMED: Final = 10
"""Assumed until a turn of chat has ended: a few hundred tokens and their prefill."""
SESSIONS_AVERAGED: Final = 32
"""Past sessions kept for each mode: enough to be steady, few enough to follow the day."""
OVERDUE_SHARE: Final = 0.5
"""Share of the average that is left to a session longer than all that are kept."""


class Refused(Exception):  # noqa: N818 - a fact about the asker, not a fault
    """No slot and no place; `code` is `queue_full`, `worker_busy` or `service_unavailable`."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.value)
        self.code = code


@attrs.frozen(kw_only=True)
class Ticket:
    """One request for a slot: an id of `ticket_` and 12 hex digits.

    `owner` and `party` may be empty.
    """

    ticket_id: str
    mode: Mode
    owner: str = ""
    party: str = ""


@attrs.frozen(kw_only=True)
class TicketStatus:
    """A waiting session; `waited_s` counts whole seconds."""

    ticket: Ticket
    place: QueuePlace
    waited_s: int


@attrs.frozen(kw_only=True)
class RunningTask:
    """A slot in use; `held_s` counts whole seconds, `left_s` is an estimate."""

    lease: Lease
    mode: Mode
    held_s: int
    left_s: int


@attrs.define(kw_only=True)
class _QueuedTicket:
    """A ticket in the queue; `reported` is the last place that was reported to it."""

    ticket: Ticket
    since_ns: int
    on_leased: Callable[[Lease], None]
    on_moved: Callable[[QueuePlace], None]
    on_cancelled: Callable[[], None]
    on_refused: Callable[[ErrorCode], None]
    ahead: bool = False
    reported: QueuePlace | None = None


@attrs.frozen
class _SlotUse:
    """A slot in use: since when, and for how long its session queued before."""

    mode: Mode
    since_ns: int
    waited_ns: int


class Admission:
    """The queue over one pool.

    Args:
        pool: only this object leases its slots and gives them back.
        clock_ns: monotonic nanoseconds, used for estimates and waiting times only.
        new_ticket_id: returns `ticket_` and 12 hex digits, unique.
        queue_max: the most sessions that wait; 0 turns the queue off (`worker_busy`).
        more_to_come: whether a replacement is coming; call `review` after each change.
        limit_s: the longest session of a mode in seconds, for estimates; 0 means no limit.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        clock_ns: Callable[[], int],
        new_ticket_id: Callable[[], str],
        queue_max: int = QUEUE_MAX,
        more_to_come: Callable[[], bool] = lambda: False,
        limit_s: Callable[[Mode], int] = lambda _: 0,
    ) -> None:
        self._pool = pool
        self._more_to_come = more_to_come
        self._clock_ns = clock_ns
        self._new_ticket_id = new_ticket_id
        self._queue_max = queue_max
        self.is_draining = False
        self._waiting: dict[str, _QueuedTicket] = {}
        self._held: dict[Lease, _SlotUse] = {}
        self._durations = Durations(limit_s)
        self._due: deque[Callable[[], None]] = deque()
        self._is_reporting = False

    # -- for sessions ---------------------------------------------------------------------------

    def enter(
        self,
        mode: Mode,
        *,
        ahead: bool = False,
        owner: str = "",
        party: str = "",
        on_leased: Callable[[Lease], None],
        on_moved: Callable[[QueuePlace], None],
        on_cancelled: Callable[[], None],
        on_refused: Callable[[ErrorCode], None],
    ) -> Ticket:
        """Ask for a slot; `on_leased` or `on_moved` is called before this returns.

        Args:
            ahead: the session lost its slot: it goes before those that never had one, is not
                refused for a full queue, and gets a slot while the server drains.
            owner: the name of the session's key; empty where the server has no keys.
            party: to whom the session counts.
            on_leased: called at most once with the slot; the session must `release` it.
            on_moved: called with each new place.
            on_cancelled: called at most once, when an operator deletes the ticket.
            on_refused: called at most once, when no slot will come any more.

        `Refused`: there is no slot and no place in the queue.
        """
        if ahead and self._is_hopeless():
            raise Refused(ErrorCode.SERVICE_UNAVAILABLE)
        if not ahead:
            self.refuse_where_full(party)
            if self._is_full:
                last = self._waiting.pop(self._last_of_most(party))
                self._due.append(partial(last.on_refused, ErrorCode.QUEUE_FULL))
        ticket = Ticket(ticket_id=self._new_ticket_id(), mode=mode, owner=owner, party=party)
        self._waiting[ticket.ticket_id] = _QueuedTicket(
            ticket=ticket,
            since_ns=self._clock_ns(),
            on_leased=on_leased,
            on_moved=on_moved,
            on_cancelled=on_cancelled,
            on_refused=on_refused,
            ahead=ahead,
        )
        if ahead:
            first_come = sorted(self._waiting.items(), key=lambda item: not item[1].ahead)
            self._waiting = dict(first_come)
        self._lease_free_slots()
        return ticket

    def leave(self, ticket: Ticket) -> bool:
        """Leave the queue; False if the ticket was not waiting any more; a callback says why."""
        if self._waiting.pop(ticket.ticket_id, None) is None:
            return False
        self._lease_free_slots()
        return True

    def release(self, lease: Lease, *, condemned: bool = False) -> None:
        """Give a slot back and lease it to the next in line (B5).

        A `condemned` worker hangs or is lost, and is not leased again (B4). A second release of a
        lease raises `LocalProtocolError`.
        """
        self._pool.release(lease, condemned=condemned)
        held = self._held.pop(lease)
        if not condemned:  # the time of a hung session says nothing about the next one
            self._durations.add(held.mode, self._clock_ns() - held.since_ns)
        self.review()

    # -- for operators and the server -----------------------------------------------------------

    def cancel(self, ticket_id: str) -> bool:
        """Delete a ticket and tell its session; False if it does not wait."""
        waiting = self._waiting.pop(ticket_id, None)
        if waiting is None:
            return False
        self._due.append(waiting.on_cancelled)
        self._lease_free_slots()
        return True

    def refresh(self) -> None:
        """Report its place to each waiting session, even if unchanged; called now and then."""
        self._report(estimates=True)

    def review(self) -> None:
        """Lease the slots of new workers, or refuse the queue where no worker will come."""
        if self._is_hopeless():
            for waiting in self._waiting.values():
                self._due.append(partial(waiting.on_refused, ErrorCode.SERVICE_UNAVAILABLE))
            self._waiting.clear()
        self._lease_free_slots()

    def drain(self) -> None:
        """Stop admitting; waiting sessions stay in the queue and get no slot."""
        self.is_draining = True

    @property
    def queue_length(self) -> int:
        """The number of waiting sessions."""
        return len(self._waiting)

    @property
    def first_wait_s(self) -> int:
        """How long the first in the queue has waited, in whole seconds; 0 for an empty queue."""
        first = next(iter(self._waiting.values()), None)
        return 0 if first is None else (self._clock_ns() - first.since_ns) // NS_PER_S

    def places(self) -> tuple[QueuePlace, ...]:
        """Every waiting session's place, front of the queue first."""
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

    def tickets(self) -> tuple[TicketStatus, ...]:
        """The waiting sessions, front first."""
        now_ns = self._clock_ns()
        return tuple(
            TicketStatus(
                ticket=waiting.ticket, place=place, waited_s=(now_ns - waiting.since_ns) // NS_PER_S
            )
            for place, waiting in zip(self.places(), self._waiting.values(), strict=True)
        )

    def running(self) -> tuple[RunningTask, ...]:
        """The slots in use, in the order of their leases."""
        now_ns = self._clock_ns()
        return tuple(
            RunningTask(
                lease=lease,
                mode=held.mode,
                held_s=(now_ns - held.since_ns) // NS_PER_S,
                left_s=-(-self._durations.mean_left_ns(*_times(held, now_ns)) // NS_PER_S),
            )
            for lease, held in self._held.items()
        )

    # -- inside ---------------------------------------------------------------------------------

    def refuse_where_full(self, party: str) -> None:
        """Raise `Refused` where a new session of a party would find neither a slot nor a place."""
        if self.is_draining or self._is_hopeless():
            raise Refused(ErrorCode.SERVICE_UNAVAILABLE)
        if self._pool.counts.free:
            return
        if self._queue_max == 0:
            raise Refused(ErrorCode.WORKER_BUSY)
        if self._is_full and not self._last_of_most(party):
            raise Refused(ErrorCode.QUEUE_FULL)

    @property
    def _is_full(self) -> bool:
        return not self._pool.counts.free and len(self._waiting) >= self._queue_max

    def _last_of_most(self, party: str) -> str:
        """The last ticket of the party with most, if `party` has at least two fewer; or empty."""
        waiting = {name: it for name, it in self._waiting.items() if not it.ahead}
        tickets = Counter(it.ticket.party for it in waiting.values())
        heaviest, most = max(tickets.items(), key=lambda item: item[1], default=("", 0))
        if most < tickets[party] + 2:
            return ""
        return next(name for name in reversed(waiting) if waiting[name].ticket.party == heaviest)

    def _is_hopeless(self) -> bool:
        """No worker can be leased, and no replacement is coming."""
        counts = self._pool.counts
        return counts.condemned == counts.slots and not self._more_to_come()

    def _lease_free_slots(self) -> None:
        """Lease the free slots to the front of the queue, then report the changes."""
        while self._may_lease() and (lease := self._pool.lease()):
            waiting = self._waiting.pop(next(iter(self._waiting)))
            now_ns = self._clock_ns()
            waited_ns = now_ns - waiting.since_ns
            self._held[lease] = _SlotUse(waiting.ticket.mode, now_ns, waited_ns)
            self._due.append(partial(waiting.on_leased, lease))
        self._report(estimates=False)

    def _may_lease(self) -> bool:
        """Whether the first in line may have a slot; a server that drains goes on with its own."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and (not self.is_draining or first.ahead)

    def _report(self, *, estimates: bool) -> None:
        """Call the callbacks that are due; a nested call leaves them to the outer one."""
        self._due.append(partial(self._report_places, estimates=estimates))
        if self._is_reporting:
            return
        self._is_reporting = True
        try:
            while self._due:
                self._due.popleft()()
        finally:
            self._is_reporting = False

    def _report_places(self, *, estimates: bool) -> None:
        for place in self.places():
            waiting = self._waiting.get(place.ticket_id)
            if waiting is not None and _differs(waiting.reported, place, estimates=estimates):
                waiting.reported = place
                waiting.on_moved(place)

    def _estimates_s(self) -> list[int]:
        """Estimated waits in whole seconds, by position."""
        now_ns = self._clock_ns()
        held = [
            _times(held, now_ns)
            for lease, held in self._held.items()
            if not self._pool.is_condemned(lease.worker)
        ]
        waiting = [(each.ticket.mode, now_ns - each.since_ns) for each in self._waiting.values()]
        return [
            max(ESTIMATE_S_MIN, -(-wait_ns // NS_PER_S))
            for wait_ns in waits_ns(self._durations, held, waiting)
        ]


def _times(held: _SlotUse, now_ns: int) -> tuple[Mode, int, int]:
    return held.mode, now_ns - held.since_ns, held.waited_ns


def _differs(reported: QueuePlace | None, place: QueuePlace, *, estimates: bool) -> bool:
    if reported is None or estimates:
        return True
    if place.queue_length > QUEUE_REPORTED_MAX and reported.queue_length > QUEUE_REPORTED_MAX:
        return reported.position != place.position
    return (reported.position, reported.queue_length) != (place.position, place.queue_length)


# -- estimates ------------------------------------------------------------------------------------


def _assumed_ns(mode: Mode) -> int:
    is_turn = OF_MODE[mode].work == "turn"
    return (TURN_S_ASSUMED if is_turn else SESSION_S_ASSUMED) * NS_PER_S


class Durations:
    """How long slots were held recently, by mode; `limit_s` 0 means no limit."""

    def __init__(self, limit_s: Callable[[Mode], int] = lambda _: 0) -> None:
        self._limit_s = limit_s
        self._recent_ns: dict[Mode, deque[int]] = {}
        self._sorted_ns: dict[Mode, list[int]] = {}

    def add(self, mode: Mode, held_ns: int) -> None:
        """Add the time of a slot that came back."""
        recent_ns = self._recent_ns.setdefault(mode, deque(maxlen=SESSIONS_AVERAGED))
        recent_ns.append(held_ns)
        self._sorted_ns[mode] = sorted(recent_ns)

    def average_ns(self, mode: Mode) -> int:
        """The running average of a mode; an assumed value before the first end."""
        recent_ns = self._recent_ns.get(mode)
        average_ns = sum(recent_ns) // len(recent_ns) if recent_ns else _assumed_ns(mode)
        return self.within_limit_ns(mode, average_ns)

    def within_limit_ns(self, mode: Mode, left_ns: int, lasted_ns: int = 0) -> int:
        """Bound the rest of a session by its limit; it has `lasted_ns`, the queue included."""
        limit_ns = self._limit_s(mode) * NS_PER_S
        return min(left_ns, max(limit_ns - lasted_ns, 0)) if limit_ns else left_ns

    def left_ns(self, mode: Mode, held_ns: int, waited_ns: int = 0) -> list[int]:
        """The rests of past sessions that took longer than `held_ns`: rising, never empty.

        `waited_ns`: for how long the session queued before, which its limit counts too.
        """
        took_ns = self._sorted_ns.get(mode) or [_assumed_ns(mode)]
        left_ns = [longer_ns - held_ns for longer_ns in took_ns[bisect_right(took_ns, held_ns) :]]
        left_ns = left_ns or [round(self.average_ns(mode) * OVERDUE_SHARE)]
        lasted_ns = waited_ns + held_ns
        return [self.within_limit_ns(mode, each_ns, lasted_ns) for each_ns in left_ns]

    def mean_left_ns(self, mode: Mode, held_ns: int, waited_ns: int = 0) -> int:
        """Estimate how much longer a session holds its slot; arguments as of `left_ns`."""
        left_ns = self.left_ns(mode, held_ns, waited_ns)
        return sum(left_ns) // len(left_ns)


def waits_ns(
    durations: Durations, held: Iterable[tuple[Mode, int, int]], waiting: Sequence[tuple[Mode, int]]
) -> list[int]:
    """Estimate every session's wait: nanoseconds by position, never falling.

    Args:
        held: each slot in use: its session's mode, nanoseconds held, and queued before.
        waiting: each queued session: its mode, and nanoseconds waited; front first.
    """
    if not waiting:
        return []
    left = [durations.left_ns(*times) for times in held]
    left.sort(key=lambda left_ns: sum(left_ns) / len(left_ns))
    free_in_ns = [_quantile(left_ns, k / (len(left) + 1)) for k, left_ns in enumerate(left, 1)]
    if not free_in_ns:  # no slot is in use or free: one will come, at an unknown time
        free_in_ns = [durations.average_ns(waiting[0][0])]
    heapq.heapify(free_in_ns)
    waits = []
    for mode, waited_ns in waiting:
        wait_ns = free_in_ns[0]
        waits.append(wait_ns)
        lasted_ns = waited_ns + wait_ns
        held_ns = durations.within_limit_ns(mode, durations.average_ns(mode), lasted_ns)
        heapq.heapreplace(free_in_ns, wait_ns + held_ns)
    return waits


def _quantile(rising: Sequence[int], share: float) -> int:
    """The quantile at `share`, interpolated between neighbours."""
    place = min(max(share * len(rising) - 0.5, 0), len(rising) - 1)
    low = int(place)
    high = min(low + 1, len(rising) - 1)
    return round(rising[low] + (rising[high] - rising[low]) * (place - low))
