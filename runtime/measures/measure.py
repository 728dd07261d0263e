"""A measure, and its values in a recording; all measures are in `measures.txt`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import attrs

from protocol.values.limits import NS_PER_S

SPEECH_GAP_MS: Final = 500
"""Shorter silence within a voice's speech is part of the speech: breaths, and late pieces."""
PAUSE_MS: Final = 2_000
"""A user who goes on sooner has paused, and not ended a turn; longer pauses in a turn are rare."""
ANSWER_WAIT_MS: Final = 4_000
"""Silence for so long is not an answer: people begin to repeat what they said."""
SHORT_MS: Final = 1_000
"""Shorter speech is a backchannel or a false start: a word or two."""
YIELD_MS: Final = 2_000
"""A model that falls silent within this time has given way to a user who begins to speak."""
NEAR_TIE_LOGITS: Final = 0.5
"""Of two tokens that are nearer, the likelier one has less than 62 % of their probability."""
FDB_USER_GAP_MS: Final = 600
"""Full-Duplex-Bench v1.5 joins the user's speech over gaps up to this."""
FDB_MODEL_GAP_MS: Final = 500
"""Full-Duplex-Bench v1.5 joins the model's speech over gaps up to this."""
FDB_SHORT_MS: Final = 1_000
"""Full-Duplex-Bench v1 takes shorter speech of few words for no turn."""
FDB_WORDS_MAX: Final = 3
"""Full-Duplex-Bench v1 takes short speech of up to so many words for no turn."""
OVERLAP_MS_MIN: Final = 400
"""Speech over the model: shorter speech in a unit may not be noticed in it (`tiny` needs 0.4 s)."""


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
