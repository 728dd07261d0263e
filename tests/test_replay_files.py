"""New files: whole or not there, never over one that somebody else made, and named in errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from replay.files import check_new_file, new_file


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
