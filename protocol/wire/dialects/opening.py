"""The dialect of `/v1/realtime` before the client's first init, which picks one for good.

It knows the types of both `realtime` and `duplex-v1`, so that any first message is judged by the
same table, and it has their common messages: queue events and errors. `choose` picks; the caller
keeps the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...values.requests import ClientMessage, Request
from . import shared
from .base import Context, Dialect, Json
from .duplex_v1 import DUPLEX_V1
from .realtime import REALTIME

_BY_TYPE: Final[Mapping[str, Dialect]] = {
    shared.SESSION_INIT: REALTIME,
    shared.INPUT_APPEND: REALTIME,
    shared.SESSION_UPDATE: DUPLEX_V1,
    shared.AUDIO_APPEND: DUPLEX_V1,
}

_COMMON: Final[Mapping[str, Request]] = {
    shared.SESSION_CLOSE: Request.CLOSE,
    shared.PLAYBACK_ACK: Request.PLAYED,
}
_REQUESTS: Final = {Request.CLOSE: shared.CLOSE, Request.PLAYED: shared.PLAYED}


class OpeningDialect(Dialect):
    """The dialect before one is picked."""

    def classify(self, body: Json) -> Request:
        """Return the kind of request of a client's message, in the dialect of its type."""
        dialect = _dialect_of(body)
        return shared.classify(body, _COMMON) if dialect is None else dialect.classify(body)

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message, in the dialect of its type."""
        dialect = _dialect_of(body)
        if dialect is None:
            return super().parse(request, body, context)
        return dialect.parse(request, body, context)


OPENING: Final = OpeningDialect("opening", _COMMON, _REQUESTS, shared.COMMON)


def choose(body: Json) -> Dialect | None:
    """Return the dialect that a client's init picks, right or wrong; None if it is not an init."""
    return _dialect_of(body) if OPENING.classify(body) is Request.INIT else None


def _dialect_of(body: Json) -> Dialect | None:
    kind = body.get("type")
    return _BY_TYPE.get(kind) if isinstance(kind, str) else None
