"""The dialects `openai` and `openai-transcription`: the GA Realtime API.

In `openai` a response is one speaking turn of the model. Both are one class.

Names, fields and words are those of the types of the `openai` package (`openai.types.realtime`);
items, responses and their steps are in `openai_shared`.

Choices in addition to them:
- `session.created` comes when the session has a slot; its wait is reported as a rate limit.
  A session's end is the connection's: there is no message for it, but an error for an end by time.
- `event_id` is filled in by the session, which knows the number of the frame.
- A response's item has its number: `item_...` for `resp_...`.
- What the model cannot do is refused by its name (`unsupported`).

`openai` cannot show: listening, metrics, the recording's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

import attrs

from ...values import behaviour
from ...values import messages as ms
from ...values import openai as oa
from ...values.errors import OPENAI_ERRORS, ErrorCode, LocalProtocolError, invalid, missing
from ...values.limits import ITEM_PARTS_MAX, MS_PER_S, Mode
from ...values.model import CODINGS, G711_RATE_HZ, rate_of
from ...values.requests import AppendSound, ClientMessage, Request
from .. import codec as c
from ..table import (
    DROPPED,
    Dialect,
    Field,
    Object,
    Row,
    Table,
    checked,
    computed,
    fixed,
    items,
    one,
    optional,
    typed,
)
from . import openai_shared as api
from . import shared
from .live import REASONS
from .shared import PROMPT, setting

# -- the settings of a session --------------------------------------------------------------------

IDLE_MS_MAX: Final = 3600 * MS_PER_S
"""A session lasts no longer."""
SILENCE_MS_MAX: Final = 10 * MS_PER_S
"""A longer pause ends a turn of any speaker."""
_VOICE_CHARS_MAX: Final = 64
_NAME: Final = c.text(_VOICE_CHARS_MAX, 1, holds=c.VOICE_NAMED)


def _voice(value: c.Value, at: c.ParseState) -> str:
    if at.context.behaves(behaviour.LENIENT_SETTINGS) and isinstance(value.value, dict):
        value = c.Fields(value.value, value.path).required("id", lambda name: name)
    name: str = _NAME.read(value, at)
    return name


_VOICE: Final = attrs.evolve(_NAME, read=_voice)
_NO_LENGTH: Final = api.offered(api.ANY, "the length of a response has no bound here", "inf")
_INF: Final = api.until(behaviour.LENIENT_SETTINGS, _NO_LENGTH, api.TOKENS)
_SPEED: Final = api.until(behaviour.LENIENT_SETTINGS, c.number(1, 1), c.number(0.25, 1.5))
_EAGERNESS: Final = ("low", "medium", "high", "auto")
_NO_SPEED: Final = "Without effect: the model decides how fast it speaks."
_NO_PROMPT: Final = api.offered(api.ANY, "there are no stored prompts", {}, type="object", const={})
_CHOICES: Final = c.choice(("auto", "none"))
_NO_CHOICE: Final = api.offered(
    api.ANY, "the model has no tools", "auto", "none", **_CHOICES.schema
)
_CHOICE: Final = c.FieldType(
    read=lambda value, _: "none" if value.value == "none" else "auto", schema={}
)
_PARALLEL: Final = c.FieldType(read=lambda value, _: value.value is not False, schema={})


def _rate(value: c.Value, at: c.ParseState) -> None:
    coding = at.body.get("type") if at.context.behaves(behaviour.LENIENT_SETTINGS) else None
    rate_hz = rate_of(coding) if coding in CODINGS else 24_000
    value.integer(rate_hz, rate_hz)


_RATE: Final = c.FieldType(read=_rate, schema={"type": "integer", "enum": [24_000, G711_RATE_HZ]})


def _format(attr: str) -> Object:
    rows = (
        optional("type", c.choice(CODINGS), attr=attr, doc="PCM16, or G.711."),
        checked("rate", _RATE, "24000; of G.711 8000."),
    )
    return Object("format", *rows, omit=True, doc="Its form.")


_IDLE: Final = c.integer(MS_PER_S, IDLE_MS_MAX)


def _idle(value: c.Value, at: c.ParseState) -> int:
    is_read = at.context.behaves(behaviour.IDLE_TURNS) and at.body.get("type") == "server_vad"
    return int(_IDLE.read(value, at)) if is_read else 0


_SILENCE: Final = c.integer(100, SILENCE_MS_MAX)
THRESHOLD: Final = setting("threshold", c.number(0, 1), 0.5, example=0.5)
SILENCE: Final = setting("silence_duration_ms", _SILENCE, 500, attr="silence_ms", example=500)
_PREFIX: Final = c.integer(0, SILENCE_MS_MAX)
_NO_EAGERNESS: Final = api.only(_EAGERNESS, "auto", "the model decides when to answer", "medium")
_DETECTION: Final = (
    Field("type", c.choice(("server_vad", "semantic_vad")), attr="kind"),
    THRESHOLD,
    setting("prefix_padding_ms", _PREFIX, 300, attr="prefix_ms", example=300),
    SILENCE,
    Field("create_response", c.FLAG, True, attr="creates"),
    Field("interrupt_response", c.FLAG, True, attr="interrupts"),
    checked(
        "eagerness", api.until(behaviour.LENIENT_SETTINGS, _NO_EAGERNESS, c.choice(_EAGERNESS))
    ),
    "Without effect: the model decides when to answer.",
)
_SPOKEN_DETECTION: Final = Table(
    oa.TurnDetection,
    *_DETECTION,
    optional("backchannel_ms", _PREFIX, since=behaviour.BACKCHANNELS, example=350),
    "Shorter speech over the model does not interrupt it; without it the server's limit.",
    setting("idle_timeout_ms", attrs.evolve(_IDLE, read=_idle), 0, attr="idle_ms", example=8000),
    "Of server_vad: the model speaks where the client says nothing for so long.",
)
_PLAIN_DETECTION: Final = Table(
    oa.TurnDetection, *_DETECTION, api.ignored("idle_timeout_ms", "Ignored: no model speaks here.")
)
"""That of a session without a model that speaks."""
_DOC_OF_INPUT: Final = "The client's sound."


def _input(transcription: Row, how: Table) -> Object:
    """The settings of the client's sound; those of its transcription differ."""
    rows = (
        _format("input_format"),
        optional("turn_detection", api.detection(one(how)), attr="detection"),
        api.ignored("noise_reduction", "Ignored: not offered here."),
        transcription,
    )
    return Object("input", *rows, doc=_DOC_OF_INPUT)


def _sent_format(attr: str) -> Object:
    """The format of sound; that of G.711 has no rate."""
    kind = c.FieldType(
        read=lambda value, _: value.integer(), schema={"type": "integer", "const": 24_000}
    )
    rate = computed(
        "rate",
        kind,
        lambda message: 24_000 if getattr(message.openai, attr) == "audio/pcm" else None,
        omit=True,
        doc="Samples a second; not of G.711, which has 8000.",
    )
    return Object("format", Field("type", c.choice(CODINGS), attr=attr), rate, doc="Of the sound.")


def _sent_input(transcription: Row, how: Table) -> Object:
    """The client's sound as it is in force; its transcription is reported in two ways."""
    rows = (
        _sent_format("input_format"),
        api.null("noise_reduction"),
        transcription,
        Field("turn_detection", api.detection(one(how)), None, attr="detection"),
    )
    return Object("input", *rows, doc=_DOC_OF_INPUT)


_TYPES: Final = ("realtime", "transcription")
_OF_REALTIME: Final = api.only(_TYPES, "realtime", "transcription is for ?intent=transcription")
_TRANSCRIBES: Final = c.FieldType(
    read=lambda value, _: c.as_object(value.value, value.path) is not None,
    write=lambda wanted: {} if wanted else None,
    schema={"type": "object", "properties": {}},
)
_CONFIGURE: Final = typed(
    oa.Configure,
    shared.SESSION_UPDATE,
    Object(
        "session",
        api.word(
            "type",
            _OF_REALTIME,
            "realtime",
            "Must be realtime here; transcription has an address of its own.",
        ),
        checked("model", c.TEXT, "Ignored: the address names the model."),
        optional("instructions", PROMPT),
        optional("output_modalities", api.MODALITY, "modality", example=["audio"]),
        Object(
            "audio",
            _input(
                optional(
                    "transcription",
                    _TRANSCRIBES,
                    "transcribes",
                    doc="An object, with or without settings: the client wants to be "
                    "told what it said, if the server has a model for it.",
                ),
                _SPOKEN_DETECTION,
            ),
            Object(
                "output",
                _format("output_format"),
                optional("voice", _VOICE),
                checked("speed", _SPEED, _NO_SPEED),
                doc="The model's sound.",
            ),
            doc="Sound in both directions.",
        ),
        optional("tools", api.TOOLS, doc=api.CALLED),
        optional("tool_choice", _CHOICE),
        "none: no call is sent. Other choices are auto: no call can be enforced.",
        optional("parallel_tool_calls", _PARALLEL, "is_parallel"),
        "false: no call is sent while another waits for its result.",
        checked("max_output_tokens", _INF, "Reported as `inf`."),
        *map(api.ignored, ("include", "tracing", "truncation", "reasoning")),
        checked("prompt", _NO_PROMPT, api.EMPTY),
        is_required=True,
        closed=api.CLOSED,
        doc="The settings to change.",
    ),
    api.ANY_EVENT_ID,
)
_TRANSCRIBER: Final = c.FieldType(
    read=lambda *_: None, schema={"type": "object", "additionalProperties": {"type": "string"}}
)
_IN_FORCE: Final = "The session as it is in force."
_SESSION: Final = Object(
    "session",
    fixed("type", "realtime"),
    fixed("object", "realtime.session"),
    Field("id", c.TEXT),
    Field("model", c.TEXT),
    Field("expires_at", c.INTEGER),
    Field("instructions", c.TEXT),
    Field("output_modalities", api.MODALITY, attr="modality", example=["audio"]),
    Object(
        "audio",
        _sent_input(
            computed(
                "transcription",
                c.or_null(_TRANSCRIBER),
                lambda message: (
                    {"model": message.openai.transcriber} if message.openai.transcriber else None
                ),
                example={"model": "tiny"},
                doc="The model that transcribes what the client says.",
            ),
            _SPOKEN_DETECTION,
        ),
        Object(
            "output",
            _sent_format("output_format"),
            Field("voice", c.TEXT, "", omit=True),
            doc="The model's sound.",
        ),
        doc="Sound in both directions.",
    ),
    Field("tools", api.SENT_FUNCTIONS, (), doc="Functions that the model may call."),
    Field("tool_choice", _CHOICES, "auto"),
    "none also where there are tools, and the model calls none.",
    setting("parallel_tool_calls", c.FLAG, True, attr="is_parallel", doc="false, or absent."),
    fixed("max_output_tokens", "inf"),
    fixed("truncation", "auto"),
    *map(api.null, ("tracing", "prompt", "include")),
    attr="openai",
    doc=_IN_FORCE,
)

# -- from the client ------------------------------------------------------------------------------

AUDIO_MS_MAX: Final = 24 * 3600 * MS_PER_S
"""Longer than a session."""
_AUTO: Final = api.only(("auto", "none"), "auto", "a response is part of the conversation")
_ITEM_ID: Final = Field("item_id", api.ID, example=api.ITEM_EXAMPLE)
_SINCE: Final = behaviour.RESPONSE_OPTIONS


def request(cls: type, kind: str, *rows: Row | str) -> Table:
    """Make the table of a client's event, which may have an id."""
    return typed(cls, kind, *rows, api.ANY_EVENT_ID)


_RESPONSE: Final = Object(
    "response",
    checked("conversation", _AUTO, "Must be auto here."),
    checked("input", api.empty("no other input"), api.EMPTY),
    checked("tools", api.TOOLS, "Without effect."),
    optional("output_modalities", api.MODALITY, "modality", example=["text"], since=_SINCE),
    optional("instructions", PROMPT, since=_SINCE),
    "Until the model has its prompt, in place of the session's; then refused.",
    setting("max_output_tokens", api.TOKENS, 0, attr="max_tokens", example=100, since=_SINCE),
    "Or inf.",
    checked("tool_choice", _NO_CHOICE, "Without effect; another is refused.", since=_SINCE),
    optional("metadata", api.METADATA, example={"client_event_id": "evt_1"}),
    "Returned with the response.",
    omit=True,
    doc="Settings of this response; others than these are ignored.",
)
ITEM_REQUESTS: Final = {
    Request.CREATE_ITEM: request(
        oa.CreateItem,
        "conversation.item.create",
        Field("item", api.ASKED_ITEM),
        optional("previous_item_id", api.ID, "previous_id"),
    ),
    Request.DELETE_ITEM: request(oa.DeleteItem, "conversation.item.delete", _ITEM_ID),
    Request.RETRIEVE_ITEM: request(oa.RetrieveItem, "conversation.item.retrieve", _ITEM_ID),
    Request.TRUNCATE_ITEM: request(
        oa.TruncateItem,
        "conversation.item.truncate",
        _ITEM_ID,
        Field("content_index", c.integer(0, ITEM_PARTS_MAX), 0),
        Field("audio_end_ms", c.integer(0, AUDIO_MS_MAX)),
    ),
}
CLEAR: Final = request(oa.ClearSound, "input_audio_buffer.clear")
CANCEL: Final = request(oa.CancelResponse, "response.cancel", optional("response_id", api.ID))
_SOUND_REQUESTS: Final = {
    Request.APPEND: request(
        AppendSound, shared.AUDIO_APPEND, Field("audio", c.PIECE, attr="pcm16")
    ),
    Request.COMMIT: request(oa.CommitSound, "input_audio_buffer.commit"),
    Request.CLEAR: CLEAR,
}
_REQUESTS: Final = {
    Request.UPDATE: _CONFIGURE,
    **_SOUND_REQUESTS,
    Request.RESPOND: request(oa.Respond, "response.create", _RESPONSE),
    Request.CANCEL: CANCEL,
    **ITEM_REQUESTS,
}

# -- from the server ------------------------------------------------------------------------------

_NEVER: Final = frozenset({ErrorCode.INVALID_EVENT, ErrorCode.WORKER_CONNECT_FAILED})
"""Every event has its place at all times, and the model is opened in a session that is there."""
ERROR_CODES: Final = (
    *(code for code in api.ERROR_CODES if code not in _NEVER),
    *(code for code in ErrorCode if code in OPENAI_ERRORS),
    *(ErrorCode.INVALID_JSON, ErrorCode.INVALID_FRAME, ErrorCode.BUFFER_FULL),
)
_LIMITS: Final = items(
    one(
        Table(
            oa.RateLimit,
            Field("name", c.choice(("requests", "tokens"))),
            Field("limit", c.INTEGER),
            Field("remaining", c.INTEGER),
            Field("reset_seconds", c.INTEGER, attr="reset_s"),
        )
    ),
    1,
)
_RATE_LIMITS: Final = "rate_limits.updated"


def _wait(queued: ms.Queued) -> tuple[oa.RateLimit]:
    place = queued.place
    limit, wait_s = place.queue_length, place.estimated_wait_s
    return (oa.RateLimit(name="requests", limit=limit, remaining=0, reset_s=wait_s),)


_WAITS: Final = typed(
    ms.Queued,
    _RATE_LIMITS,
    api.EVENT_ID,
    Field("rate_limits", _LIMITS, attr=DROPPED, get=_wait),
    "One: of sessions, or of the tokens of the model's context.",
    lacks={"place": shared.NOWHERE},
)
"""The session waits for its slot: all SDKs know this event, and none fails at it."""
_LEFT: Final = typed(
    oa.RateLimit,
    _RATE_LIMITS,
    api.EVENT_ID,
    Field("rate_limits", _LIMITS, attr="limits", get=lambda left: (left,), doc="The same."),
    make=lambda values: values["limits"][0],
)


def _of_session(session: Object) -> tuple[Table, Table]:
    """The tables of `session.created` and `session.updated`."""
    created = {"session_id": "", "prompt_length": 0, "recording": "off"}
    return (
        typed(ms.Created, shared.SESSION_CREATED, api.EVENT_ID, session, lacks=created),
        typed(oa.Configured, "session.updated", api.EVENT_ID, session),
    )


_ANSWERS: Final = (
    _WAITS,
    _LEFT,
    typed(
        oa.ConversationCreated,
        "conversation.created",
        api.EVENT_ID,
        Object(
            "conversation",
            Field("id", c.TEXT, example="conv_7b20d9c3a415"),
            fixed("object", "realtime.conversation"),
            doc="The conversation.",
        ),
    ),
    *_of_session(_SESSION),
    *api.INPUTS.values(),
    *api.ITEMS.values(),
    api.DELETED,
    api.TRUNCATED,
    api.BEGAN,
    *api.STEPS.values(),
    api.WORDS,
    api.SOUND,
    api.DONE,
    api.error_table(ERROR_CODES, "event_id"),
)

# -- a transcription session ----------------------------------------------------------------------

_NO_HINT: Final = "Without effect: the model transcribes what it hears, without hints."
_HINTS: Final = ("prompt", "keywords")
_PLAIN_HINTS: Final = ("language", "languages", "delay")
"""Nothing in them is the client's own."""
_OF_TRANSCRIPTION: Final = api.only(_TYPES, "transcription", "the address asks for transcription")
_MODEL: Final = optional(
    "model", c.TEXT, "transcriber", example="tiny", doc="One of the server's models."
)
_TRANSCRIPTION_CONFIGURE: Final = typed(
    oa.Configure,
    shared.SESSION_UPDATE,
    Object(
        "session",
        api.word("type", _OF_TRANSCRIPTION, "transcription", "Must be transcription here."),
        Object(
            "audio",
            _input(
                Object(
                    "transcription",
                    _MODEL,
                    *(api.ignored(name, _NO_HINT) for name in _HINTS),
                    *(api.ignored(name, _NO_HINT, holds=None) for name in _PLAIN_HINTS),
                    omit=True,
                    doc="The model, and hints for it.",
                ),
                _PLAIN_DETECTION,
            ),
            doc="Sound.",
        ),
        api.ignored("include"),
        is_required=True,
        closed=api.CLOSED,
        doc="The settings to change.",
    ),
    api.ANY_EVENT_ID,
)
_SOUND: Final = Table(
    oa.Part,
    fixed("type", "input_audio"),
    attrs.evolve(api.null("transcript"), omit=True),
    make=lambda _: oa.Part(kind="input_audio"),
)


def _sound(part: oa.Part) -> dict[str, object]:
    return _SOUND.write(part) | ({"transcript": None} if part.is_whole else {})


_TRANSCRIPTION_SESSION: Final = Object(
    "session",
    fixed("type", "transcription"),
    fixed("object", "realtime.transcription_session"),
    Field("id", c.TEXT),
    Field("expires_at", c.INTEGER),
    Object(
        "audio",
        _sent_input(
            Object(
                "transcription",
                Field("model", c.TEXT, attr="transcriber", example="tiny"),
                doc="The model that transcribes what the client says.",
            ),
            _PLAIN_DETECTION,
        ),
        doc="Sound.",
    ),
    api.null("include"),
    attr="openai",
    doc=_IN_FORCE,
)
_ITEM: Final = Field(
    "item",
    one(
        Table(
            oa.Item,
            Field("id", c.TEXT, example=api.ITEM_EXAMPLE),
            api.OBJECT,
            fixed("type", "message"),
            fixed("role", "user"),
            fixed("status", "completed"),
            Field("content", items(attrs.evolve(one(_SOUND), write=_sound), 1), (), attr="parts"),
            make=lambda values: oa.Item(role="user", **values),
        )
    ),
)
_NEVER_TRANSCRIBED: Final = frozenset(
    {
        *(ErrorCode.ACTIVE_RESPONSE, ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE),
        *(ErrorCode.ITEM_NOT_FOUND, ErrorCode.INFERENCE_ERROR),
    }
)
"""They are about responses and named items; a failure has a message of its own."""
TRANSCRIPTION_CODES: Final = tuple(it for it in ERROR_CODES if it not in _NEVER_TRANSCRIBED)
_TRANSCRIPTION_ANSWERS: Final = (
    _WAITS,
    *_of_session(_TRANSCRIPTION_SESSION),
    *(table for kind, table in api.INPUTS.items() if kind != "timeout_triggered"),
    *api.by_kind(
        oa.ItemStep, "conversation.item", added=(api.PREVIOUS, _ITEM), done=(api.PREVIOUS, _ITEM)
    ).values(),
    api.error_table(TRANSCRIPTION_CODES, "event_id"),
)

# -- both -----------------------------------------------------------------------------------------


class OpenAI(Dialect):
    """The dialect of OpenAI's Realtime API."""

    def parse(self, request: Request, body: c.Json, context: c.Context) -> ClientMessage:
        """Check every field of a client's message; a setting that is null is turned off."""
        message = super().parse(request, body, context)
        match message:
            case oa.Configure():
                is_undetected = _is_null(body, "turn_detection")
                transcribes = False if _is_null(body, "transcription") else message.transcribes
                return attrs.evolve(message, is_undetected=is_undetected, transcribes=transcribes)
            case oa.CreateItem(item=item):
                _check_parts(item)
        return message

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame."""
        if not isinstance(message, oa.Configure):
            return super().encode_request(message)
        body = self._written[oa.Configure].write(message)
        session = cast("dict[str, dict[str, dict[str, object]]]", body["session"])
        is_silent = message.transcribes is False
        off = {"turn_detection": message.is_undetected, "transcription": is_silent}
        for name, is_off in off.items():
            if is_off:
                session.setdefault("audio", {}).setdefault("input", {})[name] = None
        return c.dump_frame(body)

    def decode(self, body: c.Json, mode: Mode = "video") -> tuple[ms.ServerMessage, ...]:
        """Read a server's message; of limits there are two kinds."""
        limits = body.get("rate_limits")
        if isinstance(limits, list) and limits and limits[0].get("name") == "tokens":
            return (_LEFT.parse(body),)
        return super().decode(body, mode)


def _check_parts(item: oa.Item) -> None:
    """Refuse a part that an item of its role cannot have."""
    for number, part in enumerate(item.parts):
        if part.kind not in api.PARTS_OF[item.role]:
            kinds = ", ".join(api.PARTS_OF[item.role])
            path = f"$.item.content[{number}].type"
            raise invalid(path, f"{part.kind}, an item of the {item.role} has {kinds}")
        if part.kind == "input_image" and not part.picture:
            raise missing(f"$.item.content[{number}].image_url")


def _is_null(body: c.Json, name: str) -> bool:
    """Whether a setting of the input is null, which is not the same as absent."""
    found: object = body
    for place in ("session", "audio", "input"):
        found = found.get(place) if isinstance(found, dict) else None
    return isinstance(found, dict) and found.get(name, found) is None


def _of_end(closed: ms.Closed) -> tuple[Table, ...]:
    if closed.reason not in REASONS:
        raise LocalProtocolError(f"no end for {closed.reason}: it is never sent")
    return ()


def _of_place(place: ms.Queued | ms.QueueUpdate) -> tuple[Table, ...]:
    return (_WAITS,) if place.is_for_openai else ()


_CHOOSE: Final[Mapping[type, Callable[[Any], tuple[Table, ...]]]] = {
    ms.Speech: partial(api.speech, api.WORDS, api.SOUND),
    oa.ReplyStep: lambda step: (api.STEPS[step.kind],),
    oa.InputStep: lambda step: (api.INPUTS[step.kind],),
    oa.ItemStep: lambda step: (api.ITEMS[step.kind],),
    oa.ReplyState: lambda it: (api.BEGAN if it.response.status == "in_progress" else api.DONE,),
    **dict.fromkeys((ms.Queued, ms.QueueUpdate), _of_place),
    ms.Closed: _of_end,
    **dict.fromkeys((ms.QueueDone, ms.Listen, ms.GoingAway), lambda _: ()),
}
_UNSERVED: Final = dict.fromkeys(
    (
        *(table.kind for table in _REQUESTS.values()),
        *("output_audio_buffer.clear", "transcription_session.update"),
    ),
    ", which is not served here",
)
"""Events of the API that a client may send, where they are not served."""
OPENAI: Final = OpenAI("openai", _REQUESTS, _ANSWERS, choose=_CHOOSE, unserved=_UNSERVED)
OPENAI_TRANSCRIPTION: Final = OpenAI(
    "openai-transcription",
    {Request.UPDATE: _TRANSCRIPTION_CONFIGURE, **_SOUND_REQUESTS},
    _TRANSCRIPTION_ANSWERS,
    choose=_CHOOSE,
    unserved=_UNSERVED,
)
"""The dialect of its transcription sessions."""
