"""The inputs of a row when a message is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..values.behaviour import NEWEST
from ..values.errors import ErrorCode, FieldError
from ..values.model import SlidingWindow
from ..values.modes import Mode
from .codec import invalid, kind_of

Json = Mapping[str, object]


@attrs.frozen(kw_only=True)
class Context:
    """Everything outside a message that its parsing may depend on."""

    mode: Mode
    sliding_windows: tuple[SlidingWindow, ...] = ("off",)
    behaviour: int = NEWEST
    must_record: bool = False
    is_fork: bool = False

    def behaves(self, change: int) -> bool:
        """Whether the session has a change (`behaviour`)."""
        return self.behaviour >= change


@attrs.define
class Reading:
    """One object of a message, while it is read.

    Attributes:
        path: `$` is the message itself.
        prefix: of its fields' attributes, such as `config.`.
        values: values read so far from the message, by attribute.
        aside: paths of this object's fields that are known and were not read.
        below: paths of ignored fields of the objects in it.
    """

    body: Json
    path: str
    prefix: str
    context: Context
    values: dict[str, Any]
    aside: list[str] = attrs.Factory(list)
    below: list[str] = attrs.Factory(list)


def missing(path: str) -> FieldError:
    """Make the error for a missing required field."""
    return FieldError(ErrorCode.MISSING_FIELD, f"{path}: required field is missing")


def as_object(value: object, path: str) -> Json:
    """Return a value that is an object; else `FieldError`."""
    if not isinstance(value, dict):
        raise invalid(path, f"{kind_of(value)}, an object is needed")
    return value
