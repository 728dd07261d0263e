"""Where a client begins and stops to speak: `DetectSpeech`.

Sound is classified in short frames, by its energy or by a trained model. Speech begins after most
of the last frames were speech, which leaves out clicks and knocks, and after the least length that
is asked for, which leaves out sounds of attention; it ends after a silence. How the sound was cut
into pieces does not matter.

The trained model is that of the package `silero-vad` (extra `antiphon[vad]`), computed by
onnxruntime. Its network is loaded once and has no state; each session has its own: what it
remembers, and the end of its sound. A second of sound in one piece takes 2 ms of a processor, frame
by frame 4: long sound would hold up the event loop, so a thread classifies it (`is_slow`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import numpy as np

from protocol.values import events as ev
from protocol.values.effects import DetectSpeech
from protocol.values.limits import MS_PER_S, NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, SAMPLE16_BYTES
from protocol.wire.audio import Resampler

from ..settings.extras import install

# -- the trained classifier ------------------------------------------------------------------------


FRAME_SAMPLES: Final = 512
CONTEXT_SAMPLES: Final = 64
"""As the network takes them, at 16 kHz."""
STATE: Final = (1, 1, 128)


class NoSileroError(ImportError):
    """The package is not installed."""


@cache
def network() -> Any:
    """Load the network; `NoSileroError`."""
    package = find_spec("silero_vad")  # which imports torch, when it is imported
    try:
        import onnxruntime
    except ImportError:
        package = None
    if package is None or not package.submodule_search_locations:
        text = f"the speech detector silero needs the extra 'vad': {install('vad')}"
        raise NoSileroError(text)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # else it warns about unused parts of its file
    path = Path(package.submodule_search_locations[0], "data", "silero_vad_16k_sequence.onnx")
    return onnxruntime.InferenceSession(path, options)


class SileroClassifier:
    """Judges one session's frames."""

    is_slow = True
    frame_ms = FRAME_SAMPLES * MS_PER_S // INPUT_RATE_HZ
    window = 6
    start = 5
    """160 of 192 ms, which music passes seldom and coughs do not."""
    tail_ms = 2 * frame_ms
    """It hears speech on after its end; a quarter of a second lasts up to 380 ms."""

    def __init__(self) -> None:
        self._resampler: Resampler | None = None
        self._rest = b""
        self._context = np.zeros(CONTEXT_SAMPLES, np.float32)
        self._state: list[Any] = [np.zeros(STATE, np.float32)] * 2

    def classify(self, effect: DetectSpeech) -> Iterable[bool]:
        """Classify the frames that a piece of sound completes."""
        if self._resampler is None:
            self._resampler = Resampler(effect.rate_hz)
        sound = self._rest + self._resampler.take(effect.data)
        size = FRAME_SAMPLES * np.dtype(np.float32).itemsize
        count = len(sound) // size
        self._rest = sound[count * size :]
        if not count:
            return []
        frames = np.frombuffer(sound[: count * size], "<f4").reshape(count, FRAME_SAMPLES)
        ends = np.vstack([self._context, frames[:, -CONTEXT_SAMPLES:]])
        self._context = ends[-1]
        given = {"input": np.hstack([ends[:-1], frames]), "h": self._state[0], "c": self._state[1]}
        found, *self._state = network().run(None, given)
        classified: list[bool] = (found > effect.threshold).tolist()
        return classified


# -- the detector ----------------------------------------------------------------------------------


FRAME_MS: Final = 20
WINDOW_FRAMES: Final = 16
"""320 ms."""
START_FRAMES: Final = 10
"""200 ms of them loud: longer than a knock or a cough's burst, shorter than a word or two."""
POWER_MIN: Final = 10_000
"""-50 dB of full scale: what is quieter is not speech into a microphone."""
NOISE_MIN: Final = 100
"""-70 dB: the noise of a quiet microphone."""
FIRST_NOISE_MAX: Final = 100_000
"""-40 dB: what begins louder is a client that speaks at once."""
NOISE_UP_SHIFT: Final = 6
"""The noise follows louder sound by a 64th a frame: twice as loud in a second."""
FACTOR: Final = 8
"""Speech is 9 dB above the noise, at a threshold of a half."""
BURST_NS: Final = 60 * NS_PER_S
PACE: Final = 2
"""So much sound is classified at once, and so many times as fast as it is spoken; more is skipped:
the sessions share a thread."""

SpeechEvent = ev.SpeechStarted | ev.SpeechStopped


class FrameClassifier(Protocol):
    """Says of each frame of a session's sound whether it is speech.

    Attributes:
        is_slow: it classifies longer sound than a frame in a thread, not on the event loop.
        frame_ms: length of a frame.
        window, start: speech begins if so many of the last frames are speech.
        tail_ms: for so long speech is heard on after its end.
    """

    is_slow: bool
    frame_ms: int
    window: int
    start: int
    tail_ms: int

    def classify(self, effect: DetectSpeech) -> Iterable[bool]:
        """Classify the frames that a piece of sound completes."""
        ...


@attrs.define
class EnergyClassifier:
    """A frame is speech if its power is well above the noise: the least that was heard lately.

    Attributes:
        rest: samples that do not fill a frame yet.
        noise: power of the noise, in squares of 16-bit samples; 0 before the first frame.
    """

    is_slow = False
    frame_ms = FRAME_MS
    window = WINDOW_FRAMES
    start = START_FRAMES
    tail_ms = 0

    rest: bytes = b""
    noise: int = 0

    def classify(self, effect: DetectSpeech) -> Iterable[bool]:
        """Classify the frames that a piece of sound completes."""
        factor = max(int(FACTOR * 2 * effect.threshold), 2)
        noise, classified = self.noise, []
        for power in self._powers(effect):
            noise = noise or min(max(power, NOISE_MIN), FIRST_NOISE_MAX)
            classified.append(power > POWER_MIN and power > noise * factor)
            if power < noise:  # which follows the frame
                noise = max(power, NOISE_MIN)
            else:
                noise += (noise >> NOISE_UP_SHIFT) + 1
        self.noise = noise
        return classified

    def _powers(self, effect: DetectSpeech) -> list[int]:
        size = effect.rate_hz * FRAME_MS // MS_PER_S * SAMPLE16_BYTES
        sound = self.rest + effect.data
        count = len(sound) // size
        self.rest = sound[count * size :]
        if not count:
            return []
        samples = np.frombuffer(sound, "<i2", count * size // SAMPLE16_BYTES).astype(np.float64)
        frames = samples.reshape(count, size // SAMPLE16_BYTES)
        # Exact: the sum of so few squares of 31 bits has far less than a float64's 53.
        energies = np.einsum("ij,ij->i", frames, frames).astype(np.int64)
        powers: list[int] = (energies // frames.shape[1]).tolist()
        return powers


@attrs.define
class SpeechDetector:
    """The detector of one session; `make` makes what classifies its frames.

    It starts again where the sound does not follow on what it heard, or where speech has ended for
    the session: the client had turned it off, or another server takes the session up.

    Attributes:
        classifier: of its frames.
        next_at: the client's sample that it expects.
        end_ms: where the last frame ends, in milliseconds of the client's sound.
        loud: which of the last frames were speech, the newest in the lowest bit.
        quiet_ms: since the last of them.
        is_speech: speech has begun and not ended.
        is_known: the session knows that it has.
        begun_ms: where speech began that is too short to be reported; None if it was reported.
        room_ns: sound that may be classified now.
        received_ns: when a piece last came.
    """

    make: Callable[[], FrameClassifier] = EnergyClassifier
    classifier: FrameClassifier = attrs.field(init=False)
    next_at: int = -1
    end_ms: int = 0
    loud: int = 0
    quiet_ms: int = 0
    is_speech: bool = False
    is_known: bool = attrs.field(default=False, eq=False)
    begun_ms: int | None = None
    room_ns: int = BURST_NS
    received_ns: int = 0

    def __attrs_post_init__(self) -> None:
        self.classifier = self.make()

    def detect(self, effect: DetectSpeech, at_ns: int) -> Iterator[SpeechEvent]:
        """Find where speech begins and stops in a piece of sound, received at `at_ns`."""
        if not self._has_room(effect, at_ns):
            self.next_at = -1
            return
        is_ended = self.is_known and self.is_speech and not effect.is_speech
        if effect.at != self.next_at or is_ended:
            self._begin(effect)
        self.is_known = effect.is_speech
        self.next_at = effect.at + len(effect.data) // SAMPLE16_BYTES
        classifier, frame_ms = self.classifier, self.classifier.frame_ms
        for is_loud in classifier.classify(effect):
            self.end_ms += frame_ms
            if not (is_loud or self.loud or self.is_speech):
                continue  # silence goes on, as most often
            self.loud = (self.loud << 1 | is_loud) & ((1 << classifier.window) - 1)
            self.quiet_ms = 0 if is_loud else self.quiet_ms + frame_ms
            if not self.is_speech and self.loud.bit_count() >= classifier.start:
                self.is_speech = True
                self.begun_ms = self.end_ms - self.loud.bit_length() * frame_ms
            if self._is_long(effect.speech_ms):
                assert self.begun_ms is not None
                yield ev.SpeechStarted(at_ns=at_ns, at_ms=self.begun_ms)
                self.begun_ms = None
            elif self.is_speech and self.quiet_ms >= effect.silence_ms:
                self.is_speech, self.loud = False, 0
                if self.begun_ms is None:
                    yield ev.SpeechStopped(at_ns=at_ns, at_ms=self.end_ms)
                self.begun_ms = None

    def is_slow(self, effect: DetectSpeech) -> bool:
        """Whether a piece goes to a thread: the hop there costs as much as classifying a frame."""
        length_ms = len(effect.data) // SAMPLE16_BYTES * MS_PER_S // effect.rate_hz
        return self.classifier.is_slow and length_ms > self.classifier.frame_ms

    def _is_long(self, least_ms: int) -> bool:
        """Whether speech that was not reported has become long enough."""
        if self.begun_ms is None:
            return False
        length_ms = self.end_ms - self.quiet_ms - self.begun_ms
        return length_ms - self.classifier.tail_ms * bool(least_ms) >= least_ms

    def _has_room(self, effect: DetectSpeech, at_ns: int) -> bool:
        """Take the room of a piece, if there is enough."""
        length_ns = len(effect.data) // SAMPLE16_BYTES * NS_PER_S // effect.rate_hz
        self.room_ns = min(self.room_ns + PACE * (at_ns - self.received_ns), BURST_NS)
        self.received_ns = at_ns
        has_room = length_ns <= self.room_ns
        self.room_ns -= length_ns * has_room
        return has_room

    def _begin(self, effect: DetectSpeech) -> None:
        self.classifier = self.make()
        self.end_ms = effect.at * MS_PER_S // effect.rate_hz
        self.is_speech = effect.is_speech
        self.loud = self.quiet_ms = 0
        self.begun_ms = None
