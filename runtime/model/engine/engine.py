"""The engine: one thread per device that computes the requests of all sessions in batches.

A task is a generator of requests (`Steps`): it yields a request, is sent the answer, and continues
until it returns. Waiting requests of the same `bucket` can be answered together. One `turn` of the
`Scheduler` answers one batch:

- Tasks run in groups: those that wait and are due within a second (`GROUP_NS`) begin together, when
  all that have begun are done. Until one of a group is past its `OPEN_STAGE`, others join it: so
  all share the many batches after it, and no later one makes them wait.
- A task near its deadline (`URGENT_NS`) waits no more: all begin with it. It goes before others,
  with those that are due with it (`COMPANY_NS`).
- Of these, or of the group, the earliest stage goes first, so that later batches are larger; within
  a stage, the nearest deadline. Its bucket is answered.
- Other tasks of that bucket join by deadline, up to `batch_max`, and have begun then.
- Background work joins batches, and has its own turns when nothing else waits, or after
  `BACKGROUND_TURNS` of others: work that shares no bucket with them would never be done.

The model guarantees that results do not depend on the batch. A failed batch is retried one by one,
so only the faulty task fails. The scheduler has no threads or clocks.

The `Engine` runs it in its thread. Submissions are taken between batches. An idle thread ends by
itself. Process exit waits for it briefly: a thread killed within the model's code, even while
freeing an answer, would crash the process.
"""

from __future__ import annotations

import atexit
import logging
import math
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

# -- which requests are computed together -------------------------------------------------------

URGENT_NS: Final = 400_000_000
"""Time to the deadline below which a task no longer waits: about a unit's on a busy machine."""
COMPANY_NS: Final = 50_000_000
"""Tasks that are due within this time are due together: in batches, all of them end sooner."""
GROUP_NS: Final = 1_000_000_000
"""Live units are due within this time of each other; sound that came ahead of time is due later."""
OPEN_STAGE: Final = 2
"""The last stage in which others join a group: prefill. What it takes is each session's own, and
then come the many small steps that take hardly longer for more sessions."""
BACKGROUND_TURNS: Final = 16
"""Turns of others before one of the background: some tens of milliseconds on a GPU, which a lost
session's rebuild may wait for each of its batches."""
BACKGROUND: Final = math.inf
"""The deadline of work that is not real-time."""


@attrs.define(eq=False, kw_only=True)
class Task:
    """A generator in progress.

    `deadline_ns`: on the engine's clock; `BACKGROUND` for none. `done`: called once, with the
    result or the error. `request`: its pending one, with its `stage` in the unit, smaller is
    earlier, and its `bucket`. `has_begun`: it belongs to the group.
    """

    steps: Generator[Any, Any, Any]
    deadline_ns: float
    done: Callable[[Any, Exception | None], None]
    request: Any = None
    has_begun: bool = False


@attrs.define(kw_only=True)
class Tally:
    """Counts of an engine since it was made.

    Attributes:
        turns: batches computed.
        answers: requests answered; divided by `turns`, the mean batch.
        largest: requests in the largest batch.
        tasks: generators run to their end.
        missed: tasks that ended after their deadline.
        cpu_ns: CPU time of the engine's thread.
    """

    turns: int = 0
    answers: int = 0
    largest: int = 0
    tasks: int = 0
    missed: int = 0
    cpu_ns: int = 0


class Scheduler:
    """The tasks of one model; `compute` must answer requests of one bucket in order, repeatably."""

    def __init__(self, compute: Callable[[Sequence[Any]], list[Any]], *, batch_max: int) -> None:
        assert batch_max >= 1, batch_max
        self._compute, self._batch_max = compute, batch_max
        self._tasks: list[Task] = []
        self._turns_of_others = 0
        self.tally = Tally()

    @property
    def is_idle(self) -> bool:
        """Whether there is no task."""
        return not self._tasks

    def add(self, task: Task) -> None:
        """Take a task, and run it to its first request."""
        self.take(task)
        self._advance(task, None)

    def take(self, task: Task) -> None:
        """Take a task without starting it."""
        self._tasks.append(task)

    def turn(self, now_ns: float) -> None:
        """Answer one batch, with at least one task; `now_ns` is the engine's clock."""
        batch = self._choose(now_ns)
        self.tally.turns += 1
        self.tally.answers += len(batch)
        self.tally.largest = max(self.tally.largest, len(batch))
        try:
            answers = self._compute([task.request for task in batch])
        except Exception as error:
            if len(batch) == 1:
                self._advance(batch[0], None, error)
            else:
                self._one_by_one(batch)
            return
        for task, answer in zip(batch, answers, strict=True):
            self._advance(task, answer)

    def abandon(self, error: BaseException) -> None:
        """End all tasks with an error; their generators are not resumed."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if isinstance(error, BackendGone):
                task.done(None, error)
            else:
                task.done(None, RuntimeError(f"the engine failed: {error!r}"))

    def _choose(self, now_ns: float) -> list[Task]:
        ordered = sorted(self._tasks, key=lambda task: task.deadline_ns)  # Stable: ties by arrival.
        due = [task for task in ordered if task.deadline_ns < BACKGROUND]
        behind = ordered[len(due) :]
        if due and behind and self._turns_of_others >= BACKGROUND_TURNS:
            leader = behind[0]
        else:
            some = self._begin(due, now_ns) if due else behind
            leader = min(some, key=lambda task: task.request.stage)
        is_of_others = leader.deadline_ns < BACKGROUND and bool(behind)
        self._turns_of_others = self._turns_of_others + 1 if is_of_others else 0
        bucket = leader.request.bucket
        company = [t for t in ordered if t is not leader and t.request.bucket == bucket]
        batch = [leader, *company[: self._batch_max - 1]]
        for task in batch:
            task.has_begun = True
        return batch

    @staticmethod
    def _begin(due: Sequence[Task], now_ns: float) -> list[Task]:
        """Begin a group of some real-time tasks, by deadline, if it is time; who may go first."""
        first_ns = due[0].deadline_ns
        is_urgent = first_ns - now_ns < URGENT_NS
        begun = [task for task in due if task.has_begun]
        if any(task.request.stage > OPEN_STAGE for task in begun) and not is_urgent:
            return begun
        group = [task for task in due if task.deadline_ns < first_ns + GROUP_NS]
        for task in group:
            task.has_begun = True
        return [t for t in group if t.deadline_ns < first_ns + COMPANY_NS] if is_urgent else group

    def _one_by_one(self, batch: Sequence[Task]) -> None:
        for task in batch:
            try:
                (answer,) = self._compute([task.request])
            except Exception as error:
                self._advance(task, None, error)
            else:
                self._advance(task, answer)

    def _advance(self, task: Task, answer: Any, error: Exception | None = None) -> None:
        try:
            if error is None:
                task.request = task.steps.send(answer)
            else:
                task.request = task.steps.throw(error)
            return
        except StopIteration as end:
            result, failure = end.value, None
        except Exception as raised:
            result, failure = None, raised
        except BaseException as raised:  # A panic of a library, not a request to stop.
            result, failure = None, RuntimeError(repr(raised))
        self._tasks.remove(task)
        task.done(result, failure)


# -- the thread ---------------------------------------------------------------------------------

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
