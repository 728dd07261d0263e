"""What a client of `openai` says: its settings, its sound, items, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

import attrs

from ...values.errors import ErrorCode
from ...values.limits import INPUT_ID_CHARS_MAX, ITEM_CHARS_MAX, ITEM_PARTS_MAX, MS_PER_S
from ...values.openai import (
    CancelResponse,
    ClearSound,
    CommitSound,
    Configure,
    CreateItem,
    DeleteItem,
    Item,
    ItemRole,
    Metadata,
    Part,
    PartKind,
    Respond,
    RetrieveItem,
    TruncateItem,
    TurnDetection,
)
from ...values.requests import AppendSound, Request
from ...values.sound import CODINGS
from ..codec import Value, invalid
from ..field import DROPPED, Field
from ..kinds import (
    FLAG,
    NAMED,
    PIECE,
    SAID,
    TEXT,
    VOICE_NAMED,
    Kind,
    choice,
    integer,
    number,
    text,
)
from ..nested import items, one
from ..reading import Reading, as_object
from ..table import Object, Row, Table
from . import shared
from .inputs import PROMPT
from .live_requests import empty, only, unsupported

MODALITIES: Final = ("audio", "text")
SILENCE_MS_MAX: Final = 10 * MS_PER_S
"""A longer pause ends a turn of any speaker."""
AUDIO_MS_MAX: Final = 24 * 3600 * MS_PER_S
"""Longer than a session."""
METADATA_MAX: Final = 16
METADATA_NAME_CHARS_MAX: Final = 64
METADATA_CHARS_MAX: Final = 512
"""As the API has them."""
_VOICE_CHARS_MAX: Final = 64
_ID: Final = text(INPUT_ID_CHARS_MAX, 1, holds=NAMED)
_EXAMPLE: Final = "item_7b20d9c3a415"
_CLOSED: Final = ErrorCode.UNKNOWN_PARAMETER


def _ignored(name: str, why: str = "Ignored.") -> Field:
    """A field of the API that changes nothing here."""
    kind = Kind(read=lambda *_: None, schema={}, holds=SAID)
    return Field(name, kind, None, attr=DROPPED, doc=why)


def _lacking(what: str, nothing: object, **schema: object) -> Kind:
    """A field of the API that must be empty here."""

    def read(value: Value, _: Reading) -> None:
        if value.value != nothing:
            raise unsupported(value.path, what)

    return Kind(read=read, schema=schema)


_EVENT_ID: Final = _ignored("event_id")
_EMPTY: Final = "Must be empty here."


def _modality(value: Value, _: Reading) -> str:
    found = [each.choice(MODALITIES) for each in value.items(2)]
    if len(found) != 1:
        raise unsupported(value.path, 'there is ["audio"], speech with its transcript, or ["text"]')
    return found[0]


MODALITY: Final = Kind(
    read=_modality,
    write=lambda modality: None if modality is None else [modality],
    schema={
        "type": "array",
        "items": {"type": "string", "enum": list(MODALITIES)},
        "minItems": 1,
        "maxItems": 1,
    },
)


_VOICE: Final = text(_VOICE_CHARS_MAX, 1, holds=VOICE_NAMED)


def _inf(value: Value, _: Reading) -> None:
    if value.value != "inf":
        raise unsupported(value.path, "the length of a response has no bound here")


def _metadata(value: Value, _: Reading) -> Metadata:
    found = as_object(value.value, value.path)
    if len(found) > METADATA_MAX:
        raise invalid(value.path, f"{len(found)} names, at most {METADATA_MAX} are allowed")
    for name, text_ in found.items():
        if len(name) > METADATA_NAME_CHARS_MAX:
            count = f"a name of {len(name)} characters"
            raise invalid(value.path, f"{count}, at most {METADATA_NAME_CHARS_MAX} are allowed")
        Value(path=f"{value.path}.?", value=text_).text(METADATA_CHARS_MAX)
    return tuple(cast("Mapping[str, str]", found).items())


METADATA: Final = Kind(
    read=_metadata,
    write=lambda pairs: None if pairs is None else dict(pairs),
    schema={
        "type": "object",
        "maxProperties": METADATA_MAX,
        "additionalProperties": {"type": "string", "maxLength": METADATA_CHARS_MAX},
    },
    holds=SAID,
)
_INF: Final = Kind(read=_inf, schema={"type": "string", "enum": ["inf"]})
_NO_PROMPT: Final = _lacking("there are no stored prompts", {}, type="object", const={})
_NO_TOOLS: Final = empty("the model has no tools")
_AUTO: Final = only(("auto", "none"), "auto", "a response is part of the conversation")


def _format(attr: str) -> tuple[Field, ...]:
    return (
        Field("type", choice(CODINGS), None, attr=attr, omit=True, doc="PCM16, or G.711."),
        Field("rate", integer(24_000, 24_000), None, attr=DROPPED, doc="24000; of audio/pcm."),
    )


def detection(kind: Kind) -> Kind:
    """The kind of a turn detection that may be null."""
    write = kind.write
    assert write is not None
    return attrs.evolve(
        kind,
        write=lambda value: None if value is None else write(value),
        schema={"type": ["object", "null"]},
    )


DETECTION: Final = Table(
    TurnDetection,
    Field("type", choice(("server_vad", "semantic_vad")), attr="kind"),
    Field("threshold", number(0, 1), 0.5, omit=True, example=0.5),
    Field(
        "prefix_padding_ms",
        integer(0, SILENCE_MS_MAX),
        300,
        attr="prefix_ms",
        omit=True,
        example=300,
    ),
    Field(
        "silence_duration_ms",
        integer(100, SILENCE_MS_MAX),
        500,
        attr="silence_ms",
        omit=True,
        example=500,
    ),
    Field("create_response", FLAG, True, attr="creates"),
    Field("interrupt_response", FLAG, True, attr="interrupts"),
    Field(
        "eagerness",
        only(
            ("low", "medium", "high", "auto"), "auto", "the model decides when to answer", "medium"
        ),
        None,
        attr=DROPPED,
        doc="auto or medium: the model decides.",
    ),
    _ignored("idle_timeout_ms", "Ignored: the model decides when to speak."),
)
_CONFIGURE: Final = Table(
    Configure,
    Object(
        "session",
        (
            Field(
                "type",
                only(("realtime", "transcription"), "realtime", "there are no transcriptions"),
                attr=DROPPED,
                get=lambda _: "realtime",
                doc="Must be realtime here.",
            ),
            Field("model", TEXT, None, attr=DROPPED, doc="Ignored: the address names the model."),
            Field("instructions", PROMPT, None, omit=True),
            Field(
                "output_modalities",
                MODALITY,
                None,
                attr="modality",
                omit=True,
                example=["audio"],
            ),
            Object(
                "audio",
                (
                    Object(
                        "input",
                        (
                            Object("format", _format("heard"), omit=True, doc="Its form."),
                            Field(
                                "turn_detection",
                                detection(one(DETECTION)),
                                None,
                                attr="detection",
                                omit=True,
                            ),
                            _ignored("noise_reduction", "Ignored: not offered here."),
                            _ignored("transcription", "Ignored: not offered here."),
                        ),
                        doc="The client's sound.",
                    ),
                    Object(
                        "output",
                        (
                            Object("format", _format("spoken"), omit=True, doc="Its form."),
                            Field("voice", _VOICE, None, omit=True),
                            Field("speed", number(1, 1), None, attr=DROPPED, doc="Must be 1."),
                        ),
                        doc="The model's sound.",
                    ),
                ),
                doc="Sound in both directions.",
            ),
            Field("tools", _NO_TOOLS, (), attr=DROPPED, doc=_EMPTY),
            Field("max_output_tokens", _INF, None, attr=DROPPED, doc="Must be inf."),
            *(
                _ignored(name)
                for name in ("tool_choice", "parallel_tool_calls", "include", "tracing")
            ),
            *(_ignored(name) for name in ("truncation", "reasoning")),
            Field("prompt", _NO_PROMPT, None, attr=DROPPED, doc=_EMPTY),
        ),
        is_required=True,
        closed=_CLOSED,
        doc="The settings to change.",
    ),
    _EVENT_ID,
    tag={"type": shared.SESSION_UPDATE},
    lacks={"is_undetected": False},
)
_TEXT: Final = text(ITEM_CHARS_MAX, holds=SAID)


def _said(part: Part, *, is_sound: bool) -> str | None:
    return part.text or None if is_sound == part.kind.endswith("audio") else None


PARTS_OF: Final[Mapping[ItemRole, tuple[PartKind, ...]]] = {
    "user": ("input_text", "input_audio"),
    "system": ("input_text",),
    "assistant": ("output_text", "output_audio"),
}
"""The parts that an item may have, by who said it."""
PART_KINDS: Final = ("input_text", "input_audio", "output_text", "output_audio")


def _part_kind(value: Value, _: Reading) -> str:
    if value.value == "input_image":
        raise unsupported(value.path, "the model sees no pictures here")
    return value.choice(PART_KINDS)


_NO_SOUND: Final = _lacking(
    "sound comes in input_audio_buffer.append", "", type="string", maxLength=0
)
_PART_KIND: Final = attrs.evolve(choice(PART_KINDS), read=_part_kind)
PART: Final = Table(
    Part,
    Field("type", _PART_KIND, attr="kind"),
    Field("text", _TEXT, "", also=("transcript",), omit=True),
    Field("audio", _NO_SOUND, None, attr=DROPPED, doc=_EMPTY),
)


def told_part(kinds: tuple[str, ...] = PART_KINDS) -> Table:
    """Make the table of a part of one of several kinds, as a server tells it."""
    text, transcript = (partial(_said, is_sound=is_sound) for is_sound in (False, True))
    return Table(
        Part,
        Field("type", choice(kinds), attr="kind"),
        Field("text", _TEXT, "", also=("transcript",), get=text, omit=True),
        Field(
            "transcript",
            _TEXT,
            "",
            attr=DROPPED,
            get=transcript,
            omit=True,
            is_read=False,
            doc="Of sound.",
        ),
    )


def item_rows(parts: Kind) -> tuple[Any, ...]:
    """The rows of an item."""
    return (
        Field("id", _ID, "", omit=True, example=_EXAMPLE),
        Field(
            "type",
            only(("message", "function_call", "function_call_output"), "message", "no tools"),
            attr=DROPPED,
            get=lambda _: "message",
            doc="Must be message here.",
        ),
        Field("role", choice(("user", "assistant", "system"))),
        Field("status", choice(("completed", "incomplete", "in_progress")), "completed"),
        Field("content", parts, (), attr="parts"),
    )


ITEM: Final = Table(Item, *item_rows(items(one(PART), ITEM_PARTS_MAX)))


def _plain(cls: type, kind: str, *rows: Row) -> Table:
    return Table(cls, *rows, _EVENT_ID, tag={"type": kind})


_ITEM_ID: Final = Field("item_id", _ID, example=_EXAMPLE)
REQUESTS: Final = {
    Request.UPDATE: _CONFIGURE,
    Request.APPEND: _plain(
        AppendSound, "input_audio_buffer.append", Field("audio", PIECE, attr="pcm16")
    ),
    Request.COMMIT: _plain(CommitSound, "input_audio_buffer.commit"),
    Request.CLEAR: _plain(ClearSound, "input_audio_buffer.clear"),
    Request.RESPOND: _plain(
        Respond,
        "response.create",
        Object(
            "response",
            (
                Field("conversation", _AUTO, None, attr=DROPPED, doc="Must be auto here."),
                Field("input", empty("no other input"), None, attr=DROPPED, doc=_EMPTY),
                Field("tools", _NO_TOOLS, None, attr=DROPPED, doc=_EMPTY),
                Field(
                    "metadata",
                    METADATA,
                    None,
                    omit=True,
                    example={"client_event_id": "evt_1"},
                    doc="Told again.",
                ),
            ),
            omit=True,
            doc="A response has the session's settings; others here are ignored.",
        ),
    ),
    Request.CANCEL: _plain(
        CancelResponse, "response.cancel", Field("response_id", _ID, None, omit=True)
    ),
    Request.CREATE_ITEM: _plain(
        CreateItem,
        "conversation.item.create",
        Field("item", one(ITEM)),
        Field("previous_item_id", _ID, None, attr="previous_id", omit=True),
    ),
    Request.DELETE_ITEM: _plain(DeleteItem, "conversation.item.delete", _ITEM_ID),
    Request.RETRIEVE_ITEM: _plain(RetrieveItem, "conversation.item.retrieve", _ITEM_ID),
    Request.TRUNCATE_ITEM: _plain(
        TruncateItem,
        "conversation.item.truncate",
        _ITEM_ID,
        Field("content_index", integer(0, ITEM_PARTS_MAX), 0),
        Field("audio_end_ms", integer(0, AUDIO_MS_MAX)),
    ),
}
