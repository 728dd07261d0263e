"""Teacher forcing: a model that decides what it is told to, and says how far it was from that."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.values.model import Cut, DuplexConfig, Opening, Unit, UnitResult
from runtime.model.backends.base import BackendError, Choice, Forced, ForcedResult, Forces
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.sampling import (
    Candidates,
    choose,
    choose_gap,
    code_gap,
    decide,
    decide_code,
    token_gap,
    untempered,
    untempered_gap,
    untempered_room,
)
from runtime.model.backends.scripted import ScriptedBackend
from runtime.model.backends.scripted_chat import CHUNK_EOS_ID
from runtime.model.engine.backend import EngineBackend
from tests.models import random_model
from tests.models.blocking import alone, open_session
from tests.models.random_model import CODES, facts, opening, unit

Logits = NDArray[np.float64]
UNITS = 6
SEED, OTHER = 3, 4
A_BIT = 1e-9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    """Random weights: a model that speaks over several units."""
    return random_model.load(tmp_path_factory.mktemp("model"), slots=1)


def units() -> list[Unit]:
    return [unit(index, SEED, force_listen=index == 4) for index in range(UNITS)]


def record(model: DuplexModel, what: Opening, cuts: dict[int, Cut]) -> list[UnitResult]:
    """Run a session; units are cut where `cuts` says."""
    session = open_session(model, what)
    results = []
    for each in units():
        results.append(session.run_unit(each, cuts.get(each.index)))
        session.finalize(each.index, interrupted=each.index in cuts)
    session.release()
    return results


@pytest.fixture(scope="module")
def plain(model: DuplexModel) -> list[UnitResult]:
    """A session of which no unit is cut; not to be changed."""
    return record(model, opening(SEED), {})


def run_forced(
    model: DuplexModel, what: Opening, recorded: Sequence[UnitResult]
) -> list[ForcedResult]:
    """Run a session that decides what another did."""
    session, made = model.session(what, slot=0), []
    alone(session.open(), model.compute)
    for each, result in zip(units(), recorded, strict=True):
        steps = session.forced_unit(each, result.cut, Forced.of(result))
        made.append(alone(steps, model.compute))
        finalize = session.finalize(each.index, interrupted=result.cut is not None)
        alone(finalize, model.compute)
    session.release()
    return made


@pytest.mark.parametrize(
    "cuts", [{}, {1: Cut(stage="llm", step=2), 2: Cut(stage="tts", step=5)}], ids=["whole", "cut"]
)
def test_forced_to_its_own_decisions_it_is_itself(model: DuplexModel, cuts: dict[int, Cut]) -> None:
    """Forcing would change what it is to judge."""
    recorded = record(model, opening(SEED), cuts)
    assert sum(len(result.codec_ids) > 0 for result in recorded) >= 2
    made = run_forced(model, opening(SEED), recorded)
    assert [facts(one.result) for one in made] == [facts(result) for result in recorded]
    assert all(one.choices == () for one in made)


def test_forced_to_others_decisions_it_hears_and_says_what_they_did(
    model: DuplexModel, plain: list[UnitResult]
) -> None:
    """After one other token, each later unit would be judged on input that was never recorded."""
    recorded = plain
    own = record(model, opening(OTHER), {})
    assert own[-1].logits_hash != recorded[-1].logits_hash
    made = run_forced(model, opening(OTHER), recorded)
    assert [facts(one.result) for one in made] == [facts(result) for result in recorded]
    assert sum(bool(one.choices) for one in made) >= UNITS // 2
    first = made[0].choices[0]
    assert (first.recorded, first.own) == _parted(recorded[0], own[0])
    assert first.draw_gap is None or first.draw_gap > 0


def _parted(one: UnitResult, other: UnitResult) -> tuple[int, int]:
    pairs = zip(one.decided_ids, other.decided_ids, strict=False)
    return next(pair for pair in pairs if pair[0] != pair[1])


def test_without_chance_only_the_logits_tell(model: DuplexModel) -> None:
    """A near-tie of a session at temperature 0 would be measured by a draw that nobody made."""
    recorded = record(model, opening(SEED, temperature=1.5), {})
    made = run_forced(model, opening(SEED, temperature=0), recorded)
    choices = [c for one in made for c in one.choices if c.stage == "llm"]
    assert choices
    assert all(choice.draw_gap is None for choice in choices)
    assert all(choice.margin is None or choice.margin >= 0 for choice in choices)


def test_behind_the_recorded_ids_it_decides_by_itself(
    model: DuplexModel, plain: list[UnitResult]
) -> None:
    """A model whose units are longer than they were would stop with an error."""
    recorded = [*plain]
    spoken = next(result for result in recorded if len(result.decided_ids) > 3)
    short = attrs.evolve(spoken, decided_ids=spoken.decided_ids[:2])
    recorded[spoken.index] = short
    made = run_forced(model, opening(SEED), recorded)
    assert made[spoken.index].result.decided_ids == spoken.decided_ids


def test_ids_that_are_none_fail_as_a_call(model: DuplexModel, plain: list[UnitResult]) -> None:
    """A log that somebody has changed would break the model for the sessions beside."""
    for ids in ((10**9,), (-7,)):
        broken = attrs.evolve(plain[0], decided_ids=ids)
        session = model.session(opening(SEED), slot=0)
        alone(session.open(), model.compute)
        steps = session.forced_unit(units()[0], None, Forced.of(broken))
        with pytest.raises(BackendError, match="unit 0 failed"):
            alone(steps, model.compute)
        session.release()
    assert [facts(one) for one in record(model, opening(SEED), {})] == [*map(facts, plain)]


@pytest.mark.anyio
async def test_an_engine_forces_too(model: DuplexModel, plain: list[UnitResult]) -> None:
    """A served model could not be replayed forced."""
    backend = EngineBackend(model)
    session = await backend.open(opening(SEED), slot=0)
    assert isinstance(session, Forces)
    made = await session.run_forced(units()[0], Forced.of(plain[0]))
    assert (facts(made.result), made.choices) == (facts(plain[0]), ())
    await session.release()


def test_a_script_takes_the_recorded_ids() -> None:
    """The token counts of a scripted session would drift from the recorded ones."""

    async def body() -> None:
        session = await ScriptedBackend().open(opening(), slot=0)
        forced = Forced(decided_ids=(1, 2, CHUNK_EOS_ID), codec_ids=(5,))
        made = await session.run_forced(unit(0), forced)
        assert made.result.fed_ids == (1, 2)
        assert made.result.kv_length == session.opened.prompt_length + 11 + 2
        assert [choice.step for choice in made.choices] == [0]
        assert (await session.finalize(0, interrupted=False)).kv_length == (
            made.result.kv_length + 2
        )

    anyio.run(body, backend="trio")


# -- how far a decision was -----------------------------------------------------------------------

LOGITS = st.lists(st.floats(-8, 8), min_size=2, max_size=12).map(np.array)
DRAWS = st.floats(0, 1, exclude_max=True)


def _nearby(draw: float, gap: float) -> list[float]:
    """The draws at a distance, and a bit further."""
    moved = [draw - gap - A_BIT, draw - gap, draw + gap, draw + gap + A_BIT]
    return [one for one in moved if 0 <= one < 1]


BOUNDS = st.tuples(st.floats(0.1, 2), st.integers(1, 12), st.floats(0.05, 1))
"""Temperature, top-k and top-p."""


@given(LOGITS, DRAWS, BOUNDS, st.data())
def test_a_gap_is_the_way_to_the_other_id(
    logits: Logits, draw: float, bounds: tuple[float, int, float], data: st.DataObject
) -> None:
    """A regression would be told as a near-tie, or a near-tie as a regression."""
    wanted = data.draw(st.integers(0, len(logits) - 1))
    chosen = choose(logits, draw, *bounds)
    gap = choose_gap(logits, draw, *bounds, wanted=wanted)
    if gap is None:
        draws = np.linspace(0, 1, 200, endpoint=False)
        assert wanted not in {choose(logits, float(one), *bounds) for one in draws}
    elif chosen == wanted:
        assert gap <= A_BIT
    else:
        assert wanted in {choose(logits, one, *bounds) for one in _nearby(draw, gap)}
        assert wanted not in {choose(logits, one, *bounds) for one in _nearby(draw, gap * 0.9)[1:3]}


@given(LOGITS, DRAWS, st.data())
def test_a_plain_sample_is_measured_likewise(
    logits: Logits, draw: float, data: st.DataObject
) -> None:
    """The end of a chunk, or a speech code, would be measured by another rule than it is drawn."""
    wanted = data.draw(st.integers(0, len(logits) - 1))
    chosen = untempered(logits, draw)
    gap = untempered_gap(logits, draw, wanted)
    room = untempered_room(logits, draw, chosen)
    assert gap is not None
    assert room is not None
    reached = {untempered(logits, one) for one in _nearby(draw, gap)}
    assert wanted in reached or draw + gap >= 1 - A_BIT
    left = {untempered(logits, one) for one in _nearby(draw, room)}
    assert left != {chosen} or draw + room >= 1 - A_BIT


@given(st.integers(0, 5000), st.sampled_from([0.0, 0.7, 1.5]))
def test_what_was_decided_is_no_way_off(model: DuplexModel, seed: int, temperature: float) -> None:
    """A decision would be measured by other logits than it was made from."""
    numbers = np.random.default_rng(seed)
    tokens, config = model.tokens, DuplexConfig(temperature=temperature)
    logits = numbers.normal(0, 3, model.runner.config.llm.vocab_size)
    history, pair = tuple(numbers.integers(0, 200, 5)), numbers.random(2)
    chosen = decide(Candidates(values=logits.copy()), history, pair, config, tokens)
    margin, gap = token_gap(logits, history, pair, config, tokens, own=chosen, wanted=chosen)
    assert margin == 0
    assert gap is None if temperature == 0 else (gap is not None and gap <= A_BIT)
    forbidden = next(index for index in tokens.forbidden if index != tokens.ids.chunk_eos)
    if chosen != tokens.ids.chunk_eos:
        never = token_gap(logits, history, pair, config, tokens, own=chosen, wanted=forbidden)
        assert never == (None, None)
    ends = token_gap(logits, history, pair, config, tokens, own=chosen, wanted=tokens.ids.chunk_eos)
    assert ends[0] is not None
    codes = numbers.normal(0, 3, CODES)
    code = decide_code(codes.copy(), (), float(pair[0]), CODES - 1, may_end=False)
    apart = code_gap(
        codes.copy(), (), float(pair[0]), CODES - 1, may_end=False, own=code, wanted=code
    )
    assert apart[0] == 0
    ended = code_gap(
        codes.copy(), (), float(pair[0]), CODES - 1, may_end=False, own=code, wanted=CODES - 1
    )
    assert ended == (None, None)


def test_a_choice_is_plain_values() -> None:
    """A choice could not be told as JSON."""
    choice = Choice(stage="llm", step=0, recorded=1, own=2, margin=0.5)
    assert attrs.asdict(choice)["draw_gap"] is None
