"""A server's life, in the test's own process: what it does to the process itself."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest

from runtime.backends.base import Backend, DeviceLost
from runtime.backends.scripted import ScriptedBackend, Step
from runtime.client.errors import SessionClosedError
from runtime.client.websocket import open_socket
from runtime.listener import Address
from runtime.serving import CannotServeError, _reload, run
from runtime.settings import Settings
from runtime.workers import REPLACE_WAIT_S, Workers
from tests.helpers import append_frame, init_frame, on_virtual_time
from tests.test_runtime_workers import lend


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.mark.anyio
async def test_what_was_loaded_is_not_looked_through_while_sessions_run() -> None:
    """All sessions would be held up for 0.2 s at a time by a search for garbage in torch."""
    seen = []

    def ready() -> None:
        seen.append(gc.get_freeze_count())
        signal.raise_signal(signal.SIGTERM)

    before = gc.get_freeze_count()
    with anyio.fail_after(20):
        await run(Settings(port=0, model="scripted", drain_s=0), on_ready=ready)
    assert len(seen) == 1
    assert seen[0] > before + 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.anyio
async def test_a_model_that_is_replaced_can_be_collected() -> None:
    """A worker that hung would keep its memory, until there is none for the next one."""

    async def load(backend: ScriptedBackend) -> ScriptedBackend:
        return backend

    backend = ScriptedBackend()
    gc.freeze()
    try:
        assert await _reload([partial(load, backend)], 0) is backend
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()


async def lose(address: Address) -> list[Any]:
    """Talk until the model is lost; gives what was heard."""
    heard = []
    url = f"ws://127.0.0.1:{address.port}/v1/realtime?mode=audio"
    async with open_socket(url, frame_bytes_max=1 << 20) as socket:
        await socket.send(init_frame())
        await socket.send(append_frame())
        with suppress(SessionClosedError):
            while True:
                heard.append(json.loads(await socket.receive()))
    return heard


@pytest.mark.anyio
async def test_a_lost_device_ends_the_process() -> None:
    """It would try to load the model again for ever, in a process where no model can be loaded."""
    lost = DeviceLost("the GPU is lost to this process (CUDA error)")
    made: Iterator[Backend] = iter([ScriptedBackend(lambda *_: Step(fault="gone"))])

    def load(*_: object, **__: object) -> Backend:
        for backend in made:
            return backend
        raise lost

    heard: list[Any] = []

    async def talk(addresses: tuple[Address, ...]) -> None:
        heard.extend(await lose(addresses[0]))

    serve = partial(run, Settings(port=0, model="scripted", drain_s=3600), load=load)
    bound: list[tuple[Address, ...]] = []
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            with pytest.raises(CannotServeError, match="only another process can serve") as caught:
                await serve(
                    on_bound=bound.append, on_ready=lambda: tasks.start_soon(talk, bound[0])
                )
    assert caught.value.__cause__ is lost
    assert (heard[-1]["type"], heard[-1]["reason"]) == ("session.closed", "backend_error")


@pytest.mark.anyio
async def test_a_device_that_is_lost_while_the_model_loads_is_said_to_be() -> None:
    """The first thing that one would see of it were a traceback."""

    def load(*_: object, **__: object) -> Backend:
        raise DeviceLost("the GPU is lost to this process (CUDA error)")

    with anyio.fail_after(20), pytest.raises(CannotServeError, match="the GPU is lost"):
        await run(Settings(port=0, model="scripted"), load=load)


def test_a_lost_device_is_told_where_no_other_worker_serves() -> None:
    """A server would be ended that serves, or never where it cannot serve again."""

    async def body() -> None:
        told: list[DeviceLost] = []

        async def load(_: int) -> ScriptedBackend:
            raise DeviceLost("gone for good")

        workers = Workers([ScriptedBackend(slots=1), ScriptedBackend(slots=1)], load=load)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.run, lambda: None, told.append)
            workers.pool.give_back(lend(workers), condemned=True)
            await anyio.sleep(REPLACE_WAIT_S + 1)
            assert (workers.statistics.failures > 0, told) == (True, [])
            workers.pool.give_back(lend(workers), condemned=True)
            await anyio.sleep(REPLACE_WAIT_S + 1)
            assert str(told[0]) == "gone for good"
            tasks.cancel_scope.cancel()

    on_virtual_time(body)
