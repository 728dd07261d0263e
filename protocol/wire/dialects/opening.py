"""The dialect of `/v1/realtime` before the client's first init, which picks one and it stays.

It knows the types of both `realtime` and `duplex-v1`, so that whatever comes first is judged by the
same table, and it says what both say alike: queue events and errors. `choose` picks; who calls it
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

_COMMON: Final[Mapping[str, Request]] = {shared.SESSION_CLOSE: Request.CLOSE}


class OpeningDialect(Dialect):
    """The dialect that is none yet; see `base.Dialect` for what its methods do."""

    def classify(self, body: Json) -> Request:
        """Say what kind of request a client's message is, in the dialect that its type is of."""
        dialect = _dialect_of(body)
        return shared.classify(body, _COMMON) if dialect is None else dialect.classify(body)

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message, in the dialect that its type is of."""
        dialect = _dialect_of(body)
        if dialect is None:
            return super().parse(request, body, context)
        return dialect.parse(request, body, context)


OPENING: Final = OpeningDialect("opening", _COMMON, {Request.CLOSE: shared.CLOSE}, shared.COMMON)


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
