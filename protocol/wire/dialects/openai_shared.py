"""What the dialects of OpenAI's realtime APIs share: `live`, `openai` and `vllm-omni`.

- Fields and words of the API that have no effect here, or are refused by their name.
- Functions that a session offers; items and their parts; responses and their steps.
- A call of a tool comes whole: its arguments are one piece, for what a model writes is not JSON,
  and is read when it is closed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast, get_args

import attrs

from ...values import errors, limits, model
from ...values import messages as ms
from ...values import openai as oa
from ...values.behaviour import DUPLEX_TOOLS, LENIENT_SETTINGS, TAKES_TOOLS
from ...values.errors import invalid
from .. import codec as c
from ..audio import compress, to_float32, to_pcm16
from ..table import (
    DROPPED,
    Constant,
    Field,
    Items,
    Object,
    ObjectType,
    Row,
    Table,
    Variants,
    checked,
    computed,
    fixed,
    items,
    one,
    typed,
)
from . import shared
from .chat import DESCRIPTION, NAME, SCHEMA

EMPTY: Final = "Must be empty here."
CLOSED: Final = errors.ErrorCode.UNKNOWN_PARAMETER
"""An unknown field is such an error."""
ANY: Final = c.FieldType(read=lambda value, _: value.value, schema={})
ID: Final = c.text(limits.INPUT_ID_CHARS_MAX, 1, holds=c.NAMED)
ITEM_EXAMPLE: Final = "item_7b20d9c3a415"
CALL_EXAMPLE: Final = "call_0c9e41d7a355"

# -- what is not offered --------------------------------------------------------------------------


def ignored(name: str, why: str = "Ignored.", holds: c.UserContent | None = c.USER_TEXT) -> Field:
    """A field of the API that changes nothing here."""
    kind = c.FieldType(read=lambda *_: None, schema={}, holds=holds)
    return checked(name, kind, why)


def unsupported(path: str, what: str) -> errors.FieldError:
    """Make the error for a value or event of the API that is not offered here."""
    return errors.FieldError(errors.ErrorCode.UNSUPPORTED, f"{path}: {what}")


def offered(kind: c.FieldType, what: str, *values: object, **schema: object) -> c.FieldType:
    """A kind of which only some values are offered; `what` is the error for any other."""

    def read(value: c.Value, at: c.ParseState) -> object:
        found: object = kind.read(value, at)
        if found not in values:
            raise unsupported(value.path, what)
        return found

    return c.FieldType(read=read, schema=schema)


def only(options: tuple[str, ...], word: str, what: str, *more: str) -> c.FieldType:
    """A word of the API of which only one is offered here, and `more` that mean the same."""
    kind = offered(c.choice(options), what, word, *more)
    schema = c.choice((word, *more)).schema
    return c.FieldType(read=lambda value, at: kind.read(value, at) and word, schema=schema)


def empty(what: str) -> c.FieldType:
    """A list of the API that must be empty here."""
    kind = c.FieldType(read=lambda value, _: value.items(1024), schema={})
    return offered(kind, what, (), type="array", const=[])


def until(number: int, old: c.FieldType, new: c.FieldType) -> c.FieldType:
    """A kind that sessions before a behaviour number read as another one."""
    return attrs.evolve(
        new, read=lambda value, at: (new if at.context.behaves(number) else old).read(value, at)
    )


def word(name: str, kind: c.FieldType, always: str, doc: str, **columns: Any) -> Field:
    """A required field that is always written as the same word."""
    return Field(name, kind, attr=DROPPED, get=Constant(always), doc=doc, **columns)


def null(name: str) -> Field:
    """A field that is always null."""
    kind = c.FieldType(read=lambda *_: None, schema={"type": "null"})
    return computed(name, kind, get=Constant(None), doc="Always null.")


def nothing(name: str) -> Field:
    """An array that is always empty."""
    kind = c.FieldType(read=lambda *_: (), schema={"type": "array", "const": []})
    return Field(name, kind, (), attr=DROPPED, get=lambda _: [], doc="Empty.")


# -- events and errors ----------------------------------------------------------------------------

EVENT: Final = '"event_id":"event_000000000000"'
"""The field of a frame that no session has sent; a session puts its own id there."""
EVENT_ID: Final = computed(
    "event_id",
    c.TEXT,
    Constant("event_000000000000"),
    example="event_7b20d9c3a415",
    rank=-1,
    doc="The event.",
)
ANY_EVENT_ID: Final = ignored("event_id")
ERROR_CODES: Final = tuple(
    code
    for code in errors.ErrorCode
    if code not in errors.TRANSCRIPTION_ERRORS | errors.OPENAI_ERRORS
    or code is errors.ErrorCode.MODEL_NOT_FOUND
)
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
    kind = c.choice(("invalid_request_error", "server_error"))
    rows = (
        Field("code", c.choice(codes)),
        Field("message", c.TEXT),
        computed("type", kind, _fault, is_read=False, doc="Whose mistake it is."),
        computed("param", c.TEXT, _param, omit=True, example="session.audio.format"),
        "The path of the field that is wrong.",
        Field(cause, c.TEXT, "", attr="client_event_id", omit=True),
    )
    error = Object("error", *rows, is_required=True)
    return typed(ms.ErrorReport, shared.ERROR, EVENT_ID, error)


def sound_of(speech: ms.Speech) -> bytes:
    """The sound of a message, as its session writes it."""
    return compress(to_pcm16(speech.pcm), speech.coding)


def speech(words: Table, sound: Table, message: ms.Speech) -> tuple[Table, ...]:
    """The tables of a speaking second: its text comes first, if there is any."""
    if not message.text:
        return (sound,)
    return (words, sound) if message.pcm else (words,)


# -- functions that the client runs ---------------------------------------------------------------

CALLED: Final = "Functions that the client runs; called if the model can."
TOOL_TYPES: Final = (
    *("function", "mcp", "web_search", "file_search", "code_interpreter", "image_generation"),
    *("computer", "shell", "custom", "namespace", "tool_search", "programmatic_tool_calling"),
    "apply_patch",
)
"""Those of the API; only a function is a client's own."""
_PARAMETERS: Final = attrs.evolve(SCHEMA, schema={"type": "object", "additionalProperties": {}})


def _functions_of(types: tuple[str, ...], *more: Field) -> Items:
    """The kind of an array of functions, whose type is one of several."""
    doc = "Others than functions are left out." if more else "Always function."
    table = Table(
        model.Tool,
        computed("type", c.choice(types), Constant("function"), doc=doc),
        Field("name", NAME),
        DESCRIPTION,
        Field("parameters", _PARAMETERS, "", omit=True, example={"type": "object"}),
        *more,
    )
    return items(one(table), limits.TOOLS_MAX)


SENT_FUNCTIONS: Final = _functions_of(TOOL_TYPES[:1])
_ASKED: Final = _functions_of(TOOL_TYPES, checked("strict", c.FLAG, doc="Without effect."))


def _functions(value: c.Value, at: c.ParseState) -> tuple[model.Tool, ...]:
    """Read functions, and leave out tools that a server would call by itself."""
    found = [each for each in value.items(limits.TOOLS_MAX) if _is_function(each)]
    return tuple(_ASKED.item.read(each, at) for each in found)


def _is_function(tool: c.Value) -> bool:
    kind = c.as_object(tool.value, tool.path).get("type") or "function"
    return c.Value(path=f"{tool.path}.type", value=kind).choice(TOOL_TYPES) == "function"


FUNCTIONS: Final = attrs.evolve(_ASKED, read=_functions)
"""Functions of a session: flat, where those of chat are nested."""
TOOLS: Final = until(TAKES_TOOLS, empty("the model has no tools"), FUNCTIONS)
"""Functions that a client offers: they are returned, and called if the model can."""

# -- settings of a session, or of one response ----------------------------------------------------

MODALITIES: Final = ("audio", "text")
_TOKENS_MAX: Final = 1_000_000
"""More than any context holds."""
METADATA_MAX: Final = 16
METADATA_NAME_CHARS_MAX: Final = 64
METADATA_CHARS_MAX: Final = 512
"""As the API has them."""


def _modality(value: c.Value, _: c.ParseState) -> str:
    found = [each.choice(MODALITIES) for each in value.items(2)]
    if len(found) != 1:
        raise unsupported(value.path, 'there is ["audio"], speech with its transcript, or ["text"]')
    return found[0]


_MODALITY_ITEM: Final = {"type": "string", "enum": list(MODALITIES)}
MODALITY: Final = c.FieldType(
    read=_modality,
    write=lambda modality: None if modality is None else [modality],
    schema={"type": "array", "items": _MODALITY_ITEM, "minItems": 1, "maxItems": 1},
)
TOKENS: Final = c.FieldType(
    read=lambda value, _: 0 if value.value == "inf" else value.integer(1, _TOKENS_MAX),
    write=lambda most: most or "inf",
    schema={
        "type": ["integer", "string"],
        "minimum": 1,
        "maximum": _TOKENS_MAX,
        "pattern": "^inf$",
    },
)
"""A number of tokens; 0 is `inf`."""


def _metadata(value: c.Value, _: c.ParseState) -> oa.Metadata:
    found = c.as_object(value.value, value.path)
    if len(found) > METADATA_MAX:
        raise invalid(value.path, f"{len(found)} names, at most {METADATA_MAX} are allowed")
    for name, text in found.items():
        if len(name) > METADATA_NAME_CHARS_MAX:
            count = f"a name of {len(name)} characters"
            raise invalid(value.path, f"{count}, at most {METADATA_NAME_CHARS_MAX} are allowed")
        c.Value(path=f"{value.path}.?", value=text).text(METADATA_CHARS_MAX)
    return tuple(cast("Mapping[str, str]", found).items())


METADATA: Final = c.FieldType(
    read=_metadata,
    write=lambda pairs: None if pairs is None else dict(pairs),
    schema={
        "type": "object",
        "maxProperties": METADATA_MAX,
        "additionalProperties": {"type": "string", "maxLength": METADATA_CHARS_MAX},
    },
    holds=c.USER_TEXT,
)


def detection(kind: c.FieldType) -> c.FieldType:
    """The kind of a turn detection that may be null."""
    write = kind.write
    assert write is not None
    return attrs.evolve(
        kind,
        write=lambda value: None if value is None else write(value),
        schema={"type": ["object", "null"]},
    )


# -- items and their parts ------------------------------------------------------------------------

PARTS_OF: Final[Mapping[oa.ItemRole, tuple[oa.PartKind, ...]]] = {
    "user": ("input_text", "input_audio", "input_image"),
    "system": ("input_text",),
    "assistant": ("output_text", "output_audio"),
}
"""The parts that an item may have, by who said it."""
PART_KINDS: Final = get_args(oa.PartKind)
_TEXT: Final = c.text(limits.ITEM_CHARS_MAX, holds=c.USER_TEXT)
_NO_SOUND: Final = offered(
    ANY, "sound comes in input_audio_buffer.append", "", type="string", maxLength=0
)


def _part(values: dict[str, Any]) -> oa.Part:
    part = oa.Part(**values)  # only a picture has a picture
    return part if part.kind == "input_image" else attrs.evolve(part, picture=b"")


_PART: Final = Table(
    oa.Part,
    Field("type", c.choice(PART_KINDS), attr="kind"),
    Field("text", _TEXT, "", also=("transcript",), omit=True),
    Field("image_url", c.IMAGE_URL, b"", attr="picture", omit=True),
    "Of an input_image: a JPEG, PNG or WebP, as a data URL; 4 MiB, 20 megapixels at most.",
    checked("detail", c.choice(("auto", "low", "high")), "Without effect."),
    checked("audio", _NO_SOUND, EMPTY),
    make=_part,
)
_EMPTY_PARTS: Final[Mapping[oa.PartKind, dict[str, object]]] = {
    "input_text": {"text": ""},
    "output_text": {"text": ""},
    "input_audio": {"transcript": None},
    "output_audio": {"transcript": ""},
    "input_image": {},
}
"""What a part without text is sent with."""


def _text_of(part: oa.Part, *, is_sound: bool) -> str | None:
    return part.text or None if is_sound == part.kind.endswith("audio") else None


def sent_part(kinds: tuple[str, ...] = PART_KINDS) -> ObjectType:
    """Make the kind of a part of one of several kinds, as a server sends it."""
    text, transcript = (partial(_text_of, is_sound=is_sound) for is_sound in (False, True))
    table = Table(
        oa.Part,
        Field("type", c.choice(kinds), attr="kind"),
        Field("text", _TEXT, "", also=("transcript",), get=text, omit=True),
        Field(
            "transcript",
            c.or_null(_TEXT),
            "",
            attr=DROPPED,
            get=transcript,
            omit=True,
            is_read=False,
        ),
        "Of sound; null while it is not known.",
    )

    def write(part: oa.Part) -> dict[str, object]:
        is_bare = part.is_whole and not part.text
        return table.write(part) | (_EMPTY_PARTS[part.kind] if is_bare else {})

    return attrs.evolve(one(table), write=write)


_ROLE: Final = c.choice(("user", "assistant", "system"))


def _role(value: c.Value, _: c.ParseState) -> str:
    found = value.choice(("user", "assistant", "system", "developer"))
    return "system" if found == "developer" else found


_ASKED_ROLE: Final = until(
    LENIENT_SETTINGS,
    _ROLE,
    c.FieldType(read=_role, schema=c.choice((*PARTS_OF, "developer")).schema),
)
_OWN_ID: Final = Field("id", ID, "", omit=True, example=ITEM_EXAMPLE)
_ITEM_TYPES: Final = ("message", "function_call", "function_call_output")


def _item_rows(
    parts: c.FieldType, role: c.FieldType = _ROLE, other: str = "no tools"
) -> tuple[Field, ...]:
    """The rows of an item but its id; `other` is the error for one of tools."""
    return (
        word("type", only(_ITEM_TYPES, "message", other), "message", "Must be message here."),
        Field("role", role, doc="Who said it; `developer` is reported as `system`."),
        Field("status", c.choice(("completed", "incomplete", "in_progress")), "completed"),
        Field("content", parts, (), attr="parts"),
    )


OUTPUT: Final = "function_call_output"


def result_rows(at: str = "") -> tuple[Field, Field]:
    """The rows of what a tool returned, whose attributes are at a place in the value."""
    call_id = c.text(limits.CALL_ID_CHARS_MAX, 1)
    output = c.text(limits.INPUT_CHARS_MAX, holds=c.USER_TEXT)
    doc = "What the tool returned; the model gets it with the next second."
    return (
        Field("call_id", call_id, attr=f"{at}call_id", example=CALL_EXAMPLE, doc="The call."),
        Field("output", output, attr=f"{at}output", example="half past nine", doc=doc),
    )


def _result_item(*rows: Field) -> Table:
    """Make the table of an item that is the result of a call; its first rows differ."""
    rows = (*rows, *result_rows("call."))
    return typed(oa.Item, OUTPUT, *rows, make=_tool_item, doc="The result of a call.")


def _tool_item(values: dict[str, Any]) -> oa.Item:
    """Make an item of a call, or of a result, from its attributes."""
    called = {name: value for name, value in values.items() if name.startswith("call.")}
    own = {name: value for name, value in values.items() if name not in called}
    part = {name.removeprefix("call."): value for name, value in called.items()}
    if "output" in part:
        return oa.Item(role="user", call=model.ToolResult(**part), **own)
    return oa.Item(role="assistant", call=model.ToolCall(**part), **own)


def _any_item(message: Table, *others: Table) -> Variants:
    """The kind of an item that is a message, or belongs to tools."""
    tables = {"message": message, **{table.kind: table for table in others}}

    def read(value: c.Value, at: c.ParseState) -> Any:
        kind = c.as_object(value.value, value.path).get("type")
        table = tables.get(kind) if isinstance(kind, str) else None
        return (table or message).parse_below(value, at)

    def write(item: oa.Item) -> dict[str, object]:
        kinds = {model.ToolCall: "function_call", model.ToolResult: OUTPUT}
        return tables[kinds.get(type(item.call), "message")].write(item)

    return Variants(read=read, write=write, schema={}, tag="type", tables=tables)


_PARTS: Final = items(one(_PART), limits.ITEM_PARTS_MAX)
_MADE_BY_MODEL: Final = "only the model makes calls"
ASKED_ITEM: Final = until(
    DUPLEX_TOOLS,
    one(Table(oa.Item, _OWN_ID, *_item_rows(_PARTS, _ASKED_ROLE))),
    _any_item(
        Table(oa.Item, _OWN_ID, *_item_rows(_PARTS, _ASKED_ROLE, _MADE_BY_MODEL)),
        _result_item(_OWN_ID, ignored("status", holds=None)),
    ),
)


# -- items as they are sent -----------------------------------------------------------------------

_ID: Final = Field("id", c.TEXT, example=ITEM_EXAMPLE)
OBJECT: Final = fixed("object", "realtime.item")
_SPOKEN: Final = (_ID, OBJECT, fixed("type", "message"), fixed("role", "assistant"))


def _call(status: oa.ItemStatus, doc: str) -> Table:
    return typed(
        oa.Item,
        "function_call",
        _ID,
        OBJECT,
        fixed("status", status),
        Field("call_id", c.TEXT, attr="call.id", example=CALL_EXAMPLE, doc="For its result."),
        Field("name", c.TEXT, attr="call.name", example="clock", doc="Of the tool."),
        Field("arguments", c.TEXT, attr="call.arguments", example="{}", doc=doc),
        make=lambda values: _tool_item({**values, "status": status}),
        doc="A call of a tool.",
    )


_NEW_CALL: Final = _call("in_progress", "Empty: they come.")
_CALL: Final = _call("completed", "A JSON object, as text.")
_MESSAGE: Final = Table(oa.Item, _ID, OBJECT, *_item_rows(items(sent_part(), 1024)))
_RESULT: Final = _result_item(_ID, OBJECT, fixed("status", "completed"))
_NEW_ITEM: Final = Table(
    oa.Item,
    *_SPOKEN,
    fixed("status", "in_progress"),
    nothing("content"),
    make=lambda values: oa.Item(role="assistant", status="in_progress", **values),
)
_WHOLE_ITEM: Final = Table(
    oa.Item,
    *_SPOKEN,
    Field("status", c.choice(("completed", "incomplete"))),
    Field("content", items(sent_part(("output_text", "output_audio")), 1), (), attr="parts"),
    make=lambda values: oa.Item(role="assistant", **values),
)
PREVIOUS: Final = Field("previous_item_id", c.or_null(c.TEXT), None, attr="previous_id")


def by_kind(cls: type, prefix: str, **rows: tuple[Row | str, ...]) -> dict[str, Table]:
    """Make the tables of a message of several kinds, with which their types end."""
    return {
        kind: typed(cls, f"{prefix}.{kind}", EVENT_ID, *own, lacks={"kind": kind})
        for kind, own in rows.items()
    }


ITEMS: Final = by_kind(
    oa.ItemStep,
    "conversation.item",
    added=(PREVIOUS, Field("item", _any_item(_MESSAGE, _NEW_CALL, _RESULT))),
    done=(PREVIOUS, Field("item", _any_item(_MESSAGE, _CALL, _RESULT))),
    retrieved=(Field("item", _any_item(_MESSAGE, _CALL, _RESULT)),),
)
DELETED: Final = typed(
    oa.ItemDeleted, "conversation.item.deleted", EVENT_ID, Field("item_id", c.TEXT)
)
TRUNCATED: Final = typed(
    oa.ItemTruncated,
    "conversation.item.truncated",
    EVENT_ID,
    Field("item_id", c.TEXT),
    Field("content_index", c.INTEGER),
    Field("audio_end_ms", c.INTEGER),
)

# -- the client's sound, as it becomes items ------------------------------------------------------

_ZERO: Final = c.FieldType(
    read=lambda value, _: value.integer(0, 0), schema={"type": "integer", "const": 0}
)


def _zero(name: str) -> Field:
    return Field(name, _ZERO, 0, attr=DROPPED, get=Constant(0), doc="A response has one.")


_TRANSCRIPTION: Final = "conversation.item.input_audio_transcription"
_INPUT_ITEM: Final = Field("item_id", c.TEXT)
_SECONDS: Final = c.FieldType(
    read=lambda value, _: round(value.number(0, 1e6) * limits.MS_PER_S),
    write=lambda at_ms: at_ms / limits.MS_PER_S,
    schema={"type": "number", "minimum": 0},
)


def _transcript(kind: str, end: str, *rows: Row | str) -> Table:
    rows = (EVENT_ID, _INPUT_ITEM, _zero("content_index"), *rows)
    return typed(oa.InputStep, f"{_TRANSCRIPTION}.{end}", *rows, lacks={"kind": kind})


INPUTS: Final = {
    **by_kind(
        oa.InputStep,
        "input_audio_buffer",
        speech_started=(_INPUT_ITEM, Field("audio_start_ms", c.INTEGER, attr="at_ms")),
        speech_stopped=(_INPUT_ITEM, Field("audio_end_ms", c.INTEGER, attr="at_ms")),
        timeout_triggered=(
            _INPUT_ITEM,
            Field("audio_start_ms", c.INTEGER, attr="from_ms"),
            Field("audio_end_ms", c.INTEGER, attr="at_ms"),
        ),
        committed=(_INPUT_ITEM, PREVIOUS),
        cleared=(),
    ),
    "transcript_delta": _transcript(
        "transcript_delta",
        "delta",
        Field("delta", c.TEXT, attr="text", doc="A piece of the transcript."),
    ),
    "transcript_done": _transcript(
        "transcript_done",
        "completed",
        Field("transcript", c.TEXT, attr="text", doc="The whole transcript."),
        Object(
            "usage",
            fixed("type", "duration"),
            Field("seconds", _SECONDS, attr="at_ms", example=1.5),
            doc="How long it was.",
        ),
    ),
    "transcript_failed": _transcript(
        "transcript_failed",
        "failed",
        Object(
            "error",
            fixed("type", "server_error"),
            Field("code", c.TEXT, attr="fault", example="inference_error"),
            Field("message", c.TEXT, attr="text", doc="The reason, for people."),
            doc="Why the transcription failed.",
        ),
    ),
}
"""By the kind of a step."""

# -- responses ------------------------------------------------------------------------------------

OUTPUT_MAX: Final = 1 + limits.CALLS_OPEN_MAX
"""Items of a response: its speech, and the calls of one unit."""
_NULLABLE: Final = c.FieldType(
    read=lambda value, _: value.value if isinstance(value.value, dict) else {},
    schema={"type": ["object", "null"]},
)


def _details(response: oa.RealtimeResponse) -> dict[str, object] | None:
    if response.status == "in_progress" or (response.status == "completed" and not response.fault):
        return None
    details: dict[str, object] = {"type": response.status}
    if response.reason:
        details["reason"] = response.reason
    if response.fault:
        is_client = response.fault == errors.ErrorCode.UNSUPPORTED
        kind = "invalid_request_error" if is_client else "server_error"
        details["error"] = {"type": kind, "code": response.fault, "message": response.message}
    return details


def _usage(response: oa.RealtimeResponse) -> dict[str, object] | None:
    if response.status == "in_progress":
        return None
    held, made = response.input_tokens, response.output_tokens
    return {"total_tokens": held + made, "input_tokens": held, "output_tokens": made}


def _made(values: dict[str, Any]) -> oa.RealtimeResponse:
    details, usage = values.pop("details") or {}, values.pop("usage") or {}
    error = details.get("error") or {}
    return oa.RealtimeResponse(
        reason=details.get("reason") or "",
        fault=error.get("code") or "",
        message=error.get("message") or "",
        output_tokens=usage.get("output_tokens") or 0,
        input_tokens=usage.get("input_tokens") or 0,
        **values,
    )


_RESPONSE: Final = (Field("id", c.TEXT), fixed("object", "realtime.response"))
_ALWAYS: Final = (
    Field("output_modalities", MODALITY, attr="modality", example=["audio"]),
    Field("max_output_tokens", TOKENS, 0, attr="max_tokens", doc="Or `inf`.", example="inf"),
    Field("conversation_id", c.or_null(c.TEXT), "", example="conv_7b20d9c3a415"),
    Field("metadata", c.or_null(METADATA), None, example={"client_event_id": "evt_1"}),
)
_BEGUN: Final = Table(
    oa.RealtimeResponse,
    *_RESPONSE,
    fixed("status", "in_progress"),
    null("status_details"),
    nothing("output"),
    *_ALWAYS,
    null("usage"),
)
_OVER: Final = Table(
    oa.RealtimeResponse,
    *_RESPONSE,
    Field("status", c.choice(("completed", "cancelled", "incomplete", "failed"))),
    Field("status_details", _NULLABLE, None, attr="details", get=_details),
    "Why it was cancelled, is incomplete, or failed; what of its request had no effect.",
    Field("output", items(_any_item(_WHOLE_ITEM, _CALL), OUTPUT_MAX), (), attr="items"),
    *_ALWAYS,
    Field("usage", _NULLABLE, None, get=_usage),
    "Tokens that the model held before, and generated.",
    make=_made,
)
BEGAN, DONE = (
    typed(oa.ReplyState, f"response.{kind}", EVENT_ID, Field("response", one(table)))
    for kind, table in (("created", _BEGUN), ("done", _OVER))
)

# -- the steps of a response ----------------------------------------------------------------------

_OF_RESPONSE: Final = (EVENT_ID, Field("response_id", c.TEXT))
_PLACED: Final = (*_OF_RESPONSE, Field("output_index", c.INTEGER, 0, attr="index"))
_OF_PART: Final = (
    *_OF_RESPONSE,
    _zero("output_index"),
    Field(
        "item_id",
        c.TEXT,
        "",
        attr=DROPPED,
        get=lambda step: oa.item_of(step.response_id),
        example=ITEM_EXAMPLE,
    ),
    "The response's item.",
    _zero("content_index"),
)
_OF_CALL: Final = (
    *_PLACED,
    Field("item_id", c.TEXT, attr="item.id", example=ITEM_EXAMPLE, doc="The call's item."),
    Field("call_id", c.TEXT, attr="item.call.id", example=CALL_EXAMPLE, doc="The call."),
)
_PART_OBJECT: Final = Field(
    "part",
    _NULLABLE,
    None,
    get=lambda step: {
        "type": step.modality,
        "transcript" if step.modality == "audio" else "text": step.text,
    },
    doc="Its type, audio or text, and its transcript or text.",
)
_WHAT: Final = {
    "item": "output_item",
    "part": "content_part",
    "audio": "output_audio",
    "transcript": "output_audio_transcript",
    "text": "output_text",
    "call": "function_call_arguments",
}
"""How the API names the parts of a response, by the first word of a step's kind."""


def _arguments(name: str) -> Field:
    doc = "A JSON object, as text; whole."
    return Field(name, c.TEXT, attr="item.call.arguments", example="{}", doc=doc)


def _step_of(values: dict[str, Any]) -> oa.ReplyStep:
    """Make a step: that of a part has an object in it, that of a call an item."""
    part = values.pop("part", None) or {}
    if values["kind"].startswith("part"):
        values["modality"] = "text" if part.get("type") == "text" else "audio"
        values["text"] = part.get("transcript") or part.get("text") or ""
    elif values["kind"].startswith("call"):
        own = {key.removeprefix("item."): values.pop(key) for key in [*values] if "." in key}
        values["item"] = _tool_item({"call.name": "", **own})
    return oa.ReplyStep(**values)


def _step(kind: str, *rows: Row | str) -> Table:
    what, step = kind.split("_")
    name = f"response.{_WHAT[what]}.{step}"
    return typed(oa.ReplyStep, name, *rows, lacks={"kind": kind}, make=_step_of)


STEPS: Final = {
    kind: _step(kind, *rows)
    for kind, rows in {
        "item_added": (*_PLACED, Field("item", _any_item(_NEW_ITEM, _NEW_CALL))),
        "item_done": (*_PLACED, Field("item", _any_item(_WHOLE_ITEM, _CALL))),
        "part_added": (*_OF_PART, _PART_OBJECT),
        "part_done": (*_OF_PART, _PART_OBJECT),
        "audio_done": _OF_PART,
        "transcript_done": (*_OF_PART, Field("transcript", c.TEXT, attr="text")),
        "text_delta": (*_OF_PART, Field("delta", c.TEXT, attr="text")),
        "text_done": (*_OF_PART, Field("text", c.TEXT)),
        "call_delta": (*_OF_CALL, _arguments("delta")),
        "call_done": (
            *_OF_CALL,
            Field("name", c.TEXT, attr="item.call.name", example="clock", doc="Of the tool."),
            _arguments("arguments"),
        ),
    }.items()
}
"""By the kind of a step."""
NO_METRICS: Final = ms.Metrics(kv_cache_length=0, recording="off")
_UNSENT: Final = {
    **dict.fromkeys(("session_id", "input_id"), ""),
    "metrics": NO_METRICS,
    "end_of_turn": False,
}
"""A unit's facts without a field."""
WORDS: Final = typed(
    ms.Speech,
    "response.output_audio_transcript.delta",
    *_OF_PART,
    Field("delta", c.TEXT, attr="text"),
    lacks={**_UNSENT, "pcm": b""},
)
_PCM: Final = c.FieldType(
    read=lambda value, _: to_float32(value.pcm16()),
    write=c.encode_base64,
    schema=c.base64_of(c.PCM16),
)
SOUND: Final = typed(
    ms.Speech,
    "response.output_audio.delta",
    *_OF_PART,
    Field("delta", _PCM, attr="pcm", get=sound_of),
    lacks={**_UNSENT, "text": ""},
)
