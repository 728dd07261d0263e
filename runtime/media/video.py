"""Decoding of videos: pictures and sound of an MP4, QuickTime, Matroska or WebM file.

- The file may be hostile, so `process` bounds memory and time; here streams, packets, frames,
  pixels and seconds are bounded.
- The head chooses the demuxer, which reads only memory; no file or address in the video is opened,
  and only common decoders run, in one thread: the same bytes give the same answer.
- The file is read twice, first for pictures, then for sound, so that neither waits in memory.
- A broken packet refuses the video: an answer to half of one would mislead.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, TypeVar

from protocol.values.limits import VIDEO_BYTES_MAX, VIDEO_S_MAX
from protocol.wire.media import Container, container_of

from .image import CODED_PIXELS_MAX
from .pictures import Pictures
from .track import Track
from .values import Decoded, MediaError

if TYPE_CHECKING:
    from av import AudioFrame, Packet, VideoFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

    S = TypeVar("S", VideoStream, AudioStream)

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

_DEMUXERS: Final[dict[Container, str]] = {"mp4": "mov", "matroska": "matroska"}
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

    container = container_of(data)
    if container is None:
        raise MediaError("the video is not of MP4, QuickTime, Matroska or WebM")
    try:
        with av.open(
            io.BytesIO(data),
            format=_DEMUXERS[container],
            options=_OPTIONS,
            metadata_errors="ignore",
        ) as file:
            assert isinstance(file, av.container.InputContainer)
            yield file
    except (av.FFmpegError, ArithmeticError, ValueError, EOFError):
        raise MediaError("the video is damaged, or of a kind that is not taken") from None
    except MemoryError:
        raise MediaError("the video takes too much memory to decode") from None


def read_video(data: bytes, stack_frames: int) -> Decoded:
    """Decode a video to pictures and whole seconds of sound, if any; blocks for seconds.

    `stack_frames` pictures a second. `MediaError`: it is no video, damaged, too long or too large.
    """
    if len(data) > VIDEO_BYTES_MAX:
        raise MediaError(f"the video has more than {VIDEO_BYTES_MAX} bytes")
    with _opened(data) as file:
        pictures = Pictures(stack_frames)
        start, seconds = _read_pictures(file, pictures)
    with _opened(data) as file:
        pcm = _read_sound(file, start, seconds)
    return Decoded(pcm=pcm, pictures=tuple(pictures.first), stacked=tuple(pictures.stacked))


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
        if at >= VIDEO_S_MAX:
            raise _too_long()
        pictures.show(at, frame)
        step = _duration(frame) or min(gap, GUESS_S_MAX)
    if start is None:
        raise MediaError("the video holds no pictures")
    end = at + max(step - ROUNDING_S, ROUNDING_S)
    if end > VIDEO_S_MAX:
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
    file: InputContainer, stream: S, options: dict[str, str]
) -> Iterator[tuple[Fraction, Any]]:
    """Decode a stream: each frame with its time in seconds, pictures in display order."""
    count = 0
    for packet in _packets(file, stream, options):
        for frame in packet.decode():
            count += 1
            yield _time(frame, count), frame


def _packets(file: InputContainer, stream: S, options: dict[str, str]) -> Iterator[Packet[S]]:
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
        if count >= PACKETS_MAX:
            raise MediaError(f"a stream of the video has more than {PACKETS_MAX} packets")
        if packet.is_corrupt:
            raise MediaError("the video is damaged")
        yield packet


def _time(frame: VideoFrame | AudioFrame, count: int) -> Fraction:
    """A frame's start in seconds of the file."""
    if count > FRAMES_MAX:
        raise MediaError(f"a stream of the video has more than {FRAMES_MAX} frames")
    if frame.pts is None or frame.is_corrupt:
        raise MediaError("the video is damaged")
    return frame.pts * _time_base(frame)


def _duration(frame: VideoFrame) -> Fraction:
    """A frame's duration in seconds; 0 where the file does not say."""
    return max(frame.duration or 0, 0) * _time_base(frame)


def _time_base(frame: VideoFrame | AudioFrame) -> Fraction:
    if frame.time_base is None:
        raise MediaError("the video is damaged")
    return Fraction(frame.time_base.numerator, frame.time_base.denominator)


def _too_long() -> MediaError:
    return MediaError(f"the video lasts more than {VIDEO_S_MAX} s")
