"""The list of a place's logs, newest first, reading only new and changed ones; and its index.

Rules:
- A summary is read only from a log's head and tail, so that all logs cost the same. A log with
  `fin` at its end is `finished`, whatever damage precedes it (`recorder.repair.verify` finds it).
  A log without is `crashed`, or `open` while its writer holds it; without a session record it is
  `unreadable`.
  Without `fin`, duration and units come from the last records in the tail. Values' types are
  checked; content beyond `ENDS_COST_MAX` at either end counts as damaged.
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
from typing import Any, Final, Literal, TypeVar

import attrs
import orjson

from protocol.values.records import derive_id

from ..format import format as layout
from ..read.reader import end_of_blocks, find_head, records_of, unit_index
from ..read.scan import Source, load_block
from ..write.files import FILE_MODE
from .remote import StoredLog, StoreError
from .store import INDEX_NAME, LogInfo, Logs, Store, prepare

# -- the summary of a log --------------------------------------------------------------------------


State = Literal["open", "finished", "crashed", "unreadable"]
"""`open`: being written; `crashed`: its writer died, or its disk failed, before its end."""

START_BYTES: Final = layout.HEAD_BYTES_MAX + layout.BLOCK_BYTES
"""The first block, and usually the second: the session record and its copy."""
ENDS_COST_MAX: Final = 16 * layout.MIB
"""Expansion limit of either end: 0.1 s of work, four times the largest session record."""
TRIES_MAX: Final = 64
"""Invalid blocks skipped at either end: a crash damages one or two, a bad disk some."""
FIN_BYTES: Final = 8 << 10
"""`fin` and its header take some hundred bytes."""
TAIL_BYTES: Final = layout.BLOCK_BYTES + layout.MIB // 8
"""A block is usually smaller than `BLOCK_BYTES`, so the last complete one is in here."""
TEXT_CHARS_MAX: Final = 256
"""Names of modes, dialects, keys and reasons are shorter, and usually a model's folder is."""
WALL_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, the limit of calendar libraries."""
_NS_PER_MS: Final = 1_000_000


@attrs.frozen(kw_only=True)
class Summary:
    """A log as it is listed; None where its file does not say.

    Attributes:
        session_id: as the session's client and the server's log know it.
        began_ms: Unix milliseconds of the session's start.
        duration_ms: from the start to the last record.
        dialect: the wire protocol; only in logs with `fin`.
        owner: the name of the client's key; empty without one.
        model: as the server was told to load it.
        chunks: seconds transcribed; only in logs with `fin`.
        modified_ms: Unix milliseconds when it last grew.
    """

    recording_id: str
    session_id: str | None = None
    state: State
    began_ms: int | None = None
    duration_ms: int | None = None
    mode: str | None = None
    dialect: str | None = None
    owner: str = ""
    model: str | None = None
    reason: str | None = None
    units: int | None = None
    turns: int | None = None
    chunks: int | None = None
    file_bytes: int
    modified_ms: int

    def is_named(self, name: str) -> bool:
        """Whether `name` is an id of the recording or session; `rt_` and its start in 000.

        A 002 client's own name is not known here.
        """
        started = None if self.began_ms is None else f"rt_{self.began_ms}"
        duplex = derive_id(self.recording_id, "duplex", 0)
        return name in {self.recording_id, self.session_id, started, duplex}

    @property
    def listed_ms(self) -> int:
        """The sort key of a listing: the session's start, or else the file's last growth."""
        return self.modified_ms if self.began_ms is None else self.began_ms


def summarize(info: LogInfo) -> Summary:
    """Summarize a log, never as `open`; only an unreadable file (`OSError`) makes it raise."""
    known = Summary(
        recording_id=info.recording_id,
        state="unreadable",
        file_bytes=info.file_bytes,
        modified_ms=info.modified_ns // _NS_PER_MS,
    )
    source = info.open()
    try:
        head, _ = find_head(_Start(source), _ends_expansion(), tries_max=TRIES_MAX)
        known = _with_head(known, head.fields)
        ends = _ends_expansion()
        last = next(_last_blocks(source, FIN_BYTES, ends), None)
        if last is not None and last[0].kind == "fin":  # the only record of its block
            return _with_fin(known, last[0])
        return _with_tail(known, source, ends)
    except layout.RecorderError:
        return known
    finally:
        source.close()


def as_of_now(summary: Summary, info: LogInfo) -> Summary:
    """Set `open` on the summary of a log that is being written."""
    if summary.state == "finished":
        return summary
    try:
        return attrs.evolve(summary, state="open") if info.is_held() else summary
    except OSError:  # gone meanwhile, or not readable: unchanged
        return summary


def whole_bytes(source: Source) -> int:
    """Return the end of the last complete block, up to which a growing log may be served."""
    size = source.size()
    end = size
    while end > 0:
        start = max(0, end - layout.MIB)
        data = source.read(start, min(size, end + layout.HEADER_BYTES) - start)
        found = data.rfind(layout.MARK, 0, end - start + len(layout.MARK) - 1)
        while found >= 0:
            offset = start + found
            try:
                header = layout.unpack_header(data[found : found + layout.HEADER_BYTES])
            except layout.FormatError:
                found = data.rfind(layout.MARK, 0, found)  # truncated in its header
                continue
            after = offset + layout.HEADER_BYTES + header.compressed_len
            return after if after <= size else offset
        end = start
    return 0


def _ends_expansion() -> layout.Expansion:
    return layout.Expansion(int, allowance=ENDS_COST_MAX)


# -- the head --------------------------------------------------------------------------------------


@attrs.frozen
class _Start:
    log: Source

    def size(self) -> int:
        return min(self.log.size(), START_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        return self.log.read(offset, min(count, max(0, START_BYTES - offset)))


def _with_head(known: Summary, fields: layout.Fields) -> Summary:
    found = fields.get("config")
    config: layout.Fields = found if isinstance(found, dict) else {}
    began_ms = _count(fields.get("wall_ms"))
    named: dict[str, Any] = {name: _text(config.get(name)) for name in ("mode", "model")}
    return attrs.evolve(
        known,
        began_ms=began_ms if began_ms is not None and began_ms <= WALL_MS_MAX else None,
        session_id=session_id_in(fields),
        owner=_text(config.get("owner")) or "",
        **named,
    )


def session_id_in(head: layout.Fields) -> str | None:
    """Return the session id in a head's fields, if it is a short text."""
    return _text(head.get("session_id"))


def _text(value: layout.Value) -> str | None:
    """Accept a short text that is safe on any terminal."""
    if isinstance(value, str) and len(value) <= TEXT_CHARS_MAX and value.isprintable():
        return value
    return None


def _count(value: layout.Value) -> int | None:
    """Accept a count of up to 63 bits, the range of the index."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


# -- the tail --------------------------------------------------------------------------------------


def _last_blocks(
    source: Source, window_bytes: int, expansion: layout.Expansion
) -> Iterator[list[layout.Record]]:
    """Yield the records of blocks in a log's last bytes, last block first; blobs unresolved."""
    end = end_of_blocks(source)
    start = max(0, end - window_bytes)
    data = source.read(start, end - start)
    found, tries = data.rfind(layout.MARK), 0
    while found >= 0 and tries < TRIES_MAX:
        try:
            records = list(records_of(load_block(source, start + found, expansion), expansion))
        except layout.FormatError:  # damaged or incomplete
            records = []
        if records:
            yield records
        else:
            tries += 1
        found = data.rfind(layout.MARK, 0, found)


def _with_fin(known: Summary, fin: layout.Record) -> Summary:
    fields = fin.fields
    found: dict[str, Any] = {name: _text(fields.get(name)) for name in ("dialect", "reason")}
    found |= {name: _count(fields.get(name)) for name in ("units", "turns", "chunks")}
    duration_ms = fin.at_ns // _NS_PER_MS
    return attrs.evolve(known, state="finished", duration_ms=duration_ms, **found)


def _with_tail(known: Summary, source: Source, expansion: layout.Expansion) -> Summary:
    """Fill in from the last records, back to the last unit's."""
    known = attrs.evolve(known, state="crashed")
    for records in _last_blocks(source, TAIL_BYTES, expansion):
        last = records[-1]
        if known.duration_ms is None:
            if last.kind == "fin":  # before an incomplete seek table
                return _with_fin(known, last)
            known = attrs.evolve(known, duration_ms=last.at_ns // _NS_PER_MS)
        units = [unit for record in records if (unit := unit_index(record)) is not None]
        if units:
            return attrs.evolve(known, units=units[-1] + 1)
    return known


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
DIGESTS_BYTES_MAX: Final = 256 * layout.MIB
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
class LogFilter:
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
    summaries: Sequence[Summary], log_filter: LogFilter, *, limit: int, after: str | None = None
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
    found = [it for it in rest if log_filter.takes(it)]
    page, is_last = found[:limit], len(found) <= limit
    return page, None if is_last or not page else f"{page[-1].listed_ms}.{page[-1].recording_id}"
