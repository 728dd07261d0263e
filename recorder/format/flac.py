"""16-bit samples as FLAC files, and back.

Rules: input is untrusted. A file that is not FLAC with one channel and 16 bits, or claims too many
samples, is refused before decoding. Only compacted logs need the library, so it loads on demand.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

import numpy as np
import numpy.typing as npt

from .format import RECORD_BYTES_MAX

SAMPLES_MAX: Final = RECORD_BYTES_MAX // 4
"""Samples of float32 before packing. A few bytes of FLAC can expand to thousands."""
RATE_HZ: Final = 16_000
"""FLAC requires a rate. Blobs have none, and no reader uses it."""
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
    """Decode a file; None unless it claims exactly `samples` (checked first) and is valid."""
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
