"""Base64 spans taken out of JSON text, and put back.

A media frame is nearly all base64. Decoded, its PCM compresses, and repeated bytes are recognised.

Rules: a span is a whole quoted string, or the part after `base64,` near its start, and only if
re-encoding gives the same characters, so `restore` is exact for ANY text. JSON is not parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pybase64

from protocol.values.utf8 import UTF8_BYTES_MAX, Utf8Text

SPAN_CHARS_MIN: Final = 64
"""Shorter strings are ids and words; a reference would cost what it saves."""
QUOTES_MAX: Final = 1 << 16
"""Quotes examined per frame: a frame of only quotes must not hold up the recorder."""
SPANS_MAX: Final = 4096
"""Spans per frame, more than a conversation's media; each lengthens the record's header."""
_GROUP_CHARS: Final = 4
_GROUP_BYTES: Final = 3
"""Base64 groups: all but the last decode to exactly three bytes."""
_QUOTE: Final = b'"'
_DATA_URL: Final = b"base64,"
_DATA_URL_CHARS_MAX: Final = 128
"""Where `base64,` must end: the media type before it is short."""

Piece = str | Utf8Text | bytes
"""Text as it is, or the decoded bytes of a base64 span."""


def extract(text: str | Utf8Text) -> list[Piece]:
    """Split text into text of the same type and decoded base64 spans; `restore` undoes it."""
    if isinstance(text, str):
        return _split(text.encode("utf-8", "surrogatepass"), _to_text)
    return _split(text.data, Utf8Text)


def restore(pieces: Iterable[str | bytes]) -> str:
    """Join the pieces of `extract`."""
    return "".join(
        piece if isinstance(piece, str) else pybase64.b64encode_as_string(piece) for piece in pieces
    )


def _to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _split(data: bytes, text_of: Callable[[bytes], Piece]) -> list[Piece]:
    pieces: list[Piece] = []
    text_start = 0
    for start, end in _find_long_strings(data):
        blob = _decode(memoryview(data)[start:end])
        if blob is not None:
            pieces += (text_of(data[text_start:start]), blob)
            text_start = end
            if len(pieces) == 2 * SPANS_MAX:
                break
    if text_start < len(data):
        pieces.append(text_of(data[text_start:]))
    return pieces


def _find_long_strings(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield long stretches between quotes that may be base64, without a data URL's start."""
    start = 0
    for _ in range(QUOTES_MAX):
        end = data.find(_QUOTE, start)
        if end < 0:
            return
        if end - start >= SPAN_CHARS_MIN:
            yield _after_label(data, start, end), end
        start = end + 1


def _after_label(data: bytes, start: int, end: int) -> int:
    reach = min(end, start + _DATA_URL_CHARS_MAX * UTF8_BYTES_MAX)
    label = data.find(_DATA_URL, start, reach)
    after = label + len(_DATA_URL)
    is_near = label >= 0 and len(_to_text(data[start:after])) <= _DATA_URL_CHARS_MAX
    return after if is_near else start


def _decode(span: memoryview) -> bytes | None:
    """Decode canonical base64, or return None; only the last group can be non-canonical."""
    if len(span) < SPAN_CHARS_MIN or len(span) % _GROUP_CHARS:
        return None
    try:
        blob = pybase64.b64decode(span, validate=True)
    except ValueError:
        return None
    whole = (len(span) // _GROUP_CHARS - 1) * _GROUP_BYTES
    tail = pybase64.b64encode(blob[whole:])  # of 5 characters or more, were whole wrong
    return blob if tail == span[-_GROUP_CHARS:] else None
