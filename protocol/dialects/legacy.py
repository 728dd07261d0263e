"""What `legacy-duplex` and `legacy-chat` have in common: queue events and errors (002, 004).

Their event types have no `session.` before them, and an error's text stands at its top with the
code beside it, an addition.
"""

from __future__ import annotations

from typing import Final

from ..codec import Fields, Value, dump_frame, kind_of
from ..errors import ErrorCode, RemoteProtocolError
from ..messages import ErrorReport, Queued, QueueDone, QueueUpdate, ServerMessage
from . import shared
from .base import Dialect, no_frame

QUEUED: Final = "queued"
QUEUE_UPDATE: Final = "queue_update"
QUEUE_DONE: Final = "queue_done"
ERROR: Final = "error"


def encode_common(dialect: Dialect, message: ServerMessage) -> str:
    """Write a queue event or an error.

    Raises:
        LocalProtocolError: it is a message that the dialect does not have.
    """
    match message:
        case Queued(place=place):
            return dump_frame({"type": QUEUED, **shared.place_fields(place)})
        case QueueUpdate(place=place):
            return dump_frame({"type": QUEUE_UPDATE, **shared.place_fields(place)})
        case QueueDone():
            return dump_frame({"type": QUEUE_DONE})
        case ErrorReport(code=code, message=text, session_id=session_id):
            return error_frame(text, code, session_id)
    raise no_frame(dialect, message)


def error_frame(text: str, code: str, session_id: str) -> str:
    """Write an `error`; the session's id is left out where it is empty."""
    return dump_frame({"type": ERROR, "error": text, "code": code, **shared.named(session_id)})


def decode_common(kind: str, fields: Fields) -> ServerMessage:
    """Read a queue event or an error; one without a code is another server's, and its failure.

    Args:
        kind: the message's type.
        fields: the message.

    Returns:
        The canonical message.

    Raises:
        RemoteProtocolError: it is something else, or a field is wrong.
    """
    match kind:
        case "queued":
            return Queued(place=shared.read_place(fields))
        case "queue_update":
            return QueueUpdate(place=shared.read_place(fields))
        case "queue_done":
            return QueueDone()
        case "error":
            code = fields.optional("code", shared.read_code, ErrorCode.INFERENCE_ERROR)
            return ErrorReport(
                code=code,
                message=fields.required("error", Value.text),
                session_id=shared.read_session_id(fields),
            )
    raise RemoteProtocolError(f"$.type: {kind_of(kind)} that is no event of the server")
