"""The file of keys on its disk: read whole, checked, and written so that nobody sees half of it.

- It is written beside itself, synced, and renamed over the old one; it can be read by its owner
  alone, and by its group where that could read it before (a server may run as another user).
- A file that others than owner and group can read, or that others than its owner can write, is
  warned about: hashes tell no key, but names, and whoever can write it can make a key.
- Two commands that change it at once would lose one's change: the folder is locked meanwhile.

All calls block on the disk.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs

from .keys import Key, KeysWrongError, format_keys, parse_keys

FILE_BYTES_MAX: Final = 1 << 20
"""A thousand keys with all their fields are 250 kB."""
OWNER_ONLY: Final = 0o600


class KeyFileError(Exception):
    """The file cannot be read or written, or is no file of keys; the text says why, in one line."""


@attrs.frozen(kw_only=True)
class KeyFile:
    """A file of keys, as it was read.

    Attributes:
        keys: what it holds.
        data: its bytes, to see whether it changed.
        mode: its permissions.
    """

    keys: tuple[Key, ...]
    data: bytes = attrs.field(repr=False)
    mode: int

    @property
    def warning(self) -> str | None:
        """What is wrong with its permissions, or None."""
        if self.mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others than its owner can write it (mode {self.mode:03o}): chmod 600"
        if self.mode & stat.S_IROTH:
            return f"everybody can read it (mode {self.mode:03o}): chmod 600"
        return None


def read_key_file(path: Path) -> KeyFile:
    """Read a file of keys.

    Raises:
        KeyFileError: there is none, it cannot be read, or it is none.
    """
    data, mode = read_bytes(path)
    return parse_key_file(path, data, mode)


def read_bytes(path: Path) -> tuple[bytes, int]:
    """Read a file's bytes and its permissions.

    Raises:
        KeyFileError: it cannot be read, or is too large to be a file of keys.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise KeyFileError(f"{path}: more than {FILE_BYTES_MAX} bytes")
    return data, mode


def parse_key_file(path: Path, data: bytes, mode: int) -> KeyFile:
    """Make sense of a file that was read.

    Raises:
        KeyFileError: it is no file of keys.
    """
    try:
        return KeyFile(keys=parse_keys(data.decode("utf-8")), data=data, mode=mode)
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: is not UTF-8") from error
    except KeysWrongError as error:
        raise KeyFileError(f"{path}: {error}") from error


def change_key_file(
    path: Path, change: Callable[[tuple[Key, ...]], tuple[Key, ...]], *, create: bool = False
) -> None:
    """Read the file, change its keys, and write it.

    Args:
        path: of the file.
        change: gives the new keys; what it raises leaves the file as it is.
        create: begin with no keys where there is no file.

    Raises:
        KeyFileError: it cannot be read or written, is no file of keys, or is being changed.
    """
    real = Path(os.path.realpath(path))  # What a link points to is replaced, and not the link.
    with _locked(real.parent):
        keys = () if create and not real.exists() else read_key_file(real).keys
        _write(real, format_keys(change(keys)))


# -- writing ------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; whoever finds it taken does not wait."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeyFileError(f"{folder}: cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise KeyFileError(f"{folder}: another command is changing keys here") from error
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    """Replace a file at once, by one of the same owner."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        beside = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _own_as(path, file.fileno())
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be written: {error.strerror}") from error


def _own_as(path: Path, descriptor: int) -> None:
    """Give a new file the owner, the group and the group's right to read of the one before it."""
    try:
        before = path.stat()
    except FileNotFoundError:
        return
    mine = os.fstat(descriptor)
    if (before.st_uid, before.st_gid) != (mine.st_uid, mine.st_gid):
        # Refused, it is an error: the server could not read what this user would leave behind.
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, OWNER_ONLY | (before.st_mode & stat.S_IRGRP))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
