"""The pictures of a session, small enough for a page.

A picture is decoded and encoded again, so no bytes of a client's file reach the browser; a repeated
picture is named, not repeated; one that does not decode, or exceeds the bounds, is listed without
its image. Small pictures are enough: the log has the originals.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pybase64
import simplejpeg
from numpy.typing import NDArray

from protocol.values.digest import digest
from runtime.media.image import decode_jpeg
from runtime.media.values import MediaError

from .parts import Json, Part

SIDE_MAX: Final = 320
"""Pixels of the longer side: the size of a panel of the page, on a fine display twice as dense."""
QUALITY: Final = 70
PICTURES_BYTES_MAX: Final = 10 << 20
"""Of the page: some 900 pictures, three a second of a video session's five minutes."""


Pixels = NDArray[np.uint8]
"""RGB; shape (height, width, 3)."""


class Pictures:
    """Takes a session's pictures, in order; `count` were taken, and the page omits `left_out`."""

    def __init__(self) -> None:
        self.count = 0
        self.left_out = 0
        self._numbers: dict[str, int] = {}
        self._bytes = 0

    def has(self, jpeg: bytes) -> bool:
        """Whether a picture was taken before."""
        return digest(jpeg) in self._numbers

    def take(self, at_ns: int, jpeg: bytes) -> Part:
        """Take a picture that was shown at this time."""
        name, number = digest(jpeg), self.count
        self.count += 1
        shown: dict[str, Json] = {"at_ns": at_ns, "bytes": len(jpeg)}
        if name in self._numbers:
            return Part("picture", {**shown, "same_as": self._numbers[name]})
        small = None if self._bytes > PICTURES_BYTES_MAX else shrink(jpeg)
        if small is None:
            self.left_out += 1
            return Part("picture", shown)
        self._numbers[name] = number
        self._bytes += len(small)
        return Part("picture", {**shown, "jpeg": pybase64.b64encode_as_string(small)})


def shrink(jpeg: bytes) -> bytes | None:
    """Make a small JPEG of a JPEG; None if it is damaged, or a session would not take it."""
    try:
        decode_jpeg(jpeg)
        height, width, *_ = simplejpeg.decode_jpeg_header(jpeg)
        scale = min(1.0, SIDE_MAX / max(height, width))
        small = {"height": max(1, round(height * scale)), "width": max(1, round(width * scale))}
        pixels = simplejpeg.decode_jpeg(jpeg, min_height=small["height"], min_width=small["width"])
    except (MediaError, ValueError):
        return None
    made: bytes = simplejpeg.encode_jpeg(_averaged(pixels, **small), quality=QUALITY)
    return made


def _averaged(pixels: Pixels, *, height: int, width: int) -> Pixels:
    """Scale a picture down; each pixel is the mean of those that it covers."""
    rows, columns = (
        np.arange(small) * size // small
        for small, size in zip((height, width), pixels.shape, strict=False)
    )
    sums = np.add.reduceat(pixels.astype(np.uint32), rows, axis=0)
    sums = np.add.reduceat(sums, columns, axis=1)
    covered = np.outer(np.diff(rows, append=len(pixels)), np.diff(columns, append=pixels.shape[1]))
    return (sums // covered[..., None]).astype(np.uint8)
