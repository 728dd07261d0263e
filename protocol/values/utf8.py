"""Text kept as the bytes in which it came.

Python holds a `str` at the width of its widest character: one emoji makes a message of 90 MiB take
360. So a large message that is not ASCII stays UTF-8 from the socket to the parser and the log. It
means the same as the `str`; a binary message is `bytes`. The bytes are already checked.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs

from .errors import ErrorCode

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
