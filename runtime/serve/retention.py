"""Keeps recordings within the operator's bounds, counts them, and copies them to a store.

Retention runs `antiphon recordings prune` at the start and every ten minutes, in a thread; without
bounds it only counts. A log that cannot be removed is reported, and tried again. With an object
store, a log stays until the store has it (`is_stored`).

The uploader copies the oldest finished recording first. Every `UPLOAD_PERIOD_S` it looks for logs
in the folder that the store does not have, by name and size: so the store itself says what is left
to do, also after a crash. A log is due when it has its end; one without an end, which a killed
server left, when it has not been written for `ABANDONED_S`. A log that changes afterwards, as by
`antiphon recordings compact`, replaces the stored one. After a failure the uploader waits, longer
each time, and begins again with the logs that have not failed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import attrs

from recorder.storage.listing import summarize
from recorder.storage.remote import RemoteStore
from recorder.storage.store import LocalLog, LogInfo, Retention, RetentionStatistics, Store, prune

from ..settings.settings import Settings

# -- uploads ---------------------------------------------------------------------------------------


T = TypeVar("T")

UPLOAD_PERIOD_S: Final = 10.0
"""A crash of the disk loses at most so many seconds of finished logs; a look is a list of files."""
ABANDONED_S: Final = 600.0
"""A log without an end may be written still where the file system has no locks."""
UPLOADS_MAX: Final = 2
"""At once: each reads a disk, and takes processor time from sessions for its hash."""
PAUSE_S: Final = 5.0
"""After the first failure; doubled with each further one."""
PAUSE_S_MAX: Final = 600.0
"""A store that was away for hours is used again soon; a log that never succeeds costs little."""

_logger = logging.getLogger("antiphon.server")


@attrs.frozen(kw_only=True)
class StoreStatistics:
    """Since the start: logs stored, their bytes, and failures; `waiting`: logs not stored yet."""

    uploaded: int = 0
    uploaded_bytes: int = 0
    failures: int = 0
    waiting: int = 0


class Uploader:
    """Uploads the logs of one folder; `clock` gives seconds since the epoch."""

    def __init__(
        self, directory: Path, remote: RemoteStore, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = Store(directory)
        self._remote = remote
        self._clock = clock
        self._stored: dict[str, int] | None = None
        self._verified: set[tuple[str, int]] = set()
        self._failed: Counter[str] = Counter()
        self._uploading: set[str] = set()
        self._changed = threading.Condition()
        self.statistics = StoreStatistics()

    async def run(self) -> None:
        """Upload what is due, now and then; runs until cancelled."""
        failures = 0
        while True:
            failures = 0 if await self.upload_due() else failures + 1
            await anyio.sleep(pause_s(failures) if failures else UPLOAD_PERIOD_S)

    async def upload_due(self) -> bool:
        """Upload what is due, until a failure; return whether there was none."""
        try:
            due = deque(await _in_thread(self._due))
        except OSError as error:
            self._note_failure(error)
            return False
        self.statistics = attrs.evolve(self.statistics, waiting=len(due))
        is_well = True

        async def work() -> None:
            nonlocal is_well
            while due and is_well:
                is_well = await _in_thread(partial(self._upload, due.popleft())) and is_well

        async with anyio.create_task_group() as tasks:
            for _ in range(UPLOADS_MAX):
                tasks.start_soon(work)
        return is_well

    async def finish(self) -> None:
        """After `run`, upload what is left; the caller bounds the time."""
        await _in_thread(self._wait)
        await self.upload_due()

    # -- in threads -------------------------------------------------------------------------------

    def is_stored(self, log: LogInfo) -> bool:
        """Whether the store has a log of the folder with the same bytes.

        A log that this process did not upload is read back. One that is missing is uploaded again.
        """
        assert isinstance(log, LocalLog)
        name, key = log.recording_id, (log.recording_id, log.file_bytes)
        if name in self._uploading:
            return False
        try:
            found = self._remote.find(log.recording_id)
            is_there = found is not None and found.file_bytes == log.file_bytes
            if is_there and (key in self._verified or self._remote.holds(log)):
                self._verified.add(key)
                if self._stored is not None:
                    self._stored[name] = log.file_bytes
                return True
        except OSError as error:
            self._note_failure(error)
            return False
        self._verified.discard(key)
        if self._stored is not None:
            self._stored.pop(name, None)
        return False

    def _due(self) -> list[LocalLog]:
        """List the logs to upload: those that failed come last, otherwise the oldest first."""
        if self._stored is None:
            self._stored = {log.recording_id: log.file_bytes for log in self._remote.logs()}
        logs = {log.recording_id: log for log in self._folder.logs()}
        self._stored = {name: size for name, size in self._stored.items() if name in logs}
        self._verified &= {(name, log.file_bytes) for name, log in logs.items()}
        now_s = self._clock()
        due = [log for name, log in logs.items() if self._stored.get(name) != log.file_bytes]
        due = [log for log in due if _is_complete(log, now_s)]
        return sorted(due, key=lambda log: (self._failed[log.recording_id], log.modified_ns))

    def _upload(self, log: LocalLog) -> bool:
        """Upload one log; False if that failed. It goes on where the server ends meanwhile."""
        name = log.recording_id
        with self._changed:
            self._uploading.add(name)
        try:
            is_stored = self._remote.put(log)
        except FileNotFoundError:  # it was removed in the meantime
            is_stored = False
        except OSError as error:
            self._failed[name] += 1
            self._note_failure(error)
            return False
        finally:
            with self._changed:
                self._uploading.discard(name)
                self._changed.notify_all()
        self._failed.pop(name, None)
        if is_stored:
            assert self._stored is not None
            self._stored[name] = log.file_bytes
            self._verified.add((name, log.file_bytes))
            self._count(uploaded=1, uploaded_bytes=log.file_bytes)
        self._count(waiting=-1)
        return True

    def _wait(self) -> None:
        """Wait for uploads whose tasks were cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: not self._uploading)

    def _note_failure(self, error: OSError) -> None:
        self._count(failures=1)
        _logger.error("recordings are not stored now: %s", error)

    def _count(self, **more: int) -> None:
        with self._changed:
            seen = attrs.asdict(self.statistics)
            counts = {name: seen[name] + added for name, added in more.items()}
            self.statistics = StoreStatistics(**seen | counts)


def make_uploader(settings: Settings, remote: RemoteStore | None) -> Uploader | None:
    """Make the uploader; None without a store, or where nothing is recorded."""
    if settings.record_to is None or remote is None:
        return None
    return Uploader(settings.record_to, remote)


def pause_s(failures: int) -> float:
    """The wait after so many failures in a row, in seconds; not equal, so that servers spread."""
    longest_s = min(PAUSE_S * 2.0 ** min(failures - 1, 16), PAUSE_S_MAX)
    return longest_s * random.uniform(0.5, 1.0)


def _is_complete(log: LocalLog, now_s: float) -> bool:
    try:
        if log.is_held():
            return False
        return now_s - log.modified_s > ABANDONED_S or summarize(log).state == "finished"
    except OSError:  # gone meanwhile
        return False


async def _in_thread(work: Callable[[], T]) -> T:
    # A store or a disk that hangs must not keep the server from ending.
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


# -- removal ---------------------------------------------------------------------------------------


PERIOD_S: Final = 600.0
"""Sixty-four speaking sessions record 6 GB in that time: a bound of size needs that room."""
DAY_S: Final = 86_400
MB: Final = 1_000_000


@attrs.define(eq=False)
class Retainer:
    """Keeps the recordings of one server.

    Attributes:
        store: the recordings.
        retention: what to keep.
        may_go: whether a log that is due may be removed; blocking.
        clock: seconds since the epoch.
    """

    _store: Store
    _retention: Retention
    _may_go: Callable[[LogInfo], bool] = attrs.field(default=lambda _: True, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.time, kw_only=True)
    statistics: RetentionStatistics = attrs.field(factory=RetentionStatistics, init=False)

    async def run(self) -> None:
        """Prune now and then; runs until cancelled."""
        while True:
            await self.prune()
            await anyio.sleep(PERIOD_S)

    async def prune(self) -> None:
        """Prune once, and count the rest."""
        work = partial(
            prune, self._store, self._retention, now_s=self._clock(), may_go=self._may_go
        )
        try:
            # A disk that hangs must not keep the server from ending.
            done = await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        except OSError as error:
            _logger.error("cannot look through %s: %s", self._store.directory, error.strerror)
            return
        self.statistics = self.statistics.after(done)
        if done.removed:
            text = "%d recordings were removed, %d bytes; %d are left, %d bytes"
            freed, kept = done.freed_bytes, done.kept_bytes
            _logger.info(text, len(done.removed), freed, done.kept_logs, kept)
        if done.failed:
            first = done.failed[0]
            text = "%d recordings cannot be removed; %s: %s"
            _logger.error(text, len(done.failed), first.info.place, first.reason)


def make_retainer(settings: Settings, uploader: Uploader | None = None) -> Retainer | None:
    """Make the retainer; None where nothing is recorded. `uploader`: logs stay until stored."""
    if settings.record_to is None:
        return None
    days, megabytes = settings.record_keep_days, settings.record_keep_mb
    retention = Retention(
        age_s_max=None if days is None else days * DAY_S,
        bytes_max=None if megabytes is None else megabytes * MB,
    )
    if uploader is None:
        return Retainer(Store(settings.record_to), retention)
    kept = Store(settings.record_to, keeps_marks=True)
    return Retainer(kept, retention, may_go=uploader.is_stored)
