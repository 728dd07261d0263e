"""What all kinds of sessions share: how a session begins and ends, and its slot of the model.

A kind (`duplex`, `live`, `openai`, `omni`, `chat`, `transcription`, `dictation`) is a `Kind` that
wires its parts and holds what only it has. `handlers` names the method for each event and message
of its own.

- `end` sends `session.closed` if there was a `session.created`, then closes the socket.
- A CLOSED session releases its slot when the model call in progress ends (B4, B5); a call that
  hangs condemns its worker.

A session that holds its slot to its end outlives its worker, if it is recorded (B11, `Migration`):

lost or revoked -> slot released -> queued ahead of others -> slot leased -> rebuilt -> it goes on

The log holds what the model was fed and what it decided, so another worker is brought to the same
state. Nothing is sent to the client meanwhile, and its input waits. The call that was lost with the
worker is made again with the same index, once: a unit that kills its worker must not kill them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import attrs

from ..values import effects as ef
from ..values import errors
from ..values import events as ev
from ..values.behaviour import CLOSING_ENDS, OWN_TIME, SLEEPS_AMID_MOVES
from ..values.frames import Refused
from ..values.limits import ESTIMATE_INTERVAL_S, LOSSES_MAX, NS_PER_S, Mode
from ..values.messages import (
    Closed,
    EndReason,
    GoingAway,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
)
from ..values.requests import ClientMessage
from ..values.state import BEGINNINGS, ConnectionEnded, Gate, SessionKind, State, gate_of
from ..wire.dialects import first_dialect
from .core import LIFE_TIMERS, Call, Peer, Phase, Recording, Step, Timers, Watchdog

# -- the slot of the model ----------------------------------------------------------------------

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

    def admission_refused(self, code: errors.ErrorCode) -> None:
        """Refuse or end the session: there is no room, or no place in the queue."""

    def backend_lost(self) -> None:
        """Go on without the backend, or end the session."""

    def rebuild_timed_out(self) -> None:
        """Give up the wait for another slot."""

    def sleep(self) -> None:
        """Give the slot back when no model call is in progress."""

    def wake(self) -> None:
        """Ask for a slot again."""


class MigratingKind(Protocol):
    """The kind of a session that holds its slot to its end."""

    def first_slot(self) -> None:
        """Go on with the first slot."""

    def refuse(self, code: errors.ErrorCode, message: str) -> None:
        """Turn the session away."""

    def give_up(self, text: str) -> None:
        """End the session: the model does not answer."""


class MigratableWork(Protocol):
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
    kind: MigratingKind
    has_queue_messages: bool = True
    work: MigratableWork = attrs.field(init=False)
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

    def admission_refused(self, code: errors.ErrorCode) -> None:
        """End the session, or refuse it: there is no slot."""
        if self.is_migrating:
            self.kind.give_up(MODEL_LOST)
        else:
            self.kind.refuse(code, errors.REFUSALS[code])

    def is_rebuilding(self, lease: int) -> bool:
        """Whether the model is being rebuilt on this lease."""
        return lease == self.slot.lease and self.call.phase is Phase.REBUILDING

    def _arrive(self) -> None:
        self.is_migrating = False
        self.timers.cancel("rebuild")
        self.work.resume_work()


# -- a session and what its kind decides ----------------------------------------------------------

CLOSE_CODES: Final[Mapping[EndReason, int]] = {
    "backend_error": errors.CLOSE_INTERNAL_ERROR,
    "server_shutdown": errors.CLOSE_RESTART,
    "flooded": errors.CLOSE_POLICY,
}
"""The WebSocket close code of each reason; other reasons close normally (the wire decisions)."""

CLOSE_WORDS: Final[Mapping[EndReason, str]] = {
    "client": "stopped",
    "pause_timeout": "timeout",
    "flooded": "more was sent than can be recorded",
}
"""The reason of the WebSocket close, where it differs from the end's name."""
Handlers = Mapping[type[ev.Event] | type[ClientMessage], Callable[[Any], Callable[[Any], None]]]
"""How a kind's method for an event or message is found, as by `attrgetter`."""


class ModelLoop(Protocol):
    """The model calls of a session, one after the other."""

    @property
    def counts(self) -> dict[str, int]:
        """Units started and dropped, and appends; turns, or utterances and chunks."""

    @property
    def units_waiting(self) -> int:
        """Full seconds of input that wait for the model."""

    @property
    def is_busy(self) -> bool:
        """Whether the model works for the client, who is warned before the server shuts down."""

    def cut(self) -> ef.Effect | None:
        """Return the effect that cuts the model call in progress, or None."""


@attrs.define(eq=False)
class Kind:
    """One session: its parts, and what its kind decides.

    Attributes:
        has_opening: an init sets it up, which may come early and ask for notices.
        closed_in: the states in which an end is a message of its own.
        opens_model: the model is opened before the session is set up.
        answers_unreadable: an unreadable frame is answered by an error, and the session goes on.
        slot_user: the part that uses the slot.
        loop: the part that makes model calls on it.
        is_draining: the server will shut down; no turn begins any more.
    """

    session_kind: ClassVar[SessionKind]
    has_opening: ClassVar[bool] = True
    closed_in: ClassVar[frozenset[State]] = frozenset({State.ACTIVE})
    opens_model: ClassVar[bool] = False
    answers_unreadable: ClassVar[bool] = False
    handlers: ClassVar[Handlers]

    step: Step
    timers: Timers = attrs.field(init=False)
    recording: Recording = attrs.field(init=False)
    peer: Peer = attrs.field(init=False)
    slot: Slot = attrs.field(init=False)
    watchdog: Watchdog = attrs.field(init=False)
    slot_user: SlotUser = attrs.field(init=False)
    loop: ModelLoop = attrs.field(init=False)
    end_reason: EndReason | None = None
    is_draining: bool = False

    def __attrs_post_init__(self) -> None:
        opened = self.step.opened
        self.timers = Timers(self.step)
        self.recording = Recording(self.step, opened.recording)
        self.peer = Peer(
            step=self.step,
            timers=self.timers,
            recording=self.recording,
            session_kind=self.session_kind,
            state=BEGINNINGS[self.session_kind],
            dialect=first_dialect(opened.mode, opened.endpoint),
            has_event_ids=opened.endpoint in ev.EVENT_IDS,
            is_omni=opened.endpoint == "omni",
        )
        self.slot = Slot(self.step, self.timers, self.peer)
        self.watchdog = Watchdog(self.step, self.timers, self.slot.call)

    # -- what a kind decides --------------------------------------------------------------------

    def begin(self) -> None:
        """Queue for the slot that is held to the session's end."""
        if not self.has_own_time:
            self.timers.set("session", self.step.limits.session_s)
        self.slot.enter_queue(self.step.opened.mode)

    @property
    def has_own_time(self) -> bool:
        """Whether its time begins with its slot."""
        return self.step.opened.endpoint == "openai" and self.step.behaves(OWN_TIME)

    def admitted(self) -> None:
        """Go on: there is room for a session without a slot."""

    @property
    def samples_waiting(self) -> int:
        """Samples of the client's sound that no unit in the model has yet."""
        return 0

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        if self.peer.state is State.QUEUED and self.has_opening:
            return Gate.KEPT if self.peer.early else Gate.WAITING
        return gate_of(self.session_kind, self.peer.state)

    def refusal(self, _message: ClientMessage) -> Refused | None:
        """Return the refusal of a valid message, changing nothing; None accepts it."""
        return None

    def frame_refused(self, error: errors.FrameError, code: errors.ErrorCode) -> None:
        """Answer an unreadable frame, and end the session, unless its kind goes on (003)."""
        if self.answers_unreadable and error.close_code != errors.CLOSE_TOO_BIG:
            self.send_error(code, error.reason)
        else:
            self.end("invalid_frame", close_code=error.close_code, words=error.reason)

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer that bounds the session, or a wait for its client or slot."""
        match name:
            case "detach":
                self._fall_asleep()
            case "rebuild":
                self.slot_user.rebuild_timed_out()
            case _:
                self.end("pause_timeout" if name == "pause" else "timeout")

    def shut_down(self) -> None:
        """End the session: the server shuts down."""
        self.end("server_shutdown")

    def give_up(self, text: str) -> None:
        """End the session, or refuse it before it is set up: the model does not answer."""
        if self.opens_model and self.peer.state is State.CONNECTED:
            self.refuse(errors.ErrorCode.WORKER_CONNECT_FAILED, text)
        else:
            self.end("backend_error")

    def init_rejected(self, message: str) -> None:
        """Return to CONNECTED: the client may send a better init."""
        self.peer.send_error(errors.ErrorCode.INVALID_PAYLOAD, message)
        self.timers.set("init", self.step.limits.init_wait_s)

    def finish(self, _reason: EndReason) -> None:
        """Send what is due before the end."""

    def closed_fields(self) -> dict[str, Any]:
        """Return the fields of `Closed` that only this kind has."""
        return {}

    def room_bytes(self) -> int:
        """Return the bytes of sound that are only kept, at least; one more might fill a second."""
        return 0

    def keep(self, messages: Sequence[Any]) -> None:
        """Keep the sound of messages that fit into the room, as taking each would."""
        raise NotImplementedError

    @property
    def early_bytes(self) -> int | None:
        """Size of the kept opening message; 0 if one may come, None if not."""
        is_kept = self.has_opening and self.peer.state is State.QUEUED
        return len(self.peer.early or b"") if is_kept else None

    # -- the client -----------------------------------------------------------------------------

    def send_error(self, code: errors.ErrorCode, message: str) -> None:
        """Send an `error`; the connection stays."""
        self.peer.send_error(code, message)

    def reject(self, refused: Refused) -> None:
        """Refuse a valid message, or one that its recording holds as refused."""
        self.peer.fields_ignored += refused.ignored
        self.send_error(refused.code, refused.message)

    def first_slot(self) -> None:
        """Tell the client that its turn has come, and set the time for its init."""
        if self.step.opened.quiet and self.slot.place is None:
            self.peer.move(QueueDone)
        else:
            self.peer.send(QueueDone())
        self.timers.set("init", self.step.limits.init_wait_s)

    def peer_gone(self, event: ev.PeerGone | ev.SendFailed) -> None:
        """Wait for the client, or end the session: the connection is over."""
        peer = self.peer
        has_left = isinstance(event, ev.PeerGone) and event.code == errors.CLOSE_NORMAL
        may_return = peer.is_resumable and not (peer.is_closed or peer.is_detached)
        if has_left and not peer.dialect.has_close and self.step.behaves(CLOSING_ENDS):
            self.lose_peer("client")
        elif has_left or not may_return:
            self.lose_peer()
        else:
            peer.detach()

    def peer_attached(self, event: ev.PeerAttached) -> None:
        """Give the new connection what the client has not received, and go on."""
        self.peer.attach(event.after)
        if self.peer.is_closed:
            self.step.do(ef.Close(code=errors.CLOSE_NORMAL, reason=self.end_reason or ""))
        elif self.peer.is_asleep:
            self.peer.is_asleep = False
            self.slot_user.wake()

    def _fall_asleep(self) -> None:
        if self.peer.is_active and self.slot_user.may_sleep:
            self.peer.is_asleep = True
            self.slot_user.sleep()
        else:
            self.lose_peer()

    def forget_recording(self) -> None:
        """Stop recording and remove the log, as the client asked."""
        if self.recording.state != "off":
            self.recording.state = "off"
            self.step.do(ef.ForgetRecording())
            self._not_recorded()

    def recording_failed(self) -> None:
        """Report it, except to a client that asked not to be recorded."""
        if self.recording.state != "off":
            self.recording.state = "failed"
            if self.step.limits.close_on_recording_failure:
                self.end("backend_error")
            self._not_recorded()

    def _not_recorded(self) -> None:
        """Tell the client that it cannot come back any more, or end the session if it has left."""
        if not self.peer.has_numbers or self.peer.is_closed:
            return
        if self.peer.is_detached:
            self.lose_peer()
        else:
            self.peer.send_unresumable()

    def drain(self, wait_s: int) -> None:
        """Warn a client whose model works for it; shut down the other sessions."""
        if self.peer.is_closed:
            return
        self.is_draining = True
        if not self.loop.is_busy:
            self.shut_down()
        elif self.has_opening and self.peer.wants_notices:
            self.peer.send(GoingAway(seconds_left=wait_s))

    # -- ending ---------------------------------------------------------------------------------

    def end(
        self,
        reason: EndReason,
        *,
        close_code: int | None = None,
        words: str | None = None,
        client_reason: str | None = None,
        error_text: str | None = None,
    ) -> None:
        """End the session from our side; without effect once it is CLOSED.

        Args:
            close_code: WebSocket close code; None takes the reason's.
            words: WebSocket close reason; None takes the reason's.
            client_reason: the client's own words.
            error_text: as in `Closed`.
        """
        peer = self.peer
        if peer.is_closed:
            return
        self.finish(reason)
        if peer.state in self.closed_in:
            peer.send(
                Closed(
                    session_id=peer.session_id,
                    reason=reason,
                    client_reason=client_reason,
                    error_text=error_text,
                    **self.closed_fields(),
                )
            )
        else:
            peer.move(ConnectionEnded)
        code = close_code or CLOSE_CODES.get(reason, errors.CLOSE_NORMAL)
        self.step.do(ef.Close(code=code, reason=words or CLOSE_WORDS.get(reason, reason)))
        self._clean_up(reason)

    def lose_peer(self, reason: EndReason = "peer_gone") -> None:
        """End the session without sending: the peer is gone."""
        if not self.peer.is_closed:
            self.peer.move(ConnectionEnded)
            self._clean_up(reason)

    def refuse(
        self, code: errors.ErrorCode, message: str, *, close_code: int = errors.CLOSE_TRY_LATER
    ) -> None:
        """Turn the session away for a reason of ours: an error, then 1013 (000, Server Errors)."""
        if not self.peer.is_closed:
            self.peer.send_error(code, message)
            self.end("refused", close_code=close_code, words=code)

    def _clean_up(self, reason: EndReason) -> None:
        self.end_reason = reason
        self.peer.early = None
        for timer in LIFE_TIMERS:
            self.timers.cancel(timer)
        slot = self.slot
        if slot.is_waiting:
            self.step.do(ef.LeaveQueue())
        if slot.lease is None:
            return
        cut = self.loop.cut()
        if cut is not None:
            self.step.do(cut)
        if slot.call.is_idle:
            slot.release()
        else:
            self.timers.set("cleanup", self.step.limits.cleanup_wait_s)
