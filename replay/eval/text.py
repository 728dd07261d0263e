"""An evaluation and the definitions of its measures, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from protocol.values.limits import NS_PER_MS
from recorder.format.format import SUFFIX
from runtime.measures.measure import Measure

from ..shared.page import printable
from ..shared.recordings import show_span
from ..shared.tables import table
from .evaluate import Evaluation, Result, Row
from .paired import Comparison, Paired, verdict_of
from .summary import Json, Statistics
from .table import MEASURES, OWN_VOICE, SETTINGS

WORST_MAX: Final = 10
"""Recordings listed below the table; JSON has all."""
CHANGED_MAX: Final = 20
"""Units listed that came out otherwise."""
LINE_CHARS: Final = 240
"""Outside a terminal a row is one line, for `grep`."""
TROUBLE: Final[tuple[Result, ...]] = ("skipped", "failed", "damaged", "unreadable")
PAIRED_COLUMNS: Final = (
    *("measure", "unit", "baseline", "value", "difference", "low", "high", "p", "pairs"),
    "",
)
_BETTER: Final = {"lower": "lower is better", "higher": "higher is better", "": "describes"}
_COLUMNS: Final = ("measure", "unit", "value", "median", "p90", "worst", "count", "worst in")


def console() -> Console:
    """Return where results are printed: a terminal, or lines that are not folded."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=LINE_CHARS)


def lines_of(done: Evaluation, terminal: Console) -> Iterator[RenderableType]:
    """Write an evaluation for a terminal: the table of its measures, and its worst recordings."""
    if done.summary:
        table, unbounded = _table(done, _COLUMNS), terminal.options.update(max_width=LINE_CHARS)
        has_room = terminal.measure(table, options=unbounded).maximum <= terminal.width
        yield table if has_room else _table(done, _COLUMNS[:-1])
        yield ""
    if done.comparison is not None:
        yield from _compared(done.comparison, terminal)
    if done.by is not None:
        yield from _worst(done, done.by)
    changed = [(row, it) for row in done.rows for it in _changed(row)]
    if changed:
        yield "units that came out otherwise:"
        yield _changed_table(changed)
    measured = done.count("measured")
    counts = [f"{measured} recording{'s' * (measured != 1)} measured"]
    counts += [f"{n} {result}" for result in TROUBLE if (n := done.count(result))]
    redacted = sum("speech" in row.lost for row in done.rows)
    if redacted:
        yield f"{redacted} redacted: without the user's speech they have no measures of turns"
    yield f"{', '.join(counts)}; {show_span(done.duration_ns // NS_PER_MS)} in all"


def _table(done: Evaluation, columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_text = name in ("measure", "unit", "worst in")
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for name, found in done.summary.items():
        table.add_row(*map(Text, _cells(MEASURES[name], found)[: len(columns)]))
    return table


def _cells(measure: Measure, found: Statistics) -> tuple[str, ...]:
    numbers = (found.value, found.median, found.p90, found.worst)
    return (
        measure.name,
        measure.unit,
        *map(show_number, numbers),
        str(found.count),
        _short(found.worst_log) if found.has_worst(measure) else "",
    )


def show_number(number: float) -> str:
    """Write a number with up to three decimals."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


def _changed(row: Row) -> Sequence[Mapping[str, Any]]:
    """The units of a forced session that are not as recorded."""
    found = row.body.get("changed", ())
    assert isinstance(found, Sequence)
    return found


def _changed_table(changed: Sequence[tuple[Row, Mapping[str, Any]]]) -> RenderableType:
    columns = ("<recording", "unit", "<where", "<recorded", "<came out", "<judged")
    names = ("unit", "field", "recorded", "came_out")
    rows = [
        (_short(row.log), *(str(it[name]) for name in names), _apart(it))
        for row, it in changed[:CHANGED_MAX]
    ]
    left = len(changed) - CHANGED_MAX
    more = f"and {left} more, see --json" if left > 0 else ""
    return table(columns, rows, overflow="fold", more=more)


def _apart(found: Mapping[str, Any]) -> str:
    if found["near_tie"] is None:
        return ""
    measured = [] if found["margin"] is None else [f"{found['margin']:.3g} logits apart"]
    measured += [] if found["draw_gap"] is None else [f"drawn {found['draw_gap']:.2g} away"]
    return ", ".join(measured) + (": a near-tie" if found["near_tie"] else ": no near-tie")


def _compared(found: Comparison, terminal: Console) -> Iterator[RenderableType]:
    count = f"{found.sessions} session{'s' * (found.sessions != 1)} in both"
    yield f"compared with {printable(found.name)}, {count}; low to high is the 95 % interval:"
    table = _paired_table(found, hidden=())
    unbounded = terminal.options.update(max_width=LINE_CHARS)
    has_room = terminal.measure(table, options=unbounded).maximum <= terminal.width
    yield table if has_room else _paired_table(found, hidden=("unit", "baseline", "value", "pairs"))
    yield ""


def _paired_table(found: Comparison, hidden: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [name not in hidden for name in PAIRED_COLUMNS]
    for name in compress(PAIRED_COLUMNS, shown):
        is_text = name in ("measure", "unit", "")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for name, paired in found.paired.items():
        table.add_row(*map(Text, compress(paired_cells(MEASURES[name], paired), shown)))
    return table


def paired_cells(measure: Measure, found: Paired) -> tuple[str, ...]:
    """Write the cells of a comparison's row."""
    numbers = (found.baseline, found.value, found.difference, found.low, found.high)
    shown = map(show_number, numbers)
    rest = (f"{found.p:.4f}", str(found.recordings), verdict_of(measure, found))
    return (measure.name, measure.unit, *shown, *rest)


def _short(log: str) -> str:
    return printable(Path(log).name.removesuffix(SUFFIX))


def _worst(done: Evaluation, by: str) -> Iterator[str]:
    compared = done.comparison
    own = {row.log: row.own[by].worst for row in done.rows if by in row.own}
    if compared is not None:
        own = {log: found[by] for log, found in compared.own.items() if by in found}
    rows = [row for row in done.rows if row.log in own][:WORST_MAX]
    if not rows:
        yield f"no recording has {by}{': give a --transcriber' if by == OWN_VOICE else ''}"
        return
    what = f"the difference of {by}" if compared is not None else by
    yield f"worst first, by {what} ({MEASURES[by].unit}):"
    yield from (f"  {own[row.log]:10.3f}  {printable(row.log)}" for row in rows)
    more = len(own) - len(rows)
    if more > 0:
        yield f"  and {more} more: --json"


def complaints(done: Evaluation) -> Iterator[str]:
    """Name the logs that are not in the summary, and why."""
    rows: list[Row] = sorted(done.rows, key=lambda row: row.log)
    yield from (f"{printable(row.log)}: {row.error}" for row in rows if row.error)


def definition_lines() -> Iterator[str]:
    """Write the table of measures, and what holds for all of them."""
    for measure in MEASURES.values():
        yield f"{measure.name} ({measure.unit}, {measure.modes}; {_BETTER[measure.better]})"
        yield f"  {measure.definition} [{measure.source}]"
    yield ""
    yield from SETTINGS


def definitions_json() -> Json:
    """Write the same as plain values."""
    names = ("unit", "kind", "better", "modes", "definition", "source")
    return {
        "measures": {
            measure.name: {name: getattr(measure, name) for name in names}
            for measure in MEASURES.values()
        },
        "settings": list(SETTINGS),
    }


def definition_rows() -> list[str]:
    """Write the table of measures in Markdown, without its head."""
    return [
        f"| `{it.name}` | {it.unit} | {it.better or '-'} | {it.modes} | {it.definition} | "
        f"{it.source} |"
        for it in MEASURES.values()
    ]
