"""Records of older versions, read as if they were written today.

Rules: a kind of record has a version (`RECORD_VERSIONS`), and a log is never rewritten because that
went up: its records are upcast when they are read, one version at a time, after their blobs are in
place. A version that is newer than this code, and a kind that it does not know, are refused with
the versions that are.

A field that is only added needs none of this: it has a default (`protocol.digest.added`), and
records without it say that. So far nothing else has changed, and `UPCASTS` is empty. Where a field
changes its meaning or goes, the kind's version goes up by one, and how its records of old become
new ones is entered here.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from .errors import FormatError, VersionUnknown
from .records import RECORD_VERSIONS, Fields

Upcast: TypeAlias = Callable[[Fields], Fields]
"""Makes the fields of the next version of those of one; it may refuse them with `FormatError`."""

UPCASTS: Final[Mapping[str, Mapping[int, Upcast]]] = {}
"""By kind and version: how such a record becomes one of the next version."""


def check_version(kind: str, version: int) -> None:
    """Check that records of a kind and a version can be read.

    Raises:
        VersionUnknown: a newer version wrote it.
        FormatError: nobody did.
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
    """Give a record's fields as the newest version of its kind has them.

    Args:
        kind: of the record.
        version: that it was written in, one that `check_version` takes.
        fields: with their blobs.

    Raises:
        FormatError: they are not what that version wrote.
    """
    for old in range(version, RECORD_VERSIONS[kind]):
        fields = UPCASTS[kind][old](fields)
    return fields
