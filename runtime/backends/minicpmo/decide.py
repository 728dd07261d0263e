"""The rules that turn logits into the next token of a unit (model.md, "generate").

Pure: the session feeds what is decided here. The order is the public code's: a sample of the
untempered softmax may end the chunk; then ids are forbidden, repetition and length are penalised,
listening is scaled, and the rest is sampled with temperature, top-k and top-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.model import DuplexConfig

from .sampling import choose, penalise, untempered
from .tokens import Tokens

REPETITION_PENALTY: Final = 1.05
REPETITION_WINDOW: Final = 512
CHUNK_CHARACTERS_MAX: Final = 28
"""A unit says no more: about two seconds of speech."""
DRAWS_A_STEP: Final = 2


def decide(
    logits: NDArray[np.float64],
    history: Sequence[int],
    draws: NDArray[np.float64],
    config: DuplexConfig,
    tokens: Tokens,
) -> int:
    """Choose the next token.

    Args:
        logits: (V,); changed in place.
        history: the session's decided ids; the last 512 are penalised.
        draws: two uniform numbers, for the untempered and for the tempered sample.
        config: the session's.
        tokens: the tokenizer.

    Returns:
        The id, of a control token or of text.
    """
    ids = tokens.ids
    if untempered(logits, float(draws[0])) == ids.chunk_eos:
        return ids.chunk_eos
    logits[[*tokens.forbidden, ids.chunk_eos]] = -np.inf
    logits[tokens.size :] = -np.inf
    penalise(logits, history[-REPETITION_WINDOW:], REPETITION_PENALTY)
    logits[ids.turn_eos] *= config.length_penalty
    scale = config.listen_prob_scale
    logits[ids.listen] += math.log(scale) if scale > 0 else -math.inf
    return choose(logits, float(draws[1]), config.temperature, config.top_k, config.top_p)


def fed_max(config: DuplexConfig) -> int:
    """Most tokens that a unit feeds in generate; its last iteration forces `chunk_eos`."""
    return max(1, config.max_new_speak_tokens_per_chunk - 1)
