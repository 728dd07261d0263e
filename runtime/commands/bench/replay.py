"""The speed of replaying a log, by the user's command in its own process.

The replay's own measure counts from opening the log; the process's includes Python's start.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from pathlib import Path
from typing import Final

import anyio
import attrs
import orjson

from ..server_process import RUN
from .output import BenchError

RUNS: Final = 3
"""The median counts."""


@attrs.frozen(kw_only=True)
class ReplayResult:
    """The duration of logic replay of a log.

    Attributes:
        result: `identical`, or the replay's other verdict.
        elapsed_ms: median, opening the log included.
        times_real_time: `session_s` divided by it.
        process_ms: median with the start of a process.
        times_real_time_process: `session_s` divided by it.
    """

    session_s: float
    units: int
    events: int
    result: str
    elapsed_ms: float
    times_real_time: float
    process_ms: float
    times_real_time_process: float


async def measure_replay(log: Path) -> ReplayResult:
    """Replay a log several times; `BenchError` if it cannot be replayed."""
    reports = []
    processes_ms = []
    for _ in range(RUNS):
        began_ns = time.perf_counter_ns()
        done = await anyio.run_process(
            [*RUN, "replay", str(log), "--json"], check=False, stderr=subprocess.STDOUT
        )
        processes_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
        try:
            reports.append(orjson.loads(done.stdout))
        except orjson.JSONDecodeError:
            said = done.stdout.decode(errors="replace").strip()
            raise BenchError(f"a log of this run cannot be replayed: {said}") from None
    report = reports[0]
    session_s = report["span_ns"] / 1e9
    elapsed_ms = statistics.median(each["elapsed_ms"] for each in reports)
    process_ms = statistics.median(processes_ms)
    return ReplayResult(
        session_s=round(session_s, 3),
        units=report["units"],
        events=report["events"],
        result=report["result"],
        elapsed_ms=round(elapsed_ms, 3),
        times_real_time=round(1000 * session_s / elapsed_ms, 1),
        process_ms=round(process_ms, 3),
        times_real_time_process=round(1000 * session_s / process_ms, 1),
    )
