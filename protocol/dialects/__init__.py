"""One file a dialect: pure projections between wire frames and canonical messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .base import Dialect
from .duplex_v1 import DUPLEX_V1
from .realtime import REALTIME

DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {dialect.name: dialect for dialect in (REALTIME, DUPLEX_V1)}
)
"""The dialects that a client can speak, by name; `opening` is none of them."""
