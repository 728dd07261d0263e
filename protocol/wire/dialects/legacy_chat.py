"""The dialect of 004: a connection is one request, `prefill_done`, `chunk`s, `done`.

Every object is a request, without a type (fields: `chat_inputs`); the client has no other message.
The end has no word: the server closes the connection.

004 cannot show: the ids of session, response and input, why an answer ended, whether it was
streamed, and its costs. The reading side has empty ids, `turn_end`, streaming and no metrics.
"""

from __future__ import annotations

from typing import Final

from ...values.messages import Delta, Metrics, Prefilled, Response
from ...values.requests import Ask, Request
from ..field import Field
from ..kinds import INTEGER, SPEECH, TEXT, or_null
from ..table import Table
from . import legacy
from .base import Dialect, Json
from .chat_inputs import ask_rows
from .chat_tools import MADE_CALLS
from .inputs import RECORD

_ASK: Final = Table(
    Ask,
    *ask_rows(speaks=True),
    RECORD,
    lacks={"input_id": None},
    where="legacy-chat",
)
_IDS: Final = {"session_id": "", "response_id": "", "input_id": ""}
_ANSWERS: Final = (
    Table(Prefilled, Field("input_tokens", INTEGER), tag={"type": "prefill_done"}),
    Table(
        Delta,
        Field("text_delta", or_null(TEXT), "", attr="text"),
        Field("audio_data", or_null(SPEECH), b"", attr="pcm"),
        tag={"type": "chunk"},
        lacks=_IDS,
    ),
    Table(
        Response,
        Field("text", TEXT),
        Field("generated_tokens", INTEGER, 0),
        Field("input_tokens", INTEGER, 0),
        Field("audio_data", or_null(SPEECH), b"", attr="pcm"),
        Field("tool_calls", MADE_CALLS, (), omit=True),
        Field("recording_session_id", TEXT, "", attr="recording_id", omit=True),
        tag={"type": "done"},
        lacks={
            **_IDS,
            "reason": "turn_end",
            "streaming": None,
            "metrics": Metrics(kv_cache_length=0, recording="off"),
        },
    ),
    *legacy.COMMON,
)


class LegacyChat(Dialect):
    """The dialect of 004."""

    def classify(self, _body: Json) -> Request:
        """Return the kind of request: there is only one."""
        return Request.INIT


LEGACY_CHAT: Final = LegacyChat("legacy-chat", {}, {Request.INIT: _ASK}, _ANSWERS)
