"""How far a device's numbers are off those of a CPU in fp32, for one session of the same weights.

The CPU runs the session by itself; the device is made to decide the same, so that every request of
one has its twin in the other. A number is ||device - cpu|| / ||cpu|| of one answer.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from protocol.values.model import DuplexConfig, Opening, Unit, UnitResult, Voice
from runtime.commands.bench import camera_frame, load_speech
from runtime.model.backends.base import Forced
from runtime.model.backends.minicpmo.batched import ON_CPU, ComputeOptions, options_for
from runtime.model.backends.minicpmo.checkpoint import Parts, build_parts
from runtime.model.backends.minicpmo.config import ModelConfig
from runtime.model.backends.minicpmo.logits import CodeLogits, shortlists_on
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.backends.minicpmo.work import LlmOutput, Work
from tests.models.blocking import alone
from tests.models.full_shape import Mute, randomize

UNITS: Final = 4
SEES: Final = 2
"""From this unit on, each has a picture."""
SLOTS: Final = 2
CPU: Final = torch.device("cpu")

Answers = dict[str, list[Tensor]]


class Kept(ModelRunner):
    """A machine that keeps a copy of what it answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.answers: Answers = defaultdict(list)
        super().__init__(*args, **options)
        self.answers.clear()  # Of what it tried when it was made.

    def compute(self, works: Sequence[Work]) -> list[Any]:
        """As `ModelRunner.compute`."""
        found = super().compute(works)
        for work, answer in zip(works, found, strict=True):
            kept = answer.whole() if isinstance(answer, CodeLogits) else answer
            kept = answer.hidden if isinstance(answer, LlmOutput) else kept
            if isinstance(kept, Tensor):
                self.answers[type(work).__name__].append(kept.float().cpu().clone())
                if isinstance(answer, LlmOutput):
                    self.answers["logits"].append(answer.logits.whole().clone())
        return found


def model_of(
    parts: Parts, tokens: Tokens, device: torch.device, options: ComputeOptions
) -> tuple[DuplexModel, Kept]:
    """A model of parts on a device, and its machine."""
    runner = Kept(parts, Mute(), SLOTS, shortlists_on(device, tokens), options=options)
    return DuplexModel.of(runner, tokens, {}), runner


def played(model: DuplexModel, results: Sequence[UnitResult] = ()) -> Iterator[UnitResult]:
    """Play a session that speaks in every unit, as it was before if `results` say so."""
    config = DuplexConfig(force_listen_count=0, listen_prob_scale=0.0, length_penalty=10.0)
    opening = Opening(instructions="Answer what you hear.", voice=Voice(), config=config, seed=1)
    session, speech, frame = model.session(opening, slot=0), load_speech(), camera_frame(0)
    alone(session.open(), model.compute)
    for index in range(UNITS):
        frames = (frame,) if index >= SEES else ()
        unit = Unit(index=index, pcm=speech.second(index), frames=frames)
        if results:
            steps = session.forced_unit(unit, None, Forced.of(results[index]))
            yield alone(steps, model.compute).result
        else:
            yield alone(session.unit(unit, None), model.compute)
        alone(session.finalize(index, interrupted=False), model.compute)
    session.release()


def agreement(
    config: ModelConfig, tokenizer: Path, device: torch.device, dtypes: Sequence[torch.dtype]
) -> dict[str, dict[str, float]]:
    """The largest differences by format and by kind of answer; weights are random.

    Also those of the stock model on the device, row by row: what the format itself costs.
    """
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    tokens, made = Tokens(tokenizer), {}
    for dtype in sorted(dtypes, key=lambda each: each.itemsize):
        theirs = build_parts(config, dtype, device)
        randomize(theirs)
        ours = copy.deepcopy(theirs).to(CPU, torch.float32)
        model, cpu = model_of(ours, tokens, CPU, ON_CPU)
        results = list(played(model))
        name = str(dtype).removeprefix("torch.")
        for way, options in (
            ("stock", ComputeOptions()),
            ("own", options_for(device, SLOTS, exact=False)),
        ):
            model, other = model_of(theirs, tokens, device, options)
            list(played(model, results))
            found = {}
            for kind, answers in cpu.answers.items():
                pairs = zip(answers, other.answers[kind], strict=True)
                off = [float((a - b).norm() / a.norm()) for a, b in pairs]
                found[kind] = max(off)
            made[f"{name}, {way}"] = found
        del theirs, ours, model, cpu, other
    return made
