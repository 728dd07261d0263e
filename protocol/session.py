"""The session: a pure state machine, `Session.step(event) -> effects`.

It consumes every fact as an event and answers with the effects it wants performed, in order. It
owns no clock, id, randomness or socket: the same events give the same effects, and so it replays.

Each fact is handed to whom it concerns: `core` says how a session speaks and ends, `waiting` what
is told of the queue, `beginning` how it is set up, `duplex` what becomes of audio, `chat` what
becomes of a question, `transcription` what is written of sound, `reception` how a frame is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from . import effects as ef
from . import events as ev
from . import overdue
from .beginning import Beginning
from .behaviour import NEWEST
from .chat import Chat
from .core import Core
from .dialects import first_dialect
from .digest import digest
from .duplex import Duplex
from .errors import REFUSALS, ErrorCode, LocalProtocolError
from .limits import STATE_HASH_UNITS
from .messages import EndReason, GoingAway, QueueDone
from .reception import Reception
from .requests import (
    Append,
    AppendSound,
    Ask,
    ChooseModel,
    ClientMessage,
    CloseRequest,
    Commit,
    Init,
    Interrupt,
    Pause,
    Report,
    Resume,
    See,
)
from .snapshot import snapshot_of
from .state import BEGINNINGS, Course, Gate, State, gate_of
from .transcription import Transcription
from .unit_loop import Phase
from .waiting import Waiting


class Session:
    """One client's session, from its connection to the return of its slot.

    A session is made by `Session.open(event)` and then fed by `step`.
    """

    def __init__(self, opened: ev.ConnectionOpened) -> None:
        dialect = first_dialect(opened.mode, opened.endpoint)
        self._core = core = Core(opened=opened, recording=opened.recording, dialect=dialect)
        core.state = BEGINNINGS[core.course]
        self._duplex = Duplex(core)
        self._chat = Chat(core)
        self._transcription = Transcription(core)
        core.farewell = self._chat.break_off
        self._beginning = Beginning(core, self._duplex, self._chat)
        self._waiting = Waiting(core)
        self._reception = Reception(
            core, {See: self._duplex.refused, **self._transcription.refused}
        )

    @classmethod
    def open(cls, event: ev.ConnectionOpened) -> tuple[Session, tuple[ef.Effect, ...]]:
        """Begin a session with its first event; returns it and that event's effects.

        Raises:
            LocalProtocolError: its behaviour is newer than any that this machine knows.
        """
        if event.behaviour > NEWEST:
            raise LocalProtocolError(f"behaviour {event.behaviour}, known are 0 to {NEWEST}")
        session = cls(event)
        core = session._core
        match core.course:
            case Course.DUPLEX | Course.TRANSCRIPTION:
                core.waits_for_slot = True
                core.set_timer("session", event.limits.session_s)
                core.do(ef.EnterQueue(mode=event.mode))
            case Course.CHAT | Course.REQUEST:
                core.do(ef.Admit())
        return session, session._take_effects()

    def step(self, event: ev.Event) -> tuple[ef.Effect, ...]:
        """Take one event and say what is to be done about it.

        Args:
            event: the next fact, its `at_ns` not before the last one's.

        Returns:
            The effects, to be performed in this order.

        Raises:
            LocalProtocolError: a second `ConnectionOpened`, or time went backwards.
        """
        if isinstance(event, ev.ConnectionOpened):
            raise LocalProtocolError("the session is open already")
        if event.at_ns < self._core.now_ns:
            raise LocalProtocolError(f"time went back from {self._core.now_ns} to {event.at_ns} ns")
        self._core.now_ns = event.at_ns
        _HANDLERS[type(event)](self, event)
        overdue.watch(self._core, event)
        return self._take_effects()

    def _take_effects(self) -> tuple[ef.Effect, ...]:
        effects, self._core.effects = tuple(self._core.effects), []
        return effects

    # -- what can be seen of it -----------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where it stands."""
        return self._core.state

    @property
    def end_reason(self) -> EndReason | None:
        """Why it ended; None while it has not."""
        return self._core.end_reason

    @property
    def is_finished(self) -> bool:
        """CLOSED, with no slot held or to come: no event can bring another effect."""
        core = self._core
        return core.is_closed and core.lease is None and not core.waits_for_slot

    @property
    def dialect_name(self) -> str:
        """The dialect in use; `opening` until the client's first init."""
        return self._core.dialect.name

    @property
    def session_id(self) -> str:
        """What the client knows the session by."""
        return self._core.session_id

    @property
    def phase(self) -> Phase:
        """The model call under way."""
        return self._core.loop.phase

    @property
    def early_bytes(self) -> int | None:
        """Of the opening message that is kept; 0 where one may come, None where it may not."""
        return self._core.early_bytes

    @property
    def units_waiting(self) -> int:
        """Full seconds of input that wait for the model."""
        return len(self._duplex.waiting)

    @property
    def counts(self) -> Mapping[str, int]:
        """Units started and dropped, turns, appends, frames sent, fields ignored."""
        own = {Course.DUPLEX: {}, Course.TRANSCRIPTION: self._transcription.counts}
        return {
            **own.get(self._core.course, {"turns": self._chat.turns}),
            "units": self._core.loop.index + 1,
            "units_dropped": self._duplex.units_dropped,
            "appends": self._duplex.appends + self._transcription.appends,
            "frames_sent": self._core.frames_sent,
            "fields_ignored": self._core.fields_ignored,
        }

    def snapshot(self) -> dict[str, object]:
        """Say what it holds, under keys that recordings know (`snapshot`)."""
        courses = (self._duplex, self._chat, self._transcription)
        return snapshot_of(self._core, self._waiting, self._beginning.pending, courses)

    def digest(self) -> str:
        """Hash the whole state: equal states have equal digests, in any process."""
        return digest(self.snapshot())

    def is_hash_due(self, event: ev.Event) -> bool:
        """Whether the digest is to be logged after an event that was stepped."""
        if isinstance(event, ev.TurnDone | ev.TurnFailed):
            return True
        if isinstance(event, ev.FinalizeDone):
            return self.counts["units"] % STATE_HASH_UNITS == 0
        return isinstance(event, ev.ChunkDone) and self.counts["chunks"] % STATE_HASH_UNITS == 0

    # -- connection and queue -------------------------------------------------------------------

    def _admission_refused(self, event: ev.AdmissionRefused) -> None:
        self._core.waits_for_slot = False
        self._chat.refused()
        self._core.refuse(event.code, REFUSALS[event.code])

    def _admitted(self, _event: ev.Admitted) -> None:
        core = self._core
        if core.course is Course.CHAT and not core.is_closed:
            self._queue_done()
        elif not core.is_closed:
            core.set_timer("init", core.opened.limits.init_wait_s)

    def _slot_leased(self, event: ev.SlotLeased) -> None:
        core = self._core
        core.waits_for_slot = False
        core.lease = event.lease
        if core.is_closed:
            core.release()
        elif core.course is Course.DUPLEX:
            self._queue_done()
        elif core.course is Course.TRANSCRIPTION:
            self._transcription.greet()
        else:
            self._chat.slot_leased(event.lease)

    def _queue_done(self) -> None:
        core = self._core
        early, core.early = core.early, None
        if core.opened.quiet and self._waiting.place is None:
            core.move(QueueDone)
        else:
            core.say(QueueDone())
        core.set_timer("init", core.opened.limits.init_wait_s)
        if early is not None:
            self._read(ev.FrameReceived(at_ns=core.now_ns, frame=early))

    def _peer_gone(self, _event: ev.PeerGone | ev.SendFailed) -> None:
        self._core.lose_peer()

    def _timer_fired(self, event: ev.TimerFired) -> None:
        if not self._core.timers.fire(event.name, event.generation):
            return
        if event.name == "cleanup":
            self._core.release(condemn=True)
        elif event.name == "call":
            overdue.look(self._core)
        elif event.name in {"init", "idle"} and self._core.course is Course.TRANSCRIPTION:
            self._transcription.has_waited(for_model=event.name == "init")
        else:
            self._core.end("pause_timeout" if event.name == "pause" else "timeout")

    def _drain_began(self, event: ev.DrainBegan) -> None:
        """Warn those whose model is at work for them; the others are served nothing new here."""
        core = self._core
        if core.is_closed:
            return
        core.is_draining = True
        if core.course is Course.DUPLEX:
            is_served = core.state is State.ACTIVE
        elif core.course is Course.TRANSCRIPTION:
            is_served = self._transcription.is_busy
        else:
            is_served = self._chat.is_answering
        if not is_served:
            self._end_by_shutdown()
        elif core.hears_notices:
            core.say(GoingAway(seconds_left=event.wait_s))

    def _end_by_shutdown(self) -> None:
        if self._core.course is Course.REQUEST:
            self._core.refuse(ErrorCode.SERVICE_UNAVAILABLE, "the server shuts down")
        else:
            self._core.end("server_shutdown")

    # -- what the client says -------------------------------------------------------------------

    @property
    def _gate(self) -> Gate:
        """What the client's messages are judged by."""
        if self._core.is_closed:
            return Gate.CLOSED
        if self._chat.turn is not None:
            return Gate.TURN
        if self._beginning.pending is not None:
            return Gate.OPENING
        if self._duplex.is_paused:
            return Gate.PAUSED
        if self.early_bytes is not None:
            return Gate.KEPT if self.early_bytes else Gate.WAITING
        return gate_of(self._core.course, self.state)

    def shortened(self, event: ev.FrameReceived) -> ev.FrameReceived:
        """Give the frame that is stepped next as it is recorded: `Reception.shortened`."""
        return event if self._core.is_closed else self._reception.shortened(self._gate, event)

    def _frame_received(self, event: ev.FrameReceived) -> None:
        if self._core.is_closed:
            return
        if self._core.course is Course.TRANSCRIPTION:
            self._transcription.heard()
        self._read(event)

    def _read(self, event: ev.FrameReceived) -> None:
        message = self._reception.read(self._gate, event)
        if message is not None:
            self._take(message)

    def _take(self, message: ClientMessage) -> None:
        match message:
            case CloseRequest(reason=reason):
                self._core.end("client", client_reason=reason)
            case Init():
                self._beginning.begin(message)
            case Append():
                self._duplex.append(message)
            case Ask():
                self._waiting.place = None
                self._chat.ask(message)
            case See():
                self._duplex.see(message)
            case Pause():
                self._duplex.pause(message)
            case Resume():
                self._duplex.resume()
            case Interrupt():
                self._duplex.interrupt()
            case ChooseModel():
                self._transcription.choose(message)
            case AppendSound():
                self._transcription.append(message)
            case Commit():
                self._transcription.commit(message)
            case Report():
                pass  # the frame stands in the log, and that is all it is for

    def _media_decoded(self, event: ev.MediaDecoded) -> None:
        if self._chat.awaits(event.media):
            self._chat.media_decoded(event)
        elif self._beginning.awaits(event.media):
            self._beginning.media_decoded(event)
        else:
            self._duplex.media_decoded(event.media)

    def _media_rejected(self, event: ev.MediaRejected) -> None:
        if self._chat.awaits(event.media):
            self._chat.media_rejected(event.media, event.reason)
        elif self._beginning.awaits(event.media):
            self._beginning.media_rejected(event.reason)
        else:
            self._duplex.media_rejected(event.media, event.reason)

    # -- the slot -------------------------------------------------------------------------------

    def _backend_lost(self, event: ev.BackendLost) -> None:
        if event.lease == self._core.lease:
            is_sound = self._core.course is Course.TRANSCRIPTION
            is_duplex = self._core.course is Course.DUPLEX
            course = self._transcription if is_sound else self._duplex if is_duplex else self._chat
            course.backend_lost()

    def _backend_released(self, event: ev.BackendReleased) -> None:
        if event.lease == self._core.lease:
            self._core.lease = None
            self._core.releasing = False
            self._chat.slot_returned()


_HANDLERS: Final[Mapping[type[ev.Event], Callable[[Session, Any], None]]] = {
    ev.FrameReceived: Session._frame_received,
    ev.PeerGone: Session._peer_gone,
    ev.SendFailed: Session._peer_gone,
    ev.TicketMoved: lambda self, event: self._waiting.moved(event),
    ev.TicketLeft: lambda self, _: self._waiting.left(),
    ev.TicketCancelled: lambda self, _: self._waiting.cancelled(),
    ev.AdmissionRefused: Session._admission_refused,
    ev.Admitted: Session._admitted,
    ev.SlotLeased: Session._slot_leased,
    ev.BackendOpened: lambda self, event: self._beginning.backend_opened(event),
    ev.BackendOpenFailed: lambda self, event: self._beginning.backend_open_failed(event),
    ev.MediaDecoded: Session._media_decoded,
    ev.MediaRejected: Session._media_rejected,
    ev.UnitDone: lambda self, event: self._duplex.unit_done(event.result),
    ev.UnitFailed: lambda self, event: self._duplex.unit_failed(
        event.index, context_full=event.context_full
    ),
    ev.FinalizeDone: lambda self, event: self._duplex.finalize_done(event.finalized.index),
    ev.FinalizeFailed: lambda self, event: self._duplex.call_broke(Phase.FINALIZING, event.index),
    ev.RollbackDone: lambda self, event: self._duplex.rollback_done(event.index),
    ev.RollbackFailed: lambda self, event: self._duplex.call_broke(Phase.ROLLING_BACK, event.index),
    ev.TurnPrefilled: lambda self, event: self._chat.prefilled(event.prefill),
    ev.TurnProgress: lambda self, event: self._chat.progressed(event.chunk),
    ev.TurnDone: lambda self, event: self._chat.done(event.result),
    ev.TurnFailed: lambda self, event: self._chat.failed(
        event.index, context_full=event.context_full, refused=event.refused
    ),
    ev.ChunkDone: lambda self, event: self._transcription.chunk_done(event.result),
    ev.ChunkFailed: lambda self, event: self._transcription.chunk_failed(
        event.utterance, event.index, context_full=event.context_full
    ),
    ev.BackendLost: Session._backend_lost,
    ev.BackendReleased: Session._backend_released,
    ev.TimerFired: Session._timer_fired,
    ev.RecordingFailed: lambda self, _: self._core.lose_recording(),
    ev.Flooded: lambda self, _: self._core.end("flooded"),
    ev.DrainBegan: Session._drain_began,
    ev.Draining: lambda self, _: self._end_by_shutdown(),
}
"""Whom each fact concerns."""
