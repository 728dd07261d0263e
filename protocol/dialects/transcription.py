"""The dialect of 003: a model is chosen, sound is appended and committed, text comes back.

003 has two sets of names for the same. The server takes both from anybody, and answers in the set
that its client began with:

| | `transcription` | `transcription-responses` |
|---|---|---|
| choose a model | `session.update` | `session.create` |
| ask for an utterance's text | `input_audio_buffer.commit` | `response.create` |
| end its sound | the same, `final` | `input_audio_buffer.commit` |
| both at once | the same, `final` | `input_audio_buffer.commit`, `final` |
| a piece of text | `transcription.delta` | `response.text.delta` |
| an utterance's end | `transcription.done` | `response.done` |

A `language` or a `prompt`, which OpenAI's clients of transcriptions know, is refused by its name:
none of our models takes one. Where it says nothing it is taken.

Choices beside what 003 says: an end that is nobody's wish is an `error` whose code says which, and
is read as that end. Any other end has no message, and a client's own type is either known or not:
there is no event that is only out of place.

What it cannot show: anything of the queue, whether there is a recording, that the server will go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..behaviour import HINTS_REFUSED, LINE_BREAKS, TWO_SIGNALS
from ..codec import Fields, Value, dump_frame, encode_base64, invalid, kind_of
from ..errors import ErrorCode, FieldError, RemoteProtocolError
from ..messages import (
    Closed,
    Created,
    EndReason,
    ErrorReport,
    Mode,
    ServerMessage,
    TranscriptDelta,
    TranscriptDone,
)
from ..requests import AppendSound, ChooseModel, ClientMessage, Commit, Request
from . import shared
from .base import Context, Json, no_frame, refusal
from .inputs import read_record, record_fields
from .legacy import error_frame

SESSION_CREATE: Final = "session.create"
AUDIO_COMMIT: Final = "input_audio_buffer.commit"
RESPONSE_CREATE: Final = "response.create"

_OWN: Final[Mapping[str, Request]] = {
    shared.SESSION_UPDATE: Request.INIT,
    SESSION_CREATE: Request.INIT,
    shared.AUDIO_APPEND: Request.APPEND,
    AUDIO_COMMIT: Request.COMMIT,
    RESPONSE_CREATE: Request.COMMIT,
}
_DELTAS: Final = ("transcription.delta", "response.text.delta")
_DONES: Final = ("transcription.done", "response.done")
_ENDS: Final[Mapping[EndReason, str]] = {
    "timeout": "the session is over: it has lasted as long as a session may",
    "backend_error": "the session is over: the model was lost",
    "server_shutdown": "the session is over: the server shuts down",
}
"""What an end is told by."""
_SILENT_ENDS: Final[frozenset[EndReason]] = frozenset(
    {"idle", "cancelled", "invalid_frame", "flooded", "refused", "rejected"}
)
"""The ends that the close alone tells, or an error before it."""
_HINTS: Final[Mapping[str, str]] = {
    "language": "the model writes down the language that it hears, and takes no other",
    "prompt": "the model has fixed instructions, and takes no prompt",
}
"""Fields that may say nothing, and why."""


def begins_with_create(body: Json) -> bool:
    """Whether a client that chooses its model so is answered in the second set of names."""
    return body.get("type") == SESSION_CREATE


class Transcription:
    """The dialect of 003; see `base.Dialect` for what its methods do.

    Args:
        name: of the set of names.
        choice: the type of the message that chooses a model.
        beginning: the type of what asks for an utterance's text and does not end its sound.
        delta: the type of a piece of text.
        done: the type of an utterance's end.
    """

    def __init__(self, name: str, *, choice: str, beginning: str, delta: str, done: str) -> None:
        self._name = name
        self._choice = choice
        self._beginning = beginning
        self._delta = delta
        self._done = done

    @property
    def _asks_apart(self) -> bool:
        """Whether a commit ends sound, and another message asks for its text."""
        return self._beginning != AUDIO_COMMIT

    @property
    def name(self) -> str:
        """`transcription` or `transcription-responses`."""
        return self._name

    def classify(self, body: Json) -> Request:
        """Say what kind of request a client's message is."""
        kind = body.get("type")
        return _OWN.get(kind, Request.UNKNOWN) if isinstance(kind, str) else Request.UNKNOWN

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message."""
        fields = Fields(body)
        match request:
            case Request.INIT:
                return _parse_choice(fields, context)
            case Request.APPEND:
                return _parse_append(fields, context)
            case Request.COMMIT:
                if body.get("type") == RESPONSE_CREATE:
                    return _parse_create(fields)
                is_end = self._asks_apart and context.behaves(TWO_SIGNALS)
                return _parse_commit(fields, is_end=is_end)
        raise refusal(request, body)

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames."""
        match message:
            case Created(session_id=session_id, created_s=created_s) as created:
                body = {"type": shared.SESSION_CREATED, "id": session_id, "created": created_s}
                told = shared.recorded_as(created.recording_id, created.recording_notice)
                return (dump_frame(body | told),)
            case TranscriptDelta(text=text):
                return (dump_frame({"type": self._delta, "delta": text}),)
            case TranscriptDone():
                return (self._encode_done(message),)
            case ErrorReport(code=code, message=text, session_id=session_id):
                return (error_frame(text, code, session_id),)
            case Closed(reason=reason, told=told, named=session_id) if reason in _ENDS:
                return (error_frame(told or _ENDS[reason], reason, session_id),)
            case Closed(reason=reason) if reason in _SILENT_ENDS:
                return ()
        raise no_frame(self, message)

    def _encode_done(self, done: TranscriptDone) -> str:
        usage = {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        }
        return dump_frame({"type": self._done, "text": done.text, "usage": usage})

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame."""
        match message:
            case ChooseModel(model=model, record=record):
                return dump_frame({"type": self._choice, "model": model, **record_fields(record)})
            case AppendSound(pcm16=pcm16):
                return dump_frame({"type": shared.AUDIO_APPEND, "audio": encode_base64(pcm16)})
            case Commit(final=True, begins=True):
                return dump_frame({"type": AUDIO_COMMIT, "final": True})
            case Commit(begins=True):
                return dump_frame({"type": self._beginning})
            case Commit(final=True) if self._asks_apart:
                return dump_frame({"type": AUDIO_COMMIT})
        raise no_frame(self, message)

    def decode(self, body: Json, _mode: Mode = "transcription") -> tuple[ServerMessage, ...]:
        """Read a server's message, in either set of names."""
        fields = Fields(body)
        kind = fields.required("type", Value.text)
        if kind == shared.SESSION_CREATED:
            return (_decode_created(fields),)
        if kind in _DELTAS:
            return (TranscriptDelta(text=fields.required("delta", Value.text)),)
        if kind in _DONES:
            return (_decode_done(fields),)
        if kind == shared.ERROR:
            return (_decode_error(fields),)
        raise RemoteProtocolError(f"$.type: {kind_of(kind)} that is no event of the server")


TRANSCRIPTION: Final = Transcription(
    "transcription",
    choice=shared.SESSION_UPDATE,
    beginning=AUDIO_COMMIT,
    delta=_DELTAS[0],
    done=_DONES[0],
)
TRANSCRIPTION_RESPONSES: Final = Transcription(
    "transcription-responses",
    choice=SESSION_CREATE,
    beginning=RESPONSE_CREATE,
    delta=_DELTAS[1],
    done=_DONES[1],
)


# -- from the client ----------------------------------------------------------------------------


def _parse_choice(fields: Fields, context: Context) -> ChooseModel:
    fields.has("type")
    try:
        model = fields.required("model", Value.text)
    except FieldError as error:
        raise FieldError(ErrorCode.INVALID_EVENT, error.message) from None
    if context.behaves(HINTS_REFUSED):
        for name in _HINTS:
            fields.optional(name, _read_no_hint, "")
    record = read_record(fields, context)
    return ChooseModel(model=model, record=record, ignored=fields.ignored())


def _read_no_hint(value: Value) -> str:
    try:
        return value.choice(("",))
    except FieldError:
        raise invalid(value.path, _HINTS[value.path.rpartition(".")[2]]) from None


def _parse_append(fields: Fields, context: Context) -> AppendSound:
    fields.has("type")
    line_breaks = context.behaves(LINE_BREAKS)
    try:
        pcm16 = fields.required("audio", lambda value: value.pcm16(line_breaks=line_breaks))
    except FieldError as error:
        raise FieldError(ErrorCode.INVALID_AUDIO, error.message) from None
    return AppendSound(pcm16=pcm16, ignored=fields.ignored())


def _parse_commit(fields: Fields, *, is_end: bool) -> Commit:
    fields.has("type")
    both = fields.optional("final", Value.flag, False)
    return Commit(final=both or is_end, begins=both or not is_end, ignored=fields.ignored())


def _parse_create(fields: Fields) -> Commit:
    fields.has("type")
    return Commit(ignored=fields.ignored())


# -- from the server ----------------------------------------------------------------------------


def _decode_created(fields: Fields) -> Created:
    return Created(
        session_id=fields.required("id", Value.text),
        prompt_length=0,
        recording="off",
        recording_id=fields.optional("recording_id", Value.text, ""),
        recording_notice=fields.optional("recording_notice", Value.text, ""),
        created_s=fields.optional("created", Value.integer, 0),
    )


def _decode_done(fields: Fields) -> TranscriptDone:
    usage = fields.optional_child("usage") or Fields({})
    done = TranscriptDone(
        text=fields.required("text", Value.text),
        prompt_tokens=usage.optional("prompt_tokens", Value.integer, 0),
        completion_tokens=usage.optional("completion_tokens", Value.integer, 0),
    )
    usage.optional("total_tokens", Value.integer, 0)
    return done


def _decode_error(fields: Fields) -> ErrorReport | Closed:
    """Read an error; one without a code, or with another's, is another server's failure."""
    code = fields.optional("code", Value.text, "")
    message = fields.required("error", Value.text)
    session_id = shared.read_session_id(fields)
    for reason in _ENDS:
        if code == reason:
            return Closed(session_id="", reason=reason, named=session_id)
    known = {str(one): one for one in ErrorCode}
    return ErrorReport(
        code=known.get(code, ErrorCode.INFERENCE_ERROR), message=message, session_id=session_id
    )
