"""The names of events, effects and their values in recordings, and hashes of values and of ids.

Logs, digests of values, and the messages between a server and its workers use these names and no
others, so that a class or an attribute can be renamed or moved without changing a log.

A row is the name of a class in records, and then those of its attributes, in their order. A name
stands in logs for ever: it is never changed, and never used again for something else. An attribute
that has a default is left out of a record, and of a digest, while it has it. So

- a class may get another attribute, with a default under which it does as before;
- the default of an attribute is part of the format, as its name is. It stays (a test holds it), and
  a session with another one gets it from its caller.

`digest` is canonical: equal values give equal digests in any process, whatever their dict order or
`PYTHONHASHSEED`. It takes only the values that a session is made of.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from functools import lru_cache
from typing import Any, Final, TypeAlias

import attrs

from . import effects as ef
from . import events as ev
from . import frames, messages, model

Named: TypeAlias = tuple["attrs.Attribute[Any]", str]
"""An attribute, and its name in records."""

_ROWS: Final[Mapping[type[attrs.AttrsInstance], str]] = {
    # -- events -----------------------------------------------------------------------------------
    ev.ConnectionOpened: "ConnectionOpened at_ns recording_id created_ms mode seed limits recording"
    " endpoint label behaviour quiet must_record recording_notice resume_hash",
    ev.SessionLimits: "SessionLimits session_s init_wait_s cleanup_wait_s"
    " context_tokens sliding_windows can_rollback close_on_recording_failure idle_s pause_s"
    " watchdog_s models audio_bytes rebuild_wait_s rebuild_units can_repeat_turn can_force_speak"
    " has_vision transcriber barge_in detach_s resume_s backchannel_ms duplex_tools",
    ev.Forked: "Forked at_ns limits resume_hash recording_notice",
    ev.FrameReceived: "FrameReceived at_ns frame has_room shortened",
    frames.Shortened: "Shortened size_bytes blake2b head unreadable refused read_bytes",
    frames.Refused: "Refused code message ignored",
    ev.PeerGone: "PeerGone at_ns close_code",
    ev.PeerAttached: "PeerAttached at_ns after resume_hash",
    ev.SendFailed: "SendFailed at_ns",
    ev.TicketMoved: "TicketMoved at_ns place",
    messages.QueuePlace: "QueuePlace position estimated_wait_s ticket_id queue_length",
    ev.TicketLeft: "TicketLeft at_ns",
    ev.TicketCancelled: "TicketCancelled at_ns",
    ev.AnswerCancelled: "AnswerCancelled at_ns",
    ev.AdmissionRefused: "AdmissionRefused at_ns code",
    ev.Admitted: "Admitted at_ns",
    ev.SlotLeased: "SlotLeased at_ns lease slot",
    ev.BackendOpened: "BackendOpened at_ns lease opened",
    model.Opened: "Opened prompt_length fed_ids takes_events",
    ev.BackendOpenFailed: "BackendOpenFailed at_ns lease context_full is_lost refused",
    ev.MediaDecoded: "MediaDecoded at_ns media pcm images stacked_images",
    ev.MediaRejected: "MediaRejected at_ns media reason",
    ev.SpeechStarted: "SpeechStarted at_ns at_ms",
    ev.SpeechStopped: "SpeechStopped at_ns at_ms",
    ev.UserTranscribed: "UserTranscribed at_ns text start_ms end_ms is_last",
    ev.UnitDone: "UnitDone at_ns result",
    model.UnitResult: "UnitResult index is_listen text pcm end_of_turn kv_length decided_ids"
    " fed_ids codec_ids cut input_hash logits_hash margin vision_slices vision_tokens costs",
    model.Cut: "Cut stage step",
    model.Costs: "Costs prefill_us generate_us llm_us tts_us token2wav_us wall_us",
    ev.UnitFailed: "UnitFailed at_ns index context_full",
    ev.FinalizeDone: "FinalizeDone at_ns finalized",
    model.Finalized: "Finalized index kv_length fed_ids cost_us silent",
    model.Silent: "Silent end spans is_open decided_ids",
    model.Span: "Span kind text name arguments fault",
    ev.FinalizeFailed: "FinalizeFailed at_ns index",
    ev.RollbackDone: "RollbackDone at_ns index",
    ev.RollbackFailed: "RollbackFailed at_ns index",
    ev.TurnPrefilled: "TurnPrefilled at_ns prefill",
    model.Prefill: "Prefill index input_tokens fed_ids input_hash cost_us",
    ev.TurnProgress: "TurnProgress at_ns chunk",
    model.TurnChunk: "TurnChunk index step text pcm token_ids codec_ids",
    ev.TurnDone: "TurnDone at_ns result",
    model.TurnResult: "TurnResult index text pcm reason generated_tokens kv_length codec_ids cut"
    " logits_hash margin costs tool_calls",
    model.ToolCall: "ToolCall id name arguments",
    ev.TurnFailed: "TurnFailed at_ns index context_full refused",
    ev.ChunkDone: "ChunkDone at_ns result",
    model.ChunkResult: "ChunkResult utterance index text token_ids reason prompt_tokens"
    " generated_tokens kv_length fed_ids input_hash logits_hash margin costs",
    ev.ChunkFailed: "ChunkFailed at_ns utterance index context_full",
    ev.BackendLost: "BackendLost at_ns lease",
    ev.LeaseRevoked: "LeaseRevoked at_ns lease",
    ev.Rebuilt: "Rebuilt at_ns lease steps batches cost_us",
    ev.RebuildFailed: "RebuildFailed at_ns lease",
    ev.BackendReleased: "BackendReleased at_ns lease",
    ev.TimerFired: "TimerFired at_ns name generation",
    ev.RecordingFailed: "RecordingFailed at_ns",
    ev.Flooded: "Flooded at_ns",
    ev.DrainBegan: "DrainStarted at_ns wait_s",
    ev.Draining: "Draining at_ns",
    # -- effects ----------------------------------------------------------------------------------
    ef.Send: "Send ordinal frame",
    ef.Attach: "Attach frame after before",
    ef.Close: "Close code reason",
    ef.Admit: "Admit",
    ef.EnterQueue: "EnterQueue mode ahead",
    ef.LeaveQueue: "LeaveQueue",
    ef.OpenBackend: "OpenBackend lease opening",
    model.Opening: "Opening instructions voice config seed tools",
    model.Voice: "Voice llm_pcm tts_pcm",
    model.DuplexConfig: "DuplexConfig generate_audio force_listen_count"
    " max_new_speak_tokens_per_chunk temperature top_k top_p listen_prob_scale length_penalty"
    " sliding_window deferred_finalize",
    ef.Rebuild: "Rebuild lease",
    model.PastUnit: "PastUnit unit result interrupted is_voiced silent",
    ef.DecodeMedia: "DecodeMedia media kind data rate_hz stack_frames",
    ef.CancelDecode: "CancelDecode media",
    ef.DetectSpeech: "DetectSpeech at_samples rate_hz data threshold silence_ms is_speech"
    " speech_ms",
    ef.StartUnit: "StartUnit unit",
    model.Unit: "Unit index pcm frames force_listen max_slice_nums force_speak inputs",
    model.UnitInput: "UnitInput kind call text",
    ef.Interrupt: "InterruptUnit index",
    ef.StartFinalize: "StartFinalize index interrupted",
    ef.Rollback: "Rollback index",
    ef.DropUnit: "DropUnit ordinal input_id force_listen_passed",
    ef.ForgetRecording: "ForgetRecording",
    ef.StartTurn: "StartTurn lease turn",
    model.Turn: "Turn index messages config speech max_slice_nums use_image_id omni_mode thinking"
    " seed tts_template tools",
    model.Message: "Message role content",
    model.Text: "Text text",
    model.Picture: "Image jpeg",
    model.Sound: "Audio pcm",
    model.ToolResult: "ToolResult call_id output",
    model.ChatConfig: "ChatConfig max_new_tokens temperature top_p top_k repetition_penalty"
    " length_penalty min_new_tokens",
    model.SpeechConfig: "SpeechConfig mode language voice_pcm",
    model.Tool: "Tool name description parameters",
    ef.CutTurn: "InterruptTurn index",
    ef.RunChunk: "StartChunk lease chunk",
    model.Chunk: "Chunk utterance index pcm is_last seed",
    ef.Release: "Release lease condemn",
    ef.SetTimer: "SetTimer name generation at_ns",
    ef.CancelTimer: "CancelTimer name generation",
}

RECORD_NAMES: Final[Mapping[type, str]] = {cls: row.split()[0] for cls, row in _ROWS.items()}
"""The name of each class in records."""


def _fields(cls: type[attrs.AttrsInstance], names: list[str]) -> tuple[Named, ...]:
    fields = attrs.fields(cls)
    assert len(set(names)) == len(fields), f"{cls} has {len(fields)} attributes, and names {names}"
    return tuple(zip(fields, names, strict=True))


RECORD_FIELDS: Final[Mapping[type, tuple[Named, ...]]] = {
    cls: _fields(cls, row.split()[1:]) for cls, row in _ROWS.items()
}
"""The attributes of each class, each with its name in records."""

assert len(set(RECORD_NAMES.values())) == len(_ROWS), "two classes have one name in records"


def record_name(value: object) -> str:
    """Return the name in records of the class of an event, an effect or a value."""
    return RECORD_NAMES[type(value)]


# -- hashes -------------------------------------------------------------------------------------

DIGEST_BYTES: Final = 16
"""blake2b-128: short enough for every record, long enough never to collide by chance."""

NUMBERS: Final = frozenset({bool, int, float, type(None)})
"""Kinds that are fed as they are written."""

_SESSION_ID: Final = re.compile("sess_[0-9a-f]{12}")


def derive_id(recording_id: str, prefix: str, counter: int) -> str:
    """Make an opaque id, `prefix` and 12 hex digits, from a recording and a counter."""
    text = f"{prefix}:{recording_id}:{counter}".encode()
    return f"{prefix}_{hashlib.blake2b(text, digest_size=6).hexdigest()}"


@lru_cache(maxsize=1024)
def session_id_of(recording_id: str) -> str:
    """Return the session's id, the same in every dialect and in the server's log."""
    return derive_id(recording_id, "sess", 0)


def is_session_id(text: str) -> bool:
    """Whether a text could be the id of a session."""
    return _SESSION_ID.fullmatch(text) is not None


def digest(value: object) -> str:
    """Name a value by blake2b-128, in hex.

    It takes the classes that records have names for, enums, mappings, sequences, sets, bytes, text,
    numbers and None, nested; `TypeError` for any other. Attributes at their default are left out.
    """
    hasher, left = hashlib.blake2b(digest_size=DIGEST_BYTES), [value]
    while left:
        # Each value is tagged with its kind and length, so that no two values run together.
        value = left.pop()
        kind = type(value)  # Most values are of few kinds, and are known by them more quickly.
        if kind is not str and kind not in NUMBERS and isinstance(value, Enum):
            left.append(value.value)
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            hasher.update(b"s%d:%b" % (len(data), data))
        elif kind in NUMBERS or isinstance(value, bool | int | float):
            hasher.update(f"{kind.__name__}:{value!r};".encode())
        elif isinstance(value, bytes | bytearray):
            hasher.update(b"b%d:" % len(value))
            hasher.update(value)
        elif (fields := RECORD_FIELDS.get(kind)) is not None:
            hasher.update(f"a{RECORD_NAMES[kind]}:".encode())
            for field, name in reversed(fields):
                item = getattr(value, field.name)
                if item != field.default:
                    left += (item, name)
        elif isinstance(value, Mapping):
            hasher.update(b"m%d:" % len(value))
            for key in sorted(value, reverse=True):
                left += (value[key], key)
        elif isinstance(value, Set):
            left.append(sorted(value))
        elif isinstance(value, Sequence | deque):
            hasher.update(b"l%d:" % len(value))
            left += reversed(value)
        else:
            raise TypeError(f"a {kind.__name__} has no digest")
    return hasher.hexdigest()
