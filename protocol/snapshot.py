"""What a session remembers, as plain values under documented keys (docs/log-format.md, "States").

The keys are a format: recordings hold a session to a digest over them. They stay when classes and
attributes get other names. A key that comes, goes or means something else is a new `SNAPSHOT`.

Sound, pictures and questions are here by their sizes, for they stand in the log.
"""

from __future__ import annotations

from .chat import ActiveTurn, Chat
from .core import Core
from .duplex import Duplex
from .lockstep import Lockstep
from .messages import Listen, Speech
from .pending_init import PendingInit
from .state import Course
from .transcription import Transcription, Utterance
from .units import Attachments, Frame, PendingUnit
from .utf8 import frame_bytes
from .waiting import Waiting

Keys = dict[str, object]


def snapshot_of(
    core: Core,
    waiting: Waiting,
    init: PendingInit | None,
    courses: tuple[Duplex, Chat, Transcription],
) -> Keys:
    """Say what a session holds; `init` waits for voices. Of the courses its own alone counts."""
    duplex, chat, transcription = courses
    match core.course:
        case Course.DUPLEX:
            own = _duplex(duplex)
        case Course.TRANSCRIPTION:
            own = _transcription(transcription)
        case _:
            own = _chat(chat)
    return {
        **_core(core),
        "queue": _queue(waiting),
        "init": None if init is None else _init(init),
        "own": own,
    }


def _core(core: Core) -> Keys:
    return {
        "now_ns": core.now_ns,
        "state": core.state.value,
        "dialect": core.dialect.name,
        "recording": core.recording,
        "end_reason": core.end_reason,
        "lease": core.lease,
        "waits_for_slot": core.waits_for_slot,
        "opening": core.opening_backend,
        "releasing": core.releasing,
        "draining": core.is_draining,
        "running_turn": core.running_turn,
        "running_chunk": core.running_chunk,
        "alive_ns": core.alive_ns,
        "frames_sent": core.frames_sent,
        "fields_ignored": core.fields_ignored,
        "early_bytes": None if core.early is None else frame_bytes(core.early),
        "wants_notices": core.wants_notices,
        "timers": {"set": dict(core.timers.pending), "generation": core.timers.generation},
        "loop": {
            "phase": core.loop.phase.value,
            "unit": core.loop.index,
            "input_id": core.loop.input_id,
            "interrupted": core.loop.interrupted,
            "failures": core.loop.failures,
        },
    }


def _queue(waiting: Waiting) -> Keys:
    place = waiting.place
    return {
        "told_ns": waiting.told_ns,
        "position": None if place is None else place.position,
        "length": None if place is None else place.queue_length,
        "wait_s": None if place is None else place.estimated_wait_s,
        "ticket_id": None if place is None else place.ticket_id,
    }


def _init(init: PendingInit) -> Keys:
    return {
        "undecided": dict(init.undecided),
        "voices": {name: len(pcm) for name, pcm in init.voices.items()},
    }


def _duplex(duplex: Duplex) -> Keys:
    assembler = duplex.assembler
    return {
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
        "seen": _frames(duplex.seen),
        "is_paused": duplex.is_paused,
        "max_slice_nums": duplex.max_slice_nums,
        "deferred_finalize": duplex.deferred_finalize,
        "lockstep": None if duplex.lockstep is None else _lockstep(duplex.lockstep),
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
    return {
        "media": chat.media,
        "turns": chat.turns,
        "turn": None if chat.turn is None else _turn(chat.turn),
        "instructions": chat.instructions,
    }


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
    return {
        "model": transcription.model,
        "utterances": transcription.utterances,
        "pending": [_utterance(utterance) for utterance in transcription.pending],
        "appends": transcription.appends,
        "chunks": transcription.chunks,
        "waiting_bytes": transcription.waiting_bytes,
        "active_ns": transcription.active_ns,
        "owes_commit": transcription.owes_commit,
    }


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
