"""A cache of log summaries in each directory, so that a listing need not read every log again.

Rules: an SQLite entry is valid while the file's name, inode, size and modification time are the
same. The index may be deleted, unreadable or shared; without it a listing is only slower.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeVar

import attrs
import orjson

from ..write.disk import FILE_MODE
from .store import LogInfo
from .summary import Summary

T = TypeVar("T")

INDEX_NAME: Final = ".index.sqlite"
"""Hidden, and not a valid log name."""
WITH_STORE_NAME: Final = ".index-with-store.sqlite"
"""The index of the directory's logs and of those in an object store: other logs are not dropped."""
INDEX_VERSION: Final = 3
"""Version of the table and of the summaries; an index of another version is discarded."""
BUSY_WAIT_S: Final = 1.0
"""Far longer than another process writes its changes; after it, continue without the index."""
_TABLE: Final = """
CREATE TABLE logs (
    recording_id TEXT PRIMARY KEY, inode INTEGER, file_bytes INTEGER, modified_ns INTEGER,
    summary BLOB
) WITHOUT ROWID
"""


@attrs.frozen(kw_only=True)
class Entry:
    """A log's summary, and its file's state when it was read."""

    info: LogInfo
    summary: Summary


class Index:
    """An index in one directory."""

    def __init__(self, directory: Path, name: str = INDEX_NAME) -> None:
        self._path = directory / name

    def load(self, logs: Mapping[str, LogInfo]) -> dict[str, Entry]:
        """Return the entries still valid for `logs`, keyed by id; empty without an index."""
        if not self._path.is_file():
            return {}
        return self._use(lambda database: _known(database, logs)) or {}

    def save(self, changed: Sequence[Entry], gone: Sequence[str]) -> None:
        """Store new entries and drop those of ids in `gone`; failures are ignored."""
        with suppress(OSError):
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
            self._use(lambda database: _write(database, changed, gone))

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run `work` on the database; None if that fails."""
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_WAIT_S)) as database, database:
                database.execute("PRAGMA synchronous = OFF")  # the index may be lost in a power cut
                if _version(database) not in {0, INDEX_VERSION}:
                    raise sqlite3.DatabaseError("another version made it")
                return work(database)
        except sqlite3.OperationalError:
            return None  # it is busy or read-only: keep it
        except (sqlite3.DatabaseError, TypeError, ValueError):
            with suppress(OSError):  # not our index: make it again
                self._path.unlink()
            return None


def _version(database: sqlite3.Connection) -> int:
    ((version,),) = database.execute("PRAGMA user_version")
    return int(version)


def _known(database: sqlite3.Connection, logs: Mapping[str, LogInfo]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    if _version(database) == INDEX_VERSION:
        for recording_id, *key, told in database.execute("SELECT * FROM logs"):
            info = logs.get(recording_id)
            if info is not None and key == [info.inode, info.file_bytes, info.modified_ns]:
                summary = Summary(**orjson.loads(told))
                found[recording_id] = Entry(info=info, summary=summary)
    return found


def _write(database: sqlite3.Connection, changed: Sequence[Entry], gone: Sequence[str]) -> None:
    if _version(database) == 0:
        database.execute(_TABLE)
        database.execute(f"PRAGMA user_version = {INDEX_VERSION}")
    database.executemany("DELETE FROM logs WHERE recording_id = ?", ((it,) for it in gone))
    database.executemany("REPLACE INTO logs VALUES (?, ?, ?, ?, ?)", map(_row, changed))


def _row(entry: Entry) -> tuple[str, int, int, int, bytes]:
    info, told = entry.info, orjson.dumps(attrs.asdict(entry.summary))
    return info.recording_id, info.inode, info.file_bytes, info.modified_ns, told
