"""The parts of every session: the step in progress, timers, recording, model call, and client.

- `Step` has the session's first event, its clock, and the effects of the step in progress.
- `Timers` knows a timer by its generation, so that a stale one has no effect.
- `Call` is the model call in progress: one at a time, so that cleanup knows what to wait for (B4).
- `Watchdog` ends a session whose call gives no sign of life for too long.
- `Peer` is the client: what is sent to it, in which state, and whether it is connected:

attached -> lost -> detached, with its slot -> asleep, without one -> attached -> rebuilt

Every message passes `Peer.send`, which looks its transition up in `state.TRANSITIONS`. A CLOSED
session sends nothing.

A client may ask, by its address, for a session that outlives its connection, and so for two numbers
in every frame: `seq`, the frame's own, and `ack`, how many of the client's messages the session
has. With both, nothing is lost or sent twice when it comes back: it gives the last `seq` that it
has, the frames after it are read from the log, and it sends again what `ack` does not count. Only a
recorded session can be resumed. Who may come back is decided outside (`PeerAttached`).

In OpenAI's realtime APIs events have ids, and an error names the client's event that it answers. In
vLLM-Omni's each event has a number, `server_event_seq`, and `session.created` brings the token: its
client comes back in that protocol's words, and gets a `greeting` in them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any, Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import ErrorCode, LocalProtocolError
from ..values.frames import Frame
from ..values.limits import MS_PER_S, NS_PER_S
from ..values.messages import Closed, Created, ErrorReport, RecordingState, Resumable, ServerMessage
from ..values.records import derive_id, session_id_of
from ..values.requests import ClientMessage, Voice, VoiceName
from ..values.state import Role, SessionKind, State, Trigger, next_state
from ..wire.dialects.omni import OMNI_PREFIX, RESYNC, SEQ
from ..wire.dialects.openai_shared import EVENT
from ..wire.dialects.shared import RESUMABLE, TOKEN, UNRESUMABLE, numbered
from ..wire.table import Dialect

LIFE_TIMERS: Final[tuple[ev.TimerName, ...]] = (
    *("session", "init", "idle", "pause", "watchdog", "rebuild"),
    *("detach", "resume", "silence", "quiet", "calls"),
)
"""Timers that bound a session's life, and end with it."""
SIGNS_OF_LIFE: Final = (
    *(ev.BackendOpened, ev.Rebuilt, ev.UnitDone, ev.UnitFailed, ev.FinalizeDone),
    *(ev.RollbackDone, ev.TurnPrefilled, ev.TurnProgress, ev.ChunkDone, ev.ChunkFailed),
)
"""Events that show that the model goes on; the next call may follow in the same step."""


@attrs.define(eq=False)
class Step:
    """The session's clock and first event, and the effects of the step in progress.

    Attributes:
        opened: the session's first event: its ids, seed and limits.
        limits: the limits of the session; a fork has its own (`reopen`).
        do: appends an effect.
        derive: makes an id from a prefix and a count, for this recording.
        is_forking: the model is to be brought to the past of another session.
        media: the number of the next `DecodeMedia`.
    """

    opened: ev.ConnectionOpened
    is_forking: bool = False
    now_ns: int = 0
    effects: list[ef.Effect] = attrs.Factory(list)
    media: int = 0
    limits: ev.SessionLimits = attrs.field(init=False)
    do: Callable[[ef.Effect], None] = attrs.field(init=False)
    derive: Callable[[str, int], str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.limits, self.do = self.opened.limits, self.effects.append
        self.derive = partial(derive_id, self.opened.recording_id)

    def reopen(self, opened: ev.ConnectionOpened) -> None:
        """Begin again, as the fork of a session."""
        self.opened, self.limits, self.is_forking = opened, opened.limits, True

    def behaves(self, change: int) -> bool:
        """Whether the session includes a change of behaviour (`behaviour`)."""
        return self.opened.behaviour >= change

    def decode(self, kind: ef.MediaKind, data: bytes, **how: int) -> int:
        """Request `DecodeMedia`; returns the media's number."""
        number, self.media = self.media, self.media + 1
        self.do(ef.DecodeMedia(media=number, kind=kind, data=data, **how))
        return number


@attrs.define(eq=False)
class Timers:
    """Generations of the timers that are set; the runtime holds the clock."""

    step: Step
    pending: dict[ev.TimerName, int] = attrs.Factory(dict)
    generation: int = 0

    def set(self, name: ev.TimerName, seconds: float) -> None:
        """Set a timer, in seconds from now; none of this name is set."""
        self.set_at(name, self.step.now_ns + int(seconds * NS_PER_S))

    def set_at(self, name: ev.TimerName, at_ns: int) -> None:
        """Set a timer to a time."""
        self.generation += 1
        self.pending[name] = self.generation
        self.step.do(ef.SetTimer(name=name, generation=self.generation, at_ns=at_ns))

    def cancel(self, name: ev.TimerName) -> None:
        """Cancel a timer, if it is set."""
        generation = self.pending.pop(name, None)
        if generation is not None:
            self.step.do(ef.CancelTimer(name=name, generation=generation))

    def fire(self, name: ev.TimerName, generation: int) -> bool:
        """Whether this timer is set and not stale; it is not set afterwards."""
        if self.pending.get(name) != generation:
            return False
        del self.pending[name]
        return True


@attrs.define(eq=False)
class Recording:
    """Whether the session is recorded; `state` is as sent to clients."""

    step: Step
    state: RecordingState

    @property
    def is_on(self) -> bool:
        """Whether the log holds all that happened so far."""
        return self.state == "on"

    @property
    def id(self) -> str:
        """The recording's name as sent to the client; empty without a recording."""
        return self.step.opened.recording_id if self.is_on else ""

    @property
    def notice(self) -> str:
        """The operator's words about the recording; empty without a recording."""
        return self.step.opened.recording_notice if self.is_on else ""

    @property
    def outlives_worker(self) -> bool:
        """Whether another worker may take the place of a lost one: the log holds what it knew."""
        return self.is_on and self.step.limits.rebuild_wait_s > 0


class Phase(StrEnum):
    """The kind of the model call in progress."""

    IDLE = "idle"
    OPENING = "opening"
    RUNNING = "running"
    FINALIZING = "finalizing"
    ROLLING_BACK = "rolling_back"
    REBUILDING = "rebuilding"


@attrs.define(eq=False)
class Call:
    """The model call in progress, even if no longer wanted; one at a time.

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
        self.require(Phase.IDLE)
        self.phase, self.index = Phase.RUNNING, index

    def awaits(self, phase: Phase, index: int) -> bool:
        """Whether a completion is due; others are stale."""
        return self.phase is phase and self.index == index

    def settle(self) -> None:
        """End the call."""
        self.phase = Phase.IDLE

    def require(self, phase: Phase) -> None:
        """Raise an error of ours in another phase."""
        if self.phase is not phase:
            raise LocalProtocolError(f"call {self.index} is {self.phase}, not {phase}")


@attrs.define(eq=False)
class Watchdog:
    """The watchdog of model calls; one timer serves all calls of a session.

    The timer is set again only when it fires too early for the call in progress, so it costs one
    effect in half a minute and not one a unit. A hanging call is waited for as usual, then its
    slot is condemned (B4). `alive_ns` is the last sign of life of the call; None without one.
    """

    step: Step
    timers: Timers
    call: Call
    alive_ns: int | None = None

    def watch(self, event: ev.Event) -> None:
        """Set the timer for the call in progress, if needed; runs after every event."""
        wait_s = self.step.limits.call_wait_s
        if not wait_s:
            return
        phase = self.call.phase
        if phase is Phase.IDLE or phase is Phase.REBUILDING:  # a timer of its own bounds it
            self.alive_ns = None
        elif self.alive_ns is None or isinstance(event, SIGNS_OF_LIFE):
            self.alive_ns = self.step.now_ns
        if self.alive_ns is not None and "watchdog" not in self.timers.pending:
            self.timers.set_at("watchdog", self.alive_ns + wait_s * NS_PER_S)

    @property
    def is_overdue(self) -> bool:
        """Whether the call in progress has hung for too long."""
        wait_ns = self.step.limits.call_wait_s * NS_PER_S
        return self.alive_ns is not None and self.step.now_ns - self.alive_ns >= wait_ns


Decode = Callable[..., int]
"""Has media decoded outside (`Step.decode`); returns its number."""


def decode_voice(voice: Voice, decode: Decode) -> int | bytes:
    """Have reference audio decoded, or return it if it needs no decoding."""
    if isinstance(voice, VoiceName):
        return decode("voice", voice.name.encode())
    return decode("wav", voice.data) if voice.is_file else voice.data


# -- the client ---------------------------------------------------------------------------------


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
