"""Small videos, made here: grey frames that tell which they are, and a tone.

The grey of frame i is `GREYS[i % 20]`, far enough from its neighbours that no codec confuses them.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import numpy as np
import simplejpeg

GREYS = tuple(range(20, 240, 11))
TONE_HZ = 440
AUDIO_HZ = 48_000


def steady(count: int, rate: float = 10, start_ms: int = 0) -> list[int]:
    """When each frame of a steady camera begins, in milliseconds."""
    return [start_ms + round(1000 * i / rate) for i in range(count)]


def tone(seconds: float, rate_hz: int = AUDIO_HZ) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tone, float32 in [-0.5, 0.5]."""
    at_s = np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.5 * np.sin(2 * np.pi * TONE_HZ * at_s)).astype(np.float32)


def make_video(
    times_ms: Sequence[int],
    *,
    container: str = "mp4",
    codec: str = "mpeg4",
    size: tuple[int, int] = (64, 48),
    sound: Sequence[tuple[float, float]] = (),
    audio: str = "aac",
    right_grey: int | None = None,
) -> bytes:
    """Make a video.

    Args:
        times_ms: when each frame begins.
        container: the muxer.
        codec: the pictures' encoder.
        size: width and height in pixels.
        sound: from when to when there is a tone, in seconds; none: there is no track.
        audio: its encoder.
        right_grey: of the right half; None: that of the frame.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=1000)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        track: Any = out.add_stream(audio, rate=AUDIO_HZ, layout="stereo") if sound else None
        for index, at in enumerate(times_ms):
            grey = np.full((size[1], size[0], 3), GREYS[index % len(GREYS)], np.uint8)
            if right_grey is not None:
                grey[:, size[0] // 2 :] = right_grey
            frame = av.VideoFrame.from_ndarray(grey, "rgb24")
            frame.pts, frame.time_base = at, Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
        for begin, end in sound:
            _encode_tone(out, track, begin, end)
        if track is not None:
            out.mux(track.encode())
    return file.getvalue()


def _encode_tone(out: Any, track: Any, begin: float, end: float) -> None:
    mono = tone(end - begin)
    for at in range(0, len(mono), 960):
        piece = mono[at : at + 960]
        if track.codec_context.format.is_planar:
            frame = av.AudioFrame.from_ndarray(np.stack([piece, piece]), "fltp", "stereo")
        else:
            pcm16 = np.rint(np.repeat(piece, 2) * 32_767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(pcm16.reshape(1, -1), "s16", "stereo")
        frame.sample_rate, frame.time_base = AUDIO_HZ, Fraction(1, AUDIO_HZ)
        frame.pts = round(begin * AUDIO_HZ) + at
        out.mux(track.encode(frame))


def put(data: bytes, name: bytes, offset: int, piece: bytes) -> bytes:
    """Overwrite bytes of an MP4 box, counted from its name."""
    at = data.index(name) + offset
    return data[:at] + piece + data[at + len(piece) :]


def turned(data: bytes) -> bytes:
    """Say in an MP4 that it was filmed upright: it is to be shown a quarter to the right."""
    one = 1 << 16
    return put(data, b"tkhd", 44, struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30))


def claiming(data: bytes, samples: int) -> bytes:
    """Say in an MP4 that it holds that many frames of a byte."""
    count = struct.pack(">I", samples)
    data = put(data, b"stsz", 8, struct.pack(">I", 1) + count)
    return put(put(data, b"stts", 12, count), b"stsc", 16, count)


def pixels(jpeg: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode a picture."""
    return np.asarray(simplejpeg.decode_jpeg(jpeg, colorspace="RGB"))


def frame_number(picture: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Tell which of the first twenty frames a picture shows."""
    return int(np.abs(np.asarray(GREYS) - picture.mean()).argmin())


def numbers(jpegs: Sequence[bytes]) -> list[int]:
    """Tell which frames some pictures show."""
    return [frame_number(pixels(jpeg)) for jpeg in jpegs]


@contextmanager
def muxing(container: str) -> Iterator[tuple[Any, io.BytesIO]]:
    """Write a file of a strange kind."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        yield out, file
