"""The logs of a server's sessions: new ones, forks, those that go on, and those removed again."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.errors import REFUSALS, ErrorCode
from recorder.keep.store import Store
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder

from ..settings.settings import Settings
from ..slots.workers import Workers
from . import rebuilding
from .beginning import Arrival, log_head
from .forking import AT_ONCE, WAITING_MAX, ForkRefused, unsupported, write_fork
from .journal import OnFailed, OpenLog
from .taking_up import TakenUp, take_up

_CANNOT: Final = "this server does not bring models back to a past"


class SessionLogs:
    """Makes and finds logs; `recorder` writes them, None records nothing."""

    def __init__(self, settings: Settings, recorder: Recorder | None, workers: Workers) -> None:
        self._settings = settings
        self._folder = settings.record_to
        self.recorder = recorder if self._folder is not None else None
        self._workers = workers
        self._forking = anyio.Semaphore(AT_ONCE)

    @property
    def is_recording(self) -> bool:
        """Whether sessions are recorded."""
        return self.recorder is not None

    def of_new(self, opened: ev.ConnectionOpened, owner: str) -> OpenLog | None:
        """How the log of a new session is opened; None where it is not recorded."""
        return None if self.recorder is None else partial(self._open, opened, owner)

    def _open(self, opened: ev.ConnectionOpened, owner: str, on_failure: OnFailed) -> SessionLog:
        assert self.recorder is not None
        fields = log_head(self._settings, self._workers.info, opened, owner)
        path = self._store.path(opened.recording_id)
        return self.recorder.open(path, fields, at_ns=0, on_failure=on_failure)

    def of_taken(self, taken: TakenUp) -> OpenLog:
        """How the log of a session goes on."""
        assert self.recorder is not None
        assert taken.file is not None
        return partial(self.recorder.go_on, taken.file, taken.next_seq)

    async def fork(self, arrival: Arrival, opened: ev.ConnectionOpened) -> TakenUp:
        """Write the log of a fork, whose client would have begun a session by `opened`.

        `ForkRefused`: it is not possible, by the recording, the request or the server.
        """
        assert arrival.parent is not None
        if self.recorder is None or not opened.limits.rebuild_wait_s:
            raise ForkRefused(ErrorCode.UNSUPPORTED, _CANNOT)
        if self._forking.statistics().tasks_waiting >= WAITING_MAX:
            raise ForkRefused(ErrorCode.QUEUE_FULL, REFUSALS[ErrorCode.QUEUE_FULL])
        head = log_head(self._settings, self._workers.info, opened, arrival.owner)
        file = self.recorder.file(self._store.path(opened.recording_id))
        write = partial(write_fork, arrival.parent, opened, head, self._workers.info, file)
        try:
            async with self._forking:
                taken = await rebuilding.in_thread(write)
        except FileNotFoundError:
            raise unsupported("it was removed") from None
        except OSError as error:
            text = f"the fork cannot be recorded: {error.strerror}"
            raise ForkRefused(ErrorCode.SERVICE_UNAVAILABLE, text) from error
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()  # a thread is waited for even then
        except BaseException:
            with suppress(OSError):
                file.remove()
            raise
        return attrs.evolve(taken, owner=arrival.owner)

    async def left(self) -> list[TakenUp]:
        """The sessions that a server before this one left; `OSError`: its folder is gone."""
        if self._folder is None or self.recorder is None:
            return []
        look = partial(
            take_up, self._folder, self.recorder, fingerprint=self._workers.info.fingerprint
        )
        settings = self._settings
        look = partial(look, resume_s=settings.resume_s, sessions_max=settings.detached_max)
        return await rebuilding.in_thread(look)

    async def forget(self, session: Session, *, is_fork: bool) -> None:
        """Remove the log of a refused session, unless its client had sent content before.

        And of a fork that was never set up: it is only a copy.
        """
        counts = session.counts
        has_content = not is_fork and (counts["appends"] or counts.get("turns"))
        if self.recorder is None or has_content or self._settings.record_refused:
            return
        path = self._store.path(session.opened.recording_id)
        with suppress(OSError):  # it failed, or retention removed it first
            await anyio.to_thread.run_sync(path.unlink)

    @property
    def _store(self) -> Store:
        assert self._folder is not None
        return Store(self._folder)
