"""Sound from outside, made safe for the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.values.model import SAMPLE_BYTES


def read_pcm(data: bytes) -> NDArray[np.float32]:
    """Copy float32 LE samples, shape (samples,), clipped to [-1, 1].

    `ValueError` unless all are whole and finite: one such value would spoil a session's caches.
    """
    if len(data) % SAMPLE_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole samples")
    samples = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(samples).all():
        raise ValueError("samples are not all finite")
    return samples.clip(-1.0, 1.0).astype(np.float32)
