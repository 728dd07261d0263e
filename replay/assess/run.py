"""Runs a model over recordings, several at once, each on a slot of the model.

A recording that cannot be judged is named with the reason and stops no other; the same is true of
one on which the model fails. A model that is lost ends the run: what is done is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import anyio
import attrs

from recorder.format.errors import LogDamaged, RecorderError
from runtime.model.backends.base import Backend, BackendError, BackendGone, Closes

from ..eval.evaluate import Result, Row
from ..fork.change import CannotForkError
from ..rerun.environment import Loading, ModelUnavailableError
from ..shared.commands import UnusableError, Watch, reason
from .forcing import run_forced
from .kept import Kept
from .opening import run_open
from .recording import Recording, SkippedError, look_at
from .slots import OnSlot
from .task import Run, Task

_TROUBLE: Final[tuple[tuple[type[Exception], Result], ...]] = (
    (SkippedError, "skipped"),
    (LogDamaged, "damaged"),
    (RecorderError, "unreadable"),
    (OSError, "unreadable"),
    (CannotForkError, "failed"),
    (ModelUnavailableError, "failed"),
    (BackendError, "failed"),
)
"""What each error says of a recording; the first that fits."""


async def run_model(
    task: Task, logs: Sequence[Path], load: Callable[[Loading], Backend], watch: Watch
) -> Run:
    """Run a model over logs, and measure what it does.

    `watch` is called with 0 when the model is loaded, then for each unit. `UnusableError`: the
    model cannot be loaded, or was lost; or the folder takes no files.
    """
    try:
        backend = load(Loading(task.model, device=task.device, dtype=task.dtype, slots=task.jobs))
    except Exception as error:  # any error means that there is no model
        raise UnusableError(f"the model {task.model!r} cannot be loaded: {error}") from error
    watch(0)
    try:
        with Kept(task.out, task.mode, backend.info) as kept:
            done = await _Running(task, backend, kept, watch).all(logs)
    except BackendGone as error:
        raise UnusableError(f"the model {task.model!r} is lost: {error}") from error
    except OSError as error:
        raise UnusableError(f"{task.out or 'the temporary folder'}: {reason(error)}") from error
    finally:
        if isinstance(backend, Closes):
            await backend.aclose()
    where = kept.folder if kept.is_lasting else None
    return Run(measured=done, info=backend.info, found=kept.found, folder=where)


class _Running:
    def __init__(self, task: Task, backend: Backend, kept: Kept, watch: Watch) -> None:
        self._task, self._backend, self._kept, self._watch = task, backend, kept, watch
        self._results: dict[str, Row] = {}
        self._error: BackendGone | OSError | None = None

    async def all(self, logs: Sequence[Path]) -> list[Row]:
        """Run what is not done yet; equal logs are run once."""
        looked = {log: self._look(log) for log in logs}
        waiting = iter(
            {it.content: it for it in looked.values() if isinstance(it, Recording)}.values()
        )
        async with anyio.create_task_group() as group:
            for slot in range(self._task.jobs):
                group.start_soon(self._work, waiting, OnSlot(self._backend, slot))
        if self._error is not None:
            raise self._error
        return [
            it if isinstance(it, Row) else attrs.evolve(self._results[it.content], log=str(log))
            for log, it in looked.items()
        ]

    def _look(self, log: Path) -> Recording | Row:
        try:
            return look_at(log)
        except Exception as error:
            return _trouble(log, error)

    async def _work(self, waiting: Iterator[Recording], backend: Backend) -> None:
        for recording in waiting:
            if self._error is not None:
                return
            found = self._kept.load(recording.content, str(recording.log))
            self._results[recording.content] = found or await self._one(recording, backend)

    async def _one(self, recording: Recording, backend: Backend) -> Row:
        try:
            row = await self._run(recording, backend)
        except Exception as error:
            lost = error.__cause__ if isinstance(error, CannotForkError) else error
            if isinstance(lost, BackendGone):
                self._error = lost
            return _trouble(recording.log, error)
        try:
            self._kept.save(recording.content, row)
        except OSError as error:
            self._error = error
        return row

    async def _run(self, recording: Recording, backend: Backend) -> Row:
        if self._task.mode == "forced":
            return await run_forced(recording, backend, self._watch)
        self._kept.remove_log(recording.content)
        log, row = await run_open(
            recording, backend, self._task.model, self._kept.folder, self._watch
        )
        if self._kept.is_lasting:
            return row.with_body(made=str(log))
        log.unlink()
        return row


def _trouble(log: Path, error: Exception) -> Row:
    """Name a recording that was not measured; an error of ours goes on."""
    for kind, result in _TROUBLE:
        if isinstance(error, kind):
            why = reason(error).removeprefix(f"{result}: ")
            return Row(log=str(log), result=result, error=f"{result}: {why}")
    raise error
