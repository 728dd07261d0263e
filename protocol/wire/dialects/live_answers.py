"""What the server says in `live`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from ...values.errors import (
    OPENAI_ERRORS,
    TRANSCRIPTION_ERRORS,
    ErrorCode,
    LocalProtocolError,
    error_type,
)
from ...values.limits import MS_PER_S
from ...values.live import (
    Muted,
    Notice,
    Unmuted,
    Updated,
    Usage,
    UserWords,
)
from ...values.messages import (
    Closed,
    Created,
    EndReason,
    ErrorReport,
    Listen,
    Metrics,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
    Speech,
)
from ...values.model import SAMPLE16_BYTES
from ...values.sound import CODINGS
from ..codec import encode_base64
from ..field import DROPPED, Field
from ..g711 import compress
from ..kinds import (
    FLAG,
    INTEGER,
    PCM16,
    TEXT,
    Kind,
    base64_of,
    choice,
    number,
    word_of,
)
from ..rates import to_pcm16
from ..table import Object, Table
from . import shared

EVENT: Final = '"event_id":"event_000000000000"'
"""The field of a frame that no session has sent; a session puts its own id there."""
OUTPUT_AUDIO: Final = "session.output_audio.delta"
SESSION_STARTED: Final = "session.started"
INFO: Final = "info"
QUEUED, ASSIGNED = "session_queued", "slot_assigned"
INFO_CODES: Final = (QUEUED, ASSIGNED, "nothing_delegated", "time_over", "context_full")
ERROR_CODES: Final = tuple(
    code
    for code in ErrorCode
    if code not in TRANSCRIPTION_ERRORS | OPENAI_ERRORS or code is ErrorCode.MODEL_NOT_FOUND
)
REASONS: Final[Mapping[EndReason, str]] = {
    "client": "close_requested",
    "cancelled": "close_requested",
    "timeout": "expired",
    "context_full": "expired",
    "backend_error": "connection_lost",
    "server_shutdown": "connection_lost",
    "invalid_frame": "connection_lost",
    "flooded": "connection_lost",
}
_ENDS: Final[Mapping[str, EndReason]] = {
    "close_requested": "client",
    "expired": "timeout",
    "connection_lost": "backend_error",
}

EVENT_ID: Final = Field(
    "event_id",
    TEXT,
    "",
    attr=DROPPED,
    get=lambda _: "event_000000000000",
    example="event_7b20d9c3a415",
    rank=-1,
    doc="The event.",
)
_ANSWERED: Final = Field("client_event_id", TEXT, "", omit=True)


def _one_of(code: str) -> Field:
    return Field(
        "code", choice(INFO_CODES), "", attr=DROPPED, get=lambda _: code, doc="The notice."
    )


def _place(queued: Queued | QueueUpdate) -> str:
    place = queued.place
    return (
        f"position {place.position} of {place.queue_length} in the queue, "
        f"about {place.estimated_wait_s} s"
    )


_PLACE: Final = Field(
    "message",
    TEXT,
    "",
    attr=DROPPED,
    get=_place,
    example="position 1 of 1 in the queue, about 9 s",
    doc="The same for people.",
)
_NOWHERE: Final = QueuePlace(position=0, estimated_wait_s=0, ticket_id="", queue_length=0)
_QUEUED: Final = Table(
    Queued, EVENT_ID, _one_of(QUEUED), _PLACE, tag={"type": INFO}, lacks={"place": _NOWHERE}
)
_MOVED: Final = Table(
    QueueUpdate, EVENT_ID, _one_of(QUEUED), _PLACE, tag={"type": INFO}, lacks={"place": _NOWHERE}
)
_TURN: Final = "a slot is assigned: the session starts with session.start"
_QUEUE_DONE: Final = Table(
    QueueDone,
    EVENT_ID,
    _one_of(ASSIGNED),
    Field(
        "message",
        TEXT,
        "",
        attr=DROPPED,
        get=lambda _: _TURN,
        example=_TURN,
        doc="The same for people.",
    ),
    tag={"type": INFO},
)
NOTICE: Final = Table(
    Notice,
    EVENT_ID,
    Field("code", choice(INFO_CODES)),
    Field("message", TEXT, attr="text"),
    tag={"type": INFO},
)


def info_of(code: object) -> Table:
    """Return the table of an `info` with a code."""
    return {QUEUED: _QUEUED, ASSIGNED: _QUEUE_DONE}.get(str(code), NOTICE)


def const(word: str) -> Kind:
    """A constant word."""
    return Kind(read=lambda value, _: value.text(), schema={"type": "string", "const": word})


def fixed(name: str, word: str) -> Field:
    """A field that is always the same word."""
    return Field(name, const(word), word, attr=DROPPED, get=lambda _: word, doc="Always this.")


_SESSION: Final = Object(
    "session",
    (
        Field("id", TEXT),
        Field("expires_at", INTEGER),
        Field("model", TEXT),
        fixed("status", "active"),
        Object(
            "audio",
            (
                Object(
                    "format",
                    (
                        Field("type", choice(CODINGS), attr="coding"),
                        Field("rate", INTEGER, attr="rate_hz", example=24_000),
                    ),
                    doc="Of the sound in both directions.",
                ),
                Object(
                    "output",
                    (Field("voice", TEXT, ""),),
                    omit=True,
                    when=lambda message: bool(message.live.voice),
                ),
            ),
        ),
        Object(
            "delegation",
            (
                Field("type", choice(("client", "responses")), None, attr="delegation"),
                Object(
                    "responses",
                    (Field("model", TEXT, "", attr="backend"),),
                    omit=True,
                    when=lambda message: message.live.delegation == "responses",
                ),
            ),
            omit=True,
            when=lambda message: message.live.delegation is not None,
        ),
        Field("instructions", TEXT, ""),
        Field("safety_identifier", TEXT, "", omit=True),
        Field("store", FLAG, False),
    ),
    attr="live",
    doc="The session as it is in force.",
)
_SECOND: Final = Kind(
    read=lambda value, _: value.pcm16(), write=encode_base64, schema=base64_of(PCM16)
)
_UNTOLD: Final = {
    "session_id": "",
    "input_id": "",
    "response_id": "",
    "metrics": Metrics(kv_cache_length=0, recording="off"),
}
"""A unit's facts without a field."""
WORDS: Final = Table(
    Speech,
    EVENT_ID,
    Field("delta", TEXT, attr="text"),
    Field("start_ms", INTEGER),
    Field(
        "end_ms",
        INTEGER,
        0,
        attr=DROPPED,
        get=lambda speech: speech.start_ms + MS_PER_S,
        example=1001,
        doc="Where it ends there.",
    ),
    tag={"type": "session.output_transcript.delta"},
    lacks={**_UNTOLD, "pcm": b"", "end_of_turn": False},
)


USER_WORDS: Final = Table(
    UserWords,
    EVENT_ID,
    Field("delta", TEXT, attr="text"),
    Field("start_ms", INTEGER),
    Field("end_ms", INTEGER),
    tag={"type": "session.input_transcript.delta"},
)


def sound_of(speech: Speech) -> bytes:
    """The sound of a message, as its session writes it."""
    return compress(to_pcm16(speech.pcm), speech.coding)


def _delta(cls: type, get: Callable[[Any], bytes], **lacks: object) -> Table:
    row = Field(
        "delta",
        _SECOND,
        b"",
        attr=DROPPED,
        get=get,
        doc="A second of sound in the session's format; silence where the model listens.",
    )
    return Table(cls, row, tag={"type": OUTPUT_AUDIO}, lacks={**_UNTOLD, **lacks})


def _silence(listen: Listen) -> bytes:
    return compress(bytes(listen.silence_samples * SAMPLE16_BYTES), listen.coding)


SPEECH: Final = _delta(Speech, sound_of, text="", pcm=b"", end_of_turn=False)
LISTEN: Final = _delta(Listen, _silence)
_PARAM: Final = re.compile(r"\$\.([A-Za-z0-9_.\[\]]+): ")
"""The path with which the text of a field's error begins."""


def _param(report: ErrorReport) -> str:
    found = _PARAM.match(report.message)
    return "" if found is None else found[1]


def _fault(report: ErrorReport) -> str:
    is_client = error_type(report.code) == "client_error"
    return "invalid_request_error" if is_client else "server_error"


def error_table(codes: tuple[ErrorCode, ...], cause: str) -> Table:
    """Make the table of an `error` with one of several codes; `cause` names the message's id."""
    rows = (
        Field("code", choice(codes)),
        Field("message", TEXT),
        Field(
            "type",
            choice(("invalid_request_error", "server_error")),
            attr=DROPPED,
            get=_fault,
            is_read=False,
            doc="Whose mistake it is.",
        ),
        Field(
            "param",
            TEXT,
            "",
            attr=DROPPED,
            get=_param,
            omit=True,
            example="session.audio.format",
            doc="The path of the field that is wrong.",
        ),
        Field(cause, TEXT, "", attr="client_event_id", omit=True),
    )
    error = Object("error", rows, is_required=True)
    return Table(ErrorReport, EVENT_ID, error, tag={"type": shared.ERROR})


def _word(closed: Closed) -> str:
    if closed.reason not in REASONS:
        raise LocalProtocolError(f"no session.closed for {closed.reason}: it is never sent")
    return REASONS[closed.reason]


ANSWERS: Final = (
    _QUEUED,
    _MOVED,
    _QUEUE_DONE,
    Table(
        Created,
        EVENT_ID,
        _SESSION,
        _ANSWERED,
        tag={"type": SESSION_STARTED},
        lacks={"session_id": "", "prompt_length": 0, "recording": "off"},
    ),
    LISTEN,
    WORDS,
    SPEECH,
    USER_WORDS,
    Table(Muted, EVENT_ID, _ANSWERED, tag={"type": "session.input_audio.muted"}),
    Table(Unmuted, EVENT_ID, _ANSWERED, tag={"type": "session.input_audio.unmuted"}),
    Table(Updated, EVENT_ID, _SESSION, _ANSWERED, tag={"type": "session.updated"}),
    Table(
        Usage,
        EVENT_ID,
        Object("usage", (Field("seconds", INTEGER),)),
        Object("context_window", (Field("usage_ratio", number(0, 1), attr="ratio", example=0.25),)),
        tag={"type": "session.usage.updated"},
    ),
    NOTICE,
    Table(
        Closed,
        EVENT_ID,
        Field("reason", word_of(_ENDS), get=_word),
        _SESSION,
        Object("usage", (Field("seconds", INTEGER),)),
        tag={"type": shared.SESSION_CLOSED},
        lacks={"session_id": ""},
    ),
    error_table(ERROR_CODES, "client_event_id"),
)
