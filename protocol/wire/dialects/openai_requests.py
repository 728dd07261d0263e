"""What a client of `openai` says: its settings, its sound, items, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast, get_args

import attrs

from ...values.items import Item, ItemRole, Part, PartKind
from ...values.limits import INPUT_ID_CHARS_MAX, ITEM_CHARS_MAX, ITEM_PARTS_MAX, MS_PER_S
from ...values.openai import (
    CancelResponse,
    ClearSound,
    CommitSound,
    CreateItem,
    DeleteItem,
    Metadata,
    Respond,
    RetrieveItem,
    TruncateItem,
)
from ...values.requests import AppendSound, Request
from ..codec import Value, invalid
from ..field import DROPPED, Field
from ..kinds import (
    IMAGE_URL,
    NAMED,
    PIECE,
    SAID,
    Kind,
    choice,
    integer,
    text,
)
from ..nested import items, one
from ..reading import Reading, as_object
from ..table import Object, Row, Table
from .live_requests import empty, only
from .openai_settings import ANY_EVENT_ID, CONFIGURE, EMPTY, NO_TOOLS, lacking

AUDIO_MS_MAX: Final = 24 * 3600 * MS_PER_S
"""Longer than a session."""
METADATA_MAX: Final = 16
METADATA_NAME_CHARS_MAX: Final = 64
METADATA_CHARS_MAX: Final = 512
"""As the API has them."""
_ID: Final = text(INPUT_ID_CHARS_MAX, 1, holds=NAMED)
_EXAMPLE: Final = "item_7b20d9c3a415"


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
_AUTO: Final = only(("auto", "none"), "auto", "a response is part of the conversation")
_TEXT: Final = text(ITEM_CHARS_MAX, holds=SAID)


def _said(part: Part, *, is_sound: bool) -> str | None:
    return part.text or None if is_sound == part.kind.endswith("audio") else None


PARTS_OF: Final[Mapping[ItemRole, tuple[PartKind, ...]]] = {
    "user": ("input_text", "input_audio", "input_image"),
    "system": ("input_text",),
    "assistant": ("output_text", "output_audio"),
}
"""The parts that an item may have, by who said it."""
PART_KINDS: Final = get_args(PartKind)
_NO_SOUND: Final = lacking(
    "sound comes in input_audio_buffer.append", "", type="string", maxLength=0
)


def _part(values: dict[str, Any]) -> Part:
    part = Part(**values)  # only a picture has a picture
    return part if part.kind == "input_image" else attrs.evolve(part, picture=b"")


PART: Final = Table(
    Part,
    Field("type", choice(PART_KINDS), attr="kind"),
    Field("text", _TEXT, "", also=("transcript",), omit=True),
    Field(
        "image_url",
        IMAGE_URL,
        b"",
        attr="picture",
        omit=True,
        doc="Of an input_image: a JPEG, PNG or WebP, as a data URL; 4 MiB, 20 megapixels at most.",
    ),
    Field("detail", choice(("auto", "low", "high")), None, attr=DROPPED, doc="Without effect."),
    Field("audio", _NO_SOUND, None, attr=DROPPED, doc=EMPTY),
    make=_part,
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
    return Table(cls, *rows, ANY_EVENT_ID, tag={"type": kind})


_ITEM_ID: Final = Field("item_id", _ID, example=_EXAMPLE)
REQUESTS: Final = {
    Request.UPDATE: CONFIGURE,
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
                Field("input", empty("no other input"), None, attr=DROPPED, doc=EMPTY),
                Field("tools", NO_TOOLS, None, attr=DROPPED, doc=EMPTY),
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
