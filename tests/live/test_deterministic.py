"""`--deterministic`: servers that are held to it, and one that cannot be, as operators start it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runtime import RUN
from runtime.cli import main
from runtime.model.models import load_backend
from tests.live.servers import live_server
from tests.project.example_packages import EXAMPLES, install, run_with

DEMO = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
WAIT_S = 120


def antiphon(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *map(str, arguments)], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.fixture(scope="module")
def dtype() -> str:
    """Half precision, but on a CPU whose matrix units (AMX) mix the rows of sessions in it."""
    return "bf16" if load_backend("tiny", 1, dtype="bf16").info.deterministic else "fp32"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, dtype: str) -> Path:
    """A session that is held to it."""
    folder = tmp_path_factory.mktemp("recordings")
    options = ("--record", str(folder), "--dtype", dtype, "--deterministic")
    with live_server(*options, model="tiny") as server:
        reply = folder / "reply.wav"
        talked = antiphon("talk", DEMO, "--url", server.url, "--fast", "--reply", reply)
        assert talked.returncode == 0, talked.stderr
        assert server.stop() == 0
    (path,) = folder.glob("*.session.zst")
    return path


def test_a_replay_computes_as_the_server_did(log: Path, dtype: str) -> None:
    """It would load the model in its own format, and compare nothing."""
    replayed = antiphon("replay", "--full", log, "--json")
    body: dict[str, Any] = json.loads(replayed.stdout)
    assert (body["result"], replayed.returncode) == ("identical", 0)
    assert body["fingerprint"]["dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    assert body["units"] > 5


def test_a_fork_computes_as_the_server_did(log: Path, tmp_path: Path) -> None:
    """What it has in common with its parent would be another's."""
    words = ("fork", log, "--at", 5, "--seed", 7, "--out", tmp_path, "--json")
    forked = CliRunner().invoke(main, [*map(str, words)])  # The model's libraries are here already.
    assert forked.exit_code == 0, forked.stderr
    assert json.loads(forked.stdout)["unit"] == 5


def test_what_cannot_be_held_to_it_is_not_served(tmp_path: Path) -> None:
    """An operator would learn of it from the first replay that is not compared."""
    install(tmp_path, "llama_omni:load", EXAMPLES / "llama_omni")
    remote = ("--model", "llama_omni:ws://127.0.0.1:9", "--no-record", "--deterministic")
    refused = subprocess.run(
        (*run_with(tmp_path), "serve", "--port", "0", *remote),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert refused.returncode == 1
    (line,) = refused.stderr.strip().splitlines()
    assert "as --deterministic requires: what is computed elsewhere varies" in line


def test_what_this_machine_mixes_is_not_served(dtype: str) -> None:
    """A CPU that cannot promise it would be believed."""
    if dtype == "bf16":
        pytest.skip("this CPU keeps rows apart in half precision")
    refused = antiphon(
        "serve", "--port", 0, "--no-record", "--model", "tiny", "--dtype", "bf16", "--deterministic"
    )
    assert refused.returncode == 1
    assert "what this device computes for several sessions varies" in refused.stderr


def test_a_script_is_held_to_it() -> None:
    """It is as repeatable as a model can be."""
    with live_server("--no-record", "--deterministic") as server:
        assert server.stop() == 0
