"""What the server says in the dialect of 002 beside queue events; `legacy_duplex` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..codec import Fields, Value, dump_frame, encode_base64
from ..errors import ErrorCode, LocalProtocolError
from ..messages import Closed, Created, EndReason, ErrorReport, Listen, Metrics, Pending, Speech
from . import legacy, shared

PAUSE_S_MAX: Final = 86_400
"""A day: the server's own limit is much less and cuts a longer wish (the wire decisions)."""
UNIX_S_MAX: Final = 1e11
"""The year 5138: a time beyond it is in other units."""
_FAULTS: Final[Mapping[EndReason, str]] = {
    "context_full": "the model's context is full",
    "backend_error": "the model failed",
    "server_shutdown": "the server shuts down",
    "invalid_frame": "a frame is not JSON, or too long",
    "flooded": "more was sent than can be recorded",
}
_CODES: Final = (*shared.ERROR_CODES, *_FAULTS)
_TIMEOUTS: Final[Mapping[EndReason, str]] = {
    "timeout": "the session's time is over",
    "pause_timeout": "the pause was too long",
}


def encode_prepared(created: Created) -> str:
    """Write that the session is ready."""
    recording = created.recording_id
    return dump_frame(
        {
            "type": "prepared",
            "prompt_length": created.prompt_length,
            **({"recording_session_id": recording} if recording else {}),
            **shared.noticed(created.recording_notice),
        }
    )


def decode_prepared(fields: Fields) -> Created:
    """Read that the session is ready."""
    recording_id = fields.optional("recording_session_id", Value.text, "")
    return Created(
        session_id="",
        prompt_length=fields.optional("prompt_length", Value.integer, 0),
        recording="on" if recording_id else "off",
        recording_id=recording_id,
        recording_notice=fields.optional("recording_notice", Value.text, ""),
    )


def encode_result(outcome: Listen | Speech | Pending) -> str:
    """Write a unit's outcome, or that a chunk completed no unit.

    Clients take a listen for the end of the turn: amid one a pending result speaks, of nothing.
    """
    speech = outcome if isinstance(outcome, Speech) else None
    pending = outcome if isinstance(outcome, Pending) else None
    metrics = outcome.metrics
    return dump_frame(
        {
            "type": "result",
            "is_listen": speech is None if pending is None else not pending.is_speaking,
            "text": speech.text if speech else "",
            "audio_data": encode_base64(speech.pcm) if speech and speech.pcm else None,
            "end_of_turn": speech is not None and speech.end_of_turn,
            "current_time": round(metrics.session_ms, 3),
            "cost_llm_ms": metrics.cost_llm_ms,
            "cost_tts_prep_ms": 0.0,  # it is part of cost_tts_ms
            "cost_tts_ms": metrics.cost_tts_ms,
            "cost_token2wav_ms": metrics.cost_token2wav_ms,
            "cost_all_ms": metrics.generate_ms,
            "n_tokens": metrics.n_tokens,
            "n_tts_tokens": metrics.n_tts_tokens,
            "server_send_ts": round(metrics.wall_ms / 1000, 6),
            "wall_clock_ms": metrics.wall_clock_ms,
            "kv_cache_length": metrics.kv_cache_length,
            "vision_slices": metrics.vision_slices,
            "vision_tokens": metrics.vision_tokens,
            **({} if pending is None else {"pending": True}),
        }
    )


def decode_result(fields: Fields) -> Listen | Speech | Pending:
    """Read a unit's outcome, or that a chunk completed no unit."""
    is_listen = fields.required("is_listen", Value.flag)
    text = fields.optional("text", Value.text, "")
    pcm = fields.optional("audio_data", shared.read_output, b"")
    end_of_turn = fields.optional("end_of_turn", Value.flag, False)
    metrics = _read_metrics(fields)
    if fields.optional("pending", Value.flag, False):
        return Pending(is_speaking=not is_listen, metrics=metrics)
    if is_listen:
        return Listen(session_id="", input_id="", metrics=metrics)
    return Speech(
        session_id="",
        response_id="",
        input_id="",
        text=text,
        pcm=pcm,
        end_of_turn=end_of_turn,
        metrics=metrics,
    )


def _read_metrics(fields: Fields) -> Metrics:
    """Read what a result says of itself; other servers leave some of it out."""
    read, read_ms = fields.optional, shared.read_time
    sent_s = read("server_send_ts", lambda value: value.number(0, UNIX_S_MAX), 0.0)
    return Metrics(
        kv_cache_length=read("kv_cache_length", Value.integer, 0),
        generate_ms=read("cost_all_ms", read_ms, 0.0),
        wall_clock_ms=read("wall_clock_ms", read_ms, 0.0),
        cost_llm_ms=read("cost_llm_ms", read_ms, 0.0),
        cost_tts_ms=read("cost_tts_ms", read_ms, 0.0),
        cost_token2wav_ms=read("cost_token2wav_ms", read_ms, 0.0),
        n_tokens=read("n_tokens", Value.integer, 0),
        n_tts_tokens=read("n_tts_tokens", Value.integer, 0),
        vision_slices=read("vision_slices", Value.integer, 0),
        vision_tokens=read("vision_tokens", Value.integer, 0),
        recording="off",
        session_ms=read("current_time", read_ms, 0.0),
        wall_ms=round(sent_s * 1000, 3),
    )


def read_pause(value: Value) -> float:
    """Read how long a pause may be, in seconds."""
    return value.number(0, PAUSE_S_MAX, "above ")


def encode_closed(closed: Closed) -> tuple[str, ...]:
    """Write a session's end, in one frame or two.

    Raises:
        LocalProtocolError: nobody hears such an end here.
    """
    reason = closed.reason
    if reason in _TIMEOUTS:
        return (dump_frame({"type": "timeout", "reason": _TIMEOUTS[reason]}),)
    stopped = dump_frame({"type": "stopped", "session_id": closed.session_id})
    if reason in _FAULTS:
        return (legacy.error_frame(_FAULTS[reason], reason, closed.named), stopped)
    if reason in {"client", "cancelled"}:
        return (stopped,)
    raise LocalProtocolError(f"no frame for the end {reason} in legacy-duplex: nobody hears it")


def decode_timeout(fields: Fields) -> Closed:
    """Read an end by a timeout."""
    text = fields.optional("reason", Value.text, "")
    is_pause = text == _TIMEOUTS["pause_timeout"]
    return Closed(session_id="", reason="pause_timeout" if is_pause else "timeout")


def decode_error(fields: Fields) -> ErrorReport | Closed:
    """Read an error, or the end that it announces."""
    code = fields.optional("code", lambda value: value.choice(_CODES), ErrorCode.INFERENCE_ERROR)
    text = fields.required("error", Value.text)
    session_id = shared.read_session_id(fields)
    for reason in _FAULTS:
        if code == reason:
            return Closed(session_id="", reason=reason, named=session_id)
    return ErrorReport(code=ErrorCode(code), message=text, session_id=session_id)
