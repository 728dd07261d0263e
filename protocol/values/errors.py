"""The errors of the protocol, and which of them close the connection.

    ProtocolError
      LocalProtocolError     you misused us: a bug in the calling code, never sent to a peer
      RemoteProtocolError    the peer did wrong
        FieldError           one message is wrong: an `error` event, the connection stays
        FrameError           an unreadable frame: the WebSocket is closed with `close_code`

Each wire code is one `ErrorCode`; `close_code(code)` says whether it closes the connection
(000, Error Codes). Messages name the path, the kind of value, the limit and the state; they never
contain a client's whole value or internal text.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal


class ErrorCode(StrEnum):
    """The codes of an `error` event (000, Error Codes; `invalid_event` is the diagram's).

    Those from `model_not_validated` on belong only to transcriptions (003; the wire decisions), and
    those from `unknown_parameter` on to `live` and `openai`.
    """

    NOT_READY = "not_ready"
    UNKNOWN_EVENT = "unknown_event"
    INVALID_EVENT = "invalid_event"
    MISSING_FIELD = "missing_field"
    INVALID_PAYLOAD = "invalid_payload"
    SERVICE_UNAVAILABLE = "service_unavailable"
    QUEUE_FULL = "queue_full"
    WORKER_BUSY = "worker_busy"
    WORKER_CONNECT_FAILED = "worker_connect_failed"
    INFERENCE_ERROR = "inference_error"
    MODEL_NOT_VALIDATED = "model_not_validated"
    MODEL_NOT_FOUND = "model_not_found"
    INVALID_AUDIO = "invalid_audio"
    INVALID_JSON = "invalid_json"
    INVALID_FRAME = "invalid_frame"
    BUFFER_FULL = "buffer_full"
    CONTEXT_FULL = "context_full"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED = "unsupported"
    ACTIVE_RESPONSE = "conversation_already_has_active_response"
    RESPONSE_CANCEL_NOT_ACTIVE = "response_cancel_not_active"
    INPUT_AUDIO_BUFFER_COMMIT_EMPTY = "input_audio_buffer_commit_empty"
    ITEM_NOT_FOUND = "item_not_found"
    SESSION_EXPIRED = "session_expired"


REFUSALS: Final[Mapping[ErrorCode, str]] = MappingProxyType(
    {
        ErrorCode.QUEUE_FULL: "the server has no room for another session now",
        ErrorCode.WORKER_BUSY: "the server has no room for another session now",
        ErrorCode.SERVICE_UNAVAILABLE: "the server takes no sessions now",
    }
)
"""The messages to a client that is not admitted; there are no other reasons."""

CLIENT_ERRORS: Final = frozenset(
    {
        ErrorCode.NOT_READY,
        ErrorCode.UNKNOWN_EVENT,
        ErrorCode.INVALID_EVENT,
        ErrorCode.MISSING_FIELD,
        ErrorCode.INVALID_PAYLOAD,
        ErrorCode.MODEL_NOT_VALIDATED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.INVALID_AUDIO,
        ErrorCode.INVALID_JSON,
        ErrorCode.INVALID_FRAME,
        ErrorCode.BUFFER_FULL,
        ErrorCode.UNKNOWN_PARAMETER,
        ErrorCode.UNSUPPORTED,
        ErrorCode.ACTIVE_RESPONSE,
        ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE,
        ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY,
        ErrorCode.ITEM_NOT_FOUND,
        ErrorCode.SESSION_EXPIRED,
    }
)
TRANSCRIPTION_ERRORS: Final = frozenset(
    {
        ErrorCode.MODEL_NOT_VALIDATED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.INVALID_AUDIO,
        ErrorCode.INVALID_JSON,
        ErrorCode.INVALID_FRAME,
        ErrorCode.BUFFER_FULL,
        ErrorCode.CONTEXT_FULL,
    }
)
"""Only a transcription receives these (003); elsewhere they close the connection, or cannot be.

`live` has `MODEL_NOT_FOUND` too.
"""
OPENAI_ERRORS: Final = frozenset(
    {
        ErrorCode.ACTIVE_RESPONSE,
        ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE,
        ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY,
        ErrorCode.ITEM_NOT_FOUND,
        ErrorCode.SESSION_EXPIRED,
    }
)
"""Only `openai` has these."""
LIVE_ERRORS: Final = OPENAI_ERRORS | {ErrorCode.UNKNOWN_PARAMETER, ErrorCode.UNSUPPORTED}
"""Only the dialects of OpenAI's APIs have these."""
ADMISSION_ERRORS: Final = frozenset(
    {
        ErrorCode.SERVICE_UNAVAILABLE,
        ErrorCode.QUEUE_FULL,
        ErrorCode.WORKER_BUSY,
        ErrorCode.WORKER_CONNECT_FAILED,
    }
)

MEANINGS: Final[Mapping[ErrorCode, str]] = MappingProxyType(
    {
        ErrorCode.NOT_READY: "Sent too early: while the session still waits in the queue, or "
        "before it is set up. The message is not kept; send it again later. While queued the first "
        "message that sets the session up is kept, and answered at its turn.",
        ErrorCode.UNKNOWN_EVENT: "The message's type names no event of the protocol.",
        ErrorCode.INVALID_EVENT: "The event is known, but has no place here: not now, not in this "
        "mode, or not in this dialect. Nothing changes.",
        ErrorCode.MISSING_FIELD: "A field that must be there is absent or null.",
        ErrorCode.INVALID_PAYLOAD: "A field has the wrong type, length, range or content. The "
        "error's text names its path, what was found and what is allowed.",
        ErrorCode.SERVICE_UNAVAILABLE: "The server is loading its model, or is being shut down.",
        ErrorCode.QUEUE_FULL: "As many sessions wait as may wait.",
        ErrorCode.WORKER_BUSY: "No slot of the model is free and queueing is off, or the "
        "key has as many sessions as it may have.",
        ErrorCode.WORKER_CONNECT_FAILED: "A slot was assigned, but the model could not be opened "
        "on it.",
        ErrorCode.INFERENCE_ERROR: "The model failed on this piece of input, which is taken back. "
        "The session goes on.",
        ErrorCode.MODEL_NOT_VALIDATED: "Sound was committed before a model was chosen, and the "
        "server's has no name to be taken by. It is kept; choose a model and commit again.",
        ErrorCode.MODEL_NOT_FOUND: "The server has no model of that name. One that was chosen "
        "before stays.",
        ErrorCode.INVALID_AUDIO: "The sound is not base64 of whole 16-bit samples, or has none. "
        "Nothing of it is kept.",
        ErrorCode.INVALID_JSON: "The message is not a JSON object, or has a key twice. "
        "The connection stays.",
        ErrorCode.INVALID_FRAME: "The message is binary. The connection stays.",
        ErrorCode.BUFFER_FULL: "More sound, or more utterances, than may wait for the model. The "
        "message is refused whole; send it again later.",
        ErrorCode.CONTEXT_FULL: "The utterance outgrew the model's context. The text so far "
        "is the result, the rest is discarded, and the next commit begins a new one.",
        ErrorCode.UNKNOWN_PARAMETER: "The message has a field that is not known there.",
        ErrorCode.ACTIVE_RESPONSE: "A response is in progress, or was asked for.",
        ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE: "There is no such response in progress.",
        ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY: "There is no sound since the last item.",
        ErrorCode.ITEM_NOT_FOUND: "There is no such item; of very many the oldest are forgotten.",
        ErrorCode.SESSION_EXPIRED: "The session's time is over; the connection is closed next.",
        ErrorCode.UNSUPPORTED: "The event or the value is known, but this server does not have it.",
    }
)
"""The meaning of each code, in the words of the protocol reference."""

CLOSE_NORMAL: Final = 1000
CLOSE_INVALID_FRAME: Final = 1003
CLOSE_POLICY: Final = 1008
CLOSE_TOO_BIG: Final = 1009
CLOSE_INTERNAL_ERROR: Final = 1011
CLOSE_RESTART: Final = 1012
CLOSE_TRY_LATER: Final = 1013
CLOSE_MEANINGS: Final[Mapping[int, str]] = MappingProxyType(
    {
        CLOSE_NORMAL: "The session is over, as it was asked for, or as its limits say; or its "
        "client can never be right, as an `error` before says.",
        CLOSE_INVALID_FRAME: "A frame is beyond repair: binary, not JSON, no object, or with a key "
        "twice.",
        CLOSE_POLICY: "The client sent large messages faster than the server can record them.",
        CLOSE_TOO_BIG: "A frame is longer than the connection allows.",
        CLOSE_INTERNAL_ERROR: "The model was lost, or the server failed.",
        CLOSE_RESTART: "The server is shutting down; connect again later.",
        CLOSE_TRY_LATER: "The server cannot take the session now; an `error` came before.",
    }
)
"""The meaning of each close code, in the same words."""


def error_type(code: ErrorCode) -> Literal["client_error", "server_error"]:
    """Whose mistake a code is, as on the wire."""
    return "client_error" if code in CLIENT_ERRORS else "server_error"


def close_code(code: ErrorCode) -> int | None:
    """The WebSocket close code that follows an error; None if the connection stays."""
    return CLOSE_TRY_LATER if code in ADMISSION_ERRORS else None


class ProtocolError(Exception):
    """The root of this package's errors."""


class LocalProtocolError(ProtocolError):
    """The calling code did something that the protocol does not allow now; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer did something that the protocol does not allow."""


class FieldError(RemoteProtocolError):
    """One message is wrong; it is answered by an `error` event and the connection stays.

    `message` begins with the field's path, such as `$.input.audio: ...`.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FrameError(RemoteProtocolError):
    """A frame is unreadable; the connection is closed with `close_code` and `reason`."""

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__(reason)
        self.close_code = close_code
        self.reason = reason


def invalid(path: str, text: str) -> FieldError:
    """Make the error for a wrong value."""
    return FieldError(ErrorCode.INVALID_PAYLOAD, f"{path}: {text}")


def missing(path: str) -> FieldError:
    """Make the error for a missing required field."""
    return FieldError(ErrorCode.MISSING_FIELD, f"{path}: required field is missing")
