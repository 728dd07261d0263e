"""A recording by each of its names: commands find the same log, or say what to type."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from protocol.values.records import session_id_of
from recorder.format.format import SUFFIX
from replay.shared.recordings import FOLDER_VARIABLE
from runtime.cli import main
from tests.golden.logs import FOLDER

LOG: Final = FOLDER / "v1-realtime-video.session.zst"
OLDER: Final = FOLDER / "v1-realtime-flood.session.zst"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two recordings in its folder, and one in another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    for name, source in (("recordings/a", OLDER), ("recordings/b", LOG), ("one/c", LOG)):
        path = tmp_path / (name + SUFFIX)
        path.parent.mkdir(exist_ok=True)
        shutil.copy(source, path)
        os.utime(path, times=(0, 1 if source == OLDER else 2))
    return tmp_path


def antiphon(line: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(main, line.split())


@pytest.mark.parametrize(
    "name",
    [
        f"recordings/b{SUFFIX}",
        "b",
        "recordings/b",
        session_id_of("b"),
        f"recordings/{session_id_of('b')}",
        "last",
        "recordings/last",
        "one",
        "one/last",
        "URL/b",
        f"URL/b{SUFFIX}",
        "URL/last",
        f"URL/{session_id_of('b')}",
    ],
)
@pytest.mark.parametrize("command", ["recordings inspect", "recordings verify", "replay"])
def test_a_recording_has_many_names(command: str, name: str, here: Path) -> None:
    """What one command or page shows could not be typed into the next."""
    log = LOG.name
    shutil.copy(LOG, here / log)
    expected = json.loads(antiphon(f"{command} {log} --json").stdout)
    name = name.replace("URL", (here / "recordings").as_uri())
    result = antiphon(f"{command} {name} --json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    if isinstance(found, list):  # of a folder
        (found,) = found
    own = ("log", "elapsed_ms", "times_real_time")
    assert {k: v for k, v in found.items() if k not in own} == {
        k: v for k, v in expected.items() if k not in own
    }


def test_the_folder_is_that_of_the_server(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids would be looked for where the server does not record."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(here / "one"))
    assert antiphon("recordings verify c").exit_code == 0
    assert f"no recording b in {here / 'one'}" in antiphon("recordings verify b").stderr
    assert "1 session," in antiphon("recordings list").stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("d", "d: there is no recording d in recordings: `antiphon recordings list recordings`"),
        (
            "none/d",
            "none/d: there is no such file, and no folder none with a recording d: name its file, "
            f"or set {FOLDER_VARIABLE}",
        ),
        (
            "recordings",
            "recordings: it has 2 recordings, and one is needed: recordings/last, or as "
            "`antiphon recordings list recordings` names them",
        ),
        ("file:///", "file:///: not the URL of a recording"),
        ("s3://bucket", "s3://bucket: not the URL of a recording, such as s3://bucket/prefix/NAME"),
    ],
)
def test_what_is_not_found_is_said(name: str, said: str, here: Path) -> None:
    """A user would not know where it was looked for, nor how to go on."""
    for command in ("recordings inspect", "dev play", "recordings redact --dry-run"):
        result = antiphon(f"{command} {name}")
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_log_of_a_store_is_not_changed() -> None:
    """The copy would be changed, and thrown away."""
    for command in ("compact", "recover", "marks"):
        result = antiphon(f"recordings {command} s3://bucket/prefix/a")
        assert result.exit_code == 2
        assert "is in an object store" in result.stderr
