"""Mode `forced`: a model decides on a recording's own past, unit by unit.

The recorded inputs and decisions are fed (`rerun.full_units`), so each unit is judged by itself:
what this model would decide there, and by which margin. Nothing is sent, and no log is made.
"""

from __future__ import annotations

from typing import Any, Final

import anyio
import attrs

from protocol.values.limits import NS_PER_S
from protocol.values.model import Unit, UnitResult
from recorder.format.errors import LogDamaged
from recorder.read.reader import LogReader
from runtime.model.backends.base import Backend
from runtime.model.backends.forcing import ForcedResult

from ..eval.evaluate import Row, row_of
from ..eval.forced import ForcedSession
from ..eval.summary import DIGITS, Json
from ..rerun.full import RELEASE_WAIT_S
from ..rerun.full_units import UnitReplay
from ..rerun.logic import Replayer
from ..rerun.verdicts import Verdicts
from ..shared.progress import Watch
from .recording import Recording, SkippedError


class _Judging(UnitReplay):
    """The units of one session, each judged as it was recorded."""

    is_forced = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.session: Final = ForcedSession()

    def judge(self, unit: Unit, recorded: UnitResult, forced: ForcedResult) -> None:
        """Judge a unit that was not held to another recording."""
        self.session.take(unit, recorded, forced)


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
    judging = _Judging(backend, recording.held_units)
    replayer, verdicts = Replayer(), Verdicts()
    try:
        with LogReader(recording.log) as reader:
            for item in reader:
                step = replayer.feed(item)
                if step is None:
                    continue
                made = judging.made
                last_unit = replayer.last_unit
                verdict = await judging.renew(step.event)
                for effect in step.effects:
                    judging.note(effect)
                verdicts.take(step, verdict, last_unit)
                watch(judging.made - made)
    finally:
        with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
            await judging.close()
    report = replayer.report()
    if report.damage_count:
        raise LogDamaged("damaged: a model that missed an input cannot be judged")
    if report.divergence is not None:
        seq = report.divergence.seq
        raise SkippedError(f"it does not replay, from record {seq} on (see `antiphon replay`)")
    if not judging.made:
        raise SkippedError("no unit of the recording was finished")
    body: Json = {
        "recording_id": recording.recording_id,
        "mode": recording.mode,
        "duration_s": round(report.span_ns / NS_PER_S, DIGITS),
        "changed": [attrs.asdict(it) for it in verdicts.changed],
    }
    row = row_of(str(recording.log), judging.session.scores(), body)
    return attrs.evolve(row, duration_ns=report.span_ns)
