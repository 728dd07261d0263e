"""`antiphon dev bench`: it runs, and says what it promises to say. No time is judged here."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from protocol.values.model import UNIT_BYTES, UNIT_SAMPLES
from protocol.wire.media import check_frame
from runtime.commands.bench_engine import (
    Speech,
    Times,
    camera_frame,
    load_speech,
    sum_up,
    synthetic_voice,
)
from runtime.commands.server_process import RUN
from tests.sessions.in_memory import numbers

ROOT: Final = Path(__file__).parents[3]
COMMAND: Final = [*RUN, "dev", "bench"]
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
    """Somebody plans machines by what one session costs."""
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


def test_times_are_summed_up_by_rank() -> None:
    """A percentile is a time that no unit took."""
    assert sum_up([3.0, 1.0, 2.0]) == Times(count=3, p50_ms=2.0, p99_ms=3.0, max_ms=3.0)
    assert sum_up([float(number) for number in range(1, 201)]).p99_ms == 198.0


def test_seconds_follow_each_other() -> None:
    """Clients say the same second over and over, and the log stores it once."""
    speech = load_speech()
    seconds = [speech.second(number) for number in range(30)]
    assert {len(second) for second in seconds} == {UNIT_BYTES}
    joined = np.frombuffer(b"".join(seconds), "<f4")
    assert (joined[: len(speech.samples)] == speech.samples).all()


def test_without_fixtures_something_like_a_voice_is_said() -> None:
    """Whoever installed it cannot measure."""
    samples = synthetic_voice()
    assert np.isfinite(samples).all()
    assert 0.01 < samples.std() < np.abs(samples).max() <= 1
    assert len(Speech(name="synthetic", samples=samples).second(3)) == 4 * UNIT_SAMPLES


def test_a_camera_s_frames_differ_and_are_whole() -> None:
    """The server refuses them, or the log stores one."""
    frames = [camera_frame(number) for number in range(3)]
    assert len(set(frames)) == 3
    for frame in frames:
        check_frame("$", frame)
