"""What the run of a simulation needs beside its server: order, and ears for what it logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

from recorder.format.format import LogFailed
from runtime.model.backends.base import BackendError
from tests.simulation.simulated_rules import Rules


@contextmanager
def same_order_every_time() -> Iterator[None]:
    """Have trio order its tasks by number before it shuffles them, not by where they lie."""
    core: Any = trio._core._run
    before = core._ALLOW_DETERMINISTIC_SCHEDULING
    core._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        yield
    finally:
        core._ALLOW_DETERMINISTIC_SCHEDULING = before


class _Breakages(logging.Handler):
    """Takes what the server logs of its own bugs as violations."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(logging.ERROR)
        self._rules = rules

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of an exception that nobody expected."""
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = innermost(record.exc_info[1])
            if isinstance(error, BackendError | LogFailed):
                return  # the model's or the disk's own, as was drawn
            self._rules.report(f"{record.getMessage()}: {type(error).__name__}: {error}")


@contextmanager
def loud_logs(rules: Rules) -> Iterator[None]:
    """Listen to the server's own log while it runs, and keep it off the terminal."""
    logger = logging.getLogger("antiphon")
    handler, propagate, level = _Breakages(rules), logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)


def innermost(error: BaseException) -> BaseException:
    """Take an exception out of its groups: the first, where there are several."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def living_tasks() -> list[str]:
    """Name all tasks that live."""
    root = trio.lowlevel.current_root_task()
    found = [] if root is None else [root]
    for task in found:
        for nursery in task.child_nurseries:
            found += nursery.child_tasks
    return sorted(task.name for task in found)
