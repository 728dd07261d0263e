"""The speech detector: what it takes for speech, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import soxr
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.effects import DetectSpeech
from protocol.values.events import SpeechStarted
from protocol.values.limits import NS_PER_S
from runtime.media.speech_detector import (
    FRAME_MS,
    EnergyClassifier,
    FrameClassifier,
    SileroClassifier,
    SpeechDetector,
)
from tests.generated.clients import tape

RATE_HZ: Final = 16_000
"""The fixtures' own; the detector's constants are times, not samples."""
PIECE: Final = RATE_HZ * FRAME_MS // 1000 * 2

SILENCE_MS: Final = 500

Sound = npt.NDArray[np.float64]
Edge = tuple[str, int]


@attrs.define
class Ear:
    """A client's sound, and what is found in it."""

    detector: SpeechDetector = attrs.Factory(SpeechDetector)
    at: int = 0
    at_ns: int = 0
    rate_hz: int = RATE_HZ

    def hear(
        self,
        data: bytes,
        *,
        threshold: float = 0.5,
        silence_ms: int = SILENCE_MS,
        speech_ms: int = 0,
        is_speech: bool | None = None,
    ) -> list[Edge]:
        """Go on with sound; returns where speech begins and ends, in milliseconds."""
        effect = DetectSpeech(
            at=self.at,
            rate_hz=self.rate_hz,
            data=data,
            threshold=threshold,
            silence_ms=silence_ms,
            is_speech=self._knows_speech if is_speech is None else is_speech,
            speech_ms=speech_ms,
        )
        self.at += len(data) // 2
        found = self.detector.detect(effect, self.at_ns)
        return [("began" if isinstance(it, SpeechStarted) else "ended", it.at_ms) for it in found]

    @property
    def _knows_speech(self) -> bool:
        """Whether the session was told that speech has begun."""
        return self.detector.is_speech and self.detector.begun_ms is None


def pcm16(sound: Sound) -> bytes:
    """Samples of -32768 to 32767, as sent."""
    return sound.clip(-32768, 32767).astype("<i2").tobytes()


def steady(seed: int) -> Sound:
    """Ten seconds without a voice: hiss, a fan or a hum, from silence to loud."""
    draw = np.random.default_rng(seed)
    white = draw.normal(0, 1, 10 * RATE_HZ)
    level = 10 ** draw.uniform(0.3, 2.7)
    match seed % 3:
        case 0:
            return white * level
        case 1:
            waves = np.fft.rfft(white)
            fan = np.fft.irfft(waves / np.sqrt(np.arange(1, len(waves) + 1)), len(white))
            return fan / fan.std() * level
    hum = np.sin(2 * np.pi * draw.choice([50, 60, 100]) * np.arange(len(white)) / RATE_HZ)
    return hum * level + white * 30


@pytest.mark.parametrize("seed", range(30))
def test_steady_noise_is_no_speech(seed: int) -> None:
    """A fan would interrupt the model."""
    assert Ear().hear(pcm16(steady(seed))) == []


@pytest.mark.parametrize("voice", range(8))
def test_who_asks_and_waits_is_heard_each_time(voice: int) -> None:
    """A question would have no item, or the model would speak on while it is interrupted."""
    sound = np.frombuffer(tape(voice), "<f4").astype(np.float64) * 32767
    found, told = [], []
    ear = Ear()
    data = pcm16(sound)
    for at in range(0, len(data), PIECE):
        edges = ear.hear(data[at : at + PIECE])
        found += edges
        told += [(at + PIECE) * 1000 / RATE_HZ / 2 - ms for kind, ms in edges if kind == "began"]
    assert [kind for kind, _ in found[:6]] == ["began", "ended"] * 3
    assert max(told) <= 400, "it is told later than its begin by more than its first words"
    for (_, began), (_, ended) in zip(found[::2], found[1::2], strict=False):
        spoken = sound[began * RATE_HZ // 1000 : (ended - SILENCE_MS) * RATE_HZ // 1000]
        silence = sound[(ended - SILENCE_MS) * RATE_HZ // 1000 : ended * RATE_HZ // 1000]
        assert np.square(spoken).mean() > 20 * np.square(silence).mean()


def test_a_knock_is_no_speech() -> None:
    """A user who puts a cup down would stop the model."""
    sound = np.random.default_rng(1).normal(0, 20, 5 * RATE_HZ)
    for at in range(RATE_HZ, 5 * RATE_HZ, RATE_HZ):
        burst = np.random.default_rng(at).normal(0, 9000, RATE_HZ // 10)
        sound[at : at + len(burst)] += burst * np.exp(-np.arange(len(burst)) / 400)
    assert Ear().hear(pcm16(sound)) == []


def test_a_higher_threshold_needs_louder_speech() -> None:
    """A client in a loud room could not set it."""
    noise = np.random.default_rng(1).normal(0, 300, 2 * RATE_HZ)
    voice = np.random.default_rng(2).normal(0, 1000, RATE_HZ)
    data = pcm16(np.concatenate([noise, voice, noise]))
    assert [kind for kind, _ in Ear().hear(data)] == ["began", "ended"]
    assert Ear().hear(data, threshold=1.0) == []


def test_its_end_is_after_the_silence_that_was_asked_for() -> None:
    """A client that wants long pauses would be cut off in each."""
    quiet = np.random.default_rng(1).normal(0, 20, 3 * RATE_HZ)
    voice = np.random.default_rng(2).normal(0, 2000, RATE_HZ)
    data = pcm16(np.concatenate([quiet, voice, quiet]))
    for silence_ms in (200, 1000):
        edges = Ear().hear(data, silence_ms=silence_ms)
        assert edges == [("began", 3000), ("ended", 4000 + silence_ms)]


def voice(seconds: float) -> bytes:
    """Two seconds of quiet, a voice, and two of quiet."""
    quiet = np.random.default_rng(1).normal(0, 20, 2 * RATE_HZ)
    loud = np.random.default_rng(2).normal(0, 2000, int(seconds * RATE_HZ))
    return pcm16(np.concatenate([quiet, loud, quiet]))


@pytest.mark.parametrize(("speech_ms", "is_told"), [(0, True), (240, True), (350, False)])
def test_shorter_speech_than_is_asked_for_is_not_told(speech_ms: int, is_told: bool) -> None:
    """The model would fall silent at each mm-hm."""
    edges = [("began", 2000), ("ended", 2240 + SILENCE_MS)] if is_told else []
    assert Ear().hear(voice(0.24), speech_ms=speech_ms) == edges
    assert Ear().hear(voice(0.24) + voice(0.3), speech_ms=speech_ms)[2:] == (
        [("began", 6240), ("ended", 6540 + SILENCE_MS)] if is_told else []
    )


def test_speech_is_told_once_it_is_long_enough() -> None:
    """A user who interrupts would wait for the end of the own sentence."""
    ear, told = Ear(), []
    data = voice(1)
    for at in range(0, len(data), PIECE):
        told += [
            (at + PIECE) / 2 * 1000 / RATE_HZ
            for _ in ear.hear(data[at : at + PIECE], speech_ms=350)
        ]
    assert told == [2360, 3000 + SILENCE_MS]


def test_speech_that_was_too_short_is_told_when_any_will_do() -> None:
    """A user who speaks as the model ends would not be heard."""
    ear, data = Ear(), voice(1)
    half = RATE_HZ * 2 * 23 // 10 // PIECE * PIECE
    assert ear.hear(data[:half], speech_ms=350) == []
    assert ear.hear(data[half:]) == [("began", 2000), ("ended", 3000 + SILENCE_MS)]


@given(cuts=st.lists(st.integers(0, 4000), max_size=30), voice=st.integers(0, 3))
def test_how_sound_is_cut_does_not_matter(cuts: list[int], voice: int) -> None:
    """A client's pieces would decide what is heard, or a replay of a redacted log would."""
    sound = np.frombuffer(tape(voice), "<f4")[: 8 * RATE_HZ].astype(np.float64) * 32767
    data, at = pcm16(sound), 0
    ear, edges = Ear(), list[Edge]()
    for cut in cuts:
        edges += ear.hear(data[at : at + 2 * cut])
        at += 2 * cut
    edges += ear.hear(data[at:])
    whole = Ear()
    assert edges == whole.hear(data)
    assert ear == whole


def test_a_detector_that_is_new_knows_that_the_client_speaks() -> None:
    """A session that another server takes up would hear its client begin twice, or never end."""
    quiet = np.random.default_rng(1).normal(0, 20, RATE_HZ)
    voice = np.random.default_rng(2).normal(0, 2000, RATE_HZ)
    ear = Ear()
    assert ear.hear(pcm16(np.concatenate([quiet, voice]))) == [("began", 1000)]
    new = Ear(SpeechDetector(is_speech=True), ear.at)
    assert new.hear(pcm16(np.concatenate([voice, quiet]))) == [("ended", 3000 + SILENCE_MS)]


def test_speech_that_ended_for_the_session_can_begin_again() -> None:
    """A client that turns detection off and on again would be heard no more; or told twice."""
    voice = pcm16(np.random.default_rng(2).normal(0, 2000, RATE_HZ))
    ear = Ear()
    assert ear.hear(bytes(2 * RATE_HZ) + voice) == [("began", 1000)]
    assert ear.hear(voice, is_speech=False) == []  # its event is on the way
    assert ear.hear(voice, is_speech=True) == []
    assert [kind for kind, _ in ear.hear(voice * 2 + bytes(RATE_HZ), is_speech=False)] == [
        "began",
        "ended",
    ]


def test_sound_that_comes_too_fast_is_not_searched() -> None:
    """One client could keep all sessions from being served."""
    voice, quiet = pcm16(np.random.default_rng(2).normal(0, 2000, RATE_HZ)), bytes(2 * RATE_HZ)
    ear, found = Ear(), list[int]()
    for _ in range(100):
        found.append(len(ear.hear(voice + quiet)))
    assert found == [2] * 30 + [0] * 70
    ear.at_ns += 3 * NS_PER_S
    found = [len(ear.hear(voice + quiet)) for _ in range(4)]
    assert found == [2, 2, 2, 0]


def test_sound_that_was_not_heard_counts() -> None:
    """A client that turns detection off for a while would be told of wrong places."""
    voice = np.random.default_rng(2).normal(0, 2000, RATE_HZ)
    ear = Ear()
    ear.hear(bytes(2 * RATE_HZ))
    ear.at += 3 * RATE_HZ
    ear.hear(bytes(2 * RATE_HZ))
    assert ear.hear(pcm16(voice)) == [("began", 5000)]


def said(rate_hz: int = RATE_HZ) -> bytes:
    """A second of silence, and a question."""
    sound = np.frombuffer(tape(1), "<f4")[: 6 * RATE_HZ].astype(np.float64) * 32767
    return pcm16(soxr.resample(sound, RATE_HZ, rate_hz) if rate_hz != RATE_HZ else sound)


def coughs() -> bytes:
    """Loud and short, without a voice."""
    draw = np.random.default_rng(1)
    sound = draw.normal(0, 60, 5 * RATE_HZ)
    for at in range(RATE_HZ, 5 * RATE_HZ, RATE_HZ):
        burst = draw.normal(0, 5000, RATE_HZ // 3)
        sound[at : at + len(burst)] += burst * np.exp(-np.arange(len(burst)) / 1300)
    return pcm16(sound)


@pytest.mark.parametrize(
    ("classifier", "found"),
    [(EnergyClassifier, ["began", "ended"]), (SileroClassifier, list[str]())],
)
def test_a_trained_model_takes_no_cough_for_speech(
    classifier: Callable[[], FrameClassifier], found: list[str]
) -> None:
    """A user with a cold could not hear an answer to its end."""
    edges = Ear(SpeechDetector(classifier)).hear(coughs())
    assert [kind for kind, _ in edges][: len(found) or None] == found


@pytest.mark.parametrize("rate_hz", [8000, 16_000, 24_000])
def test_a_trained_model_hears_at_any_rate(rate_hz: int) -> None:
    """A telephone would never interrupt."""
    data = said(rate_hz)
    whole = Ear(SpeechDetector(SileroClassifier), rate_hz=rate_hz).hear(data)
    assert [kind for kind, _ in whole][:2] == ["began", "ended"]
    energy = Ear(rate_hz=rate_hz).hear(data)
    assert abs(whole[0][1] - energy[0][1]) <= 400
    ear, edges = Ear(SpeechDetector(SileroClassifier), rate_hz=rate_hz), list[Edge]()
    for at in range(0, len(data), 2 * 333):
        edges += ear.hear(data[at : at + 2 * 333])
    assert edges == whole


def test_two_sessions_do_not_hear_each_other() -> None:
    """The trained model is one for all sessions: what it remembers is not."""
    expected = Ear(SpeechDetector(SileroClassifier)).hear(said())
    one, other, edges = (
        Ear(SpeechDetector(SileroClassifier)),
        Ear(SpeechDetector(SileroClassifier)),
        [],
    )
    data, noise = said(), coughs()
    for at in range(0, len(data), 2 * 800):
        edges += one.hear(data[at : at + 2 * 800])
        other.hear(noise[at : at + 2 * 800])
    assert edges == expected
