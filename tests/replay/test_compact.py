"""The command `compact`: logs replaced by smaller ones, what it leaves alone, exit codes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from click.testing import CliRunner, Result

from recorder.format.format import SUFFIX
from recorder.storage.listing import summarize
from recorder.storage.store import Store
from recorder.write.files import PART_PREFIX
from replay.library import keep as command
from replay.rerun.folder import replay_log
from runtime.cli import main
from tests.golden.logs import FOLDER, items
from tests.golden.versions import COMPACTED, SPOKEN
from tests.recorder.test_samples import block_offsets


def call(*arguments: object) -> Result:
    """Run `antiphon recordings compact`; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(main, ["recordings", "compact", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def told(*arguments: object) -> Any:
    result = call(*arguments, "--json")
    body = json.loads(result.stdout)
    assert body["exit_code"] == result.exit_code
    return body


def results(body: Any) -> dict[str, str]:
    return {Path(it["log"]).name.removesuffix(SUFFIX): it["result"] for it in body["logs"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of each kind, by its name; one of them in a folder of its own."""
    data = SPOKEN.read_bytes()
    at = block_offsets(data)
    (tmp_path / "below").mkdir()
    copyfile(SPOKEN, log(tmp_path / "below", "spoken"))
    copyfile(COMPACTED, log(tmp_path, "compact"))
    log(tmp_path, "open").write_bytes(data[: at[5]])
    log(tmp_path, "damaged").write_bytes(data[: at[3]] + data[at[4] :])
    log(tmp_path, "junk").write_bytes(b"no log" * 99)
    return tmp_path


def log(folder: Path, name: str) -> Path:
    return folder / f"{name}{SUFFIX}"


def test_a_folder_is_compacted_where_it_can_be(folder: Path) -> None:
    """One bad log would keep all others large; or what cannot be compacted is touched."""
    left = {path: path.read_bytes() for path in folder.glob("*.zst")}
    body = told(folder)
    assert results(body) == {
        "spoken": "compacted",
        "compact": "kept",
        "open": "refused",
        "damaged": "refused",
        "junk": "refused",
    }
    assert body["exit_code"] == 1
    left_bytes = log(folder / "below", "spoken").stat().st_size
    assert body["saved_bytes"] == SPOKEN.stat().st_size - left_bytes
    assert body["saved_bytes"] > 0.1 * SPOKEN.stat().st_size
    assert {path: path.read_bytes() for path in folder.glob("*.zst")} == left
    assert [path.name for path in (folder / "below").iterdir()] == [f"spoken{SUFFIX}"]
    again = call(folder / "below")
    assert (again.exit_code, again.stderr) == (0, "")
    assert "1 kept; 0 B of " in again.stdout


def test_it_takes_the_log_s_place_as_it_was(folder: Path) -> None:
    """Retention would count its days anew, or others could read what was private."""
    path = log(folder / "below", "spoken")
    path.chmod(0o640)
    os.utime(path, ns=(10**18, 10**18 + 5))
    before = summarize(Store(path.parent).logs()[0])
    result = call(path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{path}: compacted" in result.stdout
    status = path.stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o640, 10**18 + 5)
    after = summarize(Store(path.parent).logs()[0])
    assert after.file_bytes < before.file_bytes
    assert (after.reason, after.units, after.state) == (before.reason, before.units, "finished")
    assert replay_log(path).result == "identical"
    assert items(path)[:-1] == items(SPOKEN)[:-1]


def test_output_leaves_the_log_alone(folder: Path) -> None:
    """An archive could not be made without touching what a server serves."""
    path, output = log(folder / "below", "spoken"), log(folder / "below", "archived")
    assert call(path, "--output", output).exit_code == 0
    assert path.read_bytes() == SPOKEN.read_bytes()
    assert items(output)[:-1] == items(path)[:-1]
    there = call(path, "--output", output)
    assert (there.exit_code, there.stderr.count("\n")) == (2, 1)
    assert "it exists" in there.stderr
    assert "is for one LOG" in call(folder, "--output", output).stderr


def test_a_log_that_would_grow_is_kept(tmp_path: Path) -> None:
    """A log of a few bytes would be larger for having been compacted."""
    sources = sorted(FOLDER.glob("v1-*.session.zst"), key=lambda path: path.stat().st_size)[:12]
    for source in sources:
        copyfile(source, tmp_path / source.name)
    for it in told(tmp_path)["logs"]:
        path = Path(it["log"])
        assert path.stat().st_size == it["after_bytes"] <= it["before_bytes"]
        if it["result"] != "compacted":
            assert path.read_bytes() == (FOLDER / path.name).read_bytes()


def test_logs_that_are_being_written_are_left_alone(folder: Path) -> None:
    """A running session would go on writing into a file that nobody sees any more."""
    path = log(folder / "below", "spoken")
    before = path.read_bytes()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert told(path)["exit_code"] == 1
        assert results(told(path.parent)) == {"spoken": "being written"}
        assert told(path.parent)["exit_code"] == 0
    assert path.read_bytes() == before


def test_what_went_wrong_amid_it_leaves_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would cost the recording that was to be kept."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    path = log(folder / "below", "spoken")
    before = path.read_bytes()
    monkeypatch.setattr(command, "compact", full)
    result = call(path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "No space left" in result.stderr
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_command_left_is_no_log(folder: Path) -> None:
    """Half a log would be refused at each run from then on, or recovered as a session."""
    left = folder / "below" / f"{PART_PREFIX}abc"
    left.mkdir()
    log(left, "spoken").write_bytes(SPOKEN.read_bytes()[:5000])
    assert results(told(folder / "below")) == {"spoken": "compacted"}
    assert told(folder / "below")["exit_code"] == 0


def test_a_wrong_path_is_one_line(folder: Path) -> None:
    """It would end in a traceback, or seem to have worked."""
    (folder / "empty").mkdir()
    for path, words in (
        (folder / "none", "there is no recording none"),
        (folder / "empty", "no *.session.zst"),
    ):
        result = call(path)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert words in result.stderr


def test_what_cannot_be_written_is_named_and_links_are_what_they_are(folder: Path) -> None:
    """A sound log would be suspected, or a loop be looked for where there is a link."""
    path, link = log(folder / "below", "spoken"), log(folder, "link")
    output = folder / "none" / "a.session.zst"
    result = call(path, "--output", output)
    told = f"Error: {output}: there is no folder {output.parent}\n"
    assert (result.exit_code, result.stderr) == (2, told)
    link.symlink_to(path)
    result = call(link)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{link}: it is a symbolic link")
    assert link.is_symlink()


def test_help_teaches() -> None:
    """Nobody would know what an exit code means."""
    text = call("--help").stdout
    assert "Examples:" in text
    assert all(f"  {code}  " in text for code in (0, 1, 2))
