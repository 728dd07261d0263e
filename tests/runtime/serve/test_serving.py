"""A server's life, in the test's own process: what it does to the process itself."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import anyio
import pytest

from runtime.client.errors import SessionClosedError
from runtime.client.websocket import open_socket
from runtime.model.backends.base import Backend, DeviceLost
from runtime.model.backends.scripted import ScriptedBackend, Step
from runtime.net.listener import Address
from runtime.serve.serving import CannotServeError, Shutdown, _reload, run
from runtime.session.server import Server
from runtime.settings.settings import Settings
from runtime.slots.workers import REPLACE_WAIT_S, Workers
from tests.runtime.slots.test_workers import lend
from tests.sessions.in_memory import append_frame, init_frame, on_virtual_time


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

    gc.unfreeze()  # what the tests' own process does not look at
    with anyio.fail_after(60):
        await run(Settings(port=0, model="scripted", drain_s=0), on_ready=ready)
    assert len(seen) == 1
    assert seen[0] > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()


@pytest.mark.anyio
async def test_a_model_that_is_replaced_can_be_collected() -> None:
    """A worker that hung would keep its memory, until there is none for the next one."""
    backend = ScriptedBackend()

    async def load(_: int) -> ScriptedBackend:
        return backend

    gc.freeze()
    try:
        assert await _reload(load, 0) is backend
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


LOST = DeviceLost("the GPU is lost to this process (CUDA error)")


async def lose(address: Address, *, drain: bool = False, signal_after: bool = False) -> list[Any]:
    """Talk until the model is lost; gives what was heard.

    Args:
        address: the server's.
        drain: have the server drain before it is lost.
        signal_after: send it a signal once the session is over.
    """
    heard: list[Any] = []
    cue = "session.going_away" if drain else "session.created"
    url = f"ws://127.0.0.1:{address.port}/v1/realtime?mode=audio"
    async with open_socket(url, frame_bytes_max=1 << 20) as socket:
        await socket.send(init_frame(notices=True))
        with suppress(SessionClosedError):
            while True:
                heard.append(json.loads(await socket.receive()))
                if drain and heard[-1]["type"] == "session.created":
                    signal.raise_signal(signal.SIGTERM)
                if heard[-1]["type"] == cue:
                    await socket.send(append_frame())
        if signal_after:
            signal.raise_signal(signal.SIGTERM)
    return heard


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("moment", ["", "drain", "signal_after"])
async def test_a_lost_device_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, workers: int, moment: str
) -> None:
    """It would try to load the model again for ever, in a process where no model can be loaded."""
    for name in ("freeze_gc", "unfreeze_gc"):  # a second in the tests' process
        monkeypatch.setattr(f"runtime.serve.serving.{name}", lambda: None)
    made: Iterator[Backend] = iter(
        [ScriptedBackend(lambda *_: Step(fault="gone"), slots=1) for _ in range(workers)]
    )

    def load(*_: object, **__: object) -> Backend:
        for backend in made:
            return backend
        raise LOST

    heard: list[list[Any]] = []
    ended: list[CannotServeError] = []

    async def talk(addresses: tuple[Address, ...]) -> None:
        heard.append(await lose(addresses[0], **({moment: True} if moment else {})))

    further = ("scripted",) * (workers - 1)
    settings = Settings(port=0, model="scripted", workers=further, drain_s=3600)
    bound: list[tuple[Address, ...]] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:

            def ready() -> None:
                for _ in range(workers):
                    tasks.start_soon(talk, bound[0])

            try:
                await run(settings, load=load, on_bound=bound.append, on_ready=ready)
            except CannotServeError as error:
                ended.append(error)
    assert ended or moment  # Told to end, it may be empty before it gives up.
    for error in ended:
        assert "the process must be restarted" in str(error)
        assert error.__cause__ is LOST
    assert len(heard) == workers
    for session in heard:
        assert session[-1]["type"] == "session.closed"
        if not moment:
            assert "session.going_away" not in {event["type"] for event in session}
            assert session[-1]["reason"] == "backend_error"


class Drained:
    """A server with a session that ends when it is drained."""

    sessions = 1

    def __init__(self) -> None:
        self.told: list[str] = []
        self._empty = anyio.Event()

    def begin_drain(self, _: int) -> None:
        """See `Server`."""
        self.told.append("going away")

    def drain(self) -> None:
        """See `Server`."""
        self.told.append("over")
        self._empty.set()

    async def wait_until_empty(self) -> None:
        """See `Server`."""
        await self._empty.wait()


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_server_is_given_up_once(is_draining: bool) -> None:
    """Two workers lose the one device, or a signal comes beside: it would end in a traceback."""

    async def body() -> None:
        server, began = Drained(), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            end = Shutdown(Settings(drain_s=3600), tasks, lambda _: None)
            if is_draining:
                end.begin(cast("Server", server))
                await anyio.sleep(1)
            for _ in range(2):
                end.give_up(cast("Server", server), LOST)
            end.begin(cast("Server", server))
        assert end.lost is LOST
        assert anyio.current_time() - began < 5  # Nobody is waited for.
        assert server.told == ["going away"] * is_draining + ["over"]

    on_virtual_time(body)


@pytest.mark.anyio
async def test_a_device_that_is_lost_while_the_model_loads_is_said_to_be() -> None:
    """The first thing that one would see of it were a traceback."""

    def load(*_: object, **__: object) -> Backend:
        raise LOST

    with anyio.fail_after(60), pytest.raises(CannotServeError, match="the GPU is lost"):
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
            workers.pool.release(lend(workers), condemned=True)
            await anyio.sleep(REPLACE_WAIT_S + 1)
            assert (workers.statistics.failures > 0, told) == (True, [])
            workers.pool.release(lend(workers), condemned=True)
            await anyio.sleep(REPLACE_WAIT_S + 1)
            assert str(told[0]) == "gone for good"
            await anyio.sleep(400)
            assert len(told) == 2  # Once of each: no other try would help.
            tasks.cancel_scope.cancel()

    on_virtual_time(body)
