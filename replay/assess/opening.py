"""Mode `open`: a recording's client again, with a model that decides freely.

It is a fork at unit 0 (`fork.command`): the recorded frames come at their recorded times, and the
session, the model's calls and the log are as on a server. The new log is measured like any other.
A call takes as long as the recorded one, so delays follow from what the model decides, and not
from how fast this machine is.
"""

from __future__ import annotations

from pathlib import Path

from runtime.model.backends.base import Backend
from runtime.session.identity import Identity

from ..eval.evaluate import Row, measure_log
from ..eval.summary import Json
from ..fork.change import Change, Decided, ForkRefusedError
from ..fork.command import make_fork
from ..shared.commands import Watch
from .recording import Recording, SkippedError


async def run_open(
    recording: Recording, backend: Backend, model: str, folder: Path, watch: Watch
) -> tuple[Path, Row]:
    """Run a recording with a model; return the new log, in a folder, and its measures.

    Args:
        recording: a duplex session.
        backend: opened on slot 0.
        model: its name, for the log's head.
        folder: where the log goes; its name is derived from the recording's.
        watch: called with 1 for each unit.

    Raises:
        RecorderError: the recording is damaged.
        SkippedError: it cannot be run again.
        CannotForkError: the model is lost, or does not serve the mode.
    """
    units = 0

    def count(done: int, _units: int) -> None:
        nonlocal units
        watch(done - units)
        units = done

    parted: Json = {}

    def note(recorded: Decided, made: Decided) -> None:
        nonlocal parted
        parted = _parting(recorded, made)

    identity = Identity(
        recording_id=f"open-{recording.content}",
        created_ms=recording.created_ms,
        seed=0,  # The recording's is kept.
    )
    change = Change(at=0, model=model)
    try:
        log, _ = await make_fork(
            recording.log,
            change,
            folder,
            identity=identity,
            load=lambda _: backend,
            watch=count,
            note=note,
        )
    except ForkRefusedError as error:
        raise SkippedError(str(error)) from error
    row = measure_log(log, str(recording.log))
    return log, row.with_body(parted=parted)


def _parting(before: Decided, after: Decided) -> Json:
    """Say where the model first decided otherwise; after that it was elsewhere."""
    both = sorted(before.keys() & after.keys())
    otherwise = [index for index in both if before[index] != after[index]]
    first = otherwise[0] if otherwise else None
    return {"units": len(both), "first": first, "elsewhere": max(0, len(otherwise) - 1)}
