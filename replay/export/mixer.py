"""Both voices in one stereo sound: the user left, the model right, at 48 kHz; and as a WAV.

48 kHz is a multiple of both rates: sample `n` of the user stands at `3 n`, of the model at `2 n`.
Each voice is resampled as one stream, silence included, without seams between sounds. Sounds come
in the order in which they begin; only the lead of one voice is kept. Frame `n` is heard `n / 48000`
seconds after the session's start. Ten minutes of a WAV are 115 MB, written a second at a time.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import numpy as np
import soxr
from numpy.typing import NDArray

from protocol.values.limits import NS_PER_S
from protocol.values.model import SAMPLE_BYTES
from recorder.format.records import Fields, Record
from recorder.read.scan import Damage
from runtime.measures.placing import RATE_HZ, VOICES, Sound, Voice, sample_at

from .moments import TooLongError
from .timeline import Timeline

STEREO_HZ: Final = 48_000
CHANNELS: Final = 2
PCM16_MAX: Final = 32_767
PCM16_BYTES: Final = 2
_WAV_HEAD: Final = "<4sI8sIHHIIHH4sI"
DURATION_S_MAX: Final = 6 * 3600
"""A WAV counts its bytes in 32 bits, 6.2 hours; a log can name any time as its end."""

_Floats = NDArray[np.float32]
Stereo = NDArray[np.int16]
"""int16, shape (frames, 2): user, model."""


def to_pcm16(samples: _Floats) -> NDArray[np.int16]:
    """Make 16-bit samples of float32 in [-1, 1], any shape; clip others, silence NaN."""
    finite: _Floats = np.nan_to_num(samples, posinf=1.0, neginf=-1.0)
    pcm16: NDArray[np.int16] = np.rint(finite.clip(-1, 1) * PCM16_MAX).astype(np.int16)
    return pcm16


class Mixer:
    """Mixes a session's sounds; its methods raise `TooLongError` first after `DURATION_S_MAX`."""

    def __init__(self) -> None:
        self._lanes: Final = tuple(_Lane(voice) for voice in VOICES)
        self._filled_ns = 0

    def add(self, sound: Sound) -> Iterator[Stereo]:
        """Take the next sound; all before it is complete."""
        yield from self.advance(sound.begin_ns)
        self._lanes[VOICES.index(sound.voice)].add(sound)

    def advance(self, to_ns: int) -> Iterator[Stereo]:
        """Give the sound up to a time, silence if nothing was added."""
        if to_ns > DURATION_S_MAX * NS_PER_S:
            raise TooLongError(
                f"the session goes on until {to_ns // NS_PER_S} s, and sound is written up to"
                f" {DURATION_S_MAX} s; the formats without sound have no such bound"
            )
        while self._filled_ns + NS_PER_S < to_ns:
            yield from self._fill(self._filled_ns + NS_PER_S)
        if to_ns > self._filled_ns:
            yield from self._fill(to_ns)

    def finish(self, duration_ns: int) -> Iterator[Stereo]:
        """Give the rest, up to a duration no less than any sound's end; add nothing after it."""
        yield from self.advance(duration_ns)
        frames = -(-duration_ns * STEREO_HZ // NS_PER_S)
        for lane in self._lanes:
            lane.finish(frames)
        yield from self._take()

    def _fill(self, to_ns: int) -> Iterator[Stereo]:
        self._filled_ns = to_ns
        for lane in self._lanes:
            lane.fill(sample_at(lane.voice, to_ns))
        yield from self._take()

    def _take(self) -> Iterator[Stereo]:
        frames = min(lane.ready for lane in self._lanes)
        if frames:
            yield np.stack([to_pcm16(lane.take(frames)) for lane in self._lanes], axis=1)


def write_wav(timeline: Timeline, file: BinaryIO) -> None:
    """Write both voices to a file that can seek.

    `OSError`: writing failed; `TooLongError`: the session is longer than sound can be written.
    """
    file.write(wav_head(0))
    size = sum(file.write(piece) for piece in _pieces_of(timeline))
    file.seek(0)
    file.write(wav_head(size))


def wav_of(head: Fields, items: Iterable[Record | Damage]) -> Iterator[bytes]:
    """Make the samples of a WAV of both voices, after `wav_head`, while a log is read.

    `head` holds the fields of the log's `session` record, `items` its records in order and its
    damage. `OSError`: the log cannot be read any further; `TooLongError`: as in `write_wav`.
    """
    return _pieces_of(Timeline(head, items))


def wav_head(size: int) -> bytes:
    """The head of a WAV whose samples have `size` bytes."""
    frame_bytes = CHANNELS * PCM16_BYTES
    pcm = (16, 1, CHANNELS, STEREO_HZ, STEREO_HZ * frame_bytes, frame_bytes, 8 * PCM16_BYTES)
    riff_bytes = size + struct.calcsize(_WAV_HEAD) - 8
    return struct.pack(_WAV_HEAD, b"RIFF", riff_bytes, b"WAVEfmt ", *pcm, b"data", size)


def _pieces_of(timeline: Timeline) -> Iterator[bytes]:
    mixer = Mixer()
    for moment in timeline:
        if isinstance(moment, Sound):
            yield from map(np.ndarray.tobytes, mixer.add(moment))
    yield from map(np.ndarray.tobytes, mixer.finish(timeline.duration_ns))


class _Lane:
    """One voice: its input at its own rate, and its output at 48 kHz."""

    def __init__(self, voice: Voice) -> None:
        self.voice: Final[Voice] = voice
        self.ready = 0
        self._stream = soxr.ResampleStream(RATE_HZ[voice], STEREO_HZ, 1, dtype="float32")
        self._samples = 0
        self._frames = 0
        self._out: deque[_Floats] = deque()

    def add(self, sound: Sound) -> None:
        self.fill(sound.begin)
        self._feed(np.frombuffer(sound.pcm[: len(sound.pcm) // SAMPLE_BYTES * SAMPLE_BYTES], "<f4"))

    def fill(self, to_sample: int) -> None:
        """Add silence up to a sample; do nothing if the voice is further already."""
        if to_sample > self._samples:
            self._feed(np.zeros(to_sample - self._samples, np.float32))

    def finish(self, frames: int) -> None:
        """Flush the resampler, up to this number of frames in all."""
        self._put(self._stream.resample_chunk(np.zeros(0, np.float32), last=True))
        missing = frames - self._frames
        if missing > 0:
            self._put(np.zeros(missing, np.float32))
        elif missing < 0:
            rest = self.take(self.ready)
            self._put(rest[:missing])

    def take(self, frames: int) -> _Floats:
        """Take frames out, at most `ready`."""
        self.ready -= frames
        taken = []
        while frames:
            piece = self._out.popleft()
            taken.append(piece[:frames])
            if len(piece) > frames:
                self._out.appendleft(piece[frames:])
            frames -= len(taken[-1])
        return np.concatenate(taken) if taken else np.zeros(0, np.float32)

    def _feed(self, samples: _Floats) -> None:
        self._samples += len(samples)
        self._put(self._stream.resample_chunk(samples))

    def _put(self, frames: _Floats) -> None:
        if len(frames):
            self._frames += len(frames)
            self.ready += len(frames)
            self._out.append(frames)
