"""Commands on logs in an object store: they take a URL where they take a path."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pytest

from recorder.format.format import SUFFIX
from recorder.storage.remote import RemoteStore
from recorder.storage.store import Store
from replay.cli import inspect_command, replay_command
from replay.diff import diff_command
from replay.export.formats import export_command
from replay.library.keep import prune_command, verify_command
from replay.library.sessions import list_command
from replay.view.document import view_command
from tests.golden.logs import FOLDER
from tests.recorder.test_listing import write_log
from tests.replay.test_sessions import call, told

NAME = "v1-realtime-audio"
DAY_S = 86_400.0


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store with one log; the working folder and that of temporary files are empty."""
    for name in ("stored", "here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    store = RemoteStore.open((tmp_path / "stored").as_uri())
    log = Store(FOLDER).find(NAME)
    assert log is not None
    assert store.put(log)
    return store.url


def nameless(body: Any) -> Any:
    """What a command says, without the names of files and the time that it took."""
    if isinstance(body, dict):
        left_out = {"log", "elapsed_ms", "times_real_time"}
        return {key: nameless(value) for key, value in body.items() if key not in left_out}
    return body


@pytest.mark.parametrize("suffix", ["", SUFFIX])
@pytest.mark.parametrize("command", [verify_command, inspect_command, replay_command])
def test_a_log_is_named_by_its_url(
    command: click.Command, suffix: str, url: str, tmp_path: Path
) -> None:
    """A stored recording would have to be fetched by hand, and the copy be removed."""
    there = told(command, f"{url}/{NAME}{suffix}")
    here = told(command, FOLDER / f"{NAME}{SUFFIX}")
    assert nameless(there) == nameless(here)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_two_logs_are_compared_by_their_urls(url: str) -> None:
    """A stored recording could not be compared with another."""
    one = f"{url}/{NAME}"
    assert call(diff_command, one, one).exit_code == 0
    assert call(diff_command, one, FOLDER / f"v1-realtime-video{SUFFIX}").exit_code == 1


def test_several_stored_logs_are_replayed(url: str) -> None:
    """A regression could be checked with local logs only."""
    bodies = json.loads(call(replay_command, *[f"{url}/{NAME}"] * 2, "--json").stdout)
    assert [body["exit_code"] for body in bodies] == [0, 0]


def test_what_is_made_of_a_stored_log_is_written_here(url: str) -> None:
    """A page would be written next to the copy, and be removed with it."""
    assert call(view_command, f"{url}/{NAME}").exit_code == 0
    assert call(export_command, f"{url}/{NAME}{SUFFIX}", "--to", "wav").exit_code == 0
    assert {path.name for path in Path().iterdir()} == {f"{NAME}.html", f"{NAME}.wav"}
    assert Path(f"{NAME}.html").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "wrong", ["{url}/missing", "{url}/", "file:///no/such/folder/log", "ftp://host/log", "s3://b"]
)
@pytest.mark.parametrize("command", [verify_command, view_command, list_command])
def test_what_is_no_stored_log_is_one_line(command: click.Command, wrong: str, url: str) -> None:
    """A script would get a traceback, or take the failure for a result."""
    if command is list_command:
        wrong = wrong.replace("{url}", "file:///no/such").replace("s3://b", "s3://")
    result = call(command, wrong.format(url=url))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_a_log_that_has_no_room_is_not_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large recording would fill the disk of the system's temporary files."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: Free())
    result = call(verify_command, f"{url}/{NAME}")
    assert (result.exit_code, "has 10 B left" in result.stderr) == (2, True)


class Free:
    """A disk that is full."""

    free = 10


def test_stored_logs_are_listed(url: str, tmp_path: Path) -> None:
    """An operator could not see what is in the store."""
    (there,) = told(list_command, url)["logs"]
    folder = tmp_path / "listed"  # the list leaves an index in it
    folder.mkdir()
    shutil.copy(FOLDER / f"{NAME}{SUFFIX}", folder)
    (here,) = told(list_command, folder)["logs"]
    assert there | {"modified_ms": 0} == here | {"modified_ms": 0}
    assert told(list_command, url, "--mode", "chat")["logs"] == []
    assert NAME in call(list_command, url).stdout


def age(path: Path, days: float) -> None:
    """Let a file be so old."""
    os.utime(path, (time.time() - days * DAY_S,) * 2)


def test_a_store_is_pruned(url: str, tmp_path: Path) -> None:
    """Stored recordings would be kept longer than was promised."""
    age(tmp_path / "stored" / f"{NAME}{SUFFIX}", 40)
    age(write_log(tmp_path / "stored", "young"), 1)
    dry = told(prune_command, url, "--older-than", "30d", "--dry-run")
    assert [it["recording_id"] for it in dry["removed"]] == [NAME]
    assert told(prune_command, url, "--older-than", "30d")["removed"] == dry["removed"]
    assert [it["recording_id"] for it in told(list_command, url)["logs"]] == ["young"]


def test_a_folder_is_pruned_with_its_store(url: str, tmp_path: Path) -> None:
    """What was removed here would be there still, and a client's wish be half fulfilled."""
    here, there = tmp_path / "here", tmp_path / "stored"
    for folder, name, days in (
        *((here, "old", 40), (here, "young", 1)),
        *((there, "old", 39), (there, "young", 1), (there, NAME, 31)),
    ):
        path = folder / f"{name}{SUFFIX}"
        age(path if path.exists() else write_log(folder, name), days)
    done = told(prune_command, here, "--store", url, "--older-than", "30d")
    assert [it["recording_id"] for it in done["removed"]] == ["old", NAME]
    assert done["kept_logs"] == 1
    assert [log.recording_id for log in Store(here).logs()] == ["young"]
    assert [log.recording_id for log in Store(there).logs()] == ["young"]


@pytest.mark.parametrize(
    ("place", "store"), [("{url}", "{url}"), ("{here}", "{here}"), ("{here}", "s3://")]
)
def test_a_wrong_store_removes_nothing(place: str, store: str, url: str, tmp_path: Path) -> None:
    """A typing error would remove what is in one place only."""
    age(write_log(tmp_path / "here", "old"), 40)
    places = {"url": url, "here": tmp_path / "here"}
    asked = (place.format(**places), "--store", store.format(**places), "--older-than", "1d")
    assert call(prune_command, *asked).exit_code == 2
    assert [log.recording_id for log in Store(tmp_path / "here").logs()] == ["old"]
