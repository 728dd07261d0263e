"""The CPU time of a second of the published voice, by part, and in batches; one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from runtime.model.voice.encoder import LOOKAHEAD
from runtime.model.voice.vocoder import Chunk, Vocoder, VoiceSteps
from tests.voice.golden import published_vocoder, reference_of

BATCHES: Final = (1, 4, 16)
CODES: Final = 25


@contextmanager
def timed(vocoder: Vocoder) -> Iterator[dict[str, float]]:
    """Add up the seconds spent in each part."""
    spent = dict.fromkeys(("encoder", "flow", "hift"), 0.0)

    def hooks(part: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(*_: Any) -> None:
            spent[part] -= time.process_time()

        def end(*_: Any) -> None:
            spent[part] += time.process_time()

        return begin, end

    handles = []
    parts: dict[str, nn.Module] = {
        "encoder": vocoder.flow.encoder,
        "flow": vocoder.flow,
        "hift": vocoder.hift,
    }
    for part, module in {**parts, "pitch": vocoder.hift.f0_predictor}.items():
        begin, end = hooks("hift" if part == "pitch" else part)
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def figures(
    weights: ModuleType, golden: Mapping[str, NDArray[Any]], name: str, prompt: int
) -> Iterator[str]:
    """Measure, a line each."""
    vocoder, inputs = published_vocoder(weights, golden), weights.inputs(name, prompt)
    in_steps = VoiceSteps(vocoder.flow, vocoder.hift, BATCHES)
    began = time.process_time()
    reference = reference_of(inputs)
    voice = vocoder.voice(reference)
    yield f"set-up of a voice, {prompt} codes: {time.process_time() - began:.2f} s"
    yield f"its caches: {voice.bytes_of(shared=True) / 1e6:.0f} MB"
    codes = tuple(np.resize(inputs["codes"], CODES + LOOKAHEAD).tolist())
    first = Chunk(reference=reference, turn=None, codes=codes, last=False)
    turn = vocoder.speak([first])[0].turn
    chunk = Chunk(reference=reference, turn=turn, codes=codes, last=False)
    for steps, size in ((steps, size) for size in BATCHES for steps in (None, in_steps)):
        vocoder.steps, began = steps, time.process_time()
        with timed(vocoder) as spent:
            spoken = vocoder.speak([chunk] * size)
        total = (time.process_time() - began) / size
        parts = ", ".join(f"{part} {1000 * each / size:.0f}" for part, each in spent.items())
        how = "each by itself" if steps is None else "as on a GPU, in a step"
        yield f"{size}, {how}: {1000 * total:.0f} ms a second of speech and voice ({parts})"
        turn = spoken[0].turn
        del spoken
    assert turn is not None
    yield f"a turn's own state: {turn.bytes_of(shared=False) / 1e6:.0f} MB"
