"""The fields of a log's records, read with their types checked: a log may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from recorder.format.format import Fields

T = TypeVar("T")


def below(fields: Fields, name: str) -> Fields:
    """The fields of an object in a field; empty if it holds none."""
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def typed(fields: Fields, name: str, kind: type[T]) -> T | None:
    """A field's value; None if it is missing, or of another type."""
    value = fields.get(name)
    return value if isinstance(value, kind) else None


REDACTED: Final = "redacted"
"""The field of a log's head that names its redactions."""


def removed_in(head: Fields) -> frozenset[tuple[str, str]]:
    """List the kinds of media that are missing, each with the side that it was of."""
    entries = typed(head, REDACTED, list) or typed(head, REDACTED, tuple) or ()
    removed = [
        (typed(one, "kind", str) or "", typed(one, "side", str) or "")
        for entry in entries
        if isinstance(entry, Mapping) and isinstance(listed := entry.get("removed"), list | tuple)
        for one in listed
        if isinstance(one, Mapping)
    ]
    return frozenset(removed)
