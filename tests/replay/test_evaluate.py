"""What is held of thousands of recordings, and two evaluations compared: differences and p."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.eval import evaluate as paired
from replay.eval.condition import ConditionError, judge, parse
from replay.eval.evaluate import (
    ALL_SIGNS_MAX,
    MEASURES,
    Baseline,
    Comparison,
    Paired,
    Summary,
    Values,
    chance,
    compare,
    row_of,
    scores_json,
)
from replay.shared.commands import print_json
from runtime.measures.conversation import Measure, Ratio, Scores, Times, Total, Value

# -- a recording, packed ---------------------------------------------------------------------------


BYTES_MAX = 2_000
NUMBERS = st.integers(-(1 << 62), 1 << 62)


def value_of(measure: Measure) -> st.SearchStrategy[Value]:
    """Draw a value."""
    if measure.kind == "times":
        return st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4).map(
            lambda values: Times(tuple(values))
        )
    if measure.kind == "total":
        return NUMBERS.map(Total)
    return st.builds(Ratio, NUMBERS, st.integers(1, 1 << 62))


SCORES = st.fixed_dictionaries({}, optional={name: value_of(it) for name, it in MEASURES.items()})
BODIES = st.dictionaries(st.text(max_size=9), st.text() | st.booleans() | st.floats(-9, 9))


@given(SCORES, BODIES)
def test_a_row_keeps_what_was_measured(scores: Scores, about: dict[str, object]) -> None:
    """It gives what it was made of, with lone surrogates too."""
    about.pop("measures", None)
    row = row_of("a log", scores, about)
    assert row.scores == scores
    assert row.own == Summary.of("a log", scores)
    assert row.body == {**about, "measures": scores_json(scores)}
    assert dict(row.values) == {name: it.value for name, it in row.own.items()}
    assert row.with_body(more=1).body == {**about, "more": 1, "measures": scores_json(scores)}


def test_a_row_is_small() -> None:
    """A session with all measures, ten moments each."""
    scores: dict[str, Value] = {}
    for number, (name, measure) in enumerate(MEASURES.items()):
        moments = tuple((7_919_000_000 * at + number, 104_729_000 * at) for at in range(1, 11))
        if measure.kind == "times":
            scores[name] = Times(moments)
        else:
            scores[name] = Total(number) if measure.kind == "total" else Ratio(number, 97)
    row = row_of("recordings/rec-000017.session.zst", scores, {"recording_id": "rec-000017"})
    assert len(row.packed) < BYTES_MAX
    assert len(row.values) == len(MEASURES)


def test_numbers_that_no_server_writes_are_refused() -> None:
    """They would fail later, when a report is written."""
    with pytest.raises(OverflowError):
        row_of("a log", {"errors": Total(10**400)}, {})


def test_values_have_what_was_measured() -> None:
    """An absent measure is absent, and not 0."""
    values = Values({"errors": 0, "overlap": 1.5})
    assert values == {"errors": 0, "overlap": 1.5}
    assert values.get("response_delay") is None
    assert "errors" in values


@pytest.mark.parametrize("items", [[], [1], [{"a": [1, {}]}, {"b": "\n\ud800"}]])
def test_an_iterator_is_printed_as_an_array(
    items: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """Item by item, and to the byte as it would be written at once."""
    body = {"before": {"x": [1]}, "items": items, "after": None}
    print_json({**body, "items": iter(items)})
    assert capsys.readouterr().out == json.dumps(body, indent=2) + "\n"


# -- two evaluations compared ----------------------------------------------------------------------


numbers = st.floats(-5, 5).map(lambda value: round(value, 3))


def own(**values: float) -> dict[str, float]:
    """Make a session that has some measures: seconds, counts or hundredths."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        match MEASURES[name].kind:
            case "times":
                made[name] = Times(((0, round(value * 1e9)),))
            case "total":
                made[name] = Total(round(value))
            case "ratio":
                made[name] = Ratio(round(value * 100), 100)
    return {name: it.value for name, it in Summary.of("a log", made).items()}


def compared(here: list[float], before: list[float], name: str = "response_delay") -> Comparison:
    """Compare sessions that have one measure."""
    owns = {str(at): own(**{name: value}) for at, value in enumerate(here)}
    others = {str(at): own(**{name: value}) for at, value in enumerate(before)}
    return compare(Baseline(name="before", owns=others), owns)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=30))
def test_the_same_values_differ_by_nothing(values: list[float]) -> None:
    """A model would be found to be worse than itself."""
    found = compared(values, values).paired["response_delay"]
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert paired.verdict_of(MEASURES["response_delay"], found) == ""


@given(st.lists(numbers, min_size=1, max_size=8))
def test_chance_is_that_of_all_signs(apart: list[float]) -> None:
    """A p would be of another test than the one that is described."""
    ways = [
        sum(s * value for s, value in zip(signs, apart, strict=True))
        for signs in product((1, -1), repeat=len(apart))
    ]
    hits = sum(abs(way) >= abs(sum(apart)) - 1e-9 for way in ways)
    assert chance(np.array(apart)) == pytest.approx(hits / len(ways), abs=1e-12)


def test_drawn_signs_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of fourteen sessions would be judged otherwise than one of thirteen."""
    draw = np.random.default_rng(1)
    for shift in (0.0, 0.4, 0.9):
        apart = draw.normal(shift, 1, ALL_SIGNS_MAX)
        exact = chance(apart)
        with monkeypatch.context() as patch:
            patch.setattr(paired, "ALL_SIGNS_MAX", 0)
            assert chance(apart) == pytest.approx(exact, abs=0.015)


def test_chance_alone_is_rarely_called_a_difference() -> None:
    """Each twentieth comparison may be called one: more, and a CI would cry wolf."""
    draw, false, missed = np.random.default_rng(2), 0, 0
    for _ in range(200):
        noise = np.round(draw.normal(1, 0.5, (2, 20)), 6).clip(0)
        found = compared(list(noise[0]), list(noise[1])).paired["response_delay"]
        false += found.p <= 0.05
        missed += not found.low <= 0 <= found.high
    assert 2 <= false <= 20
    assert 2 <= missed <= 26  # the interval of a bootstrap is somewhat too narrow


def test_a_shift_is_found_with_its_size() -> None:
    """A regression would be shown with the wrong sign or size."""
    draw = np.random.default_rng(3)
    before = draw.uniform(1, 2, 40)
    found = compared(list(before + draw.normal(0.3, 0.2, 40)), list(before))
    one = found.paired["response_delay"]
    assert one.low < 0.3 < one.high < 0.45
    assert one.difference == pytest.approx(one.value - one.baseline, abs=1e-5)
    assert (one.recordings, one.p) == (40, 0.0001)
    assert paired.verdict_of(MEASURES["response_delay"], one) == "worse"
    assert len(found.own) == 40


@pytest.mark.parametrize(
    ("measure", "sign", "verdict"),
    [
        ("response_delay", 1, "worse"),
        ("response_delay", -1, "better"),
        ("take_over_rate", 1, "better"),
        ("take_over_rate", -1, "worse"),
        ("near_tie_rate", 1, "other"),
    ],
)
def test_the_direction_is_the_measure_s(measure: str, sign: int, verdict: str) -> None:
    """A model that answers sooner would be called worse."""
    low, high = sorted((sign * 0.1, sign * 0.3))
    found = Paired(
        recordings=9, unpaired=0, value=1, baseline=1, difference=0.2, low=low, high=high, p=0.01
    )
    assert paired.verdict_of(MEASURES[measure], found) == verdict
    assert paired.verdict_of(MEASURES[measure], attrs.evolve(found, p=0.06)) == ""


def test_one_session_proves_nothing() -> None:
    """One bad conversation would fail a build."""
    found = compared([3], [1]).paired["response_delay"]
    assert (found.difference, found.p) == (2, 1)
    assert paired.verdict_of(MEASURES["response_delay"], found) == ""


def test_sessions_that_have_a_measure_once_are_counted() -> None:
    """A model that no longer answers would have the delays of the answers that are left."""
    owns = {"a": own(response_delay=1, errors=0), "b": own(errors=2), "c": own(errors=1)}
    others = {"a": own(response_delay=2), "b": own(response_delay=1, errors=1)}
    found = compare(Baseline(name="before", owns=others), owns)
    assert found.sessions == 2
    delay, errors = found.paired["response_delay"], found.paired["errors"]
    assert (delay.recordings, delay.unpaired, delay.difference) == (1, 1, -1)
    assert (errors.recordings, errors.unpaired, errors.difference) == (1, 1, 1)
    assert found.own == {"a": {"response_delay": -1}, "b": {"errors": 1}}


def test_draws_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a million sessions would need 80 GB; and its numbers would depend on portions."""
    draw = np.random.default_rng(4)
    apart = draw.normal(0.1, 1, 50)
    whole = chance(apart), paired._interval(apart)
    sizes = list(paired._portions(1 << 19))
    assert (max(sizes), sum(sizes)) == (2, paired.DRAWS)
    monkeypatch.setattr(paired, "NUMBERS_MAX", 50 * 7)
    assert (chance(apart), paired._interval(apart)) == whole


# -- conditions -----------------------------------------------------------------------------------


def test_conditions_read_a_comparison() -> None:
    """A CI could not fail on a difference."""
    found = compared([1, 2, 3], [1, 1, 1]).paired
    texts = ["response_delay.difference > 0.5", "response_delay.p < 0.05", "errors.low > 0"]
    met, unknown = judge(map(parse, texts), {}, found)
    assert met == ["response_delay.difference > 0.5 (it is 1)"]
    assert unknown == ["'errors.low > 0': no recording has errors in both"]
    assert not parse(texts[0]).is_of_recordings


@pytest.mark.parametrize("text", ["errors.p90 > 1", "errors. > 1", ".p > 1", "errors_p90.p > 1"])
def test_what_is_no_statistic_of_a_comparison(text: str) -> None:
    """A misspelt condition would never hold."""
    with pytest.raises(ConditionError, match="is not a measure"):
        parse(text)
