"""WebP pictures of each kind, as libwebp writes them, and files put together of their chunks."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

WIDTH: Final = 64
HEIGHT: Final = 47
"""Odd: half of it is no whole number of pixels, and some chunks are padded."""


def slope(width: int = WIDTH, height: int = HEIGHT, alpha: int | None = None) -> Pixels:
    """Draw a slope of colours, which every codec keeps; shape (height, width, 3 or 4)."""
    across = np.linspace(20, 230, width)[None, :].repeat(height, 0)
    down = np.linspace(230, 20, height)[:, None].repeat(width, 1)
    planes = [across, down, (across + down) / 2]
    planes += [] if alpha is None else [np.full((height, width), alpha)]
    return np.ascontiguousarray(np.stack(planes, -1).astype(np.uint8))


def encode(pixels: Pixels, *, lossless: bool) -> bytes:
    """Encode a picture by libwebp; with four channels it is transparent."""
    height, width, channels = pixels.shape
    is_clear = channels == 4
    encoder: Any = av.CodecContext.create("libwebp", "w")
    encoder.width, encoder.height, encoder.time_base = width, height, Fraction(1, 25)
    encoder.pix_fmt = "bgra" if lossless else "yuva420p" if is_clear else "yuv420p"
    encoder.options = {"lossless": "1"} if lossless else {"quality": "95"}
    frame = av.VideoFrame.from_ndarray(pixels, "rgba" if is_clear else "rgb24")
    frame = frame.reformat(format=encoder.pix_fmt)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def chunk(name: bytes, body: bytes) -> bytes:
    """Write a chunk."""
    return name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)


def container(*chunks: bytes) -> bytes:
    """Write a file of chunks."""
    body = b"".join(chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def canvas(width: int, height: int, flags: int = 0) -> bytes:
    """Write the chunk of an extended header."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return chunk(b"VP8X", bytes([flags, 0, 0, 0]) + sides)


def chunks_of(data: bytes) -> dict[bytes, bytes]:
    """Read a file's chunks, without their heads, by name."""
    found: dict[bytes, bytes] = {}
    at = 12
    while at < len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        found[name] = data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    return found


LOSSY: Final = encode(slope(), lossless=False)
LOSSLESS: Final = encode(slope(), lossless=True)
CLEAR: Final = encode(slope(alpha=128), lossless=False)
CLEAR_LOSSLESS: Final = encode(slope(alpha=128), lossless=True)
EXTENDED: Final = container(
    canvas(WIDTH, HEIGHT, 0x2C),
    chunk(b"ICCP", b"profile"),
    chunk(b"what", b"?"),
    chunk(b"VP8 ", chunks_of(LOSSY)[b"VP8 "]),
    chunk(b"EXIF", b"camera"),
)
RAW_ALPHA: Final = container(
    canvas(WIDTH, HEIGHT, 0x10),
    chunk(b"ALPH", b"\0" + bytes([128]) * (WIDTH * HEIGHT)),
    chunk(b"VP8 ", chunks_of(CLEAR)[b"VP8 "]),
)
ANIMATED: Final = container(
    canvas(WIDTH, HEIGHT, 0x02),
    chunk(b"ANIM", bytes(6)),
    chunk(b"ANMF", bytes(16) + chunk(b"VP8 ", chunks_of(LOSSY)[b"VP8 "])),
)
KINDS: Final = {
    "lossy": LOSSY,
    "lossless": LOSSLESS,
    "lossy, transparent": CLEAR,
    "lossless, transparent": CLEAR_LOSSLESS,
    "extended": EXTENDED,
    "transparency as it is": RAW_ALPHA,
}
