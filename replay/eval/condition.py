"""Conditions on a summary, such as `take_over_rate < 0.9`: a measure, a comparison, a number."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from runtime.settings.values import nearest

from .summary import STATISTICS, Statistics
from .table import MEASURES

COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = MappingProxyType(
    {
        **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
        **{"==": operator.eq, "!=": operator.ne},
    }
)
TEXT_CHARS_MAX: Final = 200
"""The longest measure, comparison and number take a third."""
_FORM: Final = re.compile(r"\s*([^\s<>=!]+)\s*([<>=!]+)\s*(\S+)\s*", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


class ConditionError(ValueError):
    """A text is not a condition; the message says which part is wrong."""


class UnknownValueError(LookupError):
    """No recording has the measure of a condition."""


@attrs.frozen(kw_only=True)
class Condition:
    """A comparison of a statistic with a number."""

    text: str
    measure: str
    statistic: str
    comparison: str
    number: float

    def value(self, found: Mapping[str, Statistics]) -> float:
        """Return what is compared; raises `UnknownValueError`."""
        if self.measure not in found:
            raise UnknownValueError(f"{self.text!r}: no recording has {self.measure}")
        return float(getattr(found[self.measure], self.statistic))

    def is_met(self, found: Mapping[str, Statistics]) -> bool:
        """Whether it holds; raises `UnknownValueError`."""
        return COMPARISONS[self.comparison](self.value(found), self.number)


def parse(text: str) -> Condition:
    """Read a condition; raises `ConditionError`."""
    found = _FORM.fullmatch(text) if len(text) <= TEXT_CHARS_MAX else None
    if found is None:
        raise ConditionError(
            f"{text[:TEXT_CHARS_MAX]!r} is not a measure, a comparison and a number, such as"
            " 'take_over_rate < 0.9'"
        )
    name, comparison, number = found.groups()
    measure, statistic = _named(name)
    if measure not in MEASURES:
        hint = nearest(measure, MEASURES).removesuffix(".") or ", see --definitions"
        raise ConditionError(f"{name!r} is not a measure{hint}")
    if comparison not in COMPARISONS:
        known = " ".join(COMPARISONS)
        raise ConditionError(f"{comparison!r} is not a comparison: {known}")
    if _NUMBER.fullmatch(number) is None or not math.isfinite(float(number)):
        raise ConditionError(f"{number!r} is not a number")
    return Condition(
        text=text.strip(),
        measure=measure,
        statistic=statistic,
        comparison=comparison,
        number=float(number),
    )


def _named(name: str) -> tuple[str, str]:
    """Part a measure from the statistic that may follow its name."""
    if name not in MEASURES:
        measure, _, statistic = name.rpartition("_")
        if statistic in STATISTICS:
            return measure, statistic
    return name, "value"
