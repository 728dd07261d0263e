"""The base of all dialects: pure projections between wire frames and canonical messages.

A frame is judged in this order: it must be a JSON object (`codec.parse_frame`),
`classify` gives the kind of request, the state decides whether that is allowed now
(`state.RECEPTION`), and only then `parse` reads its fields. No session logic is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...values.errors import ErrorCode, FieldError, LocalProtocolError, RemoteProtocolError
from ...values.messages import ServerMessage
from ...values.modes import Mode
from ...values.requests import ClientMessage, Request
from ..codec import Context, Fields, Json, Value, kind_of
from ..table import Table

__all__ = ("Context", "Dialect", "Json", "no_frame", "refusal")


def no_frame(dialect: Dialect, message: ClientMessage | ServerMessage) -> LocalProtocolError:
    """Make the error for a message without a frame in a dialect."""
    return LocalProtocolError(f"no frame for {type(message).__name__} in {dialect.name}")


def refusal(request: Request, body: Json) -> FieldError:
    """Make the error for a MISPLACED or UNKNOWN message."""
    try:
        name = Fields(body).required("type", Value.text)
    except FieldError as error:
        return error
    if request is Request.MISPLACED:
        return FieldError(ErrorCode.INVALID_EVENT, "$.type: an event that has no place here")
    return FieldError(ErrorCode.UNKNOWN_EVENT, f"$.type: {kind_of(name)} that names no event")


class Dialect:
    """One wire protocol, both ends, read and written by its tables.

    Args:
        name: of the dialect, as in the log.
        types: the kind of request of each type of client message.
        requests: the client's messages.
        answers: the server's; of several with one class or type the first is used.
        more: messages that only other servers send.
    """

    def __init__(
        self,
        name: str,
        types: Mapping[str, Request],
        requests: Mapping[Request, Table],
        answers: tuple[Table, ...],
        more: tuple[Table, ...] = (),
    ) -> None:
        self.name: Final = name
        self.types = types
        self._requests = requests
        self._answers = answers
        self._written = {table.cls: table for table in (*answers[::-1], *requests.values())}
        self._read = {table.kind: table for table in (*more, *answers[::-1])}

    @property
    def has_close(self) -> bool:
        """Whether a client can ask for the end, and does not only close the connection."""
        return Request.CLOSE in self._requests

    def requests(self, _mode: Mode) -> tuple[tuple[Request, Table], ...]:
        """List the client's messages with their kinds of request."""
        return tuple(self._requests.items())

    def table(self, request: Request, cls: type) -> Table | None:
        """Return the table that reads a kind of request as this class; None if there is no such."""
        table = self._requests.get(request)
        return table if table is not None and table.cls is cls else None

    def answers(self, _mode: Mode) -> tuple[Table, ...]:
        """List the server's messages; several of one type are its variants."""
        return self._answers

    def classify(self, body: Json) -> Request:
        """Return the kind of request of a client's message; never raises."""
        kind = body.get("type")
        return self.types.get(kind, Request.UNKNOWN) if isinstance(kind, str) else Request.UNKNOWN

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message of the kind that `classify` returned.

        `FieldError` names the path, the value's kind and the limit.
        """
        if request not in self._requests:
            raise refusal(request, body)
        message: ClientMessage = self._requests[request].parse(body, context)
        return message

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames, in order; `LocalProtocolError` if it has none."""
        table = self._written.get(type(message))
        if table is None:
            raise no_frame(self, message)
        return (table.encode(message),)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame.

        `LocalProtocolError` if the dialect has no frame for it, or no field for a part.
        """
        table = self._written.get(type(message))
        if table is None:
            raise no_frame(self, message)
        return table.encode(message)

    def decode(self, body: Json, _mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a server's message; a speaking unit may come as several.

        In chat a delta is a part of a turn's answer, else a unit's speech. `RemoteProtocolError`
        for a message that this dialect does not have.
        """
        kind = Fields(body).required("type", Value.text)
        if kind not in self._read:
            raise RemoteProtocolError(f"$.type: {kind_of(kind)} that is no event of the server")
        return (self._read[kind].parse(body),)
