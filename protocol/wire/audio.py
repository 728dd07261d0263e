"""Sound between the wire and the model: G.711, 16-bit and float32 samples, and other sample rates.

Samples are checked first, and what looks like another format is named. All conversions give the
same bits on any machine.

The filter is a polyphase FIR with integer taps. Sums of products of integers are exact in float64,
in any order, so the result depends neither on the machine nor on how the sound was cut: blocks that
are resampled one after the other, each with the samples before it, join to the whole. The output
lags by half the filter: 1.6 ms from and to 24 kHz, 4.8 ms from 8 kHz.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ..values.errors import invalid
from ..values.limits import NS_PER_S
from ..values.model import G711_RATE_HZ, INPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES, Coding

LIVE_RATE_HZ: Final = 24_000
DOWN: Final = 3
"""From 24 kHz so many samples are resampled at once."""
PHASE_TAPS: Final = 77
"""With `_BETA` 80 dB of attenuation, in a transition of a tenth around half the lower rate, from 24
to 8 kHz of a fifth."""
HISTORY_BYTES: Final = (PHASE_TAPS - 1) * SAMPLE16_BYTES
"""Samples before a block that its first outputs are made of."""
PCM16_SCALE: Final = 32_768
"""From a 16-bit integer to [-1, 1): a power of two, so that every sample is exact."""
_BETA: Final = 8.0
_TAP_BITS: Final = 22
"""A sum of 77 products with 15 bits of sound has 44 bits: float64 holds 53."""


@attrs.frozen(eq=False)
class _Filter:
    """`up` samples for `down`; the taps of each phase, newest sample last, sum to exactly 1."""

    up: int
    down: int
    phases: tuple[NDArray[np.float64], ...]

    @classmethod
    def of(cls, up: int, down: int) -> _Filter:
        count, cutoff = PHASE_TAPS * up, 0.5 / max(up, down)
        at = np.arange(count) - (count - 1) / 2
        ideal = 2 * cutoff * np.sinc(2 * cutoff * at) * np.kaiser(count, _BETA)
        found = []
        for phase in range(up):
            taps = np.rint(ideal[phase::up] * up * 2**_TAP_BITS)
            taps[np.argmax(taps)] += 2**_TAP_BITS - taps.sum()
            found.append(taps[::-1].copy())
        return cls(up, down, tuple(found))


_FILTERS: Final = {
    (LIVE_RATE_HZ, INPUT_RATE_HZ): _Filter.of(2, 3),
    (LIVE_RATE_HZ, G711_RATE_HZ): _Filter.of(1, 3),
    (G711_RATE_HZ, INPUT_RATE_HZ): _Filter.of(2, 1),
    (INPUT_RATE_HZ, LIVE_RATE_HZ): _Filter.of(3, 2),
    (G711_RATE_HZ, LIVE_RATE_HZ): _Filter.of(3, 1),
}


def resample(pcm16: bytes, from_hz: int, to_hz: int) -> bytes:
    """Resample a block of sound from one of 24, 16 and 8 kHz to another, but not from 16 to 8.

    Args:
        pcm16: signed 16-bit LE mono: `HISTORY_BYTES` from before (zeros at the beginning of the
            sound), then samples: from 24 kHz a multiple of three, from 16 of two.

    Returns:
        float32 LE mono, in [-1, 1].
    """
    how = _FILTERS[from_hz, to_hz]
    samples = np.frombuffer(pcm16, "<i2").astype(np.float64)
    made = np.empty(((len(pcm16) - HISTORY_BYTES) // (how.down * SAMPLE16_BYTES), how.up))
    windows = np.lib.stride_tricks.sliding_window_view(samples, PHASE_TAPS)
    for output in range(how.up):
        first, phase = divmod(output * how.down, how.up)
        made[:, output] = windows[first :: how.down][: len(made)] @ how.phases[phase]
    made /= float(2**_TAP_BITS * PCM16_SCALE)
    return made.ravel().clip(-1, 1).astype("<f4").tobytes()


def ratio_of(from_hz: int, to_hz: int) -> tuple[int, int]:
    """Return how many samples `resample` makes of how many."""
    if from_hz == to_hz:
        return 1, 1
    how = _FILTERS[from_hz, to_hz]
    return how.up, how.down


def lag_of(from_hz: int, to_hz: int) -> int:
    """Return by how many nanoseconds the sound lies later in the output of `resample`."""
    if from_hz == to_hz:
        return 0
    up = _FILTERS[from_hz, to_hz].up
    return (PHASE_TAPS * up - 1) * NS_PER_S // (2 * up * from_hz)


class Resampler:
    """Sound of a session at another rate, by default a client's at the model's, piece by piece."""

    def __init__(
        self, rate_hz: int = LIVE_RATE_HZ, coding: Coding = "audio/pcm", to_hz: int = INPUT_RATE_HZ
    ) -> None:
        self.rate_hz, self._coding, self._to_hz = rate_hz, coding, to_hz
        self._waiting = bytes(HISTORY_BYTES)

    def take(self, data: bytes) -> bytes:
        """Take a piece of any size; returns float32 LE, mono, as far as it is known."""
        if self.rate_hz == self._to_hz:
            return to_float32(expand(data, self._coding))
        block = self._next(data)
        if len(block) == HISTORY_BYTES:
            return b""
        return resample(block, self.rate_hz, self._to_hz)

    def _next(self, data: bytes) -> bytes:
        """Return the samples that can be resampled now, after those before them."""
        self._waiting += expand(data, self._coding)
        block = _FILTERS[self.rate_hz, self._to_hz].down * SAMPLE16_BYTES
        whole = HISTORY_BYTES + (len(self._waiting) - HISTORY_BYTES) // block * block
        ready, self._waiting = self._waiting[:whole], self._waiting[whole - HISTORY_BYTES :]
        return ready


def to_float32(pcm16: bytes) -> bytes:
    """Convert signed 16-bit LE samples to float32 LE in [-1, 1), exactly."""
    samples = np.frombuffer(pcm16, dtype="<i2").astype("<f4") / np.float32(PCM16_SCALE)
    return samples.tobytes()


def to_pcm16(pcm: bytes) -> bytes:
    """Convert float32 LE samples to signed 16-bit LE, rounded, and cut off at full scale."""
    scaled = np.frombuffer(pcm, "<f4").clip(-1, 1) * np.float32(PCM16_SCALE)
    return np.rint(scaled).clip(-PCM16_SCALE, PCM16_SCALE - 1).astype("<i2").tobytes()


# -- G.711 ----------------------------------------------------------------------------------------

_BIAS: Final = 132
"""Of the mu-law: it makes the segments powers of two."""
_CLIP: Final = 8_158
"""The mu-law has 14 bits."""
_EVERY_OTHER: Final = 0x55
_SIGN: Final = 0x80


def _from_mu() -> NDArray[np.int16]:
    code = ~np.arange(256) & 0xFF
    value = (((code & 0x0F) << 3) + _BIAS << (code >> 4 & 7)) - _BIAS
    return np.where(code & _SIGN, -value, value).astype("<i2")


def _to_mu() -> NDArray[np.uint8]:
    sample = np.arange(-32_768, 32_768)
    value = np.minimum(np.abs(sample >> 2), _CLIP) + (_BIAS >> 2)
    segment = np.log2(value).astype(np.int64) - 5
    code = segment << 4 | (value >> segment + 1) & 0x0F
    found: NDArray[np.uint8] = (~np.where(sample < 0, code | _SIGN, code) & 0xFF).astype(np.uint8)
    return found


def _from_a() -> NDArray[np.int16]:
    code = np.arange(256) ^ _EVERY_OTHER
    segment, value = code >> 4 & 7, ((code & 0x0F) << 4) + 8
    value = np.where(segment > 0, value + 256 << np.maximum(segment - 1, 0), value)
    return np.where(code & _SIGN, value, -value).astype("<i2")


def _to_a() -> NDArray[np.uint8]:
    sample = np.arange(-32_768, 32_768)
    value = np.where(sample < 0, -sample - 1, sample) >> 3
    segment = np.maximum(np.log2(np.maximum(value, 1)).astype(np.int64) - 4, 0)
    code = segment << 4 | (value >> np.maximum(segment, 1)) & 0x0F
    code = np.where(sample < 0, code, code | _SIGN) ^ _EVERY_OTHER
    found: NDArray[np.uint8] = code.astype(np.uint8)
    return found


_EXPANDED: Final = {"audio/pcmu": _from_mu(), "audio/pcma": _from_a()}
_COMPRESSED: Final = {"audio/pcmu": _to_mu(), "audio/pcma": _to_a()}


def expand(data: bytes, coding: Coding) -> bytes:
    """Read a client's sound as signed 16-bit LE; PCM is that."""
    if coding == "audio/pcm":
        return data
    return _EXPANDED[coding][np.frombuffer(data, np.uint8)].tobytes()


def compress(pcm16: bytes, coding: Coding) -> bytes:
    """Write signed 16-bit LE samples; PCM stays as it is."""
    if coding == "audio/pcm":
        return pcm16
    return _COMPRESSED[coding][np.frombuffer(pcm16, "<i2").astype(np.int64) + 32_768].tobytes()


# -- samples of the right format ------------------------------------------------------------------


def check_pcm(
    path: str, pcm: bytes, samples_min: int, samples_max: int, *, compares: bool = False
) -> bytes:
    """Check float32 LE samples for number and finiteness, and return them.

    `FieldError` names the count, or the index of the first sample that is not finite. `compares`:
    samples that look like int16 are refused by that name.
    """
    if len(pcm) % SAMPLE_BYTES:
        raise invalid(path, f"{len(pcm)} bytes, a multiple of {SAMPLE_BYTES} is needed (float32)")
    samples = len(pcm) // SAMPLE_BYTES
    if samples < samples_min:
        are = "is" if samples_min == 1 else "are"
        raise invalid(path, f"{samples} samples, at least {samples_min} {are} needed")
    if samples > samples_max:
        raise invalid(path, f"{samples} samples, at most {samples_max} are allowed")
    values = np.frombuffer(pcm, dtype="<f4")
    if compares and values.min() >= -LOUDEST and values.max() <= LOUDEST:  # so it is finite
        return pcm
    if compares and looks_int16(values):
        raise invalid(path, "samples that look like int16, float32 are needed")
    finite = np.isfinite(values)
    if not finite.all():
        raise invalid(path, f"sample {int(finite.argmin())} is not finite")
    return pcm


LOUDEST: Final = 1e5
"""Float samples in the scale of int16 stay below; 1 is full scale."""
_QUIETEST: Final = 1e-12
"""Quieter float samples occur only at the end of a fade."""
_COMPARED_MIN: Final = 64
"""Samples that are not zero: fewer show nothing."""
_COMPARED_BYTES: Final = 2048
"""Of a piece of int16 samples: its beginning shows what they are."""
_TOPS: Final = bytes([*range(0x33, 0x40), *range(0xB3, 0xC0)])
"""The highest byte of float32 samples from 4e-8 to 2, of both signs."""


def looks_int16(values: NDArray[np.float32]) -> bool:
    """Whether most samples are far too loud or too quiet, as pairs of int16 samples would be."""
    loud = np.abs(values[values != 0])
    is_sound = (loud >= _QUIETEST) & (loud <= LOUDEST)
    return len(loud) >= _COMPARED_MIN and int(is_sound.sum()) * 2 < len(loud)


def looks_float32(pcm16: bytes) -> bool:
    """Whether int16 samples are float32: every second one small, the others not like it."""
    tops = pcm16[3:_COMPARED_BYTES:4]
    if len(tops) < _COMPARED_MIN or len(tops.translate(None, _TOPS)) * 20 > len(tops):
        return False
    pairs = np.frombuffer(pcm16[: len(tops) * 4], "<i2").reshape(-1, 2).astype(np.int32)
    return float(np.abs(pairs[:, 0] - pairs[:, 1]).mean()) > _FAR_APART


_FAR_APART: Final = 4096
"""Neighbours of int16 samples are nearer, in the mean; halves of float32 samples are not."""
