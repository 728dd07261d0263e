"""The few file operations of a writer, behind a seam so that tests can make each of them fail.

Rules: a log is created, never opened again for writing; after a short write the caller goes on.
Nothing here retries, buffers or hides an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from .lock import hold

FILE_MODE: Final = 0o600
"""A recording holds somebody's voice: its owner alone may read it."""


class Disk(Protocol):
    """What a writer asks of a file system; every call may raise `OSError`."""

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet; return its descriptor."""
        ...

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data`; return how many bytes, at least one."""
        ...

    def sync(self, descriptor: int) -> None:
        """Return once the file's bytes are on the device."""
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
        """Create a file that must not exist yet, and hold its lock; return its descriptor."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, FILE_MODE)
        hold(descriptor)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data`; return how many bytes."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Return once the file's bytes are on the device."""
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Return once the names in directory `path` are on the device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the file."""
        os.close(descriptor)
