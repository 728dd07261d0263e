"""Sound: decoding of clients' WAV files and samples, and files for the command line.

- A conversation's sound may last minutes, at any rate and with eight channels: it is decoded in
  blocks, and memory holds the file and the result. The same bytes give the same samples. Compressed
  files are refused: their size would be unbounded.
- Files of the command line are the user's own. They are read and written whole, blocking; an
  existing file is replaced only by a complete one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from protocol.values.errors import LocalProtocolError
from protocol.values.limits import AUDIO_S_MAX, REFERENCE_S_MAX, REFERENCE_S_MIN, WAV_BYTES_MAX
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire.media import (
    AUDIO_BYTES_MAX,
    AUDIO_S_MIN,
    WAV_CHANNELS_MAX,
    WAV_RATE_HZ_MAX,
    WAV_RATE_HZ_MIN,
)
from recorder.write.files import new_file

from .values import MediaError

# -- files of the command line ---------------------------------------------------------------------


FILE_S_MAX: Final = 3_600
"""Seconds: the longest session. A longer file is a mistake and would fill the memory."""
PCM16_MAX: Final = 32_767


class AudioFileError(Exception):
    """A sound file cannot be read or written; the message is for the user."""


def to_model_rate(samples: NDArray[np.float32], rate_hz: int) -> NDArray[np.float32]:
    """Mix float32 samples, shape (frames, channels), to mono float32, shape (samples,), 16 kHz.

    The same input gives the same bytes.
    """
    mono: NDArray[np.float32] = samples.mean(axis=1, dtype=np.float32)
    if rate_hz == INPUT_RATE_HZ:
        return mono
    resampled: NDArray[np.float32] = soxr.resample(mono, rate_hz, INPUT_RATE_HZ)
    return resampled


def read_wav(path: Path) -> bytes:
    """Read a sound file of any rate and channels, an hour at most, as float32 LE, 16 kHz mono.

    `AudioFileError`: the file is missing, a pipe, unreadable, empty, too long, or not finite.
    """
    try:
        with path.open("rb") as raw:
            if not raw.seekable():
                raise AudioFileError(f"{path}: a pipe cannot be read, a file can")
            with soundfile.SoundFile(raw) as file:
                if file.frames > FILE_S_MAX * file.samplerate:
                    raise AudioFileError(f"{path}: longer than {FILE_S_MAX} s")
                # Some codecs cannot seek, and need the number of frames.
                samples = file.read(file.frames, dtype="float32", always_2d=True)
                rate_hz = file.samplerate
    except OSError as error:
        raise AudioFileError(f"{path}: {error.strerror or 'cannot be read'}") from error
    except soundfile.LibsndfileError as error:
        raise AudioFileError(f"{path}: not a sound file that can be read") from error
    if len(samples) == 0:
        raise AudioFileError(f"{path}: holds no sound")
    if not np.isfinite(samples).all():
        raise AudioFileError(f"{path}: holds samples that are no finite numbers")
    return to_model_rate(samples, rate_hz).astype("<f4").tobytes()


def write_wav(path: Path, pcm: bytes) -> None:
    """Write float32 LE PCM, 24 kHz mono, maybe empty, as a 16-bit WAV, clipped at full scale.

    An existing file is replaced; a pipe or device is written to. `AudioFileError`: the file cannot
    be written; `LocalProtocolError`: the PCM is not whole samples, or not finite.
    """
    if len(pcm) % SAMPLE_BYTES:
        raise LocalProtocolError(f"{len(pcm)} bytes of PCM are not whole samples")
    samples = np.frombuffer(pcm, "<f4")
    if not np.isfinite(samples).all():
        raise LocalProtocolError("the PCM holds values that are not finite")
    pcm16 = np.rint(samples.clip(-1, 1) * PCM16_MAX).astype(np.int16)
    whole = io.BytesIO()  # on a full disk libsndfile reports only a short write
    soundfile.write(whole, pcm16, OUTPUT_RATE_HZ, subtype="PCM_16", format="WAV")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(whole.getvalue())
            return
        real = path.resolve()  # a link stays one
        with new_file(real, like=real if real.exists() else None, replaces=True) as part:
            part.write_bytes(whole.getvalue())
    except OSError as error:
        raise AudioFileError(f"{path}: {error.strerror or 'cannot be written'}") from error


# -- sound of clients ------------------------------------------------------------------------------


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
