"""Printing what a bench found: progress, and one JSON object or tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs
import click
import orjson
from attrs import AttrsInstance
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

Found = TypeVar("Found", bound=AttrsInstance)


class BenchError(click.ClickException):
    """The bench cannot continue; the text gives the reason in one line."""


def tell(text: str) -> None:
    """Print progress on standard error."""
    click.echo(f"bench: {text}", err=True)


def print_found(
    found: Found, show: Callable[[Console, Found], None], *, as_json: bool, options: int = 0
) -> None:
    """Print results by `show`, or as JSON of `attrs.asdict`, with further orjson `options`."""
    if as_json:
        options |= orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        click.echo(orjson.dumps(attrs.asdict(found), option=options), nl=False)
    else:
        show(Console(), found)


def machine_line(facts: Mapping[str, object]) -> str:
    """Name the facts of `machine_facts` in one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, whole: int = 1
) -> Table:
    """Make a table; the first `left` columns are aligned left, the first `whole` never wrapped."""
    made = Table(box=SIMPLE)
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", no_wrap=place < whole)
    for row in rows:
        made.add_row(*row)
    return made
