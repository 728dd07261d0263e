"""Text kept as the bytes in which it came.

Python holds a `str` at the width of its widest character: one emoji makes a message of 90 MiB take
360. So a large message that is not ASCII stays UTF-8 from the socket to the parser and the log. It
is text all the same, and means what the `str` would; a binary message is `bytes`.

It does not check the bytes: whoever makes one has.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs

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


Frame: TypeAlias = str | bytes | Utf8Text | None
"""A WebSocket message: text in either form, `bytes` of a binary one, None for one that was too
long to be read."""
