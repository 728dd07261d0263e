"""Full counts in `make soak`, and few in `make test`: one test body for both.

A test whose cases are many and alike takes `sample(all of them, a few)`; a test that repeats, for
seconds, what another one shows has the mark `soak`. `make soak` runs the files that use them, by
name, under the soak profile of Hypothesis.
"""

from __future__ import annotations

from typing import Final, TypeVar

from hypothesis import settings

Cases = TypeVar("Cases")

IS_SOAK: Final = settings.get_current_profile_name() == "soak"


def sample(every: Cases, few: Cases) -> Cases:
    """Choose every case under the soak profile, else a few; also for counts of cases."""
    return every if IS_SOAK else few
