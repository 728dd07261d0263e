"""A transcription session of `openai`: its settings, and the messages that it shares.

Its client sends `session.update`, sound, `commit` and `clear`. It is told where speech starts and
stops, the items made from that speech, and their text.
"""

from __future__ import annotations

from typing import Final

from ...values.errors import ErrorCode
from ...values.items import Item, Part
from ...values.messages import Created
from ...values.openai import Configure, Configured
from ...values.requests import Request
from ..field import DROPPED, Field
from ..kinds import INTEGER, TEXT, Kind
from ..nested import items, one
from ..table import Object, Table
from . import openai_answers, shared
from .live_answers import EVENT_ID, error_table, fixed
from .live_requests import only
from .openai_requests import REQUESTS as ALL
from .openai_settings import (
    ANY_EVENT_ID,
    CLOSED,
    heard_rows,
    ignored,
    null,
    told_heard,
)

_NO_HINT: Final = "Without effect: the model writes down what it hears, without hints."
_HINTS: Final = ("prompt", "keywords")
_PLAIN_HINTS: Final = ("language", "languages", "delay")
"""Nothing in them is the client's own."""
_KIND: Final = only(
    ("realtime", "transcription"), "transcription", "the address asks for transcription"
)


def _plain(name: str) -> Field:
    kind = Kind(read=lambda *_: None, schema={})
    return Field(name, kind, None, attr=DROPPED, doc=_NO_HINT)


_MODEL: Final = Field(
    "model",
    TEXT,
    None,
    attr="transcriber",
    omit=True,
    example="tiny",
    doc="One of the server's models.",
)
_CONFIGURE: Final = Table(
    Configure,
    Object(
        "session",
        (
            Field(
                "type",
                _KIND,
                attr=DROPPED,
                get=lambda _: "transcription",
                doc="Must be transcription here.",
            ),
            Object(
                "audio",
                (
                    heard_rows(
                        Object(
                            "transcription",
                            (
                                _MODEL,
                                *(ignored(name, _NO_HINT) for name in _HINTS),
                                *(_plain(name) for name in _PLAIN_HINTS),
                            ),
                            omit=True,
                            doc="The model, and hints for it.",
                        )
                    ),
                ),
                doc="Sound.",
            ),
            ignored("include"),
        ),
        is_required=True,
        closed=CLOSED,
        doc="The settings to change.",
    ),
    ANY_EVENT_ID,
    tag={"type": shared.SESSION_UPDATE},
    lacks={
        "is_undetected": False,
        "transcribes": None,
        "instructions": None,
        "voice": None,
        "modality": None,
        "spoken": None,
    },
)
REQUESTS: Final = {
    Request.UPDATE: _CONFIGURE,
    **{kind: ALL[kind] for kind in (Request.APPEND, Request.COMMIT, Request.CLEAR)},
}
_SOUND: Final = Table(
    Part,
    fixed("type", "input_audio"),
    make=lambda _: Part(kind="input_audio"),
    lacks={"kind": "input_audio", "text": "", "picture": b""},
)
_SESSION: Final = Object(
    "session",
    (
        fixed("type", "transcription"),
        fixed("object", "realtime.transcription_session"),
        Field("id", TEXT),
        Field("expires_at", INTEGER),
        Object(
            "audio",
            (
                told_heard(
                    Object(
                        "transcription",
                        (Field("model", TEXT, attr="transcriber", example="tiny"),),
                        doc="The model that writes down what the client says.",
                    )
                ),
            ),
            doc="Sound.",
        ),
        null("include"),
    ),
    attr="openai",
    doc="The session as it is in force.",
)
_ITEM: Final = Field(
    "item",
    one(
        Table(
            Item,
            Field("id", TEXT, example="item_7b20d9c3a415"),
            fixed("object", "realtime.item"),
            fixed("type", "message"),
            fixed("role", "user"),
            fixed("status", "completed"),
            Field("content", items(one(_SOUND), 1), (), attr="parts"),
            make=lambda values: Item(role="user", **values),
        )
    ),
)
_OWN: Final = (ErrorCode.INVALID_JSON, ErrorCode.INVALID_FRAME, ErrorCode.BUFFER_FULL)
_NEVER: Final = frozenset(
    {
        ErrorCode.ACTIVE_RESPONSE,
        ErrorCode.ITEM_NOT_FOUND,
        ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE,
        ErrorCode.INFERENCE_ERROR,
    }
)
"""They are about responses and named items; a failure has a message of its own."""
ERROR_CODES: Final = (*(it for it in openai_answers.ERROR_CODES if it not in _NEVER), *_OWN)
ANSWERS: Final = (
    Table(
        Created,
        EVENT_ID,
        _SESSION,
        tag={"type": "session.created"},
        lacks={"session_id": "", "prompt_length": 0, "recording": "off"},
    ),
    Table(Configured, EVENT_ID, _SESSION, tag={"type": "session.updated"}),
    *openai_answers.INPUTS.values(),
    openai_answers.FAILED,
    openai_answers.conversation("added", openai_answers.PREVIOUS, _ITEM),
    openai_answers.conversation("done", openai_answers.PREVIOUS, _ITEM),
    error_table(ERROR_CODES, "event_id"),
)
