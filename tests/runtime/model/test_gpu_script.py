"""What is to be run on a GPU runs: its time is short."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as script
from tests.gpu import engine, served


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """Run the script on `tiny`'s shape with one slot; what it found."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # Threads that wait for each other cost most.
    monkeypatch.setattr(engine, "GROWN_S", (1, 2))
    monkeypatch.setattr(engine, "REBUILT", (("speaking omni", 1),))
    monkeypatch.setattr("tests.gpu.agreement.UNITS", 3)
    monkeypatch.setattr("tests.gpu.voice.PROMPT", 10)
    small = ["--device", "cpu", "--slots", "1", "--sessions", "1", "--seconds", "1"]
    monkeypatch.setattr(sys, "argv", ["gpu", *small, *words, "--out", str(tmp_path)])
    script.main()
    found: dict[str, Any] = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    return found


def test_an_ordinary_run_finds_all_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first minutes with a GPU would go into mending the script that is to use them."""
    monkeypatch.setattr(script, "replayed", lambda *_: {"result": "identical"})
    found = run(tmp_path, monkeypatch, "--due", "together")
    assert sum(script.STAGES.values()) == 8 * 60
    for stage in ("served", "served int4"):
        (each,) = found[stage]
        assert (each["run"]["sessions"], each["run"]["units"]) == (1, 1)
        assert each["run"]["spoken"] == 1
    assert set(found["grown"]) == {"1", "2"}
    assert found["grown"]["2"]["llm"] > 0
    assert found["rebuilt"][0]["rebuilt"]["exact"] > 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 5
    assert not any("| - |" in row for row in rows), rows


def test_a_stage_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that takes longer than planned would leave no time for the others."""
    monkeypatch.setattr(script, "STAGES", {"rebuilt": 600.0, "grown": 0.0})
    found = run(tmp_path, monkeypatch, "--mute")
    assert found["grown: stopped"]
    assert "grown" not in found
    assert found["rebuilt"]
    assert " MB at 1 s |" in capsys.readouterr().out  # What it had found.


def test_parts_are_held_to_a_cpu_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that computes something else would serve."""
    found = run(tmp_path, monkeypatch, "--only", "agreement,voice")
    assert set(found["agreement: off the CPU in float32, own"]) >= {"Feed", "Speak", "EncodeImage"}
    assert found["voice: chunks have the same bits again"] is True
    assert found["voice"]["launched"]["1"]["ms"] > 0


@pytest.mark.soak  # `test_all_stages_but_the_longest_run` runs the script; this its slowest stage.
def test_a_server_is_measured_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a server would be those of one that answered nothing."""
    words = ["--model", "backend:full:tiny", "--sessions", "1", "--seconds", "2", "--replay"]
    monkeypatch.setattr(sys, "argv", ["served", *words, "--out", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(served, "WAIT_S", 60.0)
    served.main()
    found: dict[str, Any] = json.loads((tmp_path / "served.json").read_text("utf-8"))
    assert [run["load"]["is_spread"] for run in found["runs"]] == [True, False]
    for run in found["runs"]:
        assert (run["units"], run["latency"]["count"], run["spoken"]) == (2, 2, 1.0)
    assert (found["replay"]["result"], found["replay"]["exit_code"]) == ("identical", 0)
