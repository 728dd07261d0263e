"""The rules that choose tokens and speech codes, and how codes become sound (model.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.values.model import DuplexConfig
from runtime.model.backends.minicpmo import unit as unit_module
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.sampling import (
    Candidates,
    best,
    choose,
    decide,
    decide_code,
    draws,
    fed_max,
    untempered,
)
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.backends.minicpmo.vocoder import LOOKAHEAD, PieceVocoder, Vocode, VocoderBuffer
from tests.models import random_model
from tests.models.blocking import open_session
from tests.models.random_model import CODES, opening, unit

Logits = NDArray[np.float64]
VOCABULARY = 320
EOS = CODES - 1


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokens")
    random_model.write_tokenizer(folder)
    return Tokens(folder)


# -- chance ---------------------------------------------------------------------------------------


def test_draws_depend_on_seed_unit_and_stage_alone() -> None:
    """A unit could not be run again by itself."""
    base = draws(3, 4, "llm", 8)
    assert np.array_equal(base, draws(3, 4, "llm", 8))
    assert np.array_equal(base[:3], draws(3, 4, "llm", 3))
    for other in (draws(2, 4, "llm", 8), draws(3, 5, "llm", 8), draws(3, 4, "tts", 8)):
        assert not np.array_equal(base, other)


def test_draws_are_these_on_every_machine() -> None:
    """A recording would replay otherwise on another version of the code."""
    assert draws(3, 4, "llm", 3).tolist() == [
        0.7897769621605186,
        0.16633779085495604,
        0.6543429316196689,
    ]


def test_choose_honours_temperature_top_k_and_top_p() -> None:
    """A client's settings would do nothing."""
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    numbers = np.linspace(0, 0.999, 200)
    assert {choose(logits, d, 0.0, 20, 1.0) for d in numbers} == {1}
    assert {choose(logits, d, 1.0, 2, 1.0) for d in numbers} == {1, 3}
    assert {choose(logits, d, 1.0, 20, 0.65) for d in numbers} == {1, 3}
    picks = [choose(logits, d, 1.0, 20, 1.0) for d in numbers]
    assert np.allclose(np.bincount(picks) / 200, [0.1, 0.4, 0.2, 0.3], atol=0.02)
    plain = [untempered(logits, d) for d in numbers]
    assert np.allclose(np.bincount(plain) / 200, [0.1, 0.4, 0.2, 0.3], atol=0.02)


LOGITS = st.lists(st.sampled_from((-math.inf, -1.5, 0.0, 0.5, 0.5, 3.0)), min_size=1, max_size=30)


@given(logits=LOGITS, count=st.integers(1, 40))
def test_the_best_are_in_order_and_the_lower_id_wins(logits: list[float], count: int) -> None:
    """Equal logits would be broken otherwise on another machine."""
    expected = sorted(range(len(logits)), key=lambda index: (-logits[index], index))[:count]
    assert best(np.array(logits), count).tolist() == expected


@given(logits=LOGITS, draw=st.floats(0, 1, exclude_max=True), top_k=st.integers(1, 40))
def test_what_is_forbidden_is_never_drawn(logits: list[float], draw: float, top_k: int) -> None:
    """The model could write markup into its own context."""
    values = np.array([0.0, *logits])
    assert math.isfinite(values[untempered(values, draw)])
    for temperature in (0.0, 0.3, 2.0):
        assert math.isfinite(values[choose(values, draw, temperature, top_k, 0.9)])


# -- tokens ---------------------------------------------------------------------------------------


def decided(
    tokens: Tokens, values: dict[int, float], history: tuple[int, ...] = (), **config: Any
) -> int:
    """The id that a greedy model decides; all logits but these are low."""
    logits = np.full(VOCABULARY, -9.0)
    for index, value in values.items():
        logits[index] = value
    settings = DuplexConfig(**{"temperature": 0.0, **config})
    return decide(Candidates(values=logits), history, np.array([0.5, 0.5]), settings, tokens)


def test_repetition_divides_whatever_the_sign(tokens: Tokens) -> None:
    """Ids would differ from those of the public code."""
    assert decided(tokens, {1: 2.0, 2: 1.95}, (1,)) == 2
    assert decided(tokens, {1: 2.0, 2: 1.85}, (1,)) == 1
    assert decided(tokens, {1: -2.0, 2: -1.95}, (1,)) == 1  # -2 / 1.05 is the higher one.
    assert decided(tokens, {1: 2.0, 2: 1.85}, (1,) * 50) == 1  # Once, however often it occurred.


def test_repetition_looks_back_over_512_ids(tokens: Tokens) -> None:
    """A word of minutes ago would be held against the model, or one just said would not."""
    other = 3
    assert decided(tokens, {1: 2.0, 2: 1.95}, (1, *[other] * 511)) == 2
    assert decided(tokens, {1: 2.0, 2: 1.95}, (1, *[other] * 512)) == 1


@pytest.mark.parametrize(("value", "rival"), [(2.0, 1.9), (-2.0, -2.1)])
def test_a_penalty_above_one_makes_turns_longer(tokens: Tokens, value: float, rival: float) -> None:
    """A client that wants longer answers would get shorter ones, for one sign of the logit."""
    values = {tokens.ids.turn_eos: value, 2: rival}
    assert decided(tokens, values, length_penalty=1.0) == tokens.ids.turn_eos
    assert decided(tokens, values, length_penalty=1.1) == 2
    values = {tokens.ids.turn_eos: rival, 2: value}
    assert decided(tokens, values, length_penalty=1.0) == 2
    assert decided(tokens, values, length_penalty=0.9) == tokens.ids.turn_eos


def test_listen_is_scaled_as_a_probability(tokens: Tokens) -> None:
    """A client could not make the model more or less eager."""
    values = {tokens.ids.listen: 1.0, 2: 1.5}
    assert decided(tokens, values) == 2
    assert decided(tokens, values, listen_prob_scale=1.6) == 2  # ln 1.6 < 0.5
    assert decided(tokens, values, listen_prob_scale=1.7) == tokens.ids.listen
    assert decided(tokens, {tokens.ids.listen: 50.0, 2: 0.0}, listen_prob_scale=0.0) == 2


def test_chunk_eos_has_a_draw_of_its_own(tokens: Tokens) -> None:
    """Chunks would end too late, or by the tempered draw as well."""
    end = tokens.ids.chunk_eos
    logits = np.full(VOCABULARY, -50.0)
    logits[[end, 2]] = (1.0, 1.0)
    picks = {
        decide(Candidates(values=logits.copy()), (), np.array([draw, 0.5]), DuplexConfig(), tokens)
        for draw in (0.01, 0.99)
    }
    assert picks == {2, end}
    near = {end: 1.0, 2: 1.1}
    assert decided(tokens, near, temperature=2.0) in (2, end)
    assert decided(tokens, {end: 1.2, 2: 1.1}) == end


def test_the_untempered_draw_sees_unpenalised_logits(tokens: Tokens) -> None:
    """Whether a chunk ends would depend on what was said before."""
    end = tokens.ids.chunk_eos
    assert decided(tokens, {end: 2.0, 2: 2.05}, (2,)) == 2
    assert decided(tokens, {end: 2.05, 2: 2.0}, (end,)) == end


def test_forbidden_tokens_are_never_decided(tokens: Tokens) -> None:
    """The model could write markup into its own context."""
    values = dict.fromkeys(tokens.forbidden, 20.0)
    values |= dict.fromkeys(range(tokens.size, VOCABULARY), 30.0)
    assert tokens.ids.tts_pad in values
    assert tokens.ids.unit in values
    assert decided(tokens, {**values, 5: 1.0}) == 5


@pytest.mark.parametrize(("asked", "fed"), [(2, 1), (20, 19)])
def test_the_last_iteration_feeds_nothing(asked: int, fed: int) -> None:
    """A chunk would be one token too long."""
    assert fed_max(DuplexConfig(max_new_speak_tokens_per_chunk=asked)) == fed


# -- speech codes ---------------------------------------------------------------------------------


def code(values: dict[int, float], chunk: tuple[int, ...] = (), *, may_end: bool = True) -> int:
    """The code that a draw in the middle gives; all others are out of reach."""
    logits = np.full(CODES, -200.0)
    for index, value in values.items():
        logits[index] = value
    return decide_code(logits, chunk, 0.5, EOS, may_end=may_end)


def test_codes_end_only_where_they_may() -> None:
    """Speech would stop in the middle of a sentence."""
    assert code({EOS: 50.0, 3: 0.0}) == EOS
    assert code({EOS: 50.0, 3: 0.0}, may_end=False) == 3


def test_repeated_codes_are_penalised_as_often_as_they_occur() -> None:
    """The voice would get stuck on a sound."""
    assert code({3: 100.0, 7: 97.0}) == 3
    assert code({3: 100.0, 7: 94.0}, (3,)) == 3
    assert code({3: 100.0, 7: 94.0}, (3, 3)) == 7
    assert code({3: -100.0, 7: -104.0}, (3,)) == 7
    assert code({3: 100.0, 7: 94.0}, (3, 3, *[5] * 16)) == 3  # Sixteen codes back at most.


def test_codes_are_drawn_at_their_temperature() -> None:
    """The voice would be flat, or wild."""
    numbers = np.linspace(0, 0.999, 500)
    logits = np.array([0.0, 1.0, -math.inf])
    picks = [decide_code(logits.copy(), (), draw, 2, may_end=True) for draw in numbers]
    share = 1 / (1 + math.exp(-1 / 0.8))
    assert picks.count(1) / 500 == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("length", [0, 30])
@pytest.mark.parametrize("is_last", [False, True])
def test_speech_has_a_minimum_amid_a_turn_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, is_last: bool
) -> None:
    """A sentence would have holes, or its end a babble."""
    model = random_model.load(tmp_path, random_model.SMALL, slots=1)
    ids, asked = model.tokens.ids, list[bool]()

    def decide_code(_: object, chunk: list[int], *__: object, may_end: bool) -> int:
        asked.append(may_end)
        return 1

    end = [ids.turn_eos, ids.listen] if is_last else [ids.chunk_eos]
    left = iter([ids.speak, ids.chunk_eos] * (length > 0) + [ids.speak, *end])
    monkeypatch.setattr(unit_module.sampling, "decide", lambda *_, **__: next(left))
    monkeypatch.setattr("runtime.model.backends.minicpmo.sampling.decide_code", decide_code)
    session = open_session(model, opening())
    if length:
        session.run_unit(unit(0))
        session.finalize(0, interrupted=False)
        asked.clear()
    session.run_unit(unit(1))
    assert asked == [length == 0 or is_last] * 25


def test_the_last_code_is_never_returned(model_of_codes: DuplexModel) -> None:
    """A unit would last longer than its second."""
    session = open_session(model_of_codes, opening())
    for index in range(3):
        assert len(session.run_unit(unit(index)).codec_ids) <= 25
        session.finalize(index, interrupted=False)
    session.release()


@pytest.fixture(scope="module")
def model_of_codes(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), random_model.SMALL, slots=1)


# -- sound ----------------------------------------------------------------------------------------


def portions(turn: list[int]) -> tuple[list[list[int]], list[tuple[tuple[int, ...], bool]]]:
    """What a turn of so many codes a unit hands to the vocoder: sizes by unit, and all of it."""
    vocoder_buffer, sizes, handed, at = VocoderBuffer(buffer=(0,) * LOOKAHEAD), [], [], 0
    for number, count in enumerate(turn):
        last = number == len(turn) - 1
        codes = range(at + 1, at + 1 + count)
        out, waiting = vocoder_buffer.portions(codes, last=last)
        vocoder_buffer, at = VocoderBuffer(buffer=waiting), at + count
        sizes.append([len(each) for each in out])
        handed += [(each, last and each is out[-1]) for each in out]
    return sizes, handed


def test_codes_are_fed_by_28_and_advance_by_25() -> None:
    """The vocoder would not see ahead, and every chunk end in a click."""
    sizes, handed = portions([25, 25, 25, 10])
    assert sizes == [[28], [28], [28], [13, 3]]
    first, second = handed[0][0], handed[1][0]
    assert first == (0, 0, 0, *range(1, 26))
    assert second[:LOOKAHEAD] == first[-LOOKAHEAD:]
    assert [is_last for _, is_last in handed] == [False] * 4 + [True]


@given(turn=st.lists(st.integers(0, 25), min_size=1, max_size=6))
def test_every_code_is_sounded_once_and_in_order(turn: list[int]) -> None:
    """A turn would lose its last words, or say some twice."""
    sizes, handed = portions(turn)
    sounded = [
        each for codes, is_last in handed for each in (codes if is_last else codes[:-LOOKAHEAD])
    ]
    assert sounded == [0, 0, 0, *range(1, sum(turn) + 1)]
    assert all(len(codes) <= 28 for codes, _ in handed)
    assert all(len(unit_sizes) <= 2 for unit_sizes in sizes)


def vocoder(codes: int = 60) -> PieceVocoder:
    noise = np.random.default_rng(1).normal(0, 3000, (codes, 240 + 960 + 240))
    return PieceVocoder(
        frame=960, overlap=240, search=240, silent_code=0, pieces=noise.astype(np.int16)
    )


@given(turn=st.lists(st.integers(0, 25), min_size=1, max_size=4))
def test_sound_in_portions_is_the_sound_of_the_whole(turn: list[int]) -> None:
    """Chunks would click at their borders, or drift."""
    player = vocoder(sum(turn) + 1)
    _, handed = portions(turn)
    state, pieces = None, []
    for codes, is_last in handed:
        request = Vocode(codes=codes, state=state, last=is_last, voice=None)
        ((pcm, state),) = player.sound([request])
        pieces.append(pcm)
    all_codes = (0, 0, 0, *range(1, sum(turn) + 1))
    whole = Vocode(codes=all_codes, state=None, last=True, voice=None)
    ((expected, _),) = player.sound([whole])
    assert np.array_equal(np.concatenate(pieces), expected)
    assert len(expected) == 960 * len(all_codes)
