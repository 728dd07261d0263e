"""The commands `sessions` and `prune`: what they tell, what they remove, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from recorder.storage.store import Store
from recorder.write.writer import Recorder
from replay.library.keep import prune_command
from replay.library.sessions import ROWS_MAX, list_command
from replay.shared.recordings import read_size, read_span, show_bytes, show_moment
from runtime import RUN
from tests.golden.logs import FOLDER
from tests.project.terminal import on_terminal
from tests.recorder.test_listing import HEAD, write_log

DAY_S = 86_400


def call(command: click.Command, *arguments: object) -> Result:
    """Run a command; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def told(command: click.Command, *arguments: object) -> Any:
    return json.loads(call(command, *arguments, "--json").stdout)


def ids(folder: Path, *arguments: str) -> list[str]:
    return [log["recording_id"] for log in told(list_command, folder, *arguments)["logs"]]


def head(owner: str = "", mode: str = "audio", ago_s: float = 0) -> dict[str, Any]:
    wall_ms = int((time.time() - ago_s) * 1000)
    return {"wall_ms": wall_ms, "config": {"mode": mode, "owner": owner, "model": "m"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three logs of different age, size and fate."""
    write_log(tmp_path, "new", head("anna", ago_s=60))
    write_log(tmp_path, "killed", head("bert", "chat", ago_s=2 * DAY_S), fin=None)
    write_log(tmp_path, "old", head(ago_s=40 * DAY_S), fin={"reason": "timeout", "units": 2})
    for name, age_s in (("new", 600), ("killed", 2 * DAY_S), ("old", 40 * DAY_S)):
        os.utime(Store(tmp_path).path(name), (time.time() - age_s,) * 2)
    return tmp_path


# -- sessions -------------------------------------------------------------------------------------


def test_sessions_are_listed_newest_first(folder: Path) -> None:
    """An operator could not find what was recorded last."""
    shown = call(list_command, folder)
    assert shown.exit_code == 0
    rows = shown.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["recording", "new", "killed", "old", "3"]
    assert [row.split()[-1] for row in rows[1:4]] == ["client", "crashed", "timeout"]
    assert rows[4].startswith("3 sessions, ")


def test_a_long_word_of_one_log_hides_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One log that says nonsense, and the names of all recordings are cut away."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "20261122T083715-a1f4f2df53d5"
    write_log(folder, name, head("o" * 100, "m" * 100), fin={"reason": "r" * 100})
    rows = call(list_command, folder).stdout.splitlines()
    assert {row.split()[0] for row in rows[1:5]} == {name, "new", "killed", "old"}
    assert [row.split()[-1] for row in rows if row.startswith("new ")] == ["client"]


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"units": 7}, "7"),
        ({"units": 0, "turns": 1}, "1 turn"),
        ({"units": 0, "turns": 2}, "2 turns"),
        ({"units": 0, "chunks": 1, "utterances": 1}, "1 second"),
        ({"units": 0, "chunks": 600, "utterances": 3}, "600 seconds"),
        ({"units": 0, "chunks": 0, "utterances": 0}, "0"),
    ],
)
def test_a_row_counts_what_its_mode_has(tmp_path: Path, counts: dict[str, int], shown: str) -> None:
    """A transcription of ten minutes would be listed as one in which nothing was said."""
    write_log(tmp_path, "a", head(ago_s=60), fin={"reason": "client", **counts})
    row = call(list_command, tmp_path).stdout.splitlines()[1]
    assert f"  {shown}  " in row
    (log,) = told(list_command, tmp_path)["logs"]
    assert log["chunks"] == counts.get("chunks")


def test_json_has_all_of_them(folder: Path) -> None:
    """A script would have to read a table."""
    body = told(list_command, folder)
    assert (body["found_logs"], len(body["logs"])) == (3, 3)
    assert body["found_bytes"] == sum(it.file_bytes for it in Store(folder).logs())
    assert body["logs"][1].keys() >= {"recording_id", "state", "began_ms", "owner", "units"}
    assert told(list_command, folder, "--limit", "1")["found_logs"] == 3


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--since", "3d"), ["new", "killed"]),
        (("--since", "1h"), ["new"]),
        (("--mode", "chat"), ["killed"]),
        (("--owner", "anna"), ["new"]),
        (("--owner", ""), ["old"]),
        (("--state", "crashed"), ["killed"]),
        (("--reason", "timeout"), ["old"]),
        (("--limit", "2"), ["new", "killed"]),
        (("--state", "open"), []),
    ],
)
def test_sessions_can_be_chosen(folder: Path, arguments: tuple[str, ...], found: list[str]) -> None:
    """Who looks for one session would have to look through all."""
    assert ids(folder, *arguments) == found


def test_a_date_is_in_utc(tmp_path: Path) -> None:
    """A list would depend on where its reader is."""
    at = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert int(at.timestamp() * 1000) == HEAD["wall_ms"]
    write_log(tmp_path)
    assert ids(tmp_path, "--since", "2023-11-14T22:13:20") == ["a"]
    assert ids(tmp_path, "--since", "2023-11-14T22:13:20+01:00") == ["a"]
    assert ids(tmp_path, "--since", "2023-11-14T22:13:21") == []
    assert "2023-11-14 22:13:20" in call(list_command, tmp_path).stdout


def test_a_session_that_runs_is_open(tmp_path: Path) -> None:
    """An operator could not tell what runs from what was killed."""
    with Recorder(clock=lambda: 0.0, inline=True) as recorder:
        recorder.open(Store(tmp_path).path("a"), HEAD, at_ns=0)
        assert [log["state"] for log in told(list_command, tmp_path)["logs"]] == ["open"]
    assert [log["state"] for log in told(list_command, tmp_path)["logs"]] == ["crashed"]


def test_a_long_list_is_cut_and_says_so(tmp_path: Path) -> None:
    """A screen would be full of old sessions, or nobody know that there are more."""
    for number in range(ROWS_MAX + 2):
        Store(tmp_path).path(f"l{number}").write_bytes(b"")
    shown = call(list_command, tmp_path).stdout
    assert len(shown.splitlines()) == ROWS_MAX + 2
    assert "2 of them not shown" in shown
    assert len(call(list_command, tmp_path, "--limit", 99).stdout.splitlines()) == ROWS_MAX + 4


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    """A script would fail on the first day."""
    shown = call(list_command, tmp_path)
    assert (shown.exit_code, shown.stdout) == (0, "0 sessions, 0 B\n")


@pytest.mark.parametrize("command", [list_command, prune_command])
def test_a_folder_that_is_not_there_is_one_line(command: click.Command, tmp_path: Path) -> None:
    """A wrong path would end in a traceback, or look like a folder without recordings."""
    (tmp_path / "file").write_bytes(b"")
    flags = ("--older-than", "1d") if command is prune_command else ()
    for path in (tmp_path / "none", tmp_path / "file"):
        result = call(command, path, *flags)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("since", ["yesterday", "7", "-1d", "1e3d", "2023-13-01", "", "\u0663d"])
def test_a_wrong_moment_is_refused(tmp_path: Path, since: str) -> None:
    """A list would begin somewhere that nobody meant."""
    result = call(list_command, tmp_path, "--since", since)
    assert (result.exit_code, "Traceback" in result.output) == (2, False)


# -- prune ----------------------------------------------------------------------------------------


def test_prune_removes_what_is_old_and_says_so(folder: Path) -> None:
    """The disk would stay full, or nobody know what went."""
    freed = Store(folder).path("old").stat().st_size
    dry = told(prune_command, folder, "--older-than", "30d", "--dry-run")
    assert [it["recording_id"] for it in dry["removed"]] == ["old"]
    assert len(Store(folder).logs()) == 3
    done = told(prune_command, folder, "--older-than", "30d")
    assert done == dry | {"dry_run": False}
    assert (done["freed_bytes"], done["kept_logs"], done["removed"][0]["cause"]) == (
        freed,
        2,
        "age",
    )
    assert ids(folder) == ["new", "killed"]


def test_prune_by_size_takes_the_oldest(folder: Path) -> None:
    """The newest recordings would go, or all of them."""
    kept = Store(folder).path("new").stat().st_size
    shown = call(prune_command, folder, "--larger-than", f"{kept}B")
    assert shown.exit_code == 0
    assert [row.split()[0] for row in shown.stdout.splitlines()] == ["old", "killed", "removed"]
    assert shown.stdout.splitlines()[-1].startswith("removed 2 logs, ")
    assert ids(folder) == ["new"]


def test_prune_says_what_stays_though_it_should_go(tmp_path: Path) -> None:
    """Who wonders why the disk is full would not see that sessions run."""
    write_log(tmp_path)
    shown = call(prune_command, tmp_path, "--larger-than", "0B")
    assert "kept though due: 1 (being written" in shown.stdout
    assert ids(tmp_path) == ["a"]


def test_prune_without_a_bound_removes_nothing(folder: Path) -> None:
    """A forgotten flag would cost all recordings."""
    result = call(prune_command, folder)
    assert (result.exit_code, "--older-than" in result.stderr) == (2, True)
    assert len(Store(folder).logs()) == 3


def test_what_cannot_be_removed_is_an_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nightly job would seem to work while the disk fills up."""

    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    result = call(prune_command, folder, "--older-than", "30d")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "Permission denied" in result.stderr


# -- amounts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 30 * DAY_S),
        ("36h", 129_600),
        ("1.5h", 5400),
        ("90 m", 5400),
        ("20s", 20),
        ("2w", 1_209_600),
    ],
)
def test_a_span_has_its_unit(text: str, seconds: float) -> None:
    """Logs of the wrong age would be removed."""
    assert read_span(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("50GB", 50 * 10**9), ("512MiB", 1 << 29), ("1.5kB", 1500), ("0B", 0), ("1 TB", 10**12)],
)
def test_a_size_has_its_unit(text: str, size: int) -> None:
    """More or less would be kept than was said."""
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1e9d", "30D", "nan d", "", "1,5h", "1y"])
def test_an_amount_without_a_unit_of_ours_is_refused(text: str) -> None:
    """A slip would remove what nobody meant to lose."""
    for read in (read_span, read_size):
        with pytest.raises(click.BadParameter):
            read(text)


@given(count=st.integers(0, 1 << 50))
def test_a_shown_size_is_near_the_real_one(count: int) -> None:
    """A table would say something else than the disk."""
    text = show_bytes(count)
    assert len(text) <= 9
    assert read_size(text) == pytest.approx(count, rel=0.06)


@given(unix_ms=st.integers(0, 253_402_300_799_999))
def test_every_moment_that_a_log_may_name_can_be_shown(unix_ms: int) -> None:
    """One log with a wrong clock would break the list."""
    assert len(show_moment(unix_ms)) == 19


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_table_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    """Rows would be folded in the middle of words, and columns stand under others."""
    for log in FOLDER.glob("v1-realtime-*.session.zst"):
        shutil.copy(log, tmp_path)
    command = (*RUN, "recordings", "list", str(tmp_path), "--limit", "5")
    lines = on_terminal(command, columns=columns, has_bars=False).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[0] == "recording"
    assert all(line.split()[0].startswith("v1-") for line in lines[1:6])
    assert ("no room for" in lines[6]) == (columns < 200)
