"""Admission: first in, first out; every slot handed on; every place told."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.errors import ErrorCode, LocalProtocolError
from protocol.limits import NS_PER_S
from protocol.messages import QueuePlace
from runtime.admission import (
    QUEUE_MAX,
    SESSION_S_ASSUMED,
    Admission,
    AdmissionState,
    Refused,
    Ticket,
)
from runtime.pool import Lease, Pool


@attrs.define
class Guest:
    """A session, as admission sees it: it keeps what it was told."""

    name: str
    diary: list[tuple[str, str]]
    lease: Lease | None = None
    place: QueuePlace | None = None
    cancelled: bool = False
    ticket: Ticket | None = None

    def on_leased(self, lease: Lease) -> None:
        assert self.lease is None
        self.lease = lease
        self.diary.append((self.name, f"slot {lease.slot}"))

    def on_moved(self, place: QueuePlace) -> None:
        self.place = place
        self.diary.append((self.name, f"{place.position} of {place.queue_length}"))

    def on_cancelled(self) -> None:
        self.cancelled = True
        self.diary.append((self.name, "cancelled"))

    def on_refused(self, code: ErrorCode) -> None:
        self.diary.append((self.name, code.value))


class House:
    """An admission with its guests, a clock that is set by hand and ids that count."""

    def __init__(
        self, slots: int = 1, queue_max: int = QUEUE_MAX, state: AdmissionState = "open"
    ) -> None:
        self.now_ns = 0
        self.diary: list[tuple[str, str]] = []
        self.pool = Pool(slots)
        numbers = count()
        self.admission = Admission(
            self.pool,
            clock_ns=lambda: self.now_ns,
            new_ticket_id=lambda: f"ticket_{next(numbers):012x}",
            queue_max=queue_max,
            state=state,
        )

    def enter(self, name: str) -> Guest:
        guest = Guest(name, self.diary)
        guest.ticket = self.admission.enter(
            "video",
            on_leased=guest.on_leased,
            on_moved=guest.on_moved,
            on_cancelled=guest.on_cancelled,
            on_refused=guest.on_refused,
        )
        return guest

    def leave(self, guest: Guest) -> bool:
        assert guest.ticket is not None
        return self.admission.leave(guest.ticket)

    def release(self, guest: Guest, *, condemned: bool = False) -> None:
        assert guest.lease is not None
        self.admission.release(guest.lease, condemned=condemned)

    def refusal(self) -> ErrorCode:
        with pytest.raises(Refused) as refused:
            self.enter("refused")
        return refused.value.code


def test_tells_places_in_one_order() -> None:
    """Clients would be told places that contradict each other, and logs would not repeat."""
    house = House()
    ann = house.enter("ann")
    house.enter("bob")
    house.enter("cid")
    house.release(ann)
    assert house.diary == [
        ("ann", "slot 0"),
        ("bob", "1 of 1"),
        ("bob", "1 of 2"),
        ("cid", "2 of 2"),
        ("bob", "slot 0"),
        ("cid", "1 of 1"),
    ]


def test_moves_up_those_behind_one_who_leaves() -> None:
    """Those behind a client that hung up would go on waiting for it."""
    house = House()
    house.enter("ann")
    bob, cid = house.enter("bob"), house.enter("cid")
    assert house.leave(bob)
    assert not house.leave(bob)
    assert cid.place == house.admission.places()[0]
    assert house.diary[-1] == ("cid", "1 of 1")


def test_says_that_a_slot_was_faster_than_leaving() -> None:
    """A slot leased just before its client left would be lost (B5)."""
    house = House()
    ann = house.enter("ann")
    assert not house.leave(ann)
    assert ann.lease is not None


def test_deletes_a_ticket_for_an_operator() -> None:
    """An operator could not clear the queue, or its session would never hear of it."""
    house = House()
    ann, bob, cid = house.enter("ann"), house.enter("bob"), house.enter("cid")
    assert bob.ticket is not None
    assert house.admission.cancel(bob.ticket.ticket_id)
    assert house.diary[-2:] == [("bob", "cancelled"), ("cid", "1 of 1")]
    assert not house.admission.cancel(bob.ticket.ticket_id)
    house.release(ann)
    assert bob.lease is None
    assert cid.lease is not None


def test_refuses_past_the_bound_and_without_a_queue() -> None:
    """A client would wait in a queue that can never serve it in time."""
    house = House(queue_max=1)
    house.enter("ann")
    house.enter("bob")
    assert house.refusal() is ErrorCode.QUEUE_FULL
    house = House(queue_max=0)
    house.enter("ann")
    assert house.refusal() is ErrorCode.WORKER_BUSY


def test_admits_nobody_while_loading_or_draining() -> None:
    """A client would get a slot of a model that is not there."""
    house = House(state="loading")
    assert house.refusal() is ErrorCode.SERVICE_UNAVAILABLE
    house.admission.open()
    ann, bob = house.enter("ann"), house.enter("bob")
    house.admission.drain()
    assert house.admission.state == "draining"
    assert house.refusal() is ErrorCode.SERVICE_UNAVAILABLE
    house.release(ann)
    assert bob.lease is None
    assert house.leave(bob)


def test_tells_those_who_wait_for_a_slot_that_will_not_come() -> None:
    """A client waits out its whole time for a server whose last worker is gone (B4)."""
    house = House()
    ann = house.enter("ann")
    house.enter("bob")
    house.release(ann, condemned=True)
    assert house.diary[-1] == ("bob", "service_unavailable")
    assert house.admission.queue_length == 0


def test_refuses_where_every_slot_is_condemned() -> None:
    """A client would wait for a worker that will never come back."""
    house = House()
    house.release(house.enter("ann"), condemned=True)
    assert house.refusal() is ErrorCode.SERVICE_UNAVAILABLE


def test_refuses_a_second_release() -> None:
    """Two sessions would be put on one slot (B5)."""
    house = House()
    ann = house.enter("ann")
    bob = house.enter("bob")
    house.release(ann)
    with pytest.raises(LocalProtocolError, match="generation 1"):
        house.release(ann)
    assert bob.lease is not None


def test_estimates_from_what_sessions_took() -> None:
    """Clients would be told waits that have nothing to do with the sessions before them."""
    house = House(slots=2)
    ann, bob = house.enter("ann"), house.enter("bob")
    cid = house.enter("cid")
    assert cid.place is not None
    assert cid.place.estimated_wait_s == SESSION_S_ASSUMED
    house.now_ns = 20 * NS_PER_S
    house.release(ann)  # The average is 20 s now; cid has slot 0 from 20 s on, bob is overdue.
    waits_s = [house.enter(name).place for name in ("dan", "eve", "fay", "gus")]
    assert [place.estimated_wait_s for place in waits_s if place] == [1, 20, 20, 40]
    assert bob.lease is not None


def test_refresh_tells_everybody_also_what_they_know() -> None:
    """A session that kept an estimate to itself, as it came too soon, would never tell it."""
    house = House()
    house.enter("ann")
    bob = house.enter("bob")
    told = len(house.diary)
    house.admission.refresh()
    assert len(house.diary) == told + 1
    house.now_ns = 30 * NS_PER_S
    house.admission.refresh()
    assert bob.place is not None
    assert bob.place.estimated_wait_s == SESSION_S_ASSUMED - 30
    assert len(house.diary) == told + 2


def test_survives_a_callback_that_releases_at_once() -> None:
    """A session that died as its slot came would stop the queue behind it."""
    house = House()
    ann = house.enter("ann")
    dead: list[Lease] = []

    def bury(lease: Lease) -> None:
        dead.append(lease)
        house.admission.release(lease)

    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    house.admission.enter(
        "audio", on_leased=bury, on_moved=nothing, on_cancelled=nothing, on_refused=nothing
    )
    cid = house.enter("cid")
    house.release(ann)
    assert dead == [Lease(slot=0, generation=2)]
    assert cid.lease == Lease(slot=0, generation=3)


SLOTS = 3
BOUND = 4


class AdmissionMachine(RuleBasedStateMachine):
    """Any calls in any order, against a model: a list that waits, a list that holds slots."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House(slots=SLOTS, queue_max=BOUND)
        self.waiting: list[Guest] = []
        self.holding: list[Guest] = []
        self.slots = SLOTS
        self.names = count()

    def serve(self) -> None:
        while self.waiting and len(self.holding) < self.slots:
            self.holding.append(self.waiting.pop(0))

    @rule()
    def enter(self) -> None:
        if self.slots == 0:
            assert self.house.refusal() is ErrorCode.SERVICE_UNAVAILABLE
        elif len(self.waiting) == BOUND:
            assert self.house.refusal() is ErrorCode.QUEUE_FULL
        else:
            self.waiting.append(self.house.enter(str(next(self.names))))
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), by_operator=st.booleans())
    def go(self, data: st.DataObject, by_operator: bool) -> None:
        guest = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert guest.ticket is not None
        if by_operator:
            assert self.house.admission.cancel(guest.ticket.ticket_id)
        else:
            assert self.house.leave(guest)
        assert guest.cancelled == by_operator
        assert guest.lease is None

    @precondition(lambda self: self.holding)
    @rule(data=st.data(), condemned=st.sampled_from([False, False, False, True]))
    def release(self, data: st.DataObject, condemned: bool) -> None:
        guest = self.holding.pop(data.draw(st.integers(0, len(self.holding) - 1)))
        assert not self.house.leave(guest)
        self.house.release(guest, condemned=condemned)
        self.slots -= condemned
        if self.slots == 0:
            self.waiting.clear()  # they are refused
        self.serve()

    @rule(seconds=st.integers(0, 200))
    def wait(self, seconds: int) -> None:
        self.house.now_ns += seconds * NS_PER_S
        self.house.admission.refresh()
        told = [guest.place for guest in self.waiting]
        assert told == list(self.house.admission.places())

    @invariant()
    def places_are_right(self) -> None:
        assert len(self.waiting) <= BOUND
        assert self.house.admission.queue_length == len(self.waiting)
        for position, guest in enumerate(self.waiting, start=1):
            assert guest.lease is None
            assert guest.place is not None
            assert guest.place.position == position
            assert guest.place.queue_length == len(self.waiting)
        waits_s = [place.estimated_wait_s for place in self.house.admission.places()]
        assert waits_s == sorted(waits_s)

    @invariant()
    def slots_are_right(self) -> None:
        leases = [guest.lease for guest in self.holding if guest.lease]
        assert len(leases) == len(self.holding)
        assert len({lease.slot for lease in leases}) == len(leases)
        assert set(self.house.pool.leases) == set(leases)
        counts = self.house.pool.counts
        assert (counts.leased, counts.condemned) == (len(leases), SLOTS - self.slots)
        assert counts.free == self.slots - len(leases)


TestAdmission = AdmissionMachine.TestCase
