"""How a bench runs and says what it found: progress beside it, one JSON object or tables of it."""

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
    """Say what is being done, on standard error."""
    click.echo(f"bench: {text}", err=True)


def measured(measure: Callable[[], Awaitable[Found]]) -> Found:
    """Measure on an event loop.

    Args:
        measure: does it.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    return run(measure)


def print_found(
    found: Found, show: Callable[[Console, Found], None], *, as_json: bool, options: int = 0
) -> None:
    """Print what was found.

    Args:
        found: as JSON it is `attrs.asdict` of this.
        show: prints its tables.
        as_json: print JSON instead.
        options: more of orjson's.
    """
    if as_json:
        options |= orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        click.echo(orjson.dumps(attrs.asdict(found), option=options), nl=False)
    else:
        show(Console(), found)
