"""Sound: decoding of clients' sound files and samples, and files for the command line.

- A conversation's sound may last minutes, at any rate and with eight channels: it is decoded in
  blocks, and memory holds the file and the result. The same bytes give the same samples. A
  compressed file (FLAC, Ogg, MP3) is read up to the limit, whatever its header says; `decoder` has
  it read in a process.
- Files of the command line are the user's own. They are read and written whole, blocking; an
  existing file is replaced only by a complete one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from protocol.values.errors import FieldError, LocalProtocolError
from protocol.values.limits import AUDIO_S_MAX, REFERENCE_S_MAX, REFERENCE_S_MIN, WAV_BYTES_MAX
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire import media
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
        raise AudioFileError(f"{path}: holds samples that are not finite numbers")
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


PLAIN: Final = frozenset(
    {"PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}
)
"""At least a byte a sample: the file's size bounds the memory."""
SUBTYPES: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("WAV", "WAVEX", "RF64", "AIFF", "FLAC"), PLAIN),
    "OGG": frozenset({"VORBIS", "OPUS"}),
    "MP3": frozenset({"MPEG_LAYER_III"}),
}
"""What is taken of each format, by libsndfile's names."""
PACKED: Final = frozenset({"FLAC", "OGG", "MP3"})
"""Formats whose samples are counted as they are read."""
BLOCK_SAMPLES: Final = 65_536
"""2 MiB of eight channels: a pass costs far more than its call, and ends soon."""


def decode_voice(data: bytes) -> bytes:
    """Decode reference audio, a sound file of 0.5 to 30 s, to float32 LE, 16 kHz mono, finite.

    The file has a common rate and 8 channels at most; else `MediaError`.
    """
    if len(data) > WAV_BYTES_MAX:
        raise MediaError(f"the audio has more than {WAV_BYTES_MAX} bytes")
    with _opened(data, REFERENCE_S_MIN, REFERENCE_S_MAX) as file:
        mono = np.concatenate(list(_read_blocks(file, REFERENCE_S_MIN, REFERENCE_S_MAX)))
        with np.errstate(all="ignore"):  # An overflow shows as a value that is not finite.
            return _finite(to_model_rate(mono[:, None], file.samplerate))


def as_wav(pcm: bytes) -> bytes:
    """Write float32 LE, 16 kHz mono as a WAV file, without loss."""
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(pcm, "<f4"), INPUT_RATE_HZ, "FLOAT", format="WAV")
    return file.getvalue()


def decode_audio(data: bytes, rate_hz: int) -> bytes:
    """Decode a conversation's sound of 0.1 to 300 s to float32 LE, 16 kHz mono, finite.

    A sound file as above if `rate_hz` is 0, else float32 LE mono at that rate, 8-192 kHz; else
    `MediaError`.
    """
    if len(data) > media.AUDIO_BYTES_MAX:
        raise MediaError(f"the audio has more than {media.AUDIO_BYTES_MAX} bytes")
    if rate_hz:
        return _decode_raw(data, rate_hz)
    return decode_speech(data, AUDIO_S_MAX)


def decode_speech(data: bytes, s_max: int) -> bytes:
    """Decode a sound file of 0.1 to `s_max` seconds, as `decode_audio` does."""
    with _opened(data, media.AUDIO_S_MIN, s_max) as file:
        return _resample(_read_blocks(file, media.AUDIO_S_MIN, s_max), file.samplerate)


class _Stream(soundfile.SoundFile):  # type: ignore[misc]  # it has no types
    """A file that is read once: libsndfile cannot seek in a FLAC that does not know its length."""

    def seekable(self) -> bool:
        """Return False."""
        return False


@contextmanager
def _opened(data: bytes, s_min: float, s_max: float) -> Iterator[soundfile.SoundFile]:
    """Open a file, and check its header's limits before samples are read."""
    try:
        with _Stream(io.BytesIO(_with_sizes(data))) as file:
            if file.subtype not in SUBTYPES.get(file.format, ()):
                raise MediaError("the audio is not a plain WAV or AIFF, FLAC, Ogg or MP3 file")
            _check_rate(file.samplerate)
            if file.channels > media.WAV_CHANNELS_MAX:
                raise MediaError(f"the audio has more than {media.WAV_CHANNELS_MAX} channels")
            if file.format not in PACKED:
                _check_duration(file.frames, file.samplerate, s_min, s_max)
            yield file
    except soundfile.SoundFileError:
        raise _damaged() from None


def _with_sizes(data: bytes) -> bytes:
    """Put the sizes into a WAV from a pipe, and leave other files as they are."""
    if media.sound_kind(data) != "WAV":
        return data
    try:
        header = media.read_wav("audio", data, is_piped=True)
    except FieldError:
        return data
    size_at, size = header.data_at - 4, header.data_bytes.to_bytes(4, "little")
    if data[size_at : header.data_at] == size:
        return data
    whole = data[:size_at] + size + data[header.data_at : header.data_at + header.data_bytes]
    return whole[:4] + (len(whole) - 8).to_bytes(4, "little") + whole[8:]


def _decode_raw(data: bytes, rate_hz: int) -> bytes:
    if len(data) % SAMPLE_BYTES:
        raise MediaError(f"the audio is not whole samples of {SAMPLE_BYTES} bytes")
    _check_rate(rate_hz)
    samples = np.frombuffer(data, "<f4")
    _check_duration(len(samples), rate_hz, media.AUDIO_S_MIN, AUDIO_S_MAX)
    starts = range(0, len(samples), BLOCK_SAMPLES)
    return _resample((samples[at : at + BLOCK_SAMPLES] for at in starts), rate_hz)


def _read_blocks(
    file: soundfile.SoundFile, s_min: float, s_max: float
) -> Iterator[NDArray[np.float32]]:
    """The file in mono blocks: as many samples as its header says, or as a packed one has."""
    is_packed, count = file.format in PACKED, 0
    while is_packed or count < file.frames:
        most = BLOCK_SAMPLES if is_packed else min(file.frames - count, BLOCK_SAMPLES)
        block = file.read(most, dtype="float32", always_2d=True)
        if not len(block) and not is_packed:
            raise _damaged()
        count += len(block)
        if not len(block) or count > s_max * file.samplerate:
            break
        with np.errstate(all="ignore"):
            yield block.mean(axis=1, dtype=np.float32)
    _check_duration(count, file.samplerate, s_min, s_max)


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


def _check_rate(rate_hz: int) -> None:
    if not media.WAV_RATE_HZ_MIN <= rate_hz <= media.WAV_RATE_HZ_MAX:
        raise MediaError(
            f"the audio's rate is not {media.WAV_RATE_HZ_MIN} to {media.WAV_RATE_HZ_MAX} Hz"
        )


def _check_duration(samples: int, rate_hz: int, s_min: float, s_max: float) -> None:
    if not s_min * rate_hz <= samples <= s_max * rate_hz:
        raise MediaError(f"the audio does not last {s_min} to {s_max} s")


def _damaged() -> MediaError:
    return MediaError("the audio is not a sound file that is taken, or is damaged")
