"""The messages of 001 that only mode=chat has; `realtime` describes and uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ...values.limits import TOOLS_MAX
from ...values.messages import Delta, Prefilled, Response
from ...values.requests import Ask, Init, Request
from ...values.turn import StopReason
from ..codec import Value, invalid
from ..field import DROPPED, Field
from ..kinds import INTEGER, OBJECT, SPEECH, TEXT, Kind, because, choice, text
from ..reading import Reading
from ..table import Object, Row, Table
from . import shared
from .chat_inputs import ask_rows
from .chat_tools import MADE_CALLS
from .inputs import ASKED, INPUT_ID, PROMPT

OUTPUT_DELTA: Final = "response.output.delta"
TURN_BASED: Final = "turn_based"
"""The runtime mode of `mode=chat` (001, Modes)."""
_OF_TURNS: Final = "in chat each turn brings its own"
STOP_REASONS: Final[tuple[StopReason, ...]] = ("turn_end", "length", "interrupted", "tool_calls")

# -- from the client ----------------------------------------------------------------------------


def _nothing(name: str) -> Field:
    """Make the row of a text that must be empty, as clients fill in unwanted fields."""
    return Field(name, because(text(0), _OF_TURNS), None, attr=DROPPED)


def _no_tools(value: Value, _: Reading) -> None:
    if value.items(TOOLS_MAX):
        raise invalid(value.path, f"tools, but {_OF_TURNS}")


_INIT: Final = Table(
    Init,
    Object(
        "payload",
        (
            Field(
                "system_prompt",
                PROMPT,
                "",
                attr="instructions",
                also=("instructions",),
            ),
            Object("voice", (_nothing("ref_audio_base64"), _nothing("tts_ref_audio_base64"))),
            Object("config", (), closed=f"not allowed: {_OF_TURNS}"),
            Field(
                "tools",
                Kind(read=_no_tools, schema={"type": "array", "const": []}),
                None,
                attr=DROPPED,
                doc="Must be empty here.",
            ),
            *ASKED,
        ),
        is_required=True,
    ),
    tag={"type": shared.SESSION_INIT},
    lacks={"instructions": ""},
)
ASK: Final = Table(
    Ask,
    Object("input", ask_rows(speaks=False), is_required=True, rank=1),
    INPUT_ID,
    tag={"type": shared.INPUT_APPEND},
    lacks={"record": True},
    where="a turn of realtime",
)
"""A turn; its wish about the recording is in the init here."""
REQUESTS: Final[Mapping[Request, Table]] = {Request.INIT: _INIT, Request.APPEND: ASK}

# -- from the server ----------------------------------------------------------------------------

ANSWERED: Final[tuple[Row, ...]] = (
    Field("response_id", TEXT),
    Field("input_id", TEXT, ""),
)
"""The ids of an answer."""


NO_METRICS: Final = Field("metrics", OBJECT, None, attr=DROPPED, get=lambda _: {}, is_read=False)


def _delta(kind: str, row: Field, **lacks: object) -> Table:
    return Table(
        Delta,
        Field("session_id", TEXT),
        *ANSWERED,
        row,
        NO_METRICS,
        tag={"type": OUTPUT_DELTA, "kind": kind},
        lacks=lacks,
    )


DELTAS: Final[Mapping[str, Table]] = {
    "text": _delta("text", Field("text", TEXT), pcm=b""),
    "audio": _delta("audio", Field("audio", SPEECH, attr="pcm"), text=""),
}
DONE: Final = Table(
    Response,
    Field("session_id", TEXT),
    *ANSWERED,
    Field("text", TEXT),
    Field("audio", SPEECH, b"", attr="pcm", omit=True),
    Field("reason", choice(STOP_REASONS), "turn_end"),
    Field("tool_calls", MADE_CALLS, (), omit=True),
    Object(
        "metrics",
        (
            *shared.METRICS,
            Field("input_tokens", INTEGER, 0, attr="^input_tokens"),
            Field("generated_tokens", INTEGER, 0, attr="^generated_tokens"),
        ),
        attr="metrics",
    ),
    tag={"type": "response.done"},
    lacks={"streaming": None, "recording_id": ""},
)


def encode_delta(delta: Delta) -> tuple[str, ...]:
    """Write a piece of an answer: text first, then sound; one frame at least."""
    text_frame = (DELTAS["text"].encode(delta),) if delta.text or not delta.pcm else ()
    return (*text_frame, DELTAS["audio"].encode(delta)) if delta.pcm else text_frame


def encode_response(response: Response) -> tuple[str, ...]:
    """Write the end of a turn, after the last of a streamed answer's speech."""
    if not response.pcm or not response.streaming:
        return (DONE.encode(response),)
    rest = Delta(
        session_id=response.session_id,
        response_id=response.response_id,
        input_id=response.input_id,
        pcm=response.pcm,
    )
    return (*encode_delta(rest), DONE.encode(attrs.evolve(response, pcm=b"")))


FRAMES: Final[Mapping[type, Callable[[Any], tuple[str, ...]]]] = {
    Prefilled: lambda _: (),
    Delta: encode_delta,
    Response: encode_response,
}
"""The frames of a turn, by class of message; the end of prefill has none."""
