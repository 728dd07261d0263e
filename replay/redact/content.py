"""The content to take out of a log (`Policy`), what was taken out (`Tally`), and what replaces it.

Sound and pictures become files of the same length that a session treats alike:

- The length in bytes and the header's values stay: a session reads nothing else. An invalid file is
  replaced by an invalid one.
- Sound becomes silence; the first sample that is not finite stays, because it is checked.
- A picture becomes grey, of the same size, padded with zeros. If no such file is short enough, only
  its header is left: a session takes it, a decoder does not.
- A video becomes an empty container.

Words become as many characters and UTF-8 bytes, without content:

- The fillers are ordered by width, so that the place of an accent is not visible.
- In JSON an escape becomes one of the same length, for a character of the same width.
- A name becomes another name, the same one everywhere: answers that belong together stay
  recognisable.
- Numbers stay numbers of as many digits.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter
from typing import Final, Literal

import attrs
import numpy as np
import simplejpeg

from protocol.values.errors import FieldError
from protocol.values.model import SAMPLE_BYTES
from protocol.wire import media
from protocol.wire.audio import LOUDEST, looks_float32, looks_int16

Kind = Literal["audio", "video", "image", "text", "prompt", "voice", "name"]
Side = Literal["user", "model", "both"]

KINDS: Final[dict[Kind, str]] = {
    "audio": "what was said, as sound, and the speech codes that spell it",
    "video": "what a camera saw: frames, and files of videos with their sound",
    "image": "pictures in a conversation",
    "text": "words of a conversation, tokens that spell them, and whatever else a client wrote",
    "prompt": "the system prompt, and its tokens",
    "voice": "reference audio, and names of voices",
    "name": "names that clients and operators gave: of sessions, inputs, owners, models",
}
"""The kinds of content. Settings, times, counts and the server's ids are not content."""
TRACES: Final = "trace"
"""Always taken out: hashes and margins, from which content could be guessed."""


@attrs.frozen(kw_only=True)
class Policy:
    """The content to take out, from `from_ns` to `to_ns` (exclusive; None: the end).

    Times are on the session's clock; names are taken out everywhere.
    """

    side: Side = "both"
    kinds: frozenset[Kind] = frozenset(KINDS)
    from_ns: int = 0
    to_ns: int | None = None

    def covers(self, kind: Kind, side: Side, at_ns: int) -> bool:
        """Whether content of a time is taken out; a side of `both` goes with either."""
        if kind not in self.kinds or (side != self.side and "both" not in {side, self.side}):
            return False
        is_late = self.to_ns is not None and at_ns >= self.to_ns
        return kind == "name" or (at_ns >= self.from_ns and not is_late)


@attrs.define
class Tally:
    """The pieces and bytes taken out, and the pictures of which only the header is left."""

    pieces: Counter[tuple[str, Side]] = attrs.Factory(Counter)
    bytes: Counter[tuple[str, Side]] = attrs.Factory(Counter)
    headers_only: int = 0

    def count(self, kind: str, side: Side, size_bytes: int) -> None:
        """Count a piece."""
        self.pieces[kind, side] += 1
        self.bytes[kind, side] += size_bytes

    def to_json(self) -> list[dict[str, str | int]]:
        """The counts, in the order of the kinds."""
        order = [*KINDS, TRACES]
        return [
            {"kind": kind, "side": side, "pieces": count, "bytes": self.bytes[kind, side]}
            for (kind, side), count in sorted(
                self.pieces.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
            )
        ]


# -- sound -----------------------------------------------------------------------------------------


_RIFF_HEAD_BYTES: Final = 12
_PLAIN_FORMAT: Final = slice(0, 16)
_LONG_FORMAT: Final = (slice(0, 20), slice(24, 40))
"""The parts that are read of a WAV's format, and of an extensible one, without its speaker mask."""
_EXTENSIBLE: Final = b"\xfe\xff"
_KNOWN_CHUNKS: Final = frozenset({b"fmt ", b"data"})
_JUNK: Final = b"junk"
_UNSIGNED_SILENCE: Final = b"\x80"
_NAN: Final = np.float32("nan")


def mute(pcm: bytes) -> bytes:
    """Silence in place of float32 LE samples; what is refused as int16 still is."""
    samples = np.frombuffer(pcm, "<f4", count=len(pcm) // SAMPLE_BYTES)
    silence = np.full(len(samples), 2 * LOUDEST if looks_int16(samples) else 0, "<f4")
    finite = np.isfinite(samples)
    if not finite.all():
        silence[finite.argmin()] = _NAN
    return silence.tobytes() + bytes(len(pcm) % SAMPLE_BYTES)


def mute16(pcm16: bytes) -> bytes:
    """Silence in place of 16-bit samples; what is refused as float32 still is."""
    if not looks_float32(pcm16):
        return bytes(len(pcm16))
    tenth = np.full(len(pcm16) // SAMPLE_BYTES + 1, 0.1, "<f4").tobytes()
    return tenth[: len(pcm16)]


def mute_file(data: bytes) -> bytes:
    """Silence in place of a WAV or of float32 LE samples; of another sound file, its head."""
    kind = media.sound_kind(data)
    if kind is None and media.container_of(data) is not None:
        return hide_video(data)
    if kind is None:
        return mute(data)
    if kind != "WAV":
        return media.SOUND_HEADS[kind].ljust(len(data), b"\0")[: len(data)]
    try:
        header = media.read_wav("", data, is_piped=True)
    except FieldError:
        return b"RIFF".ljust(len(data), b"\0")
    fill = _UNSIGNED_SILENCE if header.sample_bits == 8 else b"\0"
    return _empty_chunks(data).ljust(len(data), fill)


def _empty_chunks(data: bytes) -> bytes:
    """The chunks of a valid WAV up to its data, with their sizes and the format."""
    pieces, at = [data[:_RIFF_HEAD_BYTES]], _RIFF_HEAD_BYTES
    while True:
        name, size = struct.unpack_from("<4sI", data, at)
        pieces.append((name if name in _KNOWN_CHUNKS else _JUNK) + data[at + 4 : at + 8])
        if name == b"data":
            return b"".join(pieces)
        at += 8
        padded = size + size % 2
        kept = _format(data[at : at + size]) if name == b"fmt " else b""
        pieces.append(kept.ljust(padded, b"\0"))
        at += padded


def _format(body: bytes) -> bytes:
    parts = _LONG_FORMAT if body.startswith(_EXTENSIBLE) else (_PLAIN_FORMAT,)
    kept = bytearray(max(part.stop for part in parts))
    for part in parts:
        kept[part] = body[part]
    return bytes(kept)


# -- pictures --------------------------------------------------------------------------------------


QUALITY: Final = 60
"""Of a JPEG: a grey one has the same length in all."""
GREY: Final = 128
_END_OF_IMAGE: Final = b"\xff\xd9"
_WEBP_HEAD_BYTES: Final = 20
"""Of a WebP with one chunk, up to its picture."""
_GREY_CODES: Final = sum(
    value << at
    for at, value in (
        *((3, 0b101 | GREY << 3), (14, 0b101 | GREY << 3), (25, 0b101 | GREY << 3)),
        *((36, 0b101 | 0xFF << 3), (47, 0b0001)),
    )
).to_bytes(7, "little")
"""One repeated pixel (RFC 9649, 3.7.2): no transform, cache or groups, and codes of one symbol for
green, red, blue, alpha and distances, which take no bits."""


def hide_picture(data: bytes) -> bytes:
    """Replace a JPEG, PNG or WebP by a grey one of the same length and size, others by zeros."""
    try:
        width, height = media.check_image("", data)
    except FieldError:
        return bytes(len(data))
    if data.startswith(media.PNG_SIGNATURE):
        made = _grey_png(width, height)
    elif media.is_webp(data):
        made = _lossless_webp(width, height, _GREY_CODES)
    else:
        made = _grey_jpeg(width, height)
    return made.ljust(len(data), b"\0") if len(made) <= len(data) else header_only(data)


def header_only(data: bytes) -> bytes:
    """A picture that ends with its header; other data become zeros."""
    try:
        width, height = media.check_image("", data)
    except FieldError:
        return bytes(len(data))
    if data.startswith(media.PNG_SIGNATURE):
        made = media.PNG_SIGNATURE + _chunk(b"IHDR", _png_form(width, height))
    elif media.is_webp(data):
        made = _lossless_webp(width, height)
    else:  # SOI and a frame header of one component (ITU T.81, B.2.2)
        made = b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB3B", 11, 8, height, width, 1, 1, 0x11, 0)
    return made.ljust(len(data), b"\0")[: len(data)]


def is_whole(picture: bytes) -> bool:
    """Whether a picture made here has more than its header, and can be decoded."""
    if media.is_webp(picture):
        return not picture.startswith(_lossless_webp(1, 1)[:_WEBP_HEAD_BYTES])
    return any(picture.find(end) >= 0 for end in (_END_OF_IMAGE, b"IEND"))


def _grey_jpeg(width: int, height: int) -> bytes:
    shown = np.full((height, width, 1), GREY, np.uint8)
    gray = {"colorspace": "GRAY", "colorsubsampling": "Gray"}
    made: bytes = simplejpeg.encode_jpeg(shown, quality=QUALITY, **gray)
    return made


def _lossless_webp(width: int, height: int, codes: bytes = b"") -> bytes:
    """A lossless WebP (RFC 9649, 3.4) with these codes and no further data."""
    picture = struct.pack("<BI", 0x2F, width - 1 | (height - 1) << 14) + codes
    body = b"WEBPVP8L" + struct.pack("<I", len(picture)) + picture
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _grey_png(width: int, height: int) -> bytes:
    """A PNG (ISO 15948): grey, 8 bits, no filter."""
    packer = zlib.compressobj(9)
    packed = [packer.compress(b"\0" + bytes([GREY]) * width) for _ in range(height)]
    chunks = (
        _chunk(b"IHDR", _png_form(width, height)),
        _chunk(b"IDAT", b"".join([*packed, packer.flush()])),
        _chunk(b"IEND", b""),
    )
    return media.PNG_SIGNATURE + b"".join(chunks)


def _png_form(width: int, height: int) -> bytes:
    return struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


# -- videos ----------------------------------------------------------------------------------------


def hide_video(data: bytes) -> bytes:
    """An MP4 with one empty box in place of a video; other data become zeros."""
    if media.container_of(data) is None:
        return bytes(len(data))
    return struct.pack(">I4s", len(data), b"free").ljust(len(data), b"\0")


# -- words -----------------------------------------------------------------------------------------


FILLERS: Final = ("x", "\u00e9", "\u25a1", "\U0001f02b")
"""By width: of one to four bytes."""
LONE_SURROGATE: Final = "\ud800"
"""Not in UTF-8, and stays: a text with it is refused, or stored differently."""
_ESCAPED: Final = ("\\u0078", "\\u00e9", "\\u25a1", "\\ud83c\\udc2b")
_SHORT_ESCAPE: Final = "\\/"
_REFUSED: Final = str.maketrans(FILLERS[0], "?")
_UNIT: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
"""One character or escape."""


def fill(text: str) -> str:
    """Replace a text."""
    if text.isascii():
        return FILLERS[0] * len(text)
    counts = Counter(_filler(char) for char in text)
    return "".join(filler * counts[filler] for filler in (*FILLERS, LONE_SURROGATE))


def fill_json(raw: str) -> str:
    """Replace the raw text of a JSON string."""
    if "\\" not in raw:
        return fill(raw)
    return "".join(sorted(map(_json_filler, _UNIT.findall(raw)), key=lambda it: (len(it), it)))


def refuse_json(raw: str) -> str:
    """Replace the raw text of a JSON string by neither base64 nor a name."""
    return fill_json(raw).translate(_REFUSED).replace(_SHORT_ESCAPE, "\\n").replace("0078", "003f")


def numbers(text: str) -> tuple[str, ...]:
    """Replace the digits of a number in several ways: by low ones, nines, zeros; or not at all.

    Its sign, point and exponent stay. Of these, a field that refuses the number refuses one: the
    last only of a single digit.
    """
    low = re.sub("[0-9]+", lambda digits: "1" + "0" * (len(digits[0]) - 1), text)
    return low, re.sub("[0-9]", "9", text), re.sub("[0-9]", "0", text), text


class Pseudonyms:
    """Replacements for names; equal names get equal ones."""

    def __init__(self) -> None:
        self._numbers: Final[dict[str, int]] = {}

    def of(self, name: str) -> str:
        """The replacement: as many characters and bytes, numbered as far as there is room."""
        number = str(self._numbers.setdefault(name, len(self._numbers)))
        filled = fill(name)
        room = filled.count(FILLERS[0])
        return number[-room:].rjust(room, FILLERS[0]) + filled[room:] if room else filled


def _filler(char: str) -> str:
    if "\ud800" <= char <= "\udfff":
        return LONE_SURROGATE
    return FILLERS[len(char.encode()) - 1]


def _json_filler(unit: str) -> str:
    if len(unit) == 1:
        return _filler(unit)
    if len(unit) == 2:
        return _SHORT_ESCAPE
    if len(unit) > 6:
        return _ESCAPED[3]
    filler = _filler(chr(int(unit[2:], 16)))
    return f"\\u{ord(filler):04x}"
