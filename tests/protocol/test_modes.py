"""The table of modes: whole, and of names that there are."""

from __future__ import annotations

from typing import get_args

import attrs

from protocol.values.limits import MODES, OF_MODE, Work
from protocol.wire.dialects import DIALECTS, MODES_OF
from replay.rerun.report import FullReport
from runtime.settings.settings import Settings
from runtime.telemetry.meters import METERS


def test_every_mode_has_a_row() -> None:
    """A mode would be served, and the first that asks what is true of it would fail."""
    assert tuple(OF_MODE) == MODES


def test_every_kind_of_work_has_its_place() -> None:
    """A mode of that work could not be counted, or not be replayed."""
    assert METERS.keys() == set(get_args(Work)) == {row.work for row in OF_MODE.values()}
    counts = {field.name for field in attrs.fields(FullReport)}
    assert counts >= {f"{work}s{more}" for work in get_args(Work) for more in ("", "_changed")}


def test_the_dialects_of_a_mode_are_there() -> None:
    """A name that is none would be a mode that no client can have, and no test would try it."""
    assert all(row.dialects for row in OF_MODE.values())
    assert set().union(*(row.dialects for row in OF_MODE.values())) == DIALECTS.keys()
    assert all(MODES_OF.values())


def test_the_limit_of_a_mode_is_a_setting() -> None:
    """A session would have no limit, or fail on its way in."""
    limits = {row.limit for row in OF_MODE.values()} - {""}
    assert limits <= {field.name for field in attrs.fields(Settings)}
