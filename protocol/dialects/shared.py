"""What `realtime` and `duplex-v1` have in common: type tags, queue events, errors, metrics.

The legacy dialects share places in the queue, output and metrics, but no type tags: see `legacy`.

On `/v1/realtime` the queue events and errors are the same in both (the wire decisions), so a client
reads them before it has chosen a dialect. `session.close` is the same too, and never refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..codec import Fields, Value, dump_frame, kind_of
from ..errors import (
    TRANSCRIPTION_ERRORS,
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    error_type,
)
from ..limits import FRAME_BYTES_MAX, REASON_CHARS_MAX
from ..messages import (
    ErrorReport,
    GoingAway,
    Metrics,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
    RecordingState,
    ServerMessage,
)
from ..requests import CloseRequest, Request
from ..wire.kinds import INTEGER, SAID, TEXT, Kind, choice, integer, number
from ..wire.reading import Reading
from ..wire.table import DROPPED, Field, Object, Row, Table
from .base import Json

SESSION_INIT: Final = "session.init"
SESSION_UPDATE: Final = "session.update"
INPUT_APPEND: Final = "input.append"
AUDIO_APPEND: Final = "input_audio_buffer.append"
SESSION_CLOSE: Final = "session.close"
KNOWN_TYPES: Final = frozenset(
    {SESSION_INIT, SESSION_UPDATE, INPUT_APPEND, AUDIO_APPEND, SESSION_CLOSE}
)
"""What clients of any dialect of `/v1/realtime` send; the rest is unknown, not misplaced."""

SESSION_QUEUED: Final = "session.queued"
SESSION_QUEUE_UPDATE: Final = "session.queue_update"
SESSION_QUEUE_DONE: Final = "session.queue_done"
SESSION_CREATED: Final = "session.created"
SESSION_GOING_AWAY: Final = "session.going_away"
SESSION_CLOSED: Final = "session.closed"
ERROR: Final = "error"

ERROR_CODES: Final = tuple(code for code in ErrorCode if code not in TRANSCRIPTION_ERRORS)
ERROR_TYPES: Final = tuple(dict.fromkeys(map(error_type, ErrorCode)))
RECORDING_STATES: Final[tuple[RecordingState, ...]] = ("on", "off", "failed")

# -- the client's type --------------------------------------------------------------------------


def classify(body: Json, own: Mapping[str, Request]) -> Request:
    """Say what kind of request a message is.

    Args:
        body: the message.
        own: the types that the dialect has itself.

    Returns:
        Its kind; MISPLACED for a type that only another dialect has.
    """
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in KNOWN_TYPES:
        return Request.UNKNOWN
    return own.get(kind, Request.MISPLACED)


def is_model_update(body: Json) -> bool:
    """Whether this is 003's `session.update`: a `model`, and no object `session` (000)."""
    return (
        body.get("type") == SESSION_UPDATE
        and body.get("model") is not None
        and not isinstance(body.get("session"), dict)
    )


OPENAI_SESSIONS: Final = ("realtime", "transcription")
"""What the sessions of OpenAI's Realtime API say that they are; no session of ours has a type."""


def is_openai_update(body: Json) -> bool:
    """Whether this is the `session.update` of OpenAI's Realtime API, which is not spoken here.

    An update for a transcription that also has 003's `model` is 003's.
    """
    session = body.get("session")
    if body.get("type") != SESSION_UPDATE or not isinstance(session, dict):
        return False
    realtime, transcription = OPENAI_SESSIONS
    kind, is_003 = session.get("type"), isinstance(body.get("model"), str)
    return kind == realtime or (kind == transcription and not is_003)


# -- session.close ------------------------------------------------------------------------------


def parse_close(body: Json) -> CloseRequest:
    """Read a `session.close`: it is honoured in every state, so nothing in it is refused.

    A reason that is no string, or an empty one, counts as none; a longer one is cut.
    """
    reason = body.get("reason")
    if not isinstance(reason, str):
        return CloseRequest()
    return CloseRequest(reason=reason[:REASON_CHARS_MAX] or None)


def encode_close(request: CloseRequest) -> str:
    """Write a `session.close`."""
    reason = {} if request.reason is None else {"reason": request.reason}
    return dump_frame({"type": SESSION_CLOSE, **reason})


# -- queue events and errors --------------------------------------------------------------------


def encode_common(message: ServerMessage) -> str:
    """Write a queue event, a warning or an error.

    Raises:
        LocalProtocolError: it is another message, which needs a dialect.
    """
    match message:
        case Queued(place=place):
            return dump_frame({"type": SESSION_QUEUED, **place_fields(place)})
        case QueueUpdate(place=place):
            return dump_frame({"type": SESSION_QUEUE_UPDATE, **place_fields(place)})
        case QueueDone():
            return dump_frame({"type": SESSION_QUEUE_DONE})
        case GoingAway(seconds_left=seconds_left):
            return dump_frame({"type": SESSION_GOING_AWAY, "seconds_left": seconds_left})
        case ErrorReport(code=code, message=text, session_id=session_id):
            error = {"code": code, "message": text, "type": error_type(code)}
            return dump_frame({"type": ERROR, "error": error, **named(session_id)})
    raise LocalProtocolError(f"no frame for {type(message).__name__} in this dialect")


def decode_common(kind: str, body: Json) -> ServerMessage:
    """Read a queue event, a warning or an error.

    Args:
        kind: the message's type.
        body: the message.

    Returns:
        The canonical message.

    Raises:
        RemoteProtocolError: it is something else, or a field is wrong.
    """
    fields = Fields(body)
    match kind:
        case "session.queued":
            return Queued(place=read_place(fields))
        case "session.queue_update":
            return QueueUpdate(place=read_place(fields))
        case "session.queue_done":
            return QueueDone()
        case "session.going_away":
            return GoingAway(seconds_left=fields.required("seconds_left", Value.integer))
        case "error":
            error = fields.child("error")
            code = error.required("code", read_code)
            return ErrorReport(
                code=code,
                message=error.required("message", Value.text),
                session_id=read_session_id(fields),
            )
    raise RemoteProtocolError(f"$.type: {kind_of(kind)} that is no event of the server")


def named(session_id: str) -> dict[str, str]:
    """Write whose error it is, where that is known."""
    return {"session_id": session_id} if session_id else {}


def read_session_id(fields: Fields) -> str:
    """Read whose error it is; other servers do not say."""
    return fields.optional("session_id", Value.text, "")


def recorded_as(recording_id: str, notice: str) -> dict[str, str]:
    """Write the recording's name, where there is one, and what is said about it."""
    return ({"recording_id": recording_id} if recording_id else {}) | noticed(notice)


def noticed(notice: str) -> dict[str, str]:
    """Write what the operator says about recordings."""
    return {"recording_notice": notice} if notice else {}


def read_code(value: Value) -> ErrorCode:
    """Read an error's code."""
    return value.choice(ERROR_CODES)


def place_fields(place: QueuePlace) -> dict[str, object]:
    """Write a place in the queue."""
    return {
        "position": place.position,
        "estimated_wait_s": place.estimated_wait_s,
        "ticket_id": place.ticket_id,
        "queue_length": place.queue_length,
    }


def read_place(fields: Fields) -> QueuePlace:
    """Read a place in the queue."""
    return QueuePlace(
        position=fields.required("position", lambda value: value.integer(1)),
        estimated_wait_s=fields.required("estimated_wait_s", Value.integer),
        ticket_id=fields.required("ticket_id", Value.text),
        queue_length=fields.required("queue_length", Value.integer),
    )


# -- metrics ------------------------------------------------------------------------------------

_TIME_MS_MAX: Final = 1e9
"""Eleven days: no unit takes longer, and no session lives as long."""


def metrics_fields(metrics: Metrics) -> dict[str, object]:
    """Write the metrics of a unit (the wire decisions, `realtime`)."""
    return {
        "kv_cache_length": metrics.kv_cache_length,
        "prefill_ms": metrics.prefill_ms,
        "generate_ms": metrics.generate_ms,
        "wall_clock_ms": metrics.wall_clock_ms,
        "cost_llm_ms": metrics.cost_llm_ms,
        "cost_tts_ms": metrics.cost_tts_ms,
        "cost_token2wav_ms": metrics.cost_token2wav_ms,
        "n_tokens": metrics.n_tokens,
        "n_tts_tokens": metrics.n_tts_tokens,
        "vision_slices": metrics.vision_slices,
        "vision_tokens": metrics.vision_tokens,
        "dropped_units": metrics.dropped_units,
        "recording": metrics.recording,
    }


def read_metrics(fields: Fields | None) -> Metrics:
    """Read the metrics of a unit; what another server does not say is 0, and `off`.

    Args:
        fields: the metrics, or None where there are none.

    Returns:
        The metrics.

    Raises:
        FieldError: a metric is wrong.
    """
    read = (fields or Fields({})).optional
    return Metrics(
        kv_cache_length=read("kv_cache_length", Value.integer, 0),
        prefill_ms=read("prefill_ms", read_time, 0.0),
        generate_ms=read("generate_ms", read_time, 0.0),
        wall_clock_ms=read("wall_clock_ms", read_time, 0.0),
        cost_llm_ms=read("cost_llm_ms", read_time, 0.0),
        cost_tts_ms=read("cost_tts_ms", read_time, 0.0),
        cost_token2wav_ms=read("cost_token2wav_ms", read_time, 0.0),
        n_tokens=read("n_tokens", Value.integer, 0),
        n_tts_tokens=read("n_tts_tokens", Value.integer, 0),
        vision_slices=read("vision_slices", Value.integer, 0),
        vision_tokens=read("vision_tokens", Value.integer, 0),
        dropped_units=read("dropped_units", Value.integer, 0),
        recording=read("recording", read_recording, "off"),
    )


def read_recording(value: Value) -> RecordingState:
    """Read whether a session is recorded."""
    return value.choice(RECORDING_STATES)


def read_time(value: Value) -> float:
    """Read a time in milliseconds."""
    return value.number(0, _TIME_MS_MAX)


def read_output(value: Value) -> bytes:
    """Read output audio: base64 of float32 LE 24 kHz mono, of any length (000, first and last)."""
    return value.pcm(samples_min=0, samples_max=FRAME_BYTES_MAX)


# -- tables -------------------------------------------------------------------------------------


def _closing_words(value: Value, _: Reading) -> str | None:
    """Read a client's own words: none where it is no string, or an empty one; a longer is cut."""
    words = value.value
    return words[:REASON_CHARS_MAX] or None if isinstance(words, str) else None


CLOSE: Final = Table(
    CloseRequest,
    Field("reason", Kind(read=_closing_words, schema={}, holds=SAID), None, omit=True),
    tag={"type": SESSION_CLOSE},
)
"""`session.close`: it is honoured in every state, so nothing in it is refused."""

TIME_MS: Final = number(0, _TIME_MS_MAX)
RECORDING: Final = choice(RECORDING_STATES)
PLACE: Final[tuple[Row, ...]] = (
    Field("position", integer(1), attr="place.position"),
    Field("estimated_wait_s", INTEGER, attr="place.estimated_wait_s"),
    Field("ticket_id", TEXT, attr="place.ticket_id"),
    Field("queue_length", INTEGER, attr="place.queue_length"),
)
NAMED: Final = Field("session_id", TEXT, "", omit=True)
"""Whose error it is, where that is known; other servers do not say."""
RECORDED: Final[tuple[Row, ...]] = (
    Field("recording_id", TEXT, "", omit=True),
    Field("recording_notice", TEXT, "", omit=True),
)
METRICS: Final[tuple[Row, ...]] = (
    Field("kv_cache_length", INTEGER, 0),
    Field("prefill_ms", TIME_MS, 0.0),
    Field("generate_ms", TIME_MS, 0.0),
    Field("wall_clock_ms", TIME_MS, 0.0),
    Field("cost_llm_ms", TIME_MS, 0.0),
    Field("cost_tts_ms", TIME_MS, 0.0),
    Field("cost_token2wav_ms", TIME_MS, 0.0),
    Field("n_tokens", INTEGER, 0),
    Field("n_tts_tokens", INTEGER, 0),
    Field("vision_slices", INTEGER, 0),
    Field("vision_tokens", INTEGER, 0),
    Field("dropped_units", INTEGER, 0),
    Field("recording", RECORDING, "off"),
)
"""The metrics of a unit (the wire decisions, `realtime`); what another server does not say is 0."""
COMMON: Final = (
    Table(Queued, *PLACE, tag={"type": SESSION_QUEUED}),
    Table(QueueUpdate, *PLACE, tag={"type": SESSION_QUEUE_UPDATE}),
    Table(QueueDone, tag={"type": SESSION_QUEUE_DONE}),
    Table(GoingAway, Field("seconds_left", INTEGER), tag={"type": SESSION_GOING_AWAY}),
    Table(
        ErrorReport,
        Object(
            "error",
            (
                Field("code", choice(ERROR_CODES)),
                Field("message", TEXT),
                Field(
                    "type",
                    choice(ERROR_TYPES),
                    attr=DROPPED,
                    get=lambda report: error_type(report.code),
                    is_read=False,
                    doc="Whose mistake it is.",
                ),
            ),
            is_required=True,
        ),
        NAMED,
        tag={"type": ERROR},
    ),
)
"""Queue events, a warning and errors, as `realtime` and `duplex-v1` have them."""
