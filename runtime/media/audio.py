"""Sound files for the command line, and conversion to the model's input format.

The files are the user's own; hostile ones are for `runtime.media`. Files are read and written
whole, blocking; an existing file is replaced only by a complete one.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from protocol.values.errors import LocalProtocolError
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES
from recorder.write.files import new_file

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
            path.write_bytes(whole.getbuffer())
            return
        real = path.resolve()  # a link stays one
        with new_file(real, like=real if real.exists() else None, replaces=True) as part:
            part.write_bytes(whole.getbuffer())
    except OSError as error:
        raise AudioFileError(f"{path}: {error.strerror or 'cannot be written'}") from error
