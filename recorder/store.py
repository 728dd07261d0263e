"""A directory of session logs.

Rules: a log's name is its recording id and a suffix, nothing else in the directory is a log; ids
come from the server and are checked all the same, so that none is ever a path.

It does not open, read, lock or delete logs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import attrs

from .errors import LogMisuse

SUFFIX: Final = ".session.zst"
_RECORDING_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""No dot and no slash: an id is a name, never a path. 64 holds any hash or UUID."""


@attrs.frozen(kw_only=True)
class LogInfo:
    """A log in a store.

    Attributes:
        recording_id: its name without the suffix.
        path: the file.
        file_bytes: its size when it was listed.
        modified_s: seconds since the epoch when it last grew.
    """

    recording_id: str
    path: Path
    file_bytes: int
    modified_s: float


def recording_id_of(path: Path) -> str:
    """Return the recording id in a log's name.

    Raises:
        LogMisuse: the name is not that of a log.
    """
    recording_id = path.name.removesuffix(SUFFIX)
    if not path.name.endswith(SUFFIX) or not _RECORDING_ID.fullmatch(recording_id):
        raise LogMisuse(f"{path.name!r} is not the name of a session log")
    return recording_id


@attrs.frozen
class Store:
    """The logs in one directory.

    Attributes:
        directory: where they are; it must exist before a log is opened.
    """

    directory: Path

    def path(self, recording_id: str) -> Path:
        """Return where the log of a recording is, or will be.

        Raises:
            LogMisuse: it is no recording id.
        """
        if not _RECORDING_ID.fullmatch(recording_id):
            raise LogMisuse(f"{recording_id!r} is no recording id: 1 to 64 of A-Z a-z 0-9 _ -")
        return self.directory / (recording_id + SUFFIX)

    def logs(self) -> tuple[LogInfo, ...]:
        """List the logs, the one that grew last first."""
        found = [
            info
            for path in self.directory.glob("*" + SUFFIX)
            if (info := _look_at(path)) is not None
        ]
        return tuple(sorted(found, key=lambda info: (-info.modified_s, info.recording_id)))


def _look_at(path: Path) -> LogInfo | None:
    try:
        recording_id = recording_id_of(path)
        status = path.stat()
    except (LogMisuse, OSError):  # not a log, or gone meanwhile
        return None
    return LogInfo(
        recording_id=recording_id,
        path=path,
        file_bytes=status.st_size,
        modified_s=status.st_mtime,
    )
