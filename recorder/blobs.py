"""Blob codecs: reversible rearrangements of bytes that zstd then compresses better.

    0 raw          as it is
    1 shuffle-4    float32 samples, first all lowest bytes, then the next, ...
    2 exact-16-bit float32 samples that are exactly s/32768 or s/32767 for 16-bit s:
                   a divisor byte, then the differences of s, low bytes before high bytes

Rules: the codec is chosen by looking at the bytes alone; every packing is unpacked again and
compared as BYTES before it is used (-0.0 and NaN payloads therefore fall back).

It does not compress and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from .errors import FormatError

RAW: Final = 0
SHUFFLE_4: Final = 1
EXACT_16: Final = 2

PCM_BYTES_MIN: Final = 256
"""Below 64 samples there is nothing to win, and too little to look at."""
_PROBE_SAMPLES: Final = 256
"""Enough to tell PCM from a JPEG: of random bytes, one sample in six looks like PCM."""
_PROBE_SHARE_MIN: Final = 0.9
_EXPONENT_MIN: Final = 90
"""2**-37: dither and fades stay above it."""
_EXPONENT_MAX: Final = 130
"""2**3: clipping PCM overshoots 1.0, but not by 18 dB."""
_DIVISORS: Final = (32768.0, 32767.0)
"""The two conventions by which 16-bit samples become floats; the divisor byte is the index."""

_Bytes = npt.NDArray[np.uint8]
_Stored = bytes | memoryview


@attrs.frozen
class Packed:
    """A blob as it is stored."""

    codec: int
    stored: bytes


def pack(data: bytes) -> Packed:
    """Choose a codec and apply it; `unpack` gives exactly `data` again."""
    if len(data) >= PCM_BYTES_MIN and len(data) % 4 == 0:
        samples = np.frombuffer(data, "<u4")
        if _looks_like_pcm(samples):
            packed = _pack_exact(data) or Packed(SHUFFLE_4, _shuffle(data, 4))
            if unpack(packed.codec, packed.stored, len(data)) == data:
                return packed
    return Packed(RAW, data)


def unpack(codec: int, stored: _Stored, length: int) -> bytes:
    """Undo `pack`.

    Args:
        codec: as stored.
        stored: the stored bytes.
        length: bytes of the blob itself.

    Raises:
        FormatError: the codec is unknown or the lengths do not fit it.
    """
    unpacker = _UNPACKERS.get(codec)
    data = unpacker(stored) if unpacker is not None else None
    if data is None or len(data) != length:
        raise FormatError(f"a blob of {length} bytes is not what codec {codec} stored")
    return data


def _looks_like_pcm(samples: npt.NDArray[np.uint32]) -> bool:
    probe = samples[:: max(1, len(samples) // _PROBE_SAMPLES)] << 1  # without the sign
    audible = (probe >= _EXPONENT_MIN << 24) & (probe < (_EXPONENT_MAX + 1) << 24)
    return int(np.count_nonzero(audible | (probe == 0))) >= _PROBE_SHARE_MIN * len(probe)


def _pack_exact(data: bytes) -> Packed | None:
    samples = np.frombuffer(data, "<f4")
    probe = samples[:: max(1, len(samples) // _PROBE_SAMPLES)]
    for index, divisor in enumerate(_DIVISORS):
        if _as_sixteen_bit(probe, divisor) is None:
            continue
        values = _as_sixteen_bit(samples, divisor)
        if values is not None:
            deltas = values.copy()
            deltas[1:] -= values[:-1]
            return Packed(EXACT_16, bytes([index]) + _shuffle(deltas.tobytes(), 2))
    return None


def _as_sixteen_bit(
    samples: npt.NDArray[np.float32], divisor: float
) -> npt.NDArray[np.int16] | None:
    with np.errstate(all="ignore"):  # NaN and huge values cast to anything; the comparison judges
        values: npt.NDArray[np.int16] = np.rint(samples * np.float32(divisor)).astype("<i2")
    if _as_float(values, divisor) != samples.tobytes():
        return None
    return values


def _as_float(values: npt.NDArray[np.int16], divisor: float) -> bytes:
    return (values.astype("<f4") / np.float32(divisor)).tobytes()


def _shuffle(data: bytes, width: int) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()


def _unshuffle(stored: _Stored, width: int) -> _Bytes:
    """Undo `_shuffle`; plane by plane, as that is three times as fast as a transpose."""
    planes = np.frombuffer(stored, np.uint8).reshape(width, -1)
    data = np.empty(len(stored), np.uint8)
    for index, plane in enumerate(planes):
        data[index::width] = plane
    return data


def _unpack_shuffled(stored: _Stored) -> bytes | None:
    if not len(stored) or len(stored) % 4:
        return None
    return _unshuffle(stored, 4).tobytes()


def _unpack_exact(stored: _Stored) -> bytes | None:
    if len(stored) < 3 or not len(stored) % 2 or stored[0] >= len(_DIVISORS):
        return None
    deltas = _unshuffle(stored[1:], 2).view("<i2")
    return _as_float(np.cumsum(deltas, dtype="<i2"), _DIVISORS[stored[0]])


_UNPACKERS: Final[dict[int, Callable[[_Stored], bytes | None]]] = {
    RAW: bytes,
    SHUFFLE_4: _unpack_shuffled,
    EXACT_16: _unpack_exact,
}
