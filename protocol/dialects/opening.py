"""The dialect of `/v1/realtime` before the client's first init, which picks one and it stays.

It knows the types of both `realtime` and `duplex-v1`, so that whatever comes first is judged by the
same table, and it says what both say alike: queue events and errors. `choose` picks; who calls it
keeps the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..codec import Fields, Value
from ..errors import LocalProtocolError
from ..messages import Mode, ServerMessage
from ..requests import ClientMessage, CloseRequest, Request
from . import shared
from .base import Context, Dialect, Json, refusal
from .duplex_v1 import DUPLEX_V1
from .realtime import REALTIME

_BY_TYPE: Final[Mapping[str, Dialect]] = {
    shared.SESSION_INIT: REALTIME,
    shared.INPUT_APPEND: REALTIME,
    shared.SESSION_UPDATE: DUPLEX_V1,
    shared.AUDIO_APPEND: DUPLEX_V1,
}


class OpeningDialect:
    """The dialect that is none yet; see `base.Dialect` for what its methods do."""

    @property
    def name(self) -> str:
        """`opening`."""
        return "opening"

    def classify(self, body: Json) -> Request:
        """Say what kind of request a client's message is, in the dialect that its type is of."""
        dialect = _dialect_of(body)
        return shared.classify(body, _COMMON) if dialect is None else dialect.classify(body)

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message, in the dialect that its type is of."""
        dialect = _dialect_of(body)
        if dialect is not None:
            return dialect.parse(request, body, context)
        if request is Request.CLOSE:
            return shared.parse_close(body)
        raise refusal(request, body)

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a queue event or an error; nothing else can be said yet."""
        return (shared.encode_common(message),)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a `session.close`; anything else needs a dialect."""
        if isinstance(message, CloseRequest):
            return shared.encode_close(message)
        raise LocalProtocolError(
            f"no frame for {type(message).__name__} before a dialect is chosen"
        )

    def decode(self, body: Json, _mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a queue event or an error."""
        return (shared.decode_common(Fields(body).required("type", Value.text), body),)


OPENING: Final = OpeningDialect()

_COMMON: Final[Mapping[str, Request]] = {shared.SESSION_CLOSE: Request.CLOSE}


def choose(body: Json) -> Dialect | None:
    """Say which dialect a client's init picks, whether or not its fields are right.

    Args:
        body: a client's message.

    Returns:
        The dialect, or None where the message is no init.
    """
    return _dialect_of(body) if OPENING.classify(body) is Request.INIT else None


def _dialect_of(body: Json) -> Dialect | None:
    kind = body.get("type")
    return _BY_TYPE.get(kind) if isinstance(kind, str) else None
