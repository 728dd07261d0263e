"""A session's state as plain values under documented keys (docs/log-format.md, "States").

The keys are a format: recordings hold a session to a digest over them. They stay when classes and
attributes are renamed. A key that comes, goes or changes its meaning is a new `SNAPSHOT`.
Sound, pictures and questions are here by their sizes, for they stand in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..values.messages import Listen, Speech
from ..values.model import Unit
from ..values.openai import TurnDetection
from ..values.state import Course
from ..values.transcript import Chunk
from ..values.utf8 import frame_bytes
from .beginning import PendingInit
from .chat import ActiveTurn, Chat
from .core import Core
from .dictation import Dictation, Spoken
from .duplex import Duplex
from .live import Live
from .lockstep import Lockstep
from .moving import Moving
from .openai import OpenAI
from .pieces import Pieces
from .resuming import Resuming
from .transcription import Transcription, Utterance
from .unit_loop import Phase, UnitLoop
from .units import Attachments, Frame, PendingUnit

Keys = dict[str, object]


def snapshot_of(core: Resuming) -> Keys:
    """Return a session's state; a course's keys replace those of its model call."""
    return {
        **_core(core),
        "migration": _migration(core),
        "peer": _peer(core),
        "opening": False,
        "running_turn": None,
        "running_chunk": None,
        "loop": _loop(UnitLoop()),
        "init": None,
        **_OWN[core.course](core),
    }


def _core(core: Core) -> Keys:
    place = core.place
    return {
        "now_ns": core.now_ns,
        "state": core.state.value,
        "dialect": core.dialect.name,
        "recording": core.recording,
        "end_reason": core.end_reason,
        "lease": core.lease,
        "waits_for_slot": core.waits_for_slot,
        "releasing": core.releasing,
        "draining": core.is_draining,
        "alive_ns": core.alive_ns,
        "frames_sent": core.frames_sent,
        "fields_ignored": core.fields_ignored,
        "early_bytes": None if core.early is None else frame_bytes(core.early),
        "wants_notices": core.wants_notices,
        "forking": core.is_forking,
        "timers": {"set": dict(core.timers.pending), "generation": core.timers.generation},
        "queue": {
            "sent_ns": core.told_ns,
            "position": None if place is None else place.position,
            "length": None if place is None else place.queue_length,
            "wait_s": None if place is None else place.estimated_wait_s,
            "ticket_id": None if place is None else place.ticket_id,
        },
    }


def _migration(core: Core) -> Keys:
    """The keys of a session that may move to another worker."""
    keys: Keys = {}
    if isinstance(core, Moving):
        keys = {
            "migrating": core.is_moving,
            "revoked": core.is_revoked,
            "repeated": core.is_repeated,
            "losses": core.losses,
        }
    match core:
        case Duplex():
            unit = core.call.unit
            keys |= {"units_max": core.waiting.most, "unit": unit and _running(unit)}
        case Transcription():
            chunk = core.chunk
            keys["chunk"] = chunk and _chunk(chunk)
        case Chat():
            keys["turn"] = core.turn and [core.turn.pieces, core.turn.repeated]
    return keys


def _peer(core: Resuming) -> Keys:
    return {
        "detached": core.is_detached,
        "asleep": core.is_asleep,
        "received": core.frames_received,
    }


def _running(unit: Unit) -> Keys:
    return {
        "index": unit.index,
        "bytes": len(unit.pcm),
        "frames": [len(frame) for frame in unit.frames],
        "force_listen": unit.force_listen,
        "max_slice_nums": unit.max_slice_nums,
        "force_speak": unit.force_speak,
    }


def _chunk(chunk: Chunk) -> Keys:
    return {
        "utterance": chunk.utterance,
        "index": chunk.index,
        "bytes": len(chunk.pcm),
        "is_last": chunk.is_last,
        "seed": chunk.seed,
    }


def _loop(loop: UnitLoop) -> Keys:
    is_opening = loop.phase is Phase.OPENING
    return {
        "phase": "idle" if is_opening else loop.phase.value,
        "unit": loop.index,
        "input_id": loop.input_id,
        "interrupted": loop.interrupted,
        "failures": loop.failures,
    }


def _init(init: PendingInit) -> Keys:
    return {
        "undecided": dict(init.undecided),
        "voices": {name: len(pcm) for name, pcm in init.voices.items()},
    }


def _duplex(duplex: Duplex) -> Keys:
    assembler = duplex.assembler
    own: Keys = {
        "media": duplex.media,
        "undecided": sorted(duplex.undecided_media),
        "assembler": {
            "seconds": assembler.ordinal,
            "bytes": len(assembler.remainder),
            "attached": _attached(assembler.attached),
        },
        "waiting": [_unit(unit) for unit in duplex.waiting.units],
        "held": None if duplex.held is None else _outcome(duplex.held),
        "response_id": duplex.response_id,
        "ended_id": duplex.ended_id,
        "responses": duplex.responses,
        "appends": duplex.appends,
        "units_dropped": duplex.units_dropped,
        "pictures": _frames(duplex.seen),
        "is_paused": duplex.is_paused,
        "max_slice_nums": duplex.max_slice_nums,
        "deferred_finalize": duplex.deferred_finalize,
        "lockstep": None if duplex.lockstep is None else _lockstep(duplex.lockstep),
        "user": [duplex.samples, duplex.is_speaking, duplex.is_hushed, duplex.over_samples],
    }
    if isinstance(duplex, Live):
        own["live"] = _live(duplex)
    elif isinstance(duplex, OpenAI):
        own["openai"] = _openai(duplex)
    return {
        "opening": duplex.call.phase is Phase.OPENING,
        "loop": _loop(duplex.call),
        "init": None if duplex.pending is None else _init(duplex.pending),
        "own": own,
    }


def _pieces(pieces: Pieces) -> Keys:
    return {
        "bytes": len(pieces.unheard),
        "before_bytes": len(pieces.before),
        "resampling": [[it.media, it.pcm is not None] for it in pieces.resampling],
        "spoken_bytes": len(pieces.spoken),
    }


def _live(live: Live) -> Keys:
    settings = live.settings
    return {
        "model": settings.model,
        "coding": settings.coding,
        "rate_hz": settings.rate_hz,
        "delegation": settings.delegation,
        "backend": settings.backend,
        "safety_identifier": settings.safety_identifier,
        "event_id": settings.event_id,
        "history": len(settings.history),
        "instructions": len(live.instructions),
        "voice": live.voice,
        "muted": live.is_muted,
        **_pieces(live),
        "surplus_bytes": len(live.surplus),
        "seconds": live.seconds,
        "kv_length": live.kv_length,
        "mid_turn": live.is_mid_turn,
    }


def _openai(openai: OpenAI) -> Keys:
    told, reply = openai.told, openai.reply
    return {
        "model": told.model,
        "instructions": len(told.instructions),
        "voice": told.voice,
        "modality": told.modality,
        "input_format": told.heard,
        "output_format": told.spoken,
        "detection": None if told.detection is None else _detection(told.detection),
        **_pieces(openai),
        "opened": openai.is_opened,
        "updates": openai.updates,
        "samples": openai.samples,
        "speaking": openai.is_speaking,
        "input_item": openai.heard_item,
        "uncommitted_bytes": openai.uncommitted_bytes,
        "items": [[it.id, it.role, it.status, len(it.parts)] for it in openai.items.values()],
        "items_made": openai.items_made,
        "reply": None if reply is None else [reply.id, reply.modality, reply.output_tokens],
        "words": len(openai.words),
        "must_listen": openai.is_hushed,
        "asked": openai.is_asked,
        "metadata": len(openai.metadata or ()),
        "due_units": openai.due_units,
        "sound_ns": openai.sound_ns,
        "transcriber": told.transcriber,
        "spans": [[*span] for span in openai.spans],
        "skipped": openai.skipped,
        "utterances": [[it.start_ms, it.end_ms, it.text, it.is_whole] for it in openai.utterances],
    }


def _detection(how: TurnDetection) -> Keys:
    return {
        "kind": how.kind,
        "threshold": how.threshold,
        "prefix_ms": how.prefix_ms,
        "silence_ms": how.silence_ms,
        "creates": how.creates,
        "interrupts": how.interrupts,
    }


def _unit(unit: PendingUnit) -> Keys:
    attached = _attached(unit.attached)
    return {"second": unit.ordinal, "bytes": len(unit.pcm), "attached": attached}


def _attached(attached: Attachments) -> Keys:
    return {
        "input_id": attached.input_id,
        "frames": _frames(attached.frames),
        "force_listen": attached.force_listen,
        "max_slice_nums": attached.max_slice_nums,
    }


def _frames(frames: tuple[Frame, ...]) -> list[list[int]]:
    return [[frame.media, len(frame.jpeg)] for frame in frames]


def _outcome(outcome: Listen | Speech) -> Keys:
    return {
        "is_speech": isinstance(outcome, Speech),
        "input_id": outcome.input_id,
        "response_id": outcome.response_id,
        "end_of_turn": isinstance(outcome, Speech) and outcome.end_of_turn,
    }


def _lockstep(lockstep: Lockstep) -> Keys:
    return {
        "kv_length": lockstep.kv_length,
        "chunk": lockstep.chunk,
        "units": [[owed.ordinal, owed.chunk, owed.pending] for owed in lockstep.units],
    }


def _chat(chat: Chat) -> Keys:
    own = {
        "media": chat.media,
        "turns": chat.turns,
        "turn": None if chat.turn is None else _turn(chat.turn),
        "instructions": chat.instructions,
    }
    return {"running_turn": None if chat.call.is_idle else chat.call.index, "own": own}


def _turn(turn: ActiveTurn) -> Keys:
    asked = turn.pending
    return {
        "index": turn.index,
        "input_id": turn.input_id,
        "response_id": turn.response_id,
        "stage": turn.stage.value,
        "asked": {
            "undecided": sorted(asked.undecided),
            "contents": [[len(known) for known in message] for message in asked.contents],
            "voice_bytes": len(asked.voice_pcm),
        },
        "input_tokens": None if turn.prefill is None else turn.prefill.input_tokens,
        "text": turn.text,
        "bytes": sum(map(len, turn.pcm)),
        "tokens": turn.tokens,
        "codes": turn.codes,
    }


def _transcription(transcription: Transcription) -> Keys:
    call, pending = transcription.call, transcription.pending
    own = {
        "model": transcription.model,
        "utterances": transcription.utterances,
        "pending": [_utterance(utterance) for utterance in pending],
        "appends": transcription.appends,
        "chunks": transcription.chunks,
        "waiting_bytes": transcription.waiting_bytes,
        "active_ns": transcription.active_ns,
        "owes_commit": transcription.owes_commit,
    }
    if isinstance(transcription, Dictation):
        own["openai"] = _dictation(transcription)
    is_running = call.phase is Phase.RUNNING
    return {"running_chunk": (pending[0].index, call.index) if is_running else None, "own": own}


def _dictation(dictation: Dictation) -> Keys:
    told, spoken = dictation.told, dictation.open
    return {
        "model": told.model,
        "transcriber": told.transcriber,
        "input_format": told.heard,
        "detection": None if told.detection is None else _detection(told.detection),
        "updates": dictation.updates,
        "items_made": dictation.items_made,
        "last_item": dictation.last_item,
        "open": None if spoken is None else _spoken(spoken),
        "unanswered": [_spoken(it) for it in dictation.unanswered],
        "bytes": len(dictation.sound),
        "tail_bytes": len(dictation.tail),
        "samples": dictation.samples,
        "searched": dictation.searched,
        "speaking": dictation.is_speaking,
    }


def _spoken(spoken: Spoken) -> list[object]:
    return [spoken.item_id, spoken.samples, spoken.is_lost]


def _utterance(utterance: Utterance) -> Keys:
    return {
        "index": utterance.index,
        "bytes": len(utterance.sound),
        "is_begun": utterance.is_begun,
        "is_final": utterance.is_final,
        "is_answered": utterance.is_answered,
        "chunks": utterance.chunks,
        "is_heard_out": utterance.is_heard_out,
        "texts": utterance.texts,
        "prompt_tokens": utterance.prompt_tokens,
        "completion_tokens": utterance.completion_tokens,
    }


_OWN: Final[Mapping[Course, Callable[[Any], Keys]]] = {
    Course.DUPLEX: _duplex,
    Course.CHAT: _chat,
    Course.REQUEST: _chat,
    Course.TRANSCRIPTION: _transcription,
}
