"""The threaded backend: one call at a time, in order, and no mistake of a model gets through."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import anyio
import pytest

from protocol.errors import LocalProtocolError
from protocol.model import (
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
from runtime.backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendInfo,
    BackendSession,
    ContextFull,
)
from runtime.backends.threaded import CUT_AT_ONCE, ThreadedBackend

WAIT_S = 10
"""A thread that waits longer than this was forgotten: the test fails instead of hanging."""


class FakeModel:
    """A blocking model that keeps a diary, stops at a gate, and fails as told."""

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

    def open(self, opening: Opening) -> FakeSession:
        self.compute(f"open {opening.instructions}")
        return FakeSession(self, opening.instructions)

    def compute(self, what: str) -> None:
        assert self._computing.acquire(blocking=False), "two calls compute at once"
        try:
            assert threading.current_thread() is not threading.main_thread()
            self.diary.append(what)
            self.entered.release()
            assert self.gate.wait(WAIT_S)
            if self.error is not None:
                raise self.error
        finally:
            self._computing.release()


class FakeSession:
    """One session of it."""

    def __init__(self, model: FakeModel, name: str) -> None:
        self.opened = Opened(prompt_length=7)
        self._model = model
        self._name = name

    def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        self._model.compute(f"{self._name} unit {unit.index}")
        return UnitResult(index=unit.index, is_listen=True, cut=cut)

    def interrupt(self, index: int) -> None:
        self._model.diary.append(f"{self._name} interrupt {index}")

    def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        self._model.compute(f"{self._name} finalize {index} {interrupted}")
        return Finalized(index=index, kv_length=20)

    def rollback(self, index: int) -> None:
        self._model.compute(f"{self._name} rollback {index}")

    def release(self) -> None:
        self._model.compute(f"{self._name} release")


def opening(name: str) -> Opening:
    return Opening(instructions=name, voice=Voice(), config=DuplexConfig(), seed=1)


def unit(index: int = 0) -> Unit:
    return Unit(index=index, pcm=bytes(UNIT_BYTES))


async def enter(model: FakeModel) -> None:
    """Wait until a call is in the model."""
    assert await anyio.to_thread.run_sync(lambda: model.entered.acquire(timeout=WAIT_S))


@pytest.mark.anyio
async def test_passes_every_call_on() -> None:
    """A session would lose a step between the server and its model."""
    model = FakeModel()
    backend: Backend = ThreadedBackend(model)
    session: BackendSession = await backend.open(opening("ann"), slot=2)
    assert session.opened == Opened(prompt_length=7)
    cut = Cut(stage="tts", step=3)
    assert await session.run_unit(unit(), cut) == UnitResult(index=0, is_listen=True, cut=cut)
    assert await session.finalize(0, interrupted=True) == Finalized(index=0, kv_length=20)
    await session.rollback(1)
    await session.release()
    assert model.diary == [
        "open ann",
        "ann unit 0",
        "ann finalize 0 True",
        "ann rollback 1",
        "ann release",
    ]


@pytest.mark.anyio
async def test_serves_the_earliest_first_and_one_at_a_time() -> None:
    """One session would starve behind others, or two would compute on one another's cores."""
    model = FakeModel()
    backend = ThreadedBackend(model)
    sessions = [await backend.open(opening(name), slot=0) for name in ("ann", "bob", "cid")]
    model.diary.clear()
    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        for session in sessions:
            tasks.start_soon(session.run_unit, unit())
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(sessions[2].release)
        await anyio.wait_all_tasks_blocked()
        model.gate.set()
    assert model.diary == ["ann unit 0", "bob unit 0", "cid unit 0", "cid release"]


@pytest.mark.anyio
async def test_interrupts_the_unit_that_runs() -> None:
    """`force_listen` would wait until the model has finished speaking (B6)."""
    model = FakeModel()
    session = await ThreadedBackend(model).open(opening("ann"), slot=0)
    await enter(model)
    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run_unit, unit())
        await enter(model)
        session.interrupt(0)
        assert model.diary[-1] == "ann interrupt 0"
        model.gate.set()


@pytest.mark.anyio
async def test_cuts_a_unit_that_was_interrupted_while_it_waited() -> None:
    """A busy server would let the model speak on after `force_listen` (B6)."""
    model = FakeModel()
    backend = ThreadedBackend(model)
    ann = await backend.open(opening("ann"), slot=0)
    bob = await backend.open(opening("bob"), slot=1)
    results: list[UnitResult] = []

    async def run(index: int) -> None:
        results.append(await bob.run_unit(unit(index)))

    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ann.run_unit, unit())
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(run, 0)
        await anyio.wait_all_tasks_blocked()
        bob.interrupt(0)
        model.gate.set()
    await run(1)
    assert [result.cut for result in results] == [CUT_AT_ONCE, None]


@pytest.mark.anyio
async def test_hides_a_models_mistake_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    """A client would be shown internal text, or one bad unit would take the server down."""
    model = FakeModel()
    session = await ThreadedBackend(model).open(opening("ann"), slot=0)
    model.error = RuntimeError("CUDA error at secret/path.cu")
    calls: list[Callable[[], object]] = [
        lambda: session.run_unit(unit()),
        lambda: session.finalize(0, interrupted=False),
        lambda: session.rollback(0),
        session.release,
        lambda: ThreadedBackend(model).open(opening("bob"), slot=0),
    ]
    for call, name in zip(
        calls, ["run_unit", "finalize", "rollback", "release", "open"], strict=True
    ):
        with caplog.at_level(logging.ERROR), pytest.raises(BackendError) as failed:
            await call()  # type: ignore[misc]
        assert str(failed.value) == f"{name} failed"
        assert "secret/path.cu" in caplog.text
        caplog.clear()


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ContextFull("full"), BackendGone("gone"), BackendError("no")])
async def test_passes_a_models_own_errors_on(error: BackendError) -> None:
    """`context_full` would be reported as a failure, and tried again."""
    model = FakeModel()
    session = await ThreadedBackend(model).open(opening("ann"), slot=0)
    model.error = error
    with pytest.raises(BackendError) as failed:
        await session.run_unit(unit())
    assert failed.value is error


@pytest.mark.anyio
async def test_releases_a_lost_session_in_peace() -> None:
    """The slot of a session whose worker died would never come back (B5)."""
    model = FakeModel()
    session = await ThreadedBackend(model).open(opening("ann"), slot=0)
    model.error = BackendGone("worker lost")
    await session.release()


@pytest.mark.anyio
async def test_waits_for_a_call_that_has_begun() -> None:
    """Cleanup would run beside the unit it cleans up after (B4)."""
    model = FakeModel()
    session = await ThreadedBackend(model).open(opening("ann"), slot=0)
    await enter(model)
    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run_unit, unit())
        await enter(model)
        tasks.cancel_scope.cancel()
        threading.Timer(0, model.gate.set).start()
    await session.release()
    assert model.diary == ["open ann", "ann unit 0", "ann release"]


@pytest.mark.anyio
async def test_a_call_cancelled_in_line_never_begins() -> None:
    """The model would compute for a session that is gone."""
    model = FakeModel()
    session = await ThreadedBackend(model).open(opening("ann"), slot=0)
    await enter(model)
    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run_unit, unit())
        await enter(model)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await session.finalize(0, interrupted=False)
        assert scope.cancelled_caught
        model.gate.set()
    assert model.diary == ["open ann", "ann unit 0"]


@pytest.mark.anyio
async def test_an_open_cancelled_midway_is_not_lost() -> None:
    """A client that leaves while its session opens would leak it on the model (B5)."""
    model = FakeModel()
    backend = ThreadedBackend(model)
    opened: list[BackendSession] = []

    async def open_it() -> None:
        opened.append(await backend.open(opening("ann"), slot=0))

    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_it)
        await enter(model)
        tasks.cancel_scope.cancel()
        threading.Timer(0, model.gate.set).start()
    assert len(opened) == 1


@pytest.mark.anyio
async def test_holds_to_its_slots() -> None:
    """More sessions than fit would be opened on one model."""
    backend = ThreadedBackend(FakeModel(), slots=1)
    assert backend.info.slots == 1
    with pytest.raises(LocalProtocolError, match="slot 1 of 1"):
        await backend.open(opening("ann"), slot=1)
