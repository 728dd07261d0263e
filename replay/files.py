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
"""Of the folder, beside a file's own, in which it is written."""


@contextmanager
def new_file(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Give the place where a file is to be written; it gets its own when all went well.

    Args:
        path: the file.
        replaces: one that is there is replaced then.

    Raises:
        FileExistsError: there is a file of that name; it is left alone.
        OSError: the disk refused.
    """
    if path.exists() and not replaces:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with TemporaryDirectory(prefix=PART_PREFIX, dir=path.parent) as folder:
        part = Path(folder) / path.name
        yield part
        part.rename(path)


def own_as(path: Path, other: Path) -> None:
    """Give a file the owner and the mode of another: whoever could read that can read it too.

    Raises:
        PermissionError: the owner is somebody else, and we may not give files away.
    """
    status, owned = path.stat(), other.stat()
    if (status.st_uid, status.st_gid) != (owned.st_uid, owned.st_gid):
        os.chown(path, owned.st_uid, owned.st_gid)
    path.chmod(stat.S_IMODE(owned.st_mode))
