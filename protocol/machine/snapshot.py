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
from ..values.openai import Reply, Respond, TurnDetection
from ..values.utf8 import frame_bytes
from .chat import ActiveTurn, Chat, SingleRequest
from .core import Phase
from .dictation import Dictation, Spoken
from .duplex import Duplex
from .input import Attachments, CameraFrame, PendingUnit
from .kind import Kind
from .live import Live
from .omni import Omni
from .openai import OpenAI
from .setup import PendingInit, Setup
from .slot import Migration
from .sound import SoundPieces
from .tools import ToolCalls
from .transcription import ChunkLoop, Transcription, Utterance
from .unit_loop import Lockstep

Keys = dict[str, object]


def snapshot_of(kind: Kind) -> Keys:
    """Return a session's state; a kind's keys replace those of its model call."""
    peer, slot, place = kind.peer, kind.slot, kind.slot.place
    return {
        "now_ns": kind.step.now_ns,
        "state": peer.state.value,
        "dialect": peer.dialect.name,
        "recording": kind.recording.state,
        "end_reason": kind.end_reason,
        "lease": slot.lease,
        "waits_for_slot": slot.is_waiting,
        "releasing": slot.is_releasing,
        "draining": kind.is_draining,
        "alive_ns": kind.watchdog.alive_ns,
        "frames_sent": peer.frames_sent,
        "fields_ignored": peer.fields_ignored,
        "early_bytes": None if peer.early is None else frame_bytes(peer.early),
        "wants_notices": peer.wants_notices,
        "forking": kind.step.is_forking,
        "timers": {"set": dict(kind.timers.pending), "generation": kind.timers.generation},
        "queue": {
            "sent_ns": slot.sent_ns,
            "position": None if place is None else place.position,
            "length": None if place is None else place.queue_length,
            "wait_s": None if place is None else place.estimated_wait_s,
            "ticket_id": None if place is None else place.ticket_id,
        },
        "peer": {
            "detached": peer.is_detached,
            "asleep": peer.is_asleep,
            "received": peer.frames_received,
        },
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
    return {
        "migrating": migration.is_migrating,
        "revoked": migration.is_revoked,
        "repeated": migration.is_repeated,
        "losses": migration.losses,
    }


def _running(unit: Unit) -> Keys:
    return {
        "index": unit.index,
        "bytes": len(unit.pcm),
        "frames": [len(frame) for frame in unit.frames],
        "force_listen": unit.force_listen,
        "max_slice_nums": unit.max_slice_nums,
        "force_speak": unit.force_speak,
        **({"inputs": len(unit.inputs)} if unit.inputs else {}),
    }


def _chunk(chunk: Chunk) -> Keys:
    return {
        "utterance": chunk.utterance,
        "index": chunk.index,
        "bytes": len(chunk.pcm),
        "is_last": chunk.is_last,
        "seed": chunk.seed,
    }


def _init(init: PendingInit) -> Keys:
    return {
        "undecided": dict(init.undecided),
        "voices": {name: len(pcm) for name, pcm in init.voices.items()},
    }


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
        "response_id": loop.response_id,
        "ended_id": loop.ended_id,
        "responses": loop.responses,
        "appends": loop.appends,
        "units_dropped": waiting.units_dropped,
        "pictures": _frames(waiting.pictures),
        "is_paused": loop.is_paused,
        "max_slice_nums": loop.max_slice_nums,
        "deferred_finalize": loop.deferred_finalize,
        "lockstep": None if loop.lockstep is None else _lockstep(loop.lockstep),
        **_tools(loop.tools),
        "user": [speech.samples, speech.is_speaking, speech.must_listen, speech.over_samples],
    }
    return {
        "opening": is_opening,
        "loop": {
            "phase": Phase.IDLE.value if is_opening else call.phase.value,
            "unit": call.index,
            "input_id": loop.input_id,
            "interrupted": loop.interrupted,
            "failures": loop.failures,
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
        "made": tools.made,
        "open": [[name, it.name, it.deadline_ns] for name, it in tools.open.items()],
        "started": [it.call for it in tools.started],
        "waiting": [[it.kind, it.call, len(it.text)] for it in tools.waiting],
        "made_ns": [*tools.made_ns],
        "told_ns": [*tools.texts_ns],
        "failures": tools.failures,
        "cut": tools.is_cut,
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
        **_pieces(live.sound),
        "surplus_bytes": len(live.surplus),
        "seconds": live.seconds,
        "kv_length": live.kv_length,
        "mid_turn": live.is_mid_turn,
    }


def _openai(openai: OpenAI) -> Keys:
    now, talk, speech = openai.settings, openai.conversation, openai.loop.speech
    reply = talk.reply
    return {
        "model": now.model,
        "instructions": len(now.instructions),
        "voice": now.voice,
        "modality": now.modality,
        "input_format": now.input_format,
        "output_format": now.output_format,
        "detection": None if now.detection is None else _detection(now.detection),
        **_pieces(openai.sound),
        "opened": openai.setup.is_opened,
        "updates": openai.updates,
        "samples": speech.samples,
        "speaking": speech.is_speaking,
        "input_item": openai.input_item,
        "uncommitted_bytes": openai.uncommitted_bytes,
        "items": [[it.id, it.role, it.status, len(it.parts)] for it in talk.items.values()],
        "items_made": talk.items_made,
        "reply": None if reply is None else [reply.id, reply.modality, reply.output_tokens],
        "words": len(talk.words),
        "must_listen": speech.must_listen,
        "asked": openai.asked_at or openai.is_asked,
        "metadata": len(talk.asked.metadata or ()),
        **_options(talk.asked, reply),
        "due_units": openai.due_units,
        "sound_ns": openai.sound_ns,
        "transcriber": now.transcriber,
        "spans": [[*span] for span in talk.spans],
        "skipped": openai.skipped,
        "utterances": [[it.start_ms, it.end_ms, it.text, it.is_whole] for it in talk.utterances],
        **({} if openai.ending_ms is None else {"ending_ms": openai.ending_ms}),
        **({"mid_turn": True} if talk.is_mid_turn else {}),
        **({"played_ns": openai.played_ns} if openai.played_ns else {}),
    }


def _omni(omni: Omni) -> Keys:
    now, talk = omni.session, omni.conversation
    reply = talk.reply
    return {
        "settings": [now.model, now.modality, now.overlap, now.history, now.answers],
        "detection": None if now.detection is None else _detection(now.detection),
        "epoch": now.epoch,
        "turn_id": now.turn_id,
        "connections": omni.connections,
        "asked": omni.is_asked,
        "due_units": omni.due_units,
        "samples": omni.samples,
        "uncommitted": omni.uncommitted,
        "sound_ns": omni.sound_ns,
        "played": [[name, *played] for name, played in omni.played.items()],
        "kv_length": omni.kv_length,
        "items": [[it.id, it.role, it.status, len(it.parts)] for it in talk.items.values()],
        "items_made": talk.items_made,
        "reply": None if reply is None else [reply.id, reply.modality, reply.output_tokens],
        "words": len(talk.words),
        "utterances": [[it.start_ms, it.end_ms, it.text, it.is_whole] for it in talk.utterances],
        **({"mid_turn": True} if talk.is_mid_turn else {}),
    }


def _options(asked: Respond, reply: Reply | None) -> Keys:
    """What was asked of one response, where anything was: older logs have no such keys."""
    wanted = [asked.modality, asked.max_tokens, *([True] if asked.is_unheard else [])]
    bounds = [] if reply is None else [reply.max_tokens, reply.input_tokens]
    faults = [] if reply is None or not reply.fault else [reply.fault]
    return {"options": [wanted, bounds, *faults]} if any(wanted) or any(bounds) else {}


def _detection(how: TurnDetection) -> Keys:
    return {
        "kind": how.kind,
        "threshold": how.threshold,
        "prefix_ms": how.prefix_ms,
        "silence_ms": how.silence_ms,
        "creates": how.creates,
        "interrupts": how.interrupts,
        **({} if how.backchannel_ms is None else {"backchannel_ms": how.backchannel_ms}),
        **({"idle_ms": how.idle_ms} if how.idle_ms else {}),
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


def _frames(frames: tuple[CameraFrame, ...]) -> list[list[int]]:
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


def _turns(kind: Chat | SingleRequest) -> Keys:
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


def _chunks(loop: ChunkLoop, model: str) -> Keys:
    """The keys of a kind that transcribes."""
    call, pending, chunk = loop.call, loop.pending, loop.chunk
    is_running = call.phase is Phase.RUNNING
    return {
        "running_chunk": (pending[0].index, call.index) if is_running else None,
        "migration": {**_migration(loop.migration), "chunk": chunk and _chunk(chunk)},
        "own": {
            "model": model,
            "utterances": loop.utterances,
            "pending": [_utterance(utterance) for utterance in pending],
            "appends": loop.appends,
            "chunks": loop.chunks,
            "waiting_bytes": loop.waiting_bytes,
            "active_ns": loop.peer.active_ns,
            "owes_commit": loop.owes_commit,
            **({"ending": loop.ending} if loop.ending else {}),
        },
    }


def _dictation(dictation: Dictation) -> Keys:
    now, spoken = dictation.settings, dictation.open
    return {
        "model": now.model,
        "transcriber": now.transcriber,
        "input_format": now.input_format,
        "detection": None if now.detection is None else _detection(now.detection),
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
        "is_heard_out": utterance.is_transcribed,
        "texts": utterance.texts,
        "prompt_tokens": utterance.prompt_tokens,
        "completion_tokens": utterance.completion_tokens,
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
