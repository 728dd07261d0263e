"""New files: whole or not there, never over one that somebody else made, and named in errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from recorder.write.files import check_new_file, new_file
from replay.export.formats import FORMATS
from runtime.cli import main
from tests.golden.logs import FOLDER


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_made_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
) -> None:
    """A recording would be lost to a command that began before there was one of that name."""
    if not has_links:
        monkeypatch.setattr(os, "link", _refuse_link)
    path = tmp_path / "a.session.zst"

    def write() -> None:
        with new_file(path) as part:
            part.write_text("ours")
            path.write_text("theirs")

    with pytest.raises(FileExistsError) as refused:
        write()
    assert refused.value.filename == str(path)
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def _refuse_link(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_has_its_name_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
) -> None:
    """On a file system without links no log could be redacted, recovered or forked."""
    if not has_links:
        monkeypatch.setattr(os, "link", _refuse_link)
    path = tmp_path / "a.session.zst"
    with new_file(path) as part:
        part.write_text("ours")
        part.chmod(0o640)
        assert not path.exists()
    status = path.stat()
    assert (path.read_text(), status.st_mode & 0o777, status.st_nlink) == ("ours", 0o640, 1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_nothing_is_a_file_of_that_name(tmp_path: Path) -> None:
    """A link to a disk that is not mounted just now would be replaced."""
    path = tmp_path / "a.session.zst"
    path.symlink_to(tmp_path / "away")
    with pytest.raises(FileExistsError):
        check_new_file(path)
    with pytest.raises(FileExistsError), new_file(path):
        raise AssertionError("nothing is to be written")


def test_errors_name_the_file_and_not_where_it_is_written(tmp_path: Path) -> None:
    """Somebody would look for a folder that nobody has made, or suspect the log that is read."""
    path = tmp_path / "none" / "a.session.zst"
    with pytest.raises(FileNotFoundError) as missing, new_file(path):
        raise AssertionError("nothing is to be written")
    assert missing.value.filename == str(path)
    path = tmp_path / "a.session.zst"
    with pytest.raises(OSError, match="No space left") as full, new_file(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert full.value.filename == str(path)
    with pytest.raises(OSError, match="error") as other, new_file(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert other.value.filename is None


# -- what is made of a log ------------------------------------------------------------------------

LOG: Final = FOLDER / "v1-realtime-spoken.session.zst"
MADE: Final = {
    "view": ("recordings view", "-o", "out.html"),
    **{f"export-{to}": ("export", "-o", f"out.{to}") for to in FORMATS},
    "redact": ("recordings redact", "--output", "out.session.zst"),
    "compact": ("recordings compact", "--output", "out.session.zst"),
    "recover": ("recordings recover", "--output", "out.session.zst"),
    "shrink": ("dev shrink", "--budget", "2", "--output", "out.session.zst"),
}
FORCED: Final = ("view", "export-jsonl")


def make(folder: Path, name: str, *more: str, mode: int) -> tuple[Result, Path]:
    """Run a command on a copy of a log that has this mode; returns what it made as well."""
    log = folder / "a.session.zst"
    log.write_bytes(LOG.read_bytes()[: -10 if name == "recover" else None])
    log.chmod(mode)
    command, *options = MADE[name]
    path = folder / options[-1]
    rest = ("--", "false") if name == "shrink" else ()
    run = (*command.split(), str(log), *options[:-1], str(path), *more, *rest)
    result = CliRunner().invoke(main, run)
    return result, path


@pytest.mark.parametrize("mode", [0o600, 0o640])
@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_a_log_has_its_permissions(tmp_path: Path, name: str, mode: int) -> None:
    """A voice that its owner alone may hear could be heard by all users of the machine."""
    result, path = make(tmp_path, name, mode=mode)
    assert path.is_file(), result.output
    assert oct(path.stat().st_mode & 0o777) == oct(mode)


@pytest.mark.parametrize("name", MADE)
def test_what_is_there_is_not_replaced(tmp_path: Path, name: str) -> None:
    """A page with somebody's notes in it, or another session's sound, would be gone."""
    (tmp_path / MADE[name][-1]).write_text("mine")
    result, path = make(tmp_path, name, mode=0o600)
    assert path.read_text() == "mine"
    assert result.exit_code == 2
    assert " exists: " in result.output


@pytest.mark.parametrize("name", FORCED)
def test_force_replaces_it(tmp_path: Path, name: str) -> None:
    """A page could not be made again."""
    (tmp_path / MADE[name][-1]).write_text("mine")
    result, path = make(tmp_path, name, "--force", mode=0o600)
    assert (result.exit_code, path.stat().st_mode & 0o777) == (0, 0o600)
    assert path.stat().st_size > 100


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_force_replaces_nothing_but_files(tmp_path: Path, kind: str) -> None:
    """A device would become a file, and the hint lead nowhere."""
    log = next(FOLDER.glob("v1-realtime-audio.session.zst"))
    there = tmp_path / "there"
    if kind == "folder":
        there.mkdir()
    else:
        os.mkfifo(there)
    before = there.stat()
    for more in ((), ("--force",)):
        told = CliRunner().invoke(main, ["recordings", "view", str(log), "-o", str(there), *more])
        assert told.exit_code == 2
        assert "--force replaces it" not in told.output
    assert os.path.samestat(there.stat(), before)
    assert list(tmp_path.iterdir()) == [there]


def test_what_another_group_could_read_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever exports would open a recording to a group of their own."""
    log = tmp_path / "log"
    log.write_text("of a group")
    log.chmod(0o640)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    found = os.stat(log)
    other = os.stat_result((*found[:5], found.st_gid + 1, *found[6:]))
    monkeypatch.setattr(os, "chown", refuse)
    stat_before = Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda self, **more: other if self == log else stat_before(self, **more)
    )
    with new_file(tmp_path / "made", like=log) as part:
        part.write_text("ours")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
