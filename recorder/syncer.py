"""A second thread, for fdatasync alone: a slow device must not hold up what other clients wait for.

Rules: jobs are done in the order in which they were asked for; a job must not raise. Without a
thread (`inline`) a job is done where it is asked for.

It does not know logs or files.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Syncer:
    """Does jobs in a thread of its own, which starts with the first of them."""

    def __init__(self, *, inline: bool) -> None:
        """Make it.

        Args:
            inline: do jobs in the caller's thread.
        """
        self._inline = inline
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, job: Job) -> None:
        """Have a job done; from one thread alone."""
        if self._inline:
            job()
            return
        if self._thread is None:
            # A daemon, like the recorder's thread: a hanging device must not keep the process.
            self._thread = threading.Thread(target=self._run, name="antiphon-syncer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Wait until all that was asked for is done; nothing may be asked for afterwards."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
