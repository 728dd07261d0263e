"""Computes the measures of a forced session from its units: plain values, integers only.

A unit's sound is in the session's own count of samples, so the user's speech is found as in a log
whose server did not search for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from protocol.values.model import UNIT_SAMPLES, Unit, UnitResult
from runtime.measures.conversation import TICK_HZ, TICKS_PER_MS, Span
from runtime.measures.measure import HEARD_MS, Ratio, Scores, Total, Value
from runtime.measures.placing import Sound, time_of
from runtime.measures.talk import UserSound, UserSpeech
from runtime.model.backends.base import ForcedResult, Leaning

from ..rerun.outputs import is_near_tie

HEARD: Final = HEARD_MS * TICKS_PER_MS
MICRO: Final = 1_000_000
"""Logits inside are in millionths."""
NANO: Final = 1_000_000_000
"""Probabilities inside are in billionths: a `listen` of 2e-5 has five digits."""


@attrs.frozen(kw_only=True)
class Judged:
    """A unit of a forced session.

    Attributes:
        leaning: its first decision; None if it was not free.
        logits_differ: any bit of its first logits is not as recorded; None if those are not known.
        is_near_tie: rounding could have made that decision the recorded one.
        tokens, codes: decisions of this kind; `..._otherwise` of these differ.
        is_spoken: it has recorded sound; `is_otherwise`: and this model gives other sound.
    """

    leaning: Leaning | None
    logits_differ: bool | None
    is_near_tie: bool
    tokens: int
    tokens_otherwise: int
    codes: int
    codes_otherwise: int
    is_spoken: bool
    is_otherwise: bool

    @classmethod
    def of(cls, recorded: UnitResult, forced: ForcedResult) -> Judged:
        """Judge a unit that took the recorded decisions."""
        stages = [choice.stage for choice in forced.choices]
        first = next((it for it in forced.choices if (it.stage, it.step) == ("llm", 0)), None)
        is_free = forced.leaning is not None
        return cls(
            leaning=forced.leaning,
            logits_differ=_differ(recorded.logits_hash, forced.result.logits_hash),
            is_near_tie=first is not None and is_near_tie(first) is True,
            tokens=len(recorded.decided_ids) if is_free else 0,
            tokens_otherwise=stages.count("llm"),
            codes=len(recorded.codec_ids),
            codes_otherwise=stages.count("tts"),
            is_spoken=bool(recorded.pcm),
            is_otherwise=bool(recorded.pcm) and forced.result.pcm != recorded.pcm,
        )


class ForcedSession:
    """The units of one session, in order; it keeps no sound.

    After a unit whose recorded decisions the model did not take, the others are only counted.
    """

    def __init__(self) -> None:
        self._units: list[Judged] = []
        self._elsewhere = 0
        self._speech: Final = UserSpeech()

    def take(self, unit: Unit, recorded: UnitResult, forced: ForcedResult) -> None:
        """Take a unit, the recorded result, and the forced one."""
        begin = (len(self._units) + self._elsewhere) * UNIT_SAMPLES
        at_ns = time_of("user", begin + UNIT_SAMPLES)
        self._speech.hear(UserSound.of(Sound(voice="user", at_ns=at_ns, begin=begin, pcm=unit.pcm)))
        made = forced.result
        is_taken = (made.is_listen, made.decided_ids) == (recorded.is_listen, recorded.decided_ids)
        if self._elsewhere or not is_taken:
            self._elsewhere += 1
        else:
            self._units.append(Judged.of(recorded, forced))

    def scores(self) -> Scores:
        """Measure the session, once all units are taken."""
        units, spoken = self._units, self._speech.spans()
        free = [(unit, unit.leaning) for unit in units if unit.leaning is not None]
        leanings = [leaning for _, leaning in free]
        flips = [unit for unit, it in free if it.is_silent != it.was_silent]
        margins = [it.margin for it in leanings if it.margin is not None]
        over = [
            unit.leaning
            for index, unit in enumerate(units)
            if unit.leaning is not None and unit.leaning.is_open and _is_heard(index, spoken)
        ]
        found: dict[str, Value | None] = {
            "decisions": Total(len(free)),
            "decision_agreement": _ratio(len(free) - len(flips), len(free)),
            **_parted(leanings),
            "near_tie_flips": _share(unit.is_near_tie for unit in flips),
            "silence_margin": _mean(margins, MICRO),
            "barge_in_stops": _share(it.is_silent for it in over),
            "barge_in_listen_probability": _mean([it.listen for it in over], NANO),
            "barge_in_end_probability": _mean([it.turn_end for it in over], NANO),
            "logits_otherwise": _share(
                it.logits_differ for it in units if it.logits_differ is not None
            ),
            "tokens_otherwise": _ratio(
                sum(it.tokens_otherwise for it in units), sum(it.tokens for it in units)
            ),
            "codes_otherwise": _ratio(
                sum(it.codes_otherwise for it in units), sum(it.codes for it in units)
            ),
            "sound_otherwise": _share(it.is_otherwise for it in units if it.is_spoken),
            "units_elsewhere": Total(self._elsewhere),
        }
        return {name: value for name, value in found.items() if value is not None}


def _parted(leanings: Sequence[Leaning]) -> dict[str, Value | None]:
    """Part the decisions by where they were made, and by what was recorded."""
    shares = {
        "take_overs_missed": (False, False),
        "take_overs_added": (False, True),
        "stops_missed": (True, True),
        "stops_added": (True, False),
    }
    return {
        name: _share(
            it.is_silent != it.was_silent for it in leanings if (it.is_open, it.was_silent) == where
        )
        for name, where in shares.items()
    }


def _differ(recorded: str, made: str) -> bool | None:
    return recorded != made if recorded and made else None


def _is_heard(index: int, spoken: Iterable[Span]) -> bool:
    """Whether the user speaks for `HEARD` in a unit."""
    second = Span(index * TICK_HZ, (index + 1) * TICK_HZ)
    return sum(second.overlap(span) for span in spoken) >= HEARD


def _mean(values: Sequence[float], scale: int) -> Ratio | None:
    return _ratio(sum(round(value * scale) for value in values), len(values))


def _share(values: Iterable[bool]) -> Ratio | None:
    kept = [*values]
    return _ratio(sum(kept), len(kept))


def _ratio(part: int, whole: int) -> Ratio | None:
    return Ratio(part, whole) if whole else None
