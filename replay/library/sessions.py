"""`antiphon recordings list`: the recorded sessions of a folder or a store, newest first.

Only the head and the tail of each log are read, once; an index in the folder keeps them. Logs are
read whole, one after the other and each time, only for the options that name measures. Of each only
the measures that were asked for are kept, so memory does not grow with what was said. A log that is
damaged or unreadable stops no other; the damaged one is measured, with gaps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, get_args

import attrs
import click

from protocol.values.limits import Mode
from recorder.storage.listing import Listing, LogFilter, State, Summary
from recorder.storage.store import Logs
from runtime.net.process import stdout_console

from ..eval.condition import Condition, ConditionType, Figure, FigureType, judge, show_number
from ..shared import recordings
from ..shared.commands import Watch, count, counted, fitted, print_json, printable, progress
from ..shared.commands import reason as reason_of
from ..shared.recordings import show_bytes

if TYPE_CHECKING:
    from ..eval.evaluate import Row, Statistics

ROWS_MAX: Final = 50
"""Of the table, by default; JSON has all."""
COLUMNS: Final = (
    *("recording", "session", "began (UTC)", "took", "mode", "dialect", "key", "units", "size"),
    "end",
)
DISPENSABLE: Final = (
    *("key", "dialect", "units", "mode", "size", "took", "session", "began (UTC)", "end"),
)
"""The order in which a narrow terminal loses columns."""
CELL_CHARS_MAX: Final = 20
"""Of a column except the first: a log's own texts must not displace another's name."""


@click.command("list")
@click.argument("place", metavar="[DIR|URL]", default=recordings.default_folder)
@click.option(
    "--since",
    type=recordings.read_since,
    metavar="SINCE",
    help="Only sessions begun since: 7d, 36h, 2026-01-31 (UTC).",
)
@click.option("--mode", type=click.Choice(get_args(Mode)), help="Only this mode.")
@click.option("--owner", metavar="KEY", help="Only of this key; '' for those without a key.")
@click.option("--state", type=click.Choice(get_args(State)), help="Only in this state.")
@click.option("--reason", help="Only ended for this reason, such as client or context_full.")
@click.option("--find", "session", metavar="ID", help="Only of this session id, or recording id.")
@click.option("--measure", "figures", multiple=True, type=FigureType(), help="Show this measure.")
@click.option("--sort", "by", type=FigureType(), help="Show this measure, the worst first.")
@click.option(
    "--where",
    "conditions",
    multiple=True,
    type=ConditionType(),
    help="Only recordings for which this condition holds, such as 'response_delay > 1.5'.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Show at most this many.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(
    *,
    place: str,
    since: float | datetime | None,
    figures: tuple[Figure, ...],
    by: Figure | None,
    conditions: tuple[Condition, ...],
    limit: int | None,
    as_json: bool,
    **like: Any,
) -> None:
    """List the recorded sessions in a folder or under a URL of an object store, newest first.

    The list is made from the head and the tail of each log, so a log that is listed as finished may
    still be damaged in between: `antiphon recordings verify` checks. A log without an end is `open`
    while a server writes it, and `crashed` otherwise; one whose head is lost is `unreadable`.

    The list of a folder is cached in its .index.sqlite, which may be deleted at any time. A store
    (s3://, gs://, az://, file://) needs the extra store and has no such cache: each log costs two
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
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    since_ms = None if since is None else recordings.since_ms(since, time.time())
    log_filter = LogFilter(since_ms=since_ms, **like)
    logs = recordings.logs_at(place)
    with recordings.reading_place(place), count("reading logs") as on_read:
        found = [it for it in Listing(logs).refresh(on_read) if log_filter.takes(it)]
    columns = tuple({it.text: it for it in (*figures, *([by] if by else []))}.values())
    shown = limit if as_json else limit or ROWS_MAX
    listed = [Listed(summary=it) for it in found]
    if columns or conditions:
        names = {it.measure for it in (*columns, *conditions)}
        with recordings.reading_place(place):
            listed, complaints = _measured(logs, found, shown, names, by=by, conditions=conditions)
        for complaint in complaints:
            click.echo(complaint, err=True)
    if as_json:
        print_json(_body(place, listed, shown))
    else:
        _print(listed, columns, limit or ROWS_MAX)


@attrs.frozen(kw_only=True)
class Listed:
    """A recording with the measures that were asked for.

    Attributes:
        own: its own values of each measure.
        measures: the same as plain values, as `antiphon eval` writes them; None if not measured.
    """

    summary: Summary
    own: Mapping[str, Statistics] = attrs.field(factory=dict)
    measures: Mapping[str, object] | None = None


# -- measures --------------------------------------------------------------------------------------


def _measured(
    logs: Logs,
    found: Sequence[Summary],
    limit: int | None,
    names: set[str],
    *,
    by: Figure | None,
    conditions: Sequence[Condition],
) -> tuple[list[Listed], list[str]]:
    """Measure listed recordings, choose and sort them; return complaints too.

    Unless recordings are chosen or sorted, only the first `limit` are read. A condition on a
    measure that a recording does not have does not hold.
    """
    from ..eval.evaluate import worst_key

    read = found if by or conditions else found[:limit]
    kept, complaints = list[Listed](), list[str]()
    with progress(sum(it.file_bytes for it in read), "measuring") as watch:
        for summary in read:
            row = _measured_row(logs, summary, watch)
            if row.error:
                is_damaged = row.result == "damaged"
                error = "it is damaged: measured with gaps" if is_damaged else row.error
                complaints.append(f"{printable(row.log)}: {error}")
            own = {name: it for name, it in row.own.items() if name in names}
            if len(judge(conditions, own)[0]) == len(conditions):
                measures = {name: it for name, it in row.measures.items() if name in names}
                kept.append(Listed(summary=summary, own=own, measures=measures))
    if by is not None:
        kept.sort(key=lambda it: worst_key(by.measure, _value(it, by)))
    return [*kept, *(Listed(summary=it) for it in found[len(read) :])], complaints


def _measured_row(logs: Logs, summary: Summary, watch: Watch) -> Row:
    from ..eval.evaluate import Row, measure_log

    info = logs.find(summary.recording_id)
    if info is None:
        gone = "it was removed in the meantime"
        return Row(log=summary.recording_id, result="unreadable", error=gone)
    try:
        source = info.open()
    except OSError as error:
        return Row(log=info.place, result="unreadable", error=reason_of(error))
    return measure_log(source, info.place, watch)


def _value(listed: Listed, figure: Figure) -> float | None:
    return figure.value(listed.own) if figure.measure in listed.own else None


# -- printing --------------------------------------------------------------------------------------


def _body(place: str, listed: Sequence[Listed], limit: int | None) -> dict[str, object]:
    return {
        "directory": place,
        "found_logs": len(listed),
        "found_bytes": sum(it.summary.file_bytes for it in listed),
        "logs": [
            attrs.asdict(it.summary) | ({} if it.measures is None else {"measures": it.measures})
            for it in listed[:limit]
        ],
    }


def _print(listed: Sequence[Listed], columns: Sequence[Figure], limit: int) -> None:
    console, measures = stdout_console(), [figure.text for figure in columns]
    if listed:
        rows = [_row(it, columns) for it in listed[:limit]]
        how: dict[str, dict[str, Any]] = {
            name: {"justify": "right" if name in {"took", "units", "size"} else "left"}
            | ({} if name == COLUMNS[0] else {"max_width": CELL_CHARS_MAX})
            for name in COLUMNS
        }
        of_measures = {name: {"justify": "right"} for name in measures}
        dispensable = [[name] for name in (*DISPENSABLE, *reversed(measures[1:]))]
        shown = {COLUMNS[0]: how.pop(COLUMNS[0]), **of_measures, **how}
        table, left_out = fitted(console, shown, rows, dispensable)
        console.print(table)
        if left_out:
            console.print(f"no room for {', '.join(left_out)}: --json has all", highlight=False)
    more = len(listed) - limit
    hidden = f", {more} of them not shown: --limit, --json" if more > 0 else ""
    total = show_bytes(sum(it.summary.file_bytes for it in listed))
    console.print(f"{counted(len(listed), 'session')}, {total}{hidden}", highlight=False)


def _row(listed: Listed, columns: Sequence[Figure]) -> tuple[str, ...]:
    summary, took = listed.summary, listed.summary.duration_ms
    values = (_value(listed, figure) for figure in columns)
    return (
        summary.recording_id,
        *("" if value is None else show_number(value) for value in values),
        summary.session_id or "",
        "" if summary.began_ms is None else recordings.show_moment(summary.began_ms),
        "" if took is None else recordings.show_span(took),
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
