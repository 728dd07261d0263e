"""Values that stand for a canonical class: a usual one, and others that differ in one thing.

They are made from the classes' type hints, so a field that is added is there without being listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

import attrs

from ..model import SAMPLE_BYTES

SHOWN: Final[Mapping[str, str]] = {
    "session_id": "sess_5f1d0c6a9b27",
    "response_id": "resp_0c9e41d7a355",
    "input_id": "input_a41be2f7708d",
    "ticket_id": "ticket_3d8a60c1e94f",
    "recording_id": "20260101T090000-1f6c2a",
    "client_reason": "user_stop",
    "text": "Hello",
    "instructions": "You are a helpful assistant.",
    "model": "tiny",
    "message": "$.input.audio: required field is missing",
}
"""What texts look like, by attribute, in examples; other attributes show their own name."""

_SILENCE: Final = bytes(4 * SAMPLE_BYTES)
"""Long enough to be sound, and short enough to be read over in an example."""


def representative(cls: type, **known: object) -> Any:
    """Make the value that stands for a class, with the attributes that are `known`."""
    hints = get_type_hints(cls)
    instance = cast("type[attrs.AttrsInstance]", cls)
    made = {
        field.name: variations(hints[field.name], field.name)[0] for field in attrs.fields(instance)
    }
    return cls(**{**made, **known})


def bare(cls: type) -> Any:
    """Make a value of a class that has its required attributes alone."""
    hints = get_type_hints(cls)
    instance = cast("type[attrs.AttrsInstance]", cls)
    names = [field.name for field in attrs.fields(instance) if field.default is attrs.NOTHING]
    return cls(**{name: variations(hints[name], name)[0] for name in names})


def variations(hint: Any, name: str = "") -> tuple[Any, ...]:
    """Make the values that stand for a type: the representative first, then each other kind.

    Args:
        hint: the type, as `typing.get_type_hints` gives it.
        name: the attribute's, for texts.

    Returns:
        The values; those of an attrs class differ from the first in one attribute each.

    Raises:
        TypeError: it is a type that no message has.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return arguments
    if origin in (Union, UnionType):
        members = [
            value for part in arguments if part is not NoneType for value in variations(part, name)
        ]
        return (*members, None) if NoneType in arguments else tuple(members)
    if origin is tuple:
        return (*((value,) for value in variations(arguments[0], name)), ())
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(hint)
    if isinstance(hint, type) and attrs.has(hint):
        return tuple(_instances(hint))
    plain: Mapping[Any, tuple[Any, ...]] = {
        str: (SHOWN.get(name, name), f"another_{name}", ""),
        bytes: (_SILENCE, bytes(2 * SAMPLE_BYTES), b""),
        bool: (False, True),
        int: (1, 2),
        float: (1.5, 2.5),
    }
    if hint not in plain:
        raise TypeError(f"no values stand for {hint}")
    return plain[hint]


def _instances(cls: type) -> Iterator[object]:
    first = representative(cls)
    yield first
    for name, hint in get_type_hints(cls).items():
        for value in variations(hint, name)[1:]:
            yield attrs.evolve(first, **{name: value})
