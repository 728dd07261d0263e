"""Header checks of WebP pictures (RFC 9649).

The sizes of the file, of its chunks and of its canvas must agree with each other and with the bytes
present; a WebP that contradicts itself is a `FieldError`, with the `path` of the field. Neither
pixels nor chunks after the picture are read. An animated picture is refused by name: a model could
see any of its frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import attrs

from .codec import invalid

WEBP_CHUNKS_MAX: Final = 64
"""Chunks up to the picture: encoders write only a canvas, a colour profile and transparency, and
readers skip others.
"""

_FILE_HEAD: Final = struct.Struct("<4sI4s")
_CHUNK_HEAD: Final = struct.Struct("<4sI")
_CANVAS_BYTES: Final = 10
_IS_ANIMATED: Final = 0x02
_LOSSY_HEAD_BYTES: Final = 10
_START_CODE: Final = b"\x9d\x01\x2a"
_SIDE_BITS: Final = 14
_SIDE_MASK: Final = (1 << _SIDE_BITS) - 1
_LOSSLESS_HEAD_BYTES: Final = 5
_LOSSLESS_SIGNATURE: Final = 0x2F
_RAW_ALPHA: Final = 0
_PACKED_ALPHA: Final = 1


@attrs.frozen(kw_only=True)
class WebpHeader:
    """The structure of a WebP file; sizes in pixels.

    Attributes:
        picture: the chunk of the picture, whole.
        is_lossless: VP8L, else VP8.
        alpha: the chunk of its transparency, whole; empty without one, and for a lossless picture.
        is_clear: it may be transparent.
        packed_bytes: bytes packed as lossless pictures are, transparency included.
    """

    width: int
    height: int
    picture: slice
    is_lossless: bool
    alpha: slice
    is_clear: bool
    packed_bytes: int


def is_webp(data: bytes) -> bool:
    """Whether a file's head is a WebP's."""
    return data.startswith(b"RIFF") and data[8:12] == b"WEBP"


def read_webp(path: str, data: bytes) -> WebpHeader:
    """Read the header of a WebP of any size, and compare it with the bytes present.

    `is_webp` must be true. `FieldError` if it is animated, or contradicts itself.
    """
    canvas: tuple[int, int] | None = None
    alpha, packed_bytes, view = slice(0, 0), 0, memoryview(data)
    for number, (name, chunk) in enumerate(_chunks(path, data)):
        body = view[chunk.start + _CHUNK_HEAD.size : chunk.stop]
        if name == b"VP8X" and number == 0:
            canvas = _read_canvas(path, body)
        elif name == b"ALPH" and canvas is not None and alpha.stop == 0:
            packed_bytes = _read_alpha(path, body, canvas)
            alpha = chunk
        elif name in (b"VP8 ", b"VP8L") and (number == 0 or canvas is not None):
            is_lossless = name == b"VP8L"
            read = _read_lossless if is_lossless else _read_lossy
            width, height, has_alpha = read(path, body)
            if canvas is not None and canvas != (width, height):
                size = f"{width} x {height} pixels on a canvas of {canvas[0]} x {canvas[1]}"
                raise invalid(path, f"a WebP of {size}")
            return WebpHeader(
                width=width,
                height=height,
                picture=chunk,
                is_lossless=is_lossless,
                alpha=slice(0, 0) if is_lossless else alpha,
                is_clear=has_alpha if is_lossless else alpha.stop > 0,
                packed_bytes=len(body) if is_lossless else packed_bytes,
            )
        elif number == 0 or name in (b"VP8X", b"ALPH", b"VP8 ", b"VP8L", b"ANMF", b"ANIM"):
            raise invalid(path, f"a WebP with a chunk out of place at byte {chunk.start}")
    raise invalid(path, "a WebP without a picture")


def _chunks(path: str, data: bytes) -> Iterator[tuple[bytes, slice]]:
    """Walk the chunks: the name and place of each, without its padding."""
    if len(data) < _FILE_HEAD.size:
        raise invalid(path, "a WebP without a whole header")
    _, size, _ = _FILE_HEAD.unpack_from(data)
    at, end = _FILE_HEAD.size, 8 + size
    if end > len(data):
        raise invalid(path, f"a WebP that says {end} bytes and has {len(data)}")
    for _ in range(WEBP_CHUNKS_MAX):
        if at + _CHUNK_HEAD.size > end:
            return
        name, size = _CHUNK_HEAD.unpack_from(data, at)
        stop = at + _CHUNK_HEAD.size + size
        if stop > end:
            left = end - at - _CHUNK_HEAD.size
            raise invalid(path, f"a WebP with a chunk of {size} bytes where {left} are left")
        yield name, slice(at, stop)
        at = stop + size % 2  # chunks are padded to an even length
    raise invalid(path, f"a WebP without a picture in {WEBP_CHUNKS_MAX} chunks")


def _read_canvas(path: str, body: memoryview) -> tuple[int, int]:
    """Read the extended header: flags, and the canvas (RFC 9649, 2.7)."""
    if len(body) < _CANVAS_BYTES:
        raise invalid(path, "a WebP with a broken header")
    if body[0] & _IS_ANIMATED:
        raise invalid(path, "an animated WebP, only still pictures are taken")
    return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")


def _read_alpha(path: str, body: memoryview, canvas: tuple[int, int]) -> int:
    """Check the head of the transparency; returns how many of its bytes are packed."""
    how = body[0] & 3 if body else None
    is_whole = how == _PACKED_ALPHA or len(body) > canvas[0] * canvas[1]
    if how not in (_RAW_ALPHA, _PACKED_ALPHA) or not is_whole:
        raise invalid(path, "a WebP with broken transparency")
    return len(body) if how == _PACKED_ALPHA else 0


def _read_lossy(path: str, body: memoryview) -> tuple[int, int, bool]:
    """Read the head of a VP8 frame: a visible key frame (RFC 6386, 9.1)."""
    tag = int.from_bytes(body[:3], "little")
    is_key, is_shown, first_part_bytes = not tag & 1, tag >> 4 & 1, tag >> 5
    is_whole = len(body) >= _LOSSY_HEAD_BYTES + first_part_bytes
    if not (is_key and is_shown and is_whole) or bytes(body[3:6]) != _START_CODE:
        raise invalid(path, "a WebP with a broken header")
    width, height = struct.unpack_from("<HH", body, 6)
    return width & _SIDE_MASK, height & _SIDE_MASK, False


def _read_lossless(path: str, body: memoryview) -> tuple[int, int, bool]:
    """Read the head of a VP8L picture: its sides, and whether it is transparent (RFC 9649, 3.4)."""
    form = int.from_bytes(body[1:_LOSSLESS_HEAD_BYTES], "little")
    version = form >> 2 * _SIDE_BITS + 1
    if len(body) < _LOSSLESS_HEAD_BYTES or body[0] != _LOSSLESS_SIGNATURE or version:
        raise invalid(path, "a WebP with a broken header")
    width, height = form & _SIDE_MASK, form >> _SIDE_BITS & _SIDE_MASK
    return 1 + width, 1 + height, bool(form >> 2 * _SIDE_BITS & 1)
