"""`python -m tests.bench.units`: it runs, and says what it promises. No time is judged here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sessions.in_memory import numbers

ROOT: Final = Path(__file__).parents[2]
COMMAND: Final = (sys.executable, "-m", "tests.bench.units")
SECONDS: Final = 2
TIMES: Final = {"count", "p50_ms", "p99_ms", "max_ms"}
UNITS: Final = {
    *("sessions", "arrival", "units", "answered", "speaking_share", "dropped", "latency"),
    *("latency_listening", "latency_speaking", "server", "p50_of_second", "p99_of_second"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """A short run's JSON."""
    done = subprocess.run(
        [*COMMAND, "--json", "--model", "scripted", "--seconds", str(SECONDS)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def test_it_says_what_it_ran_on(found: dict[str, Any]) -> None:
    """A figure cannot be compared with another machine's, or the next version's."""
    assert set(found) == {"machine", "model", "speech", "seconds", "units", "latency_ratio"}
    machine = {"cores", "machine", "system", "python", "torch", "antiphon", "load"}
    assert set(found["machine"]) == machine
    assert (found["model"], found["seconds"]) == ("scripted", SECONDS)


def test_every_number_is_one(found: dict[str, Any]) -> None:
    """A chart of the figures over time breaks."""
    assert all(math.isfinite(number) and number >= 0 for number in numbers(found))


def test_units_of_one_and_of_many(found: dict[str, Any]) -> None:
    """Machines are planned by what one session costs."""
    runs = found["units"]
    assert [(run["sessions"], run["arrival"]) for run in runs] == [
        (1, "spread"),
        (8, "spread"),
        (8, "together"),
    ]
    for run in runs:
        assert set(run) == UNITS
        assert run["units"] == run["answered"] == run["sessions"] * SECONDS
        for times in (run["latency"], run["server"]):
            assert set(times) == TIMES
            assert 0 < times["p50_ms"] <= times["p99_ms"] <= times["max_ms"]
        assert run["server"]["p50_ms"] <= run["latency"]["p50_ms"]
    assert set(found["latency_ratio"]) == {"spread", "together"}
    for ratio in found["latency_ratio"].values():
        assert set(ratio) == {"p50", "p99", "server_p50", "server_p99"}
        assert all(number > 0 for number in ratio.values())


def test_the_keys_are_documented(found: dict[str, Any]) -> None:
    """A reader of the JSON has to guess what a figure is."""
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    names = {*found, *UNITS, *TIMES}
    assert sorted(name for name in names if f"`{name}`" not in text) == []
