"""Replays one log, or several, one after the other or in processes: what `antiphon replay` calls.

An unreadable or damaged log does not stop the others; outcomes keep the order of the logs. Only
paths and `Outcome`s pass between processes, so memory does not grow with the logs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Final

import click

from recorder.format.format import SUFFIX, RecorderError, TooNew
from recorder.read.reader import LogReader
from recorder.write.files import PART_PREFIX
from runtime.model.backends.base import Backend

from ..shared.commands import UnusableError, Watch, reason, size_of, unwatched
from .environment import Loading, ModelUnavailableError
from .full import replay_fully
from .logic import replay
from .report import Outcome, Result, full_result, logic_result

JOBS_MAX: Final = 64
"""Processes: more than the cores of most machines, where more gain nothing."""


def find_logs(paths: Iterable[Path]) -> list[Path]:
    """List the files, and all logs in and below folders by name; once, in order of the paths."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files = (it for it in sorted(path.rglob("*" + SUFFIX)) if it.is_file())
            found |= {it: None for it in files if not it.parent.name.startswith(PART_PREFIX)}
        else:
            found[path] = None
    return list(found)


def logs_to_rewrite(paths: Sequence[Path], output: Path | None) -> list[Path]:
    """List the logs, in files and folders, that a command writes again; at least one path.

    `click.UsageError`: one output for several logs; `UnusableError`: a log is missing, or the
    folders hold no log.
    """
    if output is not None and (len(paths) > 1 or paths[0].is_dir()):
        raise click.UsageError("--output is for one LOG")
    found = find_logs(paths)
    missing = [log for log in found if not log.is_file()]
    if missing or not found:
        text = f"{missing[0]}: no such log" if missing else f"{paths[0]}: no *{SUFFIX} in it"
        raise UnusableError(text)
    return found


def replay_log(log: Path, watch: Watch = unwatched, *, go_on: bool = False) -> Outcome:
    """Replay one log by logic; `go_on` reads past damage.

    `OSError`: the file is missing or unreadable; `RecorderError`: it is not a log.
    """
    began = time.perf_counter()
    with LogReader(log) as reader:
        report = replay(reader.watched(watch), go_on=go_on)
    return Outcome(str(log), logic_result(report), time.perf_counter() - began, report)


def replay_logs(
    logs: Sequence[Path], watch: Watch, *, go_on: bool = False, jobs: int = 1
) -> Iterator[Outcome]:
    """Replay several logs by logic; `go_on` reads past damage, and 1 job is this process.

    `UnusableError`: a process was killed, for example for lack of memory.
    """
    if jobs == 1 or len(logs) < 2:
        yield from (_tried(log, watch, go_on=go_on) for log in logs)
        return
    executor = ProcessPoolExecutor(
        min(jobs, len(logs)),
        # Not forked: a thread that shows progress may hold a lock.
        mp_context=get_context("spawn"),
        initializer=_begin_job,
    )
    with executor:
        try:
            with _uninterrupted():
                outcomes = executor.map(partial(_tried, watch=unwatched, go_on=go_on), logs)
            for log, outcome in zip(logs, outcomes, strict=True):
                watch(size_of(log))
                yield outcome
        except BrokenProcessPool as error:
            raise UnusableError("a process was killed; fewer --jobs need less memory") from error
        except BaseException:
            for job in active_children():
                job.kill()  # it may have minutes to go, and writes nothing
            raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    ensure_running()  # of multiprocessing's own process, whose start would lift the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _begin_job() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the parent's end, even a kill, and exit."""
    parent = parent_process()
    assert parent is not None, "a job is a process of its own"
    parent.join()
    os._exit(1)


async def replay_logs_fully(
    logs: Sequence[Path], watch: Watch, *, model: str | None, anyway: bool
) -> list[Outcome]:
    """Replay several logs with their models, loading one once for logs in a row; see `full`."""
    load: Callable[[Loading], Backend] = lru_cache(maxsize=1)(Loading.load)
    replaying = partial(replay_fully, load=load, model=model, anyway=anyway)
    outcomes = list[Outcome]()
    for log in logs:
        began = time.perf_counter()
        try:
            with LogReader(log) as reader:
                report = await replaying(reader.head.fields, reader, watch=watch)
        except (OSError, RecorderError, ModelUnavailableError) as error:
            outcomes.append(_failed(log, began, error))
        else:
            elapsed_s = time.perf_counter() - began
            outcomes.append(Outcome(str(log), full_result(report), elapsed_s, report))
    return outcomes


def _tried(log: Path, watch: Watch, *, go_on: bool) -> Outcome:
    began = time.perf_counter()
    try:
        return replay_log(log, watch, go_on=go_on)
    except (OSError, RecorderError) as error:
        watch(size_of(log))
        return _failed(log, began, error)


def _failed(
    log: Path, began: float, error: OSError | RecorderError | ModelUnavailableError
) -> Outcome:
    is_elsewhere = isinstance(error, TooNew | ModelUnavailableError)
    result: Result = "not_comparable" if is_elsewhere else "unreadable"
    return Outcome(str(log), result, time.perf_counter() - began, error=reason(error))
