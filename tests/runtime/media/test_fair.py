"""The queue for decoding: whose work comes next, and how long an honest session waits for it.

Work is sleep on a virtual clock here, so that order and waits are exact.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel
import attrs
import pytest
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values.limits import FRAMES_MAX, UNITS_PENDING_MAX
from runtime.media.decoder import Client, FairQueue, Place, TooMuchWaitingError
from tests.fairness.heavy_pictures import IMAGES
from tests.sessions.in_memory import on_virtual_time

PLACES = 2
HEAVY_S = 0.5
LIGHT_S = 0.02
CHATS = 24
UNITS = 40
"""Pictures that the honest session shows, about one a second."""


@attrs.define
class Office:
    """A queue, and what was begun in it.

    Attributes:
        begun: the names of work, in the order in which it began.
        adversary: the name of the adversary's key.
    """

    tasks: TaskGroup
    queue: FairQueue = attrs.Factory(lambda: FairQueue(PLACES))
    begun: list[str] = attrs.Factory(list)
    adversary: str = "adversary"

    async def work(self, client: Client, name: str, cost_s: float) -> None:
        """Do work of a client."""
        async with self.queue.place(client, expected_s=cost_s) as place:
            self.begun.append(name)
            await anyio.sleep(cost_s)
            place.used_s = cost_s

    def ask(self, client: Client, name: str, cost_s: float = HEAVY_S) -> None:
        """Have work of a client done."""
        self.tasks.start_soon(self.work, client, name, cost_s)

    async def asked(self, *asks: tuple[Client, str]) -> None:
        """Have work done, in one place, that comes in this order while other work is done there."""
        self.queue._root.places = 1
        self.ask(Client(), "first")
        await anyio.sleep(HEAVY_S / 2)
        for client, name in asks:
            self.ask(client, name)
            await anyio.sleep(1e-6)
        await anyio.sleep(HEAVY_S * (len(asks) + 1))
        self.begun.remove("first")


def in_office(body: Callable[[Office], object], seed: int = 0) -> None:
    """Run a test's body on a virtual clock."""

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            await body(Office(tasks))  # type: ignore[misc]
            tasks.cancel_scope.cancel()

    on_virtual_time(run, seed=seed)


# -- the law ------------------------------------------------------------------------------------


async def flood_of_units(office: Office) -> None:
    """Have as many heavy pictures waiting as may wait, at all times."""
    client, waiting = Client(owner=office.adversary), 0

    async def show() -> None:
        nonlocal waiting
        await office.work(client, "adversary", HEAVY_S)
        waiting -= 1

    while True:
        while waiting < (UNITS_PENDING_MAX + 1) * FRAMES_MAX:
            waiting += 1
            office.tasks.start_soon(show)
        await anyio.sleep(1)


async def flood_of_turns(office: Office, *, is_new_each_time: bool) -> None:
    """Ask about heavy pictures from `CHATS` chats, which stay or connect anew for each question."""

    async def chat() -> None:
        client = Client(is_live=False, owner=office.adversary)
        while True:
            if is_new_each_time:
                client = Client(is_live=False, owner=office.adversary)
            async with anyio.create_task_group() as tasks:
                for _ in range(IMAGES):
                    tasks.start_soon(office.work, client, "adversary", HEAVY_S)

    async with anyio.create_task_group() as tasks:
        for _ in range(CHATS):
            tasks.start_soon(chat)


ADVERSARIES = {
    "units": (flood_of_units,),
    "turns": (lambda office: flood_of_turns(office, is_new_each_time=False),),
    "new chats": (lambda office: flood_of_turns(office, is_new_each_time=True),),
    "units of two sessions": (flood_of_units, flood_of_units),
    "units and turns": (
        flood_of_units,
        lambda office: flood_of_turns(office, is_new_each_time=True),
    ),
}


ALONE = ("units", "turns", "new chats")
"""Adversaries that leave a place free for a unit's picture."""


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("is_live", [True, False])
def test_an_honest_picture_waits_for_a_bounded_number_of_the_adversarys(
    adversary: str, seed: int, has_keys: bool, is_live: bool
) -> None:
    """One client's pictures would delay those of all others, and their units, by minutes."""

    async def body(office: Office) -> None:
        office.adversary = "adversary" if has_keys else ""
        for flood in ADVERSARIES[adversary]:
            office.tasks.start_soon(flood, office)
        honest = Client(owner="honest" if has_keys else "", is_live=is_live)
        before, waits_s = list[int](), list[float]()
        await anyio.sleep(10)
        for unit in range(UNITS):
            await anyio.sleep(0.7 + 0.6 * (0.618 * unit % 1))
            came, began_s = len(office.begun), anyio.current_time()
            await office.work(honest, "honest", LIGHT_S)
            waits_s.append(anyio.current_time() - began_s - LIGHT_S)
            before.append(office.begun.index("honest", came) - came)
        most = 0 if is_live and adversary in ALONE else 1
        assert max(before) <= most
        assert max(waits_s) <= 2 * most * HEAVY_S + 1e-6

    in_office(body, seed)


def test_an_adversary_is_served_too() -> None:
    """A client that uses much would never be served, though places are free."""

    async def body(office: Office) -> None:
        office.tasks.start_soon(flood_of_units, office)
        office.tasks.start_soon(lambda: flood_of_turns(office, is_new_each_time=False))
        await anyio.sleep(60)
        assert len(office.begun) >= 60 / HEAVY_S * PLACES - PLACES

    in_office(body)


# -- its parts ----------------------------------------------------------------------------------


def test_clients_take_turns() -> None:
    """Who comes with much at once would have all of it done before others have any."""

    async def body(office: Office) -> None:
        anna, bert = Client(), Client()
        await office.asked(*[(anna, "a")] * 3, *[(bert, "b")] * 3)
        assert office.begun == ["a", "b", "a", "b", "a", "b"]

    in_office(body)


def test_who_has_used_much_comes_behind() -> None:
    """Who has taken ten times the processor time would have as many turns as others."""

    async def body(office: Office) -> None:
        anna, bert = Client(), Client()
        office.queue._root.places = 1
        office.ask(anna, "a", 10 * HEAVY_S)
        await anyio.sleep(1e-6)
        await office.asked(*[(bert, "b"), (anna, "a")] * 12)
        await anyio.sleep(10 * HEAVY_S)
        assert "".join(office.begun).startswith("a" + "b" * 7 + "abab")

    in_office(body)


def test_time_that_was_not_used_is_not_saved_up() -> None:
    """Who was silent for long could then have all places for as long."""

    async def body(office: Office) -> None:
        anna, bert = Client(), Client()
        await office.work(bert, "b", HEAVY_S)
        for _ in range(100):
            await office.work(anna, "a", HEAVY_S)
        office.begun.clear()
        await office.asked(*[(bert, "b")] * 4, *[(anna, "a")] * 4)
        assert office.begun == ["b", "a"] * 4

    in_office(body)


def test_sessions_of_an_owner_share_its_part() -> None:
    """Who opens many sessions would have as many parts."""

    async def body(office: Office) -> None:
        many = [Client(owner="anna") for _ in range(4)]
        bert = Client(owner="bert")
        await office.asked(*[(each, "a") for each in many], *[(bert, "b")] * 4)
        assert office.begun == ["a", "b", "a", "b", "a", "b", "a", "b"]

    in_office(body)


def test_a_client_has_one_place_and_turns_never_have_all() -> None:
    """One adversary could have all places, and a live session would wait for slow work of its."""

    async def body(office: Office) -> None:
        for client in (Client(), Client(is_live=False), Client(is_live=False)):
            for _ in range(4):
                office.ask(client, "live" if client.is_live else "turn")
        await anyio.sleep(0.01)
        assert sorted(office.begun) == ["live", "turn"]

    in_office(body)


def test_what_may_wait_is_bounded_by_its_size() -> None:
    """One client's work would take all memory while it waits."""

    async def body(office: Office) -> None:
        queue, client = FairQueue(1, size_max=10), Client()

        async def hold() -> None:
            async with queue.place(client, 6):
                await anyio.sleep(1)

        for _ in range(2):  # The first has begun, and is waiting no more.
            office.tasks.start_soon(hold)
        await anyio.sleep(0.5)
        with pytest.raises(TooMuchWaitingError):
            async with queue.place(client, 5):
                raise AssertionError("this much may not wait")
        office.tasks.start_soon(hold_other, queue)
        with anyio.move_on_after(0.1):
            async with queue.place(client, 4):
                raise AssertionError("there is no place yet")
        await anyio.sleep(0.6)
        async with queue.place(client, 10):
            pass

    async def hold_other(queue: FairQueue) -> None:
        async with queue.place(Client(), 10):
            pass

    in_office(body)


def test_a_client_that_is_gone_is_forgotten() -> None:
    """The server would remember each session that it ever had."""

    async def body(office: Office) -> None:
        client = Client()
        await office.work(client, "once", HEAVY_S)
        assert len(office.queue._clients) == 1
        del client
        await anyio.sleep(HEAVY_S)  # on Python 3.13, a wait keeps the one before
        gc.collect()
        assert len(office.queue._clients) == 0

    in_office(body)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),  # whose
            st.floats(0, 2),  # when
            st.floats(0.01, 1),  # its cost
            st.floats(0, 3),  # given up after so long; it may have been done
        ),
        max_size=30,
    )
)
def test_all_work_is_done_or_given_up_and_no_place_is_lost(
    asks: list[tuple[int, float, float, float]],
) -> None:
    """A place that a cancelled client held would be gone for ever, or another's work be lost."""

    async def body(office: Office) -> None:
        clients = [Client(is_live=number % 2 == 0, owner=str(number // 2)) for number in range(5)]
        running = deque[Place]()

        async def work(number: int, at_s: float, cost_s: float, patience_s: float) -> None:
            await anyio.sleep(at_s)
            with anyio.move_on_after(patience_s):
                async with office.queue.place(clients[number]) as place:
                    running.append(place)
                    assert len(running) <= PLACES
                    try:
                        await anyio.sleep(cost_s)
                    finally:
                        place.used_s = cost_s
                        running.remove(place)

        async with anyio.create_task_group() as tasks:
            for ask in asks:
                tasks.start_soon(work, *ask)
        assert not office.queue._waiting
        assert office.queue._root.running == 0
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(office.work, client, "last", HEAVY_S)
        assert len(office.begun) == len(clients)

    in_office(body)
