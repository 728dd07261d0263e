"""16-bit samples as FLAC files, and back.

Rules: what is decoded may come from anybody's disk. A file that is not FLAC of one channel and 16
bits, or that claims more samples than a record can hold, is refused before it is decoded.

The library is loaded when it is needed, which few logs do: only compacted ones hold FLAC.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

import numpy as np
import numpy.typing as npt

from .format import RECORD_BYTES_MAX

SAMPLES_MAX: Final = RECORD_BYTES_MAX // 4
"""Of float32, as they were before they were packed. A few bytes of FLAC can stand for thousands."""
RATE_HZ: Final = 16_000
"""FLAC must name one. A blob has none, and nobody reads it."""
LEVEL: Final = 1.0
"""The smallest files; a second of speech takes a third of a millisecond."""

Samples = npt.NDArray[np.int16]


def encode_flac(samples: Samples) -> bytes:
    """Encode samples of one channel; shape (samples,), at least one."""
    import soundfile

    file = BytesIO()
    soundfile.write(
        file, samples, RATE_HZ, format="FLAC", subtype="PCM_16", compression_level=LEVEL
    )
    return file.getvalue()


def decode_flac(data: bytes, samples: int) -> Samples | None:
    """Decode a file; None where it is not one of ours.

    Args:
        data: the file.
        samples: how many it must claim, before any is decoded.
    """
    import soundfile

    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            kind = (file.format, file.subtype, file.channels)
            if kind != ("FLAC", "PCM_16", 1) or not file.frames == samples <= SAMPLES_MAX:
                return None
            found: Samples = file.read(samples, dtype="int16")
            return found if len(found) == samples > 0 else None
    except (soundfile.SoundFileError, OSError, ValueError):
        return None
