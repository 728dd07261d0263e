"""The opening of a session: instructions and reference audio.

`<|im_start|>system`, the instructions, the reference audio between its markers at ten embeddings a
second, then `<|im_end|>`, and no newline after (model.md). Without reference audio the markers are
left out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.model import INPUT_RATE_HZ, SAMPLE_BYTES, UNIT_SAMPLES, Opening

from ..base import BackendError, ContextFull
from .audio import EMBEDDINGS, AudioEncoder
from .layers import KvCache
from .parts import Parts
from .sound import read_pcm
from .tokens import Tokens

BLOCK: Final = 256
"""A long prompt is fed in blocks of so many tokens: bounded memory, and always the same split."""
EMBEDDED: Final = -1
"""Stands in `fed_ids` where an embedding was fed (see `Opened`)."""


def encode_reference(encoder: AudioEncoder, pcm: bytes) -> Tensor:
    """Reference audio to embeddings, in a stream of its own.

    Args:
        encoder: the audio encoder.
        pcm: float32 LE at 16 kHz.

    Returns:
        (10 a second, rounded up, width).

    Raises:
        BackendError: it is not whole finite samples.
    """
    try:
        samples = read_pcm(pcm)
    except ValueError as error:
        raise BackendError(f"malformed reference audio: {error}") from error
    rows = -(-len(samples) * EMBEDDINGS // INPUT_RATE_HZ)
    padded = np.pad(samples, (0, -len(samples) % UNIT_SAMPLES))
    carry, out = encoder.start(), []
    for second in torch.split(torch.from_numpy(padded), UNIT_SAMPLES):
        embeddings, carry = encoder.encode(second, carry)  # (10, width)
        out.append(embeddings)
    return torch.cat(out)[:rows]


def prefill_prompt(
    parts: Parts, tokens: Tokens, opening: Opening
) -> tuple[KvCache, tuple[int, ...]]:
    """Feed the prompt into a new cache.

    Args:
        parts: the weights.
        tokens: the tokenizer.
        opening: instructions and reference audio.

    Returns:
        The cache, and the ids fed with `EMBEDDED` where an embedding was.

    Raises:
        ContextFull: the prompt does not fit; nothing was fed.
        BackendError: the reference audio is malformed.
    """
    ids = tokens.ids
    head = [ids.im_start, *tokens.encode(f"system\n{opening.instructions}\n")]
    limit, seconds = parts.config.context_limit, len(opening.voice.llm_pcm) // SAMPLE_BYTES
    if len(head) + seconds * EMBEDDINGS // INPUT_RATE_HZ + 4 > limit:
        raise ContextFull(f"the prompt does not fit {limit} tokens")
    rows, fed = [parts.llm.embed(head)], list(head)
    if opening.voice.llm_pcm:
        voice = encode_reference(parts.apm, opening.voice.llm_pcm)
        marks = parts.llm.embed((ids.audio_start, ids.audio_end))
        rows += [marks[:1], voice, marks[1:]]
        fed += [ids.audio_start, *[EMBEDDED] * len(voice), ids.audio_end]
    rows.append(parts.llm.embed((ids.im_end,)))
    fed.append(ids.im_end)
    cache = KvCache(parts.config.llm)
    for block in torch.split(torch.cat(rows), BLOCK):
        parts.llm.feed(block, cache)
    return cache, tuple(fed)
