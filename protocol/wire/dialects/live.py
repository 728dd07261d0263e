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

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs
import numpy as np

from ...values import messages as ms
from ...values import model
from ...values.limits import INPUT_ID_CHARS_MAX, ITEM_CHARS_MAX, MS_PER_S, Mode
from ...values.openai import (
    Item,
    Mute,
    Muted,
    Notice,
    Part,
    Respond,
    Unmute,
    Unmuted,
    Update,
    Updated,
    Usage,
    UserWords,
)
from ...values.requests import AppendSound, ClientMessage, CloseRequest, Init, Request, VoiceName
from .. import codec as c
from ..audio import compress, to_float32
from ..table import (
    DROPPED,
    Constant,
    Dialect,
    Field,
    Object,
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

SESSION_START: Final = "session.start"
AUDIO_APPEND: Final = "session.input_audio.append"
HISTORY_MAX: Final = 128
"""Messages before the session, as the API has them."""
UNSUPPORTED: Final = frozenset(
    {
        *("session.instructions.append", "session.thinking.append", "session.commentary.append"),
        *("session.output_audio.fixture.play", "decision.create", "decision.item.create"),
        *("decision.item.delete", "response.create", "response.item.create"),
        "transport.dtmf.send",
    }
)
"""Events of the API that ask for what the model cannot do."""


def _event_id(attr: str = "event_id") -> Field:
    kind = c.text(INPUT_ID_CHARS_MAX, holds=c.NAMED)
    return Field("event_id", kind, "", attr=attr, omit=True, rank=9)


def _rate(value: c.Value, at: c.ParseState) -> int:
    found, coding = value.integer(), at.values.get("live.coding") or "audio/pcm"
    if coding != "audio/pcm" and found != model.G711_RATE_HZ:
        raise api.unsupported(value.path, f"{found} Hz, {coding} has 8000")
    if coding == "audio/pcm" and found not in model.LIVE_RATES_HZ:
        raise api.unsupported(value.path, f"{found} Hz, there are 24000 and 16000")
    return found


RATE: Final = c.FieldType(
    read=_rate, schema={"type": "integer", "enum": [*model.LIVE_RATES_HZ, model.G711_RATE_HZ]}
)
_NO_TRIGGERS: Final = api.empty("there are no decisions")
_TARGETS: Final = c.choice(("client", "responses"))
_TARGET: Final = api.offered(
    c.choice(("client", "responses", "decisions")),
    "there are no decisions",
    "client",
    "responses",
    **_TARGETS.schema,
)


def _delegation(attr: str, backend: str, names: str, **how: Any) -> Object:
    nothing = None if names == "tools" else ()  # of an update, which leaves them
    return Object(
        "delegation",
        optional("type", _TARGET, attr=attr, doc="The model delegates only calls of tools.", **how),
        Object(
            "responses",
            Field("model", c.TEXT, "", attr=backend, omit=True, doc="In the session."),
            Field("tools", api.TOOLS, nothing, attr=names, omit=True, doc=api.CALLED),
            omit=True,
            doc="Of the model to which tasks would be delegated; other fields are ignored.",
        ),
        api.ignored(
            "acknowledgement_delay_ms", "Ignored: the model decides what it says meanwhile."
        ),
        omit=True,
        closed=api.CLOSED,
        doc="Who handles delegated tasks: calls of tools, with `responses`.",
    )


def _voice(value: c.Value, at: c.ParseState) -> VoiceName | None:
    """Read a voice by its name, or by its `id`; None for the model's own."""
    if isinstance(value.value, dict):
        fields = c.Fields(value.value, value.path)
        value = fields.required("id", lambda name: name)
        fields.refuse_unknown()
    found: VoiceName = c.VOICE_BY_NAME.read(value, at)
    return None if found.name in c.STOCK_VOICES else found


_VOICE: Final = attrs.evolve(c.VOICE_BY_NAME, read=_voice)


_PART: Final = Table(
    Part,
    checked("type", c.choice(("input_text", "text", "output_text")), doc="Text."),
    Field("text", c.text(ITEM_CHARS_MAX, holds=c.USER_TEXT)),
    make=lambda values: Part(kind="input_text", **values),
)
_ITEM: Final = Table(
    Item,
    checked("id", c.text(INPUT_ID_CHARS_MAX, holds=c.NAMED), doc="Ignored."),
    checked("type", c.choice(("message",)), doc="Always message."),
    Field("role", c.choice(("developer", "user", "assistant"))),
    checked("status", c.choice(("completed", "incomplete")), doc="Ignored."),
    Field("content", items(one(_PART), 1, 1), attr="parts"),
)


def _audio(coding: str, rate_hz: int, *more: Object) -> Object:
    """The form of the sound in both directions; `coding` and `rate_hz` where none is given."""
    rows = (
        Field("type", c.choice(model.CODINGS), coding, attr="live.coding"),
        Field("rate", RATE, rate_hz, attr="live.rate_hz"),
    )
    return Object("audio", Object("format", *rows, closed=api.CLOSED), *more, closed=api.CLOSED)


_START: Final = typed(
    Init,
    SESSION_START,
    Object(
        "session",
        Field("model", c.TEXT, attr="live.model"),
        _audio(
            "audio/pcm",
            model.LIVE_RATES_HZ[0],
            Object(
                "output", optional("voice", _VOICE, attr="ref_audio"), omit=True, closed=api.CLOSED
            ),
        ),
        _delegation("live.delegation", "live.backend", "live.tools"),
        Field("input", items(one(_ITEM), HISTORY_MAX), (), attr="live.history", omit=True),
        Field("instructions", shared.PROMPT, "", omit=True),
        Field(
            "safety_identifier",
            c.text(INPUT_ID_CHARS_MAX, holds=c.NAMED),
            "",
            attr="live.safety_identifier",
            omit=True,
        ),
        Field("store", shared.RECORD.kind, True, attr="record", omit=True),
        Field("triggers", _NO_TRIGGERS, (), attr=DROPPED, doc=api.EMPTY),
        is_required=True,
        closed=api.CLOSED,
    ),
    _event_id("live.event_id"),
    closed=api.CLOSED,
)
FORK_START: Final = typed(
    Init,
    SESSION_START,
    Object(
        "session",
        Field("model", c.TEXT, "", attr="live.model", omit=True),
        _audio("", 0),
        _delegation("live.delegation", "live.backend", "live.tools"),
        Field("store", shared.RECORD.kind, True, attr="record", omit=True),
        is_required=True,
        closed=api.CLOSED,
    ),
    _event_id("live.event_id"),
    closed=api.CLOSED,
    lacks={"instructions": ""},
)
"""The `session.start` of a fork, in which all else is as it was; an empty text or 0: this too."""
_UPDATE: Final = typed(
    Update,
    shared.SESSION_UPDATE,
    Object(
        "session",
        _delegation(DROPPED, DROPPED, "tools", get=Constant("client")),
        Field("triggers", _NO_TRIGGERS, (), attr=DROPPED, doc=api.EMPTY),
        is_required=True,
        closed=api.CLOSED,
    ),
    _event_id(),
    closed=api.CLOSED,
)
_CLOSE: Final = typed(CloseRequest, shared.SESSION_CLOSE, api.ignored("event_id"))
"""It is honoured in every state, so nothing in it is refused."""
REQUESTS: Final = {
    Request.INIT: _START,
    Request.APPEND: typed(
        AppendSound,
        AUDIO_APPEND,
        Field("audio", c.PIECE, attr="pcm16"),
        Field("event_id", c.text(INPUT_ID_CHARS_MAX, holds=c.NAMED), "", attr=DROPPED),
        "Ignored.",
        closed=api.CLOSED,
    ),
    Request.MUTE: typed(Mute, "session.input_audio.mute", _event_id(), closed=api.CLOSED),
    Request.UNMUTE: typed(Unmute, "session.input_audio.unmute", _event_id(), closed=api.CLOSED),
    Request.UPDATE: _UPDATE,
    Request.TOOL_RESULT: typed(
        model.ToolResult,
        "response.item.create",
        Object(
            "item",
            api.word(
                "type", c.choice((api.OUTPUT,)), api.OUTPUT, "Always this.", example=api.OUTPUT
            ),
            *api.result_rows(),
            *(
                api.ignored("id", holds=c.NAMED),
                api.ignored("status", holds=None),
                api.ignored("caller"),
            ),
            is_required=True,
            closed=api.CLOSED,
        ),
        api.ignored("event_id"),
        closed=api.CLOSED,
    ),
    Request.RESPOND: typed(
        Respond,
        "response.create",
        api.ignored("event_id"),
        closed=api.CLOSED,
        doc="Without effect: the model goes on by itself after a result.",
    ),
    Request.CLOSE: _CLOSE,
}


# -- What the server says in `live` ---------------------------------------------------------------

OUTPUT_AUDIO: Final = "session.output_audio.delta"
SESSION_STARTED: Final = "session.started"
INFO: Final = "info"
QUEUED, ASSIGNED = "session_queued", "slot_assigned"
INFO_CODES: Final = (
    *(QUEUED, ASSIGNED, "nothing_delegated", "tools_not_called"),
    *("time_over", "context_full"),
)
REASONS: Final[Mapping[ms.EndReason, str]] = {
    "client": "close_requested",
    "cancelled": "close_requested",
    "timeout": "expired",
    "context_full": "expired",
    **dict.fromkeys(("backend_error", "server_shutdown"), "connection_lost"),
    **dict.fromkeys(("invalid_frame", "flooded"), "connection_lost"),
}
"""The ends of a session that are sent, in the words of the Live API."""
_ENDS: Final[Mapping[str, ms.EndReason]] = {
    "close_requested": "client",
    "expired": "timeout",
    "connection_lost": "backend_error",
}

_ANSWERED: Final = Field("client_event_id", c.TEXT, "", omit=True)


def _one_of(code: str) -> Field:
    return computed("code", c.choice(INFO_CODES), Constant(code), doc="The notice.")


def _place(queued: ms.Queued | ms.QueueUpdate) -> str:
    place = queued.place
    return (
        f"position {place.position} of {place.queue_length} in the queue, "
        f"about {place.estimated_wait_s} s"
    )


_PLACE: Final = computed(
    "message",
    c.TEXT,
    _place,
    example="position 1 of 1 in the queue, about 9 s",
    doc="The same for people.",
)
_QUEUED: Final = typed(
    ms.Queued, INFO, api.EVENT_ID, _one_of(QUEUED), _PLACE, lacks={"place": shared.NOWHERE}
)
_MOVED: Final = typed(
    ms.QueueUpdate, INFO, api.EVENT_ID, _one_of(QUEUED), _PLACE, lacks={"place": shared.NOWHERE}
)
_TURN: Final = "a slot is assigned: the session starts with session.start"
_QUEUE_DONE: Final = typed(
    ms.QueueDone,
    INFO,
    api.EVENT_ID,
    _one_of(ASSIGNED),
    computed("message", c.TEXT, Constant(_TURN), example=_TURN, doc="The same for people."),
)
NOTICE: Final = typed(
    Notice,
    INFO,
    api.EVENT_ID,
    Field("code", c.choice(INFO_CODES)),
    Field("message", c.TEXT, attr="text"),
)


def info_of(code: object) -> Table:
    """Return the table of an `info` with a code."""
    return {QUEUED: _QUEUED, ASSIGNED: _QUEUE_DONE}.get(str(code), NOTICE)


_SESSION: Final = Object(
    "session",
    Field("id", c.TEXT),
    Field("expires_at", c.INTEGER),
    Field("model", c.TEXT),
    fixed("status", "active"),
    Object(
        "audio",
        Object(
            "format",
            Field("type", c.choice(model.CODINGS), attr="coding"),
            Field("rate", c.INTEGER, attr="rate_hz", example=24_000),
            doc="Of the sound in both directions.",
        ),
        Object(
            "output",
            Field("voice", c.TEXT, ""),
            omit=True,
            when=lambda message: bool(message.live.voice),
        ),
    ),
    Object(
        "delegation",
        Field("type", _TARGETS, None, attr="delegation"),
        Object(
            "responses",
            Field("model", c.TEXT, "", attr="backend"),
            Field("tools", api.SENT_FUNCTIONS, (), omit=True, doc="Those in force."),
            omit=True,
            when=lambda message: message.live.delegation == "responses",
        ),
        omit=True,
        when=lambda message: message.live.delegation is not None,
    ),
    Field("instructions", c.TEXT, ""),
    Field("safety_identifier", c.TEXT, "", omit=True),
    Field("store", c.FLAG, False),
    attr="live",
    doc="The session as it is in force.",
)


# -- calls of tools, as responses that are delegated to a backend ---------------------------------
#
# Ids that belong to a call are made of the call's own.

_ARGUMENTS: Final = "response.function_call_arguments"
_ITEM_DONE: Final = "response.output_item.done"


def _id_of(prefix: str, called: ms.ToolCalled) -> str:
    return f"{prefix}_{called.call.id.partition('_')[2]}"


def _events(called: ms.ToolCalled) -> tuple[dict[str, object], ...]:
    """The events of a response that is a call, as the Responses API has them."""
    call, at = called.call, {"output_index": 0}
    item = {"type": "function_call", "id": _id_of("item", called), "call_id": call.id}
    begun = {**item, "status": "in_progress", "name": call.name, "arguments": ""}
    done = {**begun, "status": "completed", "arguments": call.arguments}
    response: dict[str, object] = {"object": "response", "id": _id_of("resp", called)}
    response |= {"output": [], "usage": None}
    written = {**at, "item_id": item["id"]}
    return (
        {"type": "response.created", "response": {**response, "status": "in_progress"}},
        {"type": "response.output_item.added", **at, "item": begun},
        {"type": f"{_ARGUMENTS}.delta", **written, "delta": call.arguments},
        {"type": f"{_ARGUMENTS}.done", **written, "name": call.name, "arguments": call.arguments},
        {"type": _ITEM_DONE, **at, "item": done},
        {"type": "response.completed", "response": {**response, "status": "completed"}},
    )


def _called(values: dict[str, Any]) -> ms.ToolCalled | None:
    """Make the call of the event that has the whole call."""
    if values["event"].get("type") != _ITEM_DONE:
        return None
    item = c.Fields(values["event"], "$.event").required("item", lambda value: value)
    fields = c.Fields(c.as_object(item.value, item.path), item.path)
    words = {name: fields.required(name, c.Value.text) for name in ("name", "arguments")}
    call = model.ToolCall(id=fields.required("call_id", c.Value.text), **words)
    return ms.ToolCalled(session_id="", call=call, unit=0)


def _named(name: str, prefix: str, doc: str) -> Field:
    example = f"{prefix}_0c9e41d7a355"
    return computed(name, c.TEXT, lambda called: _id_of(prefix, called), example=example, doc=doc)


def _event(at: int) -> tuple[Field, Field]:
    """The rows of one of the events."""
    event = Field(
        "event",
        c.FieldType(
            read=lambda value, _: c.as_object(value.value, value.path), schema={"type": "object"}
        ),
        get=lambda called: {**_events(called)[at], "sequence_number": at},
        attr="event",
        example={"type": _ITEM_DONE, "output_index": 0, "item": {"type": "function_call"}},
        doc="Of the Responses API, in this order: response.created, response.output_item.added, "
        "response.function_call_arguments.delta and .done, response.output_item.done with the "
        "whole call, response.completed.",
    )
    return _named("delegation_id", "dlg", "The delegation."), event


_DELEGATION: Final = (
    Object(
        "delegation",
        _named("id", "dlg", "The delegation."),
        fixed("type", "delegation"),
        fixed("target", "responses"),
        _named("response_id", "resp", "The response that is the call."),
        doc="What is delegated: a call of a tool.",
    ),
    computed("offset_ms", c.INTEGER, lambda called: (called.unit + 1) * MS_PER_S, example=3000),
    "Where in the session.",
)
_DELEGATED: Final = typed(
    ms.ToolCalled, "session.delegation.created", api.EVENT_ID, *_DELEGATION, make=lambda _: None
)
_EVENTS: Final = tuple(
    typed(ms.ToolCalled, "response.event", api.EVENT_ID, *rows, make=_called)
    for rows in map(_event, range(6))
)
_SECOND: Final = c.FieldType(
    read=lambda value, _: value.pcm16(), write=c.encode_base64, schema=c.base64_of(c.PCM16)
)
_UNTOLD: Final = {
    "session_id": "",
    "input_id": "",
    "response_id": "",
    "metrics": ms.Metrics(kv_cache_length=0, recording="off"),
}
"""A unit's facts without a field."""
WORDS: Final = typed(
    ms.Speech,
    "session.output_transcript.delta",
    api.EVENT_ID,
    Field("delta", c.TEXT, attr="text"),
    Field("start_ms", c.INTEGER),
    computed("end_ms", c.INTEGER, lambda speech: speech.start_ms + MS_PER_S, example=1001),
    "Where it ends there.",
    lacks={**_UNTOLD, "pcm": b"", "end_of_turn": False},
)


USER_WORDS: Final = typed(
    UserWords,
    "session.input_transcript.delta",
    api.EVENT_ID,
    Field("delta", c.TEXT, attr="text"),
    Field("start_ms", c.INTEGER),
    Field("end_ms", c.INTEGER),
)


def _delta(cls: type, get: Callable[[Any], bytes], **lacks: object) -> Table:
    row = computed(
        "delta",
        _SECOND,
        get,
        doc="A second of sound in the session's format; silence where the model listens.",
    )
    return typed(cls, OUTPUT_AUDIO, row, lacks={**_UNTOLD, **lacks})


def _silence(listen: ms.Listen) -> bytes:
    return compress(bytes(listen.silence_samples * model.SAMPLE16_BYTES), listen.coding)


SPEECH: Final = _delta(ms.Speech, api.sound_of, text="", pcm=b"", end_of_turn=False)
LISTEN: Final = _delta(ms.Listen, _silence)
ANSWERS: Final = (
    _QUEUED,
    _MOVED,
    _QUEUE_DONE,
    typed(
        ms.Created,
        SESSION_STARTED,
        api.EVENT_ID,
        _SESSION,
        _ANSWERED,
        lacks={"session_id": "", "prompt_length": 0, "recording": "off"},
    ),
    LISTEN,
    WORDS,
    SPEECH,
    USER_WORDS,
    _DELEGATED,
    _EVENTS[0],
    typed(Muted, "session.input_audio.muted", api.EVENT_ID, _ANSWERED),
    typed(Unmuted, "session.input_audio.unmuted", api.EVENT_ID, _ANSWERED),
    typed(Updated, "session.updated", api.EVENT_ID, _SESSION, _ANSWERED),
    typed(
        Usage,
        "session.usage.updated",
        api.EVENT_ID,
        Object("usage", Field("seconds", c.INTEGER)),
        Object("context_window", Field("usage_ratio", c.number(0, 1), attr="ratio", example=0.25)),
    ),
    NOTICE,
    typed(
        ms.Closed,
        shared.SESSION_CLOSED,
        api.EVENT_ID,
        Field("reason", c.word_of(_ENDS), get=shared.end_word(REASONS)),
        _SESSION,
        Object("usage", Field("seconds", c.INTEGER)),
        lacks={"session_id": ""},
    ),
    api.error_table(api.ERROR_CODES, "client_event_id"),
)


class Live(Dialect):
    """The dialect of OpenAI's Live API."""

    def parse(self, request: Request, body: c.Json, context: c.Context) -> ClientMessage:
        """Check every field of a client's message; a format has a rate."""
        if request is Request.INIT and context.is_fork:
            return _with_rate(FORK_START.parse(body, context))
        message: ClientMessage = super().parse(request, body, context)
        return _with_rate(message) if isinstance(message, Init) else message

    def decode(self, body: c.Json, mode: Mode = "video") -> tuple[ms.ServerMessage, ...]:
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


def _read_second(body: c.Json) -> ms.Listen | ms.Speech:
    delta = c.Fields(body).required("delta", c.Value.pcm16)
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
    "live",
    REQUESTS,
    ANSWERS,
    choose={
        ms.ToolCalled: lambda _: (_DELEGATED, *_EVENTS),
        ms.Speech: partial(api.speech, WORDS, SPEECH),
    },
    unserved=dict.fromkeys(UNSUPPORTED, ", which the model cannot do"),
)
