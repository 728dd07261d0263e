"""Where a client begins and stops to speak, by the energy of its sound: `DetectSpeech`.

Sound is judged in frames of 20 ms. A frame is loud if its power is well above the noise, which is
the least that was heard lately. Speech begins after `START_FRAMES` loud frames of the last
`WINDOW_FRAMES`, which leaves out clicks and knocks; it ends after a silence. How the sound was cut
into pieces does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import numpy as np

from protocol.values import events as ev
from protocol.values.effects import DetectSpeech
from protocol.values.limits import MS_PER_S
from protocol.values.model import SAMPLE16_BYTES

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

SpeechEvent = ev.SpeechStarted | ev.SpeechStopped


@attrs.define
class SpeechDetector:
    """The detector of one session.

    It starts again where the sound does not follow on what it heard: the client had turned it off,
    or the session is taken up by another server.

    Attributes:
        next_at: the client's sample that it expects.
        rest: samples that do not fill a frame yet.
        end_ms: where the last frame ends, in milliseconds of the client's sound.
        noise: power of the noise, in squares of 16-bit samples; 0 before the first frame.
        loud: which of the last frames were loud, the newest in the lowest bit.
        quiet_ms: since the last loud frame.
        is_speech: speech has begun and not ended.
    """

    next_at: int = -1
    rest: bytes = b""
    end_ms: int = 0
    noise: int = 0
    loud: int = 0
    quiet_ms: int = 0
    is_speech: bool = False

    def detect(self, effect: DetectSpeech, at_ns: int) -> Iterator[SpeechEvent]:
        """Say where speech begins and stops in a piece of sound, which is heard at `at_ns`."""
        if effect.at != self.next_at:
            self._begin(effect)
        self.next_at = effect.at + len(effect.data) // SAMPLE16_BYTES
        factor = max(int(FACTOR * 2 * effect.threshold), 2)
        for power in self._powers(effect):
            is_loud = self._is_loud(power, factor)
            self.end_ms += FRAME_MS
            self.loud = (self.loud << 1 | is_loud) & ((1 << WINDOW_FRAMES) - 1)
            self.quiet_ms = 0 if is_loud else self.quiet_ms + FRAME_MS
            if not self.is_speech and self.loud.bit_count() >= START_FRAMES:
                self.is_speech = True
                began_ms = self.end_ms - self.loud.bit_length() * FRAME_MS
                yield ev.SpeechStarted(at_ns=at_ns, at_ms=began_ms)
            elif self.is_speech and self.quiet_ms >= effect.silence_ms:
                self.is_speech, self.loud = False, 0
                yield ev.SpeechStopped(at_ns=at_ns, at_ms=self.end_ms)

    def _begin(self, effect: DetectSpeech) -> None:
        self.end_ms = effect.at * MS_PER_S // effect.rate_hz
        self.is_speech = effect.is_speech
        self.rest, self.noise, self.loud, self.quiet_ms = b"", 0, 0, 0

    def _is_loud(self, power: int, factor: int) -> bool:
        """Compare a frame with the noise, which follows it."""
        noise = self.noise or min(max(power, NOISE_MIN), FIRST_NOISE_MAX)
        if power < noise:
            self.noise = max(power, NOISE_MIN)
        else:
            self.noise = noise + (noise >> NOISE_UP_SHIFT) + 1
        return power > max(noise * factor, POWER_MIN)

    def _powers(self, effect: DetectSpeech) -> list[int]:
        size = effect.rate_hz * FRAME_MS // MS_PER_S * SAMPLE16_BYTES
        sound = self.rest + effect.data
        count = len(sound) // size
        self.rest = sound[count * size :]
        if not count:
            return []
        samples = np.frombuffer(sound[: count * size], "<i2").astype(np.int64)
        samples = samples.reshape(count, size // SAMPLE16_BYTES)
        powers: list[int] = ((samples * samples).sum(axis=1) // samples.shape[1]).tolist()
        return powers
