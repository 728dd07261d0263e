"""Which steps run next, and with which others: earliest deadline first, in batches.

A task is a generator of requests (`Steps`): it yields a request, is sent the answer, and goes on
until it returns. All requests that wait and have the same `bucket` can be answered together. One
`turn` answers one batch:

- A task whose deadline is near (`URGENT_NS`) chooses the bucket: the nearest deadline first.
- Otherwise the earliest stage goes first, so that the units that are behind catch up and later
  stages find more company; within a stage, the nearest deadline.
- Other tasks of that bucket join, nearest deadline first, up to `batch_max`.
- Background work has no deadline: it joins batches, and has turns of its own only when nothing else
  waits.

What a task gets never depends on its company: that is the model's promise, not made here. A batch
that fails is answered again one by one, so that only the task at fault fails.

Pure of threads and clocks: `engine.py` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Final, Protocol

import attrs

from ..backends.base import BackendGone

URGENT_NS: Final = 400_000_000
"""Time to the deadline below which a task no longer waits for company: about what a unit takes on
a busy machine."""
BACKGROUND: Final = math.inf
"""The deadline of work that nobody waits for in real time."""


class Request(Protocol):
    """What a task asks of the model."""

    @property
    def stage(self) -> int:
        """How far along in its unit it is; smaller is earlier."""
        ...

    @property
    def bucket(self) -> Hashable:
        """Requests of the same bucket can be answered together."""
        ...


@attrs.define(eq=False, kw_only=True)
class Task:
    """A generator under way.

    Attributes:
        steps: the generator.
        deadline_ns: when its result is due, on the engine's clock; `BACKGROUND` for never.
        done: called once, with the result or the error.
        request: what it waits for.
    """

    steps: Generator[Any, Any, Any]
    deadline_ns: float
    done: Callable[[Any, Exception | None], None]
    request: Any = None


@attrs.define(kw_only=True)
class Tally:
    """What the scheduler has done.

    Attributes:
        turns: batches answered.
        answers: requests answered.
        largest: most requests in one batch.
    """

    turns: int = 0
    answers: int = 0
    largest: int = 0


class Scheduler:
    """The tasks of one model.

    Args:
        compute: answers requests of one bucket, in their order; asked again, it answers the same.
        batch_max: most requests answered together; 1 answers one at a time.
    """

    def __init__(self, compute: Callable[[Sequence[Any]], list[Any]], *, batch_max: int) -> None:
        assert batch_max >= 1, batch_max
        self._compute, self._batch_max = compute, batch_max
        self._tasks: list[Task] = []
        self.tally = Tally()

    @property
    def is_idle(self) -> bool:
        """No task is under way."""
        return not self._tasks

    def add(self, task: Task) -> None:
        """Take a task up to its first request."""
        self.take(task)
        self._advance(task, None)

    def take(self, task: Task) -> None:
        """Take a task without beginning it."""
        self._tasks.append(task)

    def turn(self, now_ns: float) -> None:
        """Answer one batch; there is at least one task.

        Args:
            now_ns: the engine's clock.
        """
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
        """End all tasks with an error; their generators are left where they stand."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if isinstance(error, BackendGone):
                task.done(None, error)
            else:
                task.done(None, RuntimeError(f"the engine failed: {error!r}"))

    def _choose(self, now_ns: float) -> list[Task]:
        ordered = sorted(self._tasks, key=lambda task: task.deadline_ns)  # Stable: then first come.
        leader = ordered[0]
        if leader.deadline_ns - now_ns >= URGENT_NS:
            real_time = [task for task in ordered if task.deadline_ns < BACKGROUND] or ordered
            leader = min(real_time, key=lambda task: task.request.stage)
        bucket = leader.request.bucket
        company = [t for t in ordered if t is not leader and t.request.bucket == bucket]
        return [leader, *company[: self._batch_max - 1]]

    def _one_by_one(self, batch: Sequence[Task]) -> None:
        for task in batch:
            try:
                (answer,) = self._compute([task.request])
            except Exception as error:
                self._advance(task, None, error)
            else:
                self._advance(task, answer)

    def _advance(self, task: Task, answer: Any, error: Exception | None = None) -> None:
        """Hand a task its answer, or the error in place of one, and take its next request."""
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
        except BaseException as raised:  # A panic of a library below; nobody here was told to stop.
            result, failure = None, RuntimeError(repr(raised))
        self._tasks.remove(task)
        task.done(result, failure)
