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
from typing import Final

from .record_names import RECORD_FIELDS, RECORD_NAMES

DIGEST_BYTES: Final = 16
"""blake2b-128: short enough for every record, long enough never to collide by chance."""

NUMBERS: Final = frozenset({bool, int, float, type(None)})
"""Kinds that are fed as they are written."""

_SESSION_ID: Final = re.compile("sess_[0-9a-f]{12}")


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

    It takes the classes that records have names for, enums, mappings, sequences, sets, bytes, text,
    numbers and None, nested; `TypeError` for any other. Attributes at their default are left out.
    """
    hasher, left = hashlib.blake2b(digest_size=DIGEST_BYTES), [value]
    while left:
        # Each value is tagged with its kind and length, so that no two values run together.
        value = left.pop()
        kind = type(value)  # Most values are of few kinds, and are known by them more quickly.
        if kind is not str and kind not in NUMBERS and isinstance(value, Enum):
            left.append(value.value)
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            hasher.update(b"s%d:%b" % (len(data), data))
        elif kind in NUMBERS or isinstance(value, bool | int | float):
            hasher.update(f"{kind.__name__}:{value!r};".encode())
        elif isinstance(value, bytes | bytearray):
            hasher.update(b"b%d:" % len(value))
            hasher.update(value)
        elif (fields := RECORD_FIELDS.get(kind)) is not None:
            hasher.update(f"a{RECORD_NAMES[kind]}:".encode())
            for field, name in reversed(fields):
                item = getattr(value, field.name)
                if item != field.default:
                    left += (item, name)
        elif isinstance(value, Mapping):
            hasher.update(b"m%d:" % len(value))
            for key in sorted(value, reverse=True):
                left += (value[key], key)
        elif isinstance(value, Set):
            left.append(sorted(value))
        elif isinstance(value, Sequence | deque):
            hasher.update(b"l%d:" % len(value))
            left += reversed(value)
        else:
            raise TypeError(f"a {kind.__name__} has no digest")
    return hasher.hexdigest()
