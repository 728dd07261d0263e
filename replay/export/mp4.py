"""An MP4: the user's pictures, as H.264, and both voices, as AAC in stereo like `wav`.

A picture stands from when it came until the next, at least one a second, so that a player can seek;
it is black before the first. All have the size of the first, `SIDE_MAX` pixels at most, with black
bars for another shape. A session without pictures has no video track: players show it as sound. A
picture that cannot be decoded is left out; no server records one that it took.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import BinaryIO, Final, TypeAlias

import av
import numpy as np
import simplejpeg
from av.audio import AudioStream
from av.container import OutputContainer
from av.packet import Packet
from av.video import VideoStream
from numpy.typing import NDArray

from protocol.values.limits import NS_PER_MS
from runtime.measures.placing import Sound
from runtime.media.image import scale

from .mixer import CHANNELS, STEREO_HZ, Mixer, Stereo
from .moments import Picture
from .timeline import Timeline

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
MS_PER_S: Final = 1000

_Packets: TypeAlias = "list[Packet[AudioStream | VideoStream]]"
_Rgb = NDArray[np.uint8]
"""uint8, shape (height, width, 3), RGB."""


def write_mp4(timeline: Timeline, file: BinaryIO) -> None:
    """Write pictures and both voices to a file that can seek.

    `OSError`: writing failed; `TooLongError`: the session is longer than sound can be written.
    """
    with av.open(file, "w", format="mp4") as container:
        movie = _Movie(container)
        mixer = Mixer()
        for moment in timeline:
            if isinstance(moment, Sound):
                movie.hear(mixer.add(moment))
            elif isinstance(moment, Picture):
                movie.hear(mixer.advance(moment.begin_ns))
                movie.show(moment)
        movie.hear(mixer.finish(timeline.duration_ns))
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

    def hear(self, pieces: Iterable[Stereo]) -> None:
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
            self.hear([np.zeros((AAC_FRAMES, CHANNELS), np.int16)])  # a file needs something
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
