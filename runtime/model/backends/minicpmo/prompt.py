"""The opening of a session: instructions and reference audio.

`<|im_start|>system`, the instructions, any reference audio between its markers at ten embeddings a
second, then `<|im_end|>` without a newline (model.md). The part after these is the suffix, before
which the window `context` inserts earlier text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import torch
from torch import Tensor

from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES, Opening

from ..base import BackendRefused, ContextFull
from .parts import Parts
from .sound import samples_of
from .state import Layout
from .tokens import Tokens
from .work import Fed, Feed, Recall, Steps

BLOCK: Final = 256
"""A long prompt is fed in blocks of this many tokens: bounded memory, and always the same split."""
EMBEDDED: Final = -1
"""Marks a fed embedding in `fed_ids` (see `Opened`)."""
MALFORMED: Final = "malformed reference audio"
REFERENCE_MAX: Final = 30 * INPUT_RATE_HZ
"""Maximum samples of reference audio."""


@attrs.frozen(kw_only=True)
class Prefilled:
    """A prompt in a slot: its layout, and the ids fed, with `EMBEDDED` for embeddings."""

    layout: Layout
    fed_ids: tuple[int, ...]


def _reference(pcm: bytes) -> Tensor:
    """Convert reference audio to samples; malformed audio is a `BackendRefused`."""
    samples = samples_of(pcm, MALFORMED)
    if len(samples) > REFERENCE_MAX:
        given = len(samples)
        raise BackendRefused(f"reference audio has {given} samples, more than {REFERENCE_MAX}")
    return samples


def feed_blocks(
    slot: int, start: int, rows: Tensor, check: Callable[[], None] = lambda: None
) -> Steps[Fed]:
    """Feed rows (T, width), at least one, in blocks, and `check` before each; the last's output."""
    for block in torch.split(rows, BLOCK):
        check()
        fed: Fed = yield Feed(slot=slot, start=start, rows=block)
        start += len(block)
    return fed


def prefill(parts: Parts, tokens: Tokens, opening: Opening, slot: int) -> Steps[Prefilled]:
    """Feed the prompt into an empty slot.

    `ContextFull`: the prompt does not fit; nothing was fed. `BackendError`: the reference audio is
    malformed.
    """
    ids, embed = tokens.ids, parts.embed
    voice = opening.voice.llm_pcm
    head = (ids.im_start, *tokens.encode(f"system\n{opening.instructions}\n"))
    pooled = len(voice) // SAMPLE_BYTES * parts.config.audio.embeddings // INPUT_RATE_HZ
    limit = parts.config.context_limit
    if len(head) + pooled + 4 > limit:
        raise ContextFull(f"the prompt does not fit {limit} tokens")
    suffix: tuple[int, ...] = (ids.im_end,)
    rows, fed = [embed(head)], [*head]
    if voice:
        heard = yield Recall(pcm=_reference(voice))  # (10 a second, width)
        rows += [embed((ids.audio_start,)), heard]
        fed += [ids.audio_start, *[EMBEDDED] * len(heard)]
        suffix = (ids.audio_end, ids.im_end)
    rows.append(embed(suffix))
    whole = torch.cat(rows)
    yield from feed_blocks(slot, 0, whole)
    layout = Layout(prefix=len(whole) - len(suffix), suffix=suffix)
    return Prefilled(layout=layout, fed_ids=(*fed, *suffix))
