"""Upcasting: records of older versions, read as current ones.

Rules: logs are never rewritten when a kind's version (`RECORD_VERSIONS`) rises: records are upcast
on reading, one version at a time, blobs resolved. Newer versions and unknown kinds are refused. An
added field needs no upcast: it has a default, and is left out while it has it
(`protocol.values.record_names`). If a field changes its meaning or is removed, a conversion is
entered in `UPCASTS`. All records have version 1 yet.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from .errors import FormatError, VersionUnknown
from .records import RECORD_VERSIONS, Fields

Upcast: TypeAlias = Callable[[Fields], Fields]
"""Converts fields to the next version; may raise `FormatError`."""

UPCASTS: Final[Mapping[str, Mapping[int, Upcast]]] = {}
"""The conversion to the next version, by kind and version."""


def check_version(kind: str, version: int) -> None:
    """Check that records of a kind and version can be read.

    `VersionUnknown`: a newer version wrote it; `FormatError`: there was never such a version.
    """
    newest = RECORD_VERSIONS.get(kind)
    if newest is None:
        raise VersionUnknown(f"a record of kind {reprlib.repr(kind)} is not known to this reader")
    if version > newest:
        raise VersionUnknown(
            f"{kind} record of version {version}: this reader knows versions 1 to {newest}"
        )
    if version < 1:
        raise FormatError(f"{kind} record of version {version}: the first version is 1")


def upcast(kind: str, version: int, fields: Fields) -> Fields:
    """Upcast a record's fields, blobs resolved; `FormatError` if invalid for that version."""
    for old in range(version, RECORD_VERSIONS[kind]):
        fields = UPCASTS[kind][old](fields)
    return fields
