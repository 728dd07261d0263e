"""`antiphon demo`: everything at once, and what is left when a part of it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result

from runtime import RUN
from runtime.cli import main
from runtime.commands import demo
from runtime.commands.talk_session import Plan, Tally


def run_demo(*options: str | Path) -> Result:
    """Run the command."""
    return CliRunner().invoke(main, ["demo", *map(str, options)])


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """A second of a tone."""
    path = tmp_path / "ask.wav"
    soundfile.write(path, 0.2 * np.sin(np.arange(22_050) / 16), 22_050)
    return path


def test_a_session_is_served_recorded_and_replayed(speech: Path, tmp_path: Path) -> None:
    """The first thing that a newcomer runs would fail, or claim a replay that did not happen."""
    folder = tmp_path / "kept"
    options = ["--model", "scripted", "--fast", "--json", "--record", folder]
    result = run_demo("--speech", speech, *options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    checks = {line["command"]: line for line in lines if line["type"] == "check"}
    assert list(checks) == ["recordings verify", "replay", "replay --full"]
    assert all(check["exit_code"] == 0 for check in checks.values())
    assert "identical" in checks["replay"]["output"]
    assert "identical" in checks["replay --full"]["output"]
    summary = next(line for line in lines if line["type"] == "summary")
    assert summary["recording"] == "on"
    assert "this is second 3" in summary["text"]
    assert lines[-1]["ok"]
    assert Path(lines[-1]["log"]).parent == folder
    assert soundfile.info(folder / "reply.wav").frames == 42_000


def test_a_signal_leaves_no_server(speech: Path, tmp_path: Path) -> None:
    """A demo that is stopped would leave a server behind, that holds its port and a model."""
    command = [*RUN, "demo", "--model", "scripted", "--json", "--speech", str(speech)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        server = json.loads(process.stdout.readline())
        for line in process.stdout:
            if json.loads(line)["type"] == "listen":
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1
        assert process.stderr.read() == "Error: interrupted\n"

    async def connect() -> None:
        port = urlsplit(server["url"]).port
        assert port is not None
        await (await anyio.connect_tcp("127.0.0.1", port)).aclose()

    with pytest.raises(OSError, match="connect"):
        anyio.run(connect, backend="trio")


def test_a_server_that_does_not_start(
    speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lacks a model would wait for two minutes, and not be told what is missing."""
    code = "raise SystemExit('Error: there is no model')"
    monkeypatch.setattr(demo, "RUN", (sys.executable, "-c", code))
    result = run_demo("--speech", speech, "--record", tmp_path / "kept")
    assert result.exit_code == 1
    assert "Error: the server did not start: there is no model" in result.stderr


def test_a_log_that_does_not_replay_fails_the_demo(tmp_path: Path) -> None:
    """The demo would be green whatever the replay says: its proof would prove nothing."""
    shown = demo.Demo(
        model="scripted",
        folder=tmp_path,
        plan=Plan(units=(bytes(64_000),)),
        speech=tmp_path / "ask.wav",
        input_name="",
        as_json=True,
    )
    log = tmp_path / "missing.session.zst"
    checks = anyio.run(demo._check, shown, log, backend="trio")
    assert [check.exit_code for check in checks] == [2, 2, 2]
    with pytest.raises(demo.DemoError, match=r"antiphon recordings verify, .* replay --full"):
        demo._conclude(shown, Tally(last_speech=0), log, checks)
    with pytest.raises(demo.DemoError, match="failed: the model did not answer"):
        demo._conclude(shown, Tally(), log, [])


def test_its_files_are_written_for_the_guides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a wheel, without the sources, no guide could be followed."""
    names = {*demo.SAMPLES}
    assert run_demo("--samples", tmp_path / "samples").exit_code == 0
    assert {path.name for path in (tmp_path / "samples").iterdir()} == names
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "demo.py"))  # as an installed package
    monkeypatch.setattr(demo, "SOURCE_TREE", tmp_path / "nowhere")
    assert run_demo("--samples", tmp_path / "again").exit_code == 0
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    (tmp_path / "file").touch()
    refused = run_demo("--samples", tmp_path / "file" / "below")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_server_is_ready_whatever_the_format_of_its_log(form: str, tmp_path: Path) -> None:
    """A bench of a server as it is run in production would wait for ever."""

    async def serve() -> str:
        async with demo.served("scripted", tmp_path, "--log-format", form) as url:
            return url

    assert anyio.run(serve).startswith("ws://127.0.0.1:")


@pytest.mark.parametrize("is_on_path", [False, True])
def test_what_to_type_next_can_be_typed(
    is_on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `make demo` the shell would find no `antiphon`, or that of another folder."""
    own = tmp_path / ".venv" / "bin" / "antiphon"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", str(own.parent) if is_on_path else "/nowhere")
    assert demo._typed() == ("antiphon" if is_on_path else ".venv/bin/antiphon")
