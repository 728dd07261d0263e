"""The dialect `live`: OpenAI's Live API, `session.start`, `session.output_audio.delta`.

Names, fields and words are those of the types of the `openai` package (`openai.types.live`).

Choices in addition to them:
- Each second of the model is an audio delta of a second, silence where it listens: the deltas are
  the session's time line. Its text comes before it.
- An `info` says what the queue does: `session_queued` where the client waits, and again when its
  place changes; `slot_assigned` at its turn. `time_over` or `context_full` comes before the
  `session.closed` whose reason is `expired`.
- `event_id` is filled in by the session, which knows the number of the frame (`EVENT`).
- What the model cannot do is refused by its name (`unsupported`), and so is a field that the API
  does not know (`unknown_parameter`).

`live` cannot show: the place in the queue but in words, ids of responses and input, metrics, the
turn's end, the recording's name. The reading side takes a silent second for a listen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from ...values import errors, model
from ...values import messages as ms
from ...values.behaviour import TAKES_TOOLS
from ...values.limits import INPUT_ID_CHARS_MAX, ITEM_CHARS_MAX, MS_PER_S
from ...values.live import Mute, Muted, Notice, Unmute, Unmuted, Update, Updated, Usage, UserWords
from ...values.modes import Mode
from ...values.openai import Item, Part, Respond
from ...values.requests import AppendSound, ClientMessage, CloseRequest, Init, Request, VoiceName
from .. import kinds as k
from ..audio import compress, to_float32, to_pcm16
from ..codec import Fields, Reading, Value, encode_base64
from ..dialects import openai_tools as tools
from ..dialects import shared
from ..table import (
    DROPPED,
    Constant,
    Field,
    Object,
    Table,
    checked,
    computed,
    fixed,
    items,
    one,
    optional,
)
from .base import Context, Dialect, Json
from .chat import FUNCTIONS, SENT_FUNCTIONS
from .shared import PROMPT, RECORD

SESSION_START: Final = "session.start"
AUDIO_APPEND: Final = "session.input_audio.append"
HISTORY_MAX: Final = 128
"""Messages before the session, as the API has them."""
UNSUPPORTED: Final = frozenset(
    {
        "session.instructions.append",
        "session.thinking.append",
        "session.commentary.append",
        "session.output_audio.fixture.play",
        "decision.create",
        "decision.item.create",
        "decision.item.delete",
        "response.create",
        "response.item.create",
        "transport.dtmf.send",
    }
)
"""Events of the API that ask for what the model cannot do."""

EMPTY: Final = "Must be empty here."
CLOSED: Final = errors.ErrorCode.UNKNOWN_PARAMETER
"""An unknown field is such an error."""


def ignored(name: str, why: str = "Ignored.", holds: k.Holds | None = k.USER_TEXT) -> Field:
    """A field of the API that changes nothing here."""
    kind = k.Kind(read=lambda *_: None, schema={}, holds=holds)
    return checked(name, kind, why)


def _event_id(attr: str = "event_id") -> Field:
    kind = k.text(INPUT_ID_CHARS_MAX, holds=k.NAMED)
    return Field("event_id", kind, "", attr=attr, omit=True, rank=9)


def unsupported(path: str, what: str) -> errors.FieldError:
    """Make the error for a value or event of the API that is not offered here."""
    return errors.FieldError(errors.ErrorCode.UNSUPPORTED, f"{path}: {what}")


def only(options: tuple[str, ...], offered: str, what: str, *more: str) -> k.Kind:
    """A word of the API of which only one is offered here, and `more` that mean the same."""

    def read(value: Value, _: Reading) -> str:
        if value.choice(options) not in (offered, *more):
            raise unsupported(value.path, what)
        return offered

    return k.Kind(read=read, schema=k.choice((offered, *more)).schema)


def empty(what: str) -> k.Kind:
    """A list of the API that must be empty here."""

    def read(value: Value, _: Reading) -> tuple[()]:
        if value.items(1024):
            raise unsupported(value.path, what)
        return ()

    return k.Kind(read=read, schema={"type": "array", "const": []})


def until(number: int, old: k.Kind, new: k.Kind) -> k.Kind:
    """A kind that sessions before a behaviour number read as another one."""
    return attrs.evolve(
        new, read=lambda value, at: (new if at.context.behaves(number) else old).read(value, at)
    )


TOOLS: Final = until(TAKES_TOOLS, empty("the model has no tools"), FUNCTIONS)
"""Functions that a client offers: they are returned, and called if the model can."""


def _rate(value: Value, at: Reading) -> int:
    found, coding = value.integer(), at.values.get("live.coding") or "audio/pcm"
    if coding != "audio/pcm" and found != model.G711_RATE_HZ:
        raise unsupported(value.path, f"{found} Hz, {coding} has 8000")
    if coding == "audio/pcm" and found not in model.LIVE_RATES_HZ:
        raise unsupported(value.path, f"{found} Hz, there are 24000 and 16000")
    return found


RATE: Final = k.Kind(
    read=_rate, schema={"type": "integer", "enum": [*model.LIVE_RATES_HZ, model.G711_RATE_HZ]}
)
_NO_TRIGGERS: Final = empty("there are no decisions")
_TARGETS: Final = ("client", "responses")


def _target(value: Value, _: Reading) -> str:
    found = value.choice((*_TARGETS, "decisions"))
    if found not in _TARGETS:
        raise unsupported(value.path, "there are no decisions")
    return found


_TARGET: Final = k.Kind(read=_target, schema=k.choice(_TARGETS).schema)


def _delegation(attr: str, backend: str, names: str, **how: Any) -> Object:
    nothing = None if names == "tools" else ()  # of an update, which leaves them
    return Object(
        "delegation",
        optional("type", _TARGET, attr=attr, doc="The model delegates only calls of tools.", **how),
        Object(
            "responses",
            Field("model", k.TEXT, "", attr=backend, omit=True, doc="In the session."),
            Field("tools", TOOLS, nothing, attr=names, omit=True, doc=tools.CALLED),
            omit=True,
            doc="Of the model to which tasks would be delegated; other fields are ignored.",
        ),
        ignored("acknowledgement_delay_ms", "Ignored: the model decides what it says meanwhile."),
        omit=True,
        closed=CLOSED,
        doc="Who handles delegated tasks: calls of tools, with `responses`.",
    )


def _voice(value: Value, at: Reading) -> VoiceName | None:
    """Read a voice by its name, or by its `id`; None for the model's own."""
    if isinstance(value.value, dict):
        fields = Fields(value.value, value.path)
        value = fields.required("id", lambda name: name)
        fields.refuse_unknown()
    found: VoiceName = k.VOICE_BY_NAME.read(value, at)
    return None if found.name in k.STOCK_VOICES else found


_VOICE: Final = attrs.evolve(k.VOICE_BY_NAME, read=_voice)


_PART: Final = Table(
    Part,
    checked("type", k.choice(("input_text", "text", "output_text")), doc="Text."),
    Field("text", k.text(ITEM_CHARS_MAX, holds=k.USER_TEXT)),
    make=lambda values: Part(kind="input_text", **values),
)
_ITEM: Final = Table(
    Item,
    checked("id", k.text(INPUT_ID_CHARS_MAX, holds=k.NAMED), doc="Ignored."),
    checked("type", k.choice(("message",)), doc="Always message."),
    Field("role", k.choice(("developer", "user", "assistant"))),
    checked("status", k.choice(("completed", "incomplete")), doc="Ignored."),
    Field("content", items(one(_PART), 1, 1), attr="parts"),
)
_START: Final = Table(
    Init,
    Object(
        "session",
        Field("model", k.TEXT, attr="live.model"),
        Object(
            "audio",
            Object(
                "format",
                Field("type", k.choice(model.CODINGS), "audio/pcm", attr="live.coding"),
                Field("rate", RATE, model.LIVE_RATES_HZ[0], attr="live.rate_hz"),
                closed=CLOSED,
            ),
            Object("output", optional("voice", _VOICE, attr="ref_audio"), omit=True, closed=CLOSED),
            closed=CLOSED,
        ),
        _delegation("live.delegation", "live.backend", "live.tools"),
        Field("input", items(one(_ITEM), HISTORY_MAX), (), attr="live.history", omit=True),
        Field("instructions", PROMPT, "", omit=True),
        Field(
            "safety_identifier",
            k.text(INPUT_ID_CHARS_MAX, holds=k.NAMED),
            "",
            attr="live.safety_identifier",
            omit=True,
        ),
        Field("store", RECORD.kind, True, attr="record", omit=True),
        Field("triggers", _NO_TRIGGERS, (), attr=DROPPED, doc=EMPTY),
        is_required=True,
        closed=CLOSED,
    ),
    _event_id("live.event_id"),
    tag={"type": SESSION_START},
    closed=CLOSED,
)
FORK_START: Final = Table(
    Init,
    Object(
        "session",
        Field("model", k.TEXT, "", attr="live.model", omit=True),
        Object(
            "audio",
            Object(
                "format",
                Field("type", k.choice(model.CODINGS), "", attr="live.coding"),
                Field("rate", RATE, 0, attr="live.rate_hz"),
                closed=CLOSED,
            ),
            closed=CLOSED,
        ),
        _delegation("live.delegation", "live.backend", "live.tools"),
        Field("store", RECORD.kind, True, attr="record", omit=True),
        is_required=True,
        closed=CLOSED,
    ),
    _event_id("live.event_id"),
    tag={"type": SESSION_START},
    closed=CLOSED,
    lacks={"instructions": ""},
)
"""The `session.start` of a fork, in which all else is as it was; an empty text or 0: this too."""
_UPDATE: Final = Table(
    Update,
    Object(
        "session",
        _delegation(DROPPED, DROPPED, "tools", get=Constant("client")),
        Field("triggers", _NO_TRIGGERS, (), attr=DROPPED, doc=EMPTY),
        is_required=True,
        closed=CLOSED,
    ),
    _event_id(),
    tag={"type": shared.SESSION_UPDATE},
    closed=CLOSED,
)
_CLOSE: Final = Table(
    CloseRequest, ignored("event_id"), tag={"type": shared.SESSION_CLOSE}, lacks={"reason": None}
)
"""It is honoured in every state, so nothing in it is refused."""
REQUESTS: Final = {
    Request.INIT: _START,
    Request.APPEND: Table(
        AppendSound,
        Field("audio", k.PIECE, attr="pcm16"),
        Field(
            "event_id", k.text(INPUT_ID_CHARS_MAX, holds=k.NAMED), "", attr=DROPPED, doc="Ignored."
        ),
        tag={"type": AUDIO_APPEND},
        closed=CLOSED,
    ),
    Request.MUTE: Table(Mute, _event_id(), tag={"type": "session.input_audio.mute"}, closed=CLOSED),
    Request.UNMUTE: Table(
        Unmute, _event_id(), tag={"type": "session.input_audio.unmute"}, closed=CLOSED
    ),
    Request.UPDATE: _UPDATE,
    Request.TOOL_RESULT: Table(
        model.ToolResult,
        Object(
            "item",
            Field(
                "type",
                k.choice((tools.OUTPUT,)),
                attr=DROPPED,
                get=Constant(tools.OUTPUT),
                example=tools.OUTPUT,
                doc="Always this.",
            ),
            *tools.result_rows(),
            *(ignored("id", holds=k.NAMED), ignored("status", holds=None), ignored("caller")),
            is_required=True,
            closed=CLOSED,
        ),
        ignored("event_id"),
        tag={"type": "response.item.create"},
        closed=CLOSED,
    ),
    Request.RESPOND: Table(
        Respond,
        ignored("event_id"),
        tag={"type": "response.create"},
        lacks=dict.fromkeys(("metadata", "modality", "instructions")),
        closed=CLOSED,
        doc="Without effect: the model goes on by itself after a result.",
    ),
    Request.CLOSE: _CLOSE,
}


# -- What the server says in `live` ---------------------------------------------------------------

EVENT: Final = '"event_id":"event_000000000000"'
"""The field of a frame that no session has sent; a session puts its own id there."""
OUTPUT_AUDIO: Final = "session.output_audio.delta"
SESSION_STARTED: Final = "session.started"
INFO: Final = "info"
QUEUED, ASSIGNED = "session_queued", "slot_assigned"
INFO_CODES: Final = (
    *(QUEUED, ASSIGNED, "nothing_delegated", "tools_not_called"),
    *("time_over", "context_full"),
)
ERROR_CODES: Final = tuple(
    code
    for code in errors.ErrorCode
    if code not in errors.TRANSCRIPTION_ERRORS | errors.OPENAI_ERRORS
    or code is errors.ErrorCode.MODEL_NOT_FOUND
)
REASONS: Final[Mapping[ms.EndReason, str]] = {
    "client": "close_requested",
    "cancelled": "close_requested",
    "timeout": "expired",
    "context_full": "expired",
    "backend_error": "connection_lost",
    "server_shutdown": "connection_lost",
    "invalid_frame": "connection_lost",
    "flooded": "connection_lost",
}
_ENDS: Final[Mapping[str, ms.EndReason]] = {
    "close_requested": "client",
    "expired": "timeout",
    "connection_lost": "backend_error",
}

EVENT_ID: Final = computed(
    "event_id",
    k.TEXT,
    Constant("event_000000000000"),
    example="event_7b20d9c3a415",
    rank=-1,
    doc="The event.",
)
_ANSWERED: Final = Field("client_event_id", k.TEXT, "", omit=True)


def _one_of(code: str) -> Field:
    return computed("code", k.choice(INFO_CODES), Constant(code), doc="The notice.")


def _place(queued: ms.Queued | ms.QueueUpdate) -> str:
    place = queued.place
    return (
        f"position {place.position} of {place.queue_length} in the queue, "
        f"about {place.estimated_wait_s} s"
    )


_PLACE: Final = computed(
    "message",
    k.TEXT,
    _place,
    example="position 1 of 1 in the queue, about 9 s",
    doc="The same for people.",
)
_NOWHERE: Final = ms.QueuePlace(position=0, estimated_wait_s=0, ticket_id="", queue_length=0)
_QUEUED: Final = Table(
    ms.Queued, EVENT_ID, _one_of(QUEUED), _PLACE, tag={"type": INFO}, lacks={"place": _NOWHERE}
)
_MOVED: Final = Table(
    ms.QueueUpdate, EVENT_ID, _one_of(QUEUED), _PLACE, tag={"type": INFO}, lacks={"place": _NOWHERE}
)
_TURN: Final = "a slot is assigned: the session starts with session.start"
_QUEUE_DONE: Final = Table(
    ms.QueueDone,
    EVENT_ID,
    _one_of(ASSIGNED),
    computed("message", k.TEXT, Constant(_TURN), example=_TURN, doc="The same for people."),
    tag={"type": INFO},
)
NOTICE: Final = Table(
    Notice,
    EVENT_ID,
    Field("code", k.choice(INFO_CODES)),
    Field("message", k.TEXT, attr="text"),
    tag={"type": INFO},
)


def info_of(code: object) -> Table:
    """Return the table of an `info` with a code."""
    return {QUEUED: _QUEUED, ASSIGNED: _QUEUE_DONE}.get(str(code), NOTICE)


_SESSION: Final = Object(
    "session",
    Field("id", k.TEXT),
    Field("expires_at", k.INTEGER),
    Field("model", k.TEXT),
    fixed("status", "active"),
    Object(
        "audio",
        Object(
            "format",
            Field("type", k.choice(model.CODINGS), attr="coding"),
            Field("rate", k.INTEGER, attr="rate_hz", example=24_000),
            doc="Of the sound in both directions.",
        ),
        Object(
            "output",
            Field("voice", k.TEXT, ""),
            omit=True,
            when=lambda message: bool(message.live.voice),
        ),
    ),
    Object(
        "delegation",
        Field("type", k.choice(("client", "responses")), None, attr="delegation"),
        Object(
            "responses",
            Field("model", k.TEXT, "", attr="backend"),
            Field("tools", SENT_FUNCTIONS, (), omit=True, doc="Those in force."),
            omit=True,
            when=lambda message: message.live.delegation == "responses",
        ),
        omit=True,
        when=lambda message: message.live.delegation is not None,
    ),
    Field("instructions", k.TEXT, ""),
    Field("safety_identifier", k.TEXT, "", omit=True),
    Field("store", k.FLAG, False),
    attr="live",
    doc="The session as it is in force.",
)


_DELEGATED: Final = Table(
    ms.ToolCalled,
    EVENT_ID,
    *tools.DELEGATION,
    tag={"type": "session.delegation.created"},
    make=lambda _: None,
)
_EVENTS: Final = tuple(
    Table(ms.ToolCalled, EVENT_ID, *rows, tag={"type": "response.event"}, make=tools.called)
    for rows in tools.EVENTS
)
_SECOND: Final = k.Kind(
    read=lambda value, _: value.pcm16(), write=encode_base64, schema=k.base64_of(k.PCM16)
)
_UNTOLD: Final = {
    "session_id": "",
    "input_id": "",
    "response_id": "",
    "metrics": ms.Metrics(kv_cache_length=0, recording="off"),
}
"""A unit's facts without a field."""
WORDS: Final = Table(
    ms.Speech,
    EVENT_ID,
    Field("delta", k.TEXT, attr="text"),
    Field("start_ms", k.INTEGER),
    computed(
        "end_ms",
        k.INTEGER,
        lambda speech: speech.start_ms + MS_PER_S,
        example=1001,
        doc="Where it ends there.",
    ),
    tag={"type": "session.output_transcript.delta"},
    lacks={**_UNTOLD, "pcm": b"", "end_of_turn": False},
)


USER_WORDS: Final = Table(
    UserWords,
    EVENT_ID,
    Field("delta", k.TEXT, attr="text"),
    Field("start_ms", k.INTEGER),
    Field("end_ms", k.INTEGER),
    tag={"type": "session.input_transcript.delta"},
)


def sound_of(speech: ms.Speech) -> bytes:
    """The sound of a message, as its session writes it."""
    return compress(to_pcm16(speech.pcm), speech.coding)


def _delta(cls: type, get: Callable[[Any], bytes], **lacks: object) -> Table:
    row = computed(
        "delta",
        _SECOND,
        get,
        doc="A second of sound in the session's format; silence where the model listens.",
    )
    return Table(cls, row, tag={"type": OUTPUT_AUDIO}, lacks={**_UNTOLD, **lacks})


def _silence(listen: ms.Listen) -> bytes:
    return compress(bytes(listen.silence_samples * model.SAMPLE16_BYTES), listen.coding)


SPEECH: Final = _delta(ms.Speech, sound_of, text="", pcm=b"", end_of_turn=False)
LISTEN: Final = _delta(ms.Listen, _silence)
_PARAM: Final = re.compile(r"\$\.([A-Za-z0-9_.\[\]]+): ")
"""The path with which the text of a field's error begins."""


def _param(report: ms.ErrorReport) -> str | None:
    found = _PARAM.match(report.message)
    return None if found is None else found[1]


def _fault(report: ms.ErrorReport) -> str:
    is_client = errors.error_type(report.code) == "client_error"
    return "invalid_request_error" if is_client else "server_error"


def error_table(codes: tuple[errors.ErrorCode, ...], cause: str) -> Table:
    """Make the table of an `error` with one of several codes; `cause` names the message's id."""
    rows = (
        Field("code", k.choice(codes)),
        Field("message", k.TEXT),
        computed(
            "type",
            k.choice(("invalid_request_error", "server_error")),
            _fault,
            is_read=False,
            doc="Whose mistake it is.",
        ),
        computed(
            "param",
            k.TEXT,
            _param,
            omit=True,
            example="session.audio.format",
            doc="The path of the field that is wrong.",
        ),
        Field(cause, k.TEXT, "", attr="client_event_id", omit=True),
    )
    error = Object("error", *rows, is_required=True)
    return Table(ms.ErrorReport, EVENT_ID, error, tag={"type": shared.ERROR})


ANSWERS: Final = (
    _QUEUED,
    _MOVED,
    _QUEUE_DONE,
    Table(
        ms.Created,
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
    _DELEGATED,
    _EVENTS[0],
    Table(Muted, EVENT_ID, _ANSWERED, tag={"type": "session.input_audio.muted"}),
    Table(Unmuted, EVENT_ID, _ANSWERED, tag={"type": "session.input_audio.unmuted"}),
    Table(Updated, EVENT_ID, _SESSION, _ANSWERED, tag={"type": "session.updated"}),
    Table(
        Usage,
        EVENT_ID,
        Object("usage", Field("seconds", k.INTEGER)),
        Object("context_window", Field("usage_ratio", k.number(0, 1), attr="ratio", example=0.25)),
        tag={"type": "session.usage.updated"},
    ),
    NOTICE,
    Table(
        ms.Closed,
        EVENT_ID,
        Field("reason", k.word_of(_ENDS), get=shared.end_word(REASONS)),
        _SESSION,
        Object("usage", Field("seconds", k.INTEGER)),
        tag={"type": shared.SESSION_CLOSED},
        lacks={"session_id": ""},
    ),
    error_table(ERROR_CODES, "client_event_id"),
)


class Live(Dialect):
    """The dialect of OpenAI's Live API."""

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message; a known event that is not offered is named."""
        kind = body.get("type")
        if request is Request.UNKNOWN and isinstance(kind, str) and kind in UNSUPPORTED:
            raise unsupported("$.type", f"{kind}, which the model cannot do")
        if request is Request.INIT and context.is_fork:
            return _with_rate(FORK_START.parse(body, context))
        message: ClientMessage = super().parse(request, body, context)
        return _with_rate(message) if isinstance(message, Init) else message

    def encode(self, message: ms.ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames; a speaking second has its text first."""
        if isinstance(message, ms.ToolCalled):
            return tuple(table.encode(message) for table in (_DELEGATED, *_EVENTS))
        if not isinstance(message, ms.Speech):
            return super().encode(message)
        words = (WORDS.encode(message),) if message.text else ()
        return (*words, SPEECH.encode(message)) if message.pcm or not words else words

    def decode(self, body: Json, mode: Mode = "video") -> tuple[ms.ServerMessage, ...]:
        """Read a server's message; a second is read at 24 kHz."""
        match body.get("type"):
            case "info":
                return (info_of(body.get("code")).parse(body),)
            case "session.output_audio.delta":
                return (_read_second(body),)
        return tuple(it for it in super().decode(body, mode) if it is not None)


def _with_rate(init: Init) -> Init:
    """Fill in the rate of a format; one that is not given at all stays so."""
    live = init.live
    coding = live.coding or ("audio/pcm" if live.rate_hz else "")
    default_hz = model.LIVE_RATES_HZ[0] if coding == "audio/pcm" else model.G711_RATE_HZ
    rate_hz = (live.rate_hz if coding == "audio/pcm" else 0) or default_hz
    return attrs.evolve(init, live=attrs.evolve(live, coding=coding, rate_hz=rate_hz))


def _read_second(body: Json) -> ms.Listen | ms.Speech:
    delta = Fields(body).required("delta", Value.pcm16)
    if not any(delta):
        listen: ms.Listen = LISTEN.parse(body)
        return attrs.evolve(listen, silence_samples=len(delta) // model.SAMPLE16_BYTES)
    pcm = to_float32(delta)
    if len(delta) == model.LIVE_RATES_HZ[1] * model.SAMPLE16_BYTES:
        at = np.arange(model.OUTPUT_RATE_HZ) * model.LIVE_RATES_HZ[1] / model.OUTPUT_RATE_HZ
        samples = np.frombuffer(pcm, "<f4")
        pcm = np.interp(at, np.arange(len(samples)), samples).astype("<f4").tobytes()
    speech: ms.Speech = SPEECH.parse(body)
    return attrs.evolve(speech, pcm=pcm)


LIVE: Final = Live(
    "live", {table.kind: request for request, table in REQUESTS.items()}, REQUESTS, ANSWERS
)
