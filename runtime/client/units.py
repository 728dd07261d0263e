"""Cuts sound of any length into appends that end where the server's units end.

- The server takes 250 ms to 10 s an append and joins them to units of one second. `UnitCutter`
  sends whole seconds and keeps the rest. Joined appends equal the added sound, except for the
  silence of `rest`.
- Frames belong to the unit of their sound's last sample, as on the server; the newest `FRAMES_MAX`
  of a unit are sent.
- After a rest that was sent early, the next append ends that unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.values.limits import APPEND_SAMPLES_MIN, FRAMES_MAX
from protocol.values.model import SAMPLE_BYTES, UNIT_SAMPLES
from protocol.values.requests import Append

from .errors import LocalProtocolError

Samples = bytes | bytearray | memoryview | NDArray[np.floating[Any]]
"""float32 LE as bytes, or an array of shape (samples,); 16 kHz mono, in [-1, 1]."""


class UnitCutter:
    """Cuts one session's sound."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._frames: list[bytes] = []
        self._sent_samples = 0

    @property
    def held_samples(self) -> int:
        """Samples that wait for more."""
        return len(self._rest) // SAMPLE_BYTES

    def add(self, pcm: Samples, frames: tuple[bytes, ...] = ()) -> list[Append]:
        """Add sound and its JPEG frames; return the appends that they complete.

        `LocalProtocolError`: the sound is invalid, and nothing was added.
        """
        self._rest += to_pcm(pcm)
        appends = []
        while len(self._rest) >= (size := self._next_bytes()):
            if len(self._rest) == size:
                self._see(frames)
                frames = ()
            appends.append(self._cut(size))
        self._see(frames)
        return appends

    def rest(self) -> list[Append]:
        """The rest, with silence up to the end of its unit; empty for no rest."""
        if not self._rest and not self._frames:
            return []
        self._rest += bytes(self._next_bytes() - len(self._rest))
        return [self._cut(len(self._rest))]

    def at_once(self) -> Append:
        """The rest, with silence up to 250 ms, to make the model listen."""
        short = APPEND_SAMPLES_MIN * SAMPLE_BYTES - len(self._rest)
        self._rest += bytes(max(short, 0))
        return self._cut(len(self._rest), force_listen=True)

    def _see(self, frames: tuple[bytes, ...]) -> None:
        self._frames = [*self._frames, *frames][-FRAMES_MAX:]

    def _next_bytes(self) -> int:
        """Bytes to the end of a unit, and no fewer than an append may have."""
        samples = UNIT_SAMPLES - self._sent_samples % UNIT_SAMPLES
        return SAMPLE_BYTES * (samples + (UNIT_SAMPLES if samples < APPEND_SAMPLES_MIN else 0))

    def _cut(self, size: int, *, force_listen: bool = False) -> Append:
        pcm = bytes(self._rest[:size])
        del self._rest[:size]
        frames, self._frames = tuple(self._frames), []
        self._sent_samples += size // SAMPLE_BYTES
        return Append(pcm=pcm, frames=frames, force_listen=force_listen)


def to_pcm(samples: Samples) -> bytes:
    """Sound as a message carries it, float32 LE; `LocalProtocolError` if invalid or not finite."""
    if isinstance(samples, np.ndarray):
        if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
            kind = f"{samples.dtype} of shape {samples.shape}"
            raise LocalProtocolError(f"samples are {kind}, wanted is float32, shape (samples,)")
        array = samples.astype("<f4", copy=False)
    elif len(data := _bytes_of(samples)) % SAMPLE_BYTES:
        raise LocalProtocolError(f"{len(data)} bytes of audio, wanted are whole float32 samples")
    else:
        array = np.frombuffer(data, "<f4")
    if not np.isfinite(array).all():
        raise LocalProtocolError("samples hold NaN or infinity")
    return array.tobytes()


def _bytes_of(samples: bytes | bytearray | memoryview) -> bytes:
    """The bytes of a buffer; a number is refused, though `bytes` accepts one."""
    try:
        return memoryview(samples).tobytes()
    except TypeError:
        kind = type(samples).__name__
        raise LocalProtocolError(f"samples are a {kind}, wanted is an array, or bytes") from None
