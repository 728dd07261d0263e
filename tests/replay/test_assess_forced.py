"""The measures of `--mode forced`, from units that are made by hand, and from a model's logits."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.model import DuplexConfig, Opening, Unit, UnitResult
from replay.eval.evaluate import MEASURES
from replay.eval.scores import ForcedSession
from replay.rerun.outputs import NEAR_TIE_DRAW_GAP, NEAR_TIE_MARGIN
from runtime.measures.conversation import KINDS, Ratio, Total
from runtime.model.backends.base import Choice, Forced, ForcedResult, ListenDecision
from runtime.model.backends.minicpmo.sampling import listen_decision
from runtime.model.engine.backend import EngineBackend
from tests.models.random_model import opening
from tests.replay.assessed import tiny
from tests.replay.evaluated import loud

LISTEN, SPEAK = 613, 614
QUIET = bytes(64_000)


@attrs.frozen(kw_only=True)
class Drawn:
    """One unit of a session: what was recorded, and what the model decides."""

    is_open: bool = False
    was: bool = True
    now: bool = True
    is_free: bool = True
    margin: float | None = 1.5
    listen: float = 0.25
    ends: float = 0.5
    is_near: bool = False
    heard_ms: int = 0
    tokens: tuple[bool, ...] = ()
    codes: tuple[bool, ...] = ()
    sound: bool | None = None
    logits: bool | None = None
    is_taken: bool = True

    @property
    def result(self) -> UnitResult:
        pcm = b"" if self.sound is None else bytes(4)
        ids = (LISTEN if self.was else SPEAK, *range(len(self.tokens)))
        codes = tuple(range(len(self.codes)))
        return UnitResult(
            index=0,
            is_listen=self.was,
            pcm=pcm,
            kv_length=1,
            decided_ids=ids,
            codec_ids=codes,
            input_hash="",
            logits_hash="" if self.logits is None else "as recorded",
        )

    @property
    def forced(self) -> ForcedResult:
        recorded, first = self.result, []
        if self.is_free and self.was != self.now:
            gap = NEAR_TIE_DRAW_GAP / 2 if self.is_near else 0.5
            first = [Choice(stage="llm", step=0, recorded=1, own=2, draw_gap=gap, margin=3)]
        more = [
            Choice(stage=stage, step=step + (stage == "llm"), recorded=1, own=2)
            for stage, parted in (("llm", self.tokens), ("tts", self.codes))
            for step, is_other in enumerate(parted)
            if is_other
        ]
        made = recorded if self.is_taken else attrs.evolve(recorded, decided_ids=(99,))
        if self.sound:
            made = attrs.evolve(made, pcm=b"\x00\x00\x80\x3f")
        if self.logits:
            made = attrs.evolve(made, logits_hash="others")
        lean = ListenDecision(
            is_open=self.is_open,
            was_silent=self.was,
            is_silent=self.now,
            margin=self.margin,
            listen=self.listen,
            turn_end=self.ends,
        )
        lean_or_none = lean if self.is_free else None
        return ForcedResult(result=made, choices=(*first, *more), listen_decision=lean_or_none)

    @property
    def unit(self) -> Unit:
        """Its sound begins at a frame of the detector."""
        pcm = loud((0.0, self.heard_ms / 1000)) if self.heard_ms else QUIET
        return Unit(index=0, pcm=pcm)


def measured(units: list[Drawn]) -> dict[str, Any]:
    session = ForcedSession()
    for each in units:
        session.take(each.unit, each.result, each.forced)
    return dict(session.scores())


def value(found: dict[str, Any], name: str) -> Fraction | None:
    """A measure in its unit, as a fraction."""
    match found.get(name):
        case Ratio(part=part, whole=whole):
            scale = {"share": 1, "logits": 10**6, "%": 10**7}[MEASURES[name].unit]
            return Fraction(part, whole * scale)
        case Total(amount=amount):
            return Fraction(amount)
        case None:
            return None
    raise AssertionError(name)


def share(values: list[bool]) -> Fraction | None:
    return Fraction(sum(values), len(values)) if values else None


shares = st.integers(0, 1000).map(lambda value: value / 1000)
drawn = st.builds(
    Drawn,
    is_open=st.booleans(),
    was=st.booleans(),
    now=st.booleans(),
    is_free=st.sampled_from([True, True, True, False]),
    margin=st.none() | st.integers(-50, 50).map(lambda value: value / 10),
    listen=shares,
    ends=shares,
    is_near=st.booleans(),
    heard_ms=st.sampled_from([0, 0, 1000]),
    tokens=st.lists(st.booleans(), max_size=3).map(tuple),
    codes=st.lists(st.booleans(), max_size=3).map(tuple),
    sound=st.none() | st.booleans(),
    logits=st.none() | st.booleans(),
    is_taken=st.sampled_from([True] * 9 + [False]),
)


@given(st.lists(drawn, max_size=8))
def test_each_measure_is_what_its_definition_says(units: list[Drawn]) -> None:
    """A number would be of other units than those that its definition names."""
    found = measured(units)
    taken = [it.is_taken for it in units]
    kept = units[: taken.index(False)] if False in taken else units
    free = [it for it in kept if it.is_free]
    flips = [it for it in free if it.was != it.now]
    over = [it for it in free if it.is_open and it.heard_ms]
    margins = [Fraction(str(it.margin)) for it in free if it.margin is not None]
    expected = {
        "decisions": Fraction(len(free)),
        "decision_agreement": share([it.was == it.now for it in free]),
        "take_overs_missed": share([it.now for it in free if not it.is_open and not it.was]),
        "take_overs_added": share([not it.now for it in free if not it.is_open and it.was]),
        "stops_missed": share([not it.now for it in free if it.is_open and it.was]),
        "stops_added": share([it.now for it in free if it.is_open and not it.was]),
        "near_tie_flips": share([it.is_near for it in flips]),
        "silence_margin": sum(margins) / len(margins) if margins else None,
        "barge_in_stops": share([it.now for it in over]),
        "barge_in_listen_probability": _percent([it.listen for it in over]),
        "barge_in_end_probability": _percent([it.ends for it in over]),
        "logits_otherwise": share([it.logits for it in kept if it.logits is not None]),
        "tokens_otherwise": _parts(
            sum(sum(it.tokens) for it in kept) + len(flips), sum(1 + len(it.tokens) for it in free)
        ),
        "codes_otherwise": share([other for it in kept for other in it.codes]),
        "sound_otherwise": share([it.sound for it in kept if it.sound is not None]),
        "units_elsewhere": Fraction(len(units) - len(kept)),
    }
    assert [*expected] == [it.name for it in MEASURES.values() if it.modes == "forced"]
    assert {name: value(found, name) for name in expected} == expected
    assert all(KINDS[type(it)] == MEASURES[name].kind for name, it in found.items())


def _percent(values: list[float]) -> Fraction | None:
    return sum(Fraction(str(it)) * 100 for it in values) / len(values) if values else None


def _parts(part: int, whole: int) -> Fraction | None:
    return Fraction(part, whole) if whole else None


@pytest.mark.parametrize(("heard_ms", "is_counted"), [(0, False), (300, False), (500, True)])
def test_a_cough_is_no_barge_in(heard_ms: int, is_counted: bool) -> None:
    """Noises would count as interruptions that the model did not notice."""
    found = measured([Drawn(), Drawn(is_open=True, heard_ms=heard_ms)])
    assert ("barge_in_stops" in found) is is_counted


def test_a_near_tie_is_that_of_replay() -> None:
    """A listed unit and the measure would disagree on a decision."""
    near = [Drawn(was=False, is_near=True), Drawn(was=False)]
    assert value(measured(near), "near_tie_flips") == Fraction(1, 2)
    assert NEAR_TIE_MARGIN > 0


# -- with a model ---------------------------------------------------------------------------------


def test_a_leaning_is_of_the_logits() -> None:
    """A margin would leave out the penalties that decide, or a probability have them."""
    tokens = tiny(1).tokens
    ids, logits = tokens.ids, np.zeros(672)
    logits[ids.listen], logits[ids.speak], logits[ids.turn_eos] = 3.0, 2.0, 4.0
    config = DuplexConfig(listen_prob_scale=0.5, length_penalty=2.0)
    ask = {"config": config, "tokens": tokens, "own": ids.speak, "recorded": ids.listen}
    total = np.exp(logits).sum()
    closed = listen_decision(logits, (), is_open=False, **ask)  # type: ignore[arg-type]
    assert closed.margin == pytest.approx(3 + np.log(0.5) - 2)
    assert (closed.listen, closed.turn_end) == (
        pytest.approx(np.exp(3) / total),
        pytest.approx(np.exp(4) / total),
    )
    assert (closed.was_silent, closed.is_silent, closed.is_open) == (True, False, False)
    within = listen_decision(logits, (ids.listen,), is_open=True, **ask)  # type: ignore[arg-type]
    assert within.margin == pytest.approx(max(3 / 1.05 + np.log(0.5), 4 / 2) - 2)
    ask |= {"own": ids.turn_eos, "config": attrs.evolve(config, listen_prob_scale=0.0)}
    assert listen_decision(logits, (), is_open=False, **ask).margin is None  # type: ignore[arg-type]
    assert not listen_decision(logits, (), is_open=False, **ask).is_silent  # type: ignore[arg-type]
    assert listen_decision(logits, (), is_open=True, **ask).is_silent  # type: ignore[arg-type]
    assert logits[ids.listen] == 3.0


async def _forced_first(
    backend: EngineBackend, what: Opening, unit: Unit, ids: Any
) -> ForcedResult:
    session = await backend.open(what, slot=0)
    try:
        return await session.run_forced(unit, Forced(decided_ids=ids, codec_ids=()))
    finally:
        await session.release()


def test_a_forced_decision_hides_no_own_one() -> None:
    """The recorded decision would be reported as the model's own."""
    backend = EngineBackend(tiny(1))
    what = attrs.evolve(opening(), instructions="You are a helpful assistant.")
    unit = Unit(index=0, pcm=QUIET)
    for ids, was in (((LISTEN,), True), ((SPEAK, 616), False)):
        made = anyio.run(_forced_first, backend, what, unit, ids)
        assert made.listen_decision is not None
        assert (made.listen_decision.was_silent, made.listen_decision.is_silent) == (was, True)
        assert made.listen_decision.margin is not None
        assert made.listen_decision.margin > 5
        assert made.listen_decision.listen > 0.99
    early = opening(force_listen_count=1)
    assert anyio.run(_forced_first, backend, early, unit, (LISTEN,)).listen_decision is None
