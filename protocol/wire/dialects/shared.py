"""The common part of `realtime` and `duplex-v1`: type tags, queue events, errors, metrics.

On `/v1/realtime` queue events and errors are the same in both (the wire decisions), so a client
reads them before it has chosen a dialect. `session.close` is the same too, and never refused. The
legacy dialects share places in the queue, output and metrics, but no type tags: see `legacy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...values.errors import LIVE_ERRORS, TRANSCRIPTION_ERRORS, ErrorCode, error_type
from ...values.limits import REASON_CHARS_MAX
from ...values.messages import (
    ErrorReport,
    GoingAway,
    Queued,
    QueueDone,
    QueueUpdate,
    RecordingState,
)
from ...values.requests import CloseRequest, Played, Request
from ..codec import Value
from ..field import DROPPED, Field
from ..kinds import INTEGER, SAID, TEXT, Kind, choice, integer, number
from ..reading import Reading
from ..table import Object, Row, Table
from .base import Json

SESSION_INIT: Final = "session.init"
SESSION_UPDATE: Final = "session.update"
INPUT_APPEND: Final = "input.append"
AUDIO_APPEND: Final = "input_audio_buffer.append"
SESSION_CLOSE: Final = "session.close"
PLAYBACK_ACK: Final = "playback.ack"
KNOWN_TYPES: Final = frozenset(
    {SESSION_INIT, SESSION_UPDATE, INPUT_APPEND, AUDIO_APPEND, SESSION_CLOSE, PLAYBACK_ACK}
)
"""Types of clients of any dialect of `/v1/realtime`; others are unknown, not misplaced."""

SESSION_QUEUED: Final = "session.queued"
SESSION_QUEUE_UPDATE: Final = "session.queue_update"
SESSION_QUEUE_DONE: Final = "session.queue_done"
SESSION_CREATED: Final = "session.created"
SESSION_GOING_AWAY: Final = "session.going_away"
SESSION_CLOSED: Final = "session.closed"
ERROR: Final = "error"

ERROR_CODES: Final = tuple(
    code for code in ErrorCode if code not in TRANSCRIPTION_ERRORS | LIVE_ERRORS
)
ERROR_TYPES: Final = tuple(dict.fromkeys(map(error_type, ErrorCode)))
RECORDING_STATES: Final[tuple[RecordingState, ...]] = ("on", "off", "failed")

# -- the client's type --------------------------------------------------------------------------


def classify(body: Json, own: Mapping[str, Request]) -> Request:
    """Return the kind of a message; MISPLACED for a type that only another dialect has."""
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
"""The types of sessions in OpenAI's Realtime API; no session of ours has a type."""


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


# -- tables -------------------------------------------------------------------------------------


def _closing_words(value: Value, _: Reading) -> str | None:
    """Read a client's own words: None if it is not a string or empty; a longer one is cut."""
    words = value.value
    return words[:REASON_CHARS_MAX] or None if isinstance(words, str) else None


CLOSE: Final = Table(
    CloseRequest,
    Field("reason", Kind(read=_closing_words, schema={}, holds=SAID), None, omit=True),
    tag={"type": SESSION_CLOSE},
)
"""`session.close`: it is honoured in every state, so nothing in it is refused."""
PLAYED_MS_MAX: Final = 2**53
"""Whole numbers up to it are exact in JavaScript."""
PLAYED: Final = Table(
    Played, Field("played_ms", integer(0, PLAYED_MS_MAX)), tag={"type": PLAYBACK_ACK}
)

_TIME_MS_MAX: Final = 1e9
"""Eleven days: no unit takes longer, and no session lives as long."""
TIME_MS: Final = number(0, _TIME_MS_MAX)
RECORDING: Final = choice(RECORDING_STATES)
PLACE: Final[tuple[Row, ...]] = (
    Field("position", integer(1), attr="place.position"),
    Field("estimated_wait_s", INTEGER, attr="place.estimated_wait_s"),
    Field("ticket_id", TEXT, attr="place.ticket_id"),
    Field("queue_length", INTEGER, attr="place.queue_length"),
)
NAMED: Final = Field("session_id", TEXT, "", omit=True)
"""The session of an error, if known; other servers do not name it."""
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
"""The metrics of a unit (the wire decisions, `realtime`); 0 if another server omits one."""
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
