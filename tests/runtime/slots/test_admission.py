"""Admission: first in, first out; every slot handed on; every place told."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.values.errors import ErrorCode, LocalProtocolError
from protocol.values.limits import NS_PER_S, Mode
from protocol.values.messages import QueuePlace
from runtime.settings.settings import QUEUE_MAX
from runtime.slots.admission import (
    QUEUE_REPORTED_MAX,
    SESSION_S_ASSUMED,
    Admission,
    Refused,
    Ticket,
)
from runtime.slots.workers import Lease, Pool


@attrs.define
class Guest:
    """A session, as admission sees it: it keeps what it was told."""

    name: str
    diary: list[tuple[str, str]]
    lease: Lease | None = None
    place: QueuePlace | None = None
    cancelled: bool = False
    refused: ErrorCode | None = None
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
        self.refused = code
        self.diary.append((self.name, code.value))


class House:
    """An admission with its guests, a clock that is set by hand and ids that count."""

    def __init__(self, *slots: int, queue_max: int = QUEUE_MAX) -> None:
        self.now_ns = 0
        self.diary: list[tuple[str, str]] = []
        self.pool = Pool(*(slots or (1,)))
        self.more_to_come = False
        numbers = count()
        self.admission = Admission(
            self.pool,
            clock_ns=lambda: self.now_ns,
            new_ticket_id=lambda: f"ticket_{next(numbers):012x}",
            queue_max=queue_max,
            more_to_come=lambda: self.more_to_come,
        )

    def enter(self, name: str, mode: Mode = "video", owner: str = "", party: str = "") -> Guest:
        guest = Guest(name, self.diary)
        guest.ticket = self.admission.enter(
            mode,
            owner=owner,
            party=party,
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

    def replace(self, worker: int, slots: int) -> int:
        """Put a new worker in the place of another."""
        self.pool.remove(worker)
        number = self.pool.add(slots)
        self.admission.review()
        return number

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


def test_one_party_does_not_keep_others_out_of_the_queue() -> None:
    """A client could fill the queue, again and again, and all others were refused."""
    house = House(queue_max=4)
    house.enter("first")
    flood = [house.enter(f"flood {number}", party="flooder") for number in range(4)]
    honest = house.enter("honest", party="honest")
    assert [guest.refused for guest in flood] == [None, None, None, ErrorCode.QUEUE_FULL]
    assert honest.place is not None
    assert honest.place.position == 4
    house.enter("another", party="another")
    assert flood[2].refused is ErrorCode.QUEUE_FULL
    for party in ("flooder", "honest"):  # they would have as many as the heaviest
        with pytest.raises(Refused):
            house.enter("late", party=party)
    assert house.admission.queue_length == 4


def test_says_who_holds_a_slot_and_how_long_it_may_take() -> None:
    """A page shows what runs, and what is left of it is what the queue is told."""
    house = House(2)
    ann, _bob = house.enter("ann"), house.enter("bob", "chat")
    house.now_ns = 30 * NS_PER_S
    told = house.admission.running()
    assert [(task.mode, task.held_s) for task in told] == [("video", 30), ("chat", 30)]
    assert told[0].left_s == SESSION_S_ASSUMED - 30
    assert told[1].left_s >= 1  # longer than any before it, and not over
    house.release(ann)
    assert [task.mode for task in house.admission.running()] == ["chat"]


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


def test_a_long_queue_is_told_its_places_at_once_and_its_length_now_and_then() -> None:
    """One client that comes and goes at the end would keep the server busy with telling all."""
    house = House()
    guests = [house.enter(f"guest {number}") for number in range(QUEUE_REPORTED_MAX + 4)]
    house.diary.clear()
    last = house.enter("last")
    assert [name for name, _ in house.diary] == ["last"]
    assert last.ticket is not None
    house.admission.leave(last.ticket)
    assert len(house.diary) == 1
    assert guests[3].ticket is not None
    house.admission.leave(guests[3].ticket)
    assert [name for name, _ in house.diary[1:]] == [guest.name for guest in guests[4:]]
    house.admission.refresh()
    assert {guest.place.queue_length for guest in guests[1:3] if guest.place} == {
        house.admission.queue_length
    }


def test_refuses_past_the_bound_and_without_a_queue() -> None:
    """A client would wait in a queue that can never serve it in time."""
    house = House(queue_max=1)
    house.enter("ann")
    house.enter("bob")
    assert house.refusal() is ErrorCode.QUEUE_FULL
    house = House(queue_max=0)
    house.enter("ann")
    assert house.refusal() is ErrorCode.WORKER_BUSY


def test_admits_nobody_while_draining() -> None:
    """A client would get a slot of a model that is about to go."""
    house = House()
    ann, bob = house.enter("ann"), house.enter("bob")
    house.admission.drain()
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


def test_refuses_where_every_worker_is_condemned() -> None:
    """A client would wait for a worker that will never come back."""
    house = House(2, 1)
    guests = [house.enter(name) for name in ("ann", "bob", "cid")]
    house.release(guests[1], condemned=True)
    assert house.enter("dan").place is not None
    house.release(guests[2], condemned=True)
    assert house.diary[-1] == ("dan", "service_unavailable")
    assert house.refusal() is ErrorCode.SERVICE_UNAVAILABLE


def test_waits_for_a_worker_that_is_being_replaced() -> None:
    """A restart of the model of a few seconds throws everybody out of the queue."""
    house = House()
    house.more_to_come = True
    ann = house.enter("ann")
    bob = house.enter("bob")
    house.release(ann, condemned=True)
    cid = house.enter("cid")
    assert (bob.lease, bob.refused, cid.place) == (None, None, house.admission.places()[1])
    house.replace(0, slots=2)
    assert bob.lease == Lease(slot=0, generation=2, worker=1)
    assert cid.lease == Lease(slot=1, generation=3, worker=1)


def test_refuses_those_who_wait_once_no_worker_is_counted_on() -> None:
    """They wait out their whole time for a model that cannot be loaded."""
    house = House()
    house.more_to_come = True
    house.release(house.enter("ann"), condemned=True)
    bob = house.enter("bob")
    house.more_to_come = False
    house.admission.review()
    assert bob.refused is ErrorCode.SERVICE_UNAVAILABLE
    assert house.refusal() is ErrorCode.SERVICE_UNAVAILABLE
    house.replace(0, slots=1)
    assert house.enter("cid").lease is not None


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
    house = House(2)
    ann, bob = house.enter("ann"), house.enter("bob")
    cid = house.enter("cid")
    assert cid.place is not None
    assert cid.place.estimated_wait_s == SESSION_S_ASSUMED
    house.now_ns = 20 * NS_PER_S
    house.release(ann)  # The average is 20 s now; cid has slot 0 from 20 s on, bob is overdue.
    waits_s = [house.enter(name).place for name in ("dan", "eve", "fay", "gus")]
    assert [place.estimated_wait_s for place in waits_s if place] == [10, 20, 30, 40]
    assert bob.lease is not None


def test_estimates_from_what_sessions_of_the_same_mode_took() -> None:
    """Somebody behind turns of chat would be told minutes, behind a session seconds."""
    house = House()
    for mode, takes_s in (("chat", 4), ("video", 200)):
        guest = house.enter(mode, mode)
        house.now_ns += takes_s * NS_PER_S
        house.release(guest)
    house.enter("ann", "chat")
    guests = [house.enter(mode, mode) for mode in ("chat", "video", "chat")]
    places = [guest.place for guest in guests]
    assert [place.estimated_wait_s for place in places if place] == [4, 8, 208]


def test_what_hung_teaches_no_average() -> None:
    """After one hung call everybody would be told its minutes."""
    house = House(1, 1)
    hung, sound = house.enter("hung"), house.enter("sound")
    house.now_ns = 30 * NS_PER_S
    house.release(sound)
    house.enter("next")
    house.now_ns = 900 * NS_PER_S
    house.release(hung, condemned=True)
    place = house.enter("ann").place
    assert place is not None
    assert place.estimated_wait_s == 15  # half of 30: nobody knows what is left of the next


def test_a_slot_of_a_condemned_worker_is_not_waited_for() -> None:
    """Somebody would be told to wait for a session after which nobody is served."""
    house = House(2, 1)
    hung, long, short = (house.enter(name) for name in ("hung", "long", "short"))
    assert hung.lease is not None
    assert short.lease is not None
    assert (hung.lease.worker, short.lease.worker) == (0, 1)
    house.now_ns = 60 * NS_PER_S
    house.release(short)
    house.enter("next")
    house.release(hung, condemned=True)
    place = house.enter("ann").place
    assert place is not None
    assert place.estimated_wait_s == 60
    assert long.lease is not None


def test_lists_who_waits_to_an_operator_and_to_whom_it_concerns() -> None:
    """An operator could not see the queue, or a client sees the tickets of others."""
    house = House()
    house.enter("ann", owner="shop")
    bob = house.enter("bob", "audio", owner="shop")
    house.now_ns = 5 * NS_PER_S
    cid = house.enter("cid", "chat", owner="desk")
    house.now_ns = 7_900_000_000
    house.admission.refresh()
    listed = house.admission.tickets()
    assert [status.ticket for status in listed] == [bob.ticket, cid.ticket]
    assert [status.place for status in listed] == [bob.place, cid.place]
    assert [status.waited_s for status in listed] == [7, 2]
    assert [(ticket.mode, ticket.owner) for ticket in (bob.ticket, cid.ticket) if ticket] == [
        ("audio", "shop"),
        ("chat", "desk"),
    ]


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


BOUND = 4
MODES: tuple[Mode, ...] = ("video", "audio", "chat")


class AdmissionMachine(RuleBasedStateMachine):
    """Any calls in any order, against a model: a list that waits, a list that holds slots.

    Of workers the model knows how many slots each has that is not condemned, and no more: which
    slot is lent is the pool's, but never one of another worker or one that is held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.house = House(2, 1, queue_max=BOUND)
        self.waiting: list[Guest] = []
        self.holding: list[Guest] = []
        self.sound = {0: 2, 1: 1}
        self.condemned: dict[int, int] = {}
        self.generation = 0
        self.names = count()

    def held_of(self, worker: int) -> int:
        return sum(
            guest.lease is not None and guest.lease.worker == worker for guest in self.holding
        )

    @property
    def free(self) -> dict[int, int]:
        return {worker: slots - self.held_of(worker) for worker, slots in self.sound.items()}

    @property
    def is_hopeless(self) -> bool:
        return not self.sound and not self.house.more_to_come

    def serve(self) -> None:
        """Say what is due: the first in line has a slot of the worker that had most free."""
        if self.is_hopeless:
            for guest in self.waiting:
                assert guest.refused is ErrorCode.SERVICE_UNAVAILABLE
            self.waiting.clear()
        while self.waiting and any(self.free.values()):
            free, guest = self.free, self.waiting.pop(0)
            self.generation += 1
            assert guest.lease is not None
            assert guest.lease.generation == self.generation
            assert free[guest.lease.worker] == max(free.values())
            self.holding.append(guest)

    @rule(mode=st.sampled_from(MODES))
    def enter(self, mode: Mode) -> None:
        if self.is_hopeless:
            assert self.house.refusal() is ErrorCode.SERVICE_UNAVAILABLE
        elif len(self.waiting) == BOUND:
            assert self.house.refusal() is ErrorCode.QUEUE_FULL
        else:
            self.waiting.append(self.house.enter(str(next(self.names)), mode))
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
        assert guest.lease is not None
        assert not self.house.leave(guest)
        self.house.release(guest, condemned=condemned)
        worker = guest.lease.worker
        if condemned and worker in self.sound:
            self.condemned[worker] = self.sound.pop(worker)
        self.serve()

    @precondition(lambda self: self.condemned)
    @rule(data=st.data(), slots=st.integers(1, 3))
    def replace(self, data: st.DataObject, slots: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.condemned)))
        del self.condemned[worker]
        number = self.house.replace(worker, slots)
        assert number not in self.sound
        self.sound[number] = slots
        self.serve()

    @rule(more_to_come=st.booleans())
    def hope(self, more_to_come: bool) -> None:
        self.house.more_to_come = more_to_come
        self.house.admission.review()
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
            assert guest.refused is None
            assert guest.place is not None
            assert guest.place.position == position
            assert guest.place.queue_length == len(self.waiting)
        waits_s = [place.estimated_wait_s for place in self.house.admission.places()]
        assert waits_s == sorted(waits_s)
        listed = [status.ticket for status in self.house.admission.tickets()]
        assert listed == [guest.ticket for guest in self.waiting]

    @invariant()
    def slots_are_right(self) -> None:
        leases = [guest.lease for guest in self.holding if guest.lease]
        assert len(leases) == len(self.holding)
        assert len({(lease.worker, lease.slot) for lease in leases}) == len(leases)
        assert set(self.house.pool.leases) == set(leases)
        counts = self.house.pool.counts
        assert counts.free == sum(self.free.values())
        assert counts.leased == sum(self.sound.values()) - counts.free
        assert counts.condemned == sum(self.condemned.values())
        assert not (self.waiting and counts.free), "somebody waits while a slot is free"


TestAdmission = AdmissionMachine.TestCase
