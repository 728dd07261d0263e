"""New files: written elsewhere, and there when they are whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

PART_PREFIX: Final = ".antiphon-"
"""Of the folder next to a file, in which it is written."""
NOT_EXECUTABLE: Final = 0o666
"""The bits of a log's mode that a file made from the log keeps."""
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What a file system says that has no hard links."""
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What only writing ends in; the system names no file then."""


@contextmanager
def new_file(path: Path, *, like: Path | None = None, replaces: bool = False) -> Iterator[Path]:
    """Give the place where a file is to be written; it gets its own when all went well.

    Args:
        path: the file.
        like: the log that it is made of: the same people may read and write it.
        replaces: a regular file that is there is replaced then.

    `FileExistsError`: there is a file of that name, or there was when this one was whole; it is
    left alone. `OSError`: the disk refused; it names the file, and not where it was written.
    """
    if not replaces:
        _refuse_existing(path)
    with _folder_beside(path) as folder:
        part = folder / path.name
        yield part
        if like is not None:
            _share_as(part, like)
        if replaces and path.is_file():
            part.replace(path)
        else:
            _give_name(part, path)


def _share_as(path: Path, like: Path) -> None:
    """Let the group of another file read a file, or no group if that is not possible."""
    found = like.stat()
    mode = stat.S_IMODE(found.st_mode) & NOT_EXECUTABLE
    if path.stat().st_gid != found.st_gid:
        try:
            os.chown(path, -1, found.st_gid)
        except PermissionError:
            mode &= ~stat.S_IRWXG
    path.chmod(mode)


def check_new_file(path: Path) -> None:
    """See that a file can be made, before the work that would be lost else.

    `FileExistsError`: there is a file of that name. `OSError`: its folder is missing, or takes no
    files.
    """
    _refuse_existing(path)
    with _folder_beside(path):
        pass


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Give a folder to write a file in; what is said of that folder is said of the file."""
    folder = path.parent / PART_PREFIX
    try:
        with TemporaryDirectory(prefix=PART_PREFIX, dir=path.parent) as made:
            folder = Path(made)
            yield folder
    except OSError as error:
        is_within = str(error.filename).startswith(str(folder))
        if is_within or (error.filename is None and error.errno in _DISK_FULL):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _give_name(part: Path, path: Path) -> None:
    """Give a file its name, unless another has it: a link is refused then, a rename is not."""
    try:
        path.hardlink_to(part)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        path.touch(exist_ok=False)  # the name is ours now, and may be renamed over
        part.replace(path)


def own_as(path: Path, other: Path) -> None:
    """Give a file the owner and the mode of another: the readers of that one can read it too.

    `PermissionError`: the owner is another user, and we may not give files away.
    """
    status, owned = path.stat(), other.stat()
    if (status.st_uid, status.st_gid) != (owned.st_uid, owned.st_gid):
        os.chown(path, owned.st_uid, owned.st_gid)
    path.chmod(stat.S_IMODE(owned.st_mode))
