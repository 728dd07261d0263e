"""What redactions took out of a log, as its head says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from recorder.format.records import Fields

from .fields import typed

REDACTED: Final = "redacted"
"""The field of a log's head that names its redactions."""


def removed_in(head: Fields) -> frozenset[tuple[str, str]]:
    """List the kinds of media that are missing, each with the side that it was of."""
    entries = typed(head, REDACTED, list) or typed(head, REDACTED, tuple) or ()
    removed = [
        (typed(one, "kind", str) or "", typed(one, "side", str) or "")
        for entry in entries
        if isinstance(entry, Mapping) and isinstance(taken := entry.get("removed"), list | tuple)
        for one in taken
        if isinstance(one, Mapping)
    ]
    return frozenset(removed)
