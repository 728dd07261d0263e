"""The part of a session that all courses share: state, sending, timers, slot, end.

A course (`duplex`, `chat`, `transcription`) is a `Core` that overrides the hooks below and has a
method for each message and event of its own (`methods.METHODS`).

- Every message to the client passes `say`, which looks its transition up in `state.TRANSITIONS`.
- `end` says `session.closed` if there was a `session.created`, then closes the socket.
- A CLOSED session sends nothing. Its slot is released when the model call in progress ends (B4,
  B5); a call that hangs condemns its worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.digest import derive_id, session_id_of
from ..values.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_NORMAL,
    CLOSE_POLICY,
    CLOSE_RESTART,
    CLOSE_TRY_LATER,
    REFUSALS,
    ErrorCode,
    FrameError,
)
from ..values.limits import MS_PER_S, NS_PER_S
from ..values.messages import (
    Closed,
    Created,
    EndReason,
    ErrorReport,
    QueueDone,
    QueuePlace,
    RecordingState,
    ServerMessage,
)
from ..values.requests import ClientMessage
from ..values.state import ConnectionEnded, Course, Gate, Role, State, Trigger, gate_of, next_state
from ..values.utf8 import Frame, Refused
from ..wire.dialects.base import Dialect
from .timers import LIFE_TIMERS, Timers
from .unit_loop import Call

CLOSE_CODES: Final[Mapping[EndReason, int]] = {
    "backend_error": CLOSE_INTERNAL_ERROR,
    "server_shutdown": CLOSE_RESTART,
    "flooded": CLOSE_POLICY,
}
"""The WebSocket close code of each reason; other reasons close normally (the wire decisions)."""

CLOSE_WORDS: Final[Mapping[EndReason, str]] = {
    "client": "stopped",
    "pause_timeout": "timeout",
    "flooded": "more was sent than can be recorded",
}
"""The reason of the WebSocket close, where it differs from the end's name."""


@attrs.define(kw_only=True, eq=False)
class Core:
    """State, effects and slot of one session; each course adds its own.

    Attributes:
        has_opening: an init sets it up, which may come early and ask for notices.
        goodbye_in: the states in which an end is a message of its own.
        opened: the session's first event: its ids, seed and limits; a fork has limits of its own.
        is_forking: the model is to be brought to the past of another session.
        recording: the state of the recording, as sent to clients.
        lease: the slot's lease, from `SlotLeased` to `BackendReleased`; a chat has one each turn.
        waits_for_slot: a place in the queue is held, or its answer is on the way.
        place, told_ns: the place in the queue last sent for this slot, and when; None before.
        call: the model call in progress, even if no longer wanted.
        alive_ns: the last sign of life of that call; None without one.
        is_draining: the server will shut down; no turn begins any more.
        frames_sent: the ordinal of the next `Send`.
        fields_ignored: unknown or unused fields that clients sent (the wire decisions).
        wants_notices: the client asked for messages that do not answer its own.
        said, taken: messages of this step: to the client, and the client's own, if taken.
        cause: the client's own name for the message that is being read; may be empty.
    """

    course: ClassVar[Course]
    has_opening: ClassVar[bool] = True
    goodbye_in: ClassVar[frozenset[State]] = frozenset({State.ACTIVE})

    opened: ev.ConnectionOpened
    dialect: Dialect
    is_forking: bool = False
    state: State = State.QUEUED
    now_ns: int = 0
    recording: RecordingState = "off"
    end_reason: EndReason | None = None
    lease: int | None = None
    waits_for_slot: bool = False
    place: QueuePlace | None = None
    told_ns: int = 0
    releasing: bool = False
    call: Call = attrs.Factory(Call)
    timers: Timers = attrs.Factory(Timers)
    frames_sent: int = 0
    media: int = 0
    fields_ignored: int = 0
    effects: list[ef.Effect] = attrs.Factory(list)
    alive_ns: int | None = None
    is_draining: bool = False
    early: Frame = None
    wants_notices: bool = False
    cause: str = ""
    said: list[ServerMessage] = attrs.Factory(list)
    taken: ClientMessage | None = None

    # -- what a course says of itself -----------------------------------------------------------

    def begin(self) -> None:
        """Queue for the slot that is held to the session's end."""
        self.waits_for_slot = True
        self.set_timer("session", self.opened.limits.session_s)
        self.do(ef.EnterQueue(mode=self.opened.mode))

    def admitted(self) -> None:
        """Go on: there is room for a session without a slot."""

    def admission_refused(self, code: ErrorCode) -> None:
        """Refuse the session: there is no room, or no place in the queue."""
        self.refuse(code, REFUSALS[code])

    def slot_leased(self) -> None:
        """Go on with the slot."""
        raise NotImplementedError

    def slot_returned(self) -> None:
        """Go on after the slot is cleaned and returned."""

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        if self.early_bytes is not None:
            return Gate.KEPT if self.early_bytes else Gate.WAITING
        return gate_of(self.course, self.state)

    def frame_refused(self, error: FrameError, _code: ErrorCode) -> None:
        """Answer an unreadable frame."""
        self.end("invalid_frame", close_code=error.close_code, words=error.reason)

    def refused(self, _message: ClientMessage) -> Refused | None:
        """Return the refusal of a valid message, changing nothing; None accepts it."""
        return None

    def heard(self) -> None:
        """Note that the client sent a message of any kind."""

    def number(self, frame: str) -> str:
        """Number a frame, if the client asked for it."""
        return frame

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer that bounds the session."""
        self.end("pause_timeout" if name == "pause" else "timeout")

    @property
    def is_busy(self) -> bool:
        """Whether the model works for the client, who is warned before the server shuts down."""
        return self.state is State.ACTIVE

    def shut_down(self) -> None:
        """End the session: the server shuts down."""
        self.end("server_shutdown")

    def backend_lost(self) -> None:
        """End the session: the backend is lost."""
        if self.settle():
            self.give_up("the model was lost")

    def give_up(self, _text: str) -> None:
        """End the session: the model does not answer."""
        self.end("backend_error")

    def cut(self) -> ef.Effect | None:
        """Return the effect that cuts the model call in progress, or None."""
        return None

    def farewell(self) -> None:
        """Send what is due before the end."""

    @property
    def hears_queue(self) -> bool:
        """Whether the client hears of the queue."""
        return True

    @property
    def outlives_worker(self) -> bool:
        """Whether another worker may take the place of a lost one: the log holds what it knew."""
        return self.opened.limits.rebuild_wait_s > 0 and self.recording == "on"

    @property
    def units_waiting(self) -> int:
        """Full seconds of input that wait for the model."""
        return 0

    @property
    def counts(self) -> dict[str, int]:
        """The course's counters."""
        return {"units": 0, "units_dropped": 0, "appends": 0}

    def behaves(self, change: int) -> bool:
        """Whether the session's course includes a change (`behaviour`)."""
        return self.opened.behaviour >= change

    @property
    def early_bytes(self) -> int | None:
        """Size of the kept opening message; 0 if one may come, None if not."""
        is_kept = self.has_opening and self.state is State.QUEUED
        return len(self.early or b"") if is_kept else None

    @property
    def session_id(self) -> str:
        """The session's id as the client knows it; it depends on the dialect."""
        if self.opened.endpoint == "duplex":
            return self.opened.label or derive_id("duplex", self.opened.recording_id, 0)
        if self.dialect.name == "duplex-v1":
            return f"rt_{self.opened.created_ms}"
        return session_id_of(self.opened.recording_id)

    @property
    def recording_id(self) -> str:
        """The recording's name as sent to the client; empty without a recording."""
        return self.opened.recording_id if self.recording == "on" else ""

    def decode(self, kind: ef.MediaKind, data: bytes, **how: int) -> int:
        """Request `DecodeMedia`; returns the media's number."""
        number, self.media = self.media, self.media + 1
        self.do(ef.DecodeMedia(media=number, kind=kind, data=data, **how))
        return number

    # -- saying ---------------------------------------------------------------------------------

    def do(self, effect: ef.Effect) -> None:
        """Append an effect."""
        self.effects.append(effect)

    def say(self, message: ServerMessage) -> None:
        """Send a message; the table says whether it may be sent, and the next state."""
        self.state = next_state(Role.SERVER, self.course, self.state, type(message))
        message = _named(message, session_id_of(self.opened.recording_id))
        self.said.append(message)
        for frame in self.dialect.encode(message):
            self.say_frame(frame)

    def say_frame(self, frame: str) -> None:
        """Send a frame."""
        self.do(ef.Send(ordinal=self.frames_sent, frame=self.number(frame)))
        self.frames_sent += 1

    def move(self, trigger: Trigger) -> None:
        """Take a transition without a message."""
        self.state = next_state(Role.SERVER, self.course, self.state, trigger)

    def queue_done(self) -> None:
        """Tell the client that its turn has come, and set the time for its init."""
        if self.opened.quiet and self.place is None:
            self.move(QueueDone)
        else:
            self.say(QueueDone())
        self.set_timer("init", self.opened.limits.init_wait_s)

    def create(self, *, prompt_length: int = 0, is_chat: bool = False) -> None:
        """Tell the client that the session is set up."""
        self.say(
            Created(
                session_id=self.session_id,
                prompt_length=prompt_length,
                recording=self.recording,
                recording_id=self.recording_id,
                recording_notice=self.opened.recording_notice if self.recording == "on" else "",
                is_chat=is_chat,
                created_s=self.opened.created_ms // MS_PER_S,
            )
        )

    def complain(self, code: ErrorCode, message: str) -> None:
        """Send an `error`; the connection stays."""
        self.say(ErrorReport(code=code, message=message))

    def turn_down(self, refused: Refused) -> None:
        """Refuse a valid message, or one that its recording holds as refused."""
        self.fields_ignored += refused.ignored
        self.complain(refused.code, refused.message)

    def set_timer(self, name: ev.TimerName, seconds: float) -> None:
        """Set a timer, in seconds from now."""
        self.do(self.timers.set(name, self.now_ns + int(seconds * NS_PER_S)))

    def cancel_timer(self, name: ev.TimerName) -> None:
        """Cancel a timer, if it is set."""
        cancel = self.timers.cancel(name)
        if cancel is not None:
            self.do(cancel)

    # -- ending ---------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether the session is over: nothing more is sent."""
        return self.state is State.CLOSED

    def end(
        self,
        reason: EndReason,
        *,
        close_code: int | None = None,
        words: str | None = None,
        client_reason: str | None = None,
        told: str | None = None,
    ) -> None:
        """End the session from our side; without effect once it is CLOSED.

        Args:
            close_code: WebSocket close code; None takes the reason's.
            words: WebSocket close reason; None takes the reason's.
            client_reason: the client's own words.
            told: as in `Closed`.
        """
        if self.is_closed:
            return
        if self.state in self.goodbye_in:
            self.farewell()
            self.say(
                Closed(
                    session_id=self.session_id,
                    reason=reason,
                    client_reason=client_reason,
                    told=told,
                )
            )
        else:
            self.move(ConnectionEnded)
        code = close_code or CLOSE_CODES.get(reason, CLOSE_NORMAL)
        self.do(ef.Close(code=code, reason=words or CLOSE_WORDS.get(reason, reason)))
        self._clean_up(reason)

    def lose_peer(self) -> None:
        """End the session without sending: the peer is gone."""
        if not self.is_closed:
            self.move(ConnectionEnded)
            self._clean_up("peer_gone")

    def refuse(self, code: ErrorCode, message: str, *, close_code: int = CLOSE_TRY_LATER) -> None:
        """Turn the session away for a reason of ours: an error, then 1013 (000, Server Errors)."""
        if not self.is_closed:
            self.say(ErrorReport(code=code, message=message))
            self.end("refused", close_code=close_code, words=code)

    def _clean_up(self, reason: EndReason) -> None:
        self.end_reason = reason
        self.early = None
        for timer in LIFE_TIMERS:
            self.cancel_timer(timer)
        if self.waits_for_slot:
            self.do(ef.LeaveQueue())
        if self.lease is None:
            return
        cut = self.cut()
        if cut is not None:
            self.do(cut)
        if self.call.is_idle:
            self.release()
        else:
            self.set_timer("cleanup", self.opened.limits.cleanup_wait_s)

    def settle(self) -> bool:
        """Note that the model call is over; a CLOSED session releases its slot and gets False."""
        self.call.settle()
        if self.is_closed:
            self.release()
        return not self.is_closed

    def release(self, *, condemn: bool = False) -> None:
        """Release the slot, once (B5); `condemn`: a call hangs, retire its worker (B4)."""
        if self.lease is not None and not self.releasing:
            self.releasing = True
            self.cancel_timer("cleanup")
            self.do(ef.Release(lease=self.lease, condemn=condemn))


def _named(message: ServerMessage, session_id: str) -> ServerMessage:
    match message:
        case ErrorReport():
            return attrs.evolve(message, session_id=session_id)
        case Closed():
            return attrs.evolve(message, named=session_id)
    return message
