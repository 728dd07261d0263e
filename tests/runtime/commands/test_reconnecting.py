"""`antiphon talk`, `chat` and `transcribe` through connections that are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result

from runtime.cli import main
from tests.live.servers import LiveServer, live_server
from tests.network.cutting import cutting

RESUME_S = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("recordings")
    with live_server("--record", str(folder), "--resume-s", str(RESUME_S)) as made:
        yield made


@pytest.fixture
def speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three seconds of a tone."""
    monkeypatch.chdir(tmp_path)
    tone = 0.2 * np.sin(2 * np.pi * 220 * np.arange(48_000) / 16_000)
    soundfile.write(tmp_path / "ask.wav", tone, 16_000)
    return tmp_path / "ask.wav"


@contextmanager
def cut(server: LiveServer, *after_bytes: int) -> Iterator[str]:
    """The address of a server whose connections are cut after so many bytes each."""
    with cutting(server.address, cuts=list(after_bytes)) as cutter:
        yield f"ws://127.0.0.1:{cutter.port}"
        assert cutter.connections > 1


def run(*arguments: object) -> Result:
    """Run a command as if it were typed."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def objects(result: Result) -> list[dict[str, Any]]:
    """What a command wrote with --json."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_talk_goes_on(server: LiveServer, speech: Path) -> None:
    """A lost connection ended the conversation."""
    with cut(server, 200_000, 200_000) as url:
        result = run("talk", speech, "--url", url, "--fast", "--json")
    assert result.exit_code == 0, result.output
    said = objects(result)
    lost = [line for line in said if line["type"] == "reconnecting"]
    back = [line for line in said if line["type"] == "reconnected"]
    assert [line["attempt"] for line in lost] == [1, 1]
    assert [line["skipped"] for line in back] == [0, 0]
    summary = said[-1]
    assert summary["text"] == "this is second 3, that was second 4."
    assert summary["reconnects"] == 2
    assert summary["away_s"] == pytest.approx(sum(line["away_s"] for line in back), abs=0.01)
    assert summary["away_s"] < RESUME_S


def test_chat_goes_on(server: LiveServer) -> None:
    """A person saw nothing while the answer did not come."""
    arguments = ("chat", "one two three four " * 40, "--url")
    whole = run(*arguments, server.url)
    with cut(server, 5_000) as url:
        result = run(*arguments, url)
    assert result.exit_code == 0, result.output
    assert "connection lost, reconnecting in 0." in result.stderr
    assert "reconnected after " in result.stderr
    assert result.stdout == whole.stdout


def test_transcribe_goes_on(server: LiveServer, speech: Path) -> None:
    """A person saw nothing while the words did not come."""
    arguments = ("transcribe", speech, "--model", "scripted", "--url")
    whole = run(*arguments, server.url)
    with cut(server, 100_000) as url:
        result = run(*arguments, url)
    assert result.exit_code == 0, result.output
    assert "connection lost, reconnecting in 0." in result.stderr
    assert "reconnected after " in result.stderr
    assert result.stdout == whole.stdout


def test_giving_up_is_an_error(server: LiveServer, speech: Path) -> None:
    """A conversation that cannot go on ended without a reason."""
    with cut(server, 200_000, *[0] * 20) as url:
        result = run("talk", speech, "--url", url, "--fast")
    assert result.exit_code == 1
    assert result.stderr == f"Error: connection lost, not back within {RESUME_S} s\n"
    assert "session: connection lost, reconnecting in " in result.stdout
