"""Hashes that name a value: ids derived from the recording, and the state's fingerprint.

`digest` is canonical: equal values give equal digests in any process, whatever their dict order or
`PYTHONHASHSEED`. It takes only the values that a session is made of.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from functools import lru_cache
from typing import Any, Final, TypeVar, cast

import attrs

DIGEST_BYTES: Final = 16
"""blake2b-128: short enough for every record, long enough never to collide by chance."""

ADDED: Final = "added"
"""Marks a field that `added` made, in its metadata."""

NUMBERS: Final = frozenset({bool, int, float, type(None)})
"""Kinds that are fed as they are written."""

_SESSION_ID: Final = re.compile("sess_[0-9a-f]{12}")

T = TypeVar("T")


def added(default: T, **options: Any) -> T:
    """Make a field of a class that recordings already hold; `options` are those of `attrs.field`.

    With its default, which recordings without the field stand for, it is left out of the digest and
    of the record: both stay as they were.
    """
    field: T = attrs.field(default=default, metadata={ADDED: True}, **options)
    return field


def is_unsaid(field: attrs.Attribute[Any], value: object) -> bool:
    """Whether a field came later and has its default, and so is left out."""
    return ADDED in field.metadata and bool(value == field.default)


def derive_id(prefix: str, recording_id: str, counter: int) -> str:
    """Make an opaque id, `prefix` and 12 hex digits, from a recording and a counter."""
    text = f"{prefix}:{recording_id}:{counter}".encode()
    return f"{prefix}_{hashlib.blake2b(text, digest_size=6).hexdigest()}"


@lru_cache(maxsize=1024)
def session_id_of(recording_id: str) -> str:
    """Return the session's id, the same in every dialect and in the server's log."""
    return derive_id("sess", recording_id, 0)


def is_session_id(text: str) -> bool:
    """Whether a text could be the id of a session."""
    return _SESSION_ID.fullmatch(text) is not None


def digest(value: object) -> str:
    """Name a value by blake2b-128, in hex.

    It takes attrs instances, enums, mappings, sequences, sets, bytes, text, numbers and None,
    nested; `TypeError` for any other. Attributes with `eq=False` are left out.
    """
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: hashlib.blake2b, value: object) -> None:
    """Feed one value, tagged with its kind and length so that no two values run together."""
    kind = type(value)  # Most values are of few kinds, and are told by them more quickly.
    if kind is not str and kind not in NUMBERS and isinstance(value, Enum):
        _feed(hasher, value.value)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        hasher.update(b"s%d:%b" % (len(data), data))
    elif kind in NUMBERS or isinstance(value, bool | int | float):
        hasher.update(f"{kind.__name__}:{value!r};".encode())
    elif isinstance(value, bytes | bytearray):
        hasher.update(b"b%d:" % len(value))
        hasher.update(value)
    elif attrs.has(kind):
        instance = cast("attrs.AttrsInstance", value)
        hasher.update(f"a{kind.__name__}:".encode())
        for field in attrs.fields(type(instance)):
            value = getattr(instance, field.name)
            if field.eq and not is_unsaid(field, value):
                _feed(hasher, field.name)
                _feed(hasher, field.eq_key(value) if field.eq_key else value)
    elif isinstance(value, Mapping):
        hasher.update(b"m%d:" % len(value))
        for key in sorted(value):
            _feed(hasher, key)
            _feed(hasher, value[key])
    elif isinstance(value, Set):
        _feed(hasher, sorted(value))
    elif isinstance(value, Sequence | deque):
        hasher.update(b"l%d:" % len(value))
        for item in value:
            _feed(hasher, item)
    else:
        raise TypeError(f"a {type(value).__name__} has no digest")
