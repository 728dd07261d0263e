"""Figures, such as `response_delay_p90`, and conditions on them, such as `take_over_rate < 0.9`.

They read the summary of a folder, and also what a single recording has of each measure. After a dot
they read a comparison with a baseline: `take_over_rate.difference`.

The table of measures takes longer to load than a command, so it is imported when a figure is read.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final

import attrs
import click

STATISTICS: Final = ("value", "median", "p90", "worst", "count", "recordings")
"""The statistics of a summary that a figure can name."""
PAIRED: Final = ("difference", "low", "high", "p", "baseline")
"""Those of a comparison, which it can name after a dot."""
COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne},
}
TEXT_CHARS_MAX: Final = 200
"""The longest measure, comparison and number take a third."""
_FORM: Final = re.compile(r"\s*([^\s<>=!]+)\s*([<>=!]+)\s*(\S+)\s*", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


Found = Mapping[str, object]
"""Statistics by measure: of a summary, or of a comparison."""


class ConditionError(ValueError):
    """A text is not a condition or a figure; the message says which part is wrong."""


class UnknownValueError(LookupError):
    """No recording has the measure of a figure."""


@attrs.frozen(kw_only=True)
class Figure:
    """A statistic of a measure; `text` is how it was asked for."""

    text: str
    measure: str
    statistic: str

    def value(self, found: Found) -> float:
        """Return its value, of a summary or a comparison; raises `UnknownValueError`."""
        if self.measure not in found:
            both = " in both" if self.is_of_a_comparison else ""
            raise UnknownValueError(f"{self.text!r}: no recording has {self.measure}{both}")
        return float(getattr(found[self.measure], self.statistic))

    @property
    def is_of_a_comparison(self) -> bool:
        """Whether it needs a baseline."""
        return self.statistic in PAIRED

    @property
    def is_of_recordings(self) -> bool:
        """Whether single recordings can be judged by it; counts say how much a folder has."""
        return self.statistic not in {"count", "recordings", *PAIRED}


@attrs.frozen(kw_only=True)
class Condition(Figure):
    """A comparison of a figure with a number."""

    comparison: str
    number: float


def parse(text: str) -> Condition:
    """Read a condition; raises `ConditionError`."""
    found = _FORM.fullmatch(text) if len(text) <= TEXT_CHARS_MAX else None
    if found is None:
        raise ConditionError(
            f"{text[:TEXT_CHARS_MAX]!r} is not a measure, a comparison and a number, such as"
            " 'take_over_rate < 0.9'"
        )
    name, comparison, number = found.groups()
    figure = parse_figure(name)
    if comparison not in COMPARISONS:
        known = " ".join(COMPARISONS)
        raise ConditionError(f"{comparison!r} is not a comparison: {known}")
    if _NUMBER.fullmatch(number) is None or not math.isfinite(float(number)):
        raise ConditionError(f"{number!r} is not a number")
    comparing = {"comparison": comparison, "number": float(number)}
    return Condition(**attrs.asdict(figure) | {"text": text.strip()} | comparing)


def parse_figure(name: str) -> Figure:
    """Read the name of a measure, and of a statistic after it; raises `ConditionError`."""
    from runtime.settings.settings import nearest

    from .evaluate import MEASURES

    measure, statistic = _named(name, MEASURES)
    if measure not in MEASURES:
        near = nearest(measure[:TEXT_CHARS_MAX], MEASURES).removesuffix(".")
        hint = near or ", see antiphon eval --definitions"
        raise ConditionError(f"{name[:TEXT_CHARS_MAX]!r} is not a measure{hint}")
    return Figure(text=name, measure=measure, statistic=statistic)


def judge(
    conditions: Iterable[Condition], summary: Found, compared: Found | None = None
) -> tuple[list[str], list[str]]:
    """Return the conditions that hold, and complaints on those that cannot be judged."""
    met, unknown = list[str](), list[str]()
    for condition in conditions:
        found = compared or {} if condition.is_of_a_comparison else summary
        try:
            value = condition.value(found)
            if COMPARISONS[condition.comparison](value, condition.number):
                met.append(f"{condition.text} (it is {value:g})")
        except UnknownValueError as error:
            unknown.append(str(error.args[0]))
    return met, unknown


def _named(name: str, measures: Container[str]) -> tuple[str, str]:
    """Split a measure from the statistic that may follow its name."""
    measure, _, paired = name.partition(".")
    if paired in PAIRED:
        return measure, paired
    if name not in measures:
        measure, _, statistic = name.rpartition("_")
        if statistic in STATISTICS:
            return measure, statistic
    return name, "value"


def show_number(number: float) -> str:
    """Write a number with up to three decimals."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


class FigureType(click.ParamType[Figure]):
    """A measure, or a statistic of one; with `compares` of a comparison too."""

    name = "measure"
    parse: Callable[[str], Figure] = staticmethod(parse_figure)

    def __init__(self, *, compares: bool = False) -> None:
        self._compares = compares

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Figure:
        """Parse a name such as `response_delay_p90`."""
        try:
            figure = self.parse(str(value))
        except ConditionError as error:
            self.fail(str(error), param, ctx)
        if figure.is_of_a_comparison and not self._compares:
            self.fail(f"{figure.text!r}: there is no baseline here", param, ctx)
        return figure


class ConditionType(FigureType):
    """A condition on measures, such as `take_over_rate < 0.9`."""

    name = "condition"
    parse = staticmethod(parse)
