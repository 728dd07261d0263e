"""Resampling between the rates of OpenAI's dialects and the model's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.wire.audio import DOWN, HISTORY_BYTES, Resampler, resample

PAIRS = ((24_000, 16_000), (24_000, 8_000), (8_000, 16_000), (16_000, 24_000), (8_000, 24_000))
SCALE = 32_767
LAG = dict(
    zip(PAIRS, (76.5 / 48_000, 38 / 24_000, 76.5 / 16_000, 115 / 48_000, 115 / 24_000), strict=True)
)
"""Half the filter, in seconds."""


def tone(hz: float, rate_hz: int, at_s: float = 0.0) -> np.ndarray:
    """A second of a tone, from a moment on."""
    return 0.5 * np.sin(2 * np.pi * hz * (np.arange(rate_hz) / rate_hz + at_s))


def made(sound: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """The sound at the other rate."""
    pcm16 = np.rint(sound * SCALE).astype("<i2").tobytes()
    return np.frombuffer(resample(bytes(HISTORY_BYTES) + pcm16, from_hz, to_hz), "<f4")


@pytest.mark.parametrize(("from_hz", "to_hz"), PAIRS)
@pytest.mark.parametrize("hz", [100, 440, 1000, 2000, 3000])
def test_what_both_rates_can_hold_stays(from_hz: int, to_hz: int, hz: int) -> None:
    """Speech would come to the model at another pitch, louder, or dull."""
    found, lag = made(tone(hz, from_hz), from_hz, to_hz), LAG[from_hz, to_hz]
    wanted = tone(hz, to_hz, -lag)
    middle = slice(to_hz // 10, -to_hz // 10)
    assert len(found) == to_hz
    assert np.abs(found[middle] - wanted[middle]).max() < 0.002


@pytest.mark.parametrize("hz", [5000, 6000, 9000])
def test_what_the_lower_rate_cannot_hold_is_gone(hz: int) -> None:
    """It would come back as another tone, amid the speech."""
    found = made(tone(hz, 24_000), 24_000, 8_000)
    assert np.sqrt(np.square(found[800:-800]).mean()) < 0.5 / 1000


@given(
    pair=st.sampled_from(PAIRS), cut=st.integers(1, 49), sound=st.binary(min_size=600, max_size=600)
)
def test_blocks_join_to_the_whole(pair: tuple[int, int], cut: int, sound: bytes) -> None:
    """How sound was cut into seconds would be heard."""
    at = 4 * DOWN * cut
    whole = resample(bytes(HISTORY_BYTES) + sound, *pair)
    first = resample(bytes(HISTORY_BYTES) + sound[:at], *pair)
    before = (bytes(HISTORY_BYTES) + sound[:at])[-HISTORY_BYTES:]
    assert first + resample(before + sound[at:], *pair) == whole


@given(size=st.integers(1, 700), to_hz=st.sampled_from([16_000, 24_000]))
def test_pieces_of_any_size_join_to_the_whole(size: int, to_hz: int) -> None:
    """How a client cut its sound would be heard; an odd piece would lose samples."""
    rate_hz = 40_000 - to_hz
    sound = np.rint(tone(440, rate_hz) * SCALE).astype("<i2").tobytes()
    heard = Resampler(rate_hz, to_hz=to_hz)
    found = b"".join(heard.take(sound[at : at + 2 * size]) for at in range(0, len(sound), 2 * size))
    assert found == resample(bytes(HISTORY_BYTES) + sound, rate_hz, to_hz)
