"""Two evaluations of the same sessions, compared: is the difference of a measure more than chance?

For each measure, the sessions that have it in both are pairs. The interval is a bootstrap's: the
mean difference of sessions that are drawn again. p is that of a test by signs: if nothing changed,
each difference could as well have had the other sign. All signs are tried if they are few enough,
else drawn. Draws have a fixed seed, so the same values give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from runtime.measures.measure import Measure

from .packing import Values
from .summary import DIGITS, Json
from .table import MEASURES

DRAWS: Final = 10_000
"""p is never below about a ten-thousandth, and an interval's ends are known to a few percent."""
ALL_SIGNS_MAX: Final = 13
"""Pairs of which all signs are tried: 8,192 ways."""
NUMBERS_MAX: Final = 1 << 20
"""Numbers drawn at once, so that memory does not grow with the sessions: 8 MB."""
SEED: Final = 20_260_101
INTERVAL: Final = (2.5, 97.5)
"""Percent: a 95 % interval."""
P_MAX: Final = 0.05
"""Above this a difference is called chance."""
PAIRED: Final = ("difference", "low", "high", "p", "baseline")
"""The statistics that a condition can name, after a dot."""
P_DIGITS: Final = 4

Numbers = NDArray[np.float64]
Own = Mapping[str, float]
"""What one session has of each measure, in its unit."""


@attrs.frozen(kw_only=True)
class Paired:
    """A measure in sessions that have it in both evaluations, in its unit.

    Attributes:
        recordings: the pairs.
        unpaired: sessions that have the measure in only one of the evaluations.
        value, baseline: the means over the pairs.
        difference: their difference: positive if the value is above the baseline.
        low, high: of the difference, a 95 % interval.
        p: how often chance gives a difference at least as large; 1 if the difference is 0.
    """

    recordings: int
    unpaired: int
    value: float
    baseline: float
    difference: float
    low: float
    high: float
    p: float


@attrs.frozen(kw_only=True)
class Baseline:
    """What sessions are compared with: its name, and what each session has there, by its log."""

    name: str
    owns: Mapping[str, Own]


@attrs.frozen(kw_only=True)
class Comparison:
    """Sessions compared with a baseline: its name, all sessions, and each one's own differences."""

    name: str
    sessions: int
    paired: dict[str, Paired]
    own: Mapping[str, Own]


def compare(baseline: Baseline, owns: Mapping[str, Own]) -> Comparison:
    """Compare the own values of sessions, by log, with those of a baseline."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    unpaired: dict[str, int] = {}
    own: dict[str, Own] = {}
    for log in [log for log in owns if log in baseline.owns]:
        here, before = owns[log], baseline.owns[log]
        apart = dict[str, float]()
        for name in [name for name in MEASURES if name in here and name in before]:
            pair = (here[name], before[name])
            pairs.setdefault(name, []).append(pair)
            apart[name] = round(pair[0] - pair[1], DIGITS) + 0.0
        own[log] = Values(apart)
        for name in here.keys() ^ before.keys():
            unpaired[name] = unpaired.get(name, 0) + 1
    paired = {
        name: _paired(np.array(pairs[name]), unpaired.get(name, 0))
        for name in MEASURES
        if name in pairs
    }
    return Comparison(name=baseline.name, sessions=len(own), paired=paired, own=own)


def verdict_of(measure: Measure, found: Paired) -> str:
    """Say whether a measure is `worse`, `better` or `other`; empty if that may be chance.

    Of few sessions an interval is too narrow, and p cannot be small: both must agree.
    """
    if found.low <= 0 <= found.high or found.p > P_MAX:
        return ""
    if not measure.better:
        return "other"
    return "worse" if (found.low > 0) == (measure.better == "lower") else "better"


def paired_json(found: Mapping[str, Paired]) -> dict[str, Json]:
    """Write a comparison as plain values."""
    return {name: {"unit": MEASURES[name].unit, **attrs.asdict(it)} for name, it in found.items()}


def _paired(pairs: Numbers, unpaired: int) -> Paired:
    own, before = pairs.T  # each (N,)
    apart = np.round(own - before, DIGITS)
    if apart.any():
        low, high = _interval(apart)
        p = round(chance(apart), P_DIGITS)
    else:
        low, high, p = 0.0, 0.0, 1.0
    means = (float(each.mean()) for each in (own, before, apart))
    value, baseline, difference = (round(mean, DIGITS) + 0.0 for mean in means)
    return Paired(
        recordings=len(apart),
        unpaired=unpaired,
        value=value,
        baseline=baseline,
        difference=difference,
        low=low,
        high=high,
        p=p,
    )


def _interval(apart: Numbers) -> tuple[float, float]:
    """The interval of the mean of (N,) differences, by drawing sessions again."""
    draw, count = np.random.default_rng(SEED), len(apart)
    means = [
        apart[draw.integers(0, count, (rows, count))].mean(axis=1) for rows in _portions(count)
    ]
    low, high = np.percentile(np.concatenate(means), INTERVAL)
    return round(float(low), DIGITS) + 0.0, round(float(high), DIGITS) + 0.0


def chance(apart: Numbers) -> float:
    """Return how often random signs of (N,) differences give a mean as far from 0, in (0, 1]."""
    count = len(apart)
    least = abs(float(apart.sum())) * (1 - 1e-9)  # Sums of other orders differ by rounding.
    if count <= ALL_SIGNS_MAX:
        ways = np.arange(1 << count)[:, None] >> np.arange(count) & 1  # (2^N, N)
        return float((abs((1.0 - 2.0 * ways) @ apart) >= least).mean())
    draw, hits = np.random.default_rng(SEED), 0
    for rows in _portions(count):
        signs = 1.0 - 2.0 * draw.integers(0, 2, (rows, count))
        hits += int((abs(signs @ apart) >= least).sum())
    return (hits + 1) / (DRAWS + 1)


def _portions(count: int) -> Iterable[int]:
    """Part `DRAWS` draws of `count` numbers into portions that fit."""
    most, left = max(1, NUMBERS_MAX // count), DRAWS
    while left:
        rows = min(most, left)
        yield rows
        left -= rows
