"""The modules at their published size, next to the public code's numbers.

The encoder and HiFT are quick; the flow and a whole turn take a minute, and run in `make soak`, as
by `python -m tests.voice`. In `make test` a small flow is held to the numbers that it gave when the
published one met the public code's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.model.voice.config import SILENT_CODE, FlowConfig
from runtime.model.voice.encoder import LOOKAHEAD, Encoder, Past
from runtime.model.voice.vocoder import Chunk
from tests.models.random_voice import codes, reference, vocoder
from tests.voice.__main__ import main
from tests.voice.golden import (
    GOLDEN,
    SOUND_BOUND,
    WEIGHTS,
    Check,
    drawn,
    load_weights,
    published_hift,
)

Golden = Mapping[str, NDArray[Any]]


def last_mel(prompt: int) -> NDArray[np.float32]:
    """The last mel frames of a small voice's turn, long enough that each cache is cut."""
    small, voice, turn = vocoder(), reference("small", prompt), None
    for index, size in enumerate((28, 28, 9, 28, 28)):
        chunk = Chunk(
            reference=voice, turn=turn, codes=codes(f"small {index}", size), last=index == 4
        )
        (spoken,) = small.speak([chunk])
        turn = spoken.turn
    return spoken.mel.numpy()


@pytest.fixture(scope="module")
def golden() -> Golden:
    with np.load(GOLDEN, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def weights() -> ModuleType:
    return load_weights(WEIGHTS)


def test_hift_gives_the_published_sound(golden: Golden, weights: ModuleType) -> None:
    """A voice would sound other than published."""
    hift, check = published_hift(weights, golden), Check(golden, "a")
    with torch.inference_mode():
        hift.prepare()
        mel = torch.from_numpy(golden["a.4.mel"]).transpose(1, 2)  # (1, 22, 80)
        before = torch.from_numpy(golden["a.3.mel"]).transpose(1, 2)[:, -8:]
        mel = torch.cat((before, mel), dim=1)
        kept = torch.from_numpy(golden["a.3.source"])[0, :, -3840:]
        pitch = hift.f0_predictor(mel.transpose(1, 2))
        source = hift.source(mel, torch.zeros(1, 480 * mel.shape[1]))
        source[:, :3840] = kept
        found = [
            check("4.f0", pitch),
            check("4.source", source, SOUND_BOUND),
            check("4.raw", hift(mel, source), SOUND_BOUND),
        ]
    assert [one for one in found if not one.is_small] == []


def test_the_encoder_gives_the_published_caches(golden: Golden, weights: ModuleType) -> None:
    """A voice would sound other than published."""
    lines = [line for line in golden["keys_flow"] if str(line).startswith("encoder.")]
    state = drawn(weights, lines)
    encoder = Encoder(FlowConfig().encoder).requires_grad_(False)
    encoder.load_state_dict({name.removeprefix("encoder."): x for name, x in state.items()})
    table = torch.from_numpy(weights.draw("input_embedding.weight", (6561, 512)))
    codes = [*weights.inputs("a")["prompt"].tolist(), *(SILENT_CODE,) * LOOKAHEAD]
    nothing = [torch.zeros(1, 8, 0, 128)]
    past = Past(
        ahead=torch.zeros(1, 2, 512),
        doubled=torch.zeros(1, 4, 512),
        codes=6 * nothing,
        frames=4 * nothing,
    )
    with torch.inference_mode():
        encoder.prepare()
        found = encoder(table[codes][None], past, last=False)
    check, twice = Check(golden, "a"), torch.cat((found.codes, found.codes), dim=-2)
    for name, cache in (
        ("conformer_cnn_cache", torch.cat((found.ahead, found.doubled), dim=1)[0].T),
        ("conformer_att_cache", torch.cat((twice, found.frames), dim=1)[0]),
    ):
        assert check(f"setup.{name}", cache).is_small


@pytest.mark.parametrize("prompt", [3, 30, 60])
def test_a_small_flow_gives_what_it_gave(prompt: int) -> None:
    """The flow would change, at sizes other than the published, or after its caches are cut."""
    with np.load(GOLDEN.parent / "small.npz", allow_pickle=False) as file:
        wanted = file[f"{prompt}"]
    assert np.abs(last_mel(prompt) - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.soak
def test_every_array_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A voice would sound other than published, from one of its turn's chunks on."""
    assert main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 29


def test_a_deviation_is_reported(golden: Golden) -> None:
    """The check would pass whatever is computed."""
    check, mel = Check(golden, "a"), torch.from_numpy(golden["a.0.mel"])
    assert check("0.mel", mel).is_small
    assert not check("0.mel", mel * 1.002).is_small
    assert not check("0.mel", mel * torch.nan).is_small
