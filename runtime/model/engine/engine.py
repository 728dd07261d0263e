"""One thread per device that runs the steps of all sessions in batches.

Submissions are taken between batches, and the scheduler chooses. An idle thread ends by itself.
Process exit waits for it briefly: a thread killed within the model's code, even while freeing an
answer, would crash the process.
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import attrs

from ..backends.base import BackendGone
from .scheduler import Scheduler, Tally, Task

Result = TypeVar("Result")

_log = logging.getLogger("antiphon.model")

IDLE_S: Final = 1.0
"""Idle time after which the thread ends: more than the pause between two units."""
EXPECT_S: Final = 1.0
"""An expected task that does not come in this time is waited for no more."""
SWITCH_S: Final = 0.0005
"""Between two requests to the device a thread gives Python's lock back; while others are busy, it
would otherwise wait for it 5 ms each time."""
EXIT_WAIT_S: Final = 2.0
"""Computing at process exit takes at most a second, unless it hangs."""


class Engine:
    """Runs generators of requests in batches; `clock` is monotonic, in nanoseconds."""

    def __init__(
        self,
        compute: Callable[[Sequence[Any]], list[Any]],
        *,
        batch_max: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = Scheduler(compute, batch_max=batch_max)
        self._clock = clock
        self._inbox: Inbox = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_running = self._is_stopped = False
        self._expected = 0
        self._tally = self._scheduler.tally

    @property
    def statistics(self) -> Tally:
        """A copy of the counts so far."""
        return attrs.evolve(self._tally)

    def expect(self, count: int) -> None:
        """Compute nothing before so many tasks have come, from several threads at once."""
        with self._lock:
            self._expected += count

    def submit(self, steps: Generator[Any, Any, Result], *, due_ns: float) -> Future[Result]:
        """Run a generator in the engine's thread, due in `due_ns` or `BACKGROUND`.

        Cancelling the future has no effect.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        if self._is_stopped:
            future.set_exception(BackendGone("the engine was stopped"))
            return future
        deadline = self._clock() + due_ns

        def done(result: Any, error: Exception | None) -> None:
            self._tally.tasks += 1
            self._tally.missed += self._clock() > deadline
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        task = Task(steps=steps, deadline_ns=deadline, done=done)
        with self._lock:
            if not self._is_running:
                work = (weakref.ref(self), self._inbox)
                thread = threading.Thread(
                    target=_run, args=work, name="antiphon-engine", daemon=True
                )
                _threads[thread] = self._inbox
                thread.start()
                self._is_running = True
            self._inbox.put((self, task))
        return future

    def stop(self) -> None:
        """Accept nothing more, and fail waiting tasks after the current batch; never waits."""
        self._is_stopped = True

    def work_on(self, task: Task | None) -> bool:
        """Take a task (None: none came) and compute until idle; False ends the engine's thread."""
        try:
            if task is None:
                return self._is_wanted()
            self._serve(task)
            return not self._is_stopped or self._is_wanted()
        except BaseException as mistake:
            # A bug of ours: waiting callers get it, and the next submission starts a new thread.
            if not self._is_stopped:
                _log.exception("the engine's thread failed")
            with self._lock:
                while (waiting := self._next()) is not None:
                    self._scheduler.take(waiting)
                self._scheduler.abandon(mistake)
                self._is_running = False
            return False

    def _is_wanted(self) -> bool:
        """Whether there is work after all; else the next submission starts another thread."""
        with self._lock:
            self._is_running = not self._inbox.empty()
            return self._is_running

    def _serve(self, task: Task) -> None:
        spent_ns = time.thread_time_ns()
        self._came()
        self._scheduler.add(task)
        self._take_all()
        while not self._scheduler.is_idle:
            if self._is_stopped:
                raise BackendGone("the engine was stopped")
            self._scheduler.turn(self._clock())
            self._take_all()
            now_ns = time.thread_time_ns()
            self._tally.cpu_ns += now_ns - spent_ns
            spent_ns = now_ns

    def _take_all(self) -> None:
        while (task := self._next()) is not None:
            self._scheduler.add(task)

    def _came(self) -> None:
        with self._lock:
            self._expected = max(0, self._expected - 1)

    def _next(self) -> Task | None:
        """Return the next submission; None if there is none, or the process ends."""
        try:
            _, task = self._inbox.get(self._expected > 0, EXPECT_S)
        except queue.Empty:
            self._expected = 0
            return None
        self._came()
        self._is_stopped = self._is_stopped or task is None
        return task


Inbox = queue.SimpleQueue[tuple[Engine, Task] | tuple[None, None]]
"""Submissions; without an engine, the end of the process."""
_threads: Final[weakref.WeakKeyDictionary[threading.Thread, Inbox]] = weakref.WeakKeyDictionary()
"""The threads of all engines, and their inboxes."""


@atexit.register
def end_all() -> None:
    """End all engines' threads and wait for them, so that the process does not exit during work."""
    running = [(thread, inbox) for thread, inbox in _threads.items() if thread.is_alive()]
    for _, inbox in running:
        inbox.put((None, None))
    until_s = time.monotonic() + EXIT_WAIT_S
    for thread, _ in running:
        thread.join(max(0.0, until_s - time.monotonic()))


def _run(wanted: weakref.ref[Engine], inbox: Inbox) -> None:
    """The engine's thread; while waiting it holds only a weak reference to the engine.

    Otherwise this thread would free an unreferenced model, and at process exit it could be killed
    while doing so, which crashes the process.
    """
    sys.setswitchinterval(SWITCH_S)
    while True:
        engine, task, is_ending = None, None, False
        try:
            engine, task = inbox.get(timeout=IDLE_S)
            is_ending = engine is None
        except queue.Empty:
            pass
        engine = engine or wanted()
        if engine is not None and is_ending:
            engine.stop()
        if engine is None or not engine.work_on(task):
            return
        del engine, task
