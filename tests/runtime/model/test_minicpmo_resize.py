"""Pictures are scaled to the very pixels that the published processor makes."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from fixtures.parity.outputs import PICTURES, jpeg
from runtime.model.backends.minicpmo.vision import Slicing, read_jpeg, scale

PILLOW: Final = {
    ((640, 480), (518, 392)): ("8592cbf5c70d534a", "a0108b83e0b4811f"),
    ((640, 480), (1036, 392)): ("41a5f74c3ed992cf", "6114889c28578513"),
    ((1280, 720), (602, 336)): ("c2137616162302e6", "0780faaa062ccc95"),
    ((150, 100), (140, 98)): ("9e35ed71bd858bb2", "0acee148c3a23d8c"),
    ((70, 180), (70, 182)): ("36ac635b5267725f", "2268755b2d6b3f83"),
    ((70, 180), (84, 180)): ("b7426cac25fb2147", "6750791d0297fafa"),
    ((3, 5), (448, 14)): ("e3d036775bd561dc", "526ad736b6503df2"),
    ((1000, 1), (14, 448)): ("320e8e5503761894", "8a436dcbec1b1a60"),
    ((2000, 37), (14, 1)): ("e54cda4872162067", "a535c9cc3a282f80"),
    ((448, 448), (448, 448)): ("d0b19ea42070a055", "2af9c0419a9d65f1"),
    ((17, 4000), (56, 3500)): ("4cddc6c4973d28d0", "9937b22c4c97f7c3"),
}
"""What `Image.resize(size, BICUBIC)` of Pillow 10.1, 11.3 and 12.0 gave for a noisy picture and for
one of black and white; from 13.0 on it scales rows first where that is less work."""
SLICES: Final = {
    "square": "0a7b4455e1af9b64",
    "wide": "bb051994e9662b0d",
    "tall": "410bd450e58a5532",
}
"""Likewise, of the pictures of `fixtures/parity`, cut into at most four slices."""


def picture(width: int, height: int) -> NDArray[np.uint8]:
    """Noise that is the same everywhere."""
    seed = f"picture {width}x{height}".encode()
    noise = hashlib.shake_128(seed).digest(width * height * 3)
    return np.frombuffer(noise, np.uint8).reshape(height, width, 3).copy()


def digest(pixels: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(pixels).tobytes(), digest_size=8).hexdigest()


def scaled(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """What the model is shown, as whole colour values again."""
    shown = scale(pixels, size).permute(1, 2, 0).numpy()
    values = np.rint((shown.astype(np.float64) + 1.0) * 127.5).astype(np.uint8)
    assert np.array_equal(values.astype(np.float32) / np.float32(127.5) - np.float32(1), shown)
    return values


@pytest.mark.parametrize(("size", "wanted"), sorted(PILLOW))
def test_a_scaled_picture_is_the_published_one(
    size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    """The model would be shown other pixels than it was trained on, a step off here and there."""
    noisy = picture(*size)
    harsh = (noisy > 127).astype(np.uint8) * 255
    given = tuple(digest(scaled(pixels, wanted)) for pixels in (noisy, harsh))
    assert given == PILLOW[size, wanted]


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_slices_are_the_published_ones(name: str) -> None:
    """As above, for what is cut up."""
    cells = Slicing(resolution=112, patch=14).cut(read_jpeg(jpeg(name)), 4)
    shown = hashlib.blake2b(digest_size=8)
    for cell in cells:
        values = np.rint((cell.permute(1, 2, 0).numpy().astype(np.float64) + 1) * 127.5)
        shown.update(np.ascontiguousarray(values.astype(np.uint8)).tobytes())
    assert shown.hexdigest() == SLICES[name]


def test_rows_of_any_memory_layout() -> None:
    """A picture that is a part of another would be scaled as if it were not."""
    whole = picture(64, 48)
    part = whole[::2, 3:40]
    assert digest(scaled(part, (28, 14))) == digest(scaled(part.copy(), (28, 14)))
