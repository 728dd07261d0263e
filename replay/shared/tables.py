"""Tables of plain text for a terminal, by rich: text is never read as its markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Group, JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    overflow: OverflowMethod = "ellipsis",
    more: str = "",
    first_chars_min: int | None = None,
    is_ruled: bool = False,
) -> RenderableType:
    """Write a table of plain text; columns whose name begins with `<` stand on the left.

    `overflow` is for text that is too long; `more` is a line below the table. `first_chars_min`:
    the first column is not made narrower. `is_ruled`: lines stand around the head and the end.
    """
    plain = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made = Table(box=SIMPLE) if is_ruled else plain
    for at, name in enumerate(columns):
        justify: JustifyMethod = "left" if name.startswith("<") else "right"
        chars_min = None if at else first_chars_min
        made.add_column(
            name.removeprefix("<"), justify=justify, overflow=overflow, min_width=chars_min
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return Group(made, Text(more)) if more else made
