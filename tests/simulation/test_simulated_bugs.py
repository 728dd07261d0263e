"""The simulation finds what is planted."""

from __future__ import annotations

import re

import pytest

from tests.simulation.simulated_bugs import BUGS, planted
from tests.simulation.simulated_server import simulate

WINDOW = 40
"""Each bug is found within so many seeds, of all that are run."""


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_found(name: str) -> None:
    """The simulation is green for nothing, and the bug would reach users."""
    with planted(name):
        bug = BUGS[name]
        seeds = range(bug.first, bug.first + WINDOW)
        said = (text for seed in seeds for text in simulate(seed).violations)
        assert any(re.search(bug.found_as, text) for text in said)
