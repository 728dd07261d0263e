"""Workers: what is condemned is replaced, and nothing is kept of it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anyio
import attrs
import pytest

from protocol.values.errors import ErrorCode, LocalProtocolError
from protocol.values.limits import CLEANUP_WAIT_S
from protocol.values.model import Opening, Unit, UnitResult
from runtime.model.backends.base import BackendError, BackendGone
from runtime.model.backends.scripted import ScriptedBackend, Step
from runtime.slots.workers import (
    CLOSE_WAIT_S,
    HOPE_S,
    REPLACE_WAIT_S,
    RETRY_S_MAX,
    STEADY_S,
    Lease,
    Workers,
    WorkersDifferError,
)
from tests.sessions.in_memory import append_frame, close_frame, init_frame, on_virtual_time, world


class Shed:
    """Where backends are loaded; what goes wrong there is set by hand.

    Attributes:
        times: when each load began.
        load_s: seconds that each takes.
        failures: loads that fail before one works.
        slots: of the next backend.
        changed: how often the queue was told of a change.
    """

    def __init__(self, slots: int = 1) -> None:
        self.times: list[float] = []
        self.load_s, self.failures, self.slots = 0.0, 0, slots
        self.make: Callable[[], ScriptedBackend] = lambda: ScriptedBackend(slots=self.slots)
        self.changed = 0

    async def load(self, _: int) -> ScriptedBackend:
        self.times.append(anyio.current_time())
        await anyio.sleep(self.load_s)
        if self.failures:
            self.failures -= 1
            raise OSError("no such file")
        return self.make()

    def on_changed(self) -> None:
        self.changed += 1

    @asynccontextmanager
    async def workers(self, *backends: ScriptedBackend) -> AsyncIterator[Workers]:
        """Workers with their replacing under way."""
        workers = Workers(backends or (ScriptedBackend(slots=self.slots),), load=self.load)
        del backends
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.run, self.on_changed)
            await anyio.wait_all_tasks_blocked()
            yield workers
            tasks.cancel_scope.cancel()
        assert not workers.can_replace


def lend(workers: Workers) -> Lease:
    """A lease that must be there."""
    lease = workers.pool.lease()
    assert lease is not None
    return lease


def condemn(workers: Workers) -> None:
    """Have a call hang on the next slot."""
    workers.pool.release(lend(workers), condemned=True)


# -- interchangeable ------------------------------------------------------------------------------


def test_serve_as_one() -> None:
    """Some GPUs of a machine would never be used."""
    first, second = ScriptedBackend(slots=1), ScriptedBackend(slots=2)
    workers = Workers((first, second))
    assert workers.info == attrs.evolve(first.info, slots=3)
    leases = [lend(workers) for _ in range(3)]
    assert [workers.backend_of(lease) for lease in leases] == [second, first, second]
    assert workers.statistics.workers == 2


def test_speak_only_where_all_do() -> None:
    """`/health` would say that there is speech, and every other session gets none."""
    first, second = ScriptedBackend(), ScriptedBackend()
    second.info = attrs.evolve(second.info, speaks=False)
    assert Workers((first, first)).info.speaks
    assert not Workers((first, second)).info.speaks


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (
            {"modes": ("video",)},
            "modes is ('video',), not ('video', 'audio', 'chat', 'transcription')",
        ),
        ({"context_limit": 4096}, "context_limit is 4096, not 8192"),
        ({"sliding_windows": ("basic",)}, "sliding_windows is ('basic',), not ('off',)"),
        ({"can_rollback": False}, "can_rollback is False, not True"),
        ({"deterministic": False}, "deterministic is False, not True"),
        ({"fingerprint": {"version": "2"}}, "fingerprint backend is None, not scripted; "),
        ({"fingerprint": {"backend": "scripted", "version": "2"}}, "version is 2, not 1"),
    ],
)
def test_must_agree_on_what_sessions_are_told(difference: dict[str, object], words: str) -> None:
    """What a client is told would depend on where chance puts it, and a replay with it."""
    first, second = ScriptedBackend(), ScriptedBackend()
    second.info = attrs.evolve(second.info, **difference)
    with pytest.raises(WorkersDifferError) as told:
        Workers((first, second))
    assert "worker 1 cannot stand in for worker 0" in str(told.value)
    assert words in str(told.value)


def test_may_differ_in_name_slots_and_instance() -> None:
    """Two machines of the same kind could not serve together."""
    first, second = ScriptedBackend(slots=1), ScriptedBackend(slots=2)
    for backend, instance in ((first, "a"), (second, "b")):
        fingerprint = {**backend.info.fingerprint, "instance": instance}
        backend.info = attrs.evolve(backend.info, name=instance, fingerprint=fingerprint)
    workers = Workers((first, second))
    assert workers.info.fingerprint == {"backend": "scripted", "version": "1"}


def test_there_must_be_one() -> None:
    """A server without a model would look as if it served."""
    with pytest.raises(LocalProtocolError, match="at least 1 worker"):
        Workers(())


# -- replaced -------------------------------------------------------------------------------------


def test_a_condemned_worker_is_replaced() -> None:
    """A server that nobody watches serves less and less."""

    async def body() -> None:
        shed = Shed()
        shed.load_s = 7
        async with shed.workers() as workers:
            condemn(workers)
            assert workers.more_to_come
            assert workers.statistics.condemned == 1
            await anyio.sleep(7.1)
            assert shed.times == [0]
            assert shed.changed == 1
            lease = lend(workers)
            assert lease == Lease(slot=0, generation=2, worker=1)
            assert isinstance(workers.backend_of(lease), ScriptedBackend)
            statistics = workers.statistics
            assert (statistics.condemned, statistics.replaced, statistics.failures) == (0, 1, 0)
            assert not workers.more_to_come

    on_virtual_time(body)


def test_waits_for_those_who_are_on_it_but_not_for_ever() -> None:
    """Two models at once do not fit into memory; or one long session holds everybody up."""

    async def body() -> None:
        shed = Shed(slots=3)
        async with shed.workers() as workers:
            other, third = lend(workers), lend(workers)
            condemn(workers)
            await anyio.sleep(10)
            workers.pool.release(other)
            assert shed.times == []
            await anyio.sleep(REPLACE_WAIT_S)
            assert shed.times == [REPLACE_WAIT_S]
            assert workers.backend_of(third) is not workers.backend_of(lend(workers))
            workers.pool.release(third)

            shed.times.clear()
            fourth = lend(workers)
            condemn(workers)
            await anyio.sleep(5)
            workers.pool.release(fourth, condemned=True)
            await anyio.sleep(2)
            assert len(shed.times) == 0, "its other lease is out"

    on_virtual_time(body)


def test_loads_as_soon_as_nobody_is_on_it() -> None:
    """Everybody waits half a minute for nothing."""

    async def body() -> None:
        shed = Shed(slots=2)
        async with shed.workers() as workers:
            other = lend(workers)
            condemn(workers)
            await anyio.sleep(3)
            workers.pool.release(other)
            await anyio.sleep(0.1)
            assert shed.times == [3]
            assert workers.pool.counts.free == 2

    on_virtual_time(body)


def test_the_others_serve_on_meanwhile() -> None:
    """One hung GPU stops them all."""

    async def body() -> None:
        shed = Shed()
        shed.load_s = 50
        first, second = ScriptedBackend(slots=1), ScriptedBackend(slots=1)
        async with shed.workers(first, second) as workers:
            condemn(workers)
            await anyio.sleep(1)
            lease = lend(workers)
            assert workers.backend_of(lease) is second
            assert workers.pool.lease() is None
            await anyio.sleep(50)
            assert lend(workers).worker == 2

    on_virtual_time(body)


def test_tries_again_with_a_growing_pause(caplog: pytest.LogCaptureFixture) -> None:
    """A disk that was away for a minute ends the service; or is read without a pause."""

    async def body() -> None:
        shed = Shed()
        shed.failures = 9
        async with shed.workers() as workers:
            condemn(workers)
            await anyio.sleep(400)
            pauses = [later - sooner for sooner, later in pairwise(shed.times)]
            assert pauses == [1, 2, 4, 8, 16, 32, RETRY_S_MAX, RETRY_S_MAX, RETRY_S_MAX]
            assert lend(workers).worker == 1
            assert workers.statistics.failures == 9

    with caplog.at_level(logging.ERROR):
        on_virtual_time(body)
    assert sum("cannot be replaced yet: no such file" in line for line in caplog.messages) == 9


def test_is_not_counted_on_for_ever() -> None:
    """Clients wait in a queue for a model that cannot be loaded, and nobody is told."""

    async def body() -> None:
        shed = Shed()
        shed.failures = 8
        async with shed.workers() as workers:
            condemn(workers)
            await anyio.sleep(HOPE_S - 1)
            assert workers.more_to_come
            assert shed.changed == 0
            await anyio.sleep(2)
            assert not workers.more_to_come
            assert shed.changed == 1
            await anyio.sleep(200)
            assert lend(workers).worker == 1
            await anyio.sleep(STEADY_S)
            workers.pool.release(workers.pool.leases[0], condemned=True)
            assert workers.more_to_come

    on_virtual_time(body)


def test_one_that_breaks_at_once_is_not_replaced_at_every_turn() -> None:
    """A model that hangs in its first call is loaded again and again, as fast as clients come."""

    async def body() -> None:
        shed = Shed()
        async with shed.workers() as workers:
            for worker in range(5):
                assert not workers.pool.is_condemned(worker)
                condemn(workers)
                await anyio.sleep(20)
            assert shed.times == [0, 20 + 1, 40 + 2, 60 + 4, 80 + 8]
            await anyio.sleep(STEADY_S + 1)
            condemn(workers)
            await anyio.sleep(0.1)
            assert workers.statistics.condemned == 0, (
                "it had served for long: nothing is waited for"
            )

    on_virtual_time(body)


def test_one_that_differs_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Another model under the same name talks on in a recorded session's server."""
    closed: list[str] = []

    class Other(ScriptedBackend):
        async def aclose(self) -> None:
            closed.append("closed")

    async def body() -> None:
        shed = Shed()
        shed.make = lambda: Other(context_limit=100)
        async with shed.workers() as workers:
            condemn(workers)
            await anyio.sleep(0.5)
            assert workers.pool.lease() is None
            assert closed == ["closed"]
            shed.make = ScriptedBackend
            await anyio.sleep(5)
            assert lend(workers).worker == 1

    on_virtual_time(body)
    assert any("context_limit is 100, not 8192" in line for line in caplog.messages)


def test_a_remote_is_asked_whether_it_serves() -> None:
    """A lost connection is replaced by one to a server that is away."""

    class RemoteBackend(ScriptedBackend):
        async def check(self) -> None:
            await anyio.sleep(0.1)
            if anyio.current_time() < 10:
                raise BackendGone("nobody answers")

    async def body() -> None:
        shed = Shed()
        shed.make = lambda: RemoteBackend(slots=1)
        async with shed.workers() as workers:
            condemn(workers)
            await anyio.sleep(9.9)
            assert workers.statistics.failures == 4
            assert workers.pool.lease() is None
            await anyio.sleep(8)
            assert lend(workers).worker == 1

    on_virtual_time(body)


def test_without_a_way_to_load_nothing_is_promised() -> None:
    """Clients wait for a worker that nobody loads."""

    async def body() -> None:
        workers = Workers((ScriptedBackend(slots=1),))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.run, lambda: None)
            await anyio.wait_all_tasks_blocked()
            condemn(workers)
            await anyio.sleep(1000)
            assert not workers.can_replace
            assert not workers.more_to_come
            tasks.cancel_scope.cancel()

    on_virtual_time(body)


# -- let go ---------------------------------------------------------------------------------------


def test_nothing_is_kept_of_a_backend_that_was_given_up() -> None:
    """Each hung model stays in memory, until there is no room for another."""

    async def body() -> None:
        shed = Shed(slots=2)
        backend = ScriptedBackend(slots=2)
        seen = weakref.ref(backend)
        async with shed.workers(backend) as workers:
            del backend
            other = lend(workers)
            condemn(workers)
            await anyio.sleep(REPLACE_WAIT_S + 1)
            gc.collect()
            assert seen() is not None, "a session is on it"
            workers.pool.release(other)
            await anyio.sleep(0.1)
            gc.collect()
            assert seen() is None

    on_virtual_time(body)


@pytest.mark.parametrize("way", ["well", "fails", "hangs"])
def test_a_backend_is_told_once_that_it_is_given_up(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread or a socket of each hung model stays; or one that hangs in that too stops all."""
    told: list[float] = []

    class Closing(ScriptedBackend):
        async def aclose(self) -> None:
            told.append(anyio.current_time())
            if way == "hangs":
                await anyio.sleep_forever()
            if way == "fails":
                raise RuntimeError("it breaks")

    async def body() -> None:
        shed = Shed(slots=2)
        async with shed.workers(Closing(slots=2)) as workers:
            other = lend(workers)
            condemn(workers)
            await anyio.sleep(4)
            assert told == []
            workers.pool.release(other)
            await anyio.sleep(CLOSE_WAIT_S + 1)
            assert told == [4]
            assert shed.times == [4 + CLOSE_WAIT_S if way == "hangs" else 4]
            assert lend(workers).worker == 1

    on_virtual_time(body)
    assert (way == "fails") == any("could not be closed" in line for line in caplog.messages)


# -- in a server ----------------------------------------------------------------------------------


def hanging(unit: Unit, seed: int) -> Step:
    """The first session's model hangs."""
    return Step(fault="hang") if seed == 1 else Step()


def losing(unit: Unit, seed: int) -> Step:
    """The first session's model is lost."""
    return Step(fault="gone") if seed == 1 else Step()


def test_a_lost_worker_is_replaced_and_the_queue_served() -> None:
    """The end of one connection to a remote ends the service; or the next is put on it."""

    async def body() -> None:
        shed = Shed()
        async with world(ScriptedBackend(losing, slots=1), load=shed.load) as server:
            peer = await server.activate()
            waiting = server.connect()
            await waiting.heard("session.queued")
            peer.send(append_frame())
            await peer.over()
            assert peer.events[-1]["reason"] == "backend_error"
            await waiting.heard("session.queue_done")
            assert len(shed.times) == 1
            assert server.server.workers.statistics.replaced == 1
            assert not server.backend.held_slots

    on_virtual_time(body)


def test_a_lost_worker_that_cannot_be_replaced_is_lent_on() -> None:
    """A remote that is back is refused for ever."""

    async def body() -> None:
        async with world(ScriptedBackend(losing, slots=1)) as server:
            peer = await server.activate()
            peer.send(append_frame())
            await peer.over()
            await server.activate()

    on_virtual_time(body)


def test_one_hung_slot_takes_no_other_session_with_it() -> None:
    """Whoever shares the worker with a hung call is cut off."""

    async def body() -> None:
        shed = Shed(slots=2)
        backend = ScriptedBackend(hanging, slots=2)
        async with world(backend, load=shed.load, limit_video_s=30) as server:
            hung, other = await server.activate(), await server.activate("audio")
            hung.send(append_frame())
            await hung.over()
            await anyio.sleep(25)
            other.send(append_frame())
            await other.heard("listen")
            assert server.server.workers.statistics.condemned == 1
            third = server.connect()
            await third.heard("session.queued")
            other.send(close_frame())
            await third.heard("session.queue_done")
            third.send(init_frame())
            await third.heard("session.created")
            assert server.server.workers.pool.counts.slots == 2
        assert backend.held_slots == {0}, "that of the call that hung"

    on_virtual_time(body)


def test_all_that_hang_on_one_thread_are_replaced_and_let_go() -> None:
    """One hung call of a model with one thread ends the service, or its memory stays for ever."""

    class Deaf(ScriptedBackend):
        """Its units go on however they are cancelled, as those in a thread do."""

        async def open(self, opening: Opening, *, slot: int) -> Any:
            held = await super().open(opening, slot=slot)

            async def run(unit: Unit, cut: object = None) -> UnitResult:
                with anyio.CancelScope(shield=True):
                    await go.wait()
                return UnitResult(index=unit.index, is_listen=True)

            held.run = run
            sessions.append(weakref.ref(held))
            return held

    go = anyio.Event()
    sessions: list[weakref.ref[Any]] = []

    async def body() -> None:
        shed = Shed(slots=2)
        async with world(Deaf(slots=2), load=shed.load) as server:
            for peer in [await server.activate(), await server.activate()]:
                peer.send(append_frame(), close_frame())
            waiting = server.connect()
            await waiting.heard("session.queued")
            await waiting.heard("session.queue_done")
            assert CLEANUP_WAIT_S <= anyio.current_time() < CLEANUP_WAIT_S + 1
            waiting.send(init_frame())
            await waiting.heard("session.created")
            go.set()
            await anyio.sleep(1)
            gc.collect()
            assert [session() for session in sessions] == [None, None]
            waiting.send(append_frame())
            await waiting.heard("listen")

    on_virtual_time(body)


def test_readiness_says_condemned_only_where_nothing_is_on_its_way() -> None:
    """A balancer takes a server out that is back in a moment, or sends clients to a dead one."""

    async def body() -> None:
        shed = Shed()
        shed.failures = 20
        backend = ScriptedBackend(hanging, slots=1)
        async with world(backend, load=shed.load, limit_video_s=200) as server:
            hung = await server.activate()
            hung.send(append_frame())
            hung.send(close_frame())
            await hung.over()
            await anyio.sleep(11)
            waiting = server.connect()
            await waiting.heard("session.queued")
            assert server.server.readiness == "ready"
            await waiting.over()
            assert waiting.closed == (1013, ErrorCode.SERVICE_UNAVAILABLE)
            assert server.server.readiness == "condemned"
            refused = server.connect()
            await refused.over()
            assert refused.kinds == ["error"]
            shed.failures = 0
            await anyio.sleep(RETRY_S_MAX + 1)
            assert server.server.readiness == "ready"
            await server.activate()

    on_virtual_time(body)


def test_a_backend_error_is_no_reason_to_replace() -> None:
    """One client's bad luck throws a healthy model away."""

    def failing(unit: Unit, seed: int) -> Step:
        return Step(fault="fail")

    async def body() -> None:
        shed = Shed()
        async with world(ScriptedBackend(failing, slots=1), load=shed.load) as server:
            peer = await server.activate()
            peer.send(append_frame(4))
            await peer.over()
            assert peer.events[-1]["reason"] == "backend_error"
            await server.activate()
            assert shed.times == []

    on_virtual_time(body)
    assert issubclass(BackendGone, BackendError)
