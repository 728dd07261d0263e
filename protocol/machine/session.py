"""The session: a pure state machine, `Session.step(event) -> effects`.

It takes every fact as an event and returns the effects to be performed, in order. It owns no clock,
id, randomness or socket: the same events give the same effects, so a session can be replayed.

Its kind (`duplex`, `live`, `openai`, `omni`, `chat`, `transcription`, `dictation`) wires its parts
and has the particular rules; `reception` judges frames. Only this file knows all kinds.

`Session.snapshot` is its state as plain values under documented keys (docs/log-format.md,
"States"). The keys are a format: recordings hold a session to a digest over them. They stay when
classes and attributes are renamed. A key that comes, goes or changes its meaning is a new
`SNAPSHOT`. Sound, pictures and questions are there by their sizes, for they stand in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from ..values import behaviour
from ..values import effects as ef
from ..values import events as ev
from ..values import requests as rq
from ..values.errors import LocalProtocolError
from ..values.frames import Frame
from ..values.limits import STATE_HASH_UNITS
from ..values.messages import EndReason, Listen, ServerMessage, Speech
from ..values.model import UNIT_BYTES, Chunk, Unit
from ..values.openai import RealtimeResponse, Respond, TurnDetection
from ..values.records import digest
from ..values.state import SessionKind, State, session_kind_of
from ..wire.codec import frame_bytes
from .chat import ActiveTurn, Chat, SingleRequest, TurnKind
from .conversation import Conversation, SoundPieces
from .core import Phase, Step
from .dictation import DictatedUtterance, Dictation
from .duplex import Duplex, PendingInit, Setup
from .input import Attachments, CameraFrame, PendingUnit, ToolCalls
from .kind import Kind, Migration
from .live import Live
from .omni import Omni
from .openai import OpenAI
from .reception import SHORTENED_BYTES_MIN, Reception
from .transcription import ChunkLoop, Transcription, Utterance
from .unit_loop import Lockstep

# -- the whole state as plain values ------------------------------------------------------------

Keys = dict[str, object]


def _of(source: object, *names: str, **others: str) -> Keys:
    """The attributes of a value as keys; `key="attribute"` keeps a key whose attribute was renamed.

    Each is None if there is no value.
    """
    pairs = (*zip(names, names, strict=True), *others.items())
    return {key: None if source is None else getattr(source, name) for key, name in pairs}


def snapshot_of(kind: Kind) -> Keys:
    """Return a session's state; a kind's keys replace those of its model call."""
    peer, slot = kind.peer, kind.slot
    return {
        "now_ns": kind.step.now_ns,
        "state": peer.state.value,
        "dialect": peer.dialect.name,
        "recording": kind.recording.state,
        **_of(kind, "end_reason", draining="is_draining"),
        "waits_for_slot": slot.is_waiting,
        **_of(slot, "lease", releasing="is_releasing"),
        "alive_ns": kind.watchdog.alive_ns,
        **_of(peer, "frames_sent", "fields_ignored", "wants_notices"),
        "early_bytes": None if peer.early is None else frame_bytes(peer.early),
        "forking": kind.step.is_forking,
        "timers": {"set": dict(kind.timers.pending), "generation": kind.timers.generation},
        "queue": {
            "sent_ns": slot.sent_ns,
            **_of(slot.place, "position", "ticket_id"),
            **_of(slot.place, length="queue_length", wait_s="estimated_wait_s"),
        },
        "peer": _of(peer, detached="is_detached", asleep="is_asleep", received="frames_received"),
        "opening": False,
        "running_turn": None,
        "running_chunk": None,
        "loop": {
            "phase": Phase.IDLE.value,
            "unit": -1,
            "input_id": "",
            "interrupted": False,
            "failures": 0,
        },
        "init": None,
        **_OWN[type(kind)](kind),
    }


def _migration(migration: Migration) -> Keys:
    """The keys of a session that may move to another worker."""
    moves = _of(migration, migrating="is_migrating", revoked="is_revoked", repeated="is_repeated")
    return {**moves, "losses": migration.losses}


def _running(unit: Unit) -> Keys:
    return {
        **_of(unit, "index", "force_listen", "max_slice_nums", "force_speak"),
        "bytes": len(unit.pcm),
        "frames": [len(frame) for frame in unit.frames],
        **({"inputs": len(unit.inputs)} if unit.inputs else {}),
    }


def _chunk(chunk: Chunk) -> Keys:
    return {**_of(chunk, "utterance", "index", "is_last", "seed"), "bytes": len(chunk.pcm)}


def _init(init: PendingInit) -> Keys:
    voices = {name: len(pcm) for name, pcm in init.voices.items()}
    return {"undecided": dict(init.undecided), "voices": voices}


def _units(setup: Setup) -> Keys:
    """The keys of a kind with units."""
    loop, call, waiting = setup.loop, setup.slot.call, setup.loop.input
    speech, unit, assembler = loop.speech, loop.unit, waiting.assembler
    is_opening = call.phase is Phase.OPENING
    own: Keys = {
        "media": setup.step.media,
        "undecided": sorted(waiting.undecided_media),
        "assembler": {
            "seconds": assembler.ordinal,
            "bytes": len(assembler.remainder),
            "attached": _attached(assembler.attached),
        },
        "waiting": [_unit(unit) for unit in waiting.waiting.units],
        "held": None if loop.held is None else _outcome(loop.held),
        "ended_id": loop.ended_id,
        **_of(loop, "response_id", "responses", "appends", "is_paused"),
        **_of(loop, "max_slice_nums", "deferred_finalize"),
        "units_dropped": waiting.units_dropped,
        "pictures": _frames(waiting.pictures),
        "lockstep": None if loop.lockstep is None else _lockstep(loop.lockstep),
        **_tools(loop.tools),
        "user": [speech.samples, speech.is_speaking, speech.must_listen, speech.over_samples],
    }
    return {
        "opening": is_opening,
        "loop": {
            "phase": Phase.IDLE.value if is_opening else call.phase.value,
            "unit": call.index,
            **_of(loop, "input_id", "interrupted", "failures"),
        },
        "init": None if setup.pending is None else _init(setup.pending),
        "migration": {
            **_migration(setup.migration),
            "units_max": waiting.waiting.most,
            "unit": unit and _running(unit),
        },
        "own": own,
    }


def _tools(tools: ToolCalls) -> Keys:
    """The tools of a session that has any: older logs have no such keys."""
    keys: Keys = {
        "offered": [tool.name for tool in tools.offered],
        "open": [[name, it.name, it.deadline_ns] for name, it in tools.open.items()],
        "started": [it.call for it in tools.started],
        "waiting": [[it.kind, it.call, len(it.text)] for it in tools.waiting],
        "made_ns": [*tools.made_ns],
        "told_ns": [*tools.texts_ns],
        **_of(tools, "made", "failures", cut="is_cut"),
        **({} if tools.takes_events else {"eventless": True}),
        **({"refusals": tools.refusals} if tools.refusals else {}),
        **({} if tools.allowed is None else {"allowed": [*tools.allowed]}),
        **({"serial": True} if tools.is_serial else {}),
        **({} if tools.stopped_ns is None else {"stopped_ns": tools.stopped_ns}),
    }
    return {"tools": keys} if any(keys.values()) else {}


def _with(keys: Keys, **own: Keys) -> Keys:
    """Add keys to those of a kind's own."""
    before = keys["own"]
    assert isinstance(before, dict)
    return {**keys, "own": {**before, **own}}


def _pieces(pieces: SoundPieces) -> Keys:
    return {
        "bytes": len(pieces.rest),
        "before_bytes": len(pieces.before),
        "resampling": [[it.media, it.pcm is not None] for it in pieces.resampling],
        "spoken_bytes": len(pieces.spoken),
    }


def _live(live: Live) -> Keys:
    settings = live.settings
    return {
        **_of(settings, "model", "coding", "rate_hz", "delegation", "backend"),
        **_of(settings, "safety_identifier", "event_id"),
        "history": len(settings.history),
        "instructions": len(live.instructions),
        **_pieces(live.sound),
        "surplus_bytes": len(live.surplus),
        **_of(live, "voice", "seconds", "kv_length", muted="is_muted", mid_turn="is_mid_turn"),
    }


def _talk(talk: Conversation) -> Keys:
    """The keys of items and responses."""
    response = talk.response
    return {
        "items": [[it.id, it.role, it.status, len(it.parts)] for it in talk.items.values()],
        "items_made": talk.items_made,
        "reply": None
        if response is None
        else [response.id, response.modality, response.output_tokens],
        "words": len(talk.words),
        "utterances": [[it.start_ms, it.end_ms, it.text, it.is_whole] for it in talk.utterances],
        **({"mid_turn": True} if talk.is_mid_turn else {}),
    }


def _openai(openai: OpenAI) -> Keys:
    now, talk, speech = openai.settings, openai.conversation, openai.loop.speech
    return {
        **_of(now, "model", "voice", "modality", "input_format", "output_format", "transcriber"),
        "instructions": len(now.instructions),
        "detection": None if now.detection is None else _detection(now.detection),
        **_pieces(openai.sound),
        "opened": openai.setup.is_opened,
        **_of(openai, "updates", "input_item", "uncommitted_bytes", "due_units", "sound_ns"),
        **_of(speech, "samples", "must_listen", speaking="is_speaking"),
        **_talk(talk),
        "asked": openai.asked_at or openai.is_asked,
        "metadata": len(talk.asked.metadata or ()),
        **_options(talk.asked, talk.response),
        "spans": [[*span] for span in talk.spans],
        "skipped": openai.skipped,
        **({} if openai.ending_ms is None else {"ending_ms": openai.ending_ms}),
        **({"played_ns": openai.played_ns} if openai.played_ns else {}),
    }


def _omni(omni: Omni) -> Keys:
    now = omni.session
    return {
        "settings": [now.model, now.modality, now.overlap, now.history, now.answers],
        "detection": None if now.detection is None else _detection(now.detection),
        **_of(now, "epoch", "turn_id"),
        **_of(omni, "connections", "due_units", "samples", "uncommitted", "sound_ns"),
        **_of(omni, "kv_length", asked="is_asked"),
        "played": [[name, *played] for name, played in omni.played.items()],
        **_talk(omni.conversation),
    }


def _options(asked: Respond, response: RealtimeResponse | None) -> Keys:
    """What was asked of one response, where anything was: older logs have no such keys."""
    wanted = [asked.modality, asked.max_tokens, *([True] if asked.is_unheard else [])]
    bounds = [] if response is None else [response.max_tokens, response.input_tokens]
    faults = [] if response is None or not response.fault else [response.fault]
    return {"options": [wanted, bounds, *faults]} if any(wanted) or any(bounds) else {}


def _detection(how: TurnDetection) -> Keys:
    return {
        **_of(how, "kind", "threshold", "prefix_ms", "silence_ms", "creates", "interrupts"),
        **({} if how.backchannel_ms is None else {"backchannel_ms": how.backchannel_ms}),
        **({"idle_ms": how.idle_ms} if how.idle_ms else {}),
    }


def _unit(unit: PendingUnit) -> Keys:
    attached = _attached(unit.attached)
    return {"second": unit.ordinal, "bytes": len(unit.pcm), "attached": attached}


def _attached(attached: Attachments) -> Keys:
    own = _of(attached, "input_id", "force_listen", "max_slice_nums")
    return {**own, "frames": _frames(attached.frames)}


def _frames(frames: tuple[CameraFrame, ...]) -> list[list[int]]:
    return [[frame.media, len(frame.jpeg)] for frame in frames]


def _outcome(outcome: Listen | Speech) -> Keys:
    return {
        **_of(outcome, "input_id", "response_id"),
        "is_speech": isinstance(outcome, Speech),
        "end_of_turn": isinstance(outcome, Speech) and outcome.end_of_turn,
    }


def _lockstep(lockstep: Lockstep) -> Keys:
    units = [[owed.ordinal, owed.chunk, owed.pending] for owed in lockstep.units]
    return {**_of(lockstep, "kv_length", "chunk"), "units": units}


def _turns(kind: TurnKind) -> Keys:
    loop, call, turn = kind.loop, kind.slot.call, kind.loop.turn
    return {
        "running_turn": None if call.is_idle else call.index,
        "migration": {"turn": turn and [turn.pieces, turn.repeated]},
        "own": {
            "media": kind.step.media,
            "turns": loop.turns,
            "turn": None if turn is None else _turn(turn),
            "instructions": kind.instructions if isinstance(kind, Chat) else "",
        },
    }


def _turn(turn: ActiveTurn) -> Keys:
    asked = turn.pending
    return {
        **_of(turn, "index", "input_id", "response_id", "text", "tokens", "codes"),
        "stage": turn.stage.value,
        "asked": {
            "undecided": sorted(asked.undecided),
            "contents": [[len(known) for known in message] for message in asked.contents],
            "voice_bytes": len(asked.voice_pcm),
        },
        "input_tokens": None if turn.prefill is None else turn.prefill.input_tokens,
        "bytes": sum(map(len, turn.pcm)),
    }


def _chunks(loop: ChunkLoop, model: str) -> Keys:
    """The keys of a kind that transcribes."""
    call, pending, chunk = loop.call, loop.pending, loop.chunk
    is_running = call.phase is Phase.RUNNING
    return {
        "running_chunk": (pending[0].index, call.index) if is_running else None,
        "migration": {**_migration(loop.migration), "chunk": chunk and _chunk(chunk)},
        "own": {
            "model": model,
            "pending": [_utterance(utterance) for utterance in pending],
            "active_ns": loop.peer.active_ns,
            **_of(loop, "utterances", "appends", "chunks", "waiting_bytes"),
            "owes_commit": loop.owes_commit,
            **({"ending": loop.ending} if loop.ending else {}),
        },
    }


def _dictation(dictation: Dictation) -> Keys:
    now, spoken = dictation.settings, dictation.open
    return {
        **_of(now, "model", "transcriber", "input_format"),
        "detection": None if now.detection is None else _detection(now.detection),
        **_of(dictation, "updates", "items_made", "last_item", "samples", "searched"),
        "open": None if spoken is None else _spoken(spoken),
        "unanswered": [_spoken(it) for it in dictation.unanswered],
        "bytes": len(dictation.sound),
        "tail_bytes": len(dictation.tail),
        "speaking": dictation.is_speaking,
    }


def _spoken(spoken: DictatedUtterance) -> list[object]:
    return [spoken.item_id, spoken.samples, spoken.is_lost]


def _utterance(utterance: Utterance) -> Keys:
    return {
        **_of(utterance, "index", "is_begun", "is_final", "is_answered", "chunks", "texts"),
        **_of(utterance, "prompt_tokens", "completion_tokens"),
        "is_heard_out": utterance.is_transcribed,
        "bytes": len(utterance.sound),
    }


_OWN: Final[Mapping[type[Kind], Callable[[Any], Keys]]] = {
    Duplex: lambda it: _units(it.setup),
    Live: lambda it: _with(_units(it.setup), live=_live(it)),
    OpenAI: lambda it: _with(_units(it.setup), openai=_openai(it)),
    Omni: lambda it: _with(_units(it.setup), omni=_omni(it)),
    Chat: _turns,
    SingleRequest: _turns,
    Transcription: lambda it: _chunks(it.loop, it.model),
    Dictation: lambda it: _with(_chunks(it.loop, ""), openai=_dictation(it)),
}


# -- the session ----------------------------------------------------------------------------------

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
        if handler is not None:
            handler(self, event)
        elif (method_of := self.kind.handlers.get(type(event))) is not None:
            method_of(self.kind)(event)  # without a method of the kind, it is stale
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
        """Return the whole state under keys that recordings know."""
        return snapshot_of(self.kind)

    def digest(self) -> str:
        """Hash the whole state: equal states have equal digests, in any process."""
        return digest(self.snapshot())

    def is_hash_due(self, event: ev.Event) -> bool:
        """Whether the digest is logged after this event."""
        if isinstance(event, ev.TurnDone | ev.TurnFailed):
            return True
        if isinstance(event, ev.FinalizeDone):
            return self.kind.loop.counts["units"] % STATE_HASH_UNITS == 0
        is_chunk = isinstance(event, ev.ChunkDone)
        return is_chunk and self.kind.loop.counts["chunks"] % STATE_HASH_UNITS == 0

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
        method_of = kind.handlers.get(type(message))
        if method_of is not None:
            method_of(kind)(message)


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
