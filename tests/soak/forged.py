"""Forged logs, read in every way for ten minutes: `make soak`.

    python -m tests.soak.forged [--minutes M] [--from N] [--out docs/evidence]

Every bomb first (`tests.forged.bombs`), then logs drawn at random
(`tests.forged.drawn`), by numbers from N on. Each way of reading one is measured in a process of
its own, and held to a CPU time and a memory in proportion to the file (`tests.forged.meter`); the
list of a server's folder to a constant. What was found goes to `forged.json`, without a date; it
exits with 1 where anything cost more, or raised what it should not. What failed is kept beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

import attrs

from recorder.storage.store import INDEX_NAME
from tests.forged.bombs import BOMBS, bomb
from tests.forged.drawn import draw
from tests.forged.meter import BUDGETS, Cost, Meter, metering
from tests.project.evidence import add_out

MINUTES: Final = 10.0
SCALES: Final = (8,)
"""Those that are drawn have any from 1 to 64."""
FAILURES_KEPT: Final = 20
"""Logs that failed, of a run that finds many."""


@attrs.define
class Worst:
    """The worst of one way of reading.

    Attributes:
        cpu: what cost the largest part of its CPU budget, and the name of the log.
        memory: the same of memory.
        cpu_us_per_byte: the most microseconds for each byte of a file.
        memory_per_byte: the same of bytes of memory.
    """

    cpu: tuple[float, str, Cost] | None = None
    memory: tuple[float, str, Cost] | None = None
    cpu_us_per_byte: float = 0.0
    memory_per_byte: float = 0.0

    def note(self, name: str, cost: Cost) -> None:
        """Compare a cost with the worst so far."""
        budget = BUDGETS[cost.way]
        cpu, memory = budget.cpu_share(cost), budget.memory_share(cost)
        self.cpu_us_per_byte = max(self.cpu_us_per_byte, 1e6 * cost.cpu_s / cost.file_bytes)
        self.memory_per_byte = max(self.memory_per_byte, 1e6 * cost.mb / cost.file_bytes)
        if self.cpu is None or cpu > self.cpu[0]:
            self.cpu = (cpu, name, cost)
        if self.memory is None or memory > self.memory[0]:
            self.memory = (memory, name, cost)

    def to_json(self) -> dict[str, object]:
        """Say it."""
        ratios = {
            "cpu_us_per_byte": round(self.cpu_us_per_byte, 1),
            "memory_per_byte": round(self.memory_per_byte),
        }
        return ratios | {
            what: {
                "log": found[1],
                "file_bytes": found[2].file_bytes,
                "cpu_s": found[2].cpu_s,
                "memory_mb": found[2].mb,
                "share_of_budget": round(found[0], 3),
            }
            for what, found in (("cpu", self.cpu), ("memory", self.memory))
            if found is not None
        }


@attrs.define
class Found:
    """What was found so far."""

    logs: int = 0
    file_bytes: int = 0
    worst: dict[str, Worst] = attrs.Factory(lambda: {way: Worst() for way in BUDGETS})
    failures: list[str] = attrs.Factory(list)
    kept: list[tuple[str, bytes]] = attrs.Factory(list)

    def judge(self, name: str, log: bytes, costs: list[Cost]) -> None:
        """Hold what reading one log cost to its budget."""
        self.logs += 1
        self.file_bytes += len(log)
        is_bad = False
        for cost in costs:
            self.worst[cost.way].note(name, cost)
            problem = problem_of(cost)
            if problem is not None:
                self.failures.append(f"{name}: {problem}")
                is_bad = True
        if is_bad and len(self.kept) < FAILURES_KEPT:
            self.kept.append((name, log))


def problem_of(cost: Cost) -> str | None:
    """Say what is wrong with what something cost; None where nothing is."""
    budget = BUDGETS[cost.way]
    told = f"{cost.way} of {cost.file_bytes} bytes: {cost.cpu_s} CPU s, {cost.mb} MB"
    if cost.fault is not None:
        return f"{told}: {cost.fault}"
    if budget.cpu_share(cost) > 1 or budget.memory_share(cost) > 1:
        return f"{told}: more than its budget"
    return None


def read_all(meter: Meter, logs: Iterator[tuple[str, bytes]], folder: Path) -> Iterator[Found]:
    """Read logs one after another; gives what was found so far after each."""
    found, path = Found(), folder / "forged.session.zst"
    for name, log in logs:
        path.write_bytes(log)
        found.judge(name, log, meter.read(path))
        (folder / INDEX_NAME).unlink(missing_ok=True)
        yield found


def logs_from(number: int) -> Iterator[tuple[str, bytes]]:
    """Give all bombs, and then logs drawn from a number on, without an end."""
    for scale in SCALES:
        for name in BOMBS:
            yield f"{name} {scale}", bomb(name, scale)
    for drawn in count(number):
        yield f"drawn {drawn}", draw(Random(drawn))


def soak(minutes: float, number: int) -> Found:
    """Read logs until the time is over, but all bombs at least."""
    end_s = time.monotonic() + 60 * minutes
    bombs = len(SCALES) * len(BOMBS)
    with metering() as meter, tempfile.TemporaryDirectory() as folder:
        for found in read_all(meter, logs_from(number), Path(folder)):
            if found.logs % 20 == 0:
                told = f"{found.logs} logs, {len(found.failures)} failures"
                print(told, file=sys.stderr, flush=True)
            if found.logs >= bombs and time.monotonic() >= end_s:
                break
    return found


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--from", dest="number", type=int, default=0)
    add_out(parser)
    given = parser.parse_args()
    found = soak(given.minutes, given.number)
    result = {
        "what": "forged logs with sound checksums, read in every way: CPU seconds and memory of "
        "each way, held to a budget in proportion to the file, and of the list to a constant",
        "good": not found.failures,
        "minutes": given.minutes,
        "logs": found.logs,
        "bombs": len(SCALES) * len(BOMBS),
        "drawn_from": given.number,
        "file_bytes": found.file_bytes,
        "budgets": {way: attrs.asdict(budget) for way, budget in BUDGETS.items()},
        "worst": {way: worst.to_json() for way, worst in found.worst.items()},
        "failures": found.failures,
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    for name, log in found.kept:
        (given.out / f"forged-{name.replace(' ', '-')}.session.zst").write_bytes(log)
    text = json.dumps(result, indent=2) + "\n"
    (given.out / "forged.json").write_text(text, "utf-8")
    print(text)
    if found.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
