"""A model judged on many recordings, in batches, killed and taken up again: `make soak`.

    python -m tests.soak.assessed [--sessions N] [--out docs/evidence]

Records N sessions of `tiny` (`tests.replay.assessed`), then runs `tiny` over them, in both modes
and with 1, 4, 16 and 32 jobs, each in a process of its own: CPU time from the loaded model on,
memory, and that all give the same result. They run in turns, several rounds; of each the round of
median CPU time is kept, and `times_one_after_the_other` is the median of each round's ratio to one
job. In `cpu_s_by_part` is where the time goes: the steps of the model, the rules of units between
them, and the event loop's thread, which reads, steps, writes and measures sessions.

Then each planted change is compared with `tiny`, and a run is killed with SIGKILL, again and again,
until it is done: it must give what the whole run gave. What was found goes to `assessed.json`,
without a date; it exits with 1 if anything differs that must not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import anyio
import torch

from protocol.values.limits import NS_PER_S
from protocol.values.records import digest
from replay.assess.command import MODES, Mode, of_measured
from replay.assess.run import run_model
from replay.eval.evaluate import MEASURES, sum_up, verdict_of
from replay.rerun.full import Loading
from replay.shared.commands import unwatched
from runtime import RUN
from runtime.model.backends.base import Backend
from runtime.model.engine.backend import EngineBackend
from runtime.model.engine.engine import Engine
from tests.project.evidence import add_out
from tests.replay.assessed import PLANTED, SECONDS, record_talks, run_on, tiny

JOBS: Final = (1, 4, 16, 32)
ROUNDS: Final = 3
ROWS_FEW: Final = 2
RUNS: Final = ("open", "forced")
KILLS_MAX: Final = 50


def cost_of(mode: Mode, logs: list[Path], jobs: int) -> dict[str, Any]:
    """Run `tiny` over logs in this process, and say what it cost after it was loaded."""
    torch.set_num_threads(1)
    began: list[float] = []
    parts: dict[str, float] = {}

    def load(loading: Loading) -> Backend:
        backend = loading.load()
        assert isinstance(backend, EngineBackend)
        told_apart(backend.engine, parts)
        began.extend((time.perf_counter(), time.process_time(), time.thread_time()))
        return backend

    running = partial(run_model, mode, Loading("tiny", slots=jobs), logs, load)
    done = anyio.run(partial(running, out=None, watch=unwatched))
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    parts["event loop"] = time.thread_time() - began[2]
    parts["rules of units, and threads"] = cpu_s - sum(parts.values())
    rows = json.dumps([row.body for row in done.measured])
    return {
        "jobs": jobs,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "sessions_per_cpu_minute": round(60 * len(logs) / cpu_s),
        "session_seconds_per_cpu_second": round(
            sum(row.duration_ns for row in done.measured) / NS_PER_S / cpu_s
        ),
        "cpu_s_by_part": {name: round(spent_s, 2) for name, spent_s in sorted(parts.items())},
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "result": digest(rows),
    }


def told_apart(engine: Engine, parts: dict[str, float]) -> None:
    """Add up the CPU time of an engine's steps by their kind."""
    scheduler = engine._scheduler
    compute = scheduler._compute

    def measured(works: Sequence[Any]) -> list[Any]:
        began = time.thread_time()
        answers = compute(works)
        rows = getattr(works[0], "rows", ())
        name = type(works[0]).__name__ + (" of many rows" if len(rows) > ROWS_FEW else "")
        parts[name] = parts.get(name, 0) + time.thread_time() - began
        return answers

    scheduler._compute = measured


def own_process(*arguments: object) -> dict[str, Any]:
    """Run `cost_of` in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, *map(str, arguments)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def in_turns(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], bool]:
    """Run each number of jobs in each mode, in turns; say whether all results were the same."""
    rounds = [
        {(mode, jobs): own_process("--one", mode, folder, jobs) for mode in RUNS for jobs in JOBS}
        for _ in range(ROUNDS)
    ]
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in RUNS}
    for mode, jobs in rounds[0]:
        took = sorted((it[mode, jobs] for it in rounds), key=lambda run: float(run["cpu_s"]))
        ratios = [it[mode, 1]["cpu_s"] / it[mode, jobs]["cpu_s"] for it in rounds]
        middle = {"times_one_after_the_other": round(median(ratios), 2), **took[ROUNDS // 2]}
        del middle["result"]
        found[mode].append(middle)
    results = {mode: {it[mode, jobs]["result"] for it in rounds for jobs in JOBS} for mode in RUNS}
    return found, all(len(it) == 1 for it in results.values())


def compared(logs: list[Path]) -> dict[str, Any]:
    """Compare each planted change with `tiny`: what is called worse, better or other."""
    found: dict[str, Any] = {}
    for mode in MODES[1:]:
        baseline = of_measured("tiny", run_on(logs, mode, PLANTED["none"]()).measured)
        for name, make in PLANTED.items():
            done = sum_up(run_on(logs, mode, make()).measured, None, baseline)
            assert done.comparison is not None
            found[f"{mode}: {name}"] = {
                measure: [it.difference, it.low, it.high, it.p, it.recordings]
                for measure, it in done.comparison.paired.items()
                if verdict_of(MEASURES[measure], it) or (name == "none" and it.difference)
            }
    return found


def killed(folder: Path, mode: Mode, out: Path) -> dict[str, Any]:
    """Kill a run until it is done; give the number of kills, and whether all is as if unkilled."""
    command = [*RUN, "eval", str(folder), "--mode", mode, "--model", "tiny", "--json", "--out"]
    whole = subprocess.run([*command, str(out / "whole")], capture_output=True, check=False)
    began = time.monotonic()
    kills, wait_s = 0, 4.0
    while True:
        again = subprocess.Popen([*command, str(out / "again")], stdout=subprocess.PIPE)
        try:
            said, _ = again.communicate(timeout=wait_s if kills < KILLS_MAX else None)
            break
        except subprocess.TimeoutExpired:
            os.kill(again.pid, signal.SIGKILL)
            again.communicate()
            kills, wait_s = kills + 1, wait_s + 0.5
    is_same = said.replace(b"/again/", b"/whole/") == whole.stdout
    spent_s = round(time.monotonic() - began, 1)
    return {"kills": kills, "same": is_same, "exit_code": again.returncode, "wall_s": spent_s}


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=60)
    add_out(parser)
    parser.add_argument("--one", nargs=3, metavar=("MODE", "FOLDER", "JOBS"))
    asked = parser.parse_args()
    if asked.one:
        mode, folder, jobs = asked.one
        print(json.dumps(cost_of(mode, sorted(Path(folder).glob("*.zst")), int(jobs))))
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "talks")
        logs = record_talks(folder, asked.sessions, tiny(1))
        few = Path(place, "few")
        few.mkdir()
        for log in logs[: len(logs) // 4]:
            (few / log.name).hardlink_to(log)
        costs, same = in_turns(folder)
        quarter = {mode: own_process("--one", mode, few, JOBS[1]) for mode in RUNS}
        planted = compared(logs)
        kills = {mode: killed(few, mode, Path(place, mode)) for mode in RUNS}
    for it in quarter.values():
        del it["result"]
    good = same and all(it["same"] and not it["exit_code"] for it in kills.values())
    good = good and not any(found for name, found in planted.items() if name.endswith(": none"))
    found = {
        "what": "tiny, and tiny with planted changes, judged on recordings of tiny",
        "good": good,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "sessions": asked.sessions,
        "seconds_each": SECONDS,
        "same_result_with_any_jobs": same,
        "costs": costs,
        "a_quarter_of_the_sessions": quarter,
        "killed": kills,
        "planted: difference, low, high, p, pairs": planted,
    }
    text = json.dumps(found, indent=1) + "\n"
    (asked.out / "assessed.json").write_text(text, "utf-8")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
