"""One file a dialect: pure projections between wire frames and canonical messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .base import Dialect
from .duplex_v1 import DUPLEX_V1
from .legacy_chat import LEGACY_CHAT
from .legacy_duplex import LEGACY_DUPLEX
from .realtime import REALTIME

__all__ = ("DIALECTS", "DUPLEX_V1", "LEGACY_CHAT", "LEGACY_DUPLEX", "REALTIME", "Dialect")

DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {dialect.name: dialect for dialect in (REALTIME, DUPLEX_V1, LEGACY_DUPLEX, LEGACY_CHAT)}
)
"""The dialects that a client can speak, by name; `opening` is none of them."""
