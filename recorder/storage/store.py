"""Session logs, a directory of them, and how long they stay; `remote` has those of an object store.

Rules: a log's name is its recording id and a suffix; other files and links are ignored. Ids come
from the server and are still checked, so that none is a path. What the indexes of the directory
(`listing`) hold of a log goes with it: its summary, and its words.

Retention removes logs by age and by total size: the oldest go first, and no more than necessary.
Age counts from the file's last change, so a copy that preserves times keeps its age. A log that is
being written or changed within the last minute is never removed, nor is one that `may_go` holds
back; all count towards the total. Only files with a log's name, and the marks next to them, are
touched; a failed removal is reported. No log is read.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, Literal, Protocol

import attrs

from protocol.values.records import session_id_of

from ..format.format import SUFFIX, LogMisuse, is_recording_id
from ..read.scan import FileSource, OpenSource
from ..write.files import is_held
from .marks import marks_path

# -- the index -------------------------------------------------------------------------------------


INDEX_NAME: Final = ".index.sqlite"
"""Hidden, and not a valid log name."""
WITH_STORE_NAME: Final = ".index-with-store.sqlite"
"""The index of the directory's logs and of those in an object store: other logs are not dropped."""
BUSY_WAIT_S: Final = 0.1
"""Longer than another process writes its changes; after it, the next listing drops the entry."""


def prepare(database: sqlite3.Connection) -> None:
    """Have what is deleted overwritten, as it has the words of users; write without syncs."""
    database.execute("PRAGMA secure_delete = ON")
    database.execute("PRAGMA synchronous = OFF")  # the index may be lost in a power cut


def forget(directory: Path, recording_id: str) -> None:
    """Drop a removed log from the indexes; a failure is ignored, as each listing does it again."""
    for path in (directory / INDEX_NAME, directory / WITH_STORE_NAME):
        if path.is_file():
            with (
                suppress(sqlite3.Error),
                closing(sqlite3.connect(path, timeout=BUSY_WAIT_S)) as database,
                database,
            ):
                prepare(database)
                database.execute("DELETE FROM logs WHERE recording_id = ?", (recording_id,))


# -- logs ------------------------------------------------------------------------------------------


_NS_PER_S: Final = 1_000_000_000


@attrs.frozen(kw_only=True)
class LogInfo(ABC):
    """A log, in a directory or elsewhere; its methods block.

    `recording_id`: its name without the suffix; `inode`: distinguishes another file of the same
    name; `modified_ns`: nanoseconds since the epoch when it last grew.
    """

    recording_id: str
    inode: int
    file_bytes: int
    modified_ns: int

    @property
    def modified_s(self) -> float:
        """Seconds since the epoch when it last grew."""
        return self.modified_ns / _NS_PER_S

    @property
    @abstractmethod
    def place(self) -> str:
        """Its path or URL, for messages."""

    @abstractmethod
    def open(self) -> OpenSource:
        """Open it for reading; `OSError` if it is gone or unreadable."""

    @abstractmethod
    def is_held(self) -> bool:
        """Whether it is being written; `OSError` if that cannot be determined."""


@attrs.frozen(kw_only=True)
class LocalLog(LogInfo):
    """A log in a directory."""

    path: Path

    @property
    def place(self) -> str:
        """Its path."""
        return str(self.path)

    def open(self) -> FileSource:
        """Open the file."""
        return FileSource(self.path)

    def is_held(self) -> bool:
        """Whether a process holds its lock."""
        return is_held(self.path)


class Logs(Protocol):
    """The logs of one place; its methods block, and raise `OSError`."""

    def logs(self) -> Sequence[LogInfo]:
        """List the logs, the last grown first."""
        ...

    def find(self, recording_id: str) -> LogInfo | None:
        """Return one log, or None; `recording_id` may be untrusted text."""
        ...

    def remove(self, log: LogInfo) -> None:
        """Remove a log; `FileNotFoundError` if it is gone."""
        ...


@attrs.frozen
class Store:
    """The logs in one directory, which must exist before a log is opened.

    `keeps_marks`: the marks next to a log stay when it is removed, as an object store has it too.
    """

    directory: Path
    keeps_marks: bool = False

    def path(self, recording_id: str) -> Path:
        """Return the path of a recording's log; `LogMisuse` if the recording id is invalid."""
        if not is_recording_id(recording_id):
            raise LogMisuse(f"{recording_id!r} is not a recording id: 1 to 64 of A-Z a-z 0-9 _ -")
        return self.directory / (recording_id + SUFFIX)

    def find(self, recording_id: str) -> LocalLog | None:
        """Return one log, or None; `recording_id` may be untrusted text."""
        if not is_recording_id(recording_id):
            return None
        path = self.path(recording_id)
        try:
            return local_log(recording_id, path, path.lstat())
        except OSError:
            return None

    def recording_of(self, session_id: str) -> str | None:
        """Return the recording of a session, by the names of the logs only; None if missing."""
        try:
            with os.scandir(self.directory) as entries:
                names = (recording_id_in(entry.name) for entry in entries)
                return next((it for it in names if it and session_id_of(it) == session_id), None)
        except FileNotFoundError:
            return None

    def logs(self) -> tuple[LocalLog, ...]:
        """List the logs, the last grown first; empty if there is no such directory."""
        return tuple(sorted(self._list_logs(), key=newest_first))

    def remove(self, log: LogInfo) -> None:
        """Remove a log, and the marks next to it; `FileNotFoundError` if it is gone."""
        path = self.path(log.recording_id)
        try:
            path.unlink()
        finally:
            forget(self.directory, log.recording_id)
            if not self.keeps_marks and not path.exists():  # or it could not be removed
                marks_path(path).unlink(missing_ok=True)

    def _list_logs(self) -> Iterator[LocalLog]:
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    name, info = recording_id_in(entry.name), None
                    if name is not None:
                        with suppress(OSError):  # gone meanwhile
                            status = entry.stat(follow_symlinks=False)
                            info = local_log(name, Path(entry.path), status)
                    if info is not None:
                        yield info
        except FileNotFoundError:
            return


def newest_first(log: LogInfo) -> tuple[int, str]:
    """Return the sort key of a list of logs."""
    return -log.modified_ns, log.recording_id


def recording_id_in(name: str) -> str | None:
    """Return the recording id in a log's file name; None for other files."""
    recording_id = name.removesuffix(SUFFIX)
    return recording_id if name != recording_id and is_recording_id(recording_id) else None


def local_log(recording_id: str, path: Path, status: os.stat_result) -> LocalLog | None:
    """Return a log by its file's status; None if it is not a regular file."""
    if not stat.S_ISREG(status.st_mode):
        return None
    return LocalLog(
        recording_id=recording_id,
        path=path,
        inode=status.st_ino,
        file_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
    )


# -- retention -------------------------------------------------------------------------------------


FRESH_S: Final = 60.0
"""A new log may not be locked yet, or cannot be without locks; and a client may want to see it."""

Cause = Literal["age", "size"]


@attrs.frozen(kw_only=True)
class Retention:
    """What to keep: maximum age, and total size after removing the oldest; None: no limit."""

    age_s_max: float | None = None
    bytes_max: int | None = None


@attrs.frozen(kw_only=True)
class Removal:
    """A log that was removed, or would be."""

    info: LogInfo
    cause: Cause


@attrs.frozen(kw_only=True)
class Failure:
    """A log that could not be removed, and the system's reason."""

    info: LogInfo
    reason: str


@attrs.frozen(kw_only=True)
class Pruned:
    """The result of a removal, or of a dry run.

    Attributes:
        removed: the oldest first.
        held_logs: number of logs due but being written, just written, or held back.
    """

    removed: tuple[Removal, ...]
    failed: tuple[Failure, ...]
    held_logs: int
    kept_logs: int
    kept_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Total size of the removed logs."""
        return sum(removal.info.file_bytes for removal in self.removed)


@attrs.frozen(kw_only=True)
class RetentionStatistics:
    """Logs at the last count, `file_bytes` in total; since the start, removed logs by cause."""

    logs: int = 0
    file_bytes: int = 0
    removed: Mapping[Cause, int] = attrs.field(factory=dict)
    removed_bytes: int = 0
    failures: int = 0

    def after(self, done: Pruned) -> RetentionStatistics:
        """Count once more."""
        removed = Counter[Cause](self.removed)
        removed.update(removal.cause for removal in done.removed)
        return RetentionStatistics(
            logs=done.kept_logs,
            file_bytes=done.kept_bytes,
            removed=removed,
            removed_bytes=self.removed_bytes + done.freed_bytes,
            failures=self.failures + len(done.failed),
        )


def prune(
    store: Logs,
    retention: Retention,
    *,
    now_s: float,
    dry_run: bool = False,
    may_go: Callable[[LogInfo], bool] = lambda _: True,
) -> Pruned:
    """Remove logs beyond `retention`, or with `dry_run` only report them.

    `now_s` is Unix time; `may_go` is asked about each log that is due, and may block. May
    raise `OSError`.
    """
    logs = sorted(store.logs(), key=lambda info: (info.modified_ns, info.recording_id))
    removed: list[Removal] = []
    failed: list[Failure] = []
    left_bytes, held = sum(info.file_bytes for info in logs), 0
    for info in logs:
        cause = _cause(info, retention, now_s, left_bytes)
        if cause is None:
            break  # all later ones are younger
        try:
            # A log that is or may be being written; a future time counts as equally old.
            is_used = abs(now_s - info.modified_s) < FRESH_S or info.is_held()
            if is_used or not may_go(info):
                held += 1
                continue
            if not dry_run:
                store.remove(info)
        except FileNotFoundError:
            pass  # another process removed it
        except OSError as error:
            failed.append(Failure(info=info, reason=error.strerror or str(error)))
            continue
        left_bytes -= info.file_bytes
        removed.append(Removal(info=info, cause=cause))
    return Pruned(
        removed=tuple(removed),
        failed=tuple(failed),
        held_logs=held,
        kept_logs=len(logs) - len(removed),
        kept_bytes=left_bytes,
    )


def _cause(info: LogInfo, retention: Retention, now_s: float, left_bytes: int) -> Cause | None:
    """Return why the oldest remaining log should go; None if it may stay."""
    if retention.age_s_max is not None and now_s - info.modified_s > retention.age_s_max:
        return "age"
    if retention.bytes_max is not None and left_bytes > retention.bytes_max:
        return "size"
    return None
