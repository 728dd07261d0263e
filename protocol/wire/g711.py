"""G.711: 16-bit sound in a byte a sample, by the mu-law or the A-law (ITU-T G.711, 1988).

A byte is a sign, a segment of three bits and four bits within it; A-law bytes have every other bit
inverted, mu-law bytes all. What is written is cut off towards zero, as the standard has it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..values.sound import Coding

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
