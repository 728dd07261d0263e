"""The model call of one session, and the unit loop with its barrier.

A turn and a chunk are one call each; a unit is a call and another that makes it hold, or undoes it:

prefill -> generate -> send -> finalize (deferred) -> barrier -> next prefill

At most one model call of a session is under way, and `phase` names it. No unit starts but from
IDLE, and IDLE is reached only by `FinalizeDone` or `RollbackDone` of the unit before it: that is
the barrier (B1), and it is why cleanup knows what to wait for (B4).

This file decides when a call may start. What a result means to the client is the session's.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from ..values.effects import Interrupt, Rollback, StartFinalize, StartUnit
from ..values.errors import LocalProtocolError
from ..values.model import Unit, UnitResult
from .units import PendingUnit


class Phase(StrEnum):
    """The model call that is under way."""

    IDLE = "idle"
    OPENING = "opening"
    RUNNING = "running"
    FINALIZING = "finalizing"
    ROLLING_BACK = "rolling_back"


@attrs.define
class Call:
    """The model call that is under way; one at a time.

    Attributes:
        phase: what it is.
        index: which unit, turn or chunk it is of, or the last one was of; -1 before the first.
    """

    phase: Phase = Phase.IDLE
    index: int = -1

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return self.phase is Phase.IDLE

    def begin(self, index: int) -> None:
        """Begin a unit, a turn or a chunk."""
        self._require(Phase.IDLE)
        self.phase, self.index = Phase.RUNNING, index

    def awaits(self, phase: Phase, index: int) -> bool:
        """Whether a completion is the one that is due; others are stale."""
        return self.phase is phase and self.index == index

    def settle(self) -> None:
        """The call that was under way is over."""
        self.phase = Phase.IDLE

    def _require(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"call {self.index} is {self.phase}, not {phase}")


@attrs.define
class UnitLoop(Call):
    """Which unit is in flight and how far it is. Its index is never reused (B9).

    Attributes:
        input_id: the append that completed it.
        interrupted: it is being cut, or its answer withheld (B6).
        failures: units failed in a row (B3).
    """

    input_id: str = ""
    interrupted: bool = False
    failures: int = 0

    def start(self, pending: PendingUnit, max_slice_nums: int) -> StartUnit:
        """Start the next unit (B1: only through the open barrier).

        Args:
            pending: the second of input.
            max_slice_nums: for frames whose append did not say.
        """
        self.begin(self.index + 1)
        self.input_id = pending.attached.input_id
        self.interrupted = False
        unit = Unit(
            index=self.index,
            pcm=pending.pcm,
            frames=tuple(frame.jpeg for frame in pending.attached.frames),
            force_listen=pending.attached.force_listen,
            max_slice_nums=pending.attached.max_slice_nums or max_slice_nums,
        )
        return StartUnit(unit=unit)

    def interrupt(self) -> Interrupt | None:
        """Cut the unit that is running; None where none is, or it is being cut already."""
        if self.phase is not Phase.RUNNING or self.interrupted:
            return None
        self.interrupted = True
        return Interrupt(index=self.index)

    def finalize(self, result: UnitResult) -> StartFinalize:
        """Go on to finalize the unit that is done."""
        self._require(Phase.RUNNING)
        self.phase = Phase.FINALIZING
        self.failures = 0
        return StartFinalize(index=self.index, interrupted=self.is_withheld(result))

    def is_withheld(self, result: UnitResult) -> bool:
        """Whether the unit's speech, whole or in part, is not to be sent (B6)."""
        return self.interrupted and (result.cut is not None or not result.is_listen)

    def rollback(self) -> Rollback:
        """Go on to undo the unit that failed (B3)."""
        self._require(Phase.RUNNING)
        self.phase = Phase.ROLLING_BACK
        return Rollback(index=self.index)
