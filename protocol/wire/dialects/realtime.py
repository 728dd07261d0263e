"""The two dialects of `/v1/realtime`: `realtime` of 001, and `duplex-v1` of 000.

`session.init`, `input.append`, `response.output.delta` and `response.done` are those of 001.
Choices in addition to it:
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

`session.update`, `input_audio_buffer.append` and `response.output_audio.delta` are those of 000.
Choices in addition to it:
- Listens and deltas have a `metrics` object as in `realtime`, so that dropped units can be seen.
- An end without the client's wish and without a word in 000 is an `error`; a session that an
  operator cancelled is `stopped`, as on the close frame.
- `session.voice_config` holds the settings that 002 has in `config`: the source's pages send it.

000 has no ids for input, responses, or sessions once created: the writing side refuses to lose the
first, the reading side leaves ids empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ...values import messages as ms
from ...values.errors import LocalProtocolError, invalid
from ...values.limits import APPEND_SAMPLES_MIN, INPUT_ID_CHARS_MAX, TOOLS_MAX, Mode
from ...values.openai import CancelResponse, UserWords
from ...values.requests import Append, Ask, ClientMessage, Init, Request
from .. import codec as c
from ..table import Dialect, Field, Object, Row, Rule, Table, checked, computed, optional, typed
from . import chat, shared

FULL_DUPLEX: Final = "full_duplex"
"""The runtime mode of both `mode=video` and `mode=audio` (001, Modes)."""
OUTPUT_DELTA: Final = "response.output.delta"
TURN_BASED: Final = "turn_based"
"""The runtime mode of `mode=chat` (001, Modes)."""

_REASONS: Final[Mapping[ms.EndReason, str]] = {
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
_ENDS: Final[Mapping[str, ms.EndReason]] = {word: end for end, word in _REASONS.items()}

# -- from the client ----------------------------------------------------------------------------


def _voice_is_object(at: c.ParseState) -> None:
    if at.body.get("voice") is not None:
        c.as_object(at.body["voice"], f"{at.path}.voice")


_INIT: Final = typed(
    Init,
    shared.SESSION_INIT,
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
            optional("ref_audio_base64", c.VOICE_OR_NAME, attr="ref_audio"),
            shared.setting(
                "ref_audio_path", c.VOICE_BY_NAME, None, attr="ref_audio", after="ref_audio_base64"
            ),
            optional("tts_ref_audio_base64", c.VOICE, attr="tts_ref_audio"),
            omit=True,
        ),
        shared.slices_once("config"),
        chat.DUPLEX_TOOLS_ROW,
        *shared.ASKED,
        is_required=True,
    ),
    lacks={"config.deferred_finalize": True},
    where="this dialect",
)
_APPEND: Final = typed(
    Append,
    shared.INPUT_APPEND,
    Object(
        "input",
        Field("audio", c.input_sound(1), attr="pcm"),
        shared.frames("video_frames"),
        shared.FORCE_LISTEN,
        shared.APPEND_SLICES,
        is_required=True,
        rank=1,
    ),
    shared.INPUT_ID,
)

# -- from the client in a chat --------------------------------------------------------------------

_OF_TURNS: Final = "in chat each turn brings its own"


def _nothing(name: str) -> Field:
    """Make the row of a text that must be empty, as clients fill in unwanted fields."""
    return checked(name, c.because(c.text(0), _OF_TURNS))


def _no_tools(value: c.Value, _: c.ParseState) -> None:
    if value.items(TOOLS_MAX):
        raise invalid(value.path, f"tools, but {_OF_TURNS}")


_NO_TOOLS: Final = c.FieldType(read=_no_tools, schema={"type": "array", "const": []})
_CHAT_INIT: Final = typed(
    Init,
    shared.SESSION_INIT,
    Object(
        "payload",
        Field("system_prompt", shared.PROMPT, "", attr="instructions", also=("instructions",)),
        Object("voice", _nothing("ref_audio_base64"), _nothing("tts_ref_audio_base64")),
        Object("config", closed=f"not allowed: {_OF_TURNS}"),
        checked("tools", _NO_TOOLS, "Must be empty here."),
        *shared.ASKED,
        is_required=True,
    ),
    lacks={"instructions": ""},
)
_ASK: Final = typed(
    Ask,
    shared.INPUT_APPEND,
    Object("input", *chat.ask_rows(is_enabled=True), is_required=True, rank=1),
    shared.INPUT_ID,
    lacks={"record": True},
    where="a turn of realtime",
)
"""A turn; its wish about the recording is in the init here."""
_RESPONSE_CANCEL: Final = "response.cancel"
_CANCEL: Final = typed(
    CancelResponse,
    _RESPONSE_CANCEL,
    optional("response_id", c.text(INPUT_ID_CHARS_MAX, 1, holds=c.NAMED)),
    doc="End the answer that is under way; without one it has no effect.",
)
_CHAT_REQUESTS: Final[Mapping[Request, Table]] = {
    Request.INIT: _CHAT_INIT,
    Request.APPEND: _ASK,
    Request.CANCEL: _CANCEL,
}

# -- from the server ----------------------------------------------------------------------------

_ANSWERED: Final[tuple[Row | str, ...]] = (
    Field("response_id", c.TEXT),
    Field("input_id", c.TEXT, ""),
)
"""The ids of an answer."""


_NO_METRICS: Final = computed("metrics", c.OBJECT, lambda _: {}, is_read=False)


def _created(mode: str) -> Table:
    """Make the table of `session.created` for one of the runtime modes; it reads both."""
    modes = {FULL_DUPLEX: False, TURN_BASED: True}
    word = c.word_of(modes, lambda is_chat: TURN_BASED if is_chat else FULL_DUPLEX)
    return typed(
        ms.Created,
        shared.SESSION_CREATED,
        Field("session_id", c.TEXT),
        Field(
            "mode",
            attrs.evolve(word, schema={"type": "string", "const": mode}),
            False,
            attr="is_chat",
        ),
        "Always this.",
        Field("prompt_length", c.INTEGER, 0),
        Field("recording", shared.RECORDING, "off"),
        *shared.RECORDED,
        *([] if mode == TURN_BASED else [chat.TOOLS_STATE]),
        _NO_METRICS,
    )


def _delta(cls: type, kind: str, *rows: Row | str, **lacks: object) -> Table:
    return Table(
        cls,
        Field("session_id", c.TEXT),
        *rows,
        Object("metrics", *shared.METRICS, attr="metrics", doc="What the unit took."),
        tag={"type": OUTPUT_DELTA, "kind": kind},
        lacks=lacks,
    )


_END_OF_TURN: Final = Field("end_of_turn", c.FLAG, False, omit=True)
_TEXT: Final = _delta(ms.Speech, "text", *_ANSWERED, Field("text", c.TEXT), _END_OF_TURN, pcm=b"")
_AUDIO: Final = _delta(
    ms.Speech, "audio", *_ANSWERED, Field("audio", c.SPEECH, attr="pcm"), _END_OF_TURN, text=""
)
_LISTEN: Final = _delta(
    ms.Listen, "listen", Field("response_id", c.TEXT, "", omit=True), Field("input_id", c.TEXT, "")
)


def _encode_speech(speech: ms.Speech) -> tuple[str, ...]:
    """Write text, then sound; the last of the two has the turn's end."""
    if not speech.pcm:
        return (_TEXT.encode(speech),)
    audio = _AUDIO.encode(speech)
    if not speech.text:
        return (audio,)
    first = attrs.evolve(speech, end_of_turn=False) if speech.end_of_turn else speech
    return (_TEXT.encode(first), audio)


def _word(closed: ms.Closed) -> str:
    reason = closed.client_reason if closed.reason == "client" else None
    word = reason or _REASONS.get(closed.reason)
    if word is None:
        raise LocalProtocolError(f"no session.closed for {closed.reason}: it is never sent")
    return word


def _closed(values: dict[str, Any]) -> ms.Closed:
    word = values.pop("reason")
    if word in _ENDS:
        return ms.Closed(reason=_ENDS[word], **values)
    return ms.Closed(reason="client", client_reason=word or None, **values)


_CLOSED: Final = typed(
    ms.Closed,
    shared.SESSION_CLOSED,
    Field("session_id", c.TEXT),
    Field(
        "reason",
        c.FieldType(
            read=c.TEXT.read,
            schema={
                "type": "string",
                "examples": [word for end, word in _REASONS.items() if end != "client"],
            },
        ),
        get=_word,
        example="user_stop",
    ),
    "Why it ended. The client's own words, where it ended the session and gave any.",
    make=_closed,
)
_USER_WORDS: Final = typed(
    UserWords,
    "session.input_transcript.delta",
    Field("delta", c.TEXT, attr="text"),
    Field("start_ms", c.INTEGER),
    Field("end_ms", c.INTEGER),
)

# -- from the server in a chat --------------------------------------------------------------------


def _chat_delta(kind: str, row: Field) -> Table:
    return Table(
        ms.Delta,
        Field("session_id", c.TEXT),
        *_ANSWERED,
        row,
        _NO_METRICS,
        tag={"type": OUTPUT_DELTA, "kind": kind},
    )


_CHAT_DELTAS: Final[Mapping[str, Table]] = {
    "text": _chat_delta("text", Field("text", c.TEXT)),
    "audio": _chat_delta("audio", Field("audio", c.SPEECH, attr="pcm")),
}
_CHAT_DONE: Final = typed(
    ms.Response,
    "response.done",
    Field("session_id", c.TEXT),
    *_ANSWERED,
    Field("text", c.TEXT),
    Field("audio", c.SPEECH, b"", attr="pcm", omit=True),
    Field("reason", c.choice(("turn_end", "length", "interrupted", "tool_calls")), "turn_end"),
    Field("tool_calls", chat.MADE_CALLS, (), omit=True),
    Object(
        "metrics",
        *shared.METRICS,
        Field("input_tokens", c.INTEGER, 0, attr="^input_tokens"),
        Field("generated_tokens", c.INTEGER, 0, attr="^generated_tokens"),
        attr="metrics",
    ),
    lacks={"streaming": None, "recording_id": ""},
)


def _encode_delta(delta: ms.Delta) -> tuple[str, ...]:
    """Write a piece of an answer: text first, then sound; one frame at least."""
    text_frame = (_CHAT_DELTAS["text"].encode(delta),) if delta.text or not delta.pcm else ()
    return (*text_frame, _CHAT_DELTAS["audio"].encode(delta)) if delta.pcm else text_frame


def _encode_response(response: ms.Response) -> tuple[str, ...]:
    """Write the end of a turn, after the last of a streamed answer's speech."""
    if not response.pcm or not response.streaming:
        return (_CHAT_DONE.encode(response),)
    rest = ms.Delta(
        session_id=response.session_id,
        response_id=response.response_id,
        input_id=response.input_id,
        pcm=response.pcm,
    )
    return (*_encode_delta(rest), _CHAT_DONE.encode(attrs.evolve(response, pcm=b"")))


_CHAT_FRAMES: Final[Mapping[type, Callable[[Any], tuple[str, ...]]]] = {
    ms.Prefilled: lambda _: (),
    ms.Delta: _encode_delta,
    ms.Response: _encode_response,
}
"""The frames of a turn, by class of message; the end of prefill has none."""

# -- the dialect ----------------------------------------------------------------------------------

_CREATED: Final = _created(FULL_DUPLEX)
_CHAT_CREATED: Final = _created(TURN_BASED)
_DELTAS: Final = {"listen": _LISTEN, "text": _TEXT, "audio": _AUDIO}


class Realtime(Dialect):
    """The dialect of 001."""

    def requests(self, mode: Mode) -> tuple[tuple[Request, Table], ...]:
        """List the client's messages; in chat, others of the same types."""
        if mode != "chat":
            return super().requests(mode)
        tables = {**dict(super().requests(mode)), **_CHAT_REQUESTS}
        return tuple(it for it in tables.items() if it[0] not in chat.DUPLEX_REQUESTS)

    def answers(self, mode: Mode) -> tuple[Table, ...]:
        """List the server's messages; chat has others."""
        if mode != "chat":
            own = (_CREATED, *_DELTAS.values(), chat.TOOL_CALL, _USER_WORDS, _CLOSED)
            return (*own, *shared.COMMON)
        return (_CHAT_CREATED, *_CHAT_DELTAS.values(), _CHAT_DONE, _CLOSED, *shared.COMMON)

    def classify(self, body: c.Json) -> Request:
        """Return the kind of request of a client's message."""
        if body.get("type") == _RESPONSE_CANCEL:  # which only a chat knows
            return Request.CANCEL
        return shared.classify(body, self.types)

    def parse(self, request: Request, body: c.Json, context: c.Context) -> ClientMessage:
        """Check every field of a client's message."""
        if context.mode == "chat" and request in _CHAT_REQUESTS:
            message: ClientMessage = _CHAT_REQUESTS[request].parse(body, context)
            return message
        return super().parse(request, body, context)

    def encode(self, message: ms.ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames."""
        if isinstance(message, ms.Speech):
            return _encode_speech(message)
        frames = _CHAT_FRAMES.get(type(message))
        return super().encode(message) if frames is None else frames(message)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame."""
        if isinstance(message, Ask):
            return _ASK.encode(message)
        if isinstance(message, CancelResponse):
            return _CANCEL.encode(message)
        return super().encode_request(message)

    def decode(self, body: c.Json, mode: Mode = "video") -> tuple[ms.ServerMessage, ...]:
        """Read a server's message; text and audio of a unit are a `Speech` each, or a `Delta`."""
        if body.get("type") != OUTPUT_DELTA:
            return super().decode(body, mode)
        tables = _CHAT_DELTAS if mode == "chat" else _DELTAS
        kind = c.Fields(body).required("kind", lambda value: value.choice(tuple(tables)))
        return (tables[kind].parse(body),)


REALTIME: Final = Realtime(
    "realtime",
    {Request.INIT: _INIT, Request.APPEND: _APPEND, **chat.COMMON_REQUESTS},
    (_CREATED, _LISTEN, chat.TOOL_CALL, _CHAT_DONE, _USER_WORDS, _CLOSED, *shared.COMMON),
)


# -- the dialect of 000 -------------------------------------------------------------------------

_V1_REASONS: Final[Mapping[ms.EndReason, str]] = {
    "client": "stopped",
    "timeout": "timeout",
    "context_full": "context_full",
    "backend_error": "error",
    "server_shutdown": "server_shutdown",
    "cancelled": "stopped",
    "invalid_frame": "error",
    "flooded": "error",
}
_V1_ENDS: Final[Mapping[str, ms.EndReason]] = {
    "stopped": "client",
    "timeout": "timeout",
    "context_full": "context_full",
    "server_shutdown": "server_shutdown",
    "error": "backend_error",
}

_V1_UPDATE: Final = typed(
    Init,
    shared.SESSION_UPDATE,
    Object(
        "session",
        shared.config("voice_config", rank=1),
        Field("max_slice_nums", shared.SLICES, 1),
        Field("instructions", shared.PROMPT, rank=-1),
        optional("ref_audio", c.VOICE, rank=10),
        optional("tts_ref_audio", c.VOICE, rank=10),
        shared.slices_once("voice_config"),
        chat.DUPLEX_TOOLS_ROW,
        *shared.ASKED,
        is_required=True,
    ),
    lacks={"config.deferred_finalize": True},
    where="this dialect",
)
_V1_APPEND: Final = typed(
    Append,
    shared.AUDIO_APPEND,
    Field("audio", c.input_sound(APPEND_SAMPLES_MIN), attr="pcm"),
    shared.frames("video_frames"),
    shared.FORCE_LISTEN,
    shared.APPEND_SLICES,
    lacks={"input_id": None},
    where="duplex-v1",
)
_V1_METRICS: Final = (
    Object("metrics", *shared.METRICS, attr="metrics", rank=1),
    Field("kv_cache_length", c.INTEGER, attr="metrics.kv_cache_length"),
)
"""Our addition, and 000's own field for the length."""


_V1_ANSWERS: Final = (
    typed(
        ms.Created,
        shared.SESSION_CREATED,
        Field("session_id", c.TEXT),
        Field("prompt_length", c.INTEGER),
        Field("recording", shared.RECORDING, "off"),
        *shared.RECORDED,
        chat.TOOLS_STATE,
    ),
    typed(ms.Listen, "response.listen", *_V1_METRICS, lacks={"session_id": "", "input_id": ""}),
    typed(
        ms.Speech,
        "response.output_audio.delta",
        Field("text", c.TEXT),
        Field("audio", c.SPEECH, attr="pcm"),
        Field("end_of_turn", c.FLAG),
        *_V1_METRICS,
        lacks={"session_id": "", "response_id": "", "input_id": ""},
    ),
    typed(
        ms.Closed,
        shared.SESSION_CLOSED,
        Field("reason", c.word_of(_V1_ENDS), get=shared.end_word(_V1_REASONS)),
        lacks={"session_id": ""},
    ),
    chat.TOOL_CALL,
    *shared.COMMON,
)


class DuplexV1(Dialect):
    """The dialect of 000."""

    def classify(self, body: c.Json) -> Request:
        """Return the kind of request of a client's message; an update of 003 is misplaced."""
        if shared.is_model_update(body):
            return Request.MISPLACED
        return shared.classify(body, self.types)


DUPLEX_V1: Final = DuplexV1(
    "duplex-v1",
    {Request.INIT: _V1_UPDATE, Request.APPEND: _V1_APPEND, **chat.COMMON_REQUESTS},
    _V1_ANSWERS,
)
