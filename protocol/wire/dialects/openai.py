"""The dialects `openai` and `openai-transcription`: the GA Realtime API.

In `openai` a response is one speaking turn of the model; its tables are in `openai_requests` and
`openai_answers`. Those of a transcription session come first here. Both are one class.

Names, fields and words are those of the types of the `openai` package (`openai.types.realtime`).

Choices in addition to them:
- `session.created` comes when the session has a slot; its wait is reported as a rate limit.
  A session's end is the connection's: there is no message for it, but an error for an end by time.
- `event_id` is filled in by the session, which knows the number of the frame.
- A response's item has its number: `item_...` for `resp_...`.
- What the model cannot do is refused by its name (`unsupported`).

`openai` cannot show: listening, metrics, the recording's name.
"""

from __future__ import annotations

from typing import Final, cast

import attrs

from ...values import messages as ms
from ...values import openai as oa
from ...values.errors import ErrorCode, LocalProtocolError
from ...values.modes import Mode
from ...values.requests import ClientMessage, Request
from ..codec import dump_frame, invalid, missing
from ..kinds import INTEGER, TEXT
from ..table import DROPPED, Constant, Field, Object, Table, fixed, items, one, optional
from . import openai_answers as answers
from . import openai_requests as requests
from . import shared
from .base import Context, Dialect, Json
from .live import CLOSED, EVENT_ID, REASONS, error_table, ignored, only, unsupported

_NO_HINT: Final = "Without effect: the model transcribes what it hears, without hints."
_HINTS: Final = ("prompt", "keywords")
_PLAIN_HINTS: Final = ("language", "languages", "delay")
"""Nothing in them is the client's own."""
_KIND: Final = only(
    ("realtime", "transcription"), "transcription", "the address asks for transcription"
)


_MODEL: Final = optional(
    "model", TEXT, attr="transcriber", example="tiny", doc="One of the server's models."
)
_CONFIGURE: Final = Table(
    oa.Configure,
    Object(
        "session",
        Field(
            "type",
            _KIND,
            attr=DROPPED,
            get=Constant("transcription"),
            doc="Must be transcription here.",
        ),
        Object(
            "audio",
            requests.input_rows(
                Object(
                    "transcription",
                    _MODEL,
                    *(ignored(name, _NO_HINT) for name in _HINTS),
                    *(ignored(name, _NO_HINT, holds=None) for name in _PLAIN_HINTS),
                    omit=True,
                    doc="The model, and hints for it.",
                ),
                requests.PLAIN_DETECTION,
            ),
            doc="Sound.",
        ),
        ignored("include"),
        is_required=True,
        closed=CLOSED,
        doc="The settings to change.",
    ),
    requests.ANY_EVENT_ID,
    tag={"type": shared.SESSION_UPDATE},
    lacks={
        "is_undetected": False,
        "transcribes": None,
        "instructions": None,
        "voice": None,
        "modality": None,
        "output_format": None,
        "tools": None,
        "tool_choice": None,
        "is_parallel": None,
    },
)
_OF_SOUND: Final = (Request.APPEND, Request.COMMIT, Request.CLEAR)
_TRANSCRIPTION_REQUESTS: Final = {
    Request.UPDATE: _CONFIGURE,
    **{kind: requests.REQUESTS[kind] for kind in _OF_SOUND},
}
_SOUND: Final = Table(
    oa.Part,
    fixed("type", "input_audio"),
    attrs.evolve(requests.null("transcript"), omit=True),
    make=lambda _: oa.Part(kind="input_audio"),
)


def _sound(part: oa.Part) -> dict[str, object]:
    return _SOUND.write(part) | ({"transcript": None} if part.is_whole else {})


_SESSION: Final = Object(
    "session",
    fixed("type", "transcription"),
    fixed("object", "realtime.transcription_session"),
    Field("id", TEXT),
    Field("expires_at", INTEGER),
    Object(
        "audio",
        requests.sent_input(
            Object(
                "transcription",
                Field("model", TEXT, attr="transcriber", example="tiny"),
                doc="The model that transcribes what the client says.",
            ),
            requests.PLAIN_DETECTION,
        ),
        doc="Sound.",
    ),
    requests.null("include"),
    attr="openai",
    doc="The session as it is in force.",
)
_ITEM: Final = Field(
    "item",
    one(
        Table(
            oa.Item,
            Field("id", TEXT, example="item_7b20d9c3a415"),
            fixed("object", "realtime.item"),
            fixed("type", "message"),
            fixed("role", "user"),
            fixed("status", "completed"),
            Field("content", items(attrs.evolve(one(_SOUND), write=_sound), 1), (), attr="parts"),
            make=lambda values: oa.Item(role="user", **values),
        )
    ),
)
_NEVER: Final = frozenset(
    {
        ErrorCode.ACTIVE_RESPONSE,
        ErrorCode.ITEM_NOT_FOUND,
        ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE,
        ErrorCode.INFERENCE_ERROR,
    }
)
"""They are about responses and named items; a failure has a message of its own."""
ERROR_CODES: Final = tuple(it for it in answers.ERROR_CODES if it not in _NEVER)
_TRANSCRIPTION_ANSWERS: Final = (
    answers.WAITS,
    Table(
        ms.Created,
        EVENT_ID,
        _SESSION,
        tag={"type": "session.created"},
        lacks={"session_id": "", "prompt_length": 0, "recording": "off"},
    ),
    Table(oa.Configured, EVENT_ID, _SESSION, tag={"type": "session.updated"}),
    *(table for kind, table in answers.INPUTS.items() if kind != "timeout_triggered"),
    answers.FAILED,
    answers.conversation("added", answers.PREVIOUS, _ITEM),
    answers.conversation("done", answers.PREVIOUS, _ITEM),
    error_table(ERROR_CODES, "event_id"),
)


_TYPES: Final = {table.kind: request for request, table in requests.REQUESTS.items()}
KNOWN: Final = frozenset({*_TYPES, "output_audio_buffer.clear", "transcription_session.update"})
"""Events of the API that a client may send."""


class OpenAI(Dialect):
    """The dialect of OpenAI's Realtime API."""

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message; a known event that is not offered is named."""
        kind = body.get("type")
        if isinstance(kind, str) and kind in KNOWN and kind not in self.types:
            raise unsupported("$.type", f"{kind}, which is not served here")
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
        is_untold = message.transcribes is False
        off = {"turn_detection": message.is_undetected, "transcription": is_untold}
        for name, is_off in off.items():
            if is_off:
                session.setdefault("audio", {}).setdefault("input", {})[name] = None
        return dump_frame(body)

    def encode(self, message: ms.ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames; a speaking second has its text first."""
        tables: tuple[Table, ...]
        match message:
            case ms.Speech():
                words = (answers.WORDS,) if message.text else ()
                tables = (*words, answers.SOUND) if message.pcm or not words else words
            case oa.ReplyStep():
                tables = (answers.STEPS[message.kind],)
            case oa.InputStep():
                is_failed = message.kind == "transcript_failed"
                tables = (answers.FAILED if is_failed else answers.INPUTS[message.kind],)
            case oa.ItemStep():
                tables = (answers.ITEMS[message.kind],)
            case oa.ReplyState():
                is_begun = message.reply.status == "in_progress"
                tables = (answers.BEGAN if is_begun else answers.DONE,)
            case ms.Queued() | ms.QueueUpdate() if message.is_for_openai:
                tables = (answers.WAITS,)
            case ms.Closed(reason=reason) if reason not in REASONS:
                raise LocalProtocolError(f"no end for {reason}: it is never told")
            case ms.Closed() | ms.Queued() | ms.QueueUpdate() | ms.QueueDone():
                tables = ()
            case ms.Listen() | ms.GoingAway():
                tables = ()
            case _:
                tables = (self._written[type(message)],)
        return tuple([table.encode(message) for table in tables])

    def decode(self, body: Json, mode: Mode = "video") -> tuple[ms.ServerMessage, ...]:
        """Read a server's message; of limits there are two kinds."""
        limits = body.get("rate_limits")
        if isinstance(limits, list) and limits and limits[0].get("name") == "tokens":
            return (answers.LEFT.parse(body),)
        return super().decode(body, mode)


def _check_parts(item: oa.Item) -> None:
    """Refuse a part that an item of its role cannot have."""
    for number, part in enumerate(item.parts):
        if part.kind not in requests.PARTS_OF[item.role]:
            kinds = ", ".join(requests.PARTS_OF[item.role])
            path = f"$.item.content[{number}].type"
            raise invalid(path, f"{part.kind}, an item of the {item.role} has {kinds}")
        if part.kind == "input_image" and not part.picture:
            raise missing(f"$.item.content[{number}].image_url")


def _is_null(body: Json, name: str) -> bool:
    """Whether a setting of the input is null, which is not the same as absent."""
    found: object = body
    for place in ("session", "audio", "input"):
        found = found.get(place) if isinstance(found, dict) else None
    return isinstance(found, dict) and found.get(name, found) is None


OPENAI: Final = OpenAI("openai", _TYPES, requests.REQUESTS, answers.ANSWERS)
OPENAI_TRANSCRIPTION: Final = OpenAI(
    "openai-transcription",
    {table.kind: request for request, table in _TRANSCRIPTION_REQUESTS.items()},
    _TRANSCRIPTION_REQUESTS,
    _TRANSCRIPTION_ANSWERS,
)
"""The dialect of its transcription sessions."""
