"""Sound from outside, made safe for the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.model import SAMPLE_BYTES


def read_pcm(data: bytes) -> NDArray[np.float32]:
    """Read float32 LE samples and clip them to [-1, 1].

    Args:
        data: whole samples.

    Returns:
        A copy, shape (samples,).

    Raises:
        ValueError: they are not whole samples, or not all are finite: one such value in a cache
            would spoil the session for good.
    """
    if len(data) % SAMPLE_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole samples")
    samples = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(samples).all():
        raise ValueError("samples are not all finite")
    return samples.clip(-1.0, 1.0).astype(np.float32)
