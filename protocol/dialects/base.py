"""What a dialect is: a pure projection between wire frames and canonical messages.

A frame is judged in the order of wire.md: it must be a JSON object (`codec.parse_frame`), then
`classify` says what kind of request it is, the state decides whether that is welcome now
(`state.RECEPTION`), and only then does `parse` look at its fields. No session logic lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs

from ..behaviour import NEWEST
from ..errors import LocalProtocolError
from ..messages import Mode, ServerMessage
from ..model import SlidingWindow
from ..requests import ClientMessage, Request

Json = Mapping[str, object]


@attrs.frozen(kw_only=True)
class Context:
    """What parsing may depend on beside the message.

    Attributes:
        mode: of the session.
        sliding_windows: the window policies that the backend honours.
        behaviour: of the session (`protocol.behaviour`).
        must_record: a client that asks not to be recorded is refused.
    """

    mode: Mode
    sliding_windows: tuple[SlidingWindow, ...] = ("off",)
    behaviour: int = NEWEST
    must_record: bool = False

    def behaves(self, change: int) -> bool:
        """Whether the session has a change (`behaviour`)."""
        return self.behaviour >= change


class Dialect(Protocol):
    """One wire protocol, both ends of it."""

    @property
    def name(self) -> str:
        """The dialect's name, as in the log."""
        ...

    def classify(self, body: Json) -> Request:
        """Say what kind of request a client's message is; never raises."""
        ...

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message.

        Args:
            request: what `classify` said.
            body: the message.
            context: the session's mode and limits.

        Returns:
            The canonical message, every field within its bounds.

        Raises:
            FieldError: naming the path, the value's kind and the limit.
        """
        ...

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames, in the order in which they are sent."""
        ...

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame.

        Raises:
            LocalProtocolError: the dialect has no frame for it, or no field for a part of it.
        """
        ...

    def decode(self, body: Json, mode: Mode = "video", /) -> tuple[ServerMessage, ...]:
        """Read a server's message; a speaking unit may come as several.

        Args:
            body: the message.
            mode: of the session: a delta is a unit's speech, or a part of a turn's answer.

        Raises:
            RemoteProtocolError: the server sent what this dialect does not have.
        """
        ...


def no_frame(dialect: Dialect, message: ClientMessage | ServerMessage) -> LocalProtocolError:
    """Make the error for a message that a dialect cannot say."""
    return LocalProtocolError(f"no frame for {type(message).__name__} in {dialect.name}")
