"""Text kept as the bytes in which it came.

Python holds a `str` at the width of its widest character: one emoji makes a message of 90 MiB take
360. So a large message that is not ASCII stays UTF-8 from the socket to the parser and the log. It
is text all the same, and means what the `str` would; a binary message is `bytes`.

It does not check the bytes: its maker has.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs

from .digest import added
from .errors import ErrorCode

TEXT_BYTES_MIN: Final = 1024 * 1024
"""Smaller messages are a `str` at once: four times as much of these is no harm."""
UTF8_BYTES_MAX: Final = 4
"""A character (RFC 3629)."""


@attrs.frozen
class Utf8Text:
    """A text message; its length is that of the bytes.

    Attributes:
        data: valid UTF-8.
    """

    data: bytes = attrs.field(repr=False)

    def __len__(self) -> int:
        return len(self.data)


def frame_bytes(frame: str | bytes | Utf8Text) -> int:
    """Say how many bytes a message takes on the wire; for ASCII without looking at it."""
    if not isinstance(frame, str) or frame.isascii():
        return len(frame)
    return len(frame.encode("utf-8", "surrogatepass"))


@attrs.frozen(kw_only=True)
class Refused:
    """How a message was refused, where what is kept of it does not say: a replay repeats it.

    Attributes:
        code: of the error.
        message: its words.
        ignored: fields of the message that mean nothing, which are counted.
    """

    code: ErrorCode
    message: str
    ignored: int = 0


@attrs.frozen(kw_only=True)
class Shortened:
    """A message that was refused, as its recording holds it: without most of its bytes.

    Attributes:
        size_bytes: of the whole message; of text in UTF-8.
        blake2b: of those bytes, 128 bits in hex.
        head: its first 1024 characters; empty where they stand in the frame's own place.
        unreadable: why it is no message at all; empty where it is one.
        refused: how it was refused, for its fields or by what the session holds; None where the
            frame's own place still says so.
    """

    size_bytes: int
    blake2b: str
    head: str = attrs.field(default="", repr=False)
    unreadable: str = ""
    refused: Refused | None = added(None)


Frame: TypeAlias = str | bytes | Utf8Text | None
"""A WebSocket message: text in either form, `bytes` of a binary one, None for one that was too
long to be read."""
