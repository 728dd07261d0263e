"""Full decoding of what clients send, off the event loop and within bounds.

`protocol/` has checked headers and sizes; this finds out whether the rest is what they promise.
A JPEG is decoded only to prove it; a WAV becomes the sound that the model hears.

Rules:

- Whatever is wrong with media is a `MediaError` whose reason can be shown to the client: what is
  wrong and the limit, never a library's text or the client's bytes.
- Sizes are checked before anything is allocated by them.
- The same bytes give the same answer.

It does not cut frames into slices nor make spectrograms: that is the model's.
"""

from __future__ import annotations

import io
from typing import Final

import anyio
import numpy as np
import simplejpeg
import soundfile
from anyio import to_thread
from anyio.lowlevel import RunVar

from protocol.effects import MediaKind
from protocol.limits import (
    FRAME_JPEG_BYTES_MAX,
    FRAME_PIXELS_MAX,
    REFERENCE_S_MAX,
    REFERENCE_S_MIN,
    WAV_BYTES_MAX,
)
from protocol.media import WAV_CHANNELS_MAX, WAV_RATE_HZ_MAX, WAV_RATE_HZ_MIN

from .audio import to_model_rate

WORKERS_MAX: Final = 2
"""Decoding takes a thread for 0.5 to 200 ms; more threads would take the cores from the model."""
JPEG_SCANS_MAX: Final = 64
"""A progressive file has about 10; each of thousands would cost a pass over the whole image."""
WAV_SUBTYPES: Final = frozenset(
    {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}
)
"""A byte a sample at least, so that the file's size bounds the memory."""

_START_OF_SCAN: Final = b"\xff\xda"
_workers: Final = RunVar[anyio.CapacityLimiter]("media_workers")
"""A limiter lives in one event loop; a test has another each time."""


class MediaError(Exception):
    """Media is damaged, or not what it said.

    Args:
        reason: short, for the client.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def decode(kind: MediaKind, data: bytes) -> bytes:
    """Decode in one of `WORKERS_MAX` threads; where all are busy it waits its turn.

    One that has begun is not abandoned when it is cancelled: it is waited for.

    Args:
        kind: what it is said to be.
        data: the file.

    Returns:
        A WAV's sound, float32 LE, 16 kHz mono; nothing for a JPEG.

    Raises:
        MediaError: it is not what it is said to be, damaged, or outside the limits.
    """
    function = decode_wav if kind == "wav" else decode_jpeg
    return await to_thread.run_sync(function, data, limiter=_limiter())


def _limiter() -> anyio.CapacityLimiter:
    """Give this event loop's limiter, made when it is first needed."""
    limiter = _workers.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(WORKERS_MAX)
        _workers.set(limiter)
    return limiter


def decode_jpeg(data: bytes) -> bytes:
    """Prove that a JPEG decodes without a fault.

    Args:
        data: the file, 4 MiB and 20 megapixels at most.

    Returns:
        Nothing: the model decodes it again, in its own way.

    Raises:
        MediaError: it does not.
    """
    if len(data) > FRAME_JPEG_BYTES_MAX:
        raise MediaError(f"the image has more than {FRAME_JPEG_BYTES_MAX} bytes")
    if data.count(_START_OF_SCAN) > JPEG_SCANS_MAX:
        raise MediaError(f"the image has more than {JPEG_SCANS_MAX} scans")
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if height * width > FRAME_PIXELS_MAX:
            raise MediaError(f"the image has more than {FRAME_PIXELS_MAX} pixels")
        simplejpeg.decode_jpeg(data)
    except ValueError:
        raise MediaError("the image is not a JPEG, or is damaged") from None
    return b""


def decode_wav(data: bytes) -> bytes:
    """Decode reference audio.

    Args:
        data: a WAV file, 0.5 to 30 s, of a common rate, 8 channels at most, uncompressed.

    Returns:
        float32 LE, 16 kHz mono, finite.

    Raises:
        MediaError: it is not that.
    """
    if len(data) > WAV_BYTES_MAX:
        raise MediaError(f"the audio has more than {WAV_BYTES_MAX} bytes")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_wav(file)
            samples = file.read(dtype="float32", always_2d=True)
            rate_hz = file.samplerate
    except soundfile.SoundFileError:
        raise MediaError("the audio is not a WAV file, or is damaged") from None
    _check_duration(len(samples), rate_hz)
    with np.errstate(all="ignore"):  # Overflow shows as a value that is not finite.
        pcm = to_model_rate(samples, rate_hz)
    if not np.isfinite(pcm).all():
        raise MediaError("the audio holds values that are not finite")
    return pcm.astype("<f4").tobytes()


def _check_wav(file: soundfile.SoundFile) -> None:
    """Hold what the header says to the limits, before anything is read by it."""
    if file.format not in {"WAV", "WAVEX"} or file.subtype not in WAV_SUBTYPES:
        raise MediaError("the audio is not an uncompressed WAV file")
    if not WAV_RATE_HZ_MIN <= file.samplerate <= WAV_RATE_HZ_MAX:
        raise MediaError(f"the audio's rate is not {WAV_RATE_HZ_MIN} to {WAV_RATE_HZ_MAX} Hz")
    if file.channels > WAV_CHANNELS_MAX:
        raise MediaError(f"the audio has more than {WAV_CHANNELS_MAX} channels")
    _check_duration(file.frames, file.samplerate)


def _check_duration(frames: int, rate_hz: int) -> None:
    if not REFERENCE_S_MIN * rate_hz <= frames <= REFERENCE_S_MAX * rate_hz:
        raise MediaError(f"the audio does not last {REFERENCE_S_MIN} to {REFERENCE_S_MAX} s")
