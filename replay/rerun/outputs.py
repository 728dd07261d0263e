"""Compares the model's recorded and new outputs, in the order in which one leads to the next.

    input hash, listen or speak, decided ids, fed ids, codec ids, KV length, text, PCM bytes

and then a unit's other fields. If PCM differs, its SNR separates rounding (60 dB and more) from
another utterance. Costs are measured, so they are left out. Logits are compared separately
(`logits_differ`): they can change without changing a token.

The ids of a unit that was forced (`runtime.model.backends.base`) are the recording's own; a
decision where the model's choice differs counts as the difference of ids that it would have caused.
Rounding could have turned a *near-tie*; a model that computes something else is further away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import attrs
import numpy as np

from protocol.values import model
from recorder.format.format import Value
from recorder.format.mapping import plain_of
from runtime.model.backends.base import Choice, ForcedResult

from .difference import Difference, first_difference, show

Output = TypeVar("Output", bound=attrs.AttrsInstance)

OUTPUT_FIELDS: Final[Mapping[type, tuple[str, ...]]] = {
    model.Opened: ("prompt_length", "fed_ids"),
    model.UnitResult: (
        *("input_hash", "is_listen", "decided_ids", "fed_ids", "codec_ids", "kv_length"),
        *("text", "pcm", "end_of_turn", "cut", "vision_slices", "vision_tokens"),
    ),
    model.Finalized: ("silent", "kv_length", "fed_ids"),
    model.Prefill: ("input_hash", "fed_ids", "input_tokens"),
    model.TurnChunk: ("step", "token_ids", "codec_ids", "text", "pcm"),
    model.TurnResult: (
        *("logits_hash", "margin", "generated_tokens", "codec_ids", "kv_length"),
        *("text", "calls", "pcm", "reason", "cut"),
    ),
    model.ChunkResult: (
        *("input_hash", "fed_ids", "logits_hash", "margin", "token_ids", "prompt_tokens"),
        *("generated_tokens", "kv_length", "text", "reason"),
    ),
}
"""In the order of comparison: the first that differs is nearest to the cause."""

NEAR_TIE_MARGIN: Final = 0.05
"""Logits; used at a temperature of 0: half precision changes the embedded model's by about this."""
NEAR_TIE_DRAW_GAP: Final = 0.02
"""Probability, from 1539 decisions of the embedded model.

float16 turned 3, at most 0.0007 away, and bfloat16 23, at most 0.014 away, though their logits were
up to 5 apart. Weights changed by half turned 240, most of them further away.
"""


def compare_outputs(recorded: Output, new: Output) -> Difference | None:
    """Find the first difference between two outputs of a class of `OUTPUT_FIELDS`."""
    for name in OUTPUT_FIELDS[type(recorded)]:
        found = output_difference(getattr(recorded, name), getattr(new, name), name)
        if found is not None:
            return found
    return None


def compare_forced(
    recorded: model.UnitResult, forced: ForcedResult
) -> tuple[Difference | None, Choice | None]:
    """Find the first difference of a forced result from a unit's, with its decision if any."""
    found = compare_outputs(recorded, forced.result)
    if not forced.choices:
        return found, None
    choice = forced.choices[0]
    name = "decided_ids" if choice.stage == "llm" else "codec_ids"
    order = OUTPUT_FIELDS[model.UnitResult]
    if found is not None and order.index(_root(found.path)) < order.index(name):
        return found, None
    path = f"{name}[{choice.step}]"
    parted = Difference(path=path, recorded=show(choice.recorded), came_out=show(choice.own))
    return parted, choice


def is_near_tie(choice: Choice) -> bool | None:
    """Whether rounding could have turned a decision; None if the model gives no measure."""
    if choice.margin is None and choice.draw_gap is None:
        return None
    is_near = choice.margin is not None and abs(choice.margin) <= NEAR_TIE_MARGIN
    return is_near or (choice.draw_gap is not None and choice.draw_gap <= NEAR_TIE_DRAW_GAP)


def _root(path: str) -> str:
    return path.partition("[")[0].partition(".")[0]


def logits_differ(recorded: model.UnitResult, new: model.UnitResult) -> bool:
    """Whether the logits of the first token differ, by hash or by margin."""
    return (recorded.logits_hash, recorded.margin) != (new.logits_hash, new.margin)


def output_difference(
    recorded: Value | model.Cut | model.Silent, new: Value | model.Cut | model.Silent, name: str
) -> Difference | None:
    """Find the first difference between two values of a field; bytes are float32 LE samples.

    The path of their difference names the sample.
    """
    if not isinstance(recorded, bytes) or not isinstance(new, bytes):
        return first_difference(_plain(recorded), _plain(new), name)
    if recorded == new:
        return None
    common = min(len(recorded), len(new))
    first, second = (np.frombuffer(pcm[:common], dtype=np.uint8) for pcm in (recorded, new))
    differing = np.flatnonzero(first != second)
    at = int(differing[0]) if len(differing) else common
    path = f"{name}[{at // model.SAMPLE_BYTES}]"
    return Difference(path=path, recorded=show(recorded), came_out=show(new))


def snr_db(recorded: bytes, new: bytes) -> float | None:
    """Measure in decibels how loud the recorded signal is against its difference from the new one.

    Both are float32 LE samples; the rest of the longer one counts as difference. None if the bytes
    are equal or the recorded signal is silence.
    """
    if recorded == new or len(recorded) % model.SAMPLE_BYTES or len(new) % model.SAMPLE_BYTES:
        return None
    signals = [np.frombuffer(pcm, dtype="<f4").astype(np.float64) for pcm in (recorded, new)]
    count = max(map(len, signals))
    signal, other = (np.pad(samples, (0, count - len(samples))) for samples in signals)
    with np.errstate(all="ignore"):  # PCM of a log can hold anything
        power, noise = float(np.square(signal).sum()), float(np.square(signal - other).sum())
    if not (np.isfinite(power) and np.isfinite(noise) and power > 0 and noise > 0):
        return None
    return round(10 * float(np.log10(power / noise)), 1)


def _plain(value: Value | model.Cut | model.Silent | tuple[model.ToolCall, ...]) -> Value:
    if isinstance(value, model.Cut | model.Silent):
        return plain_of(value)
    if isinstance(value, tuple):
        return [plain_of(one) if isinstance(one, model.ToolCall) else one for one in value]
    return value
