"""WebP: the same picture as a JPEG, none of it that is hidden, and no damaged one."""

from __future__ import annotations

from typing import Any, Final

import anyio
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.values.effects import DecodeMedia
from runtime.media.decoder import Client, MediaDecoder
from runtime.media.image import PACKED_BYTES_MAX, SIDE_MAX, decode_image, needs_process, pixels_of
from runtime.media.values import Decoded, MediaError
from tests.media.webps import (
    ANIMATED,
    CLEAR,
    HEIGHT,
    KINDS,
    LOSSLESS,
    LOSSY,
    WIDTH,
    canvas,
    chunk,
    chunks_of,
    container,
    encode,
    slope,
)
from tests.project.sampling import ONE_LOOP

DAMAGED: Final = "the image is a damaged WebP"
LYING: Final = "the image is a WebP that is too big, or damaged"
REFUSALS: Final = {DAMAGED, LYING, "the image is not a JPEG, or is damaged"}


def pixels(jpeg: bytes) -> NDArray[np.uint8]:
    return np.asarray(simplejpeg.decode_jpeg(jpeg, colorspace="RGB"))


def noise(side: int) -> NDArray[np.uint8]:
    """Draw what no codec makes smaller."""
    return np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)


LARGE: Final = encode(noise(512), lossless=True)


@pytest.mark.parametrize("name", KINDS)
def test_it_becomes_the_same_picture(name: str) -> None:
    """The model would see other colours, or what is hidden."""
    seen = pixels(decode_image(KINDS[name])).astype(int)
    drawn = slope().astype(int)
    shown = (drawn * 128 + 255 * 127) // 255 if "transparen" in name else drawn
    assert seen.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(seen - shown).mean() < 4
    assert pixels_of(KINDS[name]) == WIDTH * HEIGHT


@pytest.mark.slow
@pytest.mark.parametrize("lossless", [True, False])
def test_a_large_one_is_scaled_down(lossless: bool) -> None:
    """The model would be handed megapixels that it does not see."""
    made = decode_image(encode(slope(2_500, 500), lossless=lossless))
    assert simplejpeg.decode_jpeg_header(made)[:2] == (384, SIDE_MAX)


def reason(data: bytes) -> str:
    with pytest.raises(MediaError) as refused:
        decode_image(data)
    return refused.value.reason


def test_every_truncated_one_is_refused() -> None:
    """The model would see a picture whose lower half is grey."""
    for whole in KINDS.values():
        assert {reason(whole[:length]) for length in range(12, len(whole))} == {LYING}


def test_an_animated_one_is_refused() -> None:
    """The model would see what a decoder makes of a film."""
    assert reason(ANIMATED) == LYING


def test_one_whose_picture_ends_early_is_refused() -> None:
    """A file whose sizes agree, and whose picture was cut, would be shown half."""
    body = chunks_of(LOSSLESS)[b"VP8L"]
    assert reason(container(chunk(b"VP8L", body[: len(body) // 2]))) == DAMAGED


@given(
    st.sampled_from([*KINDS.values()]),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_a_broken_one_is_refused_or_shown(data: bytes, changes: list[tuple[int, int]]) -> None:
    """A hostile file would end the session by an internal error."""
    broken = bytearray(data)
    for at, value in changes:
        broken[at % len(broken)] = value
    made, why = b"", ""
    try:
        made = decode_image(bytes(broken))
    except MediaError as refused:
        why = refused.reason
    if not made:
        assert why in REFUSALS
        return
    height, width, *_ = simplejpeg.decode_jpeg_header(made)
    assert height * width == pixels_of(bytes(broken))


def test_the_same_file_gives_the_same_bytes() -> None:
    """A replay of the model would see another picture."""
    assert {decode_image(CLEAR) for _ in range(3)} == {decode_image(CLEAR)}


@pytest.mark.anyio
async def test_one_that_may_unfold_is_decoded_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of codes would take gigabytes of the server's memory, for a file of megabytes."""
    assert len(LARGE) > PACKED_BYTES_MAX
    assert [needs_process(data) for data in (LARGE, LOSSY, LOSSLESS, b"", b"RIFF0000WEBP")] == [
        *(True, False, False, False, False)
    ]
    ended: list[Any] = []
    started = anyio.open_process

    async def counted(*command: Any, **options: Any) -> Any:
        ended.append(command)
        return await started(*command, **options)

    monkeypatch.setattr(anyio, "open_process", counted)
    asked = [DecodeMedia(media=0, kind="image", data=data) for data in (LARGE, LOSSY)]
    made = [await MediaDecoder().decode(each, Client()) for each in asked]
    assert made == [Decoded(pictures=(decode_image(data),)) for data in (LARGE, LOSSY)]
    assert len(ended) == 1


class Bits:
    """Writes a bit stream, lowest bits first."""

    def __init__(self) -> None:
        self._bits: list[int] = []

    def put(self, *values: tuple[int, int]) -> None:
        """Write values, each in so many bits."""
        for value, count in values:
            self._bits += [value >> at & 1 for at in range(count)]

    def data(self) -> bytes:
        """Give the bytes."""
        return np.packbits(np.array(self._bits, np.uint8), bitorder="little").tobytes()


def bomb(groups: int, side: int = 512) -> bytes:
    """Make a picture of some kilobytes with many tables of codes (RFC 9649, 3.7.2)."""

    def one(symbol: int) -> tuple[tuple[int, int], ...]:
        return ((1, 1), (0, 1), (1, 1), (symbol, 8))

    bits = Bits()
    bits.put((0x2F, 8), (side - 1, 14), (side - 1, 14), (0, 4))
    bits.put((0, 1), (0, 1), (1, 1), (0, 3))  # no transform, no cache, codes for each 4 x 4 pixels
    last = groups - 1
    bits.put((0, 1), *one(last & 255), *one(last >> 8), *one(0), *one(0), *one(0))
    lengths = (
        (0, 1),
        (0, 4),
        (0, 3),
        (0, 3),
        (1, 3),
        (1, 3),
        (1, 1),
        (0, 3),
        (0, 2),
        (1, 1),
        (1, 1),
    )
    bits.put(*lengths * 5 * groups, (0, 1))
    body = bits.data() + bytes(side * side // 2)
    return container(canvas(side, side), chunk(b"VP8L", body))


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_a_bomb_of_codes_does_not_reach_the_server() -> None:
    """A file of a megabyte takes a fifth of a gigabyte here, and one of sixteen more than all."""
    data = bomb(65_536)
    assert needs_process(data)
    assert not needs_process(bomb(1_000))
    effect = DecodeMedia(media=0, kind="image", data=data)
    made = await MediaDecoder().decode(effect, Client())
    assert pixels(made.pictures[0]).shape == (512, 512, 3)
