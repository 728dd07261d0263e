"""Running a bench and printing its results: progress, and one JSON object or tables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import attrs
import click
import orjson
from attrs import AttrsInstance
from rich.console import Console

from ..interrupts import run

Found = TypeVar("Found", bound=AttrsInstance)


def tell(text: str) -> None:
    """Print progress on standard error."""
    click.echo(f"bench: {text}", err=True)


def measured(measure: Callable[[], Awaitable[Found]]) -> Found:
    """Measure on an event loop; `KeyboardInterrupt` if interrupted."""
    return run(measure)


def print_found(
    found: Found, show: Callable[[Console, Found], None], *, as_json: bool, options: int = 0
) -> None:
    """Print results by `show`, or as JSON of `attrs.asdict`, with further orjson `options`."""
    if as_json:
        options |= orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        click.echo(orjson.dumps(attrs.asdict(found), option=options), nl=False)
    else:
        show(Console(), found)
