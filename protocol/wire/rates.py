"""Sample rates: signed 16-bit sound from 24 to 16 kHz, the same bits on any machine.

The filter is a polyphase FIR with integer taps. Sums of products of integers are exact in float64,
in any order, so the result depends neither on the machine nor on how the sound was cut: blocks that
are resampled one after the other, each with the samples before it, join to the whole. The output
lags by half the filter, 1.6 ms.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..values.model import SAMPLE16_BYTES

LIVE_RATE_HZ: Final = 24_000
UP: Final = 2
DOWN: Final = 3
"""16 kHz is two thirds of 24 kHz."""
PHASE_TAPS: Final = 77
"""With `_BETA` 80 dB of attenuation, in a transition from 7.2 to 8.8 kHz."""
HISTORY_BYTES: Final = (PHASE_TAPS - 1) * SAMPLE16_BYTES
"""Samples before a block that its first outputs are made of."""
PCM16_SCALE: Final = 32_768
"""From a 16-bit integer to [-1, 1): a power of two, so that every sample is exact."""
_CUTOFF: Final = 8_000 / (LIVE_RATE_HZ * UP)
_BETA: Final = 8.0
_TAP_BITS: Final = 22
"""A sum of 77 products with 15 bits of sound has 44 bits: float64 holds 53."""


def _phases() -> tuple[NDArray[np.float64], ...]:
    """Make the taps of each phase, newest sample last; each sums to a gain of exactly 1."""
    count = PHASE_TAPS * UP
    at = np.arange(count) - (count - 1) / 2
    ideal = 2 * _CUTOFF * np.sinc(2 * _CUTOFF * at) * np.kaiser(count, _BETA)
    found = []
    for phase in range(UP):
        taps = np.rint(ideal[phase::UP] * UP * 2**_TAP_BITS)
        taps[np.argmax(taps)] += 2**_TAP_BITS - taps.sum()
        found.append(taps[::-1].copy())
    return tuple(found)


_PHASES: Final = _phases()


def to_16_khz(pcm16: bytes) -> bytes:
    """Resample a block of sound.

    Args:
        pcm16: signed 16-bit LE, 24 kHz mono: `HISTORY_BYTES` from before (zeros at the beginning of
            the sound), then a multiple of three samples.

    Returns:
        float32 LE, 16 kHz mono, in [-1, 1]: two samples for three.
    """
    samples = np.frombuffer(pcm16, "<i2").astype(np.float64)
    made = np.empty(((len(pcm16) - HISTORY_BYTES) // (DOWN * SAMPLE16_BYTES), UP))
    windows = np.lib.stride_tricks.sliding_window_view(samples, PHASE_TAPS)
    for output in range(UP):
        first, phase = divmod(output * DOWN, UP)
        made[:, output] = windows[first::DOWN][: len(made)] @ _PHASES[phase]
    made /= float(2**_TAP_BITS * PCM16_SCALE)
    return made.ravel().clip(-1, 1).astype("<f4").tobytes()


class Heard:
    """A client's sound at the model's rate, piece by piece; `rate_hz` is 24000 or 16000."""

    def __init__(self, rate_hz: int = LIVE_RATE_HZ) -> None:
        self._is_due = rate_hz == LIVE_RATE_HZ
        self._waiting = bytes(HISTORY_BYTES)

    def take(self, pcm16: bytes) -> bytes:
        """Take a piece of any size; returns float32 LE, 16 kHz mono, as far as it is known."""
        if not self._is_due:
            return to_float32(pcm16)
        self._waiting += pcm16
        block = DOWN * SAMPLE16_BYTES
        whole = HISTORY_BYTES + (len(self._waiting) - HISTORY_BYTES) // block * block
        if whole == HISTORY_BYTES:
            return b""
        made = to_16_khz(self._waiting[:whole])
        self._waiting = self._waiting[whole - HISTORY_BYTES :]
        return made


def to_float32(pcm16: bytes) -> bytes:
    """Convert signed 16-bit LE samples to float32 LE in [-1, 1), exactly."""
    samples = np.frombuffer(pcm16, dtype="<i2").astype("<f4") / np.float32(PCM16_SCALE)
    return samples.tobytes()


def to_pcm16(pcm: bytes) -> bytes:
    """Convert float32 LE samples to signed 16-bit LE, rounded, and cut off at full scale."""
    scaled = np.frombuffer(pcm, "<f4") * np.float32(PCM16_SCALE)
    return np.rint(scaled).clip(-PCM16_SCALE, PCM16_SCALE - 1).astype("<i2").tobytes()
