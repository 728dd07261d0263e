"""Full counts in `make soak`, and few in `make test`: one test body for both.

A test whose cases are many and alike takes `sample(all of them, a few)`; a test that repeats, for
seconds, what another one shows has the mark `soak`. Of all other tests with many cases, `make test`
runs those that `sampled` chooses, unless their file or name is given (`ARGS`): two where each case
takes about a second (the mark `costly`), all where each is a promise (`whole`). A case of two event
loops runs on one of them, which its name decides. `make soak` runs all, under the soak profile of
Hypothesis.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, TypeVar
from zlib import crc32

import pytest

Cases = TypeVar("Cases")

IS_SOAK: Final = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
ON_A_LOOP: Final = re.compile(r"\b(?:asyncio|trio)\b-?")
CASES_MIN: Final = 4
"""Of one test; if there are fewer, all run."""
CASES_MIN_COSTLY: Final = 2
"""The same of a test with the mark `costly`."""
SHARE: Final = 20
"""Of more, one in so many."""


def sample(every: Cases, few: Cases) -> Cases:
    """Choose every case under the soak profile, else a few; also for counts of cases."""
    return every if IS_SOAK else few


ONE_LOOP: Final = sample(("asyncio", "trio"), ("asyncio",))
"""Event loops of tests that take seconds, of what does not depend on the loop: those of
`test_engine.py`, with a model that computes nothing, and those of other media run on both."""


def sampled(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Choose cases of each test by a hash of their names; gives the others too, in their order."""
    cases = defaultdict[str, dict[str, pytest.Item]](dict)
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        if item.get_closest_marker("whole") is None:
            name, _, case = item.nodeid.partition("[")
            cases[name].setdefault(ON_A_LOOP.sub("", case), item)
    chosen = set[pytest.Item]()
    for alike in cases.values():
        on_one_loop = list(alike.values())
        is_costly = on_one_loop[0].get_closest_marker("costly") is not None
        few = CASES_MIN_COSTLY if is_costly else max(CASES_MIN, len(on_one_loop) // SHARE)
        chosen.update(on_one_loop[:few])
    chosen.update(item for item in items if item.get_closest_marker("whole") is not None)
    return [it for it in items if it in chosen], [it for it in items if it not in chosen]
