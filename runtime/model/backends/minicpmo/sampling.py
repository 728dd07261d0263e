"""The choice of the next token and of the next speech code from logits.

*Draws* are counter-based: a number in [0, 1) is a function of (session seed, unit index, stage), so
a unit can be rerun by itself. Logits have shape (V,), probabilities are float64; -inf is never
chosen, and ties go to the lower id.

*Candidates* are the logits of all ids, or of a shortlist (`logits.py`): a row's highest logits and
the ids that rules name. From it the rules choose bit for bit the same as from all ids, or raise
`TooShortError`; the host's part of a token is 0.1 ms instead of 0.8.
- The best k need k listed ids above `bound`: unlisted ids of equal logit may have lower ids.
- Changes keep the order of logits, so the bound changes along with the unlisted ids.
- Whether the untempered sample hits an id follows from masses summed elsewhere in another order, so
  a draw within `DOUBT` of that id's start or end is undecided.

*Rules* are pure, and in the public code's order (docs/model.md, "Generate"): an untempered softmax
sample may end the chunk; then ids are forbidden, repetition and length are penalised, listening is
scaled, and the rest is sampled with temperature, top-k and top-p. Chat has the public code's rules
too; streaming requests are sampled plainly. Logits, (V,) of tokens and (codes,) of codes, are
changed in place, except by `token_gap` and `listen_decision`.

*Forced decoding*: a `Teacher` returns the recorded decision in place of the model's, and keeps a
`Choice` where they differ (`..base.Forced`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from protocol.values.model import ChatConfig, DuplexConfig

from ..base import Choice, Forced, ListenDecision
from ..streams import SamplingParams
from .tokens import Tokens

# -- draws, and one id of all logits ------------------------------------------------------------


def keyed(key: str) -> np.random.Generator:
    """The random numbers of one purpose; the same on every machine."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    words = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


def draws(seed: int, unit: int, stage: str, count: int) -> NDArray[np.float64]:
    """`count` uniform numbers for one stage of one unit or chat turn."""
    return keyed(f"{seed}/{unit}/{stage}").random(count)


def _inverse(probabilities: NDArray[np.float64], draw: float) -> int:
    total = np.cumsum(probabilities)
    return int(min(np.searchsorted(total, draw * total[-1], side="right"), len(total) - 1))


def _span(probabilities: NDArray[np.float64], wanted: int) -> tuple[float, float]:
    """The interval of draws that `_inverse` maps to `wanted`."""
    total = np.cumsum(probabilities)
    start = float(total[wanted - 1] / total[-1]) if wanted else 0.0
    return start, float(total[wanted] / total[-1])


def _gap(probabilities: NDArray[np.float64], draw: float, wanted: int) -> float | None:
    start, stop = _span(probabilities, wanted)
    return max(start - draw, draw - stop, 0.0) if stop > start else None


def untempered_gap(logits: NDArray[np.float64], draw: float, wanted: int) -> float | None:
    """Distance of a draw from those by which `untempered` gives `wanted`, or None if none do."""
    return _gap(np.exp(logits - logits.max()), draw, wanted)


def untempered_room(logits: NDArray[np.float64], draw: float, given: int) -> float | None:
    """Distance from a draw to where `untempered` gives another id than `given`; None: nowhere."""
    start, stop = _span(np.exp(logits - logits.max()), given)
    rooms = [draw - start] * (start > 0) + [stop - draw] * (stop < 1)
    return min(rooms, default=None)


def untempered(logits: NDArray[np.float64], draw: float) -> int:
    """Sample from the plain softmax."""
    return _inverse(np.exp(logits - logits.max()), draw)


def best(logits: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The ids of the `count` highest logits, or of all if fewer; ties by id."""
    if count < len(logits):
        edge = np.partition(logits, -count)[-count]
        kept = np.flatnonzero(logits >= edge)  # Ties at the edge may make it more than `count`.
    else:
        kept = np.arange(len(logits))
    order = np.argsort(-logits[kept], kind="stable")
    return kept[order][:count]


def choose(
    logits: NDArray[np.float64], draw: float, temperature: float, top_k: int, top_p: float
) -> int:
    """Sample with temperature, then the best k, then the smallest set of mass p.

    Args:
        logits: (V,).
        draw: in [0, 1).
        temperature: 0 takes the most likely id.
        top_k: candidates kept, at least 1.
        top_p: mass kept, above 0; the most likely id is always kept.
    """
    if temperature == 0:
        return int(logits.argmax())
    ids, probabilities = _candidates(logits, temperature, top_k, top_p)
    return int(ids[_inverse(probabilities, draw)])


def choose_gap(
    logits: NDArray[np.float64],
    draw: float,
    temperature: float,
    top_k: int,
    top_p: float,
    *,
    wanted: int,
) -> float | None:
    """Distance of a draw from those by which `choose` at a temperature gives `wanted`, or None."""
    ids, probabilities = _candidates(logits, temperature, top_k, top_p)
    places = np.flatnonzero(ids == wanted)
    return _gap(probabilities, draw, int(places[0])) if len(places) else None


def _candidates(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids that may be chosen, the most likely first, and their probabilities."""
    order = best(logits, top_k)
    scaled = (logits[order] - logits[order[0]]) / temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    kept = before < top_p
    return order[kept], probabilities[kept]


# -- one id of a shortlist ----------------------------------------------------------------------

Numbers = NDArray[np.float64]
Change = Callable[[Numbers], Numbers]
"""An elementwise, order-preserving map from logits to logits."""

DOUBT: Final = 1e-9
"""In units of the whole mass: a float64 sum of 152,000 numbers is off by 2e-11 at most."""


class TooShortError(Exception):
    """A shortlist does not settle a choice: all logits are needed."""


@attrs.frozen(kw_only=True)
class CdfInterval:
    """An id's interval in the cumulative untempered softmax, `start` to `stop` in [0, 1]."""

    index: int
    start: float
    stop: float


@attrs.define(kw_only=True, eq=False)
class Candidates:
    """Ids with their logits, which rules change in place before they choose.

    Attributes:
        values: logits, (N,).
        ids: ascending, (N,); None: all ids.
        bound: upper limit of the logits of unlisted ids.
        interval: of the one id that an untempered sample can be asked for; None if all are listed.
    """

    values: Numbers
    ids: NDArray[np.int64] | None = None
    bound: float = -math.inf
    interval: CdfInterval | None = None

    def forbid(self, ids: Sequence[int]) -> None:
        """Never choose these ids."""
        self.interval = None
        self.values[self._places(ids)] = -np.inf

    def leave_out(self, ids: Sequence[int]) -> None:
        """Never choose these ids, which have no part of the mass."""
        self.values[self._places(ids)] = -np.inf

    def forbid_from(self, size: int) -> None:
        """Never choose an id of `size` or above."""
        self.interval = None
        start = size if self.ids is None else int(np.searchsorted(self.ids, size))
        self.values[start:] = -np.inf

    def change(self, ids: Sequence[int], change: Change) -> None:
        """Change the logits of some ids, each once, by an order-preserving map."""
        self.interval = None
        places = self._places(ids)
        self.values[places] = change(self.values[places])
        if len(places) < len(ids):
            self.bound = max(self.bound, float(change(np.array([self.bound]))[0]))

    def is_best(self, index: int) -> bool:
        """Whether `index` is the lowest id of the highest logit; `TooShortError` if undecided."""
        self._require(1)
        return self._id(int(self.values.argmax())) == index

    def is_drawn(self, index: int, draw: float) -> bool:
        """Whether the untempered sample, before any change, with `draw` in [0, 1) is `index`.

        `TooShortError` if undecided, or the id's interval is unknown.
        """
        if self.ids is None:
            return untempered(self.values, draw) == index
        interval = self.interval
        if interval is None or interval.index != index:
            raise TooShortError
        if min(abs(draw - interval.start), abs(draw - interval.stop)) <= DOUBT:
            raise TooShortError
        return interval.start < draw < interval.stop

    def choose(self, draw: float, temperature: float, top_k: int, top_p: float) -> int:
        """Sample as `sampling.choose`; `TooShortError` if the best k may not all be listed."""
        self._require(top_k if temperature else 1)
        return self._id(choose(self.values, draw, temperature, top_k, top_p))

    def sample(self, draw: float, temperature: float) -> int:
        """Sample from all ids, with a draw in [0, 1); `TooShortError` if not all are listed."""
        if self.ids is not None:
            raise TooShortError
        return untempered(self.values / temperature, draw)

    def _require(self, count: int) -> None:
        if self.ids is not None and np.count_nonzero(self.values > self.bound) < count:
            raise TooShortError

    def _id(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def _places(self, ids: Sequence[int]) -> NDArray[np.int64]:
        wanted = np.asarray(ids, dtype=np.int64)
        if self.ids is None:
            return wanted
        places = np.searchsorted(self.ids, wanted)
        places = np.minimum(places, len(self.ids) - 1)
        listed: NDArray[np.int64] = places[self.ids[places] == wanted]
        return listed


# -- the rules ----------------------------------------------------------------------------------

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
    logits: Candidates,
    history: Sequence[int],
    draws: Logits,
    config: DuplexConfig,
    tokens: Tokens,
    *,
    forbidden: Sequence[int] | None = None,
) -> int:
    """Choose the next token, a control token or text.

    `history` has the session's decided ids, of which the last 512 are penalised. One draw is for
    the untempered, one for the tempered sample; at temperature 0 both take the most likely token.
    `forbidden`, of a unit in slots, says what its grammar does not have here; there is only the
    tempered sample then.
    """
    ends, greedy = tokens.ids.chunk_eos, config.temperature == 0
    if tokens.slots is None and tokens.unchatted:
        logits.leave_out(tokens.unchatted)
    if forbidden is None and (
        logits.is_best(ends) if greedy else logits.is_drawn(ends, float(draws[0]))
    ):
        return ends
    _weigh(logits, history, config, tokens, forbidden)
    return logits.choose(float(draws[1]), config.temperature, config.top_k, config.top_p)


def _weigh(
    logits: Candidates,
    history: Sequence[int],
    config: DuplexConfig,
    tokens: Tokens,
    forbidden: Sequence[int] | None = None,
) -> None:
    """Forbid and penalise in place, before the second sample of `decide`."""
    ids, penalty = tokens.ids, config.length_penalty
    logits.forbid((*tokens.forbidden, ids.chunk_eos) if forbidden is None else forbidden)
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


def token_gap(
    logits: Logits,
    history: Sequence[int],
    draws: Logits,
    config: DuplexConfig,
    tokens: Tokens,
    *,
    own: int,
    wanted: int,
    forbidden: Sequence[int] | None = None,
) -> tuple[float | None, float | None]:
    """Measure how far `decide` was from `wanted`: `Choice.margin` and `Choice.draw_gap`.

    If either id ends the chunk, they are of that choice.
    """
    ends, greedy = tokens.ids.chunk_eos, config.temperature == 0
    sooner, later = map(float, draws)
    if wanted == ends and forbidden is None:
        first = int(logits.argmax()) if greedy else untempered(logits, sooner)
        gap = None if greedy else untempered_gap(logits, sooner, ends)
        return float(logits[first] - logits[ends]), gap
    weighed = logits.copy()
    _weigh(Candidates(values=weighed), history, config, tokens, forbidden)
    bounds = (config.temperature, config.top_k, config.top_p)
    gap = None if greedy else choose_gap(weighed, later, *bounds, wanted=wanted)
    if own == ends and forbidden is None:
        room = untempered_room(logits, sooner, ends)
        gap = None if gap is None or room is None else max(gap, room)
        return float(logits[ends] - logits[wanted]), gap
    return _finite(weighed[own] - weighed[wanted]), gap


def only(logits: Logits, ids: Sequence[int]) -> Logits:
    """A copy in which only some ids can be chosen."""
    kept = np.full_like(logits, -np.inf)
    kept[list(ids)] = logits[list(ids)]
    return kept


def listen_decision(
    logits: Logits,
    history: Sequence[int],
    config: DuplexConfig,
    tokens: Tokens,
    *,
    is_open: bool,
    own: int,
    recorded: int,
) -> ListenDecision:
    """Say how a unit's first decision was made, between silence and all other tokens."""
    ids = tokens.ids
    silence = [ids.listen, ids.turn_eos] if is_open else [ids.listen]
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    weighed = logits.copy()
    _weigh(Candidates(values=weighed), history, config, tokens)
    silent = weighed[silence].max()
    weighed[silence] = -np.inf
    return ListenDecision(
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


def code_gap(
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
    logits.forbid(tokens.unchatted)
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


# -- forced decoding ----------------------------------------------------------------------------


GapTo = Callable[[int], tuple[float | None, float | None]]
"""Measures how far a decision was from another id: `Choice.margin` and `Choice.draw_gap`."""


class Teacher:
    """The decisions of one recorded unit, and the model's different choices, in order.

    `codec_eos` ends speech: it is decided, but not in `forced`. `listen_decision` is of the
    first token, if it was free.
    """

    def __init__(self, forced: Forced, codec_eos: int) -> None:
        self._tokens: Final = forced.decided_ids
        self._codes: Final = (*forced.codec_ids, codec_eos)
        self.choices: list[Choice] = []
        self.listen_decision: ListenDecision | None = None

    def token(self, step: int, own: int, gap_to: GapTo) -> int:
        """Return the recorded token of a step, or the model's own after the last."""
        return self._decide("llm", self._tokens, step, own, gap_to)

    def code(self, step: int, own: int, gap_to: GapTo) -> int:
        """Return the recorded code of a step; after the last, speech ends."""
        return self._decide("tts", self._codes, step, own, gap_to)

    def _decide(
        self, stage: Literal["llm", "tts"], ids: tuple[int, ...], step: int, own: int, gap_to: GapTo
    ) -> int:
        recorded = ids[step] if step < len(ids) else own
        if recorded != own:
            margin, gap = gap_to(recorded)
            self.choices.append(
                Choice(
                    stage=stage, step=step, recorded=recorded, own=own, margin=margin, draw_gap=gap
                )
            )
        return recorded
