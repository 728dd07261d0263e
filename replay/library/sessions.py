"""`antiphon recordings list`: the recorded sessions of a folder or a store, newest first.

Only the head and the tail of each log are read, once; an index in the folder keeps them. Logs are
read whole, each time, only for the options that name measures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, get_args

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.values.modes import Mode
from recorder.storage.listing import Listing, Wanted
from recorder.storage.store import Logs
from recorder.storage.summary import State, Summary

from ..eval.options import ConditionType, FigureType
from ..shared.commands import print_json
from ..shared.progress import count
from ..shared.recordings import (
    default_folder,
    logs_at,
    read_since,
    reading_place,
    show_bytes,
    show_moment,
    show_span,
    since_ms,
)

if TYPE_CHECKING:
    from ..eval.condition import Condition, Figure
    from .measured import Asked

ROWS_MAX: Final = 50
"""Of the table, by default; JSON has all."""
LINE_CHARS: Final = 240
"""Outside a terminal a row is one line, for `grep`; the widest has room."""
COLUMNS: Final = (
    "recording",
    "session",
    "began (UTC)",
    "took",
    "mode",
    "dialect",
    "key",
    "units",
    "size",
    "end",
)
DISPENSABLE: Final = (
    *("key", "dialect", "units", "mode", "size", "took", "session", "began (UTC)", "end"),
)
"""The order in which a narrow terminal loses columns."""
CELL_CHARS_MAX: Final = 20
"""Of a column except the first: a log's own texts must not displace another's name."""


@click.command("list")
@click.argument("place", metavar="[DIR|URL]", default=default_folder)
@click.option(
    "--since", type=read_since, metavar="SINCE", help="Begun since: 7d, 36h, 2026-01-31 (UTC)."
)
@click.option("--mode", type=click.Choice(get_args(Mode)), help="Only this mode.")
@click.option("--owner", metavar="KEY", help="Only of this key; '' means without a key.")
@click.option("--state", type=click.Choice(get_args(State)), help="Only in this state.")
@click.option("--reason", help="Only ended for this reason, such as client or context_full.")
@click.option("--find", metavar="ID", help="Only of this session id, or recording id.")
@click.option("--measure", "figures", multiple=True, type=FigureType(), help="Show this measure.")
@click.option("--sort", "by", type=FigureType(), help="Show this measure, the worst first.")
@click.option(
    "--where",
    "conditions",
    multiple=True,
    type=ConditionType(),
    help="Only those for which this holds, such as 'response_delay > 1.5'.",
)
@click.option("--limit", type=click.IntRange(min=1), help="At most so many, the first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(
    *,
    place: str,
    since: float | datetime | None,
    mode: str | None,
    owner: str | None,
    state: State | None,
    reason: str | None,
    find: str | None,
    figures: tuple[Figure, ...],
    by: Figure | None,
    conditions: tuple[Condition, ...],
    limit: int | None,
    as_json: bool,
) -> None:
    """List the recorded sessions in a folder or under a URL of an object store, newest first.

    The list is made from the head and the tail of each log, so a log that is listed as finished may
    still be damaged in between: `antiphon recordings verify` checks. A log without an end is `open`
    while a server writes it, and `crashed` otherwise; one whose head is lost is `unreadable`.

    The list of a folder is cached in its .index.sqlite, which may be deleted at any time. A store
    (s3://, gs://, az://, file://) needs antiphon[store] and has no such cache: each log costs two
    requests.

    --measure, --sort and --where read whole logs and measure them as `antiphon eval` does; its
    --definitions says what each measure is. --measure and --where may be repeated; all conditions
    must hold, and none holds for a recording without its measure. A name may end with another
    statistic: response_delay_worst, _p90, _count. Only logs that the other options leave over are
    read; one that is damaged or unreadable is named on stderr.

    \b
    Examples:
      antiphon recordings list recordings --since 1d --state crashed
      antiphon recordings list recordings --owner anna --json | jq '.logs[].recording_id'
      antiphon recordings list recordings --find sess_5f1d0c6a9b27
      antiphon recordings list s3://bucket/prefix --since 1d
      antiphon recordings list recordings --since 1d --sort response_delay_worst --limit 10
      antiphon recordings list recordings --measure overlap --where 'response_delay > 1.5'

    \b
    Exit codes:
      0  listed, even if there are no logs
      2  the folder or the store cannot be read
    """  # noqa: D301 - click takes a backspace to keep the lines
    wanted = Wanted(
        since_ms=None if since is None else since_ms(since, time.time()),
        mode=mode,
        owner=owner,
        state=state,
        reason=reason,
        session=find,
    )
    logs = logs_at(place)
    found = [it for it in _listed(place, logs) if wanted.takes(it)]
    listed, shown = Listed(summaries=found), limit if as_json else limit or ROWS_MAX
    if figures or by or conditions:
        from .measured import Asked

        asked = Asked(figures=figures, by=by, conditions=conditions)
        listed = _measured(place, logs, found, asked, shown)
    if as_json:
        print_json(_body(place, listed, shown))
    else:
        _print(listed, limit or ROWS_MAX)


@attrs.frozen(kw_only=True)
class Listed:
    """Recordings to print.

    Attributes:
        columns: names of the measures that are shown.
        cells: of each recording, as text, for these columns.
        measures: of each recording, as plain values; empty if nothing was measured.
    """

    summaries: Sequence[Summary]
    columns: tuple[str, ...] = ()
    cells: Sequence[tuple[str, ...]] = ()
    measures: Sequence[object] = ()


def _listed(place: str, logs: Logs) -> Sequence[Summary]:
    with reading_place(place), count("reading logs") as on_read:
        return Listing(logs).refresh(on_read)


def _measured(
    place: str,
    logs: Logs,
    found: Sequence[Summary],
    asked: Asked,
    limit: int | None,
) -> Listed:
    from .measured import measure_listed

    with reading_place(place):
        kept, complaints = measure_listed(logs, found, asked, limit)
    for complaint in complaints:
        click.echo(complaint, err=True)
    return Listed(
        summaries=[it.summary for it in kept],
        columns=tuple(figure.text for figure in asked.columns),
        cells=[it.cells(asked.columns) for it in kept],
        measures=[it.measures for it in kept],
    )


def _body(place: str, listed: Listed, limit: int | None) -> dict[str, object]:
    found = listed.summaries
    logs = [attrs.asdict(it) for it in found[:limit]]
    for log, measures in zip(logs, listed.measures, strict=False):
        log["measures"] = measures
    return {
        "directory": place,
        "found_logs": len(found),
        "found_bytes": sum(it.file_bytes for it in found),
        "logs": logs,
    }


def _print(listed: Listed, limit: int) -> None:
    found = listed.summaries
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=LINE_CHARS)
    left_out: list[str] = []
    if found:
        rows = _rows(listed, limit)
        names = (COLUMNS[0], *listed.columns, *COLUMNS[1:])
        dispensable = (*DISPENSABLE, *reversed(listed.columns[1:]))
        unbounded = console.options.update(max_width=LINE_CHARS)
        table = _table(names, rows, left_out)
        while console.measure(table, options=unbounded).maximum > console.width:
            if len(left_out) == len(dispensable):
                break
            left_out.append(dispensable[len(left_out)])
            table = _table(names, rows, left_out)
        console.print(table)
    if left_out:
        console.print(f"no room for {', '.join(left_out)}: --json has all", highlight=False)
    more = len(found) - limit
    shown = f", {more} of them not shown: --limit, --json" if more > 0 else ""
    total = show_bytes(sum(it.file_bytes for it in found))
    console.print(f"{len(found)} sessions, {total}{shown}", highlight=False)


def _table(names: Sequence[str], rows: Sequence[tuple[str, ...]], left_out: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    kept = [at for at, name in enumerate(names) if name not in left_out]
    for name in (names[at] for at in kept):
        is_measure = name not in COLUMNS
        right = is_measure or name in {"took", "units", "size"}
        chars_max = None if is_measure or name == COLUMNS[0] else CELL_CHARS_MAX
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name, justify=justify, no_wrap=True, max_width=chars_max)
    for row in rows:
        table.add_row(*(Text(row[at]) for at in kept))
    return table


def _rows(listed: Listed, limit: int) -> list[tuple[str, ...]]:
    rows = [_row(summary) for summary in listed.summaries[:limit]]
    if not listed.columns:
        return rows
    pairs = zip(rows, listed.cells[:limit], strict=True)
    return [(row[0], *cells, *row[1:]) for row, cells in pairs]


def _row(summary: Summary) -> tuple[str, ...]:
    took = summary.duration_ms
    return (
        summary.recording_id,
        summary.session_id or "",
        "" if summary.began_ms is None else show_moment(summary.began_ms),
        "" if took is None else show_span(took),
        summary.mode or "",
        summary.dialect or "",
        summary.owner,
        _amount(summary),
        show_bytes(summary.file_bytes),
        summary.reason or summary.state,
    )


def _amount(summary: Summary) -> str:
    if summary.turns:
        return f"{summary.turns} turn{'s' * (summary.turns > 1)}"
    if summary.chunks:
        return f"{summary.chunks} second{'s' * (summary.chunks > 1)}"
    return "" if summary.units is None else str(summary.units)
