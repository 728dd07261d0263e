"""A session's state as plain values under documented keys (docs/log-format.md, "States").

The keys are a format: recordings hold a session to a digest over them. They stay when classes and
attributes are renamed. A key that comes, goes or changes its meaning is a new `SNAPSHOT`.
Sound, pictures and questions are here by their sizes, for they stand in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..values.messages import Listen, Speech
from ..values.model import Chunk, Unit
from ..values.openai import RealtimeResponse, Respond, TurnDetection
from ..wire.codec import frame_bytes
from .chat import ActiveTurn, Chat, SingleRequest, TurnKind
from .conversation import Conversation
from .core import Phase
from .dictation import Dictation, Spoken
from .duplex import Duplex, PendingInit, Setup
from .input import Attachments, CameraFrame, PendingUnit
from .kind import Kind
from .live import Live
from .omni import Omni
from .openai import OpenAI
from .slot import Migration
from .sound import SoundPieces
from .tools import ToolCalls
from .transcription import ChunkLoop, Transcription, Utterance
from .unit_loop import Lockstep

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


def _spoken(spoken: Spoken) -> list[object]:
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
