"""Both voices in one stereo sound: the user left, the model right, at 48 kHz; as a WAV, or an MP4.

48 kHz is a multiple of both rates: sample `n` of the user stands at `3 n`, of the model at `2 n`.
Each voice is resampled as one stream, silence included, without seams between sounds. Sounds come
in the order in which they begin; only the lead of one voice is kept. Frame `n` is heard `n / 48000`
seconds after the session's start. Ten minutes of a WAV are 115 MB, written a second at a time.

An MP4 has the sound as AAC, and the user's pictures as H.264. A picture stands from when it came
until the next, at least one a second, so that a player can seek; it is black before the first. All
have the size of the first, `SIDE_MAX` pixels at most, with black bars for another shape. A session
without pictures has no video track: players show it as sound. A picture that cannot be decoded is
left out; no server records one that it took.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

import numpy as np
import simplejpeg
import soxr
from numpy.typing import NDArray

from protocol.values.limits import MS_PER_S, NS_PER_MS, NS_PER_S
from protocol.values.model import SAMPLE_BYTES
from recorder.format.format import Fields, Record
from recorder.read.scan import Damage
from runtime.measures.conversation import RATE_HZ, VOICES, Voice
from runtime.measures.talk import Sound, sample_at
from runtime.media.image import scale

from .timeline import Picture, Timeline

if TYPE_CHECKING:
    from av.audio import AudioStream
    from av.container import OutputContainer
    from av.packet import Packet
    from av.video import VideoStream

# -- the mixer -----------------------------------------------------------------------------------

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


class TooLongError(ValueError):
    """A session is longer than the sound that a format can hold."""


class Mixer:
    """Mixes a session's sounds; its methods raise `TooLongError` first after `DURATION_S_MAX`."""

    def __init__(self) -> None:
        self._tracks: Final = tuple(_Track(voice) for voice in VOICES)
        self._filled_ns = 0

    def add(self, sound: Sound) -> Iterator[Stereo]:
        """Take the next sound; all before it is complete."""
        yield from self.advance(sound.begin_ns)
        self._tracks[VOICES.index(sound.voice)].add(sound)

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
        for track in self._tracks:
            track.finish(frames)
        yield from self._take()

    def _fill(self, to_ns: int) -> Iterator[Stereo]:
        self._filled_ns = to_ns
        for track in self._tracks:
            track.fill(sample_at(track.voice, to_ns))
        yield from self._take()

    def _take(self) -> Iterator[Stereo]:
        frames = min(track.ready for track in self._tracks)
        if frames:
            yield np.stack([to_pcm16(track.take(frames)) for track in self._tracks], axis=1)


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


class _Track:
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
        pieces = []
        while frames:
            piece = self._out.popleft()
            pieces.append(piece[:frames])
            if len(piece) > frames:
                self._out.appendleft(piece[frames:])
            frames -= len(pieces[-1])
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)

    def _feed(self, samples: _Floats) -> None:
        self._samples += len(samples)
        self._put(self._stream.resample_chunk(samples))

    def _put(self, frames: _Floats) -> None:
        if len(frames):
            self._frames += len(frames)
            self.ready += len(frames)
            self._out.append(frames)


# -- pictures and sound as MP4 -------------------------------------------------------------------


SIDE_MAX: Final = 1280
"""The model sees no more of a picture, and encoding a larger one takes longer than its time."""
SHOWN_MS_MAX: Final = 1000
LAST_MS: Final = 40
"""The duration of the very last picture: that of a camera's."""
KEY_PICTURES: Final = 5
"""Pictures between two to which a player can jump: some seconds."""
CRF: Final = "23"
"""x264's own default: faults are hard to see."""
AUDIO_BITS_PER_S: Final = 128_000
AAC_OPTIONS: Final = {"aac_coder": "fast"}
"""Half the time of the default search; at this rate speech comes out no less like the original."""
AAC_FRAMES: Final = 1024
"""The number of samples that AAC encodes at once."""

_Packets: TypeAlias = "list[Packet[AudioStream | VideoStream]]"
_Rgb = NDArray[np.uint8]
"""uint8, shape (height, width, 3), RGB."""


def write_mp4(timeline: Timeline, file: BinaryIO) -> None:
    """Write pictures and both voices to a file that can seek.

    `OSError`: writing failed; `TooLongError`: the session is longer than sound can be written.
    """
    import av  # of the extra `media`

    with av.open(file, "w", format="mp4") as container:
        movie = _Movie(container)
        mixer = Mixer()
        for moment in timeline:
            if isinstance(moment, Sound):
                movie.add_sound(mixer.add(moment))
            elif isinstance(moment, Picture):
                movie.add_sound(mixer.advance(moment.begin_ns))
                movie.show(moment)
        movie.add_sound(mixer.finish(timeline.duration_ns))
        movie.finish(timeline.duration_ns)


class _Movie:
    """Both tracks. Sound is kept encoded until it is clear whether there are pictures."""

    def __init__(self, container: OutputContainer) -> None:
        self._container = container
        self._audio: AudioStream = container.add_stream(
            "aac", rate=STEREO_HZ, bit_rate=AUDIO_BITS_PER_S, layout="stereo", options=AAC_OPTIONS
        )
        self._video: _Video | None = None
        self._waiting: _Packets = []
        self._frames = 0

    def add_sound(self, pieces: Iterable[Stereo]) -> None:
        import av

        for piece in pieces:
            frame = av.AudioFrame.from_ndarray(piece.reshape(1, -1), format="s16", layout="stereo")
            frame.sample_rate = STEREO_HZ
            frame.pts, frame.time_base = self._frames, Fraction(1, STEREO_HZ)
            self._frames += len(piece)
            self._put(self._audio.encode(frame))

    def show(self, moment: Picture) -> None:
        try:
            picture: _Rgb = simplejpeg.decode_jpeg(moment.jpeg)
        except ValueError:
            return
        if self._video is None:
            self._video = _Video(self._container, picture)
        self._put(self._video.show(picture, moment.begin_ns // NS_PER_MS))

    def finish(self, duration_ns: int) -> None:
        if self._video is not None:
            self._put(self._video.finish(duration_ns // NS_PER_MS))
        if not self._frames:
            self.add_sound([np.zeros((AAC_FRAMES, CHANNELS), np.int16)])  # a file needs something
        self._put(self._audio.encode(None))
        self._container.mux(self._waiting)

    def _put(self, packets: _Packets) -> None:
        self._waiting += packets
        if self._video is not None:
            self._container.mux(self._waiting)
            self._waiting.clear()


class _Video:
    def __init__(self, container: OutputContainer, first: _Rgb) -> None:
        height, width = first.shape[:2]
        self._height, self._width = _even(height, width)
        options = {"crf": CRF, "g": str(KEY_PICTURES), "bf": "0"}  # in order: the last ends it
        self._stream: VideoStream = container.add_stream("libx264", rate=1, options=options)
        self._stream.height, self._stream.width = self._height, self._width
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = Fraction(1, MS_PER_S)
        self._shown: _Rgb = np.zeros((self._height, self._width, 3), np.uint8)
        self._next_ms = 0

    def show(self, picture: _Rgb, at_ms: int) -> _Packets:
        packets = self._advance(at_ms)
        self._shown = self._fit(picture)
        return packets + self._encode(max(at_ms, self._next_ms))

    def finish(self, duration_ms: int) -> _Packets:
        last_ms = max(duration_ms - LAST_MS, self._next_ms)
        packets = self._advance(last_ms) + self._encode(last_ms) + self._stream.encode(None)
        packets[-1].duration = LAST_MS
        return packets

    def _advance(self, to_ms: int) -> _Packets:
        packets: _Packets = []
        at_ms = 0 if self._next_ms == 0 else self._next_ms - 1 + SHOWN_MS_MAX
        while at_ms < to_ms:
            packets += self._encode(at_ms)
            at_ms += SHOWN_MS_MAX
        return packets

    def _encode(self, at_ms: int) -> _Packets:
        import av

        frame = av.VideoFrame.from_ndarray(self._shown, "rgb24")
        frame.pts, frame.time_base = at_ms, Fraction(1, MS_PER_S)
        self._next_ms = at_ms + 1
        return self._stream.encode(frame)

    def _fit(self, picture: _Rgb) -> _Rgb:
        """Scale a picture into the video's size, with black bars for another shape."""
        height, width = picture.shape[:2]
        factor = min(self._height / height, self._width / width)
        inner = max(1, round(height * factor)), max(1, round(width * factor))
        canvas = np.zeros((self._height, self._width, 3), np.uint8)
        top, left = (self._height - inner[0]) // 2, (self._width - inner[1]) // 2
        rows, columns = slice(top, top + inner[0]), slice(left, left + inner[1])
        is_it = picture.shape[:2] == inner
        canvas[rows, columns] = picture if is_it else scale(picture, inner[1], inner[0])
        return canvas


def _even(height: int, width: int) -> tuple[int, int]:
    """Fit a size into `SIDE_MAX`, with even sides: H.264 keeps colours at half the size."""
    factor = min(1.0, SIDE_MAX / max(height, width))
    return max(2, round(height * factor / 2) * 2), max(2, round(width * factor / 2) * 2)
