"""A voice detector: where speech begins and ends in 16-bit sound, by its energy.

Sound is judged in frames of 20 ms. A frame is loud if its power is well above the noise, which is
the least that was heard lately. Speech begins after `START_FRAMES` loud frames of the last
`WINDOW_FRAMES`, which leaves out clicks and knocks; it ends after a silence. All is integer
arithmetic on the client's samples, so a replay comes to the same on any machine, and how the sound
was cut into pieces does not matter.
"""

from __future__ import annotations

from typing import Final, Literal

import attrs
import numpy as np

from ..values.limits import MS_PER_S
from ..values.model import SAMPLE16_BYTES

FRAME_MS: Final = 20
WINDOW_FRAMES: Final = 16
"""320 ms."""
START_FRAMES: Final = 10
"""200 ms of them loud: longer than a knock or a cough's burst, shorter than a word or two."""
POWER_MIN: Final = 10_000
"""-50 dB of full scale: what is quieter is no speech into a microphone."""
NOISE_MIN: Final = 100
"""-70 dB: the noise of a quiet microphone."""
FIRST_NOISE_MAX: Final = 100_000
"""-40 dB: what begins louder is a client that speaks at once."""
NOISE_UP_SHIFT: Final = 6
"""The noise follows louder sound by a 64th a frame: twice as loud in a second."""
FACTOR: Final = 8
"""Speech is 9 dB above the noise, at a threshold of a half."""
SILENCE_MS: Final = 500
"""The end of speech, unless the client says otherwise: a pause within a sentence is shorter."""

Edge = tuple[Literal["began", "ended"], int]
"""Where speech begins or ends, in milliseconds from the beginning of the sound."""


@attrs.define
class Ear:
    """The detector's state.

    Attributes:
        rate_hz: of the sound.
        rest: samples that do not fill a frame yet.
        frames: heard so far.
        noise: power of the noise, in squares of 16-bit samples; the first frame's at first.
        loud: which of the last frames were loud, the newest in the lowest bit.
        quiet_frames: since the last loud one.
        is_speech: speech has begun and not ended.
    """

    rate_hz: int
    rest: bytes = b""
    frames: int = 0
    noise: int = NOISE_MIN
    loud: int = 0
    quiet_frames: int = 0
    is_speech: bool = False

    def hear(
        self, pcm16: bytes, *, threshold: float = 0.5, silence_ms: int = SILENCE_MS
    ) -> list[Edge]:
        """Take sound, and return where speech begins and ends in it.

        Args:
            pcm16: signed 16-bit LE mono, of any length.
            threshold: 0 to 1; a higher one needs louder speech.
            silence_ms: speech has ended after so much silence.
        """
        size = self.rate_hz * FRAME_MS // MS_PER_S * SAMPLE16_BYTES
        sound = self.rest + pcm16
        count = len(sound) // size
        self.rest = sound[count * size :]
        samples = np.frombuffer(sound[: count * size], "<i2").astype(np.int64)
        samples = samples.reshape(count, size // SAMPLE16_BYTES)
        powers = (samples * samples).sum(axis=1) // samples.shape[1] if count else ()
        factor = max(int(FACTOR * 2 * threshold), 2)
        edges = (self._judge(int(power), factor, silence_ms) for power in powers)
        return [edge for edge in edges if edge is not None]

    def skip(self, pcm16: bytes) -> None:
        """Let sound pass without listening: speech in progress is over, and time goes on."""
        size = self.rate_hz * FRAME_MS // MS_PER_S * SAMPLE16_BYTES
        frames, rest = divmod(len(self.rest) + len(pcm16), size)
        self.frames += frames
        self.rest = bytes(rest)
        self.loud = self.quiet_frames = 0
        self.is_speech = False

    def _judge(self, power: int, factor: int, silence_ms: int) -> Edge | None:
        if not self.frames:
            self.noise = min(max(power, NOISE_MIN), FIRST_NOISE_MAX)
        is_loud = power > max(self.noise * factor, POWER_MIN)
        if power < self.noise:
            self.noise = max(power, NOISE_MIN)
        else:
            self.noise += (self.noise >> NOISE_UP_SHIFT) + 1
        self.frames += 1
        self.loud = (self.loud << 1 | is_loud) & ((1 << WINDOW_FRAMES) - 1)
        self.quiet_frames = 0 if is_loud else self.quiet_frames + 1
        if not self.is_speech and self.loud.bit_count() >= START_FRAMES:
            self.is_speech = True
            return "began", (self.frames - self.loud.bit_length()) * FRAME_MS
        if self.is_speech and self.quiet_frames * FRAME_MS >= silence_ms:
            self.is_speech = False
            self.loud = 0
            return "ended", self.frames * FRAME_MS
        return None
