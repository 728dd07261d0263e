"""The rules that turn logits into the next token of a unit, and the next code of its speech.

Pure: `unit.py` feeds what is decided here. The order is the public code's (model.md, "generate"): a
sample of the untempered softmax may end the chunk; then ids are forbidden, repetition and length
are penalised, listening is scaled, and the rest is sampled with temperature, top-k and top-p.

An answer of chat has rules of its own (`decide_chat`, `decide_chat_code`); they are the public
code's too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.model import DuplexConfig
from protocol.turn import ChatConfig

from .sampling import choose, untempered
from .tokens import Tokens

REPETITION_PENALTY: Final = 1.05
REPETITION_WINDOW: Final = 512
CHUNK_CHARACTERS: Final = 28
"""A token that would bring a unit's text to so many characters ends it: two seconds of speech."""
DRAWS_A_STEP: Final = 2

CODE_TEMPERATURE: Final = 0.8
CODE_PENALTY: Final = 1.05
CODE_WINDOW: Final = 16
CHAT_WINDOW: Final = 128
"""Generated ids of an answer of chat that are penalised."""
CHAT_CODE_TOP_K: Final = 25
CHAT_CODE_TOP_P: Final = 0.85

Logits = NDArray[np.float64]


def decide(
    logits: Logits, history: Sequence[int], draws: Logits, config: DuplexConfig, tokens: Tokens
) -> int:
    """Choose the next token.

    Args:
        logits: (V,); changed in place.
        history: the session's decided ids; the last 512 are penalised.
        draws: two uniform numbers, for the untempered and for the tempered sample.
        config: the session's; a temperature of 0 takes the most likely token in both.
        tokens: the tokenizer.

    Returns:
        The id, of a control token or of text.
    """
    ids = tokens.ids
    greedy = config.temperature == 0
    first = int(logits.argmax()) if greedy else untempered(logits, float(draws[0]))
    if first == ids.chunk_eos:
        return ids.chunk_eos
    logits[[*tokens.forbidden, ids.chunk_eos]] = -np.inf
    logits[tokens.size :] = -np.inf
    # Divided whatever the sign, as the public code has it.
    logits[sorted(set(history[-REPETITION_WINDOW:]))] /= REPETITION_PENALTY
    turn_eos = logits[ids.turn_eos]
    logits[ids.turn_eos] *= 1 / config.length_penalty if turn_eos > 0 else config.length_penalty
    scale = config.listen_prob_scale
    logits[ids.listen] += math.log(scale) if scale > 0 else -math.inf
    return choose(logits, float(draws[1]), config.temperature, config.top_k, config.top_p)


def fed_max(config: DuplexConfig) -> int:
    """Most tokens that a unit feeds in generate; its last iteration forces `chunk_eos`."""
    return config.max_new_speak_tokens_per_chunk - 1


def decide_code(
    logits: Logits, chunk: Sequence[int], draw: float, eos: int, *, may_end: bool
) -> int:
    """Choose the next speech code.

    Args:
        logits: (codes,); changed in place.
        chunk: the unit's codes so far; the last 16 are penalised, as often as they occur.
        draw: a uniform number.
        eos: the code that ends speech.
        may_end: speech may end here.

    Returns:
        The code.
    """
    logits /= CODE_TEMPERATURE
    _penalise(logits, chunk)
    if not may_end:
        logits[eos] = -np.inf
    return untempered(logits, draw)


def _penalise(logits: Logits, codes: Sequence[int]) -> None:
    for code, count in Counter(codes[-CODE_WINDOW:]).items():
        logits[code] *= CODE_PENALTY ** (count if logits[code] < 0 else -count)


def decide_chat(
    logits: Logits,
    generated: Sequence[int],
    draw: float,
    config: ChatConfig,
    tokens: Tokens,
    *,
    spoken: bool,
) -> int:
    """Choose the next token of an answer of chat.

    Args:
        logits: (V,); changed in place.
        generated: the answer's ids so far; the last 128 are penalised.
        draw: a uniform number.
        config: the turn's; a temperature of 0 takes the most likely token.
        tokens: the tokenizer.
        spoken: speech is asked for: ids that cannot be spoken are forbidden.

    Returns:
        The id; one of `tokens.endings` ends the answer.
    """
    endings = sorted(tokens.endings)
    if spoken:
        logits[[index for index in tokens.forbidden if index not in tokens.endings]] = -np.inf
    logits[tokens.size :] = -np.inf
    recent = sorted(set(generated[-CHAT_WINDOW:]))
    logits[recent] = _lowered(logits[recent], config.repetition_penalty)
    logits[endings] = _lowered(logits[endings], config.length_penalty)
    return choose(logits, draw, config.temperature, config.top_k, config.top_p)


def _lowered(logits: Logits, penalty: float) -> Logits:
    """Logits made less likely, whatever their sign, by a penalty above 1."""
    return np.where(logits > 0, logits / penalty, logits * penalty)


def decide_chat_code(logits: Logits, codes: Sequence[int], draw: float) -> int:
    """Choose the next speech code of an answer of chat; speech may end at any.

    Args:
        logits: (codes,); changed in place.
        codes: the answer's so far; the last 16 are penalised, as often as they occur.
        draw: a uniform number.

    Returns:
        The code.
    """
    logits /= CODE_TEMPERATURE
    _penalise(logits, codes)
    return choose(logits, draw, 1.0, CHAT_CODE_TOP_K, CHAT_CODE_TOP_P)
