"""What a unit costs a gateway whose models are in workers: CPU, log, bytes on both networks.

Sessions send a unit a second, spread over the second, and the model speaks in every unit. CPU is
the gateway's own by its kernel, so other work on the machine changes it little; its parts are those
of the event loop's thread and the recorder's. A line through the runs of fewer sessions predicts
the run of the most: `linear` says how far it was off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import attrs
import numpy as np

from runtime.commands.bench import machine_facts
from tests.bench.gateway.child import ROOT, Child, child
from tests.bench.gateway.load import client_frame
from tests.bench.gateway.material import deltas, make_exchanges

Mode = Literal["audio", "video"]
MODES: Final[tuple[Mode, ...]] = ("audio", "video")
PROCESSES: Final = f"{__package__}.processes"
SETTLE_S: Final = 1.0
IDLE_S: Final = 20.0
IDLE_WORKERS: Final = (2, 16)
TEXT: Final = 1
"""The opcode of a frame."""


@attrs.frozen(kw_only=True)
class Run:
    """One run of sessions of one mode.

    Attributes:
        mode: a picture a second comes with the sound of `video`.
        workers: processes with the model; 0: it is in the gateway's.
        sessions, units, missed: at once; answered in all; not answered.
        cpu_us, loop_us, recorder_us: of the gateway, a unit: all, the event loop's thread, the
            recorder's.
        worker_us: of all workers together, a unit.
        log_bytes: a unit.
        to_worker_bytes, from_worker_bytes: a unit, without TLS.
        p99_ms: from a unit's due time to the last byte of its answer.
    """

    mode: Mode
    workers: int
    sessions: int
    units: int
    missed: int
    cpu_us: float
    loop_us: float
    recorder_us: float
    worker_us: float
    log_bytes: int
    to_worker_bytes: int
    from_worker_bytes: int
    p99_ms: float


@attrs.frozen(kw_only=True)
class Measured:
    """What a run of the bench found.

    Attributes:
        what: in words.
        machine: what it ran on.
        seconds: of each run.
        client_bytes: a unit's frames, by mode: to the server, and from it.
        session_bytes: memory of the gateway a session, by mode.
        idle_worker_us: CPU of the gateway a second and a worker that does nothing.
        linear: by mode, of the run of most sessions: CPU that a line through the others says, what
            was found (each a part of a core), and their ratio.
        runs: all of them.
    """

    what: str = "a gateway with workers over TCP and TLS, speaking in every unit: its costs a unit"
    machine: dict[str, str | int | float]
    seconds: int
    client_bytes: dict[str, list[int]]
    session_bytes: dict[str, int]
    idle_worker_us: float
    linear: dict[str, list[float]]
    runs: list[Run]


async def measure(
    folder: Path, *, sessions: tuple[int, ...], seconds: int, tell: Callable[[str], None]
) -> Measured:
    """Measure both modes, with workers and without.

    Args:
        folder: takes logs, errors and secrets.
        sessions: of the runs, from few to most.
        seconds: of each.
        tell: told what is being done.
    """
    secrets = folder / "secrets"
    made = ["sh", str(ROOT / "deploy" / "worker-secrets.sh"), str(secrets), "127.0.0.1"]
    await anyio.run_process(made)
    runs, memory = [], {}
    for mode in MODES:
        for workers in (0, 2):
            async with AsyncExitStack() as stack:
                bench = await _Bench.make(stack, folder, secrets, workers)
                grown = await bench.run(mode, 2, 2)  # what runs for the first time is dear
                before = (await bench.gateway.ask("read"))["memory_bytes"]
                for count in sessions:
                    tell(f"{mode}, {workers} workers, {count} sessions")
                    grown = await bench.run(mode, count, seconds)
                    runs.append(grown)
                memory[mode] = bench.held_bytes(before, sessions[-1])
    tell("workers that do nothing")
    idle = [await _idle_us(folder, secrets, count) for count in IDLE_WORKERS]
    linked = [[it for it in runs if it.mode == mode and it.workers] for mode in MODES]
    return Measured(
        machine=machine_facts(),
        seconds=seconds,
        client_bytes=_client_bytes(),
        session_bytes=memory,
        idle_worker_us=round((idle[1] - idle[0]) / (IDLE_WORKERS[1] - IDLE_WORKERS[0]), 1),
        linear={mode: predict(each) for mode, each in zip(MODES, linked, strict=True)},
        runs=runs,
    )


def predict(runs: list[Run]) -> list[float]:
    """Predict the CPU of the run of most sessions, in cores, from the others; then what it was."""
    *some, most = sorted(runs, key=lambda run: run.sessions)
    cores = [run.sessions * run.cpu_us / 1e6 for run in (*some, most)]
    slope, rest = np.polyfit([run.sessions for run in some], cores[:-1], 1)
    predicted = float(slope * most.sessions + rest)
    return [round(it, 3) for it in (predicted, cores[-1], predicted / cores[-1])]


def _client_bytes() -> dict[str, list[int]]:
    """The bytes of a unit's frames to the server and from it, with heads, by mode."""
    (exchange,) = make_exchanges(1)
    answer = sum(len(it) + 10 for it in deltas("1", exchange.pcm))
    frames = {"audio": exchange.pieces(1)[0], "video": exchange.frame}
    return {
        mode: [len(client_frame(TEXT, frame.encode())), answer] for mode, frame in frames.items()
    }


class _Bench:
    """A gateway, its workers and the load."""

    def __init__(self, gateway: Child, workers: list[Child], load: Child, logs: Path) -> None:
        self.gateway = gateway
        self._workers = workers
        self._load = load
        self._logs = logs
        self._peak_bytes = 0

    @classmethod
    async def make(cls, stack: AsyncExitStack, folder: Path, secrets: Path, workers: int) -> _Bench:
        """Start the processes; they end with the stack."""
        logs = folder / f"logs-{workers}"

        async def start(name: str, *words: str) -> Child:
            return await stack.enter_async_context(child(name, folder, (), *words))

        made = [
            await start(f"worker-{number}", PROCESSES, "worker", str(secrets))
            for number in range(workers)
        ]
        ports = [str(each.hello["port"]) for each in made]
        gateway = await start("gateway", PROCESSES, "gateway", str(secrets), str(logs), *ports)
        return cls(gateway, made, await start("load", "tests.bench.gateway.load"), logs)

    async def _read(self) -> dict[str, int]:
        found: dict[str, Any] = await self.gateway.ask("read")
        workers = [await each.ask("read") for each in self._workers]
        for name in ("cpu_ns", "came_bytes", "left_bytes"):
            found[f"worker_{name}"] = sum(each[name] for each in workers)
        self._peak_bytes = max(self._peak_bytes, found["memory_bytes"])
        return found

    async def run(self, mode: Mode, sessions: int, seconds: int) -> Run:
        """Run sessions of one mode."""
        order = {"sessions": sessions, "units": seconds, "pace": "spread"}
        order |= {"port": self.gateway.hello["port"], "has_picture": mode == "video"}
        order |= {"pieces": 1, "coding": "float32"}
        await self._load.ask(order)
        before = await self._read()
        found = await self._load.ask("go")
        after = await self._read()
        await self._load.ask("leave")
        await anyio.sleep(SETTLE_S)
        logs = sum(log.stat().st_size for log in self._logs.glob("*.zst"))
        for log in self._logs.glob("*.zst"):
            log.unlink()

        def each(name: str) -> float:
            return (after[name] - before[name]) / found["units"]

        return Run(
            mode=mode,
            workers=len(self._workers),
            sessions=sessions,
            units=found["units"],
            missed=found["missed"],
            cpu_us=round(each("cpu_ns") / 1e3),
            loop_us=round(each("loop_ns") / 1e3),
            recorder_us=round(each("recorder_ns") / 1e3),
            worker_us=round(each("worker_cpu_ns") / 1e3),
            log_bytes=round(logs / found["units"]),
            to_worker_bytes=round(each("worker_came_bytes")),
            from_worker_bytes=round(each("worker_left_bytes")),
            p99_ms=round(float(np.percentile(found["latency_ns"], 99)) / 1e6, 1),
        )

    def held_bytes(self, before: int, sessions: int) -> int:
        """The memory of a session: what the gateway grew by, at most."""
        return max(0, self._peak_bytes - before) // sessions


async def _idle_us(folder: Path, secrets: Path, workers: int) -> float:
    """The gateway's CPU a second while nothing happens."""
    async with AsyncExitStack() as stack:
        bench = await _Bench.make(stack, folder, secrets, workers)
        await anyio.sleep(SETTLE_S)
        before = await bench.gateway.ask("read")
        await anyio.sleep(IDLE_S)
        after = await bench.gateway.ask("read")
    return float(after["cpu_ns"] - before["cpu_ns"]) / 1e3 / IDLE_S
