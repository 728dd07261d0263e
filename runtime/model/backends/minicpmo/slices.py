"""A picture to slices: their number, size and patches.

Big pictures are seen whole, scaled down to about one slice's area, and as a grid of slices nearest
to the picture's shape. The first slice is always the whole picture. Sides are multiples of a patch.
(model.md, "slices"; rules and pixels are those of the public image processor: see `resize`.)
"""

from __future__ import annotations

import math

import attrs
import numpy as np
import torch
from torch import Tensor

from .config import VisionConfig
from .resize import Pixels, resize


@attrs.frozen(kw_only=True)
class Slicing:
    """How pictures are sliced: side of a square with a slice's area, and of a patch, in pixels."""

    resolution: int
    patch: int

    @classmethod
    def of(cls, vision: VisionConfig) -> Slicing:
        """Return how a model slices pictures."""
        return cls(resolution=vision.scale_resolution, patch=vision.patch_size)

    def grid(self, width: int, height: int, slices_max: int) -> tuple[int, int] | None:
        """Columns and rows of a picture's grid of at most `slices_max` (1 to 9); None: whole."""
        wanted = min(math.ceil(width * height / self.resolution**2), slices_max)
        if wanted <= 1:
            return None
        counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= slices_max]
        shapes = [(m, n // m) for n in counts for m in range(1, n + 1) if n % m == 0]
        shape = math.log(width / height)
        return min(shapes, key=lambda s: abs(shape - math.log(s[0] / s[1])), default=(1, 1))

    def count(self, width: int, height: int, slices_max: int) -> int:
        """Slices of a picture, the whole one included."""
        grid = self.grid(width, height, slices_max)
        return 1 if grid is None else 1 + grid[0] * grid[1]

    def _round(self, length: float, step: int) -> int:
        return max(round(length / step) * step, step)

    def _fit(self, width: float, height: float, *, upscale: bool) -> tuple[int, int]:
        """The size nearest to one slice's area with the shape kept."""
        if upscale or width * height > self.resolution**2:
            shape = width / height
            height = int(self.resolution / math.sqrt(shape))
            width = int(height * shape)
        return self._round(width, self.patch), self._round(height, self.patch)

    def cut(self, pixels: Pixels, slices_max: int) -> list[Tensor]:
        """Slice a picture, (height, width, 3), RGB, into a grid of at most `slices_max` (1 to 9).

        Returns the whole picture, then the grid row by row; each (3, h, w) in [-1, 1].
        """
        height, width = pixels.shape[:2]
        grid = self.grid(width, height, slices_max)
        if grid is None:
            return [scale(pixels, self._fit(width, height, upscale=True))]
        columns, rows = grid
        one = self._fit(
            self._round(width, columns) / columns, self._round(height, rows) / rows, upscale=True
        )
        fine = scale(pixels, (one[0] * columns, one[1] * rows))  # (3, rows * h, columns * w)
        bands = torch.split(fine, one[1], dim=1)
        cells = [cell for band in bands for cell in torch.split(band, one[0], dim=2)]
        return [scale(pixels, self._fit(width, height, upscale=False)), *cells]


def read_jpeg(data: bytes) -> Pixels:
    """Decode a JPEG; `ValueError` if it is invalid."""
    import simplejpeg  # Here, so that the model runs where it is not installed.

    pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    return pixels


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Width and height of a JPEG, from its header; `ValueError` if it is invalid."""
    import simplejpeg

    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    return int(width), int(height)


def scale(pixels: Pixels, size: tuple[int, int]) -> Tensor:
    """Scale (h, w, 3) to (width, height), integer bicubic: (3, height, width) in [-1, 1]."""
    picture = torch.from_numpy(np.ascontiguousarray(resize(pixels, *size)))
    return picture.permute(2, 0, 1).float() / 127.5 - 1.0
