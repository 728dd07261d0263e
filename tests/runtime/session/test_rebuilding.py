"""How a session's past is handed to a model: in order, whole, and little at once."""

from __future__ import annotations

from protocol.values.model import PAST_UNITS_MAX, UNIT_BYTES, PastUnit, Unit, UnitResult
from runtime.session.model_calls import BATCH_BYTES, _take

PICTURE = bytes(4 * 1024 * 1024)


def past_unit(index: int, *, pictures: int = 0) -> PastUnit:
    unit = Unit(index=index, pcm=bytes(UNIT_BYTES), frames=(PICTURE,) * pictures)
    result = UnitResult(index=index, is_listen=True)
    return PastUnit(unit=unit, result=result, interrupted=False, is_voiced=False)


def batches(*pictures: int) -> list[list[int]]:
    units = iter([past_unit(index, pictures=count) for index, count in enumerate(pictures)])
    found = []
    while batch := _take(units):
        found.append([past.unit.index for past in batch])
    return found


def test_a_past_is_handed_over_in_batches() -> None:
    """A unit is left out, or a call holds more than a backend takes."""
    assert batches(*[0] * (PAST_UNITS_MAX + 2)) == [
        list(range(PAST_UNITS_MAX)),
        [PAST_UNITS_MAX, PAST_UNITS_MAX + 1],
    ]
    assert batches() == []


def test_pictures_make_a_batch_shorter() -> None:
    """Sixteen units full of pictures are a gigabyte in one message."""
    full = BATCH_BYTES // len(PICTURE)
    assert batches(16, 16, 0, full, 0) == [[0], [1], [2, 3], [4]]
