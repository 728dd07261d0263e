"""Small files of each kind that a message may have: they pass the header checks of `protocol.wire`.

Their content means nothing.
"""

from __future__ import annotations

import struct
from typing import Final

import attrs

from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire.codec import FLOAT32, PCM16


@attrs.frozen(kw_only=True)
class Medium:
    """A kind of file: its media type, and two different examples."""

    name: str
    samples: tuple[bytes, bytes]


def _jpeg(width: int) -> bytes:
    """Make the head of a JPEG (ITU T.81, B.2.2): a frame header with one component."""
    return b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB3B", 11, 8, 16, width, 1, 1, 0x11, 0)


def _png(width: int) -> bytes:
    """Make the head of a PNG (ISO 15948, 11.2.2): 8 bits, grey; its checksum is not looked at."""
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + struct.pack(
        ">IIBBBBBI", width, 16, 8, 0, 0, 0, 0, 0
    )


def _webp(width: int) -> bytes:
    """Make the head of a lossless WebP (RFC 9649, 3.4): its picture ends there."""
    picture = struct.pack("<BI", 0x2F, width - 1 | (16 - 1) << 14)
    body = b"WEBPVP8L" + struct.pack("<I", len(picture)) + picture + b"\0"
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _wav(samples: int) -> bytes:
    """Make a WAV of 16-bit silence at the model's rate."""
    data = bytes(2 * samples)
    form = struct.pack("<HHIIHH", 1, 1, INPUT_RATE_HZ, 2 * INPUT_RATE_HZ, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _mp4(brand: bytes) -> bytes:
    """Make the head of an MP4 (ISO 14496-12, 4.3): a file type box, and an empty media box."""
    box = struct.pack(">I4s4sI4s", 20, b"ftyp", brand, 0, b"isom")
    return box + struct.pack(">I4s", 8, b"moov") + bytes(64)


def _webm(padding: int) -> bytes:
    """Make the head of a WebM (RFC 8794, 11.2.4): an EBML header that names its type."""
    body = bytes.fromhex("4282 84") + b"webm"
    return bytes.fromhex("1a45dfa3") + bytes([0x80 | len(body)]) + body + bytes(padding)


_SECOND: Final = INPUT_RATE_HZ

MEDIA: Final[tuple[Medium, ...]] = (
    Medium(
        name=FLOAT32, samples=(bytes(_SECOND * SAMPLE_BYTES), bytes(2 * _SECOND * SAMPLE_BYTES))
    ),
    Medium(name="audio/wav", samples=(_wav(_SECOND), _wav(2 * _SECOND))),
    Medium(name="image/jpeg", samples=(_jpeg(16), _jpeg(32))),
    Medium(name="image/png", samples=(_png(16), _png(32))),
    Medium(name="image/webp", samples=(_webp(16), _webp(32))),
    Medium(name="video/mp4", samples=(_mp4(b"isom"), _mp4(b"mp42"))),
    Medium(name="video/webm", samples=(_webm(64), _webm(96))),
    Medium(name=PCM16, samples=(bytes(2 * _SECOND + 2), bytes(4 * _SECOND + 2))),
)
"""By name; the samples of 16 bits are odd in number, which is not float32."""
