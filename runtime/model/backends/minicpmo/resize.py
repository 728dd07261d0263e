"""Picture scaling, bit for bit as in the published image processor.

That is Pillow's bicubic filter (a = -0.5), widened for downscaling, in integers: weights are
rounded to 22 fractional bits; columns are scaled first and rounded to bytes, then rows. So neither
summation order nor processor changes a pixel. (Pillow, `src/libImaging/Resample.c`.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""(height, width, 3), RGB."""

PRECISION_BITS: Final = 22
"""Of a weight; with 8 bits of colour and the carries, a sum fits into 32."""
SUPPORT: Final = 2.0
"""Pixels on each side that a cubic weighs."""
ROWS_AT_ONCE: Final = 16
"""Rows whose sums stay in a core's cache."""
SIZES_KEPT: Final = 64
"""Pairs of sides whose weights are cached: a camera's frames all have the same."""


def resize(pixels: Pixels, width: int, height: int) -> Pixels:
    """Scale a picture (height, width, 3) to a size in pixels; unchanged if it has the size."""
    if width != pixels.shape[1]:
        pixels = _rows(pixels.swapaxes(0, 1), width).swapaxes(0, 1)
    return pixels if height == pixels.shape[0] else _rows(pixels, height)


def _rows(pixels: Pixels, count: int) -> Pixels:
    """Scale the first axis to `count` rows."""
    flat = np.ascontiguousarray(pixels).reshape(len(pixels), -1)
    places, weights = _taps(len(flat), count)
    out = np.empty((count, flat.shape[1]), np.uint8)
    for start in range(0, count, ROWS_AT_ONCE):
        at, weigh = places[start : start + ROWS_AT_ONCE], weights[start : start + ROWS_AT_ONCE]
        sums = np.full((len(at), flat.shape[1]), 1 << (PRECISION_BITS - 1), np.int32)
        product = np.empty_like(sums)
        for tap in range(at.shape[1]):
            sums += np.multiply(flat[at[:, tap]], weigh[:, tap, None], out=product)
        sums >>= PRECISION_BITS
        out[start : start + ROWS_AT_ONCE] = np.clip(sums, 0, 255, out=sums)
    return out.reshape(count, *pixels.shape[1:])


@lru_cache(maxsize=SIZES_KEPT)
def _taps(size: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """The source rows of `size` and their weights for each of `count` rows, (count, taps)."""
    scale = size / count
    wide = max(scale, 1.0)
    support, narrow = SUPPORT * wide, 1.0 / wide
    kept: list[tuple[int, list[int]]] = []
    for row in range(count):
        center = (row + 0.5) * scale
        first = max(int(center - support + 0.5), 0)
        last = min(int(center + support + 0.5), size)
        weights = [_cubic((place - center + 0.5) * narrow) for place in range(first, last)]
        total = 0.0
        for weight in weights:  # One by one, in the source's order: the last bit counts.
            total += weight
        kept.append((first, [_fixed(weight / total) for weight in weights]))
    taps = max(len(weights) for _, weights in kept)
    places = np.zeros((count, taps), np.intp)
    fixed = np.zeros((count, taps), np.int32)
    for row, (first, whole) in enumerate(kept):
        places[row] = np.minimum(np.arange(first, first + taps), size - 1)
        fixed[row, : len(whole)] = whole
    return places, fixed


def _cubic(at: float) -> float:
    at = abs(at)
    if at < 1.0:
        return (1.5 * at - 2.5) * at * at + 1.0
    return (((at - 5.0) * at + 8.0) * at - 4.0) * -0.5 if at < SUPPORT else 0.0


def _fixed(weight: float) -> int:
    """The nearest multiple of 2**-22 as an integer, halves away from zero."""
    half = -0.5 if weight < 0 else 0.5
    return int(half + weight * (1 << PRECISION_BITS))
