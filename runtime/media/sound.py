"""Decoding of sound: WAV files and raw samples in the model's input format.

A conversation's sound may last minutes, at any rate and with eight channels: it is decoded in
blocks, and memory holds the file and the result. The same bytes give the same samples. Compressed
files are refused: their size would be unbounded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from protocol.values.limits import AUDIO_S_MAX, REFERENCE_S_MAX, REFERENCE_S_MIN, WAV_BYTES_MAX
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire.media import AUDIO_BYTES_MAX, AUDIO_S_MIN
from protocol.wire.wav import WAV_CHANNELS_MAX, WAV_RATE_HZ_MAX, WAV_RATE_HZ_MIN

from .audio import to_model_rate
from .values import MediaError

WAV_SUBTYPES: Final = frozenset(
    {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}
)
"""At least a byte a sample: the file's size bounds the memory."""
BLOCK_SAMPLES: Final = 65_536
"""2 MiB of eight channels: a pass costs far more than its call, and ends soon."""


def decode_wav(data: bytes) -> bytes:
    """Decode reference audio to float32 LE, 16 kHz mono, finite.

    A WAV file, 0.5 to 30 s, of a common rate, 8 channels at most, uncompressed; else `MediaError`.
    """
    if len(data) > WAV_BYTES_MAX:
        raise MediaError(f"the audio has more than {WAV_BYTES_MAX} bytes")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_wav(file, REFERENCE_S_MIN, REFERENCE_S_MAX)
            samples = file.read(dtype="float32", always_2d=True)
            rate_hz = file.samplerate
    except soundfile.SoundFileError:
        raise _not_wav() from None
    _check_duration(len(samples), rate_hz, REFERENCE_S_MIN, REFERENCE_S_MAX)
    with np.errstate(all="ignore"):  # An overflow shows as a value that is not finite.
        return _finite(to_model_rate(samples, rate_hz))


def decode_audio(data: bytes, rate_hz: int) -> bytes:
    """Decode a conversation's sound to float32 LE, 16 kHz mono, finite.

    A WAV file as above, or float32 LE mono at `rate_hz`, 8-192 kHz; 0.1 to 300 s; else
    `MediaError`.
    """
    if len(data) > AUDIO_BYTES_MAX:
        raise MediaError(f"the audio has more than {AUDIO_BYTES_MAX} bytes")
    if not data.startswith(b"RIFF"):
        return _decode_raw(data, rate_hz)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_wav(file, AUDIO_S_MIN, AUDIO_S_MAX)
            return _resample(_read_blocks(file), file.samplerate)
    except soundfile.SoundFileError:
        raise _not_wav() from None


def _decode_raw(data: bytes, rate_hz: int) -> bytes:
    if len(data) % SAMPLE_BYTES:
        raise MediaError(f"the audio is not whole samples of {SAMPLE_BYTES} bytes")
    _check_rate(rate_hz)
    samples = np.frombuffer(data, "<f4")
    _check_duration(len(samples), rate_hz, AUDIO_S_MIN, AUDIO_S_MAX)
    starts = range(0, len(samples), BLOCK_SAMPLES)
    return _resample((samples[at : at + BLOCK_SAMPLES] for at in starts), rate_hz)


def _read_blocks(file: soundfile.SoundFile) -> Iterator[NDArray[np.float32]]:
    """The file in mono blocks; as many samples as its header says."""
    left = file.frames
    while left:
        block = file.read(min(left, BLOCK_SAMPLES), dtype="float32", always_2d=True)
        if not len(block):
            raise _not_wav()
        left -= len(block)
        with np.errstate(all="ignore"):
            yield block.mean(axis=1, dtype=np.float32)


def _resample(blocks: Iterator[NDArray[np.float32]], rate_hz: int) -> bytes:
    """Resample mono blocks to the model's rate, and join them."""
    if rate_hz == INPUT_RATE_HZ:
        return _finite(np.concatenate(list(blocks)))
    stream = soxr.ResampleStream(rate_hz, INPUT_RATE_HZ, 1, dtype="float32")
    pieces = [stream.resample_chunk(np.ascontiguousarray(block)) for block in blocks]
    pieces.append(stream.resample_chunk(np.empty(0, np.float32), last=True))
    return _finite(np.concatenate(pieces))


def _finite(pcm: NDArray[np.float32]) -> bytes:
    if not np.isfinite(pcm).all():
        raise MediaError("the audio holds values that are not finite")
    return pcm.astype("<f4", copy=False).tobytes()


def _check_wav(file: soundfile.SoundFile, s_min: float, s_max: float) -> None:
    """Check the header's limits, before samples are read."""
    if file.format not in {"WAV", "WAVEX"} or file.subtype not in WAV_SUBTYPES:
        raise MediaError("the audio is not an uncompressed WAV file")
    _check_rate(file.samplerate)
    if file.channels > WAV_CHANNELS_MAX:
        raise MediaError(f"the audio has more than {WAV_CHANNELS_MAX} channels")
    _check_duration(file.frames, file.samplerate, s_min, s_max)


def _check_rate(rate_hz: int) -> None:
    if not WAV_RATE_HZ_MIN <= rate_hz <= WAV_RATE_HZ_MAX:
        raise MediaError(f"the audio's rate is not {WAV_RATE_HZ_MIN} to {WAV_RATE_HZ_MAX} Hz")


def _check_duration(samples: int, rate_hz: int, s_min: float, s_max: float) -> None:
    if not s_min * rate_hz <= samples <= s_max * rate_hz:
        raise MediaError(f"the audio does not last {s_min} to {s_max} s")


def _not_wav() -> MediaError:
    return MediaError("the audio is not a WAV file, or is damaged")
