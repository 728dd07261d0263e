"""Keeps a server's recordings within the operator's bounds, and counts them.

It runs `antiphon prune` at the start and every ten minutes, in a thread; without bounds it only
counts. A log that cannot be removed is reported, and tried again. With an object store, a log stays
until the store has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import attrs

from recorder.keep.retention import Retention, RetentionStatistics, prune
from recorder.keep.store import LogInfo, Store

from ..settings.settings import Settings
from .uploading import Uploader

PERIOD_S: Final = 600.0
"""Sixty-four speaking sessions record 6 GB in that time: a bound of size needs that room."""
DAY_S: Final = 86_400
MB: Final = 1_000_000

_logger = logging.getLogger("antiphon.server")


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
            await self.look()
            await anyio.sleep(PERIOD_S)

    async def look(self) -> None:
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
