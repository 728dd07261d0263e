"""The names of events, effects and their values in recordings: of each class and each attribute.

Logs, digests of values, and the messages between a server and its workers use these names and no
others, so that a class or an attribute can be renamed or moved without changing a log.

A row is the name of a class in records, and then those of its attributes, in their order. A name
stands in logs for ever: it is never changed, and never used again for something else. An attribute
that has a default is left out of a record, and of a digest, while it has it. So

- a class may get another attribute, with a default under which it does as before;
- the default of an attribute is part of the format, as its name is. It stays (a test holds it), and
  a session with another one gets it from its caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import attrs

from . import effects as ef
from . import events as ev
from . import messages, model, utf8

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
    utf8.Shortened: "Shortened size_bytes blake2b head unreadable refused read_bytes",
    utf8.Refused: "Refused code message ignored",
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
