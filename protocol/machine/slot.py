"""The session's slot of the model: its queue, its lease, its release, and its loss.

A slot is released when the model call in progress ends (B4, B5); a call that hangs condemns its
worker.

A session that holds its slot to its end outlives its worker, if it is recorded (B11):

lost or revoked -> slot released -> queued ahead of others -> slot leased -> rebuilt -> it goes on

The log holds what the model was fed and what it decided, so another worker is brought to the same
state. Nothing is sent to the client meanwhile, and its input waits. The call that was lost with the
worker is made again with the same index, once: a unit that kills its worker must not kill them all.
"""

from __future__ import annotations

from typing import Final, Protocol

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.behaviour import OWN_TIME, SLEEPS_AMID_MOVES
from ..values.errors import REFUSALS, ErrorCode
from ..values.limits import ESTIMATE_INTERVAL_S, LOSSES_MAX, NS_PER_S
from ..values.messages import Queued, QueuePlace, QueueUpdate
from ..values.modes import Mode
from .core import Call, Phase, Recording, Step, Timers
from .peer import Peer

MODEL_LOST: Final = "the model was lost"


@attrs.define(eq=False)
class Slot:
    """The lease of a slot, from `SlotLeased` to `BackendReleased`, or the place in the queue.

    Attributes:
        call: the model call in progress on the slot.
        lease: None without a slot; a chat has one each turn.
        is_waiting: a place in the queue is held, or its answer is on the way.
        place, sent_ns: the place in the queue last sent for this slot, and when; None before.
    """

    step: Step
    timers: Timers
    peer: Peer
    call: Call = attrs.Factory(Call)
    lease: int | None = None
    is_waiting: bool = False
    is_releasing: bool = False
    place: QueuePlace | None = None
    sent_ns: int = 0

    def enter_queue(self, mode: Mode, *, ahead: bool = False) -> None:
        """Wait for a slot."""
        self.is_waiting = True
        self.step.do(ef.EnterQueue(mode=mode, ahead=ahead))

    def send_place(self, place: QueuePlace) -> None:
        """Send the client its place at once when it moved, a new estimate only now and then."""
        sent, now_ns = self.place, self.step.now_ns
        if sent == place:
            return
        if sent is not None:
            moved = (sent.position, sent.queue_length) != (place.position, place.queue_length)
            if not moved and now_ns - self.sent_ns < ESTIMATE_INTERVAL_S * NS_PER_S:
                return
        self.place, self.sent_ns = place, now_ns
        is_for_openai = self.step.behaves(OWN_TIME)
        message = Queued if sent is None else QueueUpdate
        self.peer.send(message(place=place, is_for_openai=is_for_openai))

    def settle(self) -> bool:
        """Note that the model call is over; a CLOSED session releases its slot and gets False."""
        self.call.settle()
        if self.peer.is_closed:
            self.release()
        return not self.peer.is_closed

    def release(self, *, condemn: bool = False) -> None:
        """Release the slot, once (B5); `condemn`: a call hangs, retire its worker (B4)."""
        if self.lease is not None and not self.is_releasing:
            self.is_releasing = True
            self.timers.cancel("cleanup")
            self.step.do(ef.Release(lease=self.lease, condemn=condemn))

    def forget(self) -> None:
        """Have no slot, as a fork has none of the other session's."""
        self.lease, self.place = None, None
        self.is_releasing = False
        self.call.settle()


class SlotUser(Protocol):
    """What a session does with its slots: it holds one to its end, or one for each turn."""

    @property
    def is_quiet(self) -> bool:
        """Whether the client hears nothing of the queue."""

    @property
    def may_sleep(self) -> bool:
        """Whether the session can do without the slot that it holds, or holds none."""

    def slot_leased(self) -> None:
        """Go on with the slot."""

    def slot_returned(self) -> None:
        """Go on after the slot is cleaned and returned."""

    def admission_refused(self, code: ErrorCode) -> None:
        """Refuse or end the session: there is no room, or no place in the queue."""

    def backend_lost(self) -> None:
        """Go on without the backend, or end the session."""

    def rebuild_timed_out(self) -> None:
        """Give up the wait for another slot."""

    def sleep(self) -> None:
        """Give the slot back when no model call is in progress."""

    def wake(self) -> None:
        """Ask for a slot again."""


class Migrating(Protocol):
    """The kind of a session that holds its slot to its end."""

    def first_slot(self) -> None:
        """Go on with the first slot."""

    def refuse(self, code: ErrorCode, message: str) -> None:
        """Turn the session away."""

    def give_up(self, text: str) -> None:
        """End the session: the model does not answer."""


class Work(Protocol):
    """What the model does for a session that holds its slot to its end."""

    def past_s(self) -> int | None:
        """Return the seconds of input that a rebuild feeds; None if there is nothing to rebuild."""

    def leaving(self) -> None:
        """Prepare for the time without a slot."""

    def resume_work(self) -> None:
        """Go on where the session was: the model is back."""


@attrs.define(eq=False)
class Migration:
    """A slot that is held to the session's end, and its move to another worker.

    Attributes:
        is_migrating: from the loss of the slot until the model is back.
        is_revoked: it moves when no model call is in progress.
        is_repeated: the call in progress, or that which comes next, was lost with a worker.
        losses: workers lost since a call of the session ended.
        has_queue_messages: the dialect has messages about the queue.
    """

    step: Step
    timers: Timers
    peer: Peer
    recording: Recording
    slot: Slot
    call: Call
    kind: Migrating
    has_queue_messages: bool = True
    work: Work = attrs.field(init=False)
    is_migrating: bool = False
    is_revoked: bool = False
    is_repeated: bool = False
    losses: int = 0

    # -- leaving --------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether the client hears nothing of the queue."""
        return self.is_migrating or not self.has_queue_messages

    def backend_lost(self) -> None:
        """Move to another slot, or end the session: the backend is lost."""
        if self.is_migrating and self.slot.is_releasing:
            return
        is_lost, is_poison = self.call.phase is Phase.RUNNING, self.is_repeated
        if not self.slot.settle():
            return
        self.losses += 1
        self.is_repeated = is_lost or self.is_repeated
        may_go_on = not (is_lost and is_poison) and self.losses <= LOSSES_MAX
        if self.recording.outlives_worker and may_go_on:
            self.leave()
        else:
            self.kind.give_up(MODEL_LOST)

    def lease_revoked(self, event: ev.LeaseRevoked) -> None:
        """Move to another slot, now or after the model call in progress."""
        is_held = event.lease == self.slot.lease and not self.slot.is_releasing
        if is_held and self.recording.outlives_worker and not self.peer.is_closed:
            self.is_revoked = True
            self.move_if_due()

    def move_if_due(self) -> bool:
        """Whether the session moves: its slot is revoked or unused, and no call is in progress."""
        is_due = self.is_revoked or (self.peer.is_asleep and not self.is_migrating)
        if is_due and self.call.is_idle and not self.peer.is_closed:
            self.leave()
        return self.is_migrating

    def answered(self) -> None:
        """Note that a model call ended, and its worker lives."""
        self.is_repeated, self.losses = False, 0

    def leave(self) -> None:
        """Give the slot back, to ask for another."""
        self.work.leaving()
        self.is_migrating, self.is_revoked = True, False
        self.timers.cancel("rebuild")
        if not self.peer.is_asleep:
            self.timers.set("rebuild", self.step.limits.rebuild_wait_s)
        self.slot.release()

    @property
    def may_sleep(self) -> bool:
        """Whether it can do without its slot: what the model knew is in the log."""
        return self.recording.outlives_worker

    def sleep(self) -> None:
        """Give the slot back, or the place in the queue for another one."""
        if not self.is_migrating:
            self.move_if_due()
        elif self.slot.is_waiting:
            self.timers.cancel("rebuild")
            self.step.do(ef.LeaveQueue())
        elif self.slot.is_releasing and self.step.behaves(SLEEPS_AMID_MOVES):
            self.timers.cancel("rebuild")

    def wake(self) -> None:
        """Ask for a slot, if it has none; the wait is bounded only by the client's patience."""
        if self.is_migrating and self.slot.lease is None and not self.slot.is_waiting:
            self.slot_returned()

    def forget(self) -> None:
        """Forget the moves of the session that a fork began from."""
        self.is_migrating = self.is_revoked = self.is_repeated = False
        self.losses = 0

    # -- arriving -------------------------------------------------------------------------------

    def slot_returned(self) -> None:
        """Ask for another slot."""
        if self.is_migrating and not self.peer.is_closed and not self.peer.is_asleep:
            self.slot.enter_queue(self.step.opened.mode, ahead=True)

    def slot_leased(self) -> None:
        """Go on with the first slot, or have the model rebuilt on another."""
        past_s = self.work.past_s()
        if not self.is_migrating:
            self.kind.first_slot()
        elif self.peer.is_asleep:
            self.slot.release()
        elif past_s is None:
            self._arrive()
        elif not self.recording.outlives_worker:  # the recording failed meanwhile
            self.kind.give_up(MODEL_LOST)
        else:
            self.timers.cancel("rebuild")
            self.rebuild(past_s)

    def rebuild(self, past_s: int) -> None:
        """Have the model brought to the session's past."""
        assert self.slot.lease is not None
        # A rebuild that is slower than the sound came in is of no use.
        self.timers.set("rebuild", self.step.limits.rebuild_wait_s + past_s)
        self.call.phase = Phase.REBUILDING
        self.step.do(ef.Rebuild(lease=self.slot.lease))

    def rebuilt(self, event: ev.Rebuilt) -> None:
        """Go on: the model has the session's past."""
        if self.is_rebuilding(event.lease) and self.slot.settle():
            self._arrive()

    def rebuild_failed(self, event: ev.RebuildFailed) -> None:
        """End the session: what the model knew is lost."""
        if self.is_rebuilding(event.lease) and self.slot.settle():
            self.kind.give_up(MODEL_LOST)

    def rebuild_timed_out(self) -> None:
        """End the session: there was no other slot in time, or the rebuild took too long."""
        self.kind.give_up(MODEL_LOST)

    def admission_refused(self, code: ErrorCode) -> None:
        """End the session, or refuse it: there is no slot."""
        if self.is_migrating:
            self.kind.give_up(MODEL_LOST)
        else:
            self.kind.refuse(code, REFUSALS[code])

    def is_rebuilding(self, lease: int) -> bool:
        """Whether the model is being rebuilt on this lease."""
        return lease == self.slot.lease and self.call.phase is Phase.REBUILDING

    def _arrive(self) -> None:
        self.is_migrating = False
        self.timers.cancel("rebuild")
        self.work.resume_work()
