"""The dialect of 003: a model is chosen, sound is appended and committed, text comes back.

003 has two sets of names for the same. The server accepts both from every client, and answers in
the set with which its client began:

| | `transcription` | `transcription-responses` |
|---|---|---|
| choose a model | `session.update` | `session.create` |
| ask for an utterance's text | `input_audio_buffer.commit` | `response.create` |
| end its sound | the same, `final` | `input_audio_buffer.commit` |
| both at once | the same, `final` | `input_audio_buffer.commit`, `final` |
| a piece of text | `transcription.delta` | `response.text.delta` |
| an utterance's end | `transcription.done` | `response.done` |

`language` and `prompt`, which vLLM's clients send, have no effect: none of our models takes one.
They are counted with the ignored fields. A client that commits before it chose a model gets the
server's. In addition to 003, an unwanted end is an `error` whose code names it, and is read as that
end; another end has no message. A client's type is either known or not, never misplaced.
003 cannot show: the queue, whether there is a recording, that the server will shut down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ...values import messages as ms
from ...values.behaviour import ONLY_MODEL
from ...values.errors import LIVE_ERRORS, ErrorCode, invalid
from ...values.limits import Mode
from ...values.requests import AppendSound, ChooseModel, ClientMessage, Commit, Request
from ..codec import (
    FLAG,
    INTEGER,
    PROMPTED,
    SOUND16,
    TEXT,
    Context,
    FieldType,
    Json,
    ParseState,
    UserContent,
    Value,
    choice,
)
from ..table import DROPPED, Dialect, Field, Object, Table, computed, no_frame, typed
from . import legacy, shared

SESSION_CREATE: Final = "session.create"
AUDIO_COMMIT: Final = "input_audio_buffer.commit"
RESPONSE_CREATE: Final = "response.create"

_TYPES: Final[Mapping[str, Request]] = {
    shared.SESSION_UPDATE: Request.INIT,
    SESSION_CREATE: Request.INIT,
    shared.AUDIO_APPEND: Request.APPEND,
    AUDIO_COMMIT: Request.COMMIT,
    RESPONSE_CREATE: Request.COMMIT,
}
_DELTAS: Final = ("transcription.delta", "response.text.delta")
_DONES: Final = ("transcription.done", "response.done")
_ENDS: Final[Mapping[ms.EndReason, str]] = {
    "timeout": "the session is over: it has lasted as long as a session may",
    "backend_error": "the session is over: the model was lost",
    "server_shutdown": "the session is over: the server shuts down",
}
"""The words of an end's error."""
_SILENT_ENDS: Final[frozenset[ms.EndReason]] = frozenset(
    {"idle", "cancelled", "invalid_frame", "flooded", "refused", "rejected"}
)
"""Ends without a message: the close shows them, or an error before it."""


def begins_with_create(body: Json) -> bool:
    """Whether a client that begins so is answered in the second set of names."""
    return body.get("type") in (SESSION_CREATE, RESPONSE_CREATE)


# -- from the client ----------------------------------------------------------------------------


def _hint(name: str, why: str, holds: UserContent | None = None) -> Field:
    """Make the row of a field without effect, which counts as ignored."""

    def read(value: Value, at: ParseState) -> None:
        if at.context.behaves(ONLY_MODEL):
            value.text()
            at.aside.append(value.path)
        elif value.value != "":
            raise invalid(value.path, why)

    kind = FieldType(read=read, schema=TEXT.schema, holds=holds)
    return Field(name, kind, "", attr=DROPPED, doc=f"Without effect: {why}.")


def _choice(kind: str) -> Table:
    return typed(
        ChooseModel,
        kind,
        Field("model", TEXT, code=ErrorCode.INVALID_EVENT),
        _hint("language", "the model writes down the language that it hears, and takes no other"),
        _hint("prompt", "the model has fixed instructions, and takes no prompt", PROMPTED),
        shared.RECORD,
    )


_APPEND: Final = typed(
    AppendSound,
    shared.AUDIO_APPEND,
    Field("audio", SOUND16, attr="pcm16", code=ErrorCode.INVALID_AUDIO),
)
_COMMIT: Final = typed(Commit, AUDIO_COMMIT, Field("final", FLAG, False, omit=True))
_CREATE: Final = typed(Commit, RESPONSE_CREATE)

# -- from the server ----------------------------------------------------------------------------

_CREATED: Final = typed(
    ms.Created,
    shared.SESSION_CREATED,
    Field("id", TEXT, attr="session_id"),
    Field("created", INTEGER, 0, attr="created_s"),
    *shared.RECORDED,
    lacks={"prompt_length": 0, "recording": "off"},
)


def _delta(kind: str) -> Table:
    return typed(ms.TranscriptDelta, kind, Field("delta", TEXT, attr="text"))


def _done(kind: str) -> Table:
    total = computed(
        "total_tokens",
        INTEGER,
        lambda done: done.prompt_tokens + done.completion_tokens,
        example=2,
        doc="Both together.",
    )
    counts = (Field("prompt_tokens", INTEGER, 0), Field("completion_tokens", INTEGER, 0), total)
    return typed(ms.TranscriptDone, kind, Field("text", TEXT), Object("usage", *counts))


def _error(values: dict[str, Any]) -> ms.ErrorReport | ms.Closed:
    """Read an error; one without a code, or with another's, is another server's failure."""
    code, session_id = values.pop("code"), values["session_id"]
    for reason in _ENDS:
        if code == reason:
            return ms.Closed(session_id="", reason=reason, named=session_id)
    known = {str(one): one for one in ErrorCode}
    return ms.ErrorReport(code=known.get(code, ErrorCode.INFERENCE_ERROR), **values)


_CODES: Final = tuple(code for code in ErrorCode if code not in LIVE_ERRORS)
_ERROR: Final = Table(
    ms.ErrorReport,
    legacy.ERROR_TEXT,
    Field("code", FieldType(read=TEXT.read, schema=choice((*_CODES, *_ENDS)).schema), ""),
    shared.ERROR_SESSION,
    tag=legacy.ERROR,
    make=_error,
)
_END: Final = legacy.faults(
    ms.Closed,
    Field("error", TEXT, get=lambda closed: closed.error_text or _ENDS[closed.reason]),
    Field("code", TEXT, attr="reason"),
)


class Transcription(Dialect):
    """The dialect of 003.

    Args:
        name: of the set of names.
        choice: the type of the message that chooses a model.
        beginning: the message that asks for an utterance's text without ending its sound.
        names: the types of a piece of text and of an utterance's end.
    """

    def __init__(self, name: str, *, choice: str, beginning: Table, names: tuple[str, str]) -> None:
        requests = {Request.INIT: _choice(choice), Request.APPEND: _APPEND, Request.COMMIT: _COMMIT}
        answers = (_CREATED, _delta(names[0]), _done(names[1]), _ERROR)
        others = (*map(_delta, _DELTAS), *map(_done, _DONES))
        super().__init__(name, requests, answers, types=_TYPES, more=others)
        self._beginning = beginning
        self._asks_apart = beginning is not _COMMIT
        """A commit ends sound, and another message asks for its text."""

    def requests(self, mode: Mode) -> tuple[tuple[Request, Table], ...]:
        """List the client's messages with their kinds of request."""
        own = super().requests(mode)
        return (*own, (Request.COMMIT, self._beginning)) if self._asks_apart else own

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message."""
        if request is not Request.COMMIT:
            return super().parse(request, body, context)
        is_create = body.get("type") == RESPONSE_CREATE
        commit: Commit = (_CREATE if is_create else _COMMIT).parse(body, context)
        if is_create or not self._asks_apart:
            return commit
        return attrs.evolve(commit, final=True, begins=commit.final)

    def encode(self, message: ms.ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames."""
        match message:
            case ms.Closed(reason=reason) if reason in _ENDS:
                return (_END.encode(message),)
            case ms.Closed(reason=reason) if reason in _SILENT_ENDS:
                return ()
        return super().encode(message)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame."""
        match message:
            case Commit(final=True, begins=True):
                return _COMMIT.encode(message)
            case Commit(begins=True):
                return self._beginning.encode(message)
            case Commit(final=True) if self._asks_apart:
                return _COMMIT.encode(Commit())
            case Commit():
                raise no_frame(self, message)
        return super().encode_request(message)


TRANSCRIPTION: Final = Transcription(
    "transcription", choice=shared.SESSION_UPDATE, beginning=_COMMIT, names=(_DELTAS[0], _DONES[0])
)
TRANSCRIPTION_RESPONSES: Final = Transcription(
    "transcription-responses",
    choice=SESSION_CREATE,
    beginning=_CREATE,
    names=(_DELTAS[1], _DONES[1]),
)
