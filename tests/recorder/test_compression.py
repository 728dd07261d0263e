"""Frames of payloads in pieces: any zstd tool reads them, and no piece spoils another's code."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format.encoding import pack
from recorder.format.format import MARK, Piece, unstuff
from recorder.write.logfile import APART_BYTES_MIN, Compressor
from tests.recorder.test_samples import pcm

COMPRESSOR = Compressor()
LONG = st.binary(max_size=20).map(lambda seed: seed * (APART_BYTES_MIN // max(1, len(seed)) + 1))


def decompressed(pieces: list[Piece], *, has_samples: bool) -> bytes:
    """Compress, and decompress as a stock tool does, which takes the size from the frame."""
    frame = COMPRESSOR.compress(pieces, has_samples=has_samples)
    assert MARK not in bytes(frame.data)
    assert zstandard.frame_content_size(frame.data) == frame.payload_bytes
    payload = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
    return unstuff(payload) if frame.is_stuffed else payload


@given(st.lists(st.one_of(st.binary(max_size=50), LONG), max_size=6), st.booleans())
@example([], True)
@example([b""], True)
@example([bytes(300_000)], True)
@example([pcm(100_000)], True)
def test_any_pieces_come_back_joined(pieces: list[bytes], has_samples: bool) -> None:
    """A block that decompresses to something else is a lost block."""
    assert decompressed(list(pieces), has_samples=has_samples) == b"".join(pieces)


@pytest.mark.parametrize("has_samples", [False, True])
def test_a_mark_in_a_piece_or_across_two_is_stuffed(has_samples: bool) -> None:
    """A reader that lost its place takes what a client sent for a block."""
    noise = np.random.default_rng(1).bytes(APART_BYTES_MIN)
    within = [noise, noise[::-1] + MARK + noise[:9]]
    across = [noise + MARK[:5], MARK[5:] + noise[::-1]]
    for pieces in (within, across):
        assert decompressed(list(pieces), has_samples=has_samples) == b"".join(pieces)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_never_larger(seed: int) -> None:
    """To compact a log of noise would make it larger: level 19 sees repeats in it."""
    packed = pack(pcm(24_000, seed))
    stored = memoryview(packed.stored)
    pieces = [stored[: packed.cut], stored[packed.cut :]]
    kept = Compressor(is_live=False).compress(list(pieces), has_samples=True)
    assert len(kept.data) <= len(COMPRESSOR.compress(list(pieces), has_samples=True).data)
    assert zstandard.ZstdDecompressor().decompress(kept.data) == b"".join(pieces)


def test_samples_apart_are_smaller_than_mixed() -> None:
    """A log of speech is a twentieth larger, and costs twice the time."""
    second = pcm(24_000)
    packed = pack(second)
    stored = memoryview(packed.stored)
    pieces = [b'{"text":"header"}', stored[: packed.cut], stored[packed.cut :]]
    apart = COMPRESSOR.compress(pieces, has_samples=True)
    mixed = COMPRESSOR.compress(pieces, has_samples=False)
    assert len(apart.data) < 0.97 * len(mixed.data)
    assert apart.payload_bytes == mixed.payload_bytes == 17 + len(second)
