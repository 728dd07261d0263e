"""The session: a pure state machine, `Session.step(event) -> effects`.

It takes every fact as an event and returns the effects to be performed, in order. It owns no clock,
id, randomness or socket: the same events give the same effects, so a session can be replayed.

Its kind (`duplex`, `live`, `openai`, `omni`, `chat`, `transcription`, `dictation`) wires its parts
and has the particular rules; `reception` judges frames. Only `KINDS_OF_ENDPOINTS`, `KINDS` and
`snapshot` know all kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from ..values import behaviour
from ..values import effects as ef
from ..values import events as ev
from ..values import requests as rq
from ..values.digest import digest
from ..values.errors import LocalProtocolError
from ..values.limits import STATE_HASH_UNITS
from ..values.messages import EndReason, ServerMessage
from ..values.model import UNIT_BYTES
from ..values.state import SessionKind, State, session_kind_of
from ..values.utf8 import Frame
from .chat import Chat, SingleRequest
from .core import Phase, Step
from .dictation import Dictation
from .duplex import Duplex
from .kind import Kind
from .live import Live
from .omni import Omni
from .openai import OpenAI
from .reception import SHORTENED_BYTES_MIN, Reception
from .snapshot import snapshot_of
from .transcription import Transcription

KINDS: Final[Mapping[SessionKind, type[Kind]]] = {
    SessionKind.DUPLEX: Duplex,
    SessionKind.CHAT: Chat,
    SessionKind.REQUEST: SingleRequest,
    SessionKind.TRANSCRIPTION: Transcription,
}
KINDS_OF_ENDPOINTS: Final[Mapping[tuple[ev.Endpoint, SessionKind], type[Kind]]] = {
    ("live", SessionKind.DUPLEX): Live,
    ("openai", SessionKind.DUPLEX): OpenAI,
    ("openai", SessionKind.TRANSCRIPTION): Dictation,
    ("omni", SessionKind.DUPLEX): Omni,
}
"""Kinds of their own at some addresses."""
Connected = Literal["connected", "detached", "asleep"]


def _size_bytes(message: rq.ClientMessage) -> int:
    """The bytes of sound of a message; for one with more than sound, a whole second."""
    match message:
        case rq.AppendSound(pcm16=pcm16):
            return len(pcm16)
        case rq.Append(pcm=pcm, frames=(), force_listen=False):
            return len(pcm)
    return UNIT_BYTES


class Session:
    """One client's session, from its connection to the return of its slot.

    Attributes:
        is_finished: it is CLOSED, with no slot held or to come: no event can bring another effect.
    """

    def __init__(self, opened: ev.ConnectionOpened) -> None:
        session_kind = session_kind_of(opened.mode, is_request=opened.endpoint == "chat")
        kind = KINDS_OF_ENDPOINTS.get((opened.endpoint, session_kind), KINDS[session_kind])
        self.kind: Final = kind(Step(opened))
        self.peer: Final = self.kind.peer
        self.is_finished = False
        self._reception = Reception(self.kind)

    @classmethod
    def open(cls, event: ev.ConnectionOpened) -> tuple[Session, tuple[ef.Effect, ...]]:
        """Begin a session with its first event; returns it and that event's effects.

        `LocalProtocolError` if its behaviour is newer than this machine.
        """
        if event.behaviour > behaviour.NEWEST:
            known = f"known are 0 to {behaviour.NEWEST}"
            raise LocalProtocolError(f"behaviour {event.behaviour}, {known}")
        session = cls(event)
        session.peer.greet()
        session.kind.begin()
        return session, session._end_step()

    def step(self, event: ev.Event) -> tuple[ef.Effect, ...]:
        """Take an event; returns the effects, to be performed in this order.

        `LocalProtocolError` for a second `ConnectionOpened`, or if `at_ns` decreases.
        """
        if isinstance(event, ev.ConnectionOpened):
            raise LocalProtocolError("the session is open already")
        self._begin_step(event.at_ns)
        handler = _HANDLERS.get(type(event))
        if handler is None:
            self._hand_over(event)
        else:
            handler(self, event)
        if not self.peer.is_closed:
            self.kind.watchdog.watch(event)
        return self._end_step()

    def read_ahead(self, frames: Iterable[Frame]) -> list[rq.ClientMessage]:
        """Read the first of some frames, as long as they only bring sound to be kept.

        A piece of sound that fills no second is only kept, and a client may send fifty a second. So
        pieces that came together are taken together, without a step for each (`keep`).
        """
        found = list[rq.ClientMessage]()
        left = 0 if self.peer.is_closed else self.kind.room_bytes()
        if left <= 0:
            return found
        gate = self.kind.gate
        for frame in frames:
            message = self._reception.read_ahead(gate, frame)
            if message is None:
                break
            left -= _size_bytes(message)
            if left < 0:
                break
            found.append(message)
        return found

    def keep(self, at_ns: int, messages: Sequence[rq.ClientMessage]) -> None:
        """Take the messages that `read_ahead` returned, as stepping their events then would.

        Those steps have no effects. `LocalProtocolError` if it is before the last event's time.
        """
        self._begin_step(at_ns)
        self._reception.forget_ahead()
        peer = self.peer
        peer.accepted, peer.cause = messages[-1], ""
        for message in messages:
            peer.received()
            peer.fields_ignored += len(getattr(message, "ignored", ()))
        self.kind.keep(messages)

    def _begin_step(self, at_ns: int) -> None:
        step, peer = self.kind.step, self.peer
        if at_ns < step.now_ns:
            raise LocalProtocolError(f"time went back from {step.now_ns} to {at_ns} ns")
        step.now_ns = at_ns
        peer.sent, peer.accepted = [], None

    def _end_step(self) -> tuple[ef.Effect, ...]:
        step, slot = self.kind.step, self.kind.slot
        if self.peer.is_closed:
            self.is_finished = slot.lease is None and not slot.is_waiting
        effects = tuple(step.effects)
        step.effects.clear()
        return effects

    def _hand_over(self, item: ev.Event | rq.ClientMessage) -> None:
        """Hand an event or message to the kind; without a method for it, it is stale."""
        method_of = self.kind.handlers.get(type(item))
        if method_of is not None:
            method_of(self.kind)(item)

    # -- what can be seen of it -----------------------------------------------------------------

    @property
    def opened(self) -> ev.ConnectionOpened:
        """The session's first event."""
        return self.kind.step.opened

    @property
    def state(self) -> State:
        """The session's state."""
        return self.peer.state

    @property
    def now_ns(self) -> int:
        """When its last event came."""
        return self.kind.step.now_ns

    @property
    def end_reason(self) -> EndReason | None:
        """Why it ended; None until it ends."""
        return self.kind.end_reason

    @property
    def is_forking(self) -> bool:
        """Whether it is a fork before its set-up: so far it has only its parent's past."""
        return self.kind.step.is_forking

    @property
    def is_resumable(self) -> bool:
        """Whether its client may come back to it on another connection."""
        return self.peer.is_resumable

    @property
    def frames_received(self) -> int:
        """Messages that the client sent."""
        return self.peer.frames_received

    @property
    def connection(self) -> Connected:
        """Whether its client is connected; asleep: it is not, and the slot is given back."""
        if not self.peer.is_detached:
            return "connected"
        return "asleep" if self.peer.is_asleep else "detached"

    @property
    def dialect_name(self) -> str:
        """The dialect in use; `opening` until the client's first init."""
        return self.peer.dialect.name

    @property
    def session_id(self) -> str:
        """The session's id as the client knows it."""
        return self.peer.session_id

    @property
    def phase(self) -> Phase:
        """The model call in progress."""
        return self.kind.slot.call.phase

    @property
    def early_bytes(self) -> int | None:
        """Size of the kept opening message; 0 if one may come, None if not."""
        return self.kind.early_bytes

    @property
    def units_waiting(self) -> int:
        """Full seconds of input that wait for the model."""
        return self.kind.loop.units_waiting

    @property
    def samples_waiting(self) -> int:
        """Samples at 16 kHz of the client's sound that the model has not begun to hear."""
        return self.kind.samples_waiting

    @property
    def counts(self) -> Mapping[str, int]:
        """Units started and dropped, turns, appends, frames sent, fields ignored."""
        peer = self.kind.peer
        common = {"frames_sent": peer.frames_sent, "fields_ignored": peer.fields_ignored}
        return {**self.kind.loop.counts, **common}

    @property
    def sent(self) -> Sequence[ServerMessage]:
        """Messages to the client in the last step, before their dialect encoded them."""
        return self.peer.sent

    @property
    def accepted(self) -> rq.ClientMessage | None:
        """The client's message that its kind was handed in the last step."""
        return self.peer.accepted

    def snapshot(self) -> dict[str, object]:
        """Return the whole state under keys that recordings know (`snapshot`)."""
        return snapshot_of(self.kind)

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

    # -- the queue and the slot -----------------------------------------------------------------

    def _ticket_moved(self, event: ev.TicketMoved) -> None:
        kind, slot = self.kind, self.kind.slot
        if not kind.peer.is_closed and slot.is_waiting and not kind.slot_user.is_quiet:
            slot.send_place(event.place)

    def _ticket_left(self, _event: ev.TicketLeft) -> None:
        self.kind.slot.is_waiting = False
        if not self.peer.is_closed:
            self.kind.slot_user.slot_returned()

    def _ticket_cancelled(self, _event: ev.TicketCancelled) -> None:
        self.kind.slot.is_waiting = False
        self.kind.end("cancelled")

    def _admission_refused(self, event: ev.AdmissionRefused) -> None:
        self.kind.slot.is_waiting = False
        self.kind.slot_user.admission_refused(event.code)

    def _admitted(self, _event: ev.Admitted) -> None:
        if not self.peer.is_closed:
            self.kind.admitted()
            self._read_early()

    def _slot_leased(self, event: ev.SlotLeased) -> None:
        kind, slot = self.kind, self.kind.slot
        slot.is_waiting, slot.lease = False, event.lease
        if kind.peer.is_closed:
            slot.release()
        else:
            kind.slot_user.slot_leased()
            self._read_early()

    def _read_early(self) -> None:
        peer = self.kind.peer
        early, peer.early = peer.early, None
        if early is not None:
            self._read(ev.FrameReceived(at_ns=self.now_ns, frame=early))

    def _backend_lost(self, event: ev.BackendLost) -> None:
        if event.lease == self.kind.slot.lease:
            self.kind.slot_user.backend_lost()

    def _backend_released(self, event: ev.BackendReleased) -> None:
        slot = self.kind.slot
        if event.lease == slot.lease:
            slot.lease, slot.is_releasing = None, False
            self.kind.slot_user.slot_returned()

    def _timer_fired(self, event: ev.TimerFired) -> None:
        kind = self.kind
        if not kind.timers.fire(event.name, event.generation):
            return
        if event.name == "cleanup":
            kind.slot.release(condemn=True)
        elif event.name == "watchdog":
            if kind.watchdog.is_overdue:
                kind.give_up("the model could not be opened")
        elif not kind.peer.extends(event.name):
            kind.timed_out(event.name)

    # -- the client's frames ---------------------------------------------------------------------

    def shortened(self, event: ev.FrameReceived) -> ev.FrameReceived:
        """Return the frame to be stepped next as it is recorded: `Reception.shortened`."""
        is_short = event.frame is None or len(event.frame) < SHORTENED_BYTES_MIN
        return event if is_short or self.peer.is_closed else self._reception.shortened(event)

    def _frame_received(self, event: ev.FrameReceived) -> None:
        if not self.peer.is_closed:
            self.peer.received()
            self._read(event)
            self.peer.cause = ""

    def _read(self, event: ev.FrameReceived) -> None:
        kind = self.kind
        message = self._reception.read(event)
        match message:
            case None | rq.Report() | rq.Played():
                return  # a report's frame stands in the log, and that is all it is for
            case rq.CloseRequest(reason=reason):
                kind.end("client", client_reason=reason)
                return
        kind.peer.fields_ignored += len(getattr(message, "ignored", ()))
        if not getattr(message, "record", True):
            kind.forget_recording()
        kind.peer.accepted = message
        self._hand_over(message)


_HANDLERS: Final[Mapping[type[ev.Event], Callable[[Session, Any], None]]] = {
    ev.FrameReceived: Session._frame_received,
    ev.PeerGone: lambda self, event: self.kind.peer_gone(event),
    ev.SendFailed: lambda self, event: self.kind.peer_gone(event),
    ev.PeerAttached: lambda self, event: self.kind.peer_attached(event),
    ev.TicketMoved: Session._ticket_moved,
    ev.TicketLeft: Session._ticket_left,
    ev.TicketCancelled: Session._ticket_cancelled,
    ev.AdmissionRefused: Session._admission_refused,
    ev.Admitted: Session._admitted,
    ev.SlotLeased: Session._slot_leased,
    ev.BackendLost: Session._backend_lost,
    ev.BackendReleased: Session._backend_released,
    ev.TimerFired: Session._timer_fired,
    ev.RecordingFailed: lambda self, _: self.kind.recording_failed(),
    ev.Flooded: lambda self, _: self.kind.end("flooded"),
    ev.DrainBegan: lambda self, event: self.kind.drain(event.wait_s),
    ev.Draining: lambda self, _: self.kind.shut_down(),
}
"""Handlers of events that concern any session; the rest is its kind's (`Kind.handlers`)."""
