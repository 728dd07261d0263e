"""What our modules compute from drawn weights, next to what the public code made of the same.

`weights.py` draws weights by their names; `golden_a.npz` in `fixtures/voice` has the names, and the
public code's numbers for a voice. A deviation is the largest one of an array, over the largest
number in it.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.model.voice.checkpoint import fill_flow, fill_hift
from runtime.model.voice.config import FlowConfig
from runtime.model.voice.encoder import LOOKAHEAD
from runtime.model.voice.flow import Flow
from runtime.model.voice.hift import Hift
from runtime.model.voice.reference import Reference
from runtime.model.voice.vocoder import Chunk, Turn, Vocoder, joined

WEIGHTS: Final = Path(__file__).parent / "weights.py"
GOLDEN: Final = Path(__file__).parents[2] / "fixtures" / "voice" / "golden_a.npz"
BOUND: Final = 1e-3
"""Of a mel spectrogram, a pitch and a cache."""
SOUND_BOUND: Final = 2e-3
"""Of a source and of sound: they follow the integral of the pitch."""
STEPS_STORED: Final = 16
"""Steps that the public code's caches of the flow have room for; those after the tenth are zero."""
SAMPLES: Final = 997
"""Of a cache, that many numbers at equal distances are in the file."""


@attrs.frozen
class Deviation:
    """How far an array is from the public code's."""

    name: str
    value: float
    bound: float

    @property
    def is_small(self) -> bool:
        """Whether it is within its bound; a NaN is not."""
        return self.value <= self.bound


def load_weights(path: Path) -> ModuleType:
    """Load a file that draws weights."""
    spec = importlib.util.spec_from_file_location("drawn_weights", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(weights: ModuleType, names: NDArray[Any], prefix: str = "") -> dict[str, Tensor]:
    """Draw the weights of lines such as `conv.bias (512,)`."""
    found = dict[str, Tensor]()
    for line in names:
        name, _, shape = str(line).partition(" ")
        sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
        found[name] = torch.from_numpy(np.asarray(weights.draw(prefix + name, sizes), np.float32))
    return found


def published_flow(weights: ModuleType, golden: Mapping[str, NDArray[Any]]) -> Flow:
    """The flow at its published size."""
    return fill_flow(FlowConfig(), drawn(weights, golden["keys_flow"]))


def published_hift(weights: ModuleType, golden: Mapping[str, NDArray[Any]]) -> Hift:
    """HiFT at its published size."""
    found = drawn(weights, golden["keys_hift"], "hift.")
    return fill_hift({f"generator.{name}": tensor for name, tensor in found.items()})


def published_vocoder(
    weights: ModuleType, golden: Mapping[str, NDArray[Any]], sizes: Sequence[int] = ()
) -> Vocoder:
    """The vocoder at its published size, without noise in the source."""
    return Vocoder(
        published_flow(weights, golden),
        published_hift(weights, golden),
        seed="",
        table=torch.from_numpy(weights.flow_noise()[0].T.copy()),
        draw=lambda _, count: np.zeros(count, np.float32),
        sizes=sizes,
    )


def caches(start: Turn) -> Iterator[tuple[str, Tensor]]:
    """A voice's caches, as the public code stores them."""
    yield "conformer_cnn_cache", torch.cat((start.ahead, start.doubled)).T
    codes, frames = joined(start.code_rows), joined(start.frame_rows)
    yield "conformer_att_cache", torch.cat((torch.cat((codes, codes), dim=-2), frames))
    for name, cache in (
        ("estimator_cnn_cache", start.before.transpose(-1, -2).flatten(3, 4)),
        ("estimator_att_cache", joined(start.flow_rows)),
    ):
        missing = STEPS_STORED - len(cache)
        yield name, torch.cat((cache, cache.new_zeros(missing, *cache.shape[1:])))


class Check:
    """Compares arrays of one voice; `missing` are those of the file that were not compared."""

    def __init__(self, golden: Mapping[str, NDArray[Any]], name: str) -> None:
        self._golden, self._name = golden, name
        self.missing = {key for key in golden if key.startswith(f"{name}.")}

    def __call__(self, name: str, found: Tensor, bound: float = BOUND) -> Deviation:
        """Compare an array with the one of that name, or with samples of it."""
        name = f"{self._name}.{name}"
        self.missing.discard(name)
        wanted, flat = self._golden[name].ravel(), found.numpy().ravel()
        if flat.size != wanted.size:
            flat = flat[:: max(1, flat.size // SAMPLES)]
        assert flat.size == wanted.size, (name, found.shape, wanted.shape)
        value = float(np.abs(flat - wanted).max() / np.abs(wanted).max())
        return Deviation(name, value, bound)


def reference_of(inputs: Mapping[str, NDArray[Any]]) -> Reference:
    """The voice of a file's inputs."""
    codes = tuple(inputs["prompt"].tolist())
    return Reference(codes=codes, mel=inputs["mel"][0], speaker=inputs["speaker"][0])


def deviations(
    weights: ModuleType,
    golden: Mapping[str, NDArray[Any]],
    name: str,
    prompt: int,
    sizes: Sequence[int] = (),
) -> Iterator[Deviation]:
    """Prepare a voice, speak its codes, and compare each array with the public code's."""
    check, vocoder = Check(golden, name), published_vocoder(weights, golden, sizes)
    for array, found, bound in computed(vocoder, weights, name, prompt):
        if f"{name}.{array}" in golden:
            yield check(array, found, bound)
    yield from (Deviation(array, math.nan, BOUND) for array in sorted(check.missing))


def computed(
    vocoder: Vocoder, weights: ModuleType, name: str, prompt: int
) -> Iterator[tuple[str, Tensor, float]]:
    """All arrays of a voice, and their bounds."""
    inputs = weights.inputs(name, prompt)
    reference = reference_of(inputs)
    turn, at = vocoder.voice(reference), 0
    for cache, found in caches(turn):
        yield f"setup.{cache}", found, BOUND
    for index, size in enumerate(weights.SIZES):
        last = index == len(weights.SIZES) - 1
        codes = inputs["codes"][at : at + size + (0 if last else LOOKAHEAD)]
        at += size
        chunk = Chunk(reference=reference, turn=turn, codes=tuple(codes.tolist()), last=last)
        (spoken,) = vocoder.speak([chunk])
        frames = torch.cat((turn.mel, spoken.mel))[None]
        with torch.inference_mode():
            pitch = vocoder.hift.f0_predictor(frames.transpose(1, 2))
        yield f"{index}.mel", spoken.mel.T, BOUND
        yield f"{index}.f0", pitch, BOUND
        yield f"{index}.source", spoken.source, SOUND_BOUND
        yield f"{index}.raw", spoken.raw, SOUND_BOUND
        yield f"{index}.speech", torch.from_numpy(spoken.pcm), SOUND_BOUND
        turn = spoken.turn or turn
