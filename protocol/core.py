"""What every session has, whatever its mode: a state, a voice, timers, a slot, and an end.

- Every message to the client passes `say`, which looks its transition up in `state.TRANSITIONS`.
- `end` says `session.closed` where there was a `session.created`, then closes the socket.
- Once CLOSED nothing more is said, and the slot is given back as soon as the model call that was
  under way is over (B4, B5); one that hangs condemns its worker.

It does not know what clients say or what units and turns are made of: see `session`, `duplex` and
`chat`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs

from . import effects as ef
from . import events as ev
from .behaviour import EARLY_INIT, NOTICES, SESSION_NAMED
from .dialects.base import Dialect
from .dialects.opening import OPENING
from .digest import derive_id, session_id_of
from .errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_NORMAL,
    CLOSE_POLICY,
    CLOSE_RESTART,
    CLOSE_TRY_LATER,
    ErrorCode,
)
from .limits import NS_PER_S
from .messages import Closed, EndReason, ErrorReport, RecordingState, ServerMessage
from .state import ConnectionEnded, Course, Role, State, Trigger, course_of, next_state
from .timers import Timers
from .unit_loop import UnitLoop
from .utf8 import Frame, Refused

CLOSE_CODES: Final[Mapping[EndReason, int]] = {
    "backend_error": CLOSE_INTERNAL_ERROR,
    "server_shutdown": CLOSE_RESTART,
    "flooded": CLOSE_POLICY,
}
"""The WebSocket close code of each end; the others close normally (the wire decisions)."""

CLOSE_WORDS: Final[Mapping[EndReason, str]] = {
    "client": "stopped",
    "pause_timeout": "timeout",
    "flooded": "more was sent than can be recorded",
}
"""The reason of the WebSocket close, where it is not the end's own name."""

ENDED_TIMERS: Final[tuple[ev.TimerName, ...]] = ("session", "init", "idle", "pause", "call")
"""The timers that bound a session's life, and end with it."""


@attrs.define
class Core:
    """State, effects and slot of one session.

    Attributes:
        opened: the session's first event: its ids, seed and limits.
        state: where it stands.
        now_ns: the time of the event being handled.
        recording: what clients are told about the recording.
        end_reason: why it ended; None while it has not.
        lease: the slot's lease, from `SlotLeased` to `BackendReleased`; a chat has one each turn.
        waits_for_slot: a place in the queue is held, or its answer is on the way.
        opening_backend: `OpenBackend` is under way.
        releasing: `Release` is under way.
        loop: the unit loop, which knows the model call under way.
        running_turn: the turn of chat that is under way on the model, be it wanted or not.
        running_chunk: the chunk of a transcription that is under way on the model, likewise:
            which utterance's, and its index.
        alive_ns: when the model call under way last showed that it goes on; None where none is.
        is_draining: the server will shut down; no turn begins any more.
        frames_sent: the ordinal of the next `Send`.
        fields_ignored: unknown or unused fields that clients sent (the wire decisions).
        dialect: the wire protocol in use.
        early: the opening message that came while queued.
        wants_notices: the client asked to be told of what is not an answer to it.
        effects: what the event being handled asks for, in order.
        farewell: says what is still to be said before a session that is ACTIVE ends.
    """

    opened: ev.ConnectionOpened
    state: State = State.QUEUED
    now_ns: int = 0
    recording: RecordingState = "off"
    end_reason: EndReason | None = None
    lease: int | None = None
    waits_for_slot: bool = False
    opening_backend: bool = False
    releasing: bool = False
    loop: UnitLoop = attrs.Factory(UnitLoop)
    timers: Timers = attrs.Factory(Timers)
    frames_sent: int = 0
    fields_ignored: int = 0
    dialect: Dialect = OPENING
    effects: list[ef.Effect] = attrs.field(factory=list, eq=False)
    farewell: Callable[[], None] = attrs.field(default=lambda: None, eq=False)
    running_turn: int | None = None
    alive_ns: int | None = None
    is_draining: bool = False
    running_chunk: tuple[int, int] | None = None
    early: Frame = None
    wants_notices: bool = False

    def behaves(self, change: int) -> bool:
        """Whether the session's course has a change (`behaviour`)."""
        return self.opened.behaviour >= change

    @property
    def hears_notices(self) -> bool:
        """Whether the client is told of what is not an answer to it."""
        is_told = self.wants_notices or not self.behaves(NOTICES)
        return is_told and self.course in {Course.DUPLEX, Course.CHAT}

    @property
    def early_bytes(self) -> int | None:
        """Of the opening message that is kept; 0 where one may come, None where it may not."""
        has_opening = self.course in {Course.DUPLEX, Course.CHAT} and self.behaves(EARLY_INIT)
        is_waiting = has_opening and self.state is State.QUEUED
        return len(self.early or b"") if is_waiting else None

    @property
    def course(self) -> Course:
        """What the session is for."""
        return course_of(self.opened.mode, is_request=self.opened.endpoint == "chat")

    @property
    def is_calling(self) -> bool:
        """A model call is under way, be it wanted or not."""
        is_opening_or_answering = self.opening_backend or self.running_turn is not None
        return is_opening_or_answering or self.running_chunk is not None or not self.loop.is_idle

    @property
    def session_id(self) -> str:
        """What the client knows the session by; it depends on the dialect."""
        if self.opened.endpoint == "duplex":
            return self.opened.label or derive_id("duplex", self.opened.recording_id, 0)
        if self.dialect.name == "duplex-v1":
            return f"rt_{self.opened.created_ms}"
        return session_id_of(self.opened.recording_id)

    @property
    def recording_id(self) -> str:
        """What a client is told of its recording's name; empty where there is none."""
        was_told = self.opened.endpoint != "realtime"
        is_told = self.recording == "on" and (was_told or self.behaves(SESSION_NAMED))
        return self.opened.recording_id if is_told else ""

    @property
    def recording_notice(self) -> str:
        """What a client is told about its recording; empty where there is none."""
        return self.opened.recording_notice if self.recording == "on" else ""

    def forget_recording(self) -> None:
        """Record no more, and keep nothing of what was: the client asked for it."""
        if self.recording != "off":
            self.recording = "off"
            self.do(ef.ForgetRecording())

    def lose_recording(self) -> None:
        """The log failed; a client that is not recorded by its own wish is not concerned."""
        if self.recording != "off":
            self.recording = "failed"
            if self.opened.limits.close_on_recording_failure:
                self.end("backend_error")

    # -- saying ---------------------------------------------------------------------------------

    def do(self, effect: ef.Effect) -> None:
        """Ask for an effect."""
        self.effects.append(effect)

    def say(self, message: ServerMessage) -> None:
        """Send a message; the table says whether it may be sent and where it leads."""
        self.state = next_state(Role.SERVER, self.course, self.state, type(message))
        if self.behaves(SESSION_NAMED):
            message = _named(message, session_id_of(self.opened.recording_id))
        for frame in self.dialect.encode(message):
            self.do(ef.Send(ordinal=self.frames_sent, frame=frame))
            self.frames_sent += 1

    def move(self, trigger: Trigger) -> None:
        """Take a transition that no message makes."""
        self.state = next_state(Role.SERVER, self.course, self.state, trigger)

    def complain(self, code: ErrorCode, message: str) -> None:
        """Send an `error`; the connection stays, unless it carries a single request (004)."""
        self.say(ErrorReport(code=code, message=message))
        if self.course is Course.REQUEST:
            self.end("rejected")

    def turn_down(self, refused: Refused) -> None:
        """Refuse a message that is right by itself, or was refused so when it was recorded."""
        self.fields_ignored += refused.ignored
        self.complain(refused.code, refused.message)

    def set_timer(self, name: ev.TimerName, seconds: float) -> None:
        """Set a timer, in seconds from now."""
        self.do(self.timers.set(name, self.now_ns + int(seconds * NS_PER_S)))

    def cancel_timer(self, name: ev.TimerName) -> None:
        """Forget a timer, if it is set."""
        cancel = self.timers.cancel(name)
        if cancel is not None:
            self.do(cancel)

    # -- ending ---------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Nothing more is said."""
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
            reason: why, as `session.closed` says it.
            close_code: the WebSocket close code, where it is not the reason's own.
            words: the WebSocket close reason, likewise.
            client_reason: the client's own words.
            told: as in `Closed`.
        """
        if self.is_closed:
            return
        if self._says_goodbye:
            self.farewell()
            session_id = self.session_id
            self.say(
                Closed(session_id=session_id, reason=reason, client_reason=client_reason, told=told)
            )
        else:
            self.move(ConnectionEnded)
        code = close_code or CLOSE_CODES.get(reason, CLOSE_NORMAL)
        self.do(ef.Close(code=code, reason=words or CLOSE_WORDS.get(reason, reason)))
        self._clean_up(reason)

    @property
    def _says_goodbye(self) -> bool:
        """Whether an end is a message of its own; a transcription's is an error, in any state."""
        if self.course is Course.TRANSCRIPTION:
            return True
        return self.state is State.ACTIVE and self.course is not Course.REQUEST

    def lose_peer(self) -> None:
        """The peer is gone: nothing can be said any more."""
        if not self.is_closed:
            self.move(ConnectionEnded)
            self._clean_up("peer_gone")

    def refuse(self, code: ErrorCode, message: str, *, close_code: int = CLOSE_TRY_LATER) -> None:
        """Turn the session away for a reason of ours: an error, then 1013 (000, Server Errors)."""
        if not self.is_closed:
            self.say(ErrorReport(code=code, message=message))
            self.end("refused", close_code=close_code, words=code)

    def _clean_up(self, reason: EndReason) -> None:
        """Leave the queue, cut what runs, and see that the slot goes back."""
        self.end_reason = reason
        self.early = None
        for timer in ENDED_TIMERS:
            self.cancel_timer(timer)
        if self.waits_for_slot:
            self.do(ef.LeaveQueue())
        if self.lease is None:
            return
        interrupt = self.loop.interrupt()
        if interrupt is not None:
            self.do(interrupt)
        if self.running_turn is not None:
            self.do(ef.CutTurn(index=self.running_turn))
        if self.is_calling:
            self.set_timer("cleanup", self.opened.limits.cleanup_wait_s)
        else:
            self.release()

    def release(self, *, condemn: bool = False) -> None:
        """Give the slot back; once (B5).

        Args:
            condemn: a model call hangs: the worker is not to be used again (B4). Should it end all
                the same, the slot is gone by then and nothing more is to be done.
        """
        if self.lease is not None and not self.releasing:
            self.releasing = True
            self.cancel_timer("cleanup")
            self.do(ef.Release(lease=self.lease, condemn=condemn))


def _named(message: ServerMessage, session_id: str) -> ServerMessage:
    """Have what tells of an error name the session."""
    match message:
        case ErrorReport():
            return attrs.evolve(message, session_id=session_id)
        case Closed():
            return attrs.evolve(message, named=session_id)
    return message
