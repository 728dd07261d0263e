"""The dialects: pure projections between wire frames and canonical messages (`table.Dialect`).

- Each has its tables and its class in a file: `realtime` (with `duplex-v1`), `live`, `omni`
  (`vllm-omni`), `transcription` (two sets of names), `legacy` (both older ones) and `openai`
  (speech and transcription).
- `shared`, `chat` and `openai_shared` have the rows and messages of several dialects.
- `OPENING` is the dialect of `/v1/realtime` before the client's first init, which picks one for
  good. It knows the types of both `realtime` and `duplex-v1`, so that any first message is judged
  by the same table, and it has their common messages: queue events and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ...values.limits import MODES, OF_MODE, Mode
from ...values.requests import ClientMessage, Request
from ..codec import Context, Json
from ..table import Dialect
from . import chat, shared
from .legacy import LEGACY_CHAT as LEGACY_CHAT
from .legacy import LEGACY_DUPLEX as LEGACY_DUPLEX
from .live import LIVE as LIVE
from .omni import OMNI as OMNI
from .openai import OPENAI as OPENAI
from .openai import OPENAI_TRANSCRIPTION as OPENAI_TRANSCRIPTION
from .realtime import DUPLEX_V1 as DUPLEX_V1
from .realtime import REALTIME as REALTIME
from .transcription import TRANSCRIPTION as TRANSCRIPTION
from .transcription import TRANSCRIPTION_RESPONSES as TRANSCRIPTION_RESPONSES

_ALL: Final[tuple[Dialect, ...]] = (
    *(REALTIME, DUPLEX_V1, LEGACY_DUPLEX, LEGACY_CHAT, TRANSCRIPTION, TRANSCRIPTION_RESPONSES),
    *(LIVE, OPENAI, OPENAI_TRANSCRIPTION, OMNI),
)
DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {dialect.name: dialect for dialect in _ALL}
)
"""The dialects that a client can speak, by name, without `OPENING`."""
MODES_OF: Final[Mapping[str, tuple[Mode, ...]]] = MappingProxyType(
    {name: tuple(mode for mode in MODES if name in OF_MODE[mode].dialects) for name in DIALECTS}
)
"""The modes of a dialect; a session kind is described by its first."""


# -- which dialect a connection has ---------------------------------------------------------------

_BY_TYPE: Final[Mapping[str, Dialect]] = {
    shared.SESSION_INIT: REALTIME,
    shared.INPUT_APPEND: REALTIME,
    shared.SESSION_UPDATE: DUPLEX_V1,
    shared.AUDIO_APPEND: DUPLEX_V1,
}


class OpeningDialect(Dialect):
    """The dialect before one is picked."""

    def classify(self, body: Json) -> Request:
        """Return the kind of request of a client's message, in the dialect of its type."""
        dialect = _dialect_of(body)
        return shared.classify(body, self.types) if dialect is None else dialect.classify(body)

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message, in the dialect of its type."""
        dialect = _dialect_of(body)
        if dialect is None:
            return super().parse(request, body, context)
        return dialect.parse(request, body, context)


OPENING: Final = OpeningDialect("opening", chat.COMMON_REQUESTS, shared.COMMON)


def choose(body: Json) -> Dialect | None:
    """Return the dialect that a client's init picks, right or wrong; None if it is not an init."""
    return _dialect_of(body) if OPENING.classify(body) is Request.INIT else None


def _dialect_of(body: Json) -> Dialect | None:
    kind = body.get("type")
    return _BY_TYPE.get(kind) if isinstance(kind, str) else None


_BY_ENDPOINT: Final[Mapping[str, Dialect]] = MappingProxyType(
    {"chat": LEGACY_CHAT, "duplex": LEGACY_DUPLEX, "live": LIVE, "openai": OPENAI, "omni": OMNI}
)


def first_dialect(mode: Mode, endpoint: str) -> Dialect:
    """The first dialect of a connection; on `/v1/realtime` the client's init picks another."""
    if mode == "transcription":
        return OPENAI_TRANSCRIPTION if endpoint == "openai" else TRANSCRIPTION
    if endpoint == "realtime":
        return REALTIME if mode == "chat" else OPENING
    return _BY_ENDPOINT[endpoint]
