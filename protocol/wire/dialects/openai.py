"""The dialect `openai`: the GA Realtime API, where a response is one speaking turn of the model.

Names, fields and words are those of the types of the `openai` package (`openai.types.realtime`).

Choices in addition to them:
- Nothing is said of the queue; `session.created` comes when the session has a slot. A session's end
  is the connection's: there is no message for it.
- `event_id` is filled in by the session, which knows the number of the frame.
- A response's item has its number: `item_...` for `resp_...`.
- What the model cannot do is refused by its name (`unsupported`).

`openai` cannot show: listening, metrics, the recording's name.
"""

from __future__ import annotations

from typing import Final, cast

import attrs

from ...values.errors import LocalProtocolError
from ...values.items import Item
from ...values.messages import (
    Closed,
    GoingAway,
    Listen,
    Queued,
    QueueDone,
    QueueUpdate,
    ServerMessage,
    Speech,
)
from ...values.openai import Configure, CreateItem, InputStep, ItemStep, ReplyState, ReplyStep
from ...values.requests import ClientMessage, Request
from ..codec import dump_frame, invalid
from ..reading import missing
from ..table import Table
from . import openai_answers as answers
from . import openai_requests as requests
from . import openai_transcription as transcription
from .base import Context, Dialect, Json
from .live_answers import REASONS
from .live_requests import unsupported

_TYPES: Final = {table.kind: request for request, table in requests.REQUESTS.items()}
KNOWN: Final = frozenset({*_TYPES, "output_audio_buffer.clear", "transcription_session.update"})
"""Events of the API that a client may send."""
_SILENT: Final = (Queued, QueueUpdate, QueueDone, Listen, GoingAway, Closed)
"""Messages of other dialects, without a frame here."""


class OpenAI(Dialect):
    """The dialect of OpenAI's Realtime API."""

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message; a known event that is not offered is named."""
        kind = body.get("type")
        if isinstance(kind, str) and kind in KNOWN and kind not in self.types:
            raise unsupported("$.type", f"{kind}, which is not served here")
        message = super().parse(request, body, context)
        match message:
            case Configure():
                is_undetected = _is_null(body, "turn_detection")
                transcribes = False if _is_null(body, "transcription") else message.transcribes
                return attrs.evolve(message, is_undetected=is_undetected, transcribes=transcribes)
            case CreateItem(item=item):
                _check_parts(item)
        return message

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame."""
        if not isinstance(message, Configure):
            return super().encode_request(message)
        body = self._written[Configure].write(message)
        session = cast("dict[str, dict[str, dict[str, object]]]", body["session"])
        is_untold = message.transcribes is False
        off = {"turn_detection": message.is_undetected, "transcription": is_untold}
        for name, is_off in off.items():
            if is_off:
                session.setdefault("audio", {}).setdefault("input", {})[name] = None
        return dump_frame(body)

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames; a speaking second has its text first."""
        if isinstance(message, _SILENT):
            if isinstance(message, Closed) and message.reason not in REASONS:
                raise LocalProtocolError(f"no end for {message.reason}: it is never told")
            return ()
        return tuple(table.encode(message) for table in self._tables(message))

    def _tables(self, message: ServerMessage) -> tuple[Table, ...]:
        match message:
            case Speech():
                words = (answers.WORDS,) if message.text else ()
                return (*words, answers.SOUND) if message.pcm or not words else words
            case ReplyStep():
                return (answers.STEPS[message.kind],)
            case InputStep():
                is_failed = message.kind == "transcript_failed"
                return (answers.FAILED if is_failed else answers.INPUTS[message.kind],)
            case ItemStep():
                return (answers.ITEMS[message.kind],)
            case ReplyState():
                is_begun = message.reply.status == "in_progress"
                return (answers.BEGAN if is_begun else answers.DONE,)
        return (self._written[type(message)],)


def _check_parts(item: Item) -> None:
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


OPENAI: Final = OpenAI(
    "openai",
    _TYPES,
    requests.REQUESTS,
    answers.ANSWERS,
)
OPENAI_TRANSCRIPTION: Final = OpenAI(
    "openai-transcription",
    {table.kind: request for request, table in transcription.REQUESTS.items()},
    transcription.REQUESTS,
    transcription.ANSWERS,
)
"""The dialect of its transcription sessions."""
