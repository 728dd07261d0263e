"""The model call of one session, and the unit loop with its barrier.

A turn and a chunk are one call each; a unit is a call and a second one that finalizes or undoes it:

prefill -> generate -> send -> finalize (deferred) -> barrier -> next prefill

At most one model call of a session is in progress, and `phase` names it. A unit starts only from
IDLE, and only `FinalizeDone` or `RollbackDone` of the unit before lead to IDLE: this is the barrier
(B1), and how cleanup knows what to wait for (B4).
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from ..values.effects import Interrupt, Rollback, StartFinalize, StartUnit
from ..values.errors import LocalProtocolError
from ..values.model import Unit, UnitResult
from .units import PendingUnit


class Phase(StrEnum):
    """The kind of the model call in progress."""

    IDLE = "idle"
    OPENING = "opening"
    RUNNING = "running"
    FINALIZING = "finalizing"
    ROLLING_BACK = "rolling_back"
    REBUILDING = "rebuilding"


@attrs.define
class Call:
    """The model call in progress; one at a time.

    `index` is that of its unit, turn or chunk, or of the last one; -1 before the first.
    """

    phase: Phase = Phase.IDLE
    index: int = -1

    @property
    def is_idle(self) -> bool:
        """Whether no call is in progress."""
        return self.phase is Phase.IDLE

    def begin(self, index: int) -> None:
        """Begin a unit, a turn or a chunk."""
        self._require(Phase.IDLE)
        self.phase, self.index = Phase.RUNNING, index

    def awaits(self, phase: Phase, index: int) -> bool:
        """Whether a completion is due; others are stale."""
        return self.phase is phase and self.index == index

    def settle(self) -> None:
        """End the call."""
        self.phase = Phase.IDLE

    def _require(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"call {self.index} is {self.phase}, not {phase}")


@attrs.define
class UnitLoop(Call):
    """The unit in flight and its progress. Its index is never reused (B9).

    Attributes:
        input_id: the append that completed it.
        interrupted: it is being cut, or its answer withheld (B6).
        failures: units failed in a row (B3).
        unit: the one that runs, or was lost with its worker.
    """

    input_id: str = ""
    interrupted: bool = False
    failures: int = 0
    unit: Unit | None = None

    def start(
        self, pending: PendingUnit, max_slice_nums: int, *, force_speak: bool = False
    ) -> StartUnit:
        """Start the next unit (B1: only through the open barrier).

        `max_slice_nums` is for frames whose append has none.
        """
        self.begin(self.index + 1)
        self.input_id = pending.attached.input_id
        self.interrupted = False
        self.unit = Unit(
            index=self.index,
            pcm=pending.pcm,
            frames=tuple(frame.jpeg for frame in pending.attached.frames),
            force_listen=pending.attached.force_listen,
            max_slice_nums=pending.attached.max_slice_nums or max_slice_nums,
            force_speak=force_speak and not pending.attached.force_listen,
        )
        return StartUnit(unit=self.unit)

    def start_again(self) -> StartUnit:
        """Start the unit that was lost with its worker, forced to listen if it was being cut."""
        assert self.unit is not None
        self.begin(self.index)
        is_forced = self.unit.force_listen or self.interrupted
        self.unit = attrs.evolve(self.unit, force_listen=is_forced)
        self.interrupted = False
        return StartUnit(unit=self.unit)

    def interrupt(self) -> Interrupt | None:
        """Cut the running unit; None without one, or if it is being cut already.

        A unit that was lost with its worker will listen when it starts again.
        """
        if self.unit is None or self.interrupted:
            return None
        self.interrupted = True
        return Interrupt(index=self.index) if self.phase is Phase.RUNNING else None

    def finalize(self, result: UnitResult) -> StartFinalize:
        """Finalize the unit that is done."""
        self._require(Phase.RUNNING)
        self.phase = Phase.FINALIZING
        self.failures, self.unit = 0, None
        return StartFinalize(index=self.index, interrupted=self.is_withheld(result))

    def is_withheld(self, result: UnitResult) -> bool:
        """Whether the unit's speech, whole or in part, is withheld (B6)."""
        return self.interrupted and (result.cut is not None or not result.is_listen)

    def rollback(self) -> Rollback:
        """Undo the unit that failed (B3)."""
        self._require(Phase.RUNNING)
        self.phase, self.unit = Phase.ROLLING_BACK, None
        return Rollback(index=self.index)
