"""Mode `forced`: a model decides on a recording's own past, unit by unit.

The recorded inputs and decisions are fed (`rerun.full`), so each unit is judged by itself:
what this model would decide there, and by which margin. Nothing is sent, and no log is made.
"""

from __future__ import annotations

import attrs

from protocol.values.limits import NS_PER_S
from recorder.format.errors import LogDamaged
from recorder.read.reader import LogReader
from runtime.model.backends.base import Backend

from ..eval.evaluate import Row, row_of
from ..eval.forced import ForcedSession
from ..eval.summary import DIGITS, Json
from ..rerun.full import ModelRerun
from ..rerun.logic import Replayer
from ..shared.commands import Watch
from .recording import Recording, SkippedError


async def run_forced(recording: Recording, backend: Backend, watch: Watch) -> Row:
    """Force a recording on a model, and measure its own decisions.

    Args:
        recording: a duplex session.
        backend: opened on slot 0.
        watch: called with 1 for each unit.

    Raises:
        LogDamaged: the log is damaged: a model that missed an input cannot be judged.
        SkippedError: the log does not replay, or no unit was finished.
        ModelUnavailableError: the model cannot be forced.
        BackendError: the model failed.
    """
    session, replayer = ForcedSession(), Replayer()
    held = recording.held_units
    calls = ModelRerun(backend=backend, teacher_forced=True, held_units=held, judge=session.take)
    try:
        with LogReader(recording.log) as reader:
            for step in replayer.steps(reader):
                made = calls.made
                await calls.renew(step.event, step.effects)
                watch(calls.made - made)
    finally:
        await calls.close()
    report = replayer.report()
    if report.damage_count:
        raise LogDamaged("damaged: a model that missed an input cannot be judged")
    if report.divergence is not None:
        seq = report.divergence.seq
        raise SkippedError(f"it does not replay, from record {seq} on (see `antiphon replay`)")
    if not calls.made:
        raise SkippedError("no unit of the recording was finished")
    body: Json = {
        "recording_id": recording.recording_id,
        "mode": recording.mode,
        "duration_s": round(report.span_ns / NS_PER_S, DIGITS),
    }
    row = row_of(str(recording.log), session.scores(), body)
    return attrs.evolve(row, duration_ns=report.span_ns)
