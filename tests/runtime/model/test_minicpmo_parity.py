"""The model gives what the published model gives: golden outputs of a small random checkpoint.

`fixtures/parity` holds the checkpoint, in the published layout, and what our code gave on the day
when it agreed with the public code (its README.md has the figures). Here the checkpoint is loaded
as any other, and every part and two sessions of 12 units must give the same again.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fixtures.parity.outputs import FOLDER, PLANS, UNITS, part_outputs, session_outputs
from runtime.model.backends.minicpmo.checkpoint import UNUSED, Parts, load_parts, weight_files
from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.tokens import Tokens

TOLERANCE = 1e-4
"""Most that an output may differ, in float32: another CPU adds in another order."""
PARTS = ("mel", "audio", "slice", "patches", "seen", "llm", "tts")


@pytest.fixture(scope="module")
def parts() -> Parts:
    return load_parts(load_config(FOLDER / "config.json"), FOLDER)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(FOLDER / "expected.safetensors")


@pytest.fixture(scope="module")
def given(parts: Parts) -> dict[str, Tensor]:
    return part_outputs(parts)


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(FOLDER, slots=2)


def test_the_state_dict_is_the_published_one(parts: Parts) -> None:
    """A key that drifts would make the published weights unloadable."""
    stored: dict[str, str] = {}
    for path in weight_files(FOLDER):
        with safe_open(path, framework="pt") as file:
            stored |= {key: str(file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118
    assert len(weight_files(FOLDER)) == 2
    assert stored.keys() == parts.state_dict().keys() | UNUSED
    assert set(stored.values()) == {"BF16"}
    assert {value.dtype for value in parts.state_dict().values()} == {torch.float32}


def test_every_output_is_recorded_and_only_those(
    given: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """An output that nobody compares would be free to drift."""
    assert given.keys() == expected.keys()
    assert {name.partition(".")[0] for name in expected} == {*PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_gives_what_it_gave(
    part: str, given: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """A part that computes something else makes a real checkpoint hear, see or speak worse."""
    names = [name for name in expected if name.partition(".")[0] == part]
    shapes = {name: (given[name].shape, expected[name].shape) for name in names}
    assert all(ours == recorded for ours, recorded in shapes.values()), shapes
    far = {name: float((given[name] - expected[name]).abs().max()) for name in names}
    assert max(far.values()) <= TOLERANCE, far


@pytest.mark.parametrize(("samples", "embeddings"), [(1, 0), (1280, 0), (1281, 1), (12_345, 7)])
def test_reference_audio_gives_whole_embeddings_only(
    parts: Parts, samples: int, embeddings: int
) -> None:
    """A click for reference audio must not fail, and a clip has as many rows as it was trained."""
    mel = parts.front_end.clip(torch.zeros(samples))
    assert parts.audio_projection_layer(parts.apm.reference(mel[None])).shape[1] == embeddings


def test_the_comparison_sees_a_changed_weight(expected: dict[str, Tensor]) -> None:
    """Outputs that do not depend on the weights would prove nothing about them."""
    parts = load_parts(load_config(FOLDER / "config.json"), FOLDER)
    with torch.no_grad():
        for name, weight in parts.named_parameters():
            if "projector_spk" not in name:
                weight.mul_(1.01)
    for name, value in part_outputs(parts).items():
        moved = float((value - expected[name]).abs().max()) > TOLERANCE
        assert moved != name.startswith(("mel", "slice")), name


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_session_decides_what_the_public_code_decided(model: DuplexModel, name: str) -> None:
    """Any rule of a unit that changes would change what a real model says and hears."""
    recorded = json.loads((FOLDER / "sessions.json").read_text("utf-8"))[name]
    given = session_outputs(model, PLANS[name])
    assert len(given["units"]) == UNITS
    assert given["prompt"] == recorded["prompt"]
    for index, (ours, unit) in enumerate(zip(given["units"], recorded["units"], strict=True)):
        assert ours == unit, index


def test_the_sessions_go_through_every_branch() -> None:
    """A session that only listens would prove little."""
    ids = Tokens(FOLDER).ids
    recorded = json.loads((FOLDER / "sessions.json").read_text("utf-8"))
    units = [unit for session in recorded.values() for unit in session["units"]]
    speaking = [unit for unit in units if not unit["is_listen"]]
    seen = {
        "listens": any(unit["decided"] == [ids.listen] and not unit["fed"] for unit in units),
        "speaks": any(unit["text"] and len(unit["codes"]) == 25 for unit in speaking),
        "says less than a second": any(0 < len(unit["codes"]) < 25 for unit in speaking),
        "speaks without text": any(
            len(unit["fed"]) <= 1 and unit["codes"] and not unit["end_of_turn"] for unit in speaking
        ),
        "ends a turn": any(unit["end_of_turn"] for unit in speaking),
        "is cut off by a forced listen": any(
            unit["is_listen"] and unit["fed"] == [ids.turn_eos] for unit in units
        ),
        "may not listen inside a turn": any(
            ids.listen in unit["decided"] and ids.tts_bos in unit["fed"] for unit in speaking
        ),
        "says all that it may": any(len(unit["fed"]) == 19 for unit in speaking),
        "is stopped at 28 characters": any(
            len(unit["decided"]) > len(unit["fed"])
            and unit["decided"][-1] not in (ids.chunk_eos, ids.listen, ids.chunk_tts_eos)
            for unit in speaking
        ),
        "speaks about a picture": any(unit["slices"] and unit["text"] for unit in speaking),
        "sees a picture cut up": any(unit["slices"] > 2 for unit in units),
    }
    assert all(seen.values()), [what for what, so in seen.items() if not so]
