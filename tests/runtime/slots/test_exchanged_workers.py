"""Workers that are added to a server and drained while it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import attrs
import pytest

from protocol.values.errors import LocalProtocolError
from runtime.model.backends.base import BackendGone
from runtime.model.backends.scripted import ScriptedBackend
from runtime.slots.workers import (
    WORKERS_MAX,
    NewPlace,
    UnknownWorkerError,
    Workers,
    WorkersDifferError,
    WorkerStatus,
    workers_wanted,
)
from tests.runtime.slots.test_mortal_workers import MortalBackend
from tests.runtime.slots.test_workers import Shed, condemn, lend
from tests.sessions.in_memory import on_virtual_time


class DistantBackend(ScriptedBackend):
    """A backend in another process."""

    where = "at:other"


class Yard:
    """Where workers are added: each address has a backend, and connecting takes a second."""

    def __init__(self) -> None:
        self.backends: dict[str, ScriptedBackend] = {}
        self.shed = Shed()

    def extend(self, address: str) -> NewPlace:
        if not address.startswith("at:"):
            raise ValueError(f"{address} is not an address")
        return NewPlace(address, partial(self._connect, address))

    async def _connect(self, address: str) -> ScriptedBackend:
        await anyio.sleep(1)
        if address not in self.backends:
            raise BackendGone(f"nothing at {address}")
        return self.backends[address]

    @asynccontextmanager
    async def workers(self, *backends: ScriptedBackend) -> AsyncIterator[Workers]:
        """Workers to which others can be added."""
        workers = Workers(backends, load=self.shed.load, extend=self.extend)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.run, self.shed.on_changed)
            await anyio.wait_all_tasks_blocked()
            yield workers
            tasks.cancel_scope.cancel()


def states(workers: Workers) -> dict[int, str]:
    return {worker.number: worker.state for worker in workers.roster()}


def test_a_worker_is_added_and_serves() -> None:
    """An operator would have to restart a server that is too small."""

    async def body() -> None:
        yard, backend = Yard(), ScriptedBackend(slots=2)
        yard.backends["at:b"] = backend
        async with yard.workers(ScriptedBackend(slots=1)) as workers:
            assert await workers.add("at:b") == 1
            await anyio.sleep(5)
            lease = lend(workers)
            assert workers.backend_of(lease) is backend
            first, added = workers.roster()
            assert (first.where, first.free, first.leased) == ("embedded", 1, 0)
            assert attrs.astuple(added)[:6] == (1, "at:b", "serving", 2, 1, 1)
            assert added.fingerprint == first.fingerprint
            assert (first.age_s, added.age_s) == (6, 5)

    on_virtual_time(body)


def test_an_added_worker_that_dies_is_taken_again() -> None:
    """It would serve worse than the workers of the settings."""

    async def body() -> None:
        yard, backend = Yard(), MortalBackend()
        yard.backends["at:b"] = backend
        async with yard.workers(ScriptedBackend(slots=1)) as workers:
            await workers.add("at:b")
            await anyio.wait_all_tasks_blocked()
            other = yard.backends["at:b"] = MortalBackend()
            backend.gone.set()
            await anyio.sleep(0.5)
            assert states(workers) == {0: "serving", 1: "loading"}
            await anyio.sleep(1)
            assert states(workers) == {0: "serving", 2: "serving"}
            lend(workers)
            assert workers.backend_of(lend(workers)) is other

    on_virtual_time(body)


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("elsewhere", ValueError, "is not an address"),
        ("at:nowhere", BackendGone, "nothing at at:nowhere"),
        ("at:other", WorkersDifferError, "worker at:other cannot stand in for worker 0: fingerpr"),
        ("at:b", LocalProtocolError, "there already is a worker at at:b"),
    ],
)
def test_a_worker_that_cannot_serve_is_not_added(
    address: str, error: type[Exception], words: str
) -> None:
    """Sessions would be given to it, or an operator not learn why it has none."""

    async def body() -> None:
        yard, other = Yard(), DistantBackend(slots=1)
        other.info = attrs.evolve(other.info, fingerprint={"backend": "other"})
        yard.backends |= {"at:b": ScriptedBackend(slots=1), "at:other": other}
        async with yard.workers(ScriptedBackend(slots=1)) as workers:
            await workers.add("at:b")
            with pytest.raises(error, match=words):
                await workers.add(address)
            assert states(workers) == {0: "serving", 1: "serving"}

    on_virtual_time(body)


def test_a_worker_that_is_asked_for_twice_is_added_once() -> None:
    """Its slots would be leased twice."""

    async def body() -> None:
        yard, refused = Yard(), []
        yard.backends["at:b"] = ScriptedBackend(slots=1)

        async def add(workers: Workers) -> None:
            try:
                await workers.add("at:b")
            except LocalProtocolError as error:
                refused.append(str(error))

        async with yard.workers(ScriptedBackend(slots=1)) as workers:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(add, workers)
                tasks.start_soon(add, workers)
            assert refused == ["there already is a worker at at:b"]
            assert len(workers.roster()) == 2

    on_virtual_time(body)


def test_workers_are_bounded_and_added_only_where_they_have_addresses() -> None:
    """A server could be made to connect anywhere, or to very many."""

    async def body() -> None:
        yard = Yard()
        yard.backends["at:b"] = ScriptedBackend(slots=1)
        many = [ScriptedBackend(slots=1) for _ in range(WORKERS_MAX)]
        async with yard.workers(*many) as workers:
            with pytest.raises(LocalProtocolError, match="at most 64 workers"):
                await workers.add("at:b")
        with pytest.raises(LocalProtocolError, match="have no addresses"):
            await Workers((ScriptedBackend(),)).add("at:b")

    on_virtual_time(body)


def test_a_drained_worker_leaves_when_its_sessions_left() -> None:
    """It would be replaced, or closed under a session."""

    async def body() -> None:
        yard, told = Yard(), []
        async with yard.workers(*(ScriptedBackend(slots=1) for _ in range(2))) as workers:
            lease = lend(workers)
            workers.watch_lease(lease, lambda: told.append("go"))
            for _ in range(2):
                workers.drain(0)
            await anyio.sleep(100)
            assert (told, states(workers)) == (["go"], {0: "draining", 1: "serving"})
            workers.unwatch_lease(lease)
            workers.pool.release(lease)
            await anyio.wait_all_tasks_blocked()
            assert states(workers) == {1: "serving"}
            assert yard.shed.times == []
            with pytest.raises(UnknownWorkerError, match="no worker 0"):
                workers.drain(0)
            with pytest.raises(LocalProtocolError, match="the only one that serves"):
                workers.drain(1)

    on_virtual_time(body)


def test_a_drained_address_can_be_added_again_before_it_is_empty() -> None:
    """A rolling upgrade would wait for the longest session."""

    async def body() -> None:
        yard = Yard()
        yard.backends["at:b"] = ScriptedBackend(slots=2)
        async with yard.workers(ScriptedBackend(slots=1)) as workers:
            workers.drain(await workers.add("at:b"))
            assert await workers.add("at:b") == 2
            assert states(workers) == {0: "serving", 2: "serving"}

    on_virtual_time(body)


@pytest.mark.parametrize("drained_s", [0.5, 2.5])
def test_a_lost_worker_that_is_drained_is_not_replaced(drained_s: float) -> None:
    """A worker that an operator took away would come back, and its new sessions be moved."""

    async def body() -> None:
        yard = Yard()
        yard.shed.load_s, yard.shed.failures = 2, 100
        async with yard.workers(*(ScriptedBackend(slots=1) for _ in range(2))) as workers:
            condemn(workers)
            await anyio.sleep(drained_s)
            assert states(workers) == {0: "loading", 1: "serving"}
            workers.drain(0)
            await anyio.sleep(100)
            assert states(workers) == {1: "serving"}
            assert (yard.shed.times, workers.more_to_come) == ([0.0], False)

    on_virtual_time(body)


def test_a_replacement_that_comes_as_its_place_is_drained_is_closed() -> None:
    """A worker process would go on for no one."""

    async def body() -> None:
        closed: list[str] = []

        class Comes(ScriptedBackend):
            async def check(self) -> None:
                workers.drain(0)
                await anyio.sleep(1)

            async def aclose(self) -> None:
                await anyio.sleep(1)
                closed.append("closed")

        yard = Yard()
        yard.shed.make = lambda: Comes(slots=1)
        async with yard.workers(*(ScriptedBackend(slots=1) for _ in range(2))) as workers:
            condemn(workers)
            await anyio.sleep(5)
            assert (closed, states(workers)) == (["closed"], {1: "serving"})

    on_virtual_time(body)


# -- how many are wanted --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leased", "first_wait_s", "wanted"),
    [
        ((0, 0), 0, 1),
        ((3, 0), 0, 1),  # 3 / 3.2
        ((4, 0), 0, 2),
        ((4, 4), 0, 3),
        ((4, 4), 10, 3),
        ((4, 4), 11, 4),
        ((0, 0), 11, 1),
    ],
)
def test_the_workers_that_the_load_asks_for(
    leased: tuple[int, int], first_wait_s: int, wanted: int
) -> None:
    """Sessions would wait for a worker that is not started, or workers idle."""
    workers = [serving(count) for count in leased]
    assert workers_wanted(workers, first_wait_s) == wanted


def test_sessions_that_leave_a_worker_need_another() -> None:
    """The last worker would be told to be enough while it takes over those of a drained one."""
    workers = [attrs.evolve(serving(4), state="draining"), serving(1)]
    assert workers_wanted(workers, 0) == 2
    assert workers_wanted([attrs.evolve(serving(2), state="condemned")], 0) == 3


def serving(leased: int) -> WorkerStatus:
    return WorkerStatus(
        number=0,
        where="embedded",
        state="serving",
        slots=4,
        free=4 - leased,
        leased=leased,
        fingerprint="",
        age_s=None,
    )
