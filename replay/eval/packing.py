"""A recording's measures as plain values, and packed: a folder has thousands of recordings.

Packed, a recording takes about a kilobyte; as objects it would take twenty.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import isnan, nan
from typing import Any, Final

import attrs

from runtime.measures.measure import KINDS, Kind, Ratio, Scores, Times, Total, Value

from .summary import Json, Statistics, Summary, scores_json
from .table import MEASURES

_MADE: Final[Mapping[Kind, type[Value]]] = {kind: cls for cls, kind in KINDS.items()}
OPENED_MAX: Final = 4
"""Recordings that are kept unpacked: a report asks for several things of one."""


def raw_of(scores: Scores) -> dict[str, tuple[Any, ...]]:
    """Write measures as plain values, in the order of the table."""
    return {name: attrs.astuple(scores[name]) for name in MEASURES if name in scores}


def scores_of(raw: Mapping[str, list[Any]]) -> Scores:
    """Read measures; `ValueError`, `LookupError` or `TypeError` unless `raw_of` wrote them."""
    return {name: _value(name, values) for name, values in raw.items()}


def _value(name: str, raw: list[Any]) -> Value:
    match _MADE[MEASURES[name].kind], raw:
        case cls, [list(values)] if cls is Times:
            return Times(tuple((int(at_ns), int(amount)) for at_ns, amount in values))
        case cls, [int(amount)] if cls is Total:
            return Total(amount)
        case cls, [int(part), int(whole)] if cls is Ratio and whole > 0:
            return Ratio(part, whole)
    raise ValueError(f"{name}: {raw!r}")


@attrs.frozen(kw_only=True)
class Opened:
    """A recording, unpacked; the attributes are `Row`'s."""

    scores: Scores
    own: Mapping[str, Statistics]
    body: Json


EMPTY: Final = Opened(scores={}, own={}, body={})


def pack(log: str, scores: Scores, body: Json) -> bytes:
    """Pack a recording; `OverflowError`: a forged log has numbers that no server writes."""
    Summary.of(log, scores)
    told = json.dumps([log, raw_of(scores), body], separators=(",", ":"))
    return zlib.compress(told.encode("ascii"))


@lru_cache(maxsize=OPENED_MAX)
def opened(packed: bytes) -> Opened:
    """Unpack a recording; of nothing, nothing is known."""
    if not packed:
        return EMPTY
    log, raw, body = json.loads(zlib.decompress(packed))
    scores = scores_of(raw)
    body = {**body, "measures": scores_json(scores)}
    return Opened(scores=scores, own=Summary.of(log, scores), body=body)


class Values(Mapping[str, float]):
    """A number for each of some measures, in 8 bytes a measure."""

    __slots__ = ("_numbers",)

    def __init__(self, found: Mapping[str, float]) -> None:
        self._numbers: Final = array("d", (found.get(name, nan) for name in MEASURES))

    def __getitem__(self, name: str) -> float:
        number = self._numbers[_PLACES[name]]
        if isnan(number):
            raise KeyError(name)
        return number

    def __iter__(self) -> Iterator[str]:
        return (name for name, it in zip(MEASURES, self._numbers, strict=True) if not isnan(it))

    def __len__(self) -> int:
        return sum(not isnan(it) for it in self._numbers)


_PLACES: Final = {name: place for place, name in enumerate(MEASURES)}
