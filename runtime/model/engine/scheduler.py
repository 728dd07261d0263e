"""Scheduling of steps in batches.

A task is a generator of requests (`Steps`): it yields a request, is sent the answer, and continues
until it returns. Waiting requests of the same `bucket` can be answered together. One `turn` answers
one batch:

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
so only the faulty task fails. No threads or clocks: `engine.py` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Final, Protocol

import attrs

from ..backends.base import BackendGone

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


class Request(Protocol):
    """A task's request to the model."""

    @property
    def stage(self) -> int:
        """The stage within its unit; smaller is earlier."""
        ...

    @property
    def bucket(self) -> Hashable:
        """Requests of the same bucket can be answered together."""
        ...


@attrs.define(eq=False, kw_only=True)
class Task:
    """A generator in progress.

    `deadline_ns`: on the engine's clock; `BACKGROUND` for none. `done`: called once, with the
    result or the error. `request`: its pending request. `has_begun`: it belongs to the group.
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
