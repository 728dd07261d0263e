"""What is known of the logs of a directory, kept beside them so that nobody reads them all again.

Rules: the index is a cache in SQLite and nothing else. What it says of a log counts for as long as
the file has the name, the inode, the size and the time that it had when it was read. It may be
deleted at any time, and where it cannot be read or written a listing works without it, only slower.
Several processes may use one.

It reads no logs, and decides nothing about them.
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

from .disk import FILE_MODE
from .store import LogInfo
from .summary import Summary

T = TypeVar("T")

INDEX_NAME: Final = ".index.sqlite"
"""Hidden, and no name of a log."""
INDEX_VERSION: Final = 3
"""Of its table and of what a summary holds; another one is thrown away."""
BUSY_WAIT_S: Final = 1.0
"""Another process writes its changes in a part of that; who waits longer goes without."""
_TABLE: Final = """
CREATE TABLE logs (
    recording_id TEXT PRIMARY KEY, inode INTEGER, file_bytes INTEGER, modified_ns INTEGER,
    summary BLOB
) WITHOUT ROWID
"""


@attrs.frozen(kw_only=True)
class Entry:
    """What is known of one log.

    Attributes:
        info: the file, as it was when it was read.
        summary: what it said.
    """

    info: LogInfo
    summary: Summary


class Index:
    """The index of one directory.

    Args:
        directory: of the logs.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / INDEX_NAME

    def load(self, logs: Mapping[str, LogInfo]) -> dict[str, Entry]:
        """Give what is known of logs and still holds; nothing where there is no index.

        Args:
            logs: as they are now, by their ids.
        """
        if not self._path.is_file():
            return {}
        return self._use(lambda database: _known(database, logs)) or {}

    def save(self, changed: Sequence[Entry], gone: Sequence[str]) -> None:
        """Write what changed; where that cannot be done, it is not.

        Args:
            changed: what is new, or was read again.
            gone: ids of logs that are there no more.
        """
        with suppress(OSError):
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
            self._use(lambda database: _write(database, changed, gone))

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Do something with the database; None where that cannot be done."""
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_WAIT_S)) as database, database:
                database.execute("PRAGMA synchronous = OFF")  # a power cut may cost the index
                if _version(database) not in {0, INDEX_VERSION}:
                    raise sqlite3.DatabaseError("another version made it")
                return work(database)
        except sqlite3.OperationalError:
            return None  # it is busy, or may not be written: it stays as it is
        except (sqlite3.DatabaseError, TypeError, ValueError):
            with suppress(OSError):  # no index, or one of something else: it is made anew
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
