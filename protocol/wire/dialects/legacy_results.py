"""The server's messages in the dialect of 002, without queue events; see `legacy_duplex`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ...values.errors import ErrorCode, LocalProtocolError
from ...values.messages import (
    Closed,
    Created,
    EndReason,
    ErrorReport,
    GoingAway,
    Interrupted,
    Listen,
    Metrics,
    Paused,
    Pending,
    Resumed,
    Speech,
)
from ..field import DROPPED, Field
from ..kinds import FLAG, INTEGER, SPEECH, TEXT, Kind, always, choice, number, or_null
from ..table import Row, Table
from . import legacy, shared

PAUSE_S_MAX: Final = 86_400
"""A day: the server's own limit is much less and cuts a longer wish (the wire decisions)."""
UNIX_S_MAX: Final = 1e11
"""The year 5138: a later time is in other units."""
PAUSE_S: Final = number(0, PAUSE_S_MAX, "above ")
FAULTS: Final[Mapping[EndReason, str]] = {
    "context_full": "the model's context is full",
    "backend_error": "the model failed",
    "server_shutdown": "the server shuts down",
    "invalid_frame": "a frame is not JSON, or too long",
    "flooded": "more was sent than can be recorded",
}
TIMEOUTS: Final[Mapping[EndReason, str]] = {
    "timeout": "the session's time is over",
    "pause_timeout": "the pause was too long",
}

# -- a unit's outcome ---------------------------------------------------------------------------

_UNIX_S: Final = number(0, UNIX_S_MAX)
_SENT: Final = attrs.evolve(
    _UNIX_S,
    read=lambda value, at: round(_UNIX_S.read(value, at) * 1000, 3),
    write=lambda wall_ms: round(wall_ms / 1000, 6),
)


def _costs(name: str, attribute: str) -> Field:
    return Field(name, shared.TIME_MS, 0.0, attr=f"metrics.{attribute}")


def _counts(name: str) -> Field:
    return Field(name, INTEGER, 0, attr=f"metrics.{name}")


_METRICS: Final[tuple[Row, ...]] = (
    Field(
        "current_time",
        attrs.evolve(shared.TIME_MS, write=lambda time_ms: round(time_ms, 3)),
        0.0,
        attr="metrics.session_ms",
    ),
    _costs("cost_llm_ms", "cost_llm_ms"),
    Field(
        "cost_tts_prep_ms",
        always(0.0),
        attr=DROPPED,
        get=lambda _: 0.0,
        is_read=False,
        doc="Always 0: it is part of `cost_tts_ms`.",
    ),
    _costs("cost_tts_ms", "cost_tts_ms"),
    _costs("cost_token2wav_ms", "cost_token2wav_ms"),
    _costs("cost_all_ms", "generate_ms"),
    _counts("n_tokens"),
    _counts("n_tts_tokens"),
    Field("server_send_ts", _SENT, 0.0, attr="metrics.wall_ms"),
    _costs("wall_clock_ms", "wall_clock_ms"),
    _counts("kv_cache_length"),
    _counts("vision_slices"),
    _counts("vision_tokens"),
)


def _is_listen(outcome: Listen | Speech | Pending) -> bool:
    """To clients a listen ends the turn, so a pending result during a turn is no listen."""
    if isinstance(outcome, Pending):
        return not outcome.is_speaking
    return isinstance(outcome, Listen)


def _of_speech(name: str, default: object) -> Any:
    return lambda outcome: getattr(outcome, name) if isinstance(outcome, Speech) else default


def _outcome(values: dict[str, Any]) -> Listen | Speech | Pending:
    costs = {key[8:]: values.pop(key) for key in [*values] if key.startswith("metrics.")}
    metrics = Metrics(**costs, recording="off")
    is_listen, is_pending = values.pop("is_listen"), values.pop("pending")
    if is_pending:
        return Pending(is_speaking=not is_listen, metrics=metrics)
    if is_listen:
        return Listen(session_id="", input_id="", metrics=metrics)
    return Speech(session_id="", response_id="", input_id="", metrics=metrics, **values)


RESULT: Final = Table(
    Speech,
    Field("is_listen", FLAG, get=_is_listen, doc="The model listens: it says nothing."),
    Field("text", TEXT, "", get=_of_speech("text", "")),
    Field("audio_data", or_null(SPEECH), b"", attr="pcm", get=_of_speech("pcm", b"")),
    Field("end_of_turn", FLAG, False, get=_of_speech("end_of_turn", False)),
    *_METRICS,
    Field(
        "pending",
        attrs.evolve(FLAG, schema=always(True).schema),
        False,
        get=lambda outcome: isinstance(outcome, Pending),
        omit=True,
        doc="A chunk completed no unit: its sound waits for more.",
    ),
    tag={"type": "result"},
    make=_outcome,
    others=(Listen, Pending),
)

# -- the rest -----------------------------------------------------------------------------------


def _prepared(values: dict[str, Any]) -> Created:
    is_recorded = bool(values["recording_id"])
    return Created(session_id="", recording="on" if is_recorded else "off", **values)


def _timeout(values: dict[str, Any]) -> Closed:
    is_pause = values["reason"] == TIMEOUTS["pause_timeout"]
    return Closed(session_id="", reason="pause_timeout" if is_pause else "timeout")


def _error(values: dict[str, Any]) -> ErrorReport | Closed:
    for reason in FAULTS:
        if values["code"] == reason:
            return Closed(session_id="", reason=reason, named=values["session_id"])
    return ErrorReport(**{**values, "code": ErrorCode(values["code"])})


FAULT: Final = legacy.faults(
    Closed,
    Field("error", TEXT, get=lambda closed: FAULTS[closed.reason]),
    Field("code", TEXT, attr="reason"),
)
STOPPED: Final = Table(
    Closed,
    Field("session_id", TEXT, ""),
    tag={"type": "stopped"},
    lacks={"reason": "client"},
)
TIMEOUT: Final = Table(
    Closed,
    Field(
        "reason",
        Kind(
            read=TEXT.read, write=TIMEOUTS.__getitem__, schema=choice((*TIMEOUTS.values(),)).schema
        ),
        "",
    ),
    tag={"type": "timeout"},
    make=_timeout,
)
ANSWERS: Final = (
    Table(
        Created,
        Field("prompt_length", INTEGER, 0),
        Field("recording_session_id", TEXT, "", attr="recording_id", omit=True),
        Field("recording_notice", TEXT, "", omit=True),
        tag={"type": "prepared"},
        make=_prepared,
    ),
    RESULT,
    Table(Paused, Field("timeout", PAUSE_S, attr="timeout_s"), tag={"type": "paused"}),
    Table(Resumed, tag={"type": "resumed"}),
    Table(Interrupted, tag={"type": "interrupted"}),
    Table(GoingAway, Field("seconds_left", INTEGER), tag={"type": "going_away"}),
    Table(
        ErrorReport,
        legacy.ERROR_TEXT,
        Field("code", choice((*shared.ERROR_CODES, *FAULTS)), ErrorCode.INFERENCE_ERROR),
        shared.NAMED,
        tag=legacy.ERROR,
        make=_error,
    ),
    STOPPED,
    TIMEOUT,
    *legacy.QUEUE,
)


def encode_closed(closed: Closed) -> tuple[str, ...]:
    """Write a session's end, in one frame or two; `LocalProtocolError` if it is never sent here."""
    reason = closed.reason
    if reason in TIMEOUTS:
        return (TIMEOUT.encode(closed),)
    if reason in FAULTS:
        return (FAULT.encode(closed), STOPPED.encode(closed))
    if reason in {"client", "cancelled"}:
        return (STOPPED.encode(closed),)
    raise LocalProtocolError(f"no frame for the end {reason} in legacy-duplex: it is never sent")
