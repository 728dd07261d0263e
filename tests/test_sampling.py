"""What `make test` leaves out of tests with many cases, and that `make soak` does not."""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

import attrs
import pytest

from tests.project.sampling import CASES_MIN, SHARE, sampled

MANY: Final = 400
ROOT: Final = Path(__file__).parents[1]


@attrs.frozen
class Case:
    """A collected test, as far as sampling looks at it."""

    nodeid: str
    mark: str = ""

    def get_closest_marker(self, name: str) -> bool | None:
        """As pytest's."""
        return name == self.mark or None


def cases(name: str, count: int, mark: str = "") -> list[pytest.Item]:
    """Make the cases of one test."""
    made = [Case(f"tests/test_it.py::{name}[{number}]", mark) for number in range(count)]
    return cast("list[pytest.Item]", made)


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (CASES_MIN, CASES_MIN), (MANY, MANY // SHARE)])
def test_some_of_many_cases_are_chosen(count: int, kept: int) -> None:
    """All of them run, or none."""
    every = cases("a", count)
    chosen, left_out = sampled(every)
    assert len(chosen) == kept
    assert set(chosen) | set(left_out) == set(every)
    assert chosen == [item for item in every if item in chosen]


def test_a_case_is_chosen_whatever_others_there_are() -> None:
    """Each change of one test would choose others of all."""
    assert (
        sampled(cases("a", MANY) + cases("b", MANY))[0][: MANY // SHARE]
        == (sampled(cases("a", MANY))[0])
    )


def test_promises_are_kept_whole() -> None:
    """A golden log would not be replayed."""
    assert not sampled(cases("a", MANY, "whole"))[1]


def test_of_costly_cases_two_are_chosen() -> None:
    """Four cases of a second each take as long as hundreds of quick ones."""
    assert len(sampled(cases("a", CASES_MIN, "costly") + cases("b", 1, "costly"))[0]) == 3


def test_a_case_of_two_loops_runs_on_one() -> None:
    """Most of what does not depend on the loop runs twice, or one of the two is never tried."""
    names = [f"tests/test_it.py::{name}" for name in ("a", "b", "c", "d")]
    every = [
        Case(f"{name}[{loop}{case}]")
        for name in names
        for loop in ("asyncio", "trio")
        for case in ("", "-1", "-2")
    ]
    chosen = [it.nodeid for it in sampled(cast("list[pytest.Item]", every))[0]]
    assert len(chosen) == len(names) * 3
    assert {"asyncio" in name for name in chosen} == {True, False}


def test_the_golden_logs_are_promises(pytestconfig: pytest.Config) -> None:
    """They are the first to be forgotten."""
    text = (ROOT / "tests" / "test_golden.py").read_text("utf-8")
    assert text.count('@pytest.mark.whole\n@pytest.mark.parametrize("path", LOGS') == 3
    assert any(marker.startswith("whole:") for marker in pytestconfig.getini("markers"))


def test_the_soak_leaves_nothing_out() -> None:
    """What `make test` leaves out would run nowhere."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    soak = [line for line in makefile.splitlines() if "HYPOTHESIS_PROFILE=soak" in line]
    assert [line.rpartition("-m ")[2] for line in soak] == ["hypothesis", "'not hypothesis'"]
