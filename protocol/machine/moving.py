"""A session that keeps its model and outlives its worker: it moves to another slot (B11).

lost or revoked -> slot released -> queued ahead of others -> slot leased -> rebuilt -> it goes on

The log holds what the model was fed and what it decided, so another worker is brought to the same
state. Nothing is said to the client meanwhile, and its input waits. The call that was lost with the
worker is made again with the same index, once: a unit that kills its worker must not kill them all.
Only a session that is recorded can move.
"""

from __future__ import annotations

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.limits import LOSSES_MAX
from .resuming import Resuming
from .unit_loop import Phase


@attrs.define(kw_only=True, eq=False)
class Moving(Resuming):
    """State of a move; a course says what there is to rebuild, and how it goes on.

    Attributes:
        is_moving: from the loss of the slot until the model is back.
        is_revoked: it moves when no model call is in progress.
        is_repeated: the call in progress, or that which comes next, was lost with a worker.
        losses: workers lost since a call of the session ended.
    """

    is_moving: bool = False
    is_revoked: bool = False
    is_repeated: bool = False
    losses: int = 0

    # -- what a course says of itself -----------------------------------------------------------

    def first_slot(self) -> None:
        """Go on with the first slot."""
        raise NotImplementedError

    def past_s(self) -> int | None:
        """Return the seconds of input that a rebuild feeds; None if there is nothing to rebuild."""
        raise NotImplementedError

    def take_up(self) -> None:
        """Go on where the session was: the model is back."""
        raise NotImplementedError

    # -- leaving --------------------------------------------------------------------------------

    @property
    def hears_queue(self) -> bool:
        """Whether the client hears of the queue."""
        return not self.is_moving

    def backend_lost(self) -> None:
        """Move to another slot, or end the session: the backend is lost."""
        if self.is_moving and self.releasing:
            return
        is_lost, is_poison = self.call.phase is Phase.RUNNING, self.is_repeated
        if not self.settle():
            return
        self.losses += 1
        self.is_repeated = is_lost or self.is_repeated
        may_go_on = not (is_lost and is_poison) and self.losses <= LOSSES_MAX
        if self.outlives_worker and may_go_on:
            self.leave()
        else:
            self.give_up("the model was lost")

    def lease_revoked(self, event: ev.LeaseRevoked) -> None:
        """Move to another slot, now or after the model call in progress."""
        is_held = event.lease == self.lease and not self.releasing
        if is_held and self.outlives_worker and not self.is_closed:
            self.is_revoked = True
            self.move_if_due()

    def move_if_due(self) -> bool:
        """Whether the session moves: its slot is revoked or unused, and no call is in progress."""
        is_due = self.is_revoked or (self.is_asleep and not self.is_moving)
        if is_due and self.call.is_idle and not self.is_closed:
            self.leave()
        return self.is_moving

    def answered(self) -> None:
        """Note that a model call ended, and its worker lives."""
        self.is_repeated, self.losses = False, 0

    def leave(self) -> None:
        """Give the slot back, to ask for another."""
        self.is_moving, self.is_revoked = True, False
        self.cancel_timer("rebuild")
        if not self.is_asleep:
            self.set_timer("rebuild", self.opened.limits.rebuild_wait_s)
        self.release()

    @property
    def may_sleep(self) -> bool:
        """Whether it can do without its slot: what the model knew is in the log."""
        return self.outlives_worker

    def sleep(self) -> None:
        """Give the slot back, or the place in the queue for another one."""
        if self.is_moving and self.waits_for_slot:
            self.cancel_timer("rebuild")
            self.do(ef.LeaveQueue())
        else:
            self.move_if_due()

    def wake(self) -> None:
        """Ask for a slot, if it has none."""
        if self.is_moving and self.lease is None and not self.waits_for_slot:
            self.slot_returned()

    # -- arriving -------------------------------------------------------------------------------

    def slot_returned(self) -> None:
        """Ask for another slot."""
        if self.is_moving and not self.is_closed and not self.is_asleep:
            self.waits_for_slot = True
            self.do(ef.EnterQueue(mode=self.opened.mode, ahead=True))

    def slot_leased(self) -> None:
        """Go on with the first slot, or have the model rebuilt on another."""
        past_s = self.past_s()
        if not self.is_moving:
            self.first_slot()
        elif self.is_asleep:
            self.release()
        elif past_s is None:
            self._arrive()
        elif not self.outlives_worker:  # the recording failed meanwhile
            self.give_up("the model was lost")
        else:
            assert self.lease is not None
            self.cancel_timer("rebuild")
            # A rebuild that is slower than the sound came in is of no use.
            self.set_timer("rebuild", self.opened.limits.rebuild_wait_s + past_s)
            self.call.phase = Phase.REBUILDING
            self.do(ef.Rebuild(lease=self.lease))

    def rebuilt(self, event: ev.Rebuilt) -> None:
        """Go on: the model has the session's past."""
        if self.is_rebuilding(event.lease) and self.settle():
            self._arrive()

    def rebuild_failed(self, event: ev.RebuildFailed) -> None:
        """End the session: what the model knew is lost."""
        if self.is_rebuilding(event.lease) and self.settle():
            self.give_up("the model was lost")

    def admission_refused(self, code: ErrorCode) -> None:
        """End the session, or refuse it: there is no slot."""
        if self.is_moving:
            self.give_up("the model was lost")
        else:
            super().admission_refused(code)

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer that bounds the session, or its move."""
        if name == "rebuild":
            self.give_up("the model was lost")
        else:
            super().timed_out(name)

    def is_rebuilding(self, lease: int) -> bool:
        """Whether the model is being rebuilt on this lease."""
        return lease == self.lease and self.call.phase is Phase.REBUILDING

    def _arrive(self) -> None:
        self.is_moving = False
        self.cancel_timer("rebuild")
        self.take_up()
