"""Mutants of the source are what they say, and are judged by tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import (
    AREAS,
    EQUIVALENT,
    SURVIVED,
    Copy,
    Mutant,
    Source,
    drawn,
    mutants_of,
    nearest,
)
from tests.project.sampling import sample

COUNT = sample(100, 24)


@pytest.fixture(scope="module")
def chosen() -> list[Mutant]:
    """Mutants of all areas."""
    return drawn(1, COUNT)


def test_each_mutant_is_one_change_that_can_be_parsed(chosen: list[Mutant]) -> None:
    """A mutant that is no Python is caught by anything, and shows nothing."""
    source, before = Source("a.py", Path(__file__).read_bytes()), dict[str, str]()
    for mutant in (*chosen, *source.mutants()):
        path = __file__ if mutant.path == "a.py" else mutant.path
        data = Path(path).read_bytes()
        if path not in before:
            before[path] = ast.dump(ast.parse(data))
        assert ast.dump(ast.parse(mutant.applied(data))) != before[path], mutant.name


def test_what_is_mutated() -> None:
    """A kind of mistake is never tried, or what only a developer reads is taken for one."""
    text = """LIMIT = 5
class A:
    def take(self, n: int = 1) -> bool:
        '''Do it 3 times.'''
        assert n < 9
        _logger.info("%d", 7)
        if not n:
            raise ValueError(2 + 2)
        self.size += 1
        self.name = "a" + "b"
        self.go(n)
        return n <= self.size and True
"""
    found = [it.name.split(": ", 1)[1] for it in Source("a.py", text.encode()).mutants()]
    assert [name.rsplit(" -> ", 1)[1] for name in found] == [
        "if (n):",
        "self.size -= 1",
        "self.size += 2",
        "pass",
        "pass",
        "return n <= self.size or True",
        "return n < self.size and True",
        "return n <= self.size and False",
    ]


def test_as_many_of_each_area_are_drawn_and_the_same_again(chosen: list[Mutant]) -> None:
    """One area is never tried, or a mutant that survived is not to be found again."""
    for area in AREAS:
        assert sum(it.path.startswith(area) for it in chosen) == COUNT // len(AREAS)
    assert mutants_of.__wrapped__("protocol/wire") == mutants_of("protocol/wire")
    assert chosen == drawn(1, COUNT)
    assert len({it.name for it in chosen}) == COUNT
    assert all(nearest(it.path) for it in chosen)


def test_those_that_change_nothing_are_there() -> None:
    """A reason stands for code that has gone."""
    names = {it.name for area in AREAS for it in mutants_of(area)}
    assert set(EQUIVALENT) <= names


@pytest.mark.soak
def test_a_mutant_is_caught_and_the_copy_is_as_it_was(tmp_path: Path) -> None:
    """All would survive, or all be caught, whatever the tests do."""
    copy = Copy(tmp_path)
    (mutant,) = (
        it
        for it in mutants_of("protocol/machine")
        if "Slot.release: self.step.do(ef.Release" in it.name and it.text == "pass"
    )
    assert copy.judge(mutant) not in ("", SURVIVED)
    copied = tmp_path / mutant.path
    assert copied.read_bytes() == Path(mutant.path).read_bytes()
    assert copy.failed(["tests/protocol/test_modes.py"]) == ""
