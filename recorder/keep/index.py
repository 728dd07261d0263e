"""A cache of log summaries in each directory, so that a listing need not read every log again.

Rules: an SQLite entry is valid while the file's name, inode, size and modification time are the
same. The index may be deleted, unreadable or shared; without it a listing is only slower.

An entry may have a digest: what was made of the whole log, which takes seconds. It has the words of
users, so it goes with its log (`forgetting`), and its place in the file is overwritten.
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

from ..format.format import MIB
from ..write.disk import FILE_MODE
from .forgetting import INDEX_NAME, prepare
from .store import LogInfo
from .summary import Summary

T = TypeVar("T")

INDEX_VERSION: Final = 4
"""Version of the table and of the summaries; an index of another version is discarded."""
_SAME: Final = "recording_id = ? AND inode = ? AND file_bytes = ? AND modified_ns = ?"
_SUMMARIES: Final = "SELECT recording_id, inode, file_bytes, modified_ns, summary FROM logs"
_DROP: Final = "DELETE FROM logs WHERE recording_id = ?"
_DROP_WORDS: Final = "UPDATE logs SET digest = NULL WHERE recording_id = ? AND digest IS NOT NULL"
BUSY_WAIT_S: Final = 1.0
"""Far longer than another process writes its changes; after it, continue without the index."""
_TABLE: Final = """
CREATE TABLE logs (
    recording_id TEXT PRIMARY KEY, inode INTEGER, file_bytes INTEGER, modified_ns INTEGER,
    summary BLOB, digest BLOB
) WITHOUT ROWID
"""
_DIGESTS: Final = """
CREATE INDEX digests ON logs (modified_ns, length(digest)) WHERE digest IS NOT NULL
"""
DIGEST_BYTES_MAX: Final = 256 * 1024
"""Of a digest that is kept: hours of speech."""
DIGESTS_BYTES_MAX: Final = 256 * MIB
"""Of all: 50,000 conversations of some minutes."""
DROPPED_DIGESTS: Final = 100
"""Digests of the oldest logs that make room at once."""


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
        """Return the entries still valid for `logs`, keyed by id; empty without an index.

        What is kept of other logs goes: they were removed by other means. Those of an object store
        lose only their digests, as it may be away.
        """
        drop = _DROP if self._path.name == INDEX_NAME else _DROP_WORDS
        return self._use(lambda database: _known(database, logs, drop)) or {}

    def save(self, changed: Sequence[Entry], gone: Sequence[str]) -> None:
        """Store new entries and drop those of ids in `gone`; failures are ignored."""
        with suppress(OSError):
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
            self._use(lambda database: _write(database, changed, gone))

    def digest_of(self, info: LogInfo, made_by: str) -> bytes | None:
        """Return the digest of a log, if this version of its maker made it of the file as it is."""
        query = f"SELECT digest FROM logs WHERE {_SAME}"
        rows = self._use(lambda database: database.execute(query, _key(info)).fetchall())
        digest, head = rows[0][0] if rows else None, f"{made_by}\n".encode()
        if not isinstance(digest, bytes) or not digest.startswith(head):
            return None
        return digest[len(head) :]

    def keep_digest(self, info: LogInfo, made_by: str, digest: bytes) -> None:
        """Keep the digest of a listed log; failures are ignored."""
        if len(digest) <= DIGEST_BYTES_MAX:
            kept = f"{made_by}\n".encode() + digest
            self._use(lambda database: _keep(database, info, kept))

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run `work` on the database; None if that fails, or there is none."""
        if not self._path.is_file():
            return None
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_WAIT_S)) as database, database:
                prepare(database)
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


def _known(
    database: sqlite3.Connection, logs: Mapping[str, LogInfo], drop: str
) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    if _version(database) == INDEX_VERSION:
        rows = database.execute(_SUMMARIES).fetchall()
        with suppress(sqlite3.OperationalError):  # it is busy or read-only
            database.executemany(drop, [row[:1] for row in rows if row[0] not in logs])
        for recording_id, *key, told in rows:
            info = logs.get(recording_id)
            if info is not None and key == [info.inode, info.file_bytes, info.modified_ns]:
                summary = Summary(**orjson.loads(told))
                found[recording_id] = Entry(info=info, summary=summary)
    return found


def _write(database: sqlite3.Connection, changed: Sequence[Entry], gone: Sequence[str]) -> None:
    if _version(database) == 0:
        database.execute(_TABLE)
        database.execute(_DIGESTS)
        database.execute(f"PRAGMA user_version = {INDEX_VERSION}")
    database.executemany(_DROP, ((it,) for it in gone))
    database.executemany("REPLACE INTO logs VALUES (?, ?, ?, ?, ?, NULL)", map(_row, changed))


def _keep(database: sqlite3.Connection, info: LogInfo, digest: bytes) -> None:
    database.execute(f"UPDATE logs SET digest = ? WHERE {_SAME}", (digest, *_key(info)))
    ((kept,),) = database.execute("SELECT sum(length(digest)) FROM logs WHERE digest IS NOT NULL")
    if (kept or 0) > DIGESTS_BYTES_MAX:
        oldest = "SELECT recording_id FROM logs WHERE digest IS NOT NULL ORDER BY modified_ns"
        drop = f"UPDATE logs SET digest = NULL WHERE recording_id IN ({oldest} LIMIT ?)"
        database.execute(drop, (DROPPED_DIGESTS,))


def _key(info: LogInfo) -> tuple[str, int, int, int]:
    return info.recording_id, info.inode, info.file_bytes, info.modified_ns


def _row(entry: Entry) -> tuple[str, int, int, int, bytes]:
    return (*_key(entry.info), orjson.dumps(attrs.asdict(entry.summary)))
