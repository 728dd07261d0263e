"""The list of a place's logs, newest first, reading only new and changed ones.

Rules: a log without `fin` is checked for its writer each time; while it is written, it stays out of
the index. A `Listing` holds about 1 KB per log; any thread may use it, one at a time. Stored logs
are read several at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import attrs

from .index import Entry, Index
from .remote import StoredLog, StoreError
from .store import LogInfo, Logs, Store
from .summary import State, Summary, as_of_now, summarize

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
            self._forget(logs)
            self._read(self._unread(logs), on_read)
            told = [as_of_now(it.summary, it.info) for it in self._entries.values()]
        return tuple(sorted(told, key=lambda it: (-it.listed_ms, it.recording_id)))

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

    def _unread(self, logs: dict[str, LogInfo]) -> list[LogInfo]:
        assert self._entries is not None
        known = self._entries
        return [
            info
            for name, info in logs.items()
            if (entry := known.get(name)) is None or entry.info != info
        ]

    def _read(self, unread: Sequence[LogInfo], on_read: OnRead | None) -> None:
        assert self._entries is not None
        fresh: list[Entry] = []
        for count, entry in enumerate(_entries_of(unread), start=1):
            if entry is not None:
                self._entries[entry.info.recording_id] = entry
                fresh += [] if _is_open(entry) else [entry]
            if fresh and (len(fresh) == SAVED_LOGS or count == len(unread)):
                self._save(fresh, ())
                fresh = []
            if on_read is not None:
                on_read(count, len(unread))

    def _save(self, fresh: Sequence[Entry], gone: Sequence[str]) -> None:
        if self.index is not None:
            self.index.save(fresh, gone)

    def _forget(self, logs: dict[str, LogInfo]) -> None:
        assert self._entries is not None
        gone = self._entries.keys() - logs.keys()
        if gone:
            self._save((), tuple(gone))
            self._entries = {name: it for name, it in self._entries.items() if name not in gone}


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


def _is_open(entry: Entry) -> bool:
    return as_of_now(entry.summary, entry.info).state == "open"


def page_of(
    summaries: Sequence[Summary], wanted: Wanted, *, limit: int, after: str | None = None
) -> tuple[list[Summary], str | None]:
    """Take one page of at most `limit` from a list of `Listing.refresh`.

    `after` is the end of the previous page (None: the first page); another value is a `ValueError`.
    Returns the page, and its end; None if it is the last page.
    """
    rest = _following(summaries, after) if after is not None else iter(summaries)
    found = [it for it in rest if wanted.takes(it)]
    page = found[:limit]
    return page, _place_of(page[-1]) if page and len(found) > limit else None


def _following(summaries: Sequence[Summary], after: str) -> Iterator[Summary]:
    """Yield everything after a place; the log at that place may have gone."""
    listed, _, recording_id = after.partition(".")
    place = (-int(listed), recording_id)
    return (it for it in summaries if (-it.listed_ms, it.recording_id) > place)


def _place_of(summary: Summary) -> str:
    return f"{summary.listed_ms}.{summary.recording_id}"
