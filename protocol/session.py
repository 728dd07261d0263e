"""The session: a pure state machine, `Session.step(event) -> effects`.

It consumes every fact as an event and answers with the effects it wants performed, in order. It
owns no clock, id, randomness or socket, so the same events always give the same effects: that is
what makes a recording replayable.

This file holds the session's life: the queue, the client's frames, the opening of the model. How a
session speaks and ends is in `core`, what becomes of audio in `duplex`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from . import effects as ef
from . import events as ev
from .codec import parse_frame
from .core import Core
from .dialects.base import Context, Json
from .dialects.opening import OPENING, choose
from .digest import digest
from .duplex import Duplex
from .errors import ErrorCode, FieldError, FrameError, LocalProtocolError
from .limits import ESTIMATE_INTERVAL_S, NS_PER_S
from .messages import (
    CloseRequest,
    Created,
    EndReason,
    Init,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
    Request,
)
from .pending_init import PendingInit
from .state import ACCEPT, Gate, State, judge
from .unit_loop import Phase


class Session:
    """One client's session, from its connection to the return of its slot.

    Args:
        opened: the first event; the effects it asks for are the first of `step`.

    A session is made by `Session.open(event)` and then fed by `step`.
    """

    def __init__(self, opened: ev.ConnectionOpened) -> None:
        self._core = Core(opened=opened, recording=opened.recording)
        self._duplex = Duplex(self._core)
        self._init: PendingInit | None = None
        self._place: QueuePlace | None = None
        self._place_told_ns = 0

    @classmethod
    def open(cls, event: ev.ConnectionOpened) -> tuple[Session, tuple[ef.Effect, ...]]:
        """Begin a session with its first event; returns it and that event's effects."""
        session = cls(event)
        session._core.waits_for_slot = True
        session._core.set_timer("session", event.limits.session_s)
        session._core.do(ef.EnterQueue(mode=event.mode))
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
    def counts(self) -> Mapping[str, int]:
        """Units started and dropped, appends, frames sent, fields ignored."""
        return {
            "units": self._core.loop.index + 1,
            "units_dropped": self._duplex.units_dropped,
            "appends": self._duplex.appends,
            "frames_sent": self._core.frames_sent,
            "fields_ignored": self._core.fields_ignored,
        }

    def digest(self) -> str:
        """Hash the whole state: equal states have equal digests, in any process."""
        parts = (self._core, self._duplex, self._init, self._place, self._place_told_ns)
        return digest(parts)

    # -- connection and queue -------------------------------------------------------------------

    def _ticket_moved(self, event: ev.TicketMoved) -> None:
        """Tell the client its place: at once when it moved, the estimate at most every 3 s."""
        told, place = self._place, event.place
        if self.state is not State.QUEUED or told == place:
            return
        if told is not None:
            moved = (told.position, told.queue_length) != (place.position, place.queue_length)
            age_ns = self._core.now_ns - self._place_told_ns
            if not moved and age_ns < ESTIMATE_INTERVAL_S * NS_PER_S:
                return
        self._place, self._place_told_ns = place, self._core.now_ns
        self._core.say(Queued(place=place) if told is None else QueueUpdate(place=place))

    def _ticket_left(self, _event: ev.TicketLeft) -> None:
        self._core.waits_for_slot = False

    def _ticket_cancelled(self, _event: ev.TicketCancelled) -> None:
        self._core.waits_for_slot = False
        self._core.end("cancelled")

    def _admission_refused(self, event: ev.AdmissionRefused) -> None:
        self._core.waits_for_slot = False
        self._core.refuse(event.code, "the server has no room for another session now")

    def _slot_leased(self, event: ev.SlotLeased) -> None:
        core = self._core
        core.waits_for_slot = False
        core.lease = event.lease
        if core.is_closed:
            core.release()
        else:
            core.say(QueueDone())
            core.set_timer("init", core.opened.limits.init_wait_s)

    def _peer_gone(self, _event: ev.PeerGone | ev.SendFailed) -> None:
        self._core.lose_peer()

    def _timer_fired(self, event: ev.TimerFired) -> None:
        if not self._core.timers.fire(event.name, event.generation):
            return
        if event.name == "cleanup":
            self._core.release(condemn=True)
        else:
            self._core.end("timeout")

    def _recording_failed(self, _event: ev.RecordingFailed) -> None:
        self._core.recording = "failed"
        if self._core.opened.limits.close_on_recording_failure:
            self._core.end("backend_error")

    def _draining(self, _event: ev.Draining) -> None:
        self._core.end("server_shutdown")

    # -- what the client says -------------------------------------------------------------------

    @property
    def _gate(self) -> Gate:
        """What the client's messages are judged by."""
        if self.state is State.CONNECTED and self._init is not None:
            return Gate.OPENING
        return Gate(self.state.value)

    def _frame_received(self, event: ev.FrameReceived) -> None:
        """Judge a frame in the order of the wire: JSON, close, state, type, fields."""
        if self._core.is_closed:
            return
        try:
            body = parse_frame(event.frame)
        except FrameError as error:
            self._core.end("invalid_frame", close_code=error.close_code, words=error.reason)
            return
        request = self._core.dialect.classify(body)
        verdict = judge(self._gate, request)
        if verdict == ACCEPT:
            self._accept(request, body)
        else:
            text = f"{request} event in state {self._gate}"
            self._core.complain(ErrorCode(verdict), text)

    def _accept(self, request: Request, body: Json) -> None:
        core = self._core
        if core.dialect is OPENING:
            core.dialect = choose(body) or OPENING
        limits = core.opened.limits
        context = Context(mode=core.opened.mode, sliding_windows=limits.sliding_windows)
        try:
            message = core.dialect.parse(request, body, context)
        except FieldError as error:
            core.complain(error.code, error.message)
            return
        if isinstance(message, CloseRequest):
            core.end("client", client_reason=message.reason)
        elif isinstance(message, Init):
            self._begin_opening(message)
        else:
            self._duplex.append(message)

    # -- opening --------------------------------------------------------------------------------

    def _begin_opening(self, init: Init) -> None:
        core = self._core
        core.fields_ignored += len(init.ignored)
        core.cancel_timer("init")
        self._init, decodes = PendingInit.of(init, self._duplex.media)
        self._duplex.media += len(decodes)
        for decode in decodes:
            core.do(decode)
        self._open_if_decoded(self._init)

    def _open_if_decoded(self, pending: PendingInit) -> None:
        core = self._core
        if not pending.is_complete:
            return
        assert core.lease is not None
        core.opening_backend = True
        self._duplex.configure(pending.init)
        opening = pending.to_opening(core.opened.seed)
        core.do(ef.OpenBackend(lease=core.lease, opening=opening))

    def _reject_init(self, message: str) -> None:
        """Back to CONNECTED: the client may send a better init."""
        self._init = None
        self._core.complain(ErrorCode.INVALID_PAYLOAD, message)
        self._core.set_timer("init", self._core.opened.limits.init_wait_s)

    def _media_decoded(self, event: ev.MediaDecoded) -> None:
        if self._init is None or not self._init.awaits(event.media):
            self._duplex.media_decoded(event.media)
            return
        self._init.decoded(event.media, event.pcm)
        if not self._core.is_closed:
            self._open_if_decoded(self._init)

    def _media_rejected(self, event: ev.MediaRejected) -> None:
        if self._init is None or not self._init.awaits(event.media):
            self._duplex.media_rejected(event.media, event.reason)
        elif not self._core.is_closed:
            self._reject_init(f"reference audio: {event.reason}")

    def _backend_opened(self, event: ev.BackendOpened) -> None:
        core = self._core
        if event.lease != core.lease or not core.opening_backend:
            return
        core.opening_backend = False
        self._init = None
        if core.is_closed:
            core.release()
            return
        created = Created(
            session_id=core.session_id,
            prompt_length=event.opened.prompt_length,
            recording=core.recording,
        )
        core.say(created)

    def _backend_open_failed(self, event: ev.BackendOpenFailed) -> None:
        core = self._core
        if event.lease != core.lease or not core.opening_backend:
            return
        core.opening_backend = False
        if core.is_closed:
            core.release()
        elif event.context_full:
            self._reject_init("the prompt does not fit the model's context")
        else:
            core.refuse(ErrorCode.WORKER_CONNECT_FAILED, "the model could not be opened")

    # -- the model ------------------------------------------------------------------------------

    def _unit_done(self, event: ev.UnitDone) -> None:
        self._duplex.unit_done(event.result)

    def _unit_failed(self, event: ev.UnitFailed) -> None:
        self._duplex.unit_failed(event.index, context_full=event.context_full)

    def _finalize_done(self, event: ev.FinalizeDone) -> None:
        self._duplex.finalize_done(event.finalized.index)

    def _finalize_failed(self, event: ev.FinalizeFailed) -> None:
        self._duplex.call_broke(Phase.FINALIZING, event.index)

    def _rollback_done(self, event: ev.RollbackDone) -> None:
        self._duplex.rollback_done(event.index)

    def _rollback_failed(self, event: ev.RollbackFailed) -> None:
        self._duplex.call_broke(Phase.ROLLING_BACK, event.index)

    def _backend_lost(self, event: ev.BackendLost) -> None:
        core = self._core
        if event.lease != core.lease:
            return
        core.loop.settle()
        core.opening_backend = False
        if core.is_closed:
            core.release()
        elif core.state is State.CONNECTED:
            core.refuse(ErrorCode.WORKER_CONNECT_FAILED, "the model was lost")
        else:
            core.end("backend_error")

    def _backend_released(self, event: ev.BackendReleased) -> None:
        if event.lease == self._core.lease:
            self._core.lease = None
            self._core.releasing = False


_HANDLERS: Final[Mapping[type[ev.Event], Callable[[Session, Any], None]]] = {
    ev.FrameReceived: Session._frame_received,
    ev.PeerGone: Session._peer_gone,
    ev.SendFailed: Session._peer_gone,
    ev.TicketMoved: Session._ticket_moved,
    ev.TicketLeft: Session._ticket_left,
    ev.TicketCancelled: Session._ticket_cancelled,
    ev.AdmissionRefused: Session._admission_refused,
    ev.SlotLeased: Session._slot_leased,
    ev.BackendOpened: Session._backend_opened,
    ev.BackendOpenFailed: Session._backend_open_failed,
    ev.MediaDecoded: Session._media_decoded,
    ev.MediaRejected: Session._media_rejected,
    ev.UnitDone: Session._unit_done,
    ev.UnitFailed: Session._unit_failed,
    ev.FinalizeDone: Session._finalize_done,
    ev.FinalizeFailed: Session._finalize_failed,
    ev.RollbackDone: Session._rollback_done,
    ev.RollbackFailed: Session._rollback_failed,
    ev.BackendLost: Session._backend_lost,
    ev.BackendReleased: Session._backend_released,
    ev.TimerFired: Session._timer_fired,
    ev.RecordingFailed: Session._recording_failed,
    ev.Draining: Session._draining,
}
