"""The settings of a session of `openai`: as its client changes them, and as they are told."""

from __future__ import annotations

from typing import Final

import attrs

from ...values.errors import ErrorCode
from ...values.limits import MS_PER_S
from ...values.openai import (
    Configure,
    TurnDetection,
)
from ...values.sound import CODINGS
from ..codec import Value
from ..field import DROPPED, Field
from ..kinds import (
    FLAG,
    INTEGER,
    SAID,
    TEXT,
    VOICE_NAMED,
    Holds,
    Kind,
    choice,
    integer,
    number,
    or_null,
    text,
)
from ..nested import one
from ..reading import Reading, as_object
from ..table import Object, Row, Table
from . import shared
from .inputs import PROMPT
from .live_answers import fixed
from .live_requests import empty, only, unsupported

MODALITIES: Final = ("audio", "text")
SILENCE_MS_MAX: Final = 10 * MS_PER_S
"""A longer pause ends a turn of any speaker."""
_VOICE_CHARS_MAX: Final = 64
CLOSED: Final = ErrorCode.UNKNOWN_PARAMETER


def ignored(name: str, why: str = "Ignored.", holds: Holds | None = SAID) -> Field:
    """A field of the API that changes nothing here."""
    kind = Kind(read=lambda *_: None, schema={}, holds=holds)
    return Field(name, kind, None, attr=DROPPED, doc=why)


def lacking(what: str, nothing: object, **schema: object) -> Kind:
    """A field of the API that must be empty here."""

    def read(value: Value, _: Reading) -> None:
        if value.value != nothing:
            raise unsupported(value.path, what)

    return Kind(read=read, schema=schema)


ANY_EVENT_ID: Final = ignored("event_id")
EMPTY: Final = "Must be empty here."


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


_INF: Final = Kind(read=_inf, schema={"type": "string", "enum": ["inf"]})
_NO_PROMPT: Final = lacking("there are no stored prompts", {}, type="object", const={})
NO_TOOLS: Final = empty("the model has no tools")


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
    ignored("idle_timeout_ms", "Ignored: the model decides when to speak."),
)


def heard_rows(transcription: Row) -> Object:
    """The settings of the client's sound; those of its transcription differ."""
    rows = (
        Object("format", _format("heard"), omit=True, doc="Its form."),
        Field("turn_detection", detection(one(DETECTION)), None, attr="detection", omit=True),
        ignored("noise_reduction", "Ignored: not offered here."),
        transcription,
    )
    return Object("input", rows, doc="The client's sound.")


_TYPES: Final = ("realtime", "transcription")
_TRANSCRIPTION: Final = Kind(
    read=lambda value, _: as_object(value.value, value.path) is not None,
    write=lambda wanted: {} if wanted else None,
    schema={"type": "object", "properties": {}},
)
CONFIGURE: Final = Table(
    Configure,
    Object(
        "session",
        (
            Field(
                "type",
                only(_TYPES, "realtime", "transcription is for ?intent=transcription"),
                attr=DROPPED,
                get=lambda _: "realtime",
                doc="Must be realtime here; transcription has an address of its own.",
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
                    heard_rows(
                        Field(
                            "transcription",
                            _TRANSCRIPTION,
                            None,
                            attr="transcribes",
                            omit=True,
                            doc="An object, with or without settings: the client wants to be "
                            "told what it said, if the server has a model for it.",
                        )
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
            Field("tools", NO_TOOLS, (), attr=DROPPED, doc=EMPTY),
            Field("max_output_tokens", _INF, None, attr=DROPPED, doc="Must be inf."),
            ignored("tool_choice", holds=None),
            *(ignored(name) for name in ("parallel_tool_calls", "include", "tracing")),
            *(ignored(name) for name in ("truncation", "reasoning")),
            Field("prompt", _NO_PROMPT, None, attr=DROPPED, doc=EMPTY),
        ),
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
    kind = Kind(read=lambda *_: None, schema={"type": "null"})
    return Field(name, kind, None, attr=DROPPED, get=lambda _: None, doc="Always null.")


def nothing(name: str) -> Field:
    """An array that is always empty."""
    kind = Kind(read=lambda *_: (), schema={"type": "array", "const": []})
    return Field(name, kind, (), attr=DROPPED, get=lambda _: [], doc="Empty.")


def _told_format(attr: str) -> Object:
    """The format of sound; that of G.711 has no rate."""
    kind = Kind(read=lambda value, _: value.integer(), schema={"type": "integer", "const": 24_000})
    rate = Field(
        "rate",
        kind,
        None,
        attr=DROPPED,
        get=lambda told: 24_000 if getattr(told.openai, attr) == "audio/pcm" else None,
        omit=True,
        doc="Samples a second; not of G.711, which has 8000.",
    )
    return Object("format", (Field("type", choice(CODINGS), attr=attr), rate), doc="Of the sound.")


def told_heard(transcription: Row) -> Object:
    """The client's sound as it is in force; its transcription is told in two ways."""
    rows = (
        _told_format("heard"),
        null("noise_reduction"),
        transcription,
        Field("turn_detection", detection(one(DETECTION)), None, attr="detection"),
    )
    return Object("input", rows, doc="The client's sound.")


_TRANSCRIBER: Final = Kind(
    read=lambda *_: None,
    schema={"type": "object", "additionalProperties": {"type": "string"}},
)
SESSION: Final = Object(
    "session",
    (
        fixed("type", "realtime"),
        fixed("object", "realtime.session"),
        Field("id", TEXT),
        Field("model", TEXT),
        Field("expires_at", INTEGER),
        Field("instructions", TEXT),
        Field("output_modalities", MODALITY, attr="modality", example=["audio"]),
        Object(
            "audio",
            (
                told_heard(
                    Field(
                        "transcription",
                        or_null(_TRANSCRIBER),
                        None,
                        attr=DROPPED,
                        get=lambda told: (
                            {"model": told.openai.transcriber} if told.openai.transcriber else None
                        ),
                        example={"model": "tiny"},
                        doc="The model that writes down what the client says.",
                    )
                ),
                Object(
                    "output",
                    (_told_format("spoken"), Field("voice", TEXT, "", omit=True)),
                    doc="The model's sound.",
                ),
            ),
            doc="Sound in both directions.",
        ),
        nothing("tools"),
        fixed("tool_choice", "auto"),
        fixed("max_output_tokens", "inf"),
        fixed("truncation", "auto"),
        null("tracing"),
        null("prompt"),
        null("include"),
    ),
    attr="openai",
    doc="The session as it is in force.",
)
