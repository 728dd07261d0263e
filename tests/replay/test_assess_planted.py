"""A suite for `tiny`: a change that is planted in a model is found, and named by a measure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.assess.command import Mode, of_measured
from replay.eval.evaluate import MEASURES, Baseline, Evaluation, sum_up, verdict_of
from runtime.model.engine.backend import EngineBackend
from tests.project.sampling import sample
from tests.replay.assessed import PLANTED, record_talks, run_on, tiny

SESSIONS = sample(12, 8)
"""With eight, a sign test can just give p below `P_MAX`."""
P_MAX = 0.01

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return record_talks(tmp_path_factory.mktemp("talks"), SESSIONS, tiny(1))


@pytest.fixture(scope="module")
def baseline(logs: list[Path]) -> Callable[[Mode], Baseline]:
    """What the model itself does."""
    made: dict[Mode, Baseline] = {}

    def of(mode: Mode) -> Baseline:
        if mode not in made:
            done = run_on(logs, mode, EngineBackend(tiny()))
            made[mode] = of_measured("tiny", done.measured)
        return made[mode]

    return of


Found = tuple[str, int]
"""A measure, and the sign of its difference."""


FEW_CHANGES: list[tuple[Mode, str, list[Found]]] = [
    ("forced", "another voice of the vocoder", [("sound_otherwise", 1)])
]
"""In one mode. `test_assess.py` finds a model that may speak at once, on fewer sessions."""
CHANGES: list[tuple[Mode, str, list[Found]]] = [
    *FEW_CHANGES,
    ("forced", "weights of a layer, 10 %", [("silence_margin", -1)]),
    ("forced", "may speak at once", [("decisions", 1), ("take_overs_added", 1)]),
    ("forced", "listens less", [("silence_margin", -1)]),
    ("forced", "another voice in the prompt", [("logits_otherwise", 1)]),
    ("forced", "weights of a layer, 100 %", [("decision_agreement", -1)]),
    ("open", "may speak at once", [("time_to_first_audio", -1), ("overlap", -1)]),
    ("open", "weights of a layer, 100 %", [("near_tie_rate", 1)]),
]

Judge = Callable[[Mode, str], Evaluation]


@pytest.fixture(scope="module")
def judged(logs: list[Path], baseline: Callable[[Mode], Baseline]) -> Judge:
    """Compares a model with a planted change to `tiny`, once for each mode and change."""

    @functools.cache
    def judge(mode: Mode, name: str) -> Evaluation:
        return sum_up(run_on(logs, mode, PLANTED[name]()).measured, None, baseline(mode))

    return judge


@pytest.mark.parametrize(("mode", "name", "found"), sample(CHANGES, FEW_CHANGES))
def test_a_planted_change_is_found(
    judged: Judge, mode: Mode, name: str, found: list[Found]
) -> None:
    """A checkpoint that became worse would be deployed."""
    done = judged(mode, name)
    assert done.count("measured") == SESSIONS
    assert done.comparison is not None
    for measure, sign in found:
        one = done.comparison.paired[measure]
        assert one.p <= P_MAX, (measure, one)
        assert one.low * sign > 0 < one.high * sign, (measure, one)
        assert verdict_of(MEASURES[measure], one)


@pytest.mark.soak  # `test_assess.py` compares `tiny` with itself, on fewer sessions.
@pytest.mark.parametrize("mode", ["open", "forced"])
def test_no_change_is_found_where_there_is_none(judged: Judge, mode: Mode) -> None:
    """Each build would fail."""
    done = judged(mode, "none")
    assert done.comparison is not None
    assert {(it.difference, it.p) for it in done.comparison.paired.values()} == {(0, 1)}


def test_only_what_was_changed_differs(judged: Judge) -> None:
    """A change of the sound would be blamed on the decisions."""
    done = judged("forced", "another voice of the vocoder")
    assert done.comparison is not None
    apart = {name for name, it in done.comparison.paired.items() if it.difference}
    assert apart == {"sound_otherwise"}
    assert done.summary["sound_otherwise"].value == 1


@pytest.mark.soak  # `test_forced.py` tells half precision from a regression.
def test_half_precision_changes_no_decision(judged: Judge) -> None:
    """A port to another format could not be told from a model that decides otherwise."""
    done = judged("forced", "half precision")
    assert done.summary["decision_agreement"].value == 1
    assert done.comparison is not None
    assert 0 < abs(done.comparison.paired["silence_margin"].difference) < 0.03
