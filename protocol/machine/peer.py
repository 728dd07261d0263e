"""The client of a session: what is sent to it, in which state, and whether it is connected.

attached -> lost -> detached, with its slot -> asleep, without one -> attached -> rebuilt

- Every message passes `send`, which looks its transition up in `state.TRANSITIONS`. A CLOSED
  session sends nothing.
- A client may ask, by its address, for a session that outlives its connection, and so for two
  numbers in every frame: `seq`, the frame's own, and `ack`, how many of the client's messages the
  session has. With both, nothing is lost or sent twice when it comes back: it gives the last `seq`
  that it has, the frames after it are read from the log, and it sends again what `ack` does not
  count. Only a recorded session can be resumed. Who may come back is decided outside
  (`PeerAttached`).
- In OpenAI's realtime APIs events have ids, and an error names the client's event that it answers.
- In vLLM-Omni's each event has a number, `server_event_seq`, and `session.created` brings the
  token: its client comes back in that protocol's words, and gets a `greeting` in them.
"""

from __future__ import annotations

from typing import Any

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.digest import session_id_of
from ..values.errors import ErrorCode
from ..values.limits import MS_PER_S
from ..values.messages import Closed, Created, ErrorReport, Resumable, ServerMessage
from ..values.requests import ClientMessage
from ..values.state import Role, SessionKind, State, Trigger, next_state
from ..values.utf8 import Frame
from ..wire.dialects.omni import OMNI_PREFIX, RESYNC, SEQ
from ..wire.dialects.openai_shared import EVENT
from ..wire.dialects.shared import RESUMABLE, TOKEN, UNRESUMABLE, numbered
from ..wire.table import Dialect
from .core import Recording, Step, Timers


@attrs.define(kw_only=True, eq=False)
class Peer:
    """The client's connection, and the state that it knows.

    Attributes:
        has_event_ids: events that are sent have ids.
        is_omni: it is a client of vLLM-Omni's protocol.
        is_active: the session is set up.
        is_closed: the session is over: nothing more is sent.
        is_detached: no client is connected.
        is_asleep: the session gives its slot back, or has none, until its client comes back.
        frames_sent: the ordinal of the next `Send`.
        frames_received: messages of the client.
        active_ns: the last message of the client, or answer of the model to a transcription.
        fields_ignored: unknown or unused fields that clients sent (the wire decisions).
        wants_notices: the client asked for messages that do not answer its own.
        early: an opening message that came in the queue, and is read after it.
        cause: the client's own name for the message that is being read; may be empty.
        sent, accepted: messages of this step: to the client, and the client's own.
        greeted: the ordinal of the frame that brought the token, in vLLM-Omni's protocol.
        greeting: the first frame of the connection that comes, in that protocol.
    """

    step: Step
    timers: Timers
    recording: Recording
    session_kind: SessionKind
    state: State
    dialect: Dialect
    has_event_ids: bool
    is_omni: bool
    is_active: bool = False
    is_closed: bool = False
    is_detached: bool = False
    is_asleep: bool = False
    frames_sent: int = 0
    frames_received: int = 0
    active_ns: int = 0
    fields_ignored: int = 0
    wants_notices: bool = False
    early: Frame = None
    cause: str = ""
    sent: list[ServerMessage] = attrs.Factory(list)
    accepted: ClientMessage | None = None
    greeted: int = -1
    greeting: str = ""

    @property
    def session_id(self) -> str:
        """The session's id as the client knows it; it depends on the dialect."""
        opened = self.step.opened
        if opened.endpoint == "duplex":
            return opened.label or self.step.derive("duplex", 0)
        if self.dialect.name == "duplex-v1":
            return f"rt_{opened.created_ms}"
        if self.is_omni:
            return f"{OMNI_PREFIX}{opened.recording_id}"
        return session_id_of(opened.recording_id)

    # -- sending --------------------------------------------------------------------------------

    def send(self, message: ServerMessage) -> None:
        """Send a message; the table says whether it may be sent, and the next state."""
        after = next_state(Role.SERVER, self.session_kind, self.state, type(message))
        if after is not self.state:
            self.enter(after)
        if isinstance(message, ErrorReport):
            name = session_id_of(self.step.opened.recording_id)
            cause = self.cause if self.has_event_ids else ""
            message = attrs.evolve(message, session_id=name, client_event_id=cause)
        elif isinstance(message, Closed):
            name = session_id_of(self.step.opened.recording_id)
            message = attrs.evolve(message, named=name)
        self.sent.append(message)
        for frame in self.dialect.encode(message):
            self.send_frame(frame)

    def send_frame(self, frame: str) -> None:
        """Send a frame, with the numbers and the id that it has here."""
        if self.has_event_ids:
            number = self.step.derive("event", self.frames_sent)
            frame = frame.replace(EVENT, f'"event_id":"{number}"', 1)
        if self.is_omni:
            frame = frame.replace(SEQ, f"{SEQ[:-1]}{self.frames_sent + 1}", 1)
        elif self.step.opened.resume_hash:
            frame = numbered(frame, seq=self.frames_sent, ack=self.frames_received)
        self.step.do(ef.Send(ordinal=self.frames_sent, frame=frame))
        self.frames_sent += 1

    def move(self, trigger: Trigger) -> None:
        """Take a transition without a message."""
        self.enter(next_state(Role.SERVER, self.session_kind, self.state, trigger))

    def enter(self, state: State) -> None:
        """Be in a state."""
        self.state = state
        self.is_active, self.is_closed = state is State.ACTIVE, state is State.CLOSED

    def send_error(self, code: ErrorCode, message: str) -> None:
        """Send an `error`; the connection stays."""
        self.send(ErrorReport(code=code, message=message))

    def send_created(self, **own: Any) -> None:
        """Tell the client that the session is set up; `own` are fields of its kind."""
        self.send(
            Created(
                session_id=self.session_id,
                recording=self.recording.state,
                recording_id=self.recording.id,
                recording_notice=self.recording.notice,
                created_s=self.step.opened.created_ms // MS_PER_S,
                **own,
            )
        )

    # -- the connection -------------------------------------------------------------------------

    @property
    def has_numbers(self) -> bool:
        """Whether the client asked for a session that can be resumed."""
        return bool(self.step.opened.resume_hash)

    @property
    def is_resumable(self) -> bool:
        """Whether the client may come back to the session."""
        return self.has_numbers and self.recording.is_on

    def greet(self) -> None:
        """Tell the client how to come back, on its first connection."""
        if self.has_numbers and not self.is_omni:
            self._send_greeting(after=self.frames_sent - 1)

    def received(self) -> None:
        """Note that the client sent a message of any kind."""
        self.frames_received += 1
        self.active_ns = self.step.now_ns

    def detach(self) -> None:
        """Wait for the client: the connection is over."""
        self.is_detached = True
        self.timers.set("detach", self.step.limits.detach_s)
        self.timers.set("resume", self.step.limits.resume_s)

    def attach(self, after: int) -> None:
        """Send a new connection the frames after the last one that the client has."""
        self.is_detached = False
        self.timers.cancel("detach")
        self.timers.cancel("resume")
        for name, seconds in self._silence_limits:
            if name in self.timers.pending:
                self.timers.cancel(name)
                self.timers.set(name, seconds)
        self._send_greeting(after)

    def _send_greeting(self, after: int) -> None:
        limits = self.step.limits
        if self.is_omni:
            after = max(after, self.greeted)  # what came before is of no use without its token
            self.step.do(ef.Attach(frame=self.greeting, after=after, before=self.frames_sent))
            return
        greeting = Resumable(
            recording_id=self.step.opened.recording_id,
            token=TOKEN if self.is_resumable else "",
            grace_s=limits.detach_s,
            expires_in_s=limits.resume_s,
            next_seq=after + 1,
            ack=self.frames_received,
        )
        frame = RESUMABLE.encode(greeting)
        self.step.do(ef.Attach(frame=frame, after=after, before=self.frames_sent))

    def send_unresumable(self) -> None:
        """Tell the client that it cannot come back any more."""
        table = RESYNC if self.is_omni else UNRESUMABLE
        self.send_frame(table.encode(Resumable(recording_id="", token="")))

    def extends(self, name: ev.TimerName) -> bool:
        """Whether a client that is away may be silent for longer: its timer is set again."""
        is_extended = self.is_detached and name in dict(self._silence_limits)
        if is_extended:
            self.timers.set(name, self.step.limits.resume_s)
        return is_extended

    @property
    def _silence_limits(self) -> tuple[tuple[ev.TimerName, int], ...]:
        """Timers of a silent client, in seconds; without one, "resume" bounds the session."""
        return (("idle", self.step.limits.idle_s), ("pause", self.step.limits.pause_s))
