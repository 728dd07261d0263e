"""A directory of session logs.

Rules: a log's name is its recording id and a suffix; other files and links are ignored. Ids come
from the server and are still checked, so that none is a path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

from ..format.errors import LogMisuse
from ..format.format import SUFFIX, is_recording_id

_NS_PER_S: Final = 1_000_000_000


@attrs.frozen(kw_only=True)
class LogInfo:
    """A log in a store.

    `recording_id`: its name without the suffix; `inode`: distinguishes another file of the same
    name; `modified_ns`: nanoseconds since the epoch when it last grew.
    """

    recording_id: str
    path: Path
    inode: int
    file_bytes: int
    modified_ns: int

    @property
    def modified_s(self) -> float:
        """Seconds since the epoch when it last grew."""
        return self.modified_ns / _NS_PER_S


@attrs.frozen
class Store:
    """The logs in one directory, which must exist before a log is opened."""

    directory: Path

    def path(self, recording_id: str) -> Path:
        """Return the path of a recording's log; `LogMisuse` if the recording id is invalid."""
        if not is_recording_id(recording_id):
            raise LogMisuse(f"{recording_id!r} is not a recording id: 1 to 64 of A-Z a-z 0-9 _ -")
        return self.directory / (recording_id + SUFFIX)

    def find(self, recording_id: str) -> LogInfo | None:
        """Return one log, or None; `recording_id` may be untrusted text."""
        if not is_recording_id(recording_id):
            return None
        path = self.path(recording_id)
        try:
            return _info_of(recording_id, path, path.lstat())
        except OSError:
            return None

    def logs(self) -> tuple[LogInfo, ...]:
        """List the logs, the last grown first; empty if there is no such directory."""
        return tuple(sorted(self._look(), key=lambda info: (-info.modified_ns, info.recording_id)))

    def _look(self) -> Iterator[LogInfo]:
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    info = _look_at(entry)
                    if info is not None:
                        yield info
        except FileNotFoundError:
            return


def _look_at(entry: os.DirEntry[str]) -> LogInfo | None:
    if not entry.name.endswith(SUFFIX):
        return None
    recording_id = entry.name.removesuffix(SUFFIX)
    if not is_recording_id(recording_id):
        return None
    try:
        return _info_of(recording_id, Path(entry.path), entry.stat(follow_symlinks=False))
    except OSError:  # gone meanwhile
        return None


def _info_of(recording_id: str, path: Path, status: os.stat_result) -> LogInfo | None:
    if not stat.S_ISREG(status.st_mode):
        return None
    return LogInfo(
        recording_id=recording_id,
        path=path,
        inode=status.st_ino,
        file_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
    )
