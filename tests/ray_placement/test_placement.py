"""Workers on a cluster: here it is faked, and its workers are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import pytest
import ray_placement
from ray_placement import OnRay

from runtime import RUN
from runtime.model.backends.base import BackendGone
from runtime.settings.settings import Settings
from runtime.slots.workers import Workers

pytestmark = pytest.mark.anyio

TOKEN = "a token of thirty-two characters"
WAIT_S = 60


@pytest.fixture
def anyio_backend() -> str:
    """The server's own event loop."""
    return "trio"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_placement, "LOOK_S", 0.05)


@attrs.define(eq=False)
class FakeCluster:
    """A cluster with so many GPUs, each for one worker; one that dies comes again.

    `models`: of workers that are not `scripted`. `wanted`, `ended`: what was asked for.
    """

    folder: Path
    gpus: int
    models: dict[int, str] = attrs.field(factory=dict)
    wanted: list[int] = attrs.field(factory=list)
    ended: list[tuple[int, bool]] = attrs.field(factory=list)
    processes: dict[int, subprocess.Popen[str]] = attrs.field(factory=dict)
    addresses: dict[int, str] = attrs.field(factory=dict)

    async def find(self, worker: int) -> str:
        process = self.processes.get(worker)
        if process is None:
            while len(self.processes) >= self.gpus:  # noqa: ASYNC110 - as Ray is asked
                await anyio.sleep(0.05)
        if process is None or process.poll() is not None:
            if process is not None:
                self.stop(process)
            self.start(worker)
            process = self.processes[worker]
            assert process.stdout is not None
            said = [await anyio.to_thread.run_sync(process.stdout.readline) for _ in range(3)]
            assert said[-1] == "ready\n"
            self.addresses[worker] = said[1].strip().removeprefix("listening on ")
        return self.addresses[worker]

    def start(self, worker: int) -> None:
        file = self.folder / f"token-{worker}"  # its own: another worker may be reading
        file.write_text(TOKEN)
        listen = ("--listen", "tcp:127.0.0.1:0", "--token-file", str(file))
        model = ("--model", self.models.get(worker, "scripted"))
        self.processes[worker] = subprocess.Popen(
            (*RUN, "workers", "start", *listen, *model), stdout=subprocess.PIPE, text=True
        )

    async def end(self, worker: int, *, again: bool = False) -> None:
        self.ended.append((worker, again))
        if worker in self.processes:
            self.stop(self.processes[worker] if again else self.processes.pop(worker))

    async def want(self, count: int) -> None:
        self.wanted.append(count)

    @staticmethod
    def stop(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@attrs.define
class Stage:
    """A placement on a cluster and its workers; `load` is what the load asks for."""

    cluster: FakeCluster
    workers: Workers
    load: int = 1

    def states(self) -> list[str]:
        return [each.state for each in self.workers.roster()]


@asynccontextmanager
async def stage(folder: Path, *, gpus: int, **given: Any) -> AsyncIterator[Stage]:
    """A server's part of it, running."""
    models = given.pop("models", {})
    cluster = FakeCluster(folder, gpus, models)
    settings = Settings(model="scripted", placement="ray", **given)
    try:
        async with anyio.create_task_group() as tasks:
            placement = OnRay(settings, tasks, cluster, token=TOKEN, shrink_wait_s=0.3)
            with anyio.fail_after(WAIT_S):
                workers = Workers([await placement.load(0)], load=placement.load)
            stage = Stage(cluster, workers)
            tasks.start_soon(workers.run, lambda: None)
            tasks.start_soon(placement.scale, workers, lambda: stage.load)
            yield stage
            tasks.cancel_scope.cancel()
    finally:
        for process in cluster.processes.values():
            FakeCluster.stop(process)


async def soon(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    with anyio.fail_after(WAIT_S):
        while not condition():  # noqa: ASYNC110 - a process is waited for
            await anyio.sleep(0.02)


async def test_all_workers_that_are_wanted_join_the_first(tmp_path: Path) -> None:
    """A server would not be ready before its last GPU, or stay with one."""
    async with stage(tmp_path, gpus=3, workers_wanted=3) as here:
        assert here.states() == ["serving"]
        await soon(lambda: here.states() == ["serving"] * 3)
        assert here.workers.info.slots == 12
        assert here.cluster.wanted == [3]
        assert {each.where for each in here.workers.roster()} == {*here.cluster.addresses.values()}


async def test_a_worker_that_is_lost_is_taken_where_it_comes_again(tmp_path: Path) -> None:
    """A cluster would restart workers that no session reaches."""
    async with stage(tmp_path, gpus=2, workers_wanted=2) as here:
        await soon(lambda: here.states() == ["serving"] * 2)
        before = dict(here.cluster.addresses)
        os.kill(here.cluster.processes[1].pid, signal.SIGKILL)
        await soon(lambda: here.cluster.addresses[1] != before[1])
        await soon(lambda: here.states() == ["serving"] * 2)
        where = [each.where for each in here.workers.roster()]
        assert where == [before[0], here.cluster.addresses[1]]
        assert here.cluster.ended == []


async def test_workers_come_and_go_with_the_load(tmp_path: Path) -> None:
    """GPUs would be paid for without sessions, or sessions wait although there are GPUs."""
    async with stage(tmp_path, gpus=9, workers_wanted=1, workers_max=3) as here:
        here.load = 7
        await soon(lambda: here.states() == ["serving"] * 3)
        busy = here.workers.pool.lease()
        assert busy is not None
        here.load = 1
        await soon(lambda: len(here.cluster.ended) == 2)
        assert here.states() == ["serving"]
        assert here.workers.places[0].worker == busy.worker
        assert len(here.cluster.processes) == 1
        assert here.cluster.wanted == [1, 3, 1]


async def test_a_worker_without_a_gpu_is_given_up_when_the_load_falls(tmp_path: Path) -> None:
    """It would be started for nothing when a GPU is free again, or a serving one be drained."""
    async with stage(tmp_path, gpus=1, workers_wanted=1, workers_max=2) as here:
        here.load = 2
        await soon(lambda: here.cluster.wanted == [1, 2])
        here.load = 1
        await soon(lambda: here.cluster.ended == [(1, False)])
        assert here.cluster.wanted == [1, 2, 1]
        assert here.states() == ["serving"]


async def test_a_drained_worker_is_ended_and_another_comes(tmp_path: Path) -> None:
    """An operator could not clear a node, or would lose a worker for good."""
    async with stage(tmp_path, gpus=2, workers_wanted=2) as here:
        await soon(lambda: here.states() == ["serving"] * 2)
        here.workers.drain(0)
        await soon(lambda: here.cluster.ended == [(0, False)])
        await soon(lambda: here.states() == ["serving"] * 2)
        assert sorted(here.cluster.processes) == [1, 2]


async def test_a_worker_with_another_model_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A session's bytes would depend on the node that it was given."""
    async with stage(tmp_path, gpus=2, workers_wanted=2, models={1: "tiny"}) as here:
        await soon(lambda: (1, False) in here.cluster.ended)
        assert here.states() == ["serving"]
    where = here.cluster.addresses[1]
    assert f"worker {where} cannot stand in for worker 0: " in caplog.text


async def test_a_worker_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    """A cluster holds it for running: nothing else would start it again."""
    cluster = FakeCluster(tmp_path, 1)
    cluster.start(0)
    cluster.addresses[0] = "tcp:127.0.0.1:1"
    settings = Settings(model="scripted", placement="ray")
    try:
        async with anyio.create_task_group() as tasks:
            placement = OnRay(settings, tasks, cluster, token=TOKEN)
            for ended in ([], [(0, True)]):
                with pytest.raises(BackendGone, match=r"worker tcp:127\.0\.0\.1:1: "):
                    await placement.load(0)
                assert cluster.ended == ended
            await placement.load(0)
            tasks.cancel_scope.cancel()
    finally:
        FakeCluster.stop(cluster.processes[0])
