"""The engine's thread and its async face: order, cancellation, and no mistake that gets through."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import anyio
import attrs
import pytest

from protocol.values.errors import LocalProtocolError
from protocol.values.model import (
    UNIT_BYTES,
    Cut,
    DuplexConfig,
    Finalized,
    Opened,
    Opening,
    Unit,
    UnitResult,
    Voice,
)
from runtime.model.backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendInfo,
    BackendSession,
    ContextFull,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine import engine as engine_module
from runtime.model.engine.backend import EngineBackend
from runtime.model.engine.engine import Engine
from tests.models import random_model
from tests.models.blocking import open_session
from tests.models.random_model import facts

WAIT_S = 30
"""A thread that waits longer than this was forgotten: the test fails instead of hanging."""
SECOND_NS = 1_000_000_000


@attrs.frozen
class Ask:
    """A request of the fake model; all go together."""

    what: str

    stage = 0
    bucket = "all"


class FakeModel:
    """A model that keeps a diary, stops at a gate, and fails as told."""

    def __init__(self) -> None:
        self.info = BackendInfo(
            name="fake",
            modes=("video",),
            slots=3,
            context_limit=8192,
            sliding_windows=("off",),
            can_rollback=True,
            deterministic=True,
            fingerprint={},
        )
        self.diary: list[str] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self._computing = threading.Lock()

    def session(self, opening: Opening, *, slot: int) -> FakeSession:
        return FakeSession(self, opening.instructions, slot)

    def compute(self, works: Sequence[Ask]) -> list[str]:
        assert self._computing.acquire(blocking=False), "two batches compute at once"
        try:
            assert threading.current_thread() is not threading.main_thread()
            self.diary += [work.what for work in works]
            self.entered.release()
            assert self.gate.wait(WAIT_S)
            if self.error is not None:
                raise self.error
            return [work.what for work in works]
        finally:
            self._computing.release()


class FakeSession:
    """One session of it: each call is one request."""

    def __init__(self, model: FakeModel, name: str, slot: int) -> None:
        self.opened = Opened(prompt_length=7)
        self._model, self._name, self.slot = model, name, slot
        self._interrupted = -1

    def _ask(self, what: str) -> Generator[Ask, str, None]:
        wanted = f"{self._name} {what}"
        assert (yield Ask(wanted)) == wanted

    def open(self) -> Generator[Ask, str, Opened]:
        yield from self._ask(f"open {self.slot}")
        return self.opened

    def _look(self, unit: Unit) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if unit.frames:
            raise self._model.error or AssertionError("no error was set")

    def unit(self, unit: Unit, cut: Cut | None) -> Generator[Ask, str, UnitResult]:
        self._look(unit)
        return self._unit(unit, cut)

    def _unit(self, unit: Unit, cut: Cut | None) -> Generator[Ask, str, UnitResult]:
        yield from self._ask(f"unit {unit.index}")
        if self._interrupted == unit.index:
            cut = Cut(stage="llm", step=0)
        return UnitResult(index=unit.index, is_listen=True, cut=cut)

    def interrupt(self, index: int) -> None:
        self._interrupted = index

    def finalize(self, index: int, *, interrupted: bool) -> Generator[Ask, str, Finalized]:
        yield from self._ask(f"finalize {index} {interrupted}")
        return Finalized(index=index, kv_length=20)

    def _note(self, what: str) -> None:
        self._model.diary.append(f"{self._name} {what}")
        if self._model.error is not None:
            raise self._model.error

    def rollback(self, index: int) -> None:
        self._note(f"rollback {index}")

    def release(self) -> None:
        self._note("release")


def opening(name: str) -> Opening:
    return Opening(instructions=name, voice=Voice(), config=DuplexConfig(), seed=1)


def unit(index: int = 0, **what: Any) -> Unit:
    return Unit(index=index, pcm=bytes(UNIT_BYTES), **what)


async def enter(model: FakeModel) -> None:
    """Wait until a call is in the model."""
    assert await anyio.to_thread.run_sync(lambda: model.entered.acquire(timeout=WAIT_S))


async def opened(model: FakeModel, *names: str) -> list[BackendSession]:
    """Sessions of one backend, in slots 0, 1...; the diary begins after it."""
    backend = EngineBackend(model)
    out: list[BackendSession] = []
    for slot, name in enumerate(names):
        out.append(await backend.open(opening(name), slot=slot))
        await enter(model)
    model.diary.clear()
    return out


@pytest.mark.anyio
async def test_passes_every_call_on() -> None:
    """A session would lose a step between the server and its model."""
    model = FakeModel()
    backend: Backend = EngineBackend(model)
    session: BackendSession = await backend.open(opening("ann"), slot=2)
    assert session.opened == Opened(prompt_length=7)
    cut = Cut(stage="tts", step=3)
    assert await session.run(unit(), cut) == UnitResult(index=0, is_listen=True, cut=cut)
    assert await session.finalize(0, interrupted=True) == Finalized(index=0, kv_length=20)
    await session.rollback(1)
    await session.release()
    assert model.diary == [
        "ann open 2",
        "ann unit 0",
        "ann finalize 0 True",
        "ann rollback 1",
        "ann release",
    ]


@pytest.mark.anyio
async def test_interrupts_the_unit_that_runs() -> None:
    """`force_listen` would wait until the model has finished speaking (B6)."""
    model = FakeModel()
    (session,) = await opened(model, "ann")
    results: list[UnitResult] = []

    async def run() -> None:
        results.append(await session.run(unit()))

    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await enter(model)
        session.interrupt(0)
        model.gate.set()
    assert results[0].cut == Cut(stage="llm", step=0)


@pytest.mark.anyio
async def test_an_interrupt_takes_no_turn_of_the_engine() -> None:
    """A busy server would let the model speak on after `force_listen` (B6)."""
    model = FakeModel()
    ann, bob = await opened(model, "ann", "bob")
    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ann.run, unit())
        await enter(model)
        bob.interrupt(0)
        model.gate.set()
    assert (await bob.run(unit())).cut == Cut(stage="llm", step=0)
    assert (await bob.run(unit(1))).cut is None


@pytest.mark.anyio
async def test_hides_a_models_mistake_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    """A client would be shown internal text, or one bad unit would take the server down."""
    model = FakeModel()
    (session,) = await opened(model, "ann")
    model.error = RuntimeError("CUDA error at secret/path.cu")
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("run_unit", lambda: session.run(unit())),
        ("run_unit", lambda: session.run(unit(frames=(b"jpeg",)))),
        ("finalize", lambda: session.finalize(0, interrupted=False)),
        ("rollback", lambda: session.rollback(0)),
        ("release", session.release),
        ("open", lambda: EngineBackend(model).open(opening("bob"), slot=0)),
    ]
    for name, call in calls:
        with caplog.at_level(logging.ERROR), pytest.raises(BackendError) as failed:
            await call()
        assert str(failed.value) == f"{name} failed"
        assert "secret/path.cu" in caplog.text
        caplog.clear()


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ContextFull("full"), BackendGone("gone"), BackendError("no")])
async def test_passes_a_models_own_errors_on(error: BackendError) -> None:
    """`context_full` would be reported as a failure, and tried again."""
    model = FakeModel()
    (session,) = await opened(model, "ann")
    model.error = error
    with pytest.raises(BackendError) as failed:
        await session.run(unit())
    assert failed.value is error


@pytest.mark.anyio
async def test_goes_on_after_a_mistake() -> None:
    """One session's mistake would stop the engine for all (B3)."""
    model = FakeModel()
    ann, bob = await opened(model, "ann", "bob")
    model.error = RuntimeError("no")
    with pytest.raises(BackendError):
        await ann.run(unit())
    model.error = None
    assert (await bob.run(unit())).is_listen


@pytest.mark.anyio
async def test_waits_for_a_call_that_has_begun() -> None:
    """Cleanup would run beside the unit it cleans up after (B4)."""
    model = FakeModel()
    (session,) = await opened(model, "ann")
    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run, unit())
        await enter(model)
        tasks.cancel_scope.cancel()
        threading.Timer(0, model.gate.set).start()
    await session.release()
    assert model.diary == ["ann unit 0", "ann release"]


@pytest.mark.anyio
async def test_a_call_cancelled_before_it_began_never_begins() -> None:
    """The model would compute for a session that is gone."""
    model = FakeModel()
    (session,) = await opened(model, "ann")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await session.finalize(0, interrupted=False)
    assert scope.cancelled_caught
    await session.release()
    assert model.diary == ["ann release"]


@pytest.mark.anyio
async def test_an_open_cancelled_midway_is_not_lost() -> None:
    """A client that leaves while its session opens would leak it on the model (B5)."""
    model = FakeModel()
    backend = EngineBackend(model)
    sessions: list[BackendSession] = []

    async def open_it() -> None:
        sessions.append(await backend.open(opening("ann"), slot=0))

    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_it)
        await enter(model)
        tasks.cancel_scope.cancel()
        threading.Timer(0, model.gate.set).start()
    assert len(sessions) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("slot", [-1, 3])
async def test_holds_to_its_slots(slot: int) -> None:
    """More sessions than fit would be opened on one model."""
    with pytest.raises(LocalProtocolError, match=f"slot {slot} of 3"):
        await EngineBackend(FakeModel()).open(opening("ann"), slot=slot)


# -- the engine itself ----------------------------------------------------------------------------


def ask(*names: str) -> Generator[Ask, str, list[str]]:
    """A task that asks these."""
    answers: list[str] = []
    for name in names:
        answers += [(yield Ask(name))]
    return answers


def test_what_comes_while_a_batch_is_computed_goes_together() -> None:
    """A full server would compute one session after the other."""
    model = FakeModel()
    engine = Engine(model.compute, batch_max=8)
    model.gate.clear()
    first = engine.submit(ask("a1", "a2"), due_ns=SECOND_NS)
    assert model.entered.acquire(timeout=WAIT_S)
    others = [engine.submit(ask(f"{name}1"), due_ns=SECOND_NS) for name in "bc"]
    model.gate.set()
    assert first.result(WAIT_S) == ["a1", "a2"]
    assert [other.result(WAIT_S) for other in others] == [["b1"], ["c1"]]
    assert model.diary == ["a1", "a2", "b1", "c1"]
    assert (engine.statistics.turns, engine.statistics.answers) == (2, 4)
    assert (engine.statistics.tasks, engine.statistics.largest) == (3, 3)


def test_what_is_due_first_goes_first() -> None:
    """One session would be late while another has time."""
    model = FakeModel()
    engine = Engine(model.compute, batch_max=1, clock=lambda: 0)
    model.gate.clear()
    futures = [engine.submit(ask("now"), due_ns=1)]
    assert model.entered.acquire(timeout=WAIT_S)
    for name, due_ns in (("third", 30), ("first", 10), ("second", 20)):
        futures.append(engine.submit(ask(name), due_ns=due_ns))
    model.gate.set()
    for future in futures:
        future.result(WAIT_S)
    assert model.diary == ["now", "first", "second", "third"]


def test_a_missed_deadline_is_counted() -> None:
    """An operator could not tell that the machine is too slow."""
    now = 0

    def compute(works: Sequence[Ask]) -> list[str]:
        nonlocal now
        now += SECOND_NS
        return [work.what for work in works]

    engine = Engine(compute, batch_max=1, clock=lambda: now)
    engine.submit(ask("in time"), due_ns=SECOND_NS).result(WAIT_S)
    assert engine.statistics.missed == 0
    engine.submit(ask("too", "late"), due_ns=SECOND_NS).result(WAIT_S)
    assert (engine.statistics.missed, engine.statistics.tasks) == (1, 2)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "antiphon-engine"]


def test_the_thread_ends_when_idle_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes would hang on a thread, or one that waited would never work again."""
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    before = set(engine_threads())
    engine = Engine(FakeModel().compute, batch_max=1)
    for name in ("one", "two"):
        assert engine.submit(ask(name), due_ns=SECOND_NS).result(WAIT_S) == [name]
        (thread,) = set(engine_threads()) - before
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_bug_in_the_engine_hangs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Every session would wait for ever, and so would the shutdown."""
    broken: list[list[str]] = [[]]  # No answer to one request: the scheduler trips over it.

    def compute(works: Sequence[Ask]) -> list[str]:
        return broken.pop() if broken else [work.what for work in works]

    engine = Engine(compute, batch_max=4)
    with pytest.raises(RuntimeError, match="the engine failed"):
        engine.submit(ask("lost"), due_ns=SECOND_NS).result(WAIT_S)
    assert "the engine's thread failed" in caplog.text
    assert engine.submit(ask("again"), due_ns=SECOND_NS).result(WAIT_S) == ["again"]


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine short of threads for a moment would have a dead engine for ever."""
    engine = Engine(FakeModel().compute, batch_max=1)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            engine.submit(ask("never"), due_ns=SECOND_NS)
    assert engine.submit(ask("now"), due_ns=SECOND_NS).result(WAIT_S) == ["now"]
    assert engine.statistics.tasks == 1


def test_a_panic_below_fails_its_own_task_only() -> None:
    """A library's panic, which is no `Exception`, would hang every session."""
    engine = Engine(FakeModel().compute, batch_max=1)

    def panic() -> Generator[Ask, str, None]:
        yield Ask("first")
        raise SystemExit("panic")

    with pytest.raises(RuntimeError, match="panic"):
        engine.submit(panic(), due_ns=SECOND_NS).result(WAIT_S)
    assert engine.submit(ask("on"), due_ns=SECOND_NS).result(WAIT_S) == ["on"]


def test_submissions_from_many_threads_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that comes just as the thread ends would wait for ever."""
    monkeypatch.setattr(engine_module, "IDLE_S", 0.0)
    engine = Engine(lambda works: [work.what for work in works], batch_max=4)
    wrong: list[str] = []

    def client(name: str) -> None:
        for index in range(50):
            what = f"{name}{index}"
            if engine.submit(ask(what), due_ns=SECOND_NS).result(WAIT_S) != [what]:
                wrong.append(what)

    clients = [threading.Thread(target=client, args=(name,)) for name in "abcd"]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert wrong == []
    assert engine.statistics.tasks == 200


# -- with the model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), random_model.SMALL, slots=4)


@pytest.mark.anyio
async def test_sessions_at_once_get_what_they_get_alone(model: DuplexModel) -> None:
    """Callers would hear each other (B8)."""
    backend = EngineBackend(model)
    live: dict[int, list[object]] = {seed: [] for seed in range(4)}

    async def talk(seed: int) -> None:
        session = await backend.open(random_model.opening(seed), slot=seed)
        for index in range(3):
            result = await session.run(random_model.unit(index, seed))
            done = await session.finalize(index, interrupted=False)
            live[seed].append((facts(result), done.kv_length))
        await session.release()

    async with anyio.create_task_group() as tasks:
        for seed in live:
            tasks.start_soon(talk, seed)
    for seed, rows in live.items():
        session = open_session(model, random_model.opening(seed))
        alone = []
        for index in range(3):
            result = session.run_unit(random_model.unit(index, seed))
            done = session.finalize(index, interrupted=False)
            alone.append((facts(result), done.kv_length))
        session.release()
        assert alone == rows


@pytest.mark.anyio
async def test_a_broken_picture_is_undone(model: DuplexModel) -> None:
    """A damaged JPEG would end the session (B3)."""
    backend = EngineBackend(model)
    session = await backend.open(random_model.opening(), slot=0)
    with pytest.raises(BackendError, match="cannot be decoded"):
        await session.run(random_model.unit(0, frames=(b"no jpeg",)))
    await session.rollback(0)
    assert (await session.run(random_model.unit(1))).index == 1
    await session.release()


@pytest.mark.anyio
async def test_an_open_that_fails_leaves_the_slot_empty(model: DuplexModel) -> None:
    """The next caller would get the prompt of one that was refused (B8)."""
    backend = EngineBackend(model)
    long = attrs.evolve(random_model.opening(), instructions="x " * 500)
    with pytest.raises(ContextFull):
        await backend.open(long, slot=1)
    for store in (model.runner.llm, model.runner.tts, model.runner.audio):
        assert not store.keys[:, 1].any()
        assert not store.values[:, 1].any()
