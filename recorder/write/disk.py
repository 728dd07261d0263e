"""The file operations of a writer, behind an interface so that tests can make each of them fail.

Rules: a log is reopened for writing only after its writer is gone; no operation retries, buffers or
hides errors.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Final, Protocol

from .lock import hold, take

FILE_MODE: Final = 0o600
"""A recording holds a person's voice: only its owner may read it."""


class Disk(Protocol):
    """A writer's file operations; each may raise `OSError`."""

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet; return its descriptor."""
        ...

    def reopen(self, path: Path) -> int:
        """Open a log that lost its writer; `BlockingIOError`: it has one."""
        ...

    def truncate(self, descriptor: int, file_bytes: int) -> None:
        """Cut the file off."""
        ...

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data`; return how many bytes, at least one."""
        ...

    def sync(self, descriptor: int) -> None:
        """Return once the file's bytes are on the device."""
        ...

    def is_there(self, path: Path, descriptor: int) -> bool:
        """Say whether `path` still names the open file."""
        ...

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Empty our file if it is still open, and remove its name if it still has it."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Return once the names in directory `path` are on the device."""
        ...

    def close(self, descriptor: int) -> None:
        """Close the file, whether or not this raises."""
        ...


class LocalDisk:
    """The operating system's files."""

    def create(self, path: Path) -> int:
        """Create the file and hold its lock."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, FILE_MODE)
        hold(descriptor)
        return descriptor

    def reopen(self, path: Path) -> int:
        """Open the file, not by a link, and take its lock."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags)
        try:
            take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def truncate(self, descriptor: int, file_bytes: int) -> None:
        """Cut the file off by one system call."""
        os.ftruncate(descriptor, file_bytes)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append by one system call."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Sync with fdatasync."""
        os.fdatasync(descriptor)

    def is_there(self, path: Path, descriptor: int) -> bool:
        """False once the file was removed or its folder moved."""
        held = os.fstat(descriptor)
        try:
            named = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return held.st_nlink > 0 and os.path.samestat(held, named)

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Truncate before unlinking."""
        if descriptor is not None:
            os.ftruncate(descriptor, 0)  # frees the bytes despite other links or open readers
        if descriptor is None or self.is_there(path, descriptor):
            path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Sync the directory with fsync."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the file."""
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
