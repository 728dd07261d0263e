"""The command `antiphon sessions`: the recorded sessions of a folder or a store, newest first.

Only the head and the tail of each log are read, once; an index in the folder keeps them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal, get_args

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.values.modes import Mode
from recorder.keep.listing import Listing, Wanted
from recorder.keep.summary import State, Summary

from ..shared.commands import print_json
from ..shared.progress import count
from ..shared.recordings import (
    SinceType,
    logs_at,
    reading_place,
    show_bytes,
    show_moment,
    show_span,
    since_ms,
)

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


@click.command("sessions")
@click.argument("place", metavar="DIR|URL")
@click.option("--since", type=SinceType(), help="Begun since: 7d, 36h, 2026-01-31 (UTC).")
@click.option("--mode", type=click.Choice(get_args(Mode)), help="Only this mode.")
@click.option("--owner", metavar="KEY", help="Only of this key; '' means without a key.")
@click.option("--state", type=click.Choice(get_args(State)), help="Only in this state.")
@click.option("--reason", help="Only ended for this reason, such as client or context_full.")
@click.option("--find", metavar="ID", help="Only of this session id, or recording id.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many, the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sessions_command(
    *,
    place: str,
    since: float | datetime | None,
    mode: str | None,
    owner: str | None,
    state: State | None,
    reason: str | None,
    find: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the recorded sessions in a folder or under a URL of an object store, newest first.

    The list is made from the head and the tail of each log, so a log that is listed as finished may
    still be damaged in between: `antiphon verify` checks. A log without an end is `open` while a
    server writes it, and `crashed` otherwise; one whose head is lost is `unreadable`.

    The list of a folder is cached in its .index.sqlite, which may be deleted at any time. A store
    (s3://, gs://, az://, file://) needs antiphon[store] and has no such cache: each log costs two
    requests.

    \b
    Examples:
      antiphon sessions recordings --since 1d --state crashed
      antiphon sessions recordings --owner anna --json | jq '.logs[].recording_id'
      antiphon sessions recordings --find sess_5f1d0c6a9b27
      antiphon sessions s3://bucket/prefix --since 1d

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
    found = [it for it in _listed(place) if wanted.takes(it)]
    if as_json:
        print_json(_body(place, found, limit))
    else:
        _print(found, limit or ROWS_MAX)


def _listed(place: str) -> Sequence[Summary]:
    logs = logs_at(place)
    with reading_place(place), count("reading logs") as on_read:
        return Listing(logs).refresh(on_read)


def _body(place: str, found: Sequence[Summary], limit: int | None) -> dict[str, object]:
    return {
        "directory": place,
        "found_logs": len(found),
        "found_bytes": sum(it.file_bytes for it in found),
        "logs": [attrs.asdict(it) for it in found[:limit]],
    }


def _print(found: Sequence[Summary], limit: int) -> None:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=LINE_CHARS)
    left_out: list[str] = []
    if found:
        rows = [_row(summary) for summary in found[:limit]]
        unbounded = console.options.update(max_width=LINE_CHARS)
        table = _table(rows, left_out)
        while console.measure(table, options=unbounded).maximum > console.width:
            if len(left_out) == len(DISPENSABLE):
                break
            left_out.append(DISPENSABLE[len(left_out)])
            table = _table(rows, left_out)
        console.print(table)
    if left_out:
        console.print(f"no room for {', '.join(left_out)}: --json has all", highlight=False)
    more = len(found) - limit
    shown = f", {more} of them not shown: --limit, --json" if more > 0 else ""
    total = show_bytes(sum(it.file_bytes for it in found))
    console.print(f"{len(found)} sessions, {total}{shown}", highlight=False)


def _table(rows: Sequence[tuple[str, ...]], left_out: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    kept = [at for at, name in enumerate(COLUMNS) if name not in left_out]
    for name in (COLUMNS[at] for at in kept):
        right = name in {"took", "units", "size"}
        chars_max = None if name == COLUMNS[0] else CELL_CHARS_MAX
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name, justify=justify, no_wrap=True, max_width=chars_max)
    for row in rows:
        table.add_row(*(Text(row[at]) for at in kept))
    return table


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
