"""The cost of a second of sound as a stream grows: ten minutes through one anchor at full speed.

Only the model runs: one utterance in one slot, on this thread, whose CPU time is the cost. The
same sound repeats every tenth of the stream, so that all parts have equal input. The rows fed to
the language model are compared with each chunk's own: its prompt and generated tokens without the
last, which is never fed. More would mean recomputed history. Only attention may grow with the
stream, up to the model's window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import numpy as np

from protocol.values.limits import NS_PER_MS
from protocol.values.model import INPUT_RATE_HZ
from protocol.values.transcript import Chunk, ChunkResult

from ...model.backends.base import ContextFull
from ...model.backends.minicpmo.model import DuplexModel
from ...model.backends.minicpmo.transcript import Transcript
from ...model.backends.minicpmo.work import Compute, Feed, Work, alone
from .material import Speech
from .output import BenchError
from .streaming_material import Phrase, quiet

PARTS: Final = 10
"""Of the stream: its minutes, if it lasts ten."""
PAUSE_SAMPLES: Final = 2 * INPUT_RATE_HZ
"""Quiet between phrases: with less, ten minutes of text would not fit into `tiny`'s context."""
WARM_CHUNKS: Final = 3
"""Of an earlier utterance: first runs are slow."""


@attrs.frozen(kw_only=True)
class Part:
    """A tenth of the stream.

    Attributes:
        chunks: seconds processed.
        cpu_ms: mean CPU per chunk.
        step_ms: mean CPU per step of the language model: a chunk's prompt, or a token.
        own: of the computed tokens, prompts and generated tokens without each chunk's last.
        kv_length: tokens in the KV cache at its end.
    """

    chunks: int
    cpu_ms: float
    step_ms: float
    computed: int
    own: int
    kv_length: int


@attrs.frozen(kw_only=True)
class FlatResult:
    """The cost of a second in each part of a long stream.

    Attributes:
        seconds: of sound processed.
        is_whole: processed to its end; else the context was full before.
        last_of_first: CPU per chunk of the last part divided by the first.
        last_of_first_step: the same of `step_ms`, which does not depend on the amount of text.
        computed_again: tokens computed beyond the chunks' own; 0 is right.
    """

    seconds: int
    is_whole: bool
    parts: list[Part]
    last_of_first: float
    last_of_first_step: float
    computed_again: int


@attrs.frozen(kw_only=True)
class _Heard:
    """A chunk: CPU, steps of the language model, tokens computed, and its own."""

    cpu_ns: int
    step_ns: int
    steps: int
    computed: int
    own: int
    kv_length: int


class _Counting:
    """Answers requests, and counts the language model's rows and their cost."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.rows = self.steps = self.step_ns = 0

    def __call__(self, works: Sequence[Work]) -> list[Any]:
        fed = [len(work.rows) for work in works if isinstance(work, Feed)]
        began_ns = time.thread_time_ns()
        answers = self._compute(works)
        if fed:
            self.rows += sum(fed)
            self.steps += 1
            self.step_ns += time.thread_time_ns() - began_ns
        return answers


def make_stream(phrases: Sequence[Phrase], seconds: int) -> Speech:
    """Join the phrases that fit, with pauses, to a loop of so many seconds, at least one."""
    samples = quiet(seconds * INPUT_RATE_HZ, 0)
    at = 0
    for phrase in phrases:
        after = at + len(phrase.samples)
        if after > len(samples):
            break
        samples[at:after] += phrase.samples
        at = after + PAUSE_SAMPLES
    return Speech(name="heldout", samples=samples)


def measure_flat(model: DuplexModel, phrases: Sequence[Phrase], seconds: int) -> FlatResult:
    """Run at least `PARTS` seconds in the first slot, empty before and after.

    `BenchError` if the model's context has no room for a stream.
    """
    speech = make_stream(phrases, max(1, seconds // PARTS))
    transcript = model.transcript(slot=0)
    try:
        heard = list(_listen(transcript, model.compute, speech, seconds))
    finally:
        transcript.release()
    if not heard:
        limit = model.info.context_limit
        raise BenchError(f"a context of {limit} tokens has no room for a stream")
    return _sum_up(heard, seconds)


def _listen(
    transcript: Transcript, compute: Compute, speech: Speech, seconds: int
) -> Iterator[_Heard]:
    """Run a short utterance, then the stream, as far as the context has room."""
    with suppress(ContextFull):
        for index in range(WARM_CHUNKS):
            _hear(transcript, compute, 0, index, speech)
        for index in range(seconds):
            yield _hear(transcript, compute, 1, index, speech)


def _hear(
    transcript: Transcript, compute: Compute, utterance: int, index: int, speech: Speech
) -> _Heard:
    chunk = Chunk(utterance=utterance, index=index, pcm=speech.second(index), seed=0)
    counting, began_ns = _Counting(compute), time.thread_time_ns()
    result: ChunkResult = alone(transcript.chunk(chunk), counting)
    return _Heard(
        cpu_ns=time.thread_time_ns() - began_ns,
        step_ns=counting.step_ns,
        steps=counting.steps,
        computed=counting.rows,
        own=result.prompt_tokens + result.generated_tokens - 1,
        kv_length=result.kv_length,
    )


def _sum_up(heard: Sequence[_Heard], seconds: int) -> FlatResult:
    parts = [
        Part(
            chunks=len(some),
            cpu_ms=round(float(np.mean([each.cpu_ns for each in some])) / NS_PER_MS, 3),
            step_ms=round(_step_ns(some) / NS_PER_MS, 3),
            computed=sum(each.computed for each in some),
            own=sum(each.own for each in some),
            kv_length=some[-1].kv_length,
        )
        for number in range(PARTS)
        if (some := heard[number * seconds // PARTS : (number + 1) * seconds // PARTS])
    ]
    first, last = parts[0], parts[-1]
    return FlatResult(
        seconds=len(heard),
        is_whole=len(heard) == seconds,
        parts=parts,
        last_of_first=round(last.cpu_ms / first.cpu_ms, 3),
        last_of_first_step=round(last.step_ms / first.step_ms, 3),
        computed_again=sum(each.computed - each.own for each in heard),
    )


def _step_ns(heard: Sequence[_Heard]) -> float:
    return sum(each.step_ns for each in heard) / sum(each.steps for each in heard)
