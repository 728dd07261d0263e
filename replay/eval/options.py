"""Values of options that name measures.

The measures are imported when such an option is given: they take longer to load than a command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .condition import Condition, Figure


class ConditionType(click.ParamType["Condition"]):
    """A condition on measures; on a comparison too, if there can be one."""

    name = "condition"

    def __init__(self, *, compares: bool = False) -> None:
        self._compares = compares

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Condition:
        """Parse a condition such as `take_over_rate < 0.9`."""
        from .condition import ConditionError, parse

        try:
            condition = parse(str(value))
        except ConditionError as error:
            self.fail(str(error), param, ctx)
        if condition.is_of_a_comparison and not self._compares:
            self.fail(f"{condition.text!r}: there is no baseline here", param, ctx)
        return condition


class FigureType(click.ParamType["Figure"]):
    """A measure, or a statistic of one."""

    name = "measure"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Figure:
        """Parse a name such as `response_delay` or `response_delay_p90`."""
        from .condition import ConditionError, parse_figure

        try:
            figure = parse_figure(str(value))
        except ConditionError as error:
            self.fail(str(error), param, ctx)
        if figure.is_of_a_comparison:
            self.fail(f"{figure.text!r}: there is no baseline here", param, ctx)
        return figure
