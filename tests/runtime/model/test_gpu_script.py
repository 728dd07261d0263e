"""What is to be run on a GPU runs: its time is short."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as script
from tests.gpu import served


def test_all_stages_but_the_longest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first minutes with a GPU would go into mending the script that is to use them."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # Threads that wait for each other cost most.
    monkeypatch.setattr("tests.gpu.agreement.UNITS", 3)
    monkeypatch.setattr("tests.gpu.voice.PROMPT", 10)
    words = ["--device", "cpu", "--slots", "2", "--sessions", "1", "--seconds", "1"]
    words += ["--only", "agreement,voice,served", "--load", "listening omni", "--due", "together"]
    monkeypatch.setattr(sys, "argv", ["gpu", *words, "--out", str(tmp_path)])
    script.main()
    found: dict[str, Any] = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert set(found["off the CPU in float32, own"]) >= {"Feed", "Speak", "See", "Hearing"}
    assert found["chunks have the same bits again"] is True
    assert found["voice"]["launched"]["1"]["ms"] > 0
    (load,) = found["served"]
    assert load["load"] == "listening omni"
    assert load["runs"][0]["sessions"] == 1
    assert "attention: sdpa, row by row" in capsys.readouterr().out


def test_a_server_is_measured_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a server would be those of one that answered nothing."""
    words = ["--model", "backend:full:tiny", "--sessions", "1", "--seconds", "2", "--replay"]
    monkeypatch.setattr(sys, "argv", ["served", *words, "--out", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(served, "WAIT_S", 1.0)
    served.main()
    found: dict[str, Any] = json.loads((tmp_path / "served.json").read_text("utf-8"))
    assert [run["load"]["is_spread"] for run in found["runs"]] == [True, False]
    for run in found["runs"]:
        assert (run["units"], run["latency"]["count"], run["spoken"]) == (2, 2, 1.0)
    assert (found["replay"]["result"], found["replay"]["exit_code"]) == ("identical", 0)
