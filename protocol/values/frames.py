"""A frame as it was received: text, often kept as the bytes in which it came.

Python holds a `str` at the width of its widest character: one emoji makes a message of 90 MiB take
360. So a large message that is not ASCII stays UTF-8 from the socket to the parser and the log. It
means the same as the `str`; a binary message is `bytes`. The bytes are already checked.

A parser of JSON accepts what a frame may not have: duplicate keys, and endless depth. orjson
silently keeps the last of two equal keys. Two readers of such a frame may understand it
differently, so it is refused; a frame is scanned again only if it can have one. Text may be a `str`
or UTF-8, and is rarely copied, for it may be large.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import AnyStr, Final, TypeAlias

import attrs

from .errors import CLOSE_INVALID_FRAME, ErrorCode, FrameError
from .limits import JSON_DEPTH_MAX

TEXT_BYTES_MIN: Final = 1024 * 1024
"""Smaller messages are a `str` at once: four times as much does no harm."""
UTF8_BYTES_MAX: Final = 4
"""A character (RFC 3629)."""


@attrs.frozen
class Utf8Text:
    """A text message of valid UTF-8; its length is that of the bytes."""

    data: bytes = attrs.field(repr=False)

    def __len__(self) -> int:
        return len(self.data)


@attrs.frozen(kw_only=True)
class Refused:
    """The refusal of a message, if its kept part does not show it: a replay repeats it.

    `ignored` counts the ignored fields of the message.
    """

    code: ErrorCode
    message: str
    ignored: int = 0


KEPT_CHARS: Final = 1024
"""Characters kept of a refused message: enough to recognize it."""


@attrs.frozen(kw_only=True)
class Shortened:
    """A refused message as its recording holds it: without most of its bytes.

    Attributes:
        size_bytes: of the whole message; of text in UTF-8.
        blake2b: of those bytes, 128 bits in hex.
        head: its first `KEPT_CHARS` characters; empty if they are the frame.
        unreadable: why it is not a message at all; else empty.
        refused: its refusal by its fields or the session; None if the kept frame still shows it.
        read_bytes: of a message that was too long: those that were read before it was refused, as
            many as `blake2b` is of. Its size is what its header says. None for any other.
    """

    size_bytes: int
    blake2b: str
    head: str = attrs.field(default="", repr=False)
    unreadable: str = ""
    refused: Refused | None = None
    read_bytes: int | None = None


Frame: TypeAlias = str | bytes | Utf8Text | None
"""A WebSocket message: text in either form, binary `bytes`, or None for one too long to read."""
Received: TypeAlias = Frame | Shortened
"""A message as a connection gives it; `Shortened` for one that was too long."""


# -- JSON that a frame may not have -------------------------------------------------------------

Nested = dict[str, object] | list[object]
NESTED: Final = (dict, list)
"""The types of objects and arrays; a union in `isinstance` would be made for each call."""


def nested_in(level: Iterable[Nested]) -> list[Nested]:
    """Return the objects and arrays directly in those of one level."""
    return [
        child
        for node in level
        for child in (node.values() if isinstance(node, dict) else node)
        if isinstance(child, NESTED)
    ]


def not_json(reason: str) -> FrameError:
    """Make the error for a frame that is not a JSON object, or not an allowed one (1003)."""
    return FrameError(CLOSE_INVALID_FRAME, reason)


def has_more(text: str | bytes, char: str, count: int) -> bool:
    """Whether `text` has `char` more than `count` times; `str.count` takes ten times as long."""
    find = text.find if isinstance(text, str) else partial(_find, text)
    at = -1
    for _ in range(count + 1):
        at = find(char, at + 1)
        if at < 0:
            return False
    return True


def _find(data: bytes, char: str, start: int) -> int:
    return data.find(ord(char), start)


def count_keys(value: dict[str, object]) -> int:
    """Count the keys of all objects, level by level, as deep as frames may be."""
    keys, depth = len(value), 1
    level: list[Nested] = [value]
    while level := nested_in(level):
        depth += 1
        if depth > JSON_DEPTH_MAX:
            raise not_json(f"frame nested deeper than {JSON_DEPTH_MAX} levels")
        keys += sum(len(node) for node in level if isinstance(node, dict))
    return keys


def refuse_duplicates(text: str | bytes, keys: int) -> None:
    """Raise `FrameError` if an object in a frame has a key twice; `keys` is the number parsed."""
    # Without what is escaped, each quote begins or ends a string; a text that escapes nothing is
    # not copied for that.
    if isinstance(text, str):
        colons = _colons(text.replace("\\\\", "").replace('\\"', ""), '"', ":")
    else:
        colons = _colons(text.replace(b"\\\\", b"").replace(b'\\"', b""), b'"', b":")
    if colons > keys:
        raise not_json("frame with duplicate keys")


def _colons(text: AnyStr, quote: AnyStr, colon: AnyStr) -> int:
    """Count the colons between strings: each stands behind a key."""
    colons = start = 0
    while (begin := text.find(quote, start)) >= 0:
        colons += text.count(colon, start, begin)
        start = text.find(quote, begin + 1) + 1
    return colons + text.count(colon, start)
