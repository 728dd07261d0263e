"""Material of scripts: draws by name, and tones, the same on every machine."""

from __future__ import annotations

from typing import Final

import numpy as np

from protocol.values.digest import digest
from protocol.values.model import OUTPUT_RATE_HZ

CODE_SAMPLES: Final = 960
"""Of a speech code, 40 ms (model.md)."""


def tone(index: int, seed: int, *, samples: int) -> bytes:
    """Make a triangle wave (float32 LE, 24 kHz mono, within +-0.25); its pitch identifies the unit.

    Integer arithmetic gives the same bytes on every machine.
    """
    pitch_hz = 110 + int.from_bytes(draw("tone", seed, index)[:2], "little") % 770
    phase = np.arange(samples, dtype=np.int64) * pitch_hz % OUTPUT_RATE_HZ
    triangle = np.abs(2 * phase - OUTPUT_RATE_HZ) - OUTPUT_RATE_HZ // 2
    return (triangle.astype("<f4") / np.float32(2 * OUTPUT_RATE_HZ)).tobytes()


def draw(*parts: str | int) -> bytes:
    """Draw 16 bytes by the draw's name: the same every time."""
    return bytes.fromhex(digest(parts))
