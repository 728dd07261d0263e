"""The pictures of a video for the model: the one at each whole second, and those between.

Frames come in display order; the picture at a time is the last frame that began by then. Of n
pictures a second the first is separate and the other n - 1 lie side by side in one further picture,
as in the published model's tools: on a grid with black lines, each on white where shapes differ.
Memory holds the current frame, one second's small pictures, and the JPEG files.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from protocol.values.limits import FRAME_PIXELS_MAX, FRAME_SIDES_RATIO_MAX

from .image import SIDE_MAX, encode_jpeg, fitted, scale, to_rgb
from .values import MediaError

if TYPE_CHECKING:
    from av import VideoFrame

PICTURES_BYTES_MAX: Final = 96 * 1024 * 1024
"""Of a video, 128 pictures at most: 768 KiB each, which only noise at 1920 x 1080 exceeds. With the
video's sound they fit into a record of a log."""
LINE_PIXELS: Final = 6
"""Width of the line between pictures."""

Picture = NDArray[np.uint8]
"""Shape (height, width, 3), RGB."""


class Pictures:
    """Collects the pictures of one video, `per_second` (1 or more) each second.

    JPEG files: `first` has one a second, `stacked` the further ones; its last second may have none.
    """

    def __init__(self, per_second: int) -> None:
        self.first: list[bytes] = []
        self.stacked: list[bytes] = []
        self._per_second = per_second
        self._taken = 0
        self._others: list[Picture] = []
        self._shown: VideoFrame | None = None
        self._picture: Picture | None = None
        self._bytes = 0

    def show(self, at: Fraction, frame: VideoFrame) -> None:
        """Show a frame from `at` on: seconds from the first frame's, never falling.

        The frame must not change. `MediaError`: it, or all pictures, are too large.
        """
        _check_size(frame)
        self._take_until(at)
        self._shown, self._picture = frame, None

    def finish(self, end: Fraction) -> int:
        """End the video `end` seconds after the first frame; return the number of seconds begun.

        `MediaError`: the pictures are too large.
        """
        self._take_until(end)
        self._stack()
        return len(self.first)

    def _take_until(self, end: Fraction) -> None:
        """Take the pictures before `end` from the current frame."""
        while self._shown is not None and Fraction(self._taken, self._per_second) < end:
            if self._picture is None:
                self._picture = _picture_of(self._shown)
            if self._taken % self._per_second == 0:
                self._stack()
                self.first.append(self._encode(self._picture))
            else:
                self._others.append(self._picture)
            self._taken += 1

    def _stack(self) -> None:
        if self._others:
            self.stacked.append(self._encode(stack(self._others)))
            self._others = []

    def _encode(self, picture: Picture) -> bytes:
        jpeg = encode_jpeg(picture, "420")
        self._bytes += len(jpeg)
        if self._bytes > PICTURES_BYTES_MAX:
            raise MediaError(f"the video's pictures have more than {PICTURES_BYTES_MAX} bytes")
        return jpeg


def stack(pictures: list[Picture]) -> Picture:
    """Lay one or more pictures side by side, no side of the whole above `SIDE_MAX`.

    Four make a square, two or three the squarer shape; other shapes are fitted into the largest.
    """
    height = max(len(picture) for picture in pictures)
    width = max(picture.shape[1] for picture in pictures)
    rows, columns = _grid(len(pictures), height, width)
    lines_high, lines_wide = LINE_PIXELS * (rows - 1), LINE_PIXELS * (columns - 1)
    factor = min(
        Fraction(1),
        Fraction(SIDE_MAX - lines_high, rows * height),
        Fraction(SIDE_MAX - lines_wide, columns * width),
    )
    height, width = max(1, int(height * factor)), max(1, int(width * factor))
    whole = np.zeros((rows * height + lines_high, columns * width + lines_wide, 3), np.uint8)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        top, left = row * (height + LINE_PIXELS), column * (width + LINE_PIXELS)
        whole[top : top + height, left : left + width] = _fit(picture, height, width)
    return whole


def _grid(count: int, height: int, width: int) -> tuple[int, int]:
    if count == 4:
        return 2, 2
    if count > 4:
        return 1, count
    lines = LINE_PIXELS * (count - 1)
    beside = abs(Fraction(count * width + lines, height) - 1)
    below = abs(Fraction(width, count * height + lines) - 1)
    return (1, count) if beside <= below else (count, 1)


def _fit(picture: Picture, height: int, width: int) -> Picture:
    """Scale a picture into the middle of a white cell."""
    high, wide = picture.shape[:2]
    if (high, wide) == (height, width):
        return picture
    factor = min(Fraction(height, high), Fraction(width, wide))
    high, wide = max(1, round(high * factor)), max(1, round(wide * factor))
    cell = np.full((height, width, 3), 255, np.uint8)
    top, left = (height - high) // 2, (width - wide) // 2
    cell[top : top + high, left : left + wide] = scale(picture, wide, high)
    return cell


def _check_size(frame: VideoFrame) -> None:
    width, height = frame.width, frame.height
    if width * height > FRAME_PIXELS_MAX:
        raise MediaError(f"the video's pictures have more than {FRAME_PIXELS_MAX} pixels")
    if max(width, height) > FRAME_SIDES_RATIO_MAX * min(width, height):
        ratio = FRAME_SIDES_RATIO_MAX
        raise MediaError(f"the video's pictures have sides of more than {ratio} to 1")


def _picture_of(frame: VideoFrame) -> Picture:
    """Convert a frame, scaled down if large, and rotated for display."""
    size = fitted(frame.width, frame.height)
    return np.rot90(to_rgb(frame, *size), round(frame.rotation / 90))
