"""The reference sound: our arithmetic next to librosa's and Kaldi's, and every kind of sound."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from runtime.media.sound import decode_voice
from runtime.model.backends.base import BackendRefused
from runtime.model.voice.reference import (
    CODES_FILE,
    SECONDS_MAX,
    SPEAKER_FILE,
    FrontEnd,
    Reference,
    References,
    open_network,
)
from runtime.model.voice.vocoder import Chunk, fitted
from tests.models.random_voice import CONFIG, codes, vocoder

Pcm = NDArray[np.float32]
FOLDER: Final = Path(__file__).parents[4] / "fixtures" / "voice"


def sound(rate_hz: int, seconds: float = 0.5) -> Pcm:
    """A glide, and two high tones."""
    t = np.arange(int(rate_hz * seconds)) / rate_hz
    glide = 0.3 * np.sin(2 * np.pi * (200 * t + 300 * t * t))
    high = 0.05 * np.sin(2 * np.pi * 3100 * t) + 0.02 * np.sin(2 * np.pi * 6700 * t)
    return (glide + high).astype(np.float32)


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    return FrontEnd()


@pytest.fixture(scope="module")
def references() -> References:
    networks = (open_network(FOLDER / name) for name in (CODES_FILE, SPEAKER_FILE))
    return References(*networks, vocabulary=CONFIG.codes)


@pytest.mark.parametrize(
    ("name", "rate_hz", "bound"),
    [("kaldi", 16_000, 2e-3), ("whisper", 16_000, 1e-4), ("mel", 24_000, 1e-2)],
)
def test_the_front_ends_are_those_of_the_libraries(
    front_end: FrontEnd, name: str, rate_hz: int, bound: float
) -> None:
    """The networks would see what they were never trained with; bands near the floor may vary."""
    with np.load(FOLDER / "front_end.npz") as file:
        wanted = file[name]
    found = getattr(front_end, name)(sound(rate_hz))
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < bound
    loud = wanted > wanted.max() - 6
    assert np.abs(found - wanted)[loud].max() < 1e-4


def hz_of_slaney(mel: float) -> float:
    return 200 / 3 * mel if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def test_the_filters_follow_their_formulas(front_end: FrontEnd) -> None:
    """Another version of the library that makes them would change every voice."""
    bank = front_end._mel.double()
    top = 15 + math.log(8) * 27 / math.log(6.4)
    edges = [hz_of_slaney(top * index / 81) for index in range(82)]
    for band in (0, 1, 40, 79):
        low, middle, high = edges[band : band + 3]
        hz = torch.arange(961) * 12.5
        rise, fall = (hz - low) / (middle - low), (high - hz) / (high - middle)
        wanted = torch.minimum(rise, fall).clamp_min(0) * 2 / (high - low)
        assert torch.allclose(bank[:, band], wanted.double(), atol=1e-7)

    def mel_of(hz: float) -> float:
        return 1127 * math.log(1 + hz / 700)

    step = (mel_of(8000) - mel_of(20)) / 81
    for band in (0, 1, 40, 79):
        left = mel_of(20) + band * step
        mels = torch.tensor([mel_of(31.25 * index) for index in range(257)])
        wanted = torch.minimum((mels - left) / step, (left + 2 * step - mels) / step).clamp_min(0)
        assert torch.allclose(front_end._kaldi[:, band], wanted, atol=1e-4)


def wav(samples: NDArray[Any], rate_hz: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="WAV", subtype="FLOAT")
    return file.getvalue()


def decoded(samples: NDArray[Any], rate_hz: int) -> Pcm:
    """What a session gets of a client's file."""
    return np.frombuffer(decode_voice(wav(samples, rate_hz)), "<f4")


KINDS: Final[dict[str, Callable[[], Pcm]]] = {
    "half a second": lambda: sound(16_000, 0.5),
    "six seconds": lambda: sound(16_000, 6.0),
    "thirty seconds": lambda: sound(16_000, 30.0),
    "an odd length": lambda: sound(16_000, 1.0)[:12_345],
    "silence": lambda: np.zeros(16_000, np.float32),
    "8 kHz": lambda: decoded(sound(8_000, 1.0), 8_000),
    "stereo": lambda: decoded(np.stack((sound(48_000, 1.0),) * 2, axis=1), 48_000),
    "clipped": lambda: decoded((50 * sound(16_000, 1.0)).clip(-1, 1), 16_000),
    "too loud": lambda: decoded(50 * sound(16_000, 1.0), 16_000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sound_makes_a_voice(references: References, kind: str) -> None:
    """A session would fail for its reference sound."""
    pcm = KINDS[kind]()
    found = references.read(pcm)
    seconds = min(len(pcm) / 16_000, SECONDS_MAX)
    assert abs(len(found.codes) - 25 * seconds) <= 1
    assert abs(len(found.mel) - 50 * seconds) <= 2
    assert found.mel.shape[1] == 80
    assert np.isfinite(found.mel).all()
    assert found.speaker.shape == (192,)
    small = vocoder(steps=1)
    chunk = Chunk(reference=found, turn=None, codes=codes("x", 8), last=False)
    assert np.isfinite(small.speak([chunk])[0].pcm).all()


def test_too_little_sound_is_refused(references: References) -> None:
    """A voice of a click would speak."""
    with pytest.raises(BackendRefused, match=r"reference audio of 0.25 s is below 0.5 s"):
        references.read(sound(16_000, 0.25))


class Stub:
    """A network that answers what it is told to."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def get_inputs(self) -> list[Any]:
        return open_network(FOLDER / CODES_FILE).get_inputs()

    def run(self, names: None, inputs: dict[str, Any], /) -> list[Any]:
        return [np.asarray(self._answer)]


@pytest.mark.parametrize("answer", [[[]], [[-1]], [[4224]], [[1] * 151]])
def test_codes_out_of_range_are_refused(answer: object) -> None:
    """A GPU's context would be lost, to all sessions."""
    reading = References(Stub(answer), open_network(FOLDER / SPEAKER_FILE), vocabulary=4224)
    with pytest.raises(BackendRefused, match="codes"):
        reading.read(sound(16_000))


@pytest.mark.parametrize("answer", [[0.0] * 191, [math.nan] * 192])
def test_no_speaker_is_refused(answer: object) -> None:
    """Every turn of the session would be noise."""

    class Speaker(Stub):
        def get_inputs(self) -> list[Any]:
            return open_network(FOLDER / SPEAKER_FILE).get_inputs()

    reading = References(open_network(FOLDER / CODES_FILE), Speaker(answer), vocabulary=4224)
    with pytest.raises(BackendRefused, match="192"):
        reading.read(sound(16_000))


def test_a_reference_is_known_by_its_content(references: References) -> None:
    """Two voices would be taken for one, or one computed for each session."""
    one, same = references.read(sound(16_000)), references.read(sound(16_000))
    assert one.digest == same.digest
    others = [
        Reference(codes=(1, *one.codes[1:]), mel=one.mel, speaker=one.speaker),
        Reference(codes=one.codes, mel=one.mel + 1, speaker=one.speaker),
        Reference(codes=one.codes, mel=one.mel, speaker=-one.speaker),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(("rows", "last"), [(3, 2), (5, 4), (8, 4)])
def test_a_mel_is_fitted_to_its_codes(rows: int, last: int) -> None:
    """The prompt's mel and codes would drift apart."""
    mel = np.arange(5, dtype=np.float32)[:, None].repeat(80, axis=1)
    assert fitted(mel, rows)[:, 0].tolist() == [min(row, last) for row in range(rows)]
