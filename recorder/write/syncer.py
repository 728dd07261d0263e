"""A thread for fdatasync, so that a slow device does not delay other clients.

Rules: jobs run in order and must not raise; with `inline`, in the calling thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Syncer:
    """Runs jobs in its own thread, which starts with the first job."""

    def __init__(self, *, inline: bool) -> None:
        self._inline = inline
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, job: Job) -> None:
        """Queue a job; called from one thread only."""
        if self._inline:
            job()
            return
        if self._thread is None:
            # A daemon, like the recorder's thread: a hanging device must not keep the process.
            self._thread = threading.Thread(target=self._run, name="antiphon-syncer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Wait until all jobs are done; no job may be queued afterwards."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
