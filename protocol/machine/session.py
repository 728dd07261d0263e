"""The session: a pure state machine, `Session.step(event) -> effects`.

It takes every fact as an event and returns the effects to be performed, in order. It owns no clock,
id, randomness or socket: the same events give the same effects, so a session can be replayed.

Its course (`duplex`, `chat` with its single request, `transcription`) has the particular rules;
`core` sends and ends, `reception` judges frames. Only `COURSES` knows all courses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from ..values import behaviour
from ..values import effects as ef
from ..values import events as ev
from ..values.digest import digest
from ..values.errors import LocalProtocolError
from ..values.limits import ESTIMATE_INTERVAL_S, NS_PER_S, STATE_HASH_UNITS
from ..values.messages import EndReason, GoingAway, Queued, QueueUpdate, ServerMessage
from ..values.requests import ClientMessage, CloseRequest, Init, Played, Report
from ..values.state import BEGINNINGS, Course, Gate, State, course_of
from ..values.utf8 import Frame
from ..wire.dialects import first_dialect
from . import overdue, quiet
from .chat import Chat
from .dictation import Dictation
from .duplex import Duplex
from .live import Live
from .methods import METHODS
from .openai import OpenAI
from .reception import SHORTENED_BYTES_MIN, Reception
from .resuming import Resuming
from .single_request import SingleRequest
from .snapshot import snapshot_of
from .transcription import Transcription
from .unit_loop import Phase

COURSES: Final[Mapping[Course, type[Resuming]]] = {
    Course.DUPLEX: Duplex,
    Course.CHAT: Chat,
    Course.REQUEST: SingleRequest,
    Course.TRANSCRIPTION: Transcription,
}
OF_ENDPOINT: Final[Mapping[tuple[ev.Endpoint, Course], type[Resuming]]] = {
    ("live", Course.DUPLEX): Live,
    ("openai", Course.DUPLEX): OpenAI,
    ("openai", Course.TRANSCRIPTION): Dictation,
}
"""Courses of their own at some addresses."""
Connected = Literal["connected", "detached", "asleep"]


class Session:
    """One client's session, from its connection to the return of its slot."""

    def __init__(self, opened: ev.ConnectionOpened) -> None:
        course = course_of(opened.mode, is_request=opened.endpoint == "chat")
        machine = OF_ENDPOINT.get((opened.endpoint, course), COURSES[course])
        self._core: Final = machine(
            opened=opened,
            dialect=first_dialect(opened.mode, opened.endpoint),
            state=BEGINNINGS[course],
            recording=opened.recording,
        )
        self._reception = Reception(self._core)

    @classmethod
    def open(cls, event: ev.ConnectionOpened) -> tuple[Session, tuple[ef.Effect, ...]]:
        """Begin a session with its first event; returns it and that event's effects.

        `LocalProtocolError` if its behaviour is newer than this machine.
        """
        if event.behaviour > behaviour.NEWEST:
            known = f"known are 0 to {behaviour.NEWEST}"
            raise LocalProtocolError(f"behaviour {event.behaviour}, {known}")
        session = cls(event)
        session._core.greet()
        session._core.begin()
        return session, session._take_effects()

    def step(self, event: ev.Event) -> tuple[ef.Effect, ...]:
        """Take an event; returns the effects, to be performed in this order.

        `LocalProtocolError` for a second `ConnectionOpened`, or if `at_ns` decreases.
        """
        if isinstance(event, ev.ConnectionOpened):
            raise LocalProtocolError("the session is open already")
        self._at(event.at_ns)
        self._core.said, self._core.taken = [], None
        handler = _HANDLERS.get(type(event))
        if handler is None:
            self._hand_over(event)
        else:
            handler(self, event)
        overdue.watch(self._core, event)
        return self._take_effects()

    def foresee(self, frames: Iterable[Frame]) -> list[ClientMessage]:
        """Read the first of some frames, as far as they bring sound that is only kept."""
        gate = self._gate
        return quiet.first(self._core, (self._reception.foresee(gate, frame) for frame in frames))

    def keep(self, at_ns: int, messages: Sequence[ClientMessage]) -> None:
        """Take messages, just foreseen, as stepping the event of each at that time would.

        `LocalProtocolError` if it is before the last event's time.
        """
        self._at(at_ns)
        self._reception.forget_ahead()
        quiet.keep(self._core, messages)

    def _at(self, at_ns: int) -> None:
        if at_ns < self._core.now_ns:
            raise LocalProtocolError(f"time went back from {self._core.now_ns} to {at_ns} ns")
        self._core.now_ns = at_ns

    def _hand_over(self, said: ev.Event | ClientMessage) -> None:
        """Hand an event or message to the course; without a method for it, it is stale."""
        method = getattr(self._core, METHODS[type(said)], None)
        if method is not None:
            method(said)

    def _take_effects(self) -> tuple[ef.Effect, ...]:
        effects, self._core.effects = tuple(self._core.effects), []
        return effects

    # -- what can be seen of it -----------------------------------------------------------------

    @property
    def opened(self) -> ev.ConnectionOpened:
        """The session's first event."""
        return self._core.opened

    @property
    def state(self) -> State:
        """The session's state."""
        return self._core.state

    @property
    def now_ns(self) -> int:
        """When its last event came."""
        return self._core.now_ns

    @property
    def end_reason(self) -> EndReason | None:
        """Why it ended; None until it ends."""
        return self._core.end_reason

    @property
    def is_forking(self) -> bool:
        """Whether it is a fork before its set-up: so far it has only its parent's past."""
        return self._core.is_forking

    @property
    def is_resumable(self) -> bool:
        """Whether its client may come back to it on another connection."""
        return self._core.is_resumable

    @property
    def frames_received(self) -> int:
        """Messages that the client sent."""
        return self._core.frames_received

    @property
    def connection(self) -> Connected:
        """Whether its client is connected; asleep: it is not, and the slot is given back."""
        if not self._core.is_detached:
            return "connected"
        return "asleep" if self._core.is_asleep else "detached"

    @property
    def is_finished(self) -> bool:
        """Whether it is CLOSED, with no slot held or to come: no event can bring another effect."""
        core = self._core
        return core.is_closed and core.lease is None and not core.waits_for_slot

    @property
    def dialect_name(self) -> str:
        """The dialect in use; `opening` until the client's first init."""
        return self._core.dialect.name

    @property
    def session_id(self) -> str:
        """The session's id as the client knows it."""
        return self._core.session_id

    @property
    def phase(self) -> Phase:
        """The model call in progress."""
        return self._core.call.phase

    @property
    def early_bytes(self) -> int | None:
        """Size of the kept opening message; 0 if one may come, None if not."""
        return self._core.early_bytes

    @property
    def units_waiting(self) -> int:
        """Full seconds of input that wait for the model."""
        return self._core.units_waiting

    @property
    def counts(self) -> Mapping[str, int]:
        """Units started and dropped, turns, appends, frames sent, fields ignored."""
        core = self._core
        common = {"frames_sent": core.frames_sent, "fields_ignored": core.fields_ignored}
        return {**core.counts, **common}

    @property
    def said(self) -> Sequence[ServerMessage]:
        """Messages to the client in the last step, as its course made them."""
        return self._core.said

    @property
    def taken(self) -> ClientMessage | None:
        """The client's message that its course was handed in the last step."""
        return self._core.taken

    def snapshot(self) -> dict[str, object]:
        """Return the whole state under keys that recordings know (`snapshot`)."""
        return snapshot_of(self._core)

    def digest(self) -> str:
        """Hash the whole state: equal states have equal digests, in any process."""
        return digest(self.snapshot())

    def is_hash_due(self, event: ev.Event) -> bool:
        """Whether the digest is logged after this event."""
        if isinstance(event, ev.TurnDone | ev.TurnFailed):
            return True
        if isinstance(event, ev.FinalizeDone):
            return self.counts["units"] % STATE_HASH_UNITS == 0
        return isinstance(event, ev.ChunkDone) and self.counts["chunks"] % STATE_HASH_UNITS == 0

    # -- connection and queue -------------------------------------------------------------------

    def _ticket_moved(self, event: ev.TicketMoved) -> None:
        """Send the client its place at once when it moved, a new estimate only now and then."""
        core, told, place = self._core, self._core.place, event.place
        if core.is_closed or not core.waits_for_slot or told == place or not core.hears_queue:
            return
        if told is not None:
            moved = (told.position, told.queue_length) != (place.position, place.queue_length)
            age_ns = core.now_ns - core.told_ns
            if not moved and age_ns < ESTIMATE_INTERVAL_S * NS_PER_S:
                return
        core.place, core.told_ns = place, core.now_ns
        core.say(Queued(place=place) if told is None else QueueUpdate(place=place))

    def _ticket_left(self, _event: ev.TicketLeft) -> None:
        self._core.waits_for_slot = False
        if not self._core.is_closed:
            self._core.slot_returned()

    def _ticket_cancelled(self, _event: ev.TicketCancelled) -> None:
        self._core.waits_for_slot = False
        self._core.end("cancelled")

    def _admission_refused(self, event: ev.AdmissionRefused) -> None:
        self._core.waits_for_slot = False
        self._core.admission_refused(event.code)

    def _admitted(self, _event: ev.Admitted) -> None:
        if not self._core.is_closed:
            self._core.admitted()
            self._read_early()

    def _slot_leased(self, event: ev.SlotLeased) -> None:
        core = self._core
        core.waits_for_slot = False
        core.lease = event.lease
        if core.is_closed:
            core.release()
        else:
            core.slot_leased()
            self._read_early()

    def _read_early(self) -> None:
        early, self._core.early = self._core.early, None
        if early is not None:
            self._read(ev.FrameReceived(at_ns=self._core.now_ns, frame=early))

    def _timer_fired(self, event: ev.TimerFired) -> None:
        if not self._core.timers.fire(event.name, event.generation):
            return
        if event.name == "cleanup":
            self._core.release(condemn=True)
        elif event.name == "watchdog":
            overdue.look(self._core)
        elif not self._core.bears(event.name):
            self._core.timed_out(event.name)

    def _drain_began(self, event: ev.DrainBegan) -> None:
        """Warn clients whose model works for them; shut down the other sessions."""
        core = self._core
        if core.is_closed:
            return
        core.is_draining = True
        if not core.is_busy:
            core.shut_down()
        elif core.has_opening and core.wants_notices:
            core.say(GoingAway(seconds_left=event.wait_s))

    def _recording_failed(self, _event: ev.RecordingFailed) -> None:
        """Report it, except to a client that asked not to be recorded."""
        core = self._core
        if core.recording != "off":
            core.recording = "failed"
            if core.opened.limits.close_on_recording_failure:
                core.end("backend_error")
            core.not_recorded()

    # -- what the client says -------------------------------------------------------------------

    @property
    def _gate(self) -> Gate:
        return Gate.CLOSED if self._core.is_closed else self._core.gate

    def shortened(self, event: ev.FrameReceived) -> ev.FrameReceived:
        """Return the frame to be stepped next as it is recorded: `Reception.shortened`."""
        is_short = event.frame is None or len(event.frame) < SHORTENED_BYTES_MIN
        if is_short or self._core.is_closed:
            return event
        return self._reception.shortened(self._gate, event)

    def _frame_received(self, event: ev.FrameReceived) -> None:
        if not self._core.is_closed:
            self._core.heard()
            self._read(event)
            self._core.cause = ""

    def _read(self, event: ev.FrameReceived) -> None:
        core = self._core
        message = self._reception.read(self._gate, event)
        match message:
            case None | Report() | Played():
                return  # a report's frame stands in the log, and that is all it is for
            case CloseRequest(reason=reason):
                core.end("client", client_reason=reason)
                return
            case Init(notices=notices):
                core.wants_notices = notices
        refused = core.refused(message)
        if refused is not None:
            core.turn_down(refused)
            return
        core.fields_ignored += len(getattr(message, "ignored", ()))
        if not getattr(message, "record", True):
            core.forget_recording()
        core.taken = message
        self._hand_over(message)

    # -- the slot -------------------------------------------------------------------------------

    def _backend_lost(self, event: ev.BackendLost) -> None:
        if event.lease == self._core.lease:
            self._core.backend_lost()

    def _backend_released(self, event: ev.BackendReleased) -> None:
        if event.lease == self._core.lease:
            self._core.lease = None
            self._core.releasing = False
            self._core.slot_returned()


_HANDLERS: Final[Mapping[type[ev.Event], Callable[[Session, Any], None]]] = {
    ev.FrameReceived: Session._frame_received,
    ev.PeerGone: lambda self, event: self._core.peer_gone(event.code),
    ev.SendFailed: lambda self, _: self._core.peer_gone(),
    ev.PeerAttached: lambda self, event: self._core.peer_attached(event),
    ev.TicketMoved: Session._ticket_moved,
    ev.TicketLeft: Session._ticket_left,
    ev.TicketCancelled: Session._ticket_cancelled,
    ev.AdmissionRefused: Session._admission_refused,
    ev.Admitted: Session._admitted,
    ev.SlotLeased: Session._slot_leased,
    ev.BackendLost: Session._backend_lost,
    ev.BackendReleased: Session._backend_released,
    ev.TimerFired: Session._timer_fired,
    ev.RecordingFailed: Session._recording_failed,
    ev.Flooded: lambda self, _: self._core.end("flooded"),
    ev.DrainBegan: Session._drain_began,
    ev.Draining: lambda self, _: self._core.shut_down(),
}
"""Handlers of events that concern any session; the rest is its course's (`METHODS`)."""
