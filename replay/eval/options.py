"""Values of options that name measures."""

from __future__ import annotations

import click

from .condition import Condition, ConditionError, Figure, parse, parse_figure


class ConditionType(click.ParamType[Condition]):
    """A condition on measures."""

    name = "condition"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Condition:
        """Parse a condition such as `take_over_rate < 0.9`."""
        try:
            return parse(str(value))
        except ConditionError as error:
            self.fail(str(error), param, ctx)


class FigureType(click.ParamType[Figure]):
    """A measure, or a statistic of one."""

    name = "measure"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Figure:
        """Parse a name such as `response_delay` or `response_delay_p90`."""
        try:
            return parse_figure(str(value))
        except ConditionError as error:
            self.fail(str(error), param, ctx)
