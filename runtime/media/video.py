"""Decoding of videos: pictures and sound of an MP4, QuickTime, Matroska or WebM file.

- The file may be hostile, so `decoder` bounds memory and time, in a process; here streams,
  packets, frames, pixels and seconds are bounded.
- The head chooses the demuxer, which reads only memory; no file or address in the video is opened,
  and only common decoders run, in one thread: the same bytes give the same answer.
- The file is read twice, first for pictures, then for sound, so that neither waits in memory.
- A broken packet refuses the video: an answer to half of one would mislead.

`Pictures`: frames come in display order; the picture at a time is the last frame that began by
then. Of n pictures a second the first is separate and the other n - 1 lie side by side in one
further picture, as in the published model's tools: on a grid with black lines, each on white where
shapes differ. Memory holds the current frame, one second's small pictures, and the JPEG files.

`Track`: one track of sound, in the model's input format, aligned with the pictures. Pieces are
placed by their time: gaps become silence, and sound before the first picture or after the last
second is cut. Small errors of a time are ignored, because corrections would be heard. Memory is
that of the result, allocated at once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import soxr
from numpy.typing import NDArray

from protocol.values import limits
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire import media

from .image import CODED_PIXELS_MAX, SIDE_MAX, encode_jpeg, fitted, scale, to_rgb
from .values import Decoded, MediaError

if TYPE_CHECKING:
    from av import AudioFrame, AudioResampler, Packet, VideoFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

    S = TypeVar("S", VideoStream, AudioStream)


# -- its pictures ----------------------------------------------------------------------------------


PICTURES_BYTES_MAX: Final = 96 * 1024 * 1024
"""Of a video, 128 pictures at most: 768 KiB each, which only noise at 1920 x 1080 exceeds. With the
video's sound they fit into a record of a log."""
LINE_PIXELS: Final = 6
"""Width of the line between pictures."""

Picture = NDArray[np.uint8]
"""Shape (height, width, 3), RGB."""


class Pictures:
    """Collects the pictures of one video, `per_second` (1 or more) each second.

    JPEG files: `first` has one a second, `stacked` the further ones; its last second may have none.
    """

    def __init__(self, per_second: int) -> None:
        self.first: list[bytes] = []
        self.stacked: list[bytes] = []
        self._per_second = per_second
        self._sampled = 0
        self._others: list[Picture] = []
        self._shown: VideoFrame | None = None
        self._picture: Picture | None = None
        self._bytes = 0

    def show(self, at: Fraction, frame: VideoFrame) -> None:
        """Show a frame from `at` on: seconds from the first frame's, never falling.

        The frame must not change. `MediaError`: it, or all pictures, are too large.
        """
        _check_size(frame)
        self._take_until(at)
        self._shown, self._picture = frame, None

    def finish(self, end: Fraction) -> int:
        """End the video `end` seconds after the first frame; return the number of seconds begun.

        `MediaError`: the pictures are too large.
        """
        self._take_until(end)
        self._stack()
        return len(self.first)

    def _take_until(self, end: Fraction) -> None:
        """Take the pictures before `end` from the current frame."""
        while self._shown is not None and Fraction(self._sampled, self._per_second) < end:
            if self._picture is None:
                self._picture = _picture_of(self._shown)
            if self._sampled % self._per_second == 0:
                self._stack()
                self.first.append(self._encode(self._picture))
            else:
                self._others.append(self._picture)
            self._sampled += 1

    def _stack(self) -> None:
        if self._others:
            self.stacked.append(self._encode(stack(self._others)))
            self._others = []

    def _encode(self, picture: Picture) -> bytes:
        jpeg = encode_jpeg(picture, "420")
        self._bytes += len(jpeg)
        if self._bytes > PICTURES_BYTES_MAX:
            raise MediaError(f"the video's pictures have more than {PICTURES_BYTES_MAX} bytes")
        return jpeg


def stack(pictures: list[Picture]) -> Picture:
    """Lay one or more pictures side by side, no side of the whole above `SIDE_MAX`.

    Four make a square, two or three the squarer shape; other shapes are fitted into the largest.
    """
    height = max(len(picture) for picture in pictures)
    width = max(picture.shape[1] for picture in pictures)
    rows, columns = _grid(len(pictures), height, width)
    lines_high, lines_wide = LINE_PIXELS * (rows - 1), LINE_PIXELS * (columns - 1)
    factor = min(
        Fraction(1),
        Fraction(SIDE_MAX - lines_high, rows * height),
        Fraction(SIDE_MAX - lines_wide, columns * width),
    )
    height, width = max(1, int(height * factor)), max(1, int(width * factor))
    whole = np.zeros((rows * height + lines_high, columns * width + lines_wide, 3), np.uint8)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        top, left = row * (height + LINE_PIXELS), column * (width + LINE_PIXELS)
        whole[top : top + height, left : left + width] = _fit(picture, height, width)
    return whole


def _grid(count: int, height: int, width: int) -> tuple[int, int]:
    if count == 4:
        return 2, 2
    if count > 4:
        return 1, count
    lines = LINE_PIXELS * (count - 1)
    beside = abs(Fraction(count * width + lines, height) - 1)
    below = abs(Fraction(width, count * height + lines) - 1)
    return (1, count) if beside <= below else (count, 1)


def _fit(picture: Picture, height: int, width: int) -> Picture:
    """Scale a picture into the middle of a white cell."""
    high, wide = picture.shape[:2]
    if (high, wide) == (height, width):
        return picture
    factor = min(Fraction(height, high), Fraction(width, wide))
    high, wide = max(1, round(high * factor)), max(1, round(wide * factor))
    cell = np.full((height, width, 3), 255, np.uint8)
    top, left = (height - high) // 2, (width - wide) // 2
    cell[top : top + high, left : left + wide] = scale(picture, wide, high)
    return cell


def _check_size(frame: VideoFrame) -> None:
    width, height = frame.width, frame.height
    if width * height > limits.FRAME_PIXELS_MAX:
        raise MediaError(f"the video's pictures have more than {limits.FRAME_PIXELS_MAX} pixels")
    if max(width, height) > limits.FRAME_SIDES_RATIO_MAX * min(width, height):
        ratio = limits.FRAME_SIDES_RATIO_MAX
        raise MediaError(f"the video's pictures have sides of more than {ratio} to 1")


def _picture_of(frame: VideoFrame) -> Picture:
    """Convert a frame, scaled down if large, and rotated for display."""
    size = fitted(frame.width, frame.height)
    return np.rot90(to_rgb(frame, *size), round(frame.rotation / 90))


# -- its sound -------------------------------------------------------------------------------------


GAP_SAMPLES: Final = INPUT_RATE_HZ // 10
"""100 ms: web recordings have half as much jitter, and no pause is shorter."""


class Track:
    """Collects the sound of one video, for the `seconds` that the model sees."""

    def __init__(self, seconds: int) -> None:
        self._pcm = np.zeros(seconds * INPUT_RATE_HZ, np.float32)
        self._at = 0
        self._floats: AudioResampler | None = None
        self._stream: soxr.ResampleStream | None = None
        self._form: tuple[int, str, str] | None = None

    def add(self, at: Fraction, frame: AudioFrame) -> bool:
        """Add a decoded piece at seconds from the first picture, maybe negative; False: no more.

        `MediaError`: its rate is unusual, or it has too many channels.
        """
        _check_form(frame)
        begin = round(at * INPUT_RATE_HZ)
        form = (frame.sample_rate, frame.layout.name, frame.format.name)
        if form != self._form or begin - self._at > GAP_SAMPLES:
            self._begin(begin, form)
        assert self._floats is not None
        assert self._stream is not None
        frame.pts = None  # Its time is kept here; a converter would fill gaps.
        for piece in self._floats.resample(frame):
            mono = piece.to_ndarray().mean(axis=0, dtype=np.float32)
            self._put(self._stream.resample_chunk(mono))
        return self._at < len(self._pcm)

    @property
    def samples(self) -> int:
        """Those that it has so far, at 16 kHz."""
        return min(max(self._at, 0), len(self._pcm))

    def finish(self) -> bytes:
        """End the track: float32 LE, 16 kHz mono, for all seconds; `MediaError` if not finite."""
        self._flush()
        if not np.isfinite(self._pcm).all():
            raise MediaError("the video's sound holds values that are not finite")
        return self._pcm.astype("<f4", copy=False).tobytes()

    def _begin(self, at: int, form: tuple[int, str, str]) -> None:
        """Restart at a time: at first, after a gap, or when the format changes."""
        from av import AudioResampler

        self._flush()
        self._at = at if self._form is None else max(self._at, at)
        self._form = form
        self._floats = AudioResampler(format="fltp")
        self._stream = soxr.ResampleStream(form[0], INPUT_RATE_HZ, 1, dtype="float32")

    def _flush(self) -> None:
        if self._stream is not None:
            self._put(self._stream.resample_chunk(np.empty(0, np.float32), last=True))

    def _put(self, samples: NDArray[np.float32]) -> None:
        """Write samples after the last ones, within the seconds."""
        begin, self._at = self._at, self._at + len(samples)
        if begin < len(self._pcm) and self._at > 0:
            kept = samples[max(0, -begin) : len(self._pcm) - begin]
            self._pcm[max(0, begin) : max(0, begin) + len(kept)] = kept


def _check_form(frame: AudioFrame) -> None:
    if not media.WAV_RATE_HZ_MIN <= frame.sample_rate <= media.WAV_RATE_HZ_MAX:
        rates = f"{media.WAV_RATE_HZ_MIN} to {media.WAV_RATE_HZ_MAX} Hz"
        raise MediaError(f"the rate of the video's sound is not {rates}")
    if not 0 < frame.layout.nb_channels <= media.WAV_CHANNELS_MAX:
        raise MediaError(f"the video's sound has more than {media.WAV_CHANNELS_MAX} channels")


# -- the file --------------------------------------------------------------------------------------


STREAMS_MAX: Final = 32
"""Cameras write five, films of many languages twenty; each takes memory before it is read."""
PACKETS_MAX: Final = 32_768
"""Of a stream: 512 a second, twice those of a camera at 240 frames or of sound at 48 kHz."""
FRAMES_MAX: Final = 32_768
"""Of a stream: a packet may hold several."""
ROUNDING_S: Final = Fraction(2, 1_000)
"""Matroska rounds a frame's start and duration to 1 ms: that must not begin a second."""
GUESS_S_MAX: Final = Fraction(1)
"""A last frame without a duration is taken to last as long as the one before."""

_DEMUXERS: Final[dict[media.Container, str]] = {"mp4": "mov", "matroska": "matroska"}
_DECODERS: Final = (
    *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mjpeg"),
    *("aac", "mp3float", "mp3", "opus", "libopus", "vorbis", "flac", "alac", "ac3", "eac3"),
    *("pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_f32le"),
)
"""Common decoders, reviewed by many; most of the other hundreds are not maintained."""
_OPTIONS: Final = {
    "codec_whitelist": ",".join(_DECODERS),
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm",
    "protocol_whitelist": "none",
    "max_streams": str(STREAMS_MAX),
    "max_pixels": str(CODED_PIXELS_MAX),
}


@contextmanager
def _opened(data: bytes) -> Iterator[InputContainer]:
    """Open a file from memory; a library's errors become `MediaError`."""
    import av  # It costs 50 ms, only for decoding.

    container = media.container_of(data)
    if container is None:
        raise MediaError("the video is not of MP4, QuickTime, Matroska or WebM")
    # Since PyAV 19, bytes that are not UTF-8 are kept without asking.
    more: dict[str, Any] = {} if av.__version__ >= "19" else {"metadata_errors": "ignore"}
    try:
        with av.open(
            io.BytesIO(data), format=_DEMUXERS[container], options=_OPTIONS, **more
        ) as file:
            assert isinstance(file, av.container.InputContainer)
            yield file
    except (av.FFmpegError, ArithmeticError, ValueError, EOFError):
        raise MediaError("the video is damaged, or of a kind that is not taken") from None
    except MemoryError:
        raise MediaError("the video takes too much memory to decode") from None


def read_video(data: bytes, stack_frames: int) -> Decoded:
    """Decode a video to pictures and whole seconds of sound, if any; blocks for seconds.

    `stack_frames` pictures a second. `MediaError`: not a video, damaged, too long or too large.
    """
    if len(data) > limits.VIDEO_BYTES_MAX:
        raise MediaError(f"the video has more than {limits.VIDEO_BYTES_MAX} bytes")
    with _opened(data) as file:
        pictures = Pictures(stack_frames)
        start, seconds = _read_pictures(file, pictures)
    with _opened(data) as file:
        pcm = _read_sound(file, start, seconds)
    return Decoded(pcm=pcm, pictures=tuple(pictures.first), stacked=tuple(pictures.stacked))


def read_sound(data: bytes, s_max: int) -> bytes:
    """Decode the first track of such a file, with or without pictures: float32 LE, 16 kHz mono.

    `MediaError`: it has none, is damaged, or is longer than `s_max` seconds.
    """
    if media.container_of(data) is None:
        raise MediaError(
            "it is not a WAV, AIFF, FLAC, Ogg, MP3, MP4, QuickTime, Matroska or WebM file"
        )
    with _opened(data) as file:
        if len(file.streams) > STREAMS_MAX or not file.streams.audio:
            raise MediaError("the file holds no sound, or too many streams")
        track, start = Track(s_max), None
        for time, frame in _frames(file, file.streams.audio[0], {}, s_max):
            start = time if start is None else start
            if not track.add(time - start, frame):
                raise MediaError(f"the sound lasts more than {s_max} s")
        return track.finish()[: track.samples * SAMPLE_BYTES]


def _video_stream(file: InputContainer) -> VideoStream:
    """The first stream of pictures that is not a cover."""
    import av

    if len(file.streams) > STREAMS_MAX:
        raise MediaError(f"the video has more than {STREAMS_MAX} streams")
    cover = av.stream.Disposition.attached_pic
    for stream in file.streams.video:
        if not stream.disposition & cover:
            return stream
    raise MediaError("the video holds no pictures")


def _read_pictures(file: InputContainer, pictures: Pictures) -> tuple[Fraction, int]:
    """Take the pictures; return the first frame's time in the file, and the seconds after it."""
    start: Fraction | None = None
    at = step = Fraction(0)
    options = {"max_pixels": str(CODED_PIXELS_MAX), "err_detect": "explode"}
    for time, frame in _frames(file, _video_stream(file), options):
        start = time if start is None else start
        gap, at = time - start - at, max(time - start, at)
        if at >= limits.VIDEO_S_MAX:
            raise _too_long()
        pictures.show(at, frame)
        step = max(frame.duration or 0, 0) * _time_base(frame) or min(gap, GUESS_S_MAX)
    if start is None:
        raise MediaError("the video holds no pictures")
    end = at + max(step - ROUNDING_S, ROUNDING_S)
    if end > limits.VIDEO_S_MAX:
        raise _too_long()
    return start, pictures.finish(end)


def _read_sound(file: InputContainer, start: Fraction, seconds: int) -> bytes:
    """Decode the first track, as long as the pictures last."""
    if not file.streams.audio:
        return b""
    track = Track(seconds)
    for time, frame in _frames(file, file.streams.audio[0], {}):
        if not track.add(time - start, frame):
            break
    return track.finish()


def _frames(
    file: InputContainer, stream: S, options: dict[str, str], s_max: int = limits.VIDEO_S_MAX
) -> Iterator[tuple[Fraction, Any]]:
    """Decode a stream: each frame with its time in seconds, pictures in display order."""
    count, times = 0, -(-s_max // limits.VIDEO_S_MAX)
    for packet in _packets(file, stream, options, PACKETS_MAX * times):
        for frame in packet.decode():
            count += 1
            if count > FRAMES_MAX * times:
                raise MediaError(f"a stream of the video has more than {count - 1} frames")
            yield _time(frame), frame


def _packets(
    file: InputContainer, stream: S, options: dict[str, str], most: int
) -> Iterator[Packet[S]]:
    """Read only one stream's packets, with the decoder's options."""
    from av.stream import Discard

    for other in file.streams:
        if other is not stream:
            other.discard = Discard.all
    codec = stream.codec_context
    if codec is None or codec.codec.name not in _DECODERS:
        raise MediaError("the video is of a codec that is not taken")
    codec.options = options
    codec.thread_count = 1
    for count, packet in enumerate(file.demux(stream)):
        if count >= most:
            raise MediaError(f"a stream of the video has more than {most} packets")
        if packet.is_corrupt:
            raise MediaError("the video is damaged")
        yield packet


def _time(frame: VideoFrame | AudioFrame) -> Fraction:
    """A frame's start in seconds of the file."""
    if frame.pts is None or frame.is_corrupt:
        raise MediaError("the video is damaged")
    return frame.pts * _time_base(frame)


def _time_base(frame: VideoFrame | AudioFrame) -> Fraction:
    if frame.time_base is None:
        raise MediaError("the video is damaged")
    return Fraction(frame.time_base.numerator, frame.time_base.denominator)


def _too_long() -> MediaError:
    return MediaError(f"the video lasts more than {limits.VIDEO_S_MAX} s")
