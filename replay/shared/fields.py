"""The fields of a log's records, read with their types checked: a log may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from recorder.format.records import Fields

T = TypeVar("T")


def below(fields: Fields, name: str) -> Fields:
    """The fields of an object in a field; empty if it holds none."""
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def typed(fields: Fields, name: str, kind: type[T]) -> T | None:
    """A field's value; None if it is missing, or of another type."""
    value = fields.get(name)
    return value if isinstance(value, kind) else None
