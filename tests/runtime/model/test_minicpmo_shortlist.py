"""A token that is chosen from a shortlist is the token that all logits would give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from protocol.values.model import ChatConfig, Chunk, ChunkResult, Costs, DuplexConfig, UnitResult
from runtime.model.backends.minicpmo.logits import (
    NOT_FINITE,
    Rule,
    Shortlists,
    TokenLogits,
    shortlists_on,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.sampling import (
    DOUBT,
    Candidates,
    CdfInterval,
    TooShortError,
    decide,
    decide_chat,
    decide_plain,
)
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.backends.streams import SamplingParams
from tests.bench.tiny.staging import known_phrases, play, stage_phrase
from tests.models import random_model
from tests.models.blocking import alone
from tests.models.random_model import answer, opening
from tests.project.sampling import sample
from tests.runtime.model.test_forcing import record, run_forced
from tests.runtime.model.test_minicpmo_chat import TINY, ask, facts, said

HELDOUT = Path(__file__).parents[3] / "fixtures" / "speech" / "heldout"
SIZES = (40, 5000)
EXAMPLES = sample(400, 120)
"""What matters lies at the meeting of logits, settings and draws."""
RARE = 0.02
"""Choices of a model for which a shortlist may not do."""
UNIT_BYTES = 16_000 * 4


# -- any logits, any settings ---------------------------------------------------------------------


def levels(values: Sequence[float], size: int, numbers: np.random.Generator) -> NDArray[Any]:
    return numbers.choice(np.array(values), size)


SHAPES = {
    "usual": lambda size, numbers: numbers.normal(0, 3, size),
    "below zero": lambda size, numbers: numbers.normal(-30, 3, size),
    "sharp": lambda size, numbers: numbers.normal(0, 1, size) ** 5,
    "coarse": lambda size, numbers: numbers.normal(0, 3, size).round(),
    "equal": lambda size, numbers: np.full(size, numbers.normal(0, 3)),
    "zero": lambda size, _: np.zeros(size),
    "few": partial(levels, (-2.0, 0.0, 1.0, 1.5)),
    "ascending": lambda size, _: np.arange(size) / 50,
    "huge": lambda size, numbers: numbers.normal(0, 1e37, size),
    "tiny": lambda size, numbers: numbers.normal(0, 1e-40, size),
    "apart": partial(levels, (-1e30, 0.0, 700.0, 1e30)),
    "spoilt": partial(levels, (0.0, 1.0, math.nan)),
    "overflown": partial(levels, (0.0, 1.0, math.inf)),
    "never": partial(levels, (0.0, 1.0, -math.inf)),
}


@attrs.frozen(kw_only=True)
class Case:
    """Logits, what is told of them, and what rules are asked with."""

    row: Tensor
    tokens: Tokens
    history: tuple[int, ...]
    draws: NDArray[np.float64]
    shortlists: Shortlists

    def check(self, rule: Rule) -> None:
        """Hold that a shortlist gives what all logits give."""
        batch = torch.stack([self.row, self.row.flip(0)])
        for made, row in zip(self.shortlists.rows(batch), batch, strict=True):
            assert outcome(made, rule) == outcome(TokenLogits(row), rule)
            assert torch.equal(made.whole(), row) or row.isnan().any()


def outcome(row: TokenLogits, rule: Rule) -> int | str:
    """The id, or what went wrong: rules may forbid all there is."""
    try:
        with np.errstate(all="ignore"):
            return row.settle(rule)
    except (ValueError, IndexError) as error:
        return repr(error)


def like_tokens(
    ids: SimpleNamespace, *, forbidden: Sequence[int], size: int, endings: Sequence[int]
) -> Tokens:
    """What rules ask of a tokenizer, without one."""
    made = SimpleNamespace(
        ids=ids,
        forbidden=tuple(forbidden),
        size=size,
        endings=frozenset(endings),
        slots=None,
        unchatted=(),
    )
    return cast("Tokens", made)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from(SIZES))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = SHAPES[draw(st.sampled_from(sorted(SHAPES)))](size, numbers)
    ids = st.integers(0, size - 1)
    chunk_eos, turn_eos, listen, *endings = draw(st.lists(ids, min_size=5, max_size=5, unique=True))
    for index in draw(st.lists(st.sampled_from((chunk_eos, turn_eos, listen)), max_size=3)):
        values[index] = np.nanmax(values) + draw(st.sampled_from((-1.0, 0.0, 0.5, 4.0)))
    row = torch.from_numpy(values.astype(np.float32))
    control = SimpleNamespace(chunk_eos=chunk_eos, turn_eos=turn_eos, listen=listen)
    tokens = like_tokens(
        control,
        forbidden=sorted(draw(st.sets(ids, max_size=30))),
        size=draw(st.sampled_from((size, size - 3, size // 2))),
        endings=endings,
    )
    best = torch.argsort(row, descending=True)[:30].tolist()
    history = draw(st.lists(st.one_of(ids, st.sampled_from(best)), max_size=40))
    named = draw(st.sampled_from(((), (turn_eos, listen, *endings))))
    count = draw(st.sampled_from((1, 5, 20, 39, 40, 256, 256)))
    return Case(
        row=row,
        tokens=tokens,
        history=tuple(history * draw(st.sampled_from((1, 20)))),
        draws=np.array([draw(near_a_border(values, chunk_eos)), draw(DRAWS)]),
        shortlists=Shortlists("cpu", named=named, ends=chunk_eos, count=count),
    )


DRAWS = st.floats(0, 1, exclude_max=True)


def near_a_border(values: NDArray[np.float64], index: int) -> st.SearchStrategy[float]:
    """Any draw, or one that hardly falls, or hardly does not, on an id in the plain softmax."""
    with np.errstate(all="ignore"):
        numbers = values.astype(np.float32).astype(np.float64)
        total = np.cumsum(np.exp(numbers - numbers.max())) / np.exp(numbers - numbers.max()).sum()
    start, stop = float(total[index - 1]) if index else 0.0, float(total[index])
    offsets = (0.0, 1e-16, -1e-16, 1e-12, -1e-12, DOUBT, -DOUBT, 3e-9, -3e-9)
    near = [border + offset for border in (start, stop) for offset in offsets]
    within = [0.0, *(one for one in (*near, (start + stop) / 2) if 0 <= one < 1)]
    return st.one_of(DRAWS, st.sampled_from(within))


TEMPERATURES = st.one_of(st.sampled_from((0.0, 0.7, 1.0)), st.floats(0, 2))
TOP_P = st.one_of(st.just(1.0), st.floats(0, 1, exclude_min=True))
TOP_K = st.one_of(st.integers(1, 20), st.sampled_from((100, 1000)), st.integers(1, 1000))
PENALTIES = st.one_of(st.just(1.0), st.floats(0.1, 10))
DUPLEX = st.builds(
    DuplexConfig,
    temperature=TEMPERATURES,
    top_k=TOP_K,
    top_p=TOP_P,
    listen_prob_scale=st.one_of(st.sampled_from((0.0, 1.0)), st.floats(0, 10)),
    length_penalty=PENALTIES,
)
CHAT = st.builds(
    ChatConfig,
    temperature=TEMPERATURES,
    top_k=TOP_K,
    top_p=TOP_P,
    repetition_penalty=st.floats(1, 2),
    length_penalty=PENALTIES,
)
PLAIN = st.builds(
    SamplingParams,
    temperature=st.one_of(TEMPERATURES, st.floats(0, 100)),
    top_k=st.one_of(st.just(0), TOP_K),
    top_p=TOP_P,
)


@settings(max_examples=EXAMPLES)
@given(cases(), DUPLEX)
def test_a_unit_decides_the_same(case: Case, config: DuplexConfig) -> None:
    """A session would go another way on a GPU than its replay on a CPU, from the same logits."""

    def rule(logits: Candidates) -> int:
        return decide(logits, case.history, case.draws, config, case.tokens)

    case.check(rule)


@settings(max_examples=EXAMPLES)
@given(cases(), CHAT, st.booleans())
def test_an_answer_of_chat_decides_the_same(case: Case, config: ChatConfig, spoken: bool) -> None:
    """As for a unit: an answer would be another one."""
    number = float(case.draws[1])

    def rule(logits: Candidates) -> int:
        return decide_chat(logits, case.history, number, config, case.tokens, spoken=spoken)

    case.check(rule)


@settings(max_examples=EXAMPLES)
@given(cases(), PLAIN)
def test_streaming_input_is_answered_the_same(case: Case, params: SamplingParams) -> None:
    """As for a unit: a transcription would be another one."""
    number, tokens = float(case.draws[1]), case.tokens

    def rule(logits: Candidates) -> int:
        return decide_plain(logits, number, tokens.size, tokens.forbidden, params)

    case.check(rule)


# -- what settles a choice, and what does not -----------------------------------------------------


def short(values: Sequence[float], bound: float, **what: Any) -> Candidates:
    """The shortlist of ids 0, 2, 4..."""
    ids = np.arange(len(values), dtype=np.int64) * 2
    return Candidates(values=np.array(values), ids=ids, bound=bound, **what)


def test_the_best_must_be_above_all_that_is_not_listed() -> None:
    """An id of the same logit, lower and not listed, would be passed over."""
    assert short([3.0, 1.0, 2.0], 1.0).choose(0.99, 1.0, 2, 1.0) == 4
    for count in (3, 4):
        with pytest.raises(TooShortError):
            short([3.0, 1.0, 2.0], 1.0).choose(0.5, 1.0, count, 1.0)
    assert short([3.0, 1.0, 2.0], 1.0).choose(0.5, 0.0, 1000, 1.0) == 0
    with pytest.raises(TooShortError):
        short([3.0, 3.0], 3.0).choose(0.5, 0.0, 1, 1.0)
    with pytest.raises(TooShortError):
        short([3.0, 3.0], 3.0).is_best(0)
    with pytest.raises(TooShortError):
        short([3.0, 3.0], -3.0).sample(0.5, 1.0)


def test_the_bound_moves_with_what_is_not_listed() -> None:
    """A penalty that raises a logit could lift an id over those that are listed."""
    raised = short([-1.0, -1.9], -2.0)
    raised.change((1,), lambda values: values / 2)
    assert raised.bound == -1.0
    with pytest.raises(TooShortError):
        raised.choose(0.5, 0.0, 1, 1.0)
    lowered = short([3.0, 2.5], 2.0)
    lowered.change((1, 2), lambda values: values / 2)
    assert lowered.bound == 2.0  # Others were not changed.
    assert lowered.values.tolist() == [3.0, 1.25]
    listed = short([-1.0, -1.9], -2.0)
    listed.change((0, 2), lambda values: values / 2)
    assert listed.bound == -2.0


def test_ids_that_are_not_listed_can_be_forbidden() -> None:
    """The wrong ids would be forbidden in their place."""
    candidates = short([3.0, 2.0, 1.0], 0.0)
    candidates.forbid((1, 2, 99))
    candidates.forbid_from(3)
    assert candidates.values.tolist() == [3.0, -math.inf, -math.inf]


def test_a_draw_near_a_border_is_not_settled() -> None:
    """A chunk would end by how a sum was rounded."""
    interval = CdfInterval(index=2, start=0.25, stop=0.5)

    def drawn(draw: float, index: int = 2) -> bool:
        return short([1.0, 1.0], 0.0, interval=interval).is_drawn(index, draw)

    assert [drawn(draw) for draw in (0.1, 0.249, 0.251, 0.499, 0.501)] == [
        *(False, False, True, True, False)
    ]
    for draw in (0.25, 0.25 + DOUBT / 2, 0.5 - DOUBT / 2, 0.5):
        with pytest.raises(TooShortError):
            drawn(draw)
    with pytest.raises(TooShortError):
        drawn(0.3, index=0)
    changed = short([1.0, 1.0], 0.0, interval=interval)
    changed.change((0,), lambda values: values * 2)
    with pytest.raises(TooShortError):
        changed.is_drawn(2, 0.3)


# -- a batch --------------------------------------------------------------------------------------


def shortlists(tokens: Tokens) -> Shortlists:
    return Shortlists.of(tokens, "cpu")


@pytest.fixture(scope="module")
def tiny() -> DuplexModel:
    return DuplexModel.load(TINY, slots=1)


@contextmanager
def with_shortlists(model: DuplexModel) -> Iterator[Shortlists]:
    """Have a model's tokens chosen from shortlists."""
    assert model.runner.shortlists is None
    made = model.runner.shortlists = shortlists(model.tokens)
    try:
        yield made
    finally:
        model.runner.shortlists = None


def test_a_cpu_makes_no_shortlists(tiny: DuplexModel) -> None:
    """Each token would cost a search that nobody needs; on a GPU it would cost milliseconds."""
    assert tiny.runner.shortlists is None
    assert shortlists_on("cpu", tiny.tokens) is None
    assert shortlists_on(torch.device("meta"), tiny.tokens) is not None


def test_each_row_of_a_batch_has_its_own(tiny: DuplexModel) -> None:
    """A session would say what another one should (B8)."""
    logits = torch.randn(5, 900, generator=torch.Generator().manual_seed(1))
    logits[2, 7] = math.nan
    rows = shortlists(tiny.tokens).rows(logits)

    def first(candidates: Candidates) -> int:
        assert candidates.ids is not None
        return candidates.choose(0.5, 0.0, 1, 1.0)

    for index in (0, 1, 3, 4):
        rows[index].require_finite()
        assert rows[index].settle(first) == int(logits[index].argmax())
    for call in (rows[2].require_finite, partial(rows[2].settle, first)):
        with pytest.raises(ValueError, match=NOT_FINITE):
            call()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused_alike(value: float) -> None:
    """Half precision that overflowed would be a listen, or any word, instead of an error."""
    logits = torch.zeros(1, 300)
    logits[0, 299] = value
    for made in (TokenLogits(logits[0]), *Shortlists("cpu", named=(), ends=3).rows(logits)):
        with pytest.raises(ValueError, match=NOT_FINITE):
            made.require_finite()
        with pytest.raises(ValueError, match=NOT_FINITE):
            made.settle(lambda _: 0)


@pytest.mark.parametrize("scale", [2.0, 4.0])
def test_half_precision_has_ties_that_hardly_matter(scale: float) -> None:
    """Nearly every token of a model in bf16 would be moved whole after all."""
    numbers = torch.Generator().manual_seed(2)
    logits = scale * torch.randn(64, 20_000, generator=numbers).bfloat16().float()
    control = SimpleNamespace(chunk_eos=19_001, turn_eos=19_002, listen=19_003)
    tokens = like_tokens(control, forbidden=range(19_004, 19_060), size=19_500, endings=(5,))
    made = Shortlists("cpu", named=(5, 19_002, 19_003), ends=19_001)
    draws, unit, chat = np.array([0.4, 0.6]), DuplexConfig(), ChatConfig()
    for row in made.rows(logits):
        row.settle(lambda logits: decide(logits, (), draws, unit, tokens))
        row.settle(lambda logits: decide_chat(logits, (), 0.4, chat, tokens, spoken=True))
    assert made.settled + made.unsettled == 128
    assert made.unsettled <= RARE * made.settled


# -- whole sessions -------------------------------------------------------------------------------


def duplex(model: DuplexModel, place: int) -> list[UnitResult]:
    """A phrase, its answer, and silence."""
    pcm, _ = stage_phrase(HELDOUT, known_phrases(HELDOUT)[place], place)
    return [attrs.evolve(result, costs=Costs()) for result in play(model, pcm, seed=place)]


def transcribed(model: DuplexModel, place: int) -> list[ChunkResult]:
    """A phrase, written down."""
    pcm, _ = stage_phrase(HELDOUT, known_phrases(HELDOUT)[place], place, lead_s=0)
    sound, transcript = pcm.astype("<f4").tobytes(), model.transcript(slot=0)
    seconds, results = len(sound) // UNIT_BYTES, []
    for index in range(seconds):
        part = sound[index * UNIT_BYTES : (index + 1) * UNIT_BYTES]
        last = index == seconds - 1
        chunk = Chunk(utterance=0, index=index, pcm=part, seed=3, is_last=last)
        result = alone(transcript.chunk(chunk), model.compute)
        results.append(attrs.evolve(result, costs=Costs()))
    transcript.release()
    return results


def answered(model: DuplexModel, seed: int) -> tuple[object, ...]:
    """An answer of chat, by its default settings and by others."""
    turn = ask(said("user", "What do you see?"), seed=seed)
    plain = attrs.evolve(turn, config=ChatConfig(max_new_tokens=40))
    facts_of = (answer(model, one) for one in (turn, plain))
    return tuple(facts(chunks, result) for _, chunks, result in facts_of)


@pytest.mark.costly
@pytest.mark.parametrize("course", [duplex, transcribed, answered])
def test_a_session_is_the_same_with_shortlists(tiny: DuplexModel, course: Any) -> None:
    """What is said on a GPU would depend on how its logits are looked at; or nothing be gained."""
    places = range(sample(3, 2))
    expected = [course(tiny, place) for place in places]
    with with_shortlists(tiny) as made:
        assert [course(tiny, place) for place in places] == expected
    assert made.settled > 15
    assert made.unsettled <= RARE * made.settled


@pytest.mark.soak  # `test_a_session_is_the_same_with_shortlists` decides by itself.
def test_a_forced_session_is_the_same_with_shortlists(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A recording would be judged by a shortlist, and what is not listed be no way off."""
    model = random_model.load(tmp_path_factory.mktemp("model"), slots=1)
    recorded = record(model, opening(seed=4), {})

    def forced() -> list[object]:
        results = run_forced(model, opening(seed=3), recorded)
        return [(attrs.evolve(one.result, costs=Costs()), one.choices) for one in results]

    expected = forced()
    assert any(choices for _, choices in cast("list[tuple[object, object]]", expected))
    with with_shortlists(model) as made:
        assert forced() == expected
    assert made.settled > 0
