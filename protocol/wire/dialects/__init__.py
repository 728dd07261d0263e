"""The dialects: pure projections between wire frames and canonical messages.

- `base` has what all are; `opening` is that of `/v1/realtime` until the client's first init.
- `realtime`, `duplex_v1`, `live`, `omni` (`vllm-omni`) and `transcription` (two sets of names) have
  a file each. `legacy` has both older ones, `openai` that of speech and that of transcription; the
  tables of the first are in `openai_requests`, `openai_answers` and `openai_tools`.
- `shared` and `chat` are not dialects: they have the rows and messages of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ...values.modes import MODES, OF_MODE, Mode
from .base import Dialect
from .duplex_v1 import DUPLEX_V1
from .legacy import LEGACY_CHAT, LEGACY_DUPLEX
from .live import LIVE
from .omni import OMNI
from .openai import OPENAI, OPENAI_TRANSCRIPTION
from .opening import OPENING
from .realtime import REALTIME
from .transcription import TRANSCRIPTION, TRANSCRIPTION_RESPONSES

__all__ = (
    "DIALECTS",
    "DUPLEX_V1",
    "LEGACY_CHAT",
    "LEGACY_DUPLEX",
    "LIVE",
    "MODES_OF",
    "OMNI",
    "OPENAI",
    "OPENAI_TRANSCRIPTION",
    "REALTIME",
    "TRANSCRIPTION",
    "TRANSCRIPTION_RESPONSES",
    "Dialect",
    "first_dialect",
)

_ALL: Final[tuple[Dialect, ...]] = (
    REALTIME,
    DUPLEX_V1,
    LEGACY_DUPLEX,
    LEGACY_CHAT,
    TRANSCRIPTION,
    TRANSCRIPTION_RESPONSES,
    LIVE,
    OPENAI,
    OPENAI_TRANSCRIPTION,
    OMNI,
)
DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {dialect.name: dialect for dialect in _ALL}
)
"""The dialects that a client can speak, by name, without `opening`."""
MODES_OF: Final[Mapping[str, tuple[Mode, ...]]] = MappingProxyType(
    {name: tuple(mode for mode in MODES if name in OF_MODE[mode].dialects) for name in DIALECTS}
)
"""The modes of a dialect; a session kind is described by its first."""

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
