"""What the server says in `openai`."""

from __future__ import annotations

from typing import Any, Final

from ...values import openai as oa
from ...values.errors import OPENAI_ERRORS, ErrorCode
from ...values.limits import CALLS_OPEN_MAX, MS_PER_S
from ...values.messages import Created, Metrics, Queued, QueuePlace, Speech
from ..audio import to_float32
from ..codec import encode_base64
from ..dialects import openai_tools as tools
from ..kinds import INTEGER, PCM16, TEXT, Kind, base64_of, choice, or_null
from ..table import DROPPED, Constant, Field, Object, Row, Table, fixed, items, one
from . import openai_requests as requests
from .live import ERROR_CODES as LIVE_CODES
from .live import EVENT_ID, error_table, sound_of

TRANSCRIPTION: Final = "conversation.item.input_audio_transcription"
SPEECH_WORDS: Final = "response.output_audio_transcript.delta"
_ZERO: Final = Kind(
    read=lambda value, _: value.integer(0, 0), schema={"type": "integer", "const": 0}
)


def _zero(name: str, doc: str = "A response has one.") -> Field:
    return Field(name, _ZERO, 0, attr=DROPPED, get=Constant(0), doc=doc)


_, _TYPE, _ROLE, _STATUS, _CONTENT = requests.item_rows(items(requests.sent_part(), 1024))
_ID: Final = Field("id", TEXT, example="item_7b20d9c3a415")
_OBJECT: Final = fixed("object", "realtime.item")


def _call(status: oa.ItemStatus, doc: str) -> Table:
    return Table(
        oa.Item,
        _ID,
        _OBJECT,
        fixed("status", status),
        Field("call_id", TEXT, attr="call.id", example="call_0c9e41d7a355", doc="For its result."),
        Field("name", TEXT, attr="call.name", example="clock", doc="Of the tool."),
        Field("arguments", TEXT, attr="call.arguments", example="{}", doc=doc),
        tag={"type": "function_call"},
        make=lambda values: tools.tool_item({**values, "status": status}),
        doc="A call of a tool.",
    )


_NEW_CALL: Final = _call("in_progress", "Empty: they come.")
_CALL: Final = _call("completed", "A JSON object, as text.")
_MESSAGE: Final = Table(oa.Item, _ID, _OBJECT, _TYPE, _ROLE, _STATUS, _CONTENT)
_RESULT: Final = tools.result_item(_ID, _OBJECT, fixed("status", "completed"))
_ITEM: Final = Field("item", tools.any_item(_MESSAGE, _CALL, _RESULT))
_NEW_ITEM: Final = Table(
    oa.Item,
    _ID,
    _OBJECT,
    fixed("type", "message"),
    fixed("role", "assistant"),
    fixed("status", "in_progress"),
    requests.nothing("content"),
    make=lambda values: oa.Item(role="assistant", status="in_progress", **values),
)
_WHOLE_ITEM: Final = Table(
    oa.Item,
    _ID,
    _OBJECT,
    fixed("type", "message"),
    fixed("role", "assistant"),
    Field("status", choice(("completed", "incomplete"))),
    Field(
        "content", items(requests.sent_part(("output_text", "output_audio")), 1), (), attr="parts"
    ),
    make=lambda values: oa.Item(role="assistant", **values),
)
OUTPUT_MAX: Final = 1 + CALLS_OPEN_MAX
"""Items of a response: its speech, and the calls of one unit."""
PREVIOUS: Final = Field("previous_item_id", or_null(TEXT), None, attr="previous_id")


def _details(reply: oa.Reply) -> dict[str, object] | None:
    if reply.status == "in_progress" or (reply.status == "completed" and not reply.fault):
        return None
    details: dict[str, object] = {"type": reply.status}
    if reply.reason:
        details["reason"] = reply.reason
    if reply.fault:
        kind = "server_error"
        if reply.fault == ErrorCode.UNSUPPORTED:
            kind = "invalid_request_error"
        details["error"] = {"type": kind, "code": reply.fault, "message": reply.message}
    return details


def _usage(reply: oa.Reply) -> dict[str, object] | None:
    if reply.status == "in_progress":
        return None
    held, made = reply.input_tokens, reply.output_tokens
    return {"total_tokens": held + made, "input_tokens": held, "output_tokens": made}


def _made(values: dict[str, Any]) -> oa.Reply:
    details, usage = values.pop("details") or {}, values.pop("usage") or {}
    error = details.get("error") or {}
    return oa.Reply(
        reason=details.get("reason") or "",
        fault=error.get("code") or "",
        message=error.get("message") or "",
        output_tokens=usage.get("output_tokens") or 0,
        input_tokens=usage.get("input_tokens") or 0,
        **values,
    )


_ANY: Final = Kind(
    read=lambda value, _: value.value if isinstance(value.value, dict) else {},
    schema={"type": ["object", "null"]},
)
_ALWAYS: Final = (
    Field("output_modalities", requests.MODALITY, attr="modality", example=["audio"]),
    Field(
        "max_output_tokens", requests.TOKENS, 0, attr="max_tokens", doc="Or `inf`.", example="inf"
    ),
    Field("conversation_id", or_null(TEXT), "", example="conv_7b20d9c3a415"),
    Field("metadata", or_null(requests.METADATA), None, example={"client_event_id": "evt_1"}),
)
_BEGUN: Final = Table(
    oa.Reply,
    Field("id", TEXT),
    fixed("object", "realtime.response"),
    fixed("status", "in_progress"),
    requests.null("status_details"),
    requests.nothing("output"),
    *_ALWAYS,
    requests.null("usage"),
)
_OVER: Final = Table(
    oa.Reply,
    Field("id", TEXT),
    fixed("object", "realtime.response"),
    Field("status", choice(("completed", "cancelled", "incomplete", "failed"))),
    Field(
        "status_details",
        _ANY,
        None,
        attr="details",
        get=_details,
        doc="Why it was cancelled, is incomplete, or failed; what of its request had no effect.",
    ),
    Field("output", items(tools.any_item(_WHOLE_ITEM, _CALL), OUTPUT_MAX), (), attr="items"),
    *_ALWAYS,
    Field("usage", _ANY, None, get=_usage, doc="Tokens that the model held before, and generated."),
    make=_made,
)


def _input(kind: str, *rows: Field) -> Table:
    tag = {"type": f"input_audio_buffer.{kind}"}
    return Table(oa.InputStep, EVENT_ID, *rows, tag=tag, lacks={"kind": kind})


_INPUT_ITEM: Final = Field("item_id", TEXT)


def conversation(kind: str, *rows: Row) -> Table:
    """Make the table of a step of an item."""
    tag = {"type": f"conversation.item.{kind}"}
    return Table(oa.ItemStep, EVENT_ID, *rows, tag=tag, lacks={"kind": kind})


_OF_RESPONSE: Final = (EVENT_ID, Field("response_id", TEXT), _zero("output_index"))
_PLACED: Final = (*_OF_RESPONSE[:2], Field("output_index", INTEGER, 0, attr="index"))
_OF_ITEM: Final = Field(
    "item_id",
    TEXT,
    "",
    attr=DROPPED,
    get=lambda step: oa.item_of(step.response_id),
    example="item_7b20d9c3a415",
    doc="The response's item.",
)
_OF_PART: Final = (*_OF_RESPONSE, _OF_ITEM, _zero("content_index"))


def _step(kind: str, name: str, *rows: Any) -> Table:
    return Table(oa.ReplyStep, *rows, tag={"type": f"response.{name}"}, lacks={"kind": kind})


def _part_of(step: oa.ReplyStep) -> dict[str, object]:
    is_sound = step.modality == "audio"
    return {"type": step.modality, "transcript" if is_sound else "text": step.text}


def _part(kind: str, name: str) -> Table:
    row = Field(
        "part",
        _ANY,
        None,
        attr="part",
        get=_part_of,
        doc="Its type, audio or text, and its transcript or text.",
    )
    return Table(
        oa.ReplyStep,
        *_OF_PART,
        row,
        tag={"type": f"response.{name}"},
        make=lambda values: _made_part(kind, values),
    )


def _made_part(kind: Any, values: dict[str, Any]) -> oa.ReplyStep:
    part = values.pop("part") or {}
    modality: oa.Modality = "text" if part.get("type") == "text" else "audio"
    text = part.get("transcript") or part.get("text") or ""
    return oa.ReplyStep(kind=kind, modality=modality, text=text, **values)


_UNTOLD: Final = {
    "session_id": "",
    "input_id": "",
    "metrics": Metrics(kv_cache_length=0, recording="off"),
    "end_of_turn": False,
}
"""A unit's facts without a field."""
WORDS: Final = Table(
    Speech,
    *_OF_PART,
    Field("delta", TEXT, attr="text"),
    tag={"type": SPEECH_WORDS},
    lacks={**_UNTOLD, "pcm": b""},
)
SOUND: Final = Table(
    Speech,
    *_OF_PART,
    Field(
        "delta",
        Kind(
            read=lambda value, _: to_float32(value.pcm16()),
            write=encode_base64,
            schema=base64_of(PCM16),
        ),
        attr="pcm",
        get=sound_of,
    ),
    tag={"type": "response.output_audio.delta"},
    lacks={**_UNTOLD, "text": ""},
)


def _of_call(kind: Any, name: str, *rows: Field) -> Table:
    def make(values: dict[str, Any]) -> oa.ReplyStep:
        own = {key.removeprefix("item."): values.pop(key) for key in list(values) if "." in key}
        return oa.ReplyStep(kind=kind, item=tools.tool_item({"call.name": "", **own}), **values)

    return Table(
        oa.ReplyStep,
        *_PLACED,
        Field("item_id", TEXT, attr="item.id", example="item_7b20d9c3a415", doc="The call's item."),
        Field("call_id", TEXT, attr="item.call.id", example="call_0c9e41d7a355", doc="The call."),
        *rows,
        tag={"type": f"response.function_call_arguments.{name}"},
        make=make,
    )


def _arguments(name: str) -> Field:
    return Field(
        name, TEXT, attr="item.call.arguments", example="{}", doc="A JSON object, as text; whole."
    )


STEPS: Final = {
    "item_added": _step(
        "item_added",
        "output_item.added",
        *_PLACED,
        Field("item", tools.any_item(_NEW_ITEM, _NEW_CALL)),
    ),
    "item_done": _step(
        "item_done", "output_item.done", *_PLACED, Field("item", tools.any_item(_WHOLE_ITEM, _CALL))
    ),
    "part_added": _part("part_added", "content_part.added"),
    "part_done": _part("part_done", "content_part.done"),
    "audio_done": _step("audio_done", "output_audio.done", *_OF_PART),
    "transcript_done": _step(
        "transcript_done",
        "output_audio_transcript.done",
        *_OF_PART,
        Field("transcript", TEXT, attr="text"),
    ),
    "text_delta": _step(
        "text_delta", "output_text.delta", *_OF_PART, Field("delta", TEXT, attr="text")
    ),
    "text_done": _step("text_done", "output_text.done", *_OF_PART, Field("text", TEXT)),
    "call_delta": _of_call("call_delta", "delta", _arguments("delta")),
    "call_done": _of_call(
        "call_done",
        "done",
        Field("name", TEXT, attr="item.call.name", example="clock", doc="Of the tool."),
        _arguments("arguments"),
    ),
}
"""By the kind of a step."""
_SECONDS: Final = Kind(
    read=lambda value, _: round(value.number(0, 1e6) * MS_PER_S),
    write=lambda at_ms: at_ms / MS_PER_S,
    schema={"type": "number", "minimum": 0},
)
TRANSCRIPTS: Final = {
    "transcript_delta": Table(
        oa.InputStep,
        EVENT_ID,
        _INPUT_ITEM,
        _zero("content_index"),
        Field("delta", TEXT, attr="text", doc="A piece of the transcript."),
        tag={"type": f"{TRANSCRIPTION}.delta"},
        lacks={"kind": "transcript_delta"},
    ),
    "transcript_done": Table(
        oa.InputStep,
        EVENT_ID,
        _INPUT_ITEM,
        _zero("content_index"),
        Field("transcript", TEXT, attr="text", doc="The whole transcript."),
        Object(
            "usage",
            fixed("type", "duration"),
            Field("seconds", _SECONDS, attr="at_ms", example=1.5),
            doc="How long it was.",
        ),
        tag={"type": f"{TRANSCRIPTION}.completed"},
        lacks={"kind": "transcript_done"},
    ),
}
INPUTS: Final = {
    "speech_started": _input(
        "speech_started", _INPUT_ITEM, Field("audio_start_ms", INTEGER, attr="at_ms")
    ),
    "speech_stopped": _input(
        "speech_stopped", _INPUT_ITEM, Field("audio_end_ms", INTEGER, attr="at_ms")
    ),
    "timeout_triggered": _input(
        "timeout_triggered",
        _INPUT_ITEM,
        Field("audio_start_ms", INTEGER, attr="from_ms"),
        Field("audio_end_ms", INTEGER, attr="at_ms"),
    ),
    "committed": _input("committed", _INPUT_ITEM, PREVIOUS),
    "cleared": _input("cleared"),
    **TRANSCRIPTS,
}
FAILED: Final = Table(
    oa.InputStep,
    EVENT_ID,
    _INPUT_ITEM,
    _zero("content_index"),
    Object(
        "error",
        fixed("type", "server_error"),
        Field("code", TEXT, attr="fault", example="inference_error"),
        Field("message", TEXT, attr="text", doc="The reason, for people."),
        doc="Why the transcription failed.",
    ),
    tag={"type": f"{TRANSCRIPTION}.failed"},
    lacks={"kind": "transcript_failed"},
)
ITEMS: Final = {
    "added": conversation(
        "added", PREVIOUS, Field("item", tools.any_item(_MESSAGE, _NEW_CALL, _RESULT))
    ),
    "done": conversation("done", PREVIOUS, _ITEM),
    "retrieved": conversation("retrieved", _ITEM),
}


def _response(table: Table, kind: str) -> Table:
    row = Field("response", one(table), attr="reply")
    return Table(oa.ReplyState, EVENT_ID, row, tag={"type": f"response.{kind}"})


BEGAN: Final = _response(_BEGUN, "created")
DONE: Final = _response(_OVER, "done")
_NEVER: Final = frozenset({ErrorCode.INVALID_EVENT, ErrorCode.WORKER_CONNECT_FAILED})
"""Every event has its place at all times, and the model is opened in a session that is there."""
ERROR_CODES: Final = (
    *(code for code in LIVE_CODES if code not in _NEVER),
    *(code for code in ErrorCode if code in OPENAI_ERRORS),
    *(ErrorCode.INVALID_JSON, ErrorCode.INVALID_FRAME, ErrorCode.BUFFER_FULL),
)
_LIMITS: Final = items(
    one(
        Table(
            oa.RateLimit,
            Field("name", choice(("requests", "tokens"))),
            Field("limit", INTEGER),
            Field("remaining", INTEGER),
            Field("reset_seconds", INTEGER, attr="reset_s"),
        )
    ),
    1,
)


def _wait(queued: Queued) -> tuple[oa.RateLimit]:
    place = queued.place
    limit, wait_s = place.queue_length, place.estimated_wait_s
    return (oa.RateLimit(name="requests", limit=limit, remaining=0, reset_s=wait_s),)


WAITS: Final = Table(
    Queued,
    EVENT_ID,
    Field(
        "rate_limits",
        _LIMITS,
        attr=DROPPED,
        get=_wait,
        doc="One: of sessions, or of the tokens of the model's context.",
    ),
    tag={"type": "rate_limits.updated"},
    lacks={"place": QueuePlace(position=0, estimated_wait_s=0, ticket_id="", queue_length=0)},
)
"""The session waits for its slot: all SDKs know this event, and none fails at it."""
LEFT: Final = Table(
    oa.RateLimit,
    EVENT_ID,
    Field("rate_limits", _LIMITS, attr="limits", get=lambda left: (left,), doc="The same."),
    tag={"type": WAITS.kind},
    make=lambda values: values["limits"][0],
)
CREATED: Final = Table(
    oa.ConversationCreated,
    EVENT_ID,
    Object(
        "conversation",
        Field("id", TEXT, example="conv_7b20d9c3a415"),
        fixed("object", "realtime.conversation"),
        doc="The conversation.",
    ),
    tag={"type": "conversation.created"},
)
ANSWERS: Final = (
    WAITS,
    LEFT,
    CREATED,
    Table(
        Created,
        EVENT_ID,
        requests.SESSION,
        tag={"type": "session.created"},
        lacks={"session_id": "", "prompt_length": 0, "recording": "off"},
    ),
    Table(oa.Configured, EVENT_ID, requests.SESSION, tag={"type": "session.updated"}),
    *INPUTS.values(),
    FAILED,
    *ITEMS.values(),
    Table(
        oa.ItemDeleted, EVENT_ID, Field("item_id", TEXT), tag={"type": "conversation.item.deleted"}
    ),
    Table(
        oa.ItemTruncated,
        EVENT_ID,
        Field("item_id", TEXT),
        Field("content_index", INTEGER),
        Field("audio_end_ms", INTEGER),
        tag={"type": "conversation.item.truncated"},
    ),
    BEGAN,
    *STEPS.values(),
    WORDS,
    SOUND,
    DONE,
    error_table(ERROR_CODES, "event_id"),
)
