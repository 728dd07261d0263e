"""Workers that are lost while no call is in flight are replaced at once."""

from __future__ import annotations

import anyio

from runtime.model.backends.scripted import ScriptedBackend
from runtime.slots.workers import RETRY_S_MAX
from tests.runtime.slots.test_workers import Shed, lend
from tests.sessions.in_memory import on_virtual_time


class MortalBackend(ScriptedBackend):
    """A backend that is lost when the test says so."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.gone = anyio.Event()

    async def wait_gone(self) -> None:
        await self.gone.wait()


def test_a_worker_that_dies_unused_is_replaced() -> None:
    """The next session would find it dead, and be refused."""

    async def body() -> None:
        shed, backend = Shed(), MortalBackend()
        shed.make = MortalBackend
        async with shed.workers(backend) as workers:
            for _ in range(3):
                backend.gone.set()
                await anyio.sleep(RETRY_S_MAX)
                lease = lend(workers)
                replaced = workers.backend_of(lease)
                assert isinstance(replaced, MortalBackend)
                assert replaced is not backend
                workers.pool.release(lease)
                backend = replaced
            assert (shed.changed, workers.statistics.condemned) == (3, 0)

    on_virtual_time(body)


def test_a_worker_that_dies_in_use_is_not_leased_again() -> None:
    """A session would be given a slot of a model that is not there."""

    async def body() -> None:
        backend, other = MortalBackend(), MortalBackend()
        async with Shed().workers(backend, other) as workers:
            lease = lend(workers)
            backend.gone.set()
            await anyio.wait_all_tasks_blocked()
            assert workers.backend_of(lease) is backend
            assert workers.backend_of(lend(workers)) is other
            assert workers.pool.lease() is None

    on_virtual_time(body)
