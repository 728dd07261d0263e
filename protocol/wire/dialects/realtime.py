"""The dialect of 001: `session.init`, `input.append`, `response.output.delta`, `response.done`.

Choices in addition to 001:
- A prompt may be absent, and is empty then; `system_prompt` wins over its alias `instructions`.
- `input_id` stands at the top of `input.append`, as in the deltas that answer it.
- A speaking unit sends a text delta, if there is text, then an audio delta, if there is audio; with
  neither, an empty text delta, for each unit has a visible outcome (B9).
- `end_of_turn` is present, as true, only on the last delta of a speaking turn.
- In mode=chat an init may have a prompt, the system message of turns without one. A voice or a
  setting in it is refused, for each turn has its own. A turn without `tts` is only text, as in
  001's examples.
- An answer that was not streamed has its speech in `response.done`, as `audio`; the rest of a
  streamed one comes as a last audio delta before it. Both token counts are among its metrics.

001 cannot show: whose close reason it is (a client's `timeout` reads like the server's), whether an
answer without `audio` was streamed, and the end of prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ...values.errors import LocalProtocolError
from ...values.live import UserWords
from ...values.messages import Closed, Created, EndReason, Listen, ServerMessage, Speech
from ...values.modes import Mode
from ...values.openai import CancelResponse
from ...values.requests import Append, Ask, ClientMessage, Init, Request
from ..codec import Fields, Reading, as_object
from ..kinds import (
    FLAG,
    INTEGER,
    SPEECH,
    TEXT,
    VOICE,
    VOICE_BY_NAME,
    VOICE_OR_NAME,
    Kind,
    input_sound,
    word_of,
)
from ..table import Field, Object, Row, Rule, Table, optional
from . import chat, shared
from .base import Context, Dialect, Json

FULL_DUPLEX: Final = "full_duplex"
"""The runtime mode of both `mode=video` and `mode=audio` (001, Modes)."""

_REASONS: Final[Mapping[EndReason, str]] = {
    "client": "client_closed",
    "timeout": "timeout",
    "context_full": "context_full",
    "backend_error": "backend_error",
    "server_shutdown": "server_shutdown",
    "cancelled": "cancelled",
    "invalid_frame": "invalid_frame",
    "flooded": "flooded",
    "refused": "refused",
}
_ENDS: Final[Mapping[str, EndReason]] = {word: end for end, word in _REASONS.items()}

# -- from the client ----------------------------------------------------------------------------


def _voice_is_object(at: Reading) -> None:
    if at.body.get("voice") is not None:
        as_object(at.body["voice"], f"{at.path}.voice")


_INIT: Final = Table(
    Init,
    Object(
        "payload",
        Rule(_voice_is_object),
        shared.config("config", rank=1),
        Field("max_slice_nums", shared.SLICES, 1, omit=True, rank=2),
        Field(
            "system_prompt",
            shared.PROMPT,
            "",
            attr="instructions",
            also=("instructions",),
            omit=True,
        ),
        Object(
            "voice",
            optional("ref_audio_base64", VOICE_OR_NAME, attr="ref_audio"),
            shared.setting(
                "ref_audio_path", VOICE_BY_NAME, None, attr="ref_audio", after="ref_audio_base64"
            ),
            optional("tts_ref_audio_base64", VOICE, attr="tts_ref_audio"),
            omit=True,
        ),
        shared.slices_once("config"),
        chat.DUPLEX_TOOLS_ROW,
        *shared.ASKED,
        is_required=True,
    ),
    tag={"type": shared.SESSION_INIT},
    lacks={"config.deferred_finalize": True},
    where="this dialect",
)
_APPEND: Final = Table(
    Append,
    Object(
        "input",
        Field("audio", input_sound(1), attr="pcm"),
        shared.frames("video_frames"),
        shared.FORCE_LISTEN,
        shared.APPEND_SLICES,
        is_required=True,
        rank=1,
    ),
    shared.INPUT_ID,
    tag={"type": shared.INPUT_APPEND},
)

# -- from the server ----------------------------------------------------------------------------


def _created(mode: str) -> Table:
    """Make the table of `session.created` for one of the runtime modes; it reads both."""
    modes = {FULL_DUPLEX: False, chat.TURN_BASED: True}
    word = word_of(modes, lambda is_chat: chat.TURN_BASED if is_chat else FULL_DUPLEX)
    return Table(
        Created,
        Field("session_id", TEXT),
        Field(
            "mode",
            attrs.evolve(word, schema={"type": "string", "const": mode}),
            False,
            attr="is_chat",
            doc="Always this.",
        ),
        Field("prompt_length", INTEGER, 0),
        Field("recording", shared.RECORDING, "off"),
        *shared.RECORDED,
        *([] if mode == chat.TURN_BASED else [chat.TOOLS_STATE]),
        chat.NO_METRICS,
        tag={"type": shared.SESSION_CREATED},
    )


def _delta(cls: type, kind: str, *rows: Row, **lacks: object) -> Table:
    return Table(
        cls,
        Field("session_id", TEXT),
        *rows,
        Object("metrics", *shared.METRICS, attr="metrics", doc="What the unit took."),
        tag={"type": chat.OUTPUT_DELTA, "kind": kind},
        lacks=lacks,
    )


_END_OF_TURN: Final = Field("end_of_turn", FLAG, False, omit=True)
_TEXT: Final = _delta(Speech, "text", *chat.ANSWERED, Field("text", TEXT), _END_OF_TURN, pcm=b"")
_AUDIO: Final = _delta(
    Speech, "audio", *chat.ANSWERED, Field("audio", SPEECH, attr="pcm"), _END_OF_TURN, text=""
)
_LISTEN: Final = _delta(
    Listen, "listen", Field("response_id", TEXT, "", omit=True), Field("input_id", TEXT, "")
)


def _encode_speech(speech: Speech) -> tuple[str, ...]:
    """Write text, then sound; the last of the two has the turn's end."""
    if not speech.pcm:
        return (_TEXT.encode(speech),)
    audio = _AUDIO.encode(speech)
    if not speech.text:
        return (audio,)
    first = attrs.evolve(speech, end_of_turn=False) if speech.end_of_turn else speech
    return (_TEXT.encode(first), audio)


def _word(closed: Closed) -> str:
    reason = closed.client_reason if closed.reason == "client" else None
    word = reason or _REASONS.get(closed.reason)
    if word is None:
        raise LocalProtocolError(f"no session.closed for {closed.reason}: it is never sent")
    return word


def _closed(values: dict[str, Any]) -> Closed:
    word = values.pop("reason")
    if word in _ENDS:
        return Closed(reason=_ENDS[word], **values)
    return Closed(reason="client", client_reason=word or None, **values)


_CLOSED: Final = Table(
    Closed,
    Field("session_id", TEXT),
    Field(
        "reason",
        Kind(
            read=TEXT.read,
            schema={
                "type": "string",
                "examples": [word for end, word in _REASONS.items() if end != "client"],
            },
        ),
        get=_word,
        example="user_stop",
        doc="Why it ended. The client's own words, where it ended the session and gave any.",
    ),
    tag={"type": shared.SESSION_CLOSED},
    make=_closed,
)
_USER_WORDS: Final = Table(
    UserWords,
    Field("delta", TEXT, attr="text"),
    Field("start_ms", INTEGER),
    Field("end_ms", INTEGER),
    tag={"type": "session.input_transcript.delta"},
)
_CREATED: Final = _created(FULL_DUPLEX)
_CHAT_CREATED: Final = _created(chat.TURN_BASED)
_DELTAS: Final = {"listen": _LISTEN, "text": _TEXT, "audio": _AUDIO}


class Realtime(Dialect):
    """The dialect of 001."""

    def requests(self, mode: Mode) -> tuple[tuple[Request, Table], ...]:
        """List the client's messages; in chat, others of the same types."""
        if mode != "chat":
            return super().requests(mode)
        tables = {**dict(super().requests(mode)), **chat.REQUESTS}
        return tuple(it for it in tables.items() if it[0] not in chat.DUPLEX_REQUESTS)

    def answers(self, mode: Mode) -> tuple[Table, ...]:
        """List the server's messages; chat has others."""
        if mode != "chat":
            return (
                _CREATED,
                *_DELTAS.values(),
                chat.TOOL_CALL,
                _USER_WORDS,
                _CLOSED,
                *shared.COMMON,
            )
        return (_CHAT_CREATED, *chat.DELTAS.values(), chat.DONE, _CLOSED, *shared.COMMON)

    def classify(self, body: Json) -> Request:
        """Return the kind of request of a client's message."""
        if body.get("type") == chat.RESPONSE_CANCEL:  # which only a chat knows
            return Request.CANCEL
        return shared.classify(body, self.types)

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message."""
        if context.mode == "chat" and request in chat.REQUESTS:
            message: ClientMessage = chat.REQUESTS[request].parse(body, context)
            return message
        return super().parse(request, body, context)

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames."""
        if isinstance(message, Speech):
            return _encode_speech(message)
        frames = chat.FRAMES.get(type(message))
        return super().encode(message) if frames is None else frames(message)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame."""
        if isinstance(message, Ask):
            return chat.ASK.encode(message)
        if isinstance(message, CancelResponse):
            return chat.CANCEL.encode(message)
        return super().encode_request(message)

    def decode(self, body: Json, mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a server's message; text and audio of a unit are a `Speech` each, or a `Delta`."""
        if body.get("type") != chat.OUTPUT_DELTA:
            return super().decode(body, mode)
        tables = chat.DELTAS if mode == "chat" else _DELTAS
        kind = Fields(body).required("kind", lambda value: value.choice(tuple(tables)))
        return (tables[kind].parse(body),)


REALTIME: Final = Realtime(
    "realtime",
    {
        shared.SESSION_INIT: Request.INIT,
        shared.INPUT_APPEND: Request.APPEND,
        shared.SESSION_CLOSE: Request.CLOSE,
        shared.PLAYBACK_ACK: Request.PLAYED,
        **chat.DUPLEX_TYPES,
    },
    {
        Request.INIT: _INIT,
        Request.APPEND: _APPEND,
        Request.CLOSE: shared.CLOSE,
        Request.PLAYED: shared.PLAYED,
        **chat.DUPLEX_REQUESTS,
    },
    (_CREATED, _LISTEN, chat.TOOL_CALL, chat.DONE, _USER_WORDS, _CLOSED, *shared.COMMON),
)
