"""Sound from outside, made safe for the model."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.values.model import SAMPLE_BYTES

from ..base import BackendError, BackendRefused


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


def samples_of(data: bytes, what: str, refusal: type[BackendError] = BackendRefused) -> Tensor:
    """As `read_pcm`; an error is a `refusal` that begins with `what`."""
    try:
        return torch.from_numpy(read_pcm(data))
    except ValueError as error:
        raise refusal(f"{what}: {error}") from error
