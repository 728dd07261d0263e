"""The rules that turn logits into the next token of a unit, and the next code of its speech.

Pure: `unit.py` feeds the decisions. The order is the public code's (model.md, "generate"): an
untempered softmax sample may end the chunk; then ids are forbidden, repetition and length are
penalised, listening is scaled, and the rest is sampled with temperature, top-k and top-p. Chat has
the public code's rules too; streaming requests are sampled plainly. Logits, (V,) of tokens and
(codes,) of codes, are changed in place, except by `tokens_apart` and `leaning`; draws are uniform
in [0, 1). If a shortlist of `Candidates` does not suffice, the rules of tokens raise
`TooShortError`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.values.model import ChatConfig, DuplexConfig

from ..forcing import Leaning
from ..streams import SamplingParams
from .candidates import Candidates
from .sampling import choose, choose_gap, untempered, untempered_gap, untempered_room
from .tokens import Tokens

REPETITION_PENALTY: Final = 1.05
REPETITION_WINDOW: Final = 512
CHUNK_CHARACTERS: Final = 28
"""A token that would bring a unit's text to this length ends it: two seconds of speech."""
DRAWS_A_STEP: Final = 2

CODE_TEMPERATURE: Final = 0.8
CODE_PENALTY: Final = 1.05
CODE_WINDOW: Final = 16
CHAT_WINDOW: Final = 128
"""Generated ids of a chat answer that are penalised."""
CHAT_CODE_TOP_K: Final = 25
CHAT_CODE_TOP_P: Final = 0.85

Logits = NDArray[np.float64]


def decide(
    logits: Candidates, history: Sequence[int], draws: Logits, config: DuplexConfig, tokens: Tokens
) -> int:
    """Choose the next token, a control token or text.

    `history` has the session's decided ids, of which the last 512 are penalised. One draw is for
    the untempered, one for the tempered sample; at temperature 0 both take the most likely token.
    """
    ends, greedy = tokens.ids.chunk_eos, config.temperature == 0
    if logits.is_best(ends) if greedy else logits.is_drawn(ends, float(draws[0])):
        return ends
    _weigh(logits, history, config, tokens)
    return logits.choose(float(draws[1]), config.temperature, config.top_k, config.top_p)


def _weigh(
    logits: Candidates, history: Sequence[int], config: DuplexConfig, tokens: Tokens
) -> None:
    """Forbid and penalise in place, before the second sample of `decide`."""
    ids, penalty = tokens.ids, config.length_penalty
    logits.forbid((*tokens.forbidden, ids.chunk_eos))
    logits.forbid_from(tokens.size)
    # Divided whatever the sign, as in the public code.
    recent = history[-REPETITION_WINDOW:]
    logits.change(recent, lambda values: values / REPETITION_PENALTY)
    logits.change(
        (ids.turn_eos,), lambda values: values * np.where(values > 0, 1 / penalty, penalty)
    )
    scale = config.listen_prob_scale
    more = math.log(scale) if scale > 0 else -math.inf
    logits.change((ids.listen,), lambda values: values + more)


def tokens_apart(
    logits: Logits,
    history: Sequence[int],
    draws: Logits,
    config: DuplexConfig,
    tokens: Tokens,
    *,
    own: int,
    wanted: int,
) -> tuple[float | None, float | None]:
    """Measure how far `decide` was from `wanted`: `Choice.margin` and `Choice.draw_gap`.

    If either id ends the chunk, they are of that choice.
    """
    ends, greedy = tokens.ids.chunk_eos, config.temperature == 0
    sooner, later = map(float, draws)
    if wanted == ends:
        first = int(logits.argmax()) if greedy else untempered(logits, sooner)
        gap = None if greedy else untempered_gap(logits, sooner, ends)
        return float(logits[first] - logits[ends]), gap
    weighed = logits.copy()
    _weigh(Candidates(values=weighed), history, config, tokens)
    bounds = (config.temperature, config.top_k, config.top_p)
    gap = None if greedy else choose_gap(weighed, later, *bounds, wanted=wanted)
    if own == ends:
        room = untempered_room(logits, sooner, ends)
        gap = None if gap is None or room is None else max(gap, room)
        return float(logits[ends] - logits[wanted]), gap
    return _finite(weighed[own] - weighed[wanted]), gap


def leaning(
    logits: Logits,
    history: Sequence[int],
    config: DuplexConfig,
    tokens: Tokens,
    *,
    is_open: bool,
    own: int,
    recorded: int,
) -> Leaning:
    """Say how a unit's first decision was made, between silence and all other tokens."""
    ids = tokens.ids
    silence = [ids.listen, ids.turn_eos] if is_open else [ids.listen]
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    weighed = logits.copy()
    _weigh(Candidates(values=weighed), history, config, tokens)
    silent = weighed[silence].max()
    weighed[silence] = -np.inf
    return Leaning(
        is_open=is_open,
        was_silent=recorded in silence,
        is_silent=own in silence,
        margin=_finite(silent - weighed.max()),
        listen=float(shares[ids.listen]),
        turn_end=float(shares[ids.turn_eos]),
    )


def _finite(margin: float) -> float | None:
    return float(margin) if math.isfinite(margin) else None


def fed_max(config: DuplexConfig) -> int:
    """Maximum tokens that a unit feeds in generate; its last iteration forces `chunk_eos`."""
    return config.max_new_speak_tokens_per_chunk - 1


def decide_code(
    logits: Logits, chunk: Sequence[int], draw: float, eos: int, *, may_end: bool
) -> int:
    """Choose the next speech code; the unit's last 16, in `chunk`, are penalised per occurrence.

    `eos` is the code that ends speech, allowed if `may_end`.
    """
    _weigh_codes(logits, chunk, eos, may_end=may_end)
    return untempered(logits, draw)


def codes_apart(
    logits: Logits,
    chunk: Sequence[int],
    draw: float,
    eos: int,
    *,
    may_end: bool,
    own: int,
    wanted: int,
) -> tuple[float | None, float | None]:
    """Measure how far `decide_code` was from `wanted`: `Choice.margin` and `Choice.draw_gap`."""
    _weigh_codes(logits, chunk, eos, may_end=may_end)
    return _finite(logits[own] - logits[wanted]), untempered_gap(logits, draw, wanted)


def _weigh_codes(logits: Logits, chunk: Sequence[int], eos: int, *, may_end: bool) -> None:
    logits /= CODE_TEMPERATURE
    _penalise(logits, chunk)
    if not may_end:
        logits[eos] = -np.inf


def _penalise(logits: Logits, codes: Sequence[int]) -> None:
    for code, count in Counter(codes[-CODE_WINDOW:]).items():
        logits[code] *= CODE_PENALTY ** (count if logits[code] < 0 else -count)


def decide_chat(
    logits: Candidates,
    generated: Sequence[int],
    draw: float,
    config: ChatConfig,
    tokens: Tokens,
    *,
    spoken: bool,
    calls: bool = False,
) -> int:
    """Choose the next token of a chat answer; one of `tokens.endings` ends it.

    The last 128 of `generated` are penalised; if `spoken`, unspeakable ids are forbidden, except
    the marks of tools if it may have `calls`.
    """
    if spoken:
        allowed = tokens.endings.union(tokens.tool_marks.values() if calls else ())
        logits.forbid([index for index in tokens.forbidden if index not in allowed])
    logits.forbid_from(tokens.size)
    if len(generated) < config.min_new_tokens:
        logits.forbid(sorted(tokens.endings))
    recent = generated[-CHAT_WINDOW:]
    logits.change(recent, partial(_lowered, penalty=config.repetition_penalty))
    logits.change(sorted(tokens.endings), partial(_lowered, penalty=config.length_penalty))
    return logits.choose(draw, config.temperature, config.top_k, config.top_p)


def _lowered(logits: Logits, penalty: float) -> Logits:
    """Lower logits of either sign by a penalty above 1."""
    return np.where(logits > 0, logits / penalty, logits * penalty)


def decide_plain(
    logits: Candidates, draw: float, size: int, forbidden: Sequence[int], params: SamplingParams
) -> int:
    """Choose the next token of a streaming request: no penalties, no scaling.

    Args:
        logits: changed in place.
        draw: in [0, 1).
        size: one more than the tokenizer's highest id.
        forbidden: ids that are never chosen.
        params: its temperature, `top_k` and `top_p`.
    """
    temperature, top_k, top_p = params.temperature, params.top_k, params.top_p
    logits.forbid(forbidden)
    logits.forbid_from(size)
    if temperature > 0 and not top_k and top_p == 1:  # No sort, the slowest part, is needed.
        return logits.sample(draw, temperature)
    return logits.choose(draw, temperature, top_k or size, top_p)


def decide_chat_code(logits: Logits, codes: Sequence[int], draw: float) -> int:
    """Choose the next speech code of a chat answer, penalising its last 16; speech may end."""
    logits /= CODE_TEMPERATURE
    _penalise(logits, codes)
    return choose(logits, draw, 1.0, CHAT_CODE_TOP_K, CHAT_CODE_TOP_P)
