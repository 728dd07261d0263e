"""Files: the operations of a log's writer, its lock, and new files that appear when they are whole.

Rules: a log is reopened for writing only after its writer is gone; no operation retries, buffers or
hides errors, and tests replace each (`Disk`) to make it fail. The lock is held while the file is
open: flock ends with the process, so a log with neither `fin` nor a lock has lost its writer. It is
advisory: readers ignore it. Without file system locks, logs are written and none appears held.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

# -- the lock --------------------------------------------------------------------------------------


def is_held(path: Path) -> bool:
    """Whether any process is writing the log; `OSError` if it cannot be read or is a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def has_failed(path: Path) -> bool:
    """Whether the log failed while it was written (`Disk.mark_failed`)."""
    return not path.stat().st_mode & stat.S_IWUSR


# -- files -----------------------------------------------------------------------------------------


FILE_MODE: Final = 0o600
"""A recording holds a person's voice: only its owner may read it."""
FAILED_MODE: Final = 0o400
"""Of a log that failed: a mark that needs no room, on a disk that has none."""


class Disk:
    """The operating system's files; each operation may raise `OSError`."""

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet, and hold its lock; return its descriptor."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, FILE_MODE)
        with suppress(OSError):  # without locks `is_held` cannot tell, and retention looks at age
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def reopen(self, path: Path) -> int:
        """Open a log that lost its writer, not by a link; `BlockingIOError`: it has one."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def mark_failed(self, descriptor: int) -> None:
        """Make the file of a failed log read-only: its session went on without it."""
        os.fchmod(descriptor, FAILED_MODE)

    def truncate(self, descriptor: int, file_bytes: int) -> None:
        """Cut the file off by one system call."""
        os.ftruncate(descriptor, file_bytes)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data` by one system call; return how many bytes, at least one."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Return once the file's bytes are on the device (fdatasync)."""
        os.fdatasync(descriptor)

    def is_there(self, path: Path, descriptor: int, file_bytes: int = 0) -> bool:
        """Say whether `path` still names the open file, and it has these bytes at least."""
        held = os.fstat(descriptor)
        try:
            named = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        is_named = held.st_nlink > 0 and os.path.samestat(held, named)
        return is_named and held.st_size >= file_bytes

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Empty our file if it is still open, and remove its name if it still has it."""
        if descriptor is not None:
            os.ftruncate(descriptor, 0)  # frees the bytes despite other links or open readers
        if descriptor is None or self.is_there(path, descriptor):
            path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Return once the names in a directory are on the device (fsync)."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the file, whether or not this raises."""
        os.close(descriptor)


class Directories:
    """Syncs the names of new files to the device: one sync serves all files created before it."""

    def __init__(self, disk: Disk) -> None:
        self._disk: Final = disk
        self._lock: Final = threading.Lock()
        self._created: Final[Counter[Path]] = Counter()
        self._synced: Final[Counter[Path]] = Counter()

    def add(self, path: Path) -> int:
        """Note that a file was created; return its number in its directory."""
        with self._lock:
            self._created[path.parent] += 1
            return self._created[path.parent]

    def sync(self, path: Path, number: int) -> None:
        """Return once file `number`'s name is on the device, or raise `OSError`; may overlap."""
        directory = path.parent
        with self._lock:
            created = self._created[directory]
            if self._synced[directory] >= number:
                return
        self._disk.sync_directory(directory)
        with self._lock:
            self._synced[directory] = max(self._synced[directory], created)


# -- new files -------------------------------------------------------------------------------------


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


def copy_owner(path: Path, other: Path) -> None:
    """Give a file the owner and the mode of another: the readers of that one can read it too.

    `PermissionError`: the owner is another user, and we may not give files away.
    """
    status, owned = path.stat(), other.stat()
    if (status.st_uid, status.st_gid) != (owned.st_uid, owned.st_gid):
        os.chown(path, owned.st_uid, owned.st_gid)
    path.chmod(stat.S_IMODE(owned.st_mode))
