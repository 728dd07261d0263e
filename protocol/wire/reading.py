"""What a row is given when a message is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..values.behaviour import NEWEST
from ..values.errors import ErrorCode, FieldError
from ..values.messages import Mode
from ..values.model import SlidingWindow
from .codec import invalid, kind_of

Json = Mapping[str, object]


@attrs.frozen(kw_only=True)
class Context:
    """What parsing may depend on beside the message.

    Attributes:
        mode: of the session.
        sliding_windows: the window policies that the backend honours.
        behaviour: of the session (`protocol.values.behaviour`).
        must_record: a client that asks not to be recorded is refused.
    """

    mode: Mode
    sliding_windows: tuple[SlidingWindow, ...] = ("off",)
    behaviour: int = NEWEST
    must_record: bool = False

    def behaves(self, change: int) -> bool:
        """Whether the session has a change (`behaviour`)."""
        return self.behaviour >= change


@attrs.define
class Reading:
    """One object of a message, while it is read.

    Attributes:
        body: the object.
        path: where it stands; `$` is the message itself.
        prefix: of the attributes that its fields are, such as `config.`.
        context: of the session.
        values: what was read so far of the message, by attribute.
        aside: paths of fields of this object that are known and were not looked at.
        below: paths of what was ignored in the objects in it.
    """

    body: Json
    path: str
    prefix: str
    context: Context
    values: dict[str, Any]
    aside: list[str] = attrs.Factory(list)
    below: list[str] = attrs.Factory(list)


def missing(path: str) -> FieldError:
    """Make the error for a field that must be there."""
    return FieldError(ErrorCode.MISSING_FIELD, f"{path}: required field is missing")


def as_object(value: object, path: str) -> Json:
    """Check that a value is an object."""
    if not isinstance(value, dict):
        raise invalid(path, f"{kind_of(value)}, an object is needed")
    return value
