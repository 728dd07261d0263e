"""What the gateway adds to a unit: CPU, latency and memory, beside two yardsticks in the same run.

Each contender is a server in a process of its own (`servers`), held to one core; the load
(`load`) is another process, on the other cores. In every round each pattern is run against
every contender, one after the other, and each round begins with another of them. A figure is the
median of the rounds. A ratio is taken within a round, then its median: so a machine that was slower
for a while was so for both.

CPU is the server process's own, by its kernel, between two readings around the units; connecting
and leaving are not in it. Nobody waits for the model, which answers at once: all latency is added.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import attrs

from runtime.commands.bench import Times, sum_up
from tests.bench.gateway.child import Child, child
from tests.bench.gateway.material import CONTENDERS, Contender, Pattern, Plan

CAPACITY_OF: Final[tuple[Contender, ...]] = ("recorded", "websockets")
NS_PER_US: Final = 1000
NS_PER_MS: Final = 1_000_000
LAG_MS_MAX: Final = 5.0
BUSY_MAX: Final = 0.8
"""Beyond either the load itself was the bottleneck for a part of the time, and figures say less."""


@attrs.frozen(kw_only=True)
class Run:
    """One pattern against one contender in one round.

    Attributes:
        round: from 0.
        contender: the server.
        pattern: by its name.
        units: answered.
        missed: sent and not answered, for a server that is behind drops units; times are too long
            then, as an answer does not say which unit it is of.
        cpu_us: of the server's process, a unit.
        loop_us: of its event loop's thread.
        recorder_us: of its recorder's thread.
        latency: from when units were due to their last byte; with `flat` no clock says when.
        load_busy: part of the time in which the load did something.
        load_lag_ms: how late it was, p99.
    """

    round: int
    contender: Contender
    pattern: str
    units: int
    missed: int
    cpu_us: float
    loop_us: float
    recorder_us: float
    latency: Times
    load_busy: float
    load_lag_ms: float


@attrs.frozen(kw_only=True)
class Row:
    """A pattern and a contender: medians of the rounds.

    Attributes:
        pattern: by its name.
        contender: the server.
        cpu_us: CPU of the process, a unit.
        loop_us: of the event loop's thread.
        recorder_us: of the recorder's thread.
        p50_ms: of the latency.
        p99_ms: likewise.
        of_websockets: `cpu`, `p50` and `p99` in terms of the yardstick's, where it was measured.
    """

    pattern: str
    contender: Contender
    cpu_us: float
    loop_us: float
    recorder_us: float
    p50_ms: float
    p99_ms: float
    of_websockets: dict[str, float]


@attrs.frozen(kw_only=True)
class GatewayResult:
    """What a run of the bench found.

    Attributes:
        machine: what it ran on.
        rounds: of each pattern.
        unit_bytes: of the frame that brings a unit.
        rows: medians.
        recording_us: CPU a unit with recording without that of one without it, by pattern.
        recorded_of_antiphon: CPU a unit with recording in terms of without, by pattern.
        recorded_of_logged: CPU a unit in terms of the yardstick that records too, by pattern; 0
            where that does not speak the protocol.
        memory_bytes: a session's, by contender.
        busy_bytes: the same, at the most while units came.
        stages_us: CPU of our server's event loop a unit, by stage; with recording.
        capacity: many sessions on one core, recorded, and beside it the yardstick.
        load_was_bound: runs in which the load itself was late or busy.
        runs: all of them.
    """

    machine: dict[str, str | int | float]
    rounds: int
    unit_bytes: int
    rows: list[Row]
    recording_us: dict[str, float]
    recorded_of_antiphon: dict[str, float]
    recorded_of_logged: dict[str, float]
    memory_bytes: dict[Contender, int]
    busy_bytes: dict[Contender, int]
    stages_us: dict[str, float]
    capacity: list[Run]
    load_was_bound: int
    runs: list[Run]


# -- measuring ----------------------------------------------------------------------------------


def _split_cores() -> tuple[set[int], set[int]]:
    """Give the servers one core and the load the others; nothing where there is but one."""
    if not hasattr(os, "sched_getaffinity"):
        return set(), set()
    cores = sorted(os.sched_getaffinity(0))
    return ({cores[0]}, set(cores[1:])) if len(cores) > 1 else (set(), set())


class _Bench:
    """The processes of one run of the bench."""

    def __init__(self, folder: Path, load: Child, cores: set[int], settle_s: float) -> None:
        self._folder = folder
        self._load = load
        self._cores = cores
        self._settle_s = settle_s
        self.servers: dict[Contender, Child] = {}

    @asynccontextmanager
    async def server(self, contender: Contender, *words: str) -> AsyncIterator[Child]:
        """Run a contender."""
        logs = self._folder / "logs"
        module = f"{__package__}.servers"
        name = "-".join((contender, *words))
        async with child(
            name, self._folder, self._cores, module, contender, str(logs), *words
        ) as found:
            yield found

    async def measure(
        self, server: Child, pattern: Pattern
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Run a pattern; returns what the load found, and the server's figures before and after."""
        order = attrs.asdict(pattern)
        await self._load.ask({"port": server.hello["port"], **order})
        before = await server.ask("read")
        found = await self._load.ask("go")
        after = await server.ask("read")
        await self._load.ask("leave")
        await anyio.sleep(self._settle_s)
        for log in (self._folder / "logs").glob("*.zst"):
            log.unlink()
        return found, before, after

    async def run(self, number: int, contender: Contender, pattern: Pattern) -> Run:
        """Run a pattern against a contender."""
        found, before, after = await self.measure(self.servers[contender], pattern)
        units = found["units"]

        def spent_us(key: str) -> float:
            return _spent_us(key, before, after, units)

        return Run(
            round=number,
            contender=contender,
            pattern=pattern.name,
            units=units,
            missed=found["missed"],
            cpu_us=spent_us("cpu_ns"),
            loop_us=spent_us("loop_ns"),
            recorder_us=spent_us("recorder_ns"),
            latency=sum_up([ns / NS_PER_MS for ns in found["latency_ns"]]),
            load_busy=round(found["busy"], 3),
            load_lag_ms=round(found["lag_p99_ns"] / NS_PER_MS, 3),
        )

    async def memory(self, contender: Contender, plan: Plan) -> tuple[int, int]:
        """What a session takes in a fresh server: when its units are done, and at most."""
        server, pattern = self.servers[contender], plan.memory
        _, _, first = await self.measure(server, plan.first)
        if pattern is None:
            return 0, 0
        _, _, after = await self.measure(server, pattern)
        grown, most = (after[key] - first["memory_bytes"] for key in ("memory_bytes", "most_bytes"))
        return max(0, grown // pattern.sessions), max(0, most // pattern.sessions)

    async def stages(self, pattern: Pattern) -> dict[str, float]:
        """Split the CPU of a recorded unit, on a server that measures itself."""
        async with self.server("recorded", "stages") as server:
            await self.measure(server, pattern)  # what runs for the first time is dear
            found, before, after = await self.measure(server, pattern)

        def spent_us(key: str) -> float:
            return _spent_us(key, before, after, found["units"])

        spent = {
            stage: (ns - before["stages_ns"][stage]) / NS_PER_US / found["units"]
            for stage, ns in after["stages_ns"].items()
        }
        loop_us, recorder_us = spent_us("loop_ns"), spent_us("recorder_ns")
        spent["transport and event loop"] = loop_us - sum(spent.values())
        spent["recorder's thread"] = recorder_us
        spent["workers: the picture"] = spent_us("cpu_ns") - loop_us - recorder_us
        return {stage: round(float(us), 1) for stage, us in spent.items()}


async def measure_gateway(
    folder: Path,
    plan: Plan,
    *,
    rounds: int,
    machine: dict[str, str | int | float],
    tell: Callable[[str], None] = lambda _: None,
) -> GatewayResult:
    """Measure it all.

    Args:
        folder: takes logs and errors.
        plan: what is measured.
        rounds: of each pattern.
        machine: what it runs on.
        tell: told what is being done.

    Raises:
        GatewayBenchError: a server or the load failed.
    """
    cores, load_cores = _split_cores()
    module = f"{__package__}.load"
    async with AsyncExitStack() as stack:
        load = await stack.enter_async_context(child("load", folder, load_cores, module))
        bench = _Bench(folder, load, cores, plan.settle_s)
        for contender in CONTENDERS:
            server = await stack.enter_async_context(bench.server(contender))
            bench.servers[contender] = server
        tell("memory")
        memory = {contender: await bench.memory(contender, plan) for contender in CONTENDERS}
        runs: list[Run] = []
        for number in range(rounds):
            turn = number % len(CONTENDERS)
            for pattern in plan.patterns:
                tell(f"round {number + 1} of {rounds}: {pattern.name}")
                runs += [
                    await bench.run(number, contender, pattern)
                    for contender in (*CONTENDERS[turn:], *CONTENDERS[:turn])
                    if contender in pattern.contenders
                ]
        stages = {}
        if plan.memory is not None:
            tell("by stage")
            stages = await bench.stages(plan.patterns[0])
        many: list[Run] = []
        for pattern in plan.capacity:
            tell(f"on one core: {pattern.name}")
            many += [await bench.run(0, contender, pattern) for contender in CAPACITY_OF]
    return GatewayResult(
        machine=machine,
        rounds=rounds,
        unit_bytes=load.hello["frame_bytes"],
        rows=[
            _row(runs, pattern, each) for pattern in plan.patterns for each in pattern.contenders
        ],
        recording_us={
            pattern.name: round(
                statistics.median(
                    recorded.cpu_us - without.cpu_us
                    for recorded, without in zip(
                        _of(runs, pattern, "recorded"), _of(runs, pattern, "antiphon"), strict=True
                    )
                ),
                1,
            )
            for pattern in plan.patterns
        },
        recorded_of_antiphon={
            pattern.name: _ratio(runs, pattern, "recorded", "antiphon", _cpu)
            for pattern in plan.patterns
        },
        recorded_of_logged={
            pattern.name: _ratio(runs, pattern, "recorded", "logged", _cpu)
            for pattern in plan.patterns
        },
        memory_bytes={contender: after for contender, (after, _) in memory.items()},
        busy_bytes={contender: most for contender, (_, most) in memory.items()},
        stages_us=stages,
        capacity=many,
        load_was_bound=sum(map(_was_bound, (*runs, *many))),
        runs=runs,
    )


def _spent_us(key: str, before: dict[str, int], after: dict[str, int], units: int) -> float:
    return round((after[key] - before[key]) / NS_PER_US / units, 1)


def _cpu(run: Run) -> float:
    return run.cpu_us


def _was_bound(run: Run) -> bool:
    return run.load_lag_ms > LAG_MS_MAX or run.load_busy > BUSY_MAX


def _of(runs: list[Run], pattern: Pattern, contender: Contender) -> list[Run]:
    return [run for run in runs if run.pattern == pattern.name and run.contender == contender]


def _ratio(
    runs: list[Run],
    pattern: Pattern,
    contender: Contender,
    yardstick: Contender,
    figure: Callable[[Run], float],
) -> float:
    """The median of a figure's ratio within each round; 0 without the yardstick."""
    if yardstick not in pattern.contenders:
        return 0.0
    pairs = zip(_of(runs, pattern, contender), _of(runs, pattern, yardstick), strict=True)
    return round(statistics.median(figure(one) / figure(other) for one, other in pairs), 2)


def _row(runs: list[Run], pattern: Pattern, contender: Contender) -> Row:
    mine = _of(runs, pattern, contender)
    figures: dict[str, Callable[[Run], float]] = {
        "cpu": _cpu,
        "p50": lambda run: run.latency.p50_ms,
        "p99": lambda run: run.latency.p99_ms,
    }
    return Row(
        pattern=pattern.name,
        contender=contender,
        cpu_us=round(statistics.median(run.cpu_us for run in mine), 1),
        loop_us=round(statistics.median(run.loop_us for run in mine), 1),
        recorder_us=round(statistics.median(run.recorder_us for run in mine), 1),
        p50_ms=round(statistics.median(run.latency.p50_ms for run in mine), 2),
        p99_ms=round(statistics.median(run.latency.p99_ms for run in mine), 2),
        of_websockets={
            name: _ratio(runs, pattern, contender, "websockets", figure)
            for name, figure in figures.items()
        },
    )
