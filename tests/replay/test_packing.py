"""What is held of thousands of recordings: as small as promised, and nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.eval.evaluate import Summary, Values, row_of, scores_json
from replay.eval.table import MEASURES
from replay.shared.commands import print_json
from runtime.measures.measure import Measure, Ratio, Scores, Times, Total, Value

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
