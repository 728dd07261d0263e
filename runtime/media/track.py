"""The sound of a video: one track, in the model's input format, aligned with the pictures.

Pieces are placed by their time: gaps become silence, and sound before the first picture or after
the last second is cut. Small errors of a time are ignored, because corrections would be heard.
Memory is that of the result, allocated at once.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
import soxr
from numpy.typing import NDArray

from protocol.values.model import INPUT_RATE_HZ
from protocol.wire.wav import WAV_CHANNELS_MAX, WAV_RATE_HZ_MAX, WAV_RATE_HZ_MIN

from .values import MediaError

if TYPE_CHECKING:
    from av import AudioFrame, AudioResampler

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
            heard = samples[max(0, -begin) : len(self._pcm) - begin]
            self._pcm[max(0, begin) : max(0, begin) + len(heard)] = heard


def _check_form(frame: AudioFrame) -> None:
    if not WAV_RATE_HZ_MIN <= frame.sample_rate <= WAV_RATE_HZ_MAX:
        rates = f"{WAV_RATE_HZ_MIN} to {WAV_RATE_HZ_MAX} Hz"
        raise MediaError(f"the rate of the video's sound is not {rates}")
    if not 0 < frame.layout.nb_channels <= WAV_CHANNELS_MAX:
        raise MediaError(f"the video's sound has more than {WAV_CHANNELS_MAX} channels")
