"""What a client of `openai` says: its settings, its sound, items, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast, get_args

import attrs

from ...values import behaviour
from ...values import openai as oa
from ...values.limits import INPUT_ID_CHARS_MAX, ITEM_CHARS_MAX, ITEM_PARTS_MAX, MS_PER_S
from ...values.model import CODINGS, G711_RATE_HZ, rate_of
from ...values.requests import AppendSound, Request
from .. import kinds as k
from ..codec import Fields, Reading, Value, as_object, invalid
from ..dialects import openai_tools as tools
from ..dialects import shared
from ..table import (
    DROPPED,
    Constant,
    Field,
    Object,
    One,
    Row,
    Table,
    checked,
    computed,
    fixed,
    items,
    one,
    optional,
)
from .chat import SENT_FUNCTIONS
from .live import CLOSED, EMPTY, TOOLS, empty, ignored, only, unsupported, until
from .shared import PROMPT

MODALITIES: Final = ("audio", "text")
IDLE_MS_MAX: Final = 3600 * MS_PER_S
"""A session lasts no longer."""
SILENCE_MS_MAX: Final = 10 * MS_PER_S
"""A longer pause ends a turn of any speaker."""
_VOICE_CHARS_MAX: Final = 64


def lacking(what: str, nothing: object, **schema: object) -> k.Kind:
    """A field of the API that must be empty here."""

    def read(value: Value, _: Reading) -> None:
        if value.value != nothing:
            raise unsupported(value.path, what)

    return k.Kind(read=read, schema=schema)


ANY_EVENT_ID: Final = ignored("event_id")


def _modality(value: Value, _: Reading) -> str:
    found = [each.choice(MODALITIES) for each in value.items(2)]
    if len(found) != 1:
        raise unsupported(value.path, 'there is ["audio"], speech with its transcript, or ["text"]')
    return found[0]


MODALITY: Final = k.Kind(
    read=_modality,
    write=lambda modality: None if modality is None else [modality],
    schema={
        "type": "array",
        "items": {"type": "string", "enum": list(MODALITIES)},
        "minItems": 1,
        "maxItems": 1,
    },
)
_NAME: Final = k.text(_VOICE_CHARS_MAX, 1, holds=k.VOICE_NAMED)


def _voice(value: Value, at: Reading) -> str:
    if at.context.behaves(behaviour.LENIENT_SETTINGS) and isinstance(value.value, dict):
        value = Fields(value.value, value.path).required("id", lambda name: name)
    name: str = _NAME.read(value, at)
    return name


_VOICE: Final = attrs.evolve(_NAME, read=_voice)


_TOKENS_MAX: Final = 1_000_000
"""More than any context holds."""


def _inf(value: Value, _: Reading) -> None:
    if value.value != "inf":
        raise unsupported(value.path, "the length of a response has no bound here")


def _tokens(value: Value, _: Reading) -> int:
    return 0 if value.value == "inf" else value.integer(1, _TOKENS_MAX)


TOKENS: Final = k.Kind(
    read=_tokens,
    write=lambda most: most or "inf",
    schema={
        "type": ["integer", "string"],
        "minimum": 1,
        "maximum": _TOKENS_MAX,
        "pattern": "^inf$",
    },
)
"""A number of tokens; 0 is `inf`."""
_INF: Final = until(behaviour.LENIENT_SETTINGS, k.Kind(read=_inf, schema={}), TOKENS)
_SPEED: Final = until(behaviour.LENIENT_SETTINGS, k.number(1, 1), k.number(0.25, 1.5))
_EAGERNESS: Final = ("low", "medium", "high", "auto")
_NO_SPEED: Final = "Without effect: the model decides how fast it speaks."
_NO_PROMPT: Final = lacking("there are no stored prompts", {}, type="object", const={})


def _choice(value: Value, _: Reading) -> None:
    if value.value not in ("auto", "none"):
        raise unsupported(value.path, "the model has no tools")


_NO_CHOICE: Final = k.Kind(read=_choice, schema=k.choice(("auto", "none")).schema)
_CHOICE: Final = k.Kind(
    read=lambda value, _: "none" if value.value == "none" else "auto", schema={}
)
_PARALLEL: Final = k.Kind(read=lambda value, _: value.value is not False, schema={})


def _rate(value: Value, at: Reading) -> None:
    coding = at.body.get("type") if at.context.behaves(behaviour.LENIENT_SETTINGS) else None
    rate_hz = rate_of(coding) if coding in CODINGS else 24_000
    value.integer(rate_hz, rate_hz)


_RATE: Final = k.Kind(read=_rate, schema={"type": "integer", "enum": [24_000, G711_RATE_HZ]})


def _format(attr: str) -> tuple[Field, ...]:
    return (
        optional("type", k.choice(CODINGS), attr=attr, doc="PCM16, or G.711."),
        checked("rate", _RATE, doc="24000; of G.711 8000."),
    )


def detection(kind: k.Kind) -> k.Kind:
    """The kind of a turn detection that may be null."""
    write = kind.write
    assert write is not None
    return attrs.evolve(
        kind,
        write=lambda value: None if value is None else write(value),
        schema={"type": ["object", "null"]},
    )


_IDLE: Final = k.integer(MS_PER_S, IDLE_MS_MAX)


def _idle(value: Value, at: Reading) -> int:
    is_read = at.context.behaves(behaviour.IDLE_TURNS) and at.body.get("type") == "server_vad"
    return int(_IDLE.read(value, at)) if is_read else 0


_DETECTION: Final = (
    Field("type", k.choice(("server_vad", "semantic_vad")), attr="kind"),
    Field("threshold", k.number(0, 1), 0.5, omit=True, example=0.5),
    Field(
        "prefix_padding_ms",
        k.integer(0, SILENCE_MS_MAX),
        300,
        attr="prefix_ms",
        omit=True,
        example=300,
    ),
    Field(
        "silence_duration_ms",
        k.integer(100, SILENCE_MS_MAX),
        500,
        attr="silence_ms",
        omit=True,
        example=500,
    ),
    Field("create_response", k.FLAG, True, attr="creates"),
    Field("interrupt_response", k.FLAG, True, attr="interrupts"),
    checked(
        "eagerness",
        until(
            behaviour.LENIENT_SETTINGS,
            only(_EAGERNESS, "auto", "the model decides when to answer", "medium"),
            k.choice(_EAGERNESS),
        ),
        doc="Without effect: the model decides when to answer.",
    ),
)
DETECTION: Final = Table(
    oa.TurnDetection,
    *_DETECTION,
    optional(
        "backchannel_ms",
        k.integer(0, SILENCE_MS_MAX),
        since=behaviour.BACKCHANNELS,
        example=350,
        doc="Shorter speech over the model does not interrupt it; without it the server's limit.",
    ),
    Field(
        "idle_timeout_ms",
        attrs.evolve(_IDLE, read=_idle),
        0,
        attr="idle_ms",
        omit=True,
        example=8000,
        doc="Of server_vad: the model speaks where the client says nothing for so long.",
    ),
)
PLAIN_DETECTION: Final = Table(
    oa.TurnDetection,
    *_DETECTION,
    ignored("idle_timeout_ms", "Ignored: no model speaks here."),
    lacks={"backchannel_ms": None, "idle_ms": 0},
)
"""That of a session without a model that speaks."""


def input_rows(transcription: Row, how: Table = DETECTION) -> Object:
    """The settings of the client's sound; those of its transcription differ."""
    rows = (
        Object("format", *_format("input_format"), omit=True, doc="Its form."),
        optional("turn_detection", detection(one(how)), attr="detection"),
        ignored("noise_reduction", "Ignored: not offered here."),
        transcription,
    )
    return Object("input", *rows, doc="The client's sound.")


_TYPES: Final = ("realtime", "transcription")
_TRANSCRIPTION: Final = k.Kind(
    read=lambda value, _: as_object(value.value, value.path) is not None,
    write=lambda wanted: {} if wanted else None,
    schema={"type": "object", "properties": {}},
)
CONFIGURE: Final = Table(
    oa.Configure,
    Object(
        "session",
        Field(
            "type",
            only(_TYPES, "realtime", "transcription is for ?intent=transcription"),
            attr=DROPPED,
            get=Constant("realtime"),
            doc="Must be realtime here; transcription has an address of its own.",
        ),
        checked("model", k.TEXT, doc="Ignored: the address names the model."),
        optional("instructions", PROMPT),
        optional("output_modalities", MODALITY, attr="modality", example=["audio"]),
        Object(
            "audio",
            input_rows(
                optional(
                    "transcription",
                    _TRANSCRIPTION,
                    attr="transcribes",
                    doc="An object, with or without settings: the client wants to be "
                    "told what it said, if the server has a model for it.",
                )
            ),
            Object(
                "output",
                Object("format", *_format("output_format"), omit=True, doc="Its form."),
                optional("voice", _VOICE),
                checked("speed", _SPEED, doc=_NO_SPEED),
                doc="The model's sound.",
            ),
            doc="Sound in both directions.",
        ),
        optional("tools", TOOLS, doc=tools.CALLED),
        optional(
            "tool_choice",
            _CHOICE,
            doc="none: no call is sent. Other choices are auto: no call can be enforced.",
        ),
        optional(
            "parallel_tool_calls",
            _PARALLEL,
            attr="is_parallel",
            doc="false: no call is sent while another waits for its result.",
        ),
        checked("max_output_tokens", _INF, doc="Reported as `inf`."),
        *(ignored(name) for name in ("include", "tracing", "truncation", "reasoning")),
        checked("prompt", _NO_PROMPT, doc=EMPTY),
        is_required=True,
        closed=CLOSED,
        doc="The settings to change.",
    ),
    ANY_EVENT_ID,
    tag={"type": shared.SESSION_UPDATE},
    lacks={"is_undetected": False, "transcriber": None},
)


def null(name: str) -> Field:
    """A field that is always null."""
    kind = k.Kind(read=lambda *_: None, schema={"type": "null"})
    return computed(name, kind, get=Constant(None), doc="Always null.")


def nothing(name: str) -> Field:
    """An array that is always empty."""
    kind = k.Kind(read=lambda *_: (), schema={"type": "array", "const": []})
    return Field(name, kind, (), attr=DROPPED, get=lambda _: [], doc="Empty.")


def _sent_format(attr: str) -> Object:
    """The format of sound; that of G.711 has no rate."""
    kind = k.Kind(
        read=lambda value, _: value.integer(), schema={"type": "integer", "const": 24_000}
    )
    rate = computed(
        "rate",
        kind,
        get=lambda message: 24_000 if getattr(message.openai, attr) == "audio/pcm" else None,
        omit=True,
        doc="Samples a second; not of G.711, which has 8000.",
    )
    return Object("format", Field("type", k.choice(CODINGS), attr=attr), rate, doc="Of the sound.")


def sent_input(transcription: Row, how: Table = DETECTION) -> Object:
    """The client's sound as it is in force; its transcription is reported in two ways."""
    rows = (
        _sent_format("input_format"),
        null("noise_reduction"),
        transcription,
        Field("turn_detection", detection(one(how)), None, attr="detection"),
    )
    return Object("input", *rows, doc="The client's sound.")


_TRANSCRIBER: Final = k.Kind(
    read=lambda *_: None, schema={"type": "object", "additionalProperties": {"type": "string"}}
)
SESSION: Final = Object(
    "session",
    fixed("type", "realtime"),
    fixed("object", "realtime.session"),
    Field("id", k.TEXT),
    Field("model", k.TEXT),
    Field("expires_at", k.INTEGER),
    Field("instructions", k.TEXT),
    Field("output_modalities", MODALITY, attr="modality", example=["audio"]),
    Object(
        "audio",
        sent_input(
            computed(
                "transcription",
                k.or_null(_TRANSCRIBER),
                get=lambda message: (
                    {"model": message.openai.transcriber} if message.openai.transcriber else None
                ),
                example={"model": "tiny"},
                doc="The model that transcribes what the client says.",
            )
        ),
        Object(
            "output",
            _sent_format("output_format"),
            Field("voice", k.TEXT, "", omit=True),
            doc="The model's sound.",
        ),
        doc="Sound in both directions.",
    ),
    Field("tools", SENT_FUNCTIONS, (), doc="Functions that the model may call."),
    Field(
        "tool_choice",
        k.choice(("auto", "none")),
        "auto",
        doc="none also where there are tools, and the model calls none.",
    ),
    Field(
        "parallel_tool_calls", k.FLAG, True, attr="is_parallel", omit=True, doc="false, or absent."
    ),
    fixed("max_output_tokens", "inf"),
    fixed("truncation", "auto"),
    null("tracing"),
    null("prompt"),
    null("include"),
    attr="openai",
    doc="The session as it is in force.",
)


AUDIO_MS_MAX: Final = 24 * 3600 * MS_PER_S
"""Longer than a session."""
METADATA_MAX: Final = 16
METADATA_NAME_CHARS_MAX: Final = 64
METADATA_CHARS_MAX: Final = 512
"""As the API has them."""
_ID: Final = k.text(INPUT_ID_CHARS_MAX, 1, holds=k.NAMED)
_EXAMPLE: Final = "item_7b20d9c3a415"


def _metadata(value: Value, _: Reading) -> oa.Metadata:
    found = as_object(value.value, value.path)
    if len(found) > METADATA_MAX:
        raise invalid(value.path, f"{len(found)} names, at most {METADATA_MAX} are allowed")
    for name, text_ in found.items():
        if len(name) > METADATA_NAME_CHARS_MAX:
            count = f"a name of {len(name)} characters"
            raise invalid(value.path, f"{count}, at most {METADATA_NAME_CHARS_MAX} are allowed")
        Value(path=f"{value.path}.?", value=text_).text(METADATA_CHARS_MAX)
    return tuple(cast("Mapping[str, str]", found).items())


METADATA: Final = k.Kind(
    read=_metadata,
    write=lambda pairs: None if pairs is None else dict(pairs),
    schema={
        "type": "object",
        "maxProperties": METADATA_MAX,
        "additionalProperties": {"type": "string", "maxLength": METADATA_CHARS_MAX},
    },
    holds=k.USER_TEXT,
)
_AUTO: Final = only(("auto", "none"), "auto", "a response is part of the conversation")
_TEXT: Final = k.text(ITEM_CHARS_MAX, holds=k.USER_TEXT)


def _text_of(part: oa.Part, *, is_sound: bool) -> str | None:
    return part.text or None if is_sound == part.kind.endswith("audio") else None


PARTS_OF: Final[Mapping[oa.ItemRole, tuple[oa.PartKind, ...]]] = {
    "user": ("input_text", "input_audio", "input_image"),
    "system": ("input_text",),
    "assistant": ("output_text", "output_audio"),
}
"""The parts that an item may have, by who said it."""
PART_KINDS: Final = get_args(oa.PartKind)
_NO_SOUND: Final = lacking(
    "sound comes in input_audio_buffer.append", "", type="string", maxLength=0
)


def _part(values: dict[str, Any]) -> oa.Part:
    part = oa.Part(**values)  # only a picture has a picture
    return part if part.kind == "input_image" else attrs.evolve(part, picture=b"")


PART: Final = Table(
    oa.Part,
    Field("type", k.choice(PART_KINDS), attr="kind"),
    Field("text", _TEXT, "", also=("transcript",), omit=True),
    Field(
        "image_url",
        k.IMAGE_URL,
        b"",
        attr="picture",
        omit=True,
        doc="Of an input_image: a JPEG, PNG or WebP, as a data URL; 4 MiB, 20 megapixels at most.",
    ),
    checked("detail", k.choice(("auto", "low", "high")), doc="Without effect."),
    checked("audio", _NO_SOUND, doc=EMPTY),
    make=_part,
)


def sent_part(kinds: tuple[str, ...] = PART_KINDS) -> One:
    """Make the kind of a part of one of several kinds, as a server tells it."""
    text, transcript = (partial(_text_of, is_sound=is_sound) for is_sound in (False, True))
    table = Table(
        oa.Part,
        Field("type", k.choice(kinds), attr="kind"),
        Field("text", _TEXT, "", also=("transcript",), get=text, omit=True),
        Field(
            "transcript",
            k.or_null(_TEXT),
            "",
            attr=DROPPED,
            get=transcript,
            omit=True,
            is_read=False,
            doc="Of sound; null while it is not known.",
        ),
    )

    def write(part: oa.Part) -> dict[str, object]:
        return table.write(part) | (_EMPTY_PARTS[part.kind] if _is_bare(part) else {})

    return attrs.evolve(one(table), write=write)


_EMPTY_PARTS: Final[Mapping[oa.PartKind, dict[str, object]]] = {
    "input_text": {"text": ""},
    "output_text": {"text": ""},
    "input_audio": {"transcript": None},
    "output_audio": {"transcript": ""},
    "input_image": {},
}
"""What a part without text is sent with."""


def _is_bare(part: oa.Part) -> bool:
    return part.is_whole and not part.text


_ROLE: Final = k.choice(("user", "assistant", "system"))


def _role(value: Value, _: Reading) -> str:
    found = value.choice(("user", "assistant", "system", "developer"))
    return "system" if found == "developer" else found


_ASKED_ROLE: Final = until(
    behaviour.LENIENT_SETTINGS,
    _ROLE,
    k.Kind(read=_role, schema=k.choice((*PARTS_OF, "developer")).schema),
)


def item_rows(parts: k.Kind, role: k.Kind = _ROLE, other: str = "no tools") -> tuple[Any, ...]:
    """The rows of an item; `other` is the error for one of tools."""
    return (
        Field("id", _ID, "", omit=True, example=_EXAMPLE),
        Field(
            "type",
            only(("message", "function_call", "function_call_output"), "message", other),
            attr=DROPPED,
            get=Constant("message"),
            doc="Must be message here.",
        ),
        Field("role", role, doc="Who said it; `developer` is reported as `system`."),
        Field("status", k.choice(("completed", "incomplete", "in_progress")), "completed"),
        Field("content", parts, (), attr="parts"),
    )


_PARTS: Final = items(one(PART), ITEM_PARTS_MAX)
ITEM: Final = Table(oa.Item, *item_rows(_PARTS, _ASKED_ROLE))
_MESSAGE: Final = Table(oa.Item, *item_rows(_PARTS, _ASKED_ROLE, "only the model makes calls"))
_RESULT: Final = tools.result_item(
    Field("id", _ID, "", omit=True, example=_EXAMPLE), ignored("status", holds=None)
)


def _plain(cls: type, kind: str, *rows: Row) -> Table:
    return Table(cls, *rows, ANY_EVENT_ID, tag={"type": kind})


_ITEM_ID: Final = Field("item_id", _ID, example=_EXAMPLE)
REQUESTS: Final = {
    Request.UPDATE: CONFIGURE,
    Request.APPEND: _plain(
        AppendSound, "input_audio_buffer.append", Field("audio", k.PIECE, attr="pcm16")
    ),
    Request.COMMIT: _plain(oa.CommitSound, "input_audio_buffer.commit"),
    Request.CLEAR: _plain(oa.ClearSound, "input_audio_buffer.clear"),
    Request.RESPOND: _plain(
        oa.Respond,
        "response.create",
        Object(
            "response",
            checked("conversation", _AUTO, doc="Must be auto here."),
            checked("input", empty("no other input"), doc=EMPTY),
            checked("tools", TOOLS, doc="Without effect."),
            optional(
                "output_modalities",
                MODALITY,
                attr="modality",
                since=behaviour.RESPONSE_OPTIONS,
                example=["text"],
            ),
            optional(
                "instructions",
                PROMPT,
                since=behaviour.RESPONSE_OPTIONS,
                doc="Until the model has its prompt, in place of the session's; then refused.",
            ),
            Field(
                "max_output_tokens",
                TOKENS,
                0,
                attr="max_tokens",
                omit=True,
                since=behaviour.RESPONSE_OPTIONS,
                example=100,
                doc="Or inf.",
            ),
            checked(
                "tool_choice",
                _NO_CHOICE,
                since=behaviour.RESPONSE_OPTIONS,
                doc="Without effect; another is refused.",
            ),
            optional(
                "metadata",
                METADATA,
                example={"client_event_id": "evt_1"},
                doc="Returned with the response.",
            ),
            omit=True,
            doc="Settings of this response; others than these are ignored.",
        ),
    ),
    Request.CANCEL: _plain(oa.CancelResponse, "response.cancel", optional("response_id", _ID)),
    Request.CREATE_ITEM: _plain(
        oa.CreateItem,
        "conversation.item.create",
        Field("item", until(behaviour.DUPLEX_TOOLS, one(ITEM), tools.any_item(_MESSAGE, _RESULT))),
        optional("previous_item_id", _ID, attr="previous_id"),
    ),
    Request.DELETE_ITEM: _plain(oa.DeleteItem, "conversation.item.delete", _ITEM_ID),
    Request.RETRIEVE_ITEM: _plain(oa.RetrieveItem, "conversation.item.retrieve", _ITEM_ID),
    Request.TRUNCATE_ITEM: _plain(
        oa.TruncateItem,
        "conversation.item.truncate",
        _ITEM_ID,
        Field("content_index", k.integer(0, ITEM_PARTS_MAX), 0),
        Field("audio_end_ms", k.integer(0, AUDIO_MS_MAX)),
    ),
}
