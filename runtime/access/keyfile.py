"""The key file on disk: read whole, checked, and replaced atomically; all calls block.

- A new version is written to the same folder, synced, and renamed over the old one. Only its owner
  can read it, and its group if it could before (a server may run as another user).
- A file that others can read, or that others than its owner can write, gets a warning: it shows
  names, and a writer can make keys.
- Commands lock the folder: two at once would lose a change.
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
"""A thousand keys with all their fields take 250 kB."""
OWNER_ONLY: Final = 0o600


class KeyFileError(Exception):
    """The file is unreadable, unwritable or invalid; the text says why, in one line."""


@attrs.frozen(kw_only=True)
class KeyFile:
    """A key file as it was read, with its bytes to detect a change, and its permissions."""

    keys: tuple[Key, ...]
    data: bytes = attrs.field(repr=False)
    mode: int

    @property
    def warning(self) -> str | None:
        """The problem with its permissions, or None."""
        if self.mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others than its owner can write it (mode {self.mode:03o}): chmod 600"
        if self.mode & stat.S_IROTH:
            return f"others can read it (mode {self.mode:03o}): chmod 600"
        return None


def read_key_file(path: Path) -> KeyFile:
    """Read a key file; raises `KeyFileError` if it is missing, unreadable or invalid."""
    data, mode = read_bytes(path)
    return parse_key_file(path, data, mode)


def read_bytes(path: Path) -> tuple[bytes, int]:
    """A file's bytes and permissions; raises `KeyFileError` if it is unreadable or too large."""
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
    """Parse the bytes of a key file; raises `KeyFileError` if they are invalid."""
    try:
        return KeyFile(keys=parse_keys(data.decode("utf-8")), data=data, mode=mode)
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: is not UTF-8") from error
    except KeysWrongError as error:
        raise KeyFileError(f"{path}: {error}") from error


def change_key_file(
    path: Path, change: Callable[[tuple[Key, ...]], tuple[Key, ...]], *, create: bool = False
) -> None:
    """Change the keys of a file; with `create` a missing file has none.

    If `change` raises, the file stays. `KeyFileError`: it is unreadable, unwritable, invalid or
    locked.
    """
    real = Path(os.path.realpath(path))  # A link's target is replaced, not the link.
    with _locked(real.parent):
        keys = () if create and not real.exists() else read_key_file(real).keys
        _write(real, format_keys(change(keys)))


# -- writing ------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, or fail at once."""
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
    """Replace a file atomically, with the same owner."""
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
    """Copy the owner, the group and the group's read permission of the old file."""
    try:
        before = path.stat()
    except FileNotFoundError:
        return
    mine = os.fstat(descriptor)
    if (before.st_uid, before.st_gid) != (mine.st_uid, mine.st_gid):
        # A failure is an error: the server could not read the new file.
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, OWNER_ONLY | (before.st_mode & stat.S_IRGRP))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
