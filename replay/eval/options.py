"""Values of options that name measures.

The measures are imported when such an option is given: they take longer to load than a command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .condition import Condition, Figure


class ConditionType(click.ParamType["Condition"]):
    """A condition on measures."""

    name = "condition"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Condition:
        """Parse a condition such as `take_over_rate < 0.9`."""
        from .condition import ConditionError, parse

        try:
            return parse(str(value))
        except ConditionError as error:
            self.fail(str(error), param, ctx)


class FigureType(click.ParamType["Figure"]):
    """A measure, or a statistic of one."""

    name = "measure"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Figure:
        """Parse a name such as `response_delay` or `response_delay_p90`."""
        from .condition import ConditionError, parse_figure

        try:
            return parse_figure(str(value))
        except ConditionError as error:
            self.fail(str(error), param, ctx)
