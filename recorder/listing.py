"""The list of a directory's logs, newest first, without reading those that were read before.

Rules: a log is read again when its file changed. Whether one without `fin` is being written is
looked at each time, and while it is, it stays out of the index. Whoever holds a `Listing` has all
of it in memory, about a kilobyte a log; any thread may use it, one at a time.

It decides nothing about who may see what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs

from .index import Entry, Index
from .store import LogInfo, Store
from .summary import State, Summary, as_of_now, summarize

SAVED_LOGS: Final = 1_000
"""Of many that are new, so many go into the index together: who is interrupted goes on there."""

OnRead = Callable[[int, int], None]
"""Is told how many logs were read, of how many that must be."""


@attrs.frozen(kw_only=True)
class Wanted:
    """Which logs are asked for; None asks for all.

    Attributes:
        since_ms: sessions that began at this Unix time or later.
        mode: of what was asked for.
        owner: the name of a key; empty: those that came without one.
        state: of the log.
        reason: why the session ended.
        session: the id of a session, or of its recording.
    """

    since_ms: int | None = None
    mode: str | None = None
    owner: str | None = None
    state: State | None = None
    reason: str | None = None
    session: str | None = None

    def takes(self, summary: Summary) -> bool:
        """Whether a log is one of them."""
        return (
            (self.since_ms is None or summary.listed_ms >= self.since_ms)
            and self.mode in {None, summary.mode}
            and self.owner in {None, summary.owner}
            and self.state in {None, summary.state}
            and self.reason in {None, summary.reason}
            and (self.session is None or summary.is_named(self.session))
        )


class Listing:
    """The logs of one directory.

    Args:
        store: the directory.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = Index(store.directory)
        self._entries: dict[str, Entry] | None = None
        self._lock = threading.Lock()

    def refresh(self, on_read: OnRead | None = None) -> tuple[Summary, ...]:
        """List the logs as they are now, the newest first.

        Args:
            on_read: is told of each log that must be read.

        Raises:
            OSError: the directory cannot be read.
        """
        with self._lock:
            logs = {info.recording_id: info for info in self._store.logs()}
            if self._entries is None:
                self._entries = self._index.load(logs)
            self._forget(logs)
            self._read(self._unread(logs), on_read)
            told = [as_of_now(it.summary, it.info) for it in self._entries.values()]
        return tuple(sorted(told, key=lambda it: (-it.listed_ms, it.recording_id)))

    def find(self, recording_id: str) -> Summary | None:
        """Tell of one log as it is now; None where there is none.

        Args:
            recording_id: a client's own text.
        """
        info = self._store.find(recording_id)
        if info is None:
            return None
        entry = (self._entries or {}).get(recording_id)
        if entry is None or entry.info != info:
            entry = _entry_of(info)
        return None if entry is None else as_of_now(entry.summary, info)

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
        for count, info in enumerate(unread, start=1):
            entry = _entry_of(info)
            if entry is not None:
                self._entries[info.recording_id] = entry
                fresh += [] if _is_open(entry) else [entry]
            if fresh and (len(fresh) == SAVED_LOGS or count == len(unread)):
                self._index.save(fresh, ())
                fresh = []
            if on_read is not None:
                on_read(count, len(unread))

    def _forget(self, logs: dict[str, LogInfo]) -> None:
        assert self._entries is not None
        gone = self._entries.keys() - logs.keys()
        if gone:
            self._index.save((), tuple(gone))
            self._entries = {name: it for name, it in self._entries.items() if name not in gone}


def _entry_of(info: LogInfo) -> Entry | None:
    try:
        return Entry(info=info, summary=summarize(info))
    except OSError:  # gone meanwhile, or not ours to read
        return None


def _is_open(entry: Entry) -> bool:
    return as_of_now(entry.summary, entry.info).state == "open"


def page_of(
    summaries: Sequence[Summary], wanted: Wanted, *, limit: int, after: str | None = None
) -> tuple[list[Summary], str | None]:
    """Take one page of a list.

    Args:
        summaries: as `Listing.refresh` gave them.
        wanted: which.
        limit: how many at most.
        after: where the page before ended, as that page said; None begins at the first.

    Returns:
        The page, and where it ended; None where nothing follows.

    Raises:
        ValueError: `after` is no end of a page.
    """
    rest = _following(summaries, after) if after is not None else iter(summaries)
    found = [it for it in rest if wanted.takes(it)]
    page = found[:limit]
    return page, _place_of(page[-1]) if page and len(found) > limit else None


def _following(summaries: Sequence[Summary], after: str) -> Iterator[Summary]:
    """Yield what follows a place; what stood there may be gone."""
    listed, _, recording_id = after.partition(".")
    place = (-int(listed), recording_id)
    return (it for it in summaries if (-it.listed_ms, it.recording_id) > place)


def _place_of(summary: Summary) -> str:
    return f"{summary.listed_ms}.{summary.recording_id}"
