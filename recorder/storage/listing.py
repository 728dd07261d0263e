"""The list of a place's logs, newest first, reading only new and changed ones; and its index.

Rules:
- A log without `fin` is checked for its writer each time; while it is written, it stays out of the
  index. A `Listing` holds about 1 KB per log; any thread may use it, one at a time. Stored logs are
  read several at once.
- The index is a cache of summaries in the directory. An SQLite entry is valid while the file's
  name, inode, size and modification time are the same. It may be deleted, unreadable or shared;
  without it a listing is only slower.
- An entry may have a digest: what was made of the whole log, which takes seconds. It has the words
  of users, so it goes with its log (`store.forget`), and its place in the file is overwritten.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeVar

import attrs
import orjson

from ..format.format import MIB
from ..write.disk import FILE_MODE
from .remote import StoredLog, StoreError
from .store import INDEX_NAME, LogInfo, Logs, Store, prepare
from .summary import State, Summary, as_of_now, summarize

# -- the index -------------------------------------------------------------------------------------


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
        """Run `work` on the database; None if that fails, or without a database."""
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
        for recording_id, *key, summary_json in rows:
            info = logs.get(recording_id)
            if info is not None and key == [info.inode, info.file_bytes, info.modified_ns]:
                summary = Summary(**orjson.loads(summary_json))
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


# -- the list --------------------------------------------------------------------------------------


SAVED_LOGS: Final = 1_000
"""New logs are saved to the index in batches of this size, so an interrupted run resumes there."""
READERS: Final = 16
"""Stored logs read at once: two requests each, which mostly wait."""

OnRead = Callable[[int, int], None]
"""Takes the number of logs read so far and the number to read."""


@attrs.frozen(kw_only=True)
class Wanted:
    """Filter for logs; None accepts all.

    `since_ms`: sessions that began at this Unix time or later. `owner`: name of a key; empty:
    sessions without a key. `session`: id of a session or of its recording.
    """

    since_ms: int | None = None
    mode: str | None = None
    owner: str | None = None
    state: State | None = None
    reason: str | None = None
    session: str | None = None

    def takes(self, summary: Summary) -> bool:
        """Whether a log passes the filter."""
        return (
            (self.since_ms is None or summary.listed_ms >= self.since_ms)
            and self.mode in {None, summary.mode}
            and self.owner in {None, summary.owner}
            and self.state in {None, summary.state}
            and self.reason in {None, summary.reason}
            and (self.session is None or summary.is_named(self.session))
        )


class Listing:
    """The logs of one place; by default a directory has an index, and other places have none.

    `index`: where its entries are kept; None for no index.
    """

    def __init__(self, store: Logs, index: Index | None = None) -> None:
        self._store = store
        self.index: Final = Index(store.directory) if isinstance(store, Store) else index
        self._entries: dict[str, Entry] | None = None
        self._lock = threading.Lock()

    def refresh(self, on_read: OnRead | None = None) -> tuple[Summary, ...]:
        """List the logs as they are now, newest first; `OSError` if the place is unreadable."""
        with self._lock:
            logs: dict[str, LogInfo] = {info.recording_id: info for info in self._store.logs()}
            if self._entries is None:
                self._entries = {} if self.index is None else self.index.load(logs)
            self._entries = known = self._without(self._entries, logs)
            unread = [
                info
                for name, info in logs.items()
                if (entry := known.get(name)) is None or entry.info != info
            ]
            self._read(known, unread, on_read)
            summaries = [as_of_now(it.summary, it.info) for it in self._entries.values()]
        return tuple(sorted(summaries, key=lambda it: (-it.listed_ms, it.recording_id)))

    def find(self, recording_id: str) -> Entry | None:
        """Return one log and its current summary, or None; `recording_id` may be untrusted text."""
        info = self._store.find(recording_id)
        if info is None:
            return None
        entry = (self._entries or {}).get(recording_id)
        if entry is None or entry.info != info:
            entry = _entry_of(info)
        if entry is None:
            return None
        return attrs.evolve(entry, summary=as_of_now(entry.summary, info))

    def _read(
        self, known: dict[str, Entry], unread: Sequence[LogInfo], on_read: OnRead | None
    ) -> None:
        fresh: list[Entry] = []
        for count, entry in enumerate(_entries_of(unread), start=1):
            if entry is not None:
                known[entry.info.recording_id] = entry
                is_open = as_of_now(entry.summary, entry.info).state == "open"
                fresh += [] if is_open else [entry]
            if fresh and (len(fresh) == SAVED_LOGS or count == len(unread)):
                self._save(fresh, ())
                fresh = []
            if on_read is not None:
                on_read(count, len(unread))

    def _save(self, fresh: Sequence[Entry], gone: Sequence[str]) -> None:
        if self.index is not None:
            self.index.save(fresh, gone)

    def _without(self, known: dict[str, Entry], logs: dict[str, LogInfo]) -> dict[str, Entry]:
        """Forget the entries of logs that are gone."""
        gone = known.keys() - logs.keys()
        if gone:
            self._save((), tuple(gone))
        return {name: it for name, it in known.items() if name not in gone} if gone else known


def _entries_of(unread: Sequence[LogInfo]) -> Iterator[Entry | None]:
    """Yield the entry of each log, of stored ones last; None for a log that is gone."""
    stored = [info for info in unread if isinstance(info, StoredLog)]
    yield from (_entry_of(info) for info in unread if not isinstance(info, StoredLog))
    if stored:
        with ThreadPoolExecutor(READERS) as readers:
            # Few are begun ahead: a store that fails, or a process that ends, waits for those.
            for start in range(0, len(stored), READERS):
                yield from readers.map(_entry_of, stored[start : start + READERS])


def _entry_of(info: LogInfo) -> Entry | None:
    try:
        return Entry(info=info, summary=summarize(info))
    except StoreError:
        raise
    except OSError:  # gone meanwhile, or not ours to read
        return None


def page_of(
    summaries: Sequence[Summary], wanted: Wanted, *, limit: int, after: str | None = None
) -> tuple[list[Summary], str | None]:
    """Take one page of at most `limit` from a list of `Listing.refresh`.

    `after` is the end of the previous page (None: the first page); another value is a `ValueError`.
    Returns the page, and its end; None if it is the last page.
    """
    rest: Iterable[Summary] = summaries
    if after is not None:  # the log at that place may have gone
        listed, _, recording_id = after.partition(".")
        place = (-int(listed), recording_id)
        rest = (it for it in summaries if (-it.listed_ms, it.recording_id) > place)
    found = [it for it in rest if wanted.takes(it)]
    page, is_last = found[:limit], len(found) <= limit
    return page, None if is_last or not page else f"{page[-1].listed_ms}.{page[-1].recording_id}"
