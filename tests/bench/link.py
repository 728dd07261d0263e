"""What a worker process adds to a unit: `python -m tests.bench.link [--rounds N] [--pause-s S]`.

One session runs units of a second (64 KB of sound in, 96 KB out where it speaks) with the model in
this process, and in a worker behind a Unix socket, in turns. CPU is that of both processes. A ratio
is taken within a round, and the median of the rounds is printed. `scripted` computes nothing, so
its difference is the link; `tiny` shows what part that is of a model's cost. Last: how long an
interrupt takes to cut a unit that waits, with 8 MB of another session's pictures on their way.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
import attrs
import numpy as np

from protocol.values.model import DuplexConfig, Opening, Unit, Voice
from runtime.link.backend import connect
from runtime.link.link import UnixAddress
from runtime.model.backends.base import Backend, BackendSession
from runtime.model.backends.scripted import Call, ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_chat import tone
from runtime.model.models import load_backend
from runtime.worker.worker import Worker

MODELS: Final = ("scripted", "tiny")
INTERRUPTS: Final = 100
PICTURES: Final = (bytes(1_000_000),) * 8
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
SPEECH: Final = tone(0, 7, samples=24_000)
SPEAKS: Final = Step(
    speech=Speaks(text="so it is", pcm=SPEECH), prefill_s=0.0, generate_s=0.0, finalize=Call()
)
WAITS: Final = Step(prefill_s=0.0, generate_s=60.0, steps=600_000)
NOISE: Final = (np.random.default_rng(1).normal(0, 0.1, 16_000)).astype("<f4").tobytes()


def model_of(name: str) -> Backend:
    """A model that answers every unit at once, or `tiny`; `waits` answers none."""
    if name == "tiny":
        return load_backend("tiny", 2)
    step = WAITS if name == "waits" else SPEAKS
    return ScriptedBackend(script=lambda *_: step, slots=2, context_limit=1 << 40)


async def serve(name: str, path: Path) -> None:
    """Be the worker."""
    async with anyio.create_task_group() as tasks:
        listener = await anyio.create_unix_listener(path)
        await Worker(backend=model_of(name), tasks=tasks).serve(listener)


@contextmanager
def worker(name: str, path: Path) -> Iterator[int]:
    """A worker process; gives its id."""
    command = [sys.executable, "-m", "tests.bench.link", "--serve", name, "--path", str(path)]
    with subprocess.Popen(command) as process:
        try:
            while not path.exists():
                time.sleep(0.05)
            yield process.pid
        finally:
            process.kill()


def cpu_s(pid: int | None) -> float:
    """Processor time of this process, and of the worker."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    spent = own.ru_utime + own.ru_stime
    if pid is not None:  # in nanoseconds; /proc/PID/stat counts in ticks of 10 ms
        for task in Path(f"/proc/{pid}/task").iterdir():
            spent += int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


@attrs.frozen
class Part:
    """One session's units: CPU of each in µs, and their walls in ms."""

    cpu_us: float
    p50_ms: float
    p99_ms: float


async def run_units(session: BackendSession, units: int, pause_s: float, pid: int | None) -> Part:
    walls = []
    began_s = cpu_s(pid)
    for index in range(units):
        asked_s = time.perf_counter()
        await session.run(Unit(index=index, pcm=NOISE))
        walls.append(time.perf_counter() - asked_s)
        await session.finalize(index, interrupted=False)
        await anyio.sleep(pause_s)
    cpu_us = (cpu_s(pid) - began_s) / units * 1e6
    walls.sort()
    return Part(cpu_us, walls[units // 2] * 1e3, walls[units * 99 // 100] * 1e3)


def opening(seed: int = 7) -> Opening:
    return Opening(instructions="", voice=Voice(), config=DuplexConfig(), seed=seed)


async def compare(name: str, rounds: int, units: int, pause_s: float, folder: Path) -> None:
    """Run both ends in turns, and print their medians and the ratio."""
    path = folder / name
    with worker(name, path) as pid:
        async with anyio.create_task_group() as tasks:
            here, there = model_of(name), await connect(UnixAddress(path), tasks=tasks)
            found: list[tuple[Part, Part]] = []
            for _ in range(rounds + 1):
                pair = []
                for backend, worker_pid in ((here, None), (there, pid)):
                    session = await backend.open(opening(), slot=0)
                    pair.append(await run_units(session, units, pause_s, worker_pid))
                    await session.release()
                found.append((pair[0], pair[1]))
            tasks.cancel_scope.cancel()
    del found[0]  # it warms up
    for field in ("cpu_us", "p50_ms", "p99_ms"):
        ours, theirs = (
            statistics.median(getattr(pair[end], field) for pair in found) for end in (0, 1)
        )
        ratio = statistics.median(getattr(b, field) / getattr(a, field) for a, b in found)
        print(f"{name:9} {field:7} {ours:10.2f} in process {theirs:10.2f} worker {ratio:7.3f} x")


async def interrupts(folder: Path) -> None:
    """Time interrupts while large frames are on their way."""
    path = folder / "waits"
    with worker("waits", path):
        async with anyio.create_task_group() as tasks:
            backend = await connect(UnixAddress(path), tasks=tasks)
            sessions = [await backend.open(opening(slot), slot=slot) for slot in range(2)]
            for load in (False, True):
                first = load * INTERRUPTS
                delays = [
                    await _interrupted(sessions, index, load)
                    for index in range(first, first + INTERRUPTS)
                ]
                delays.sort()
                what = "8 MB on their way" if load else "idle"
                print(
                    f"interrupt, {what}: p50 {delays[INTERRUPTS // 2] * 1e3:.2f} ms, "
                    f"p99 {delays[INTERRUPTS * 99 // 100] * 1e3:.2f} ms"
                )
            tasks.cancel_scope.cancel()


async def _interrupted(sessions: list[BackendSession], index: int, load: bool) -> float:
    """The time from an interrupt to the cut unit's result."""
    told_s, cut = 0.0, anyio.Event()

    async def run(session: BackendSession, frames: tuple[bytes, ...] = ()) -> None:
        nonlocal told_s
        await session.run(Unit(index=index, pcm=NOISE, frames=frames))
        told_s = told_s or time.perf_counter()
        cut.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, sessions[0])
        await anyio.sleep(0.02)
        if load:
            tasks.start_soon(run, sessions[1], PICTURES)
            await anyio.sleep(0.001)
        asked_s = time.perf_counter()
        sessions[0].interrupt(index)
        await cut.wait()
        delay_s = told_s - asked_s
        sessions[1].interrupt(index)
    for session in sessions[: 1 + load]:
        await session.finalize(index, interrupted=True)
    return delay_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.bench.link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--pause-s", type=float, default=0.05, help="between two units")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        anyio.run(serve, options.serve, options.path, backend="trio")
        return
    with tempfile.TemporaryDirectory() as name:
        for model in MODELS:
            units = options.units if model == "scripted" else max(20, options.units // 5)
            ends = (model, options.rounds, units, options.pause_s, Path(name))
            anyio.run(compare, *ends, backend="trio")
        anyio.run(interrupts, Path(name), backend="trio")


if __name__ == "__main__":
    main()
