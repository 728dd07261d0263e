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
from .dialects.base import Dialect
from .dialects.opening import OPENING
from .digest import added, derive_id
from .errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_NORMAL,
    CLOSE_RESTART,
    CLOSE_TRY_LATER,
    ErrorCode,
)
from .limits import NS_PER_S
from .messages import Closed, EndReason, ErrorReport, RecordingState, ServerMessage
from .state import ConnectionEnded, Course, Role, State, Trigger, course_of, next_state
from .timers import Timers
from .unit_loop import UnitLoop

CLOSE_CODES: Final[Mapping[EndReason, int]] = {
    "backend_error": CLOSE_INTERNAL_ERROR,
    "server_shutdown": CLOSE_RESTART,
}
"""The WebSocket close code of each end; the others close normally (the wire decisions)."""

CLOSE_WORDS: Final[Mapping[EndReason, str]] = {"client": "stopped", "pause_timeout": "timeout"}
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
        dialect: the wire protocol in use; hashed by its name alone.
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
    dialect: Dialect = attrs.field(default=OPENING, eq=lambda dialect: dialect.name)
    effects: list[ef.Effect] = attrs.field(factory=list, eq=False)
    farewell: Callable[[], None] = attrs.field(default=lambda: None, eq=False)
    running_turn: int | None = added(None)
    alive_ns: int | None = added(None)
    is_draining: bool = added(False)
    running_chunk: tuple[int, int] | None = added(None)

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
            return self.opened.label
        if self.dialect.name == "duplex-v1":
            return f"rt_{self.opened.created_ms}"
        return derive_id("sess", self.opened.recording_id, 0)

    # -- saying ---------------------------------------------------------------------------------

    def do(self, effect: ef.Effect) -> None:
        """Ask for an effect."""
        self.effects.append(effect)

    def say(self, message: ServerMessage) -> None:
        """Send a message; the table says whether it may be sent and where it leads."""
        self.state = next_state(Role.SERVER, self.course, self.state, type(message))
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
    ) -> None:
        """End the session from our side; without effect once it is CLOSED.

        Args:
            reason: why, as `session.closed` says it.
            close_code: the WebSocket close code, where it is not the reason's own.
            words: the WebSocket close reason, likewise.
            client_reason: the client's own words.
        """
        if self.is_closed:
            return
        if self._says_goodbye:
            self.farewell()
            self.say(Closed(session_id=self.session_id, reason=reason, client_reason=client_reason))
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
