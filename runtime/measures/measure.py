"""A measure, and its values in a recording; all measures are in `table`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import attrs

from protocol.values.limits import NS_PER_S

Kind = Literal["times", "total", "ratio"]
"""How a recording has it: as values of single moments, as one amount, or as a part of a whole."""
Unit = Literal["s", "words", "count", "share", "s/min", "tokens/s", "logits", "%"]
Better = Literal["lower", "higher", ""]
Source = Literal["Antiphon", "Full-Duplex-Bench v1", "Full-Duplex-Bench v1.5"]

SCALES: Final[Mapping[Unit, float]] = MappingProxyType(
    {
        **{"words": 1, "count": 1, "share": 1},
        **{"s": 1 / NS_PER_S, "s/min": 60, "tokens/s": NS_PER_S},
        **{"logits": 1e-6, "%": 1e-7},
    }
)
"""By unit: the factor from an internal value to a shown one.

Internal times are nanoseconds, logits millionths, and probabilities billionths.
"""


@attrs.frozen(kw_only=True)
class Measure:
    """One measure.

    Attributes:
        better: which values are good; empty if the measure only describes.
        modes: the sessions that have it; `forced`: duplex sessions judged by `--mode forced`.
    """

    name: str
    kind: Kind
    unit: Unit
    better: Better
    definition: str
    source: Source = "Antiphon"
    modes: Literal["duplex", "chat", "transcription", "all", "forced"] = "duplex"


@attrs.frozen
class Times:
    """Values of single moments: when (nanoseconds of the session), and how much."""

    values: tuple[tuple[int, int], ...]


@attrs.frozen
class Total:
    """One amount of a recording."""

    amount: int


@attrs.frozen
class Ratio:
    """A part of a whole, or a sum of several values; never of nothing."""

    part: int
    whole: int


Value = Times | Total | Ratio
Scores = Mapping[str, Value]
"""What was measured in a recording, by name; the other measures are absent."""
KINDS: Final[Mapping[type, Kind]] = MappingProxyType(
    {Times: "times", Total: "total", Ratio: "ratio"}
)
