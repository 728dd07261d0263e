"""The time of a second of the published voice on one core, by part, and in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runtime.model.voice.encoder import LOOKAHEAD
from runtime.model.voice.vocoder import Chunk, Vocoder
from tests.voice.golden import prepared, published_vocoder

BATCHES: Final = (1, 4, 16)
CODES: Final = 25


@contextmanager
def timed(vocoder: Vocoder) -> Iterator[dict[str, float]]:
    """Add up the seconds spent in each part."""
    spent = dict.fromkeys(("encoder", "flow", "hift"), 0.0)

    def hooks(part: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(*_: Any) -> None:
            spent[part] -= time.perf_counter()

        def end(*_: Any) -> None:
            spent[part] += time.perf_counter()

        return begin, end

    handles = []
    parts = {"encoder": vocoder.flow.encoder, "flow": vocoder.flow, "hift": vocoder.hift}
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
    began = time.perf_counter()
    voice = prepared(vocoder, inputs)
    yield f"set-up of a voice, {prompt} codes: {time.perf_counter() - began:.2f} s"
    yield f"its caches: {voice.bytes / 1e6:.0f} MB"
    codes = tuple(np.resize(inputs["codes"], CODES + LOOKAHEAD).tolist())
    first = Chunk(voice=voice, turn=None, codes=codes, last=False)
    turn = vocoder.speak([first])[0].turn
    chunk = Chunk(voice=voice, turn=turn, codes=codes, last=False)
    for size in BATCHES:
        for together in (False, True)[: 1 + (size > 1)]:
            began = time.perf_counter()
            with timed(vocoder) as spent:
                spoken = vocoder.speak([chunk] * size, together=together)
            total = (time.perf_counter() - began) / size
            parts = ", ".join(f"{part} {1000 * each / size:.0f}" for part, each in spent.items())
            how = "as a batch" if together else "each by itself"
            yield f"{size} voices {how}: {1000 * total:.0f} ms a second of speech ({parts})"
            turn = spoken[0].turn
            del spoken
    assert turn is not None
    yield f"a turn's own state: {turn.own_bytes / 1e6:.0f} MB"
