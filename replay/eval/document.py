"""An evaluation as one HTML page, to look at: the measures, then the recordings, worst first.

The page makes no requests and has no script. All text is escaped. It has no times of its own: the
same logs give the same bytes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

from protocol.values.limits import NS_PER_MS
from runtime.measures.measure import Measure

from ..shared.page import escaped, head_of, policy_of, printable, style_with
from ..shared.recordings import show_span
from .evaluate import Evaluation, Result, Row
from .naming import Name, Names
from .summary import Statistics
from .table import MEASURES, SETTINGS
from .text import PAIRED_COLUMNS, paired_cells, show_number

RECORDINGS_MAX: Final = 1_000
"""A page of so many takes 3 MB; more are in the JSON."""
COLUMNS: Final = ("measure", "value", "median", "p90", "worst", "count", "worst in")
_TONES: Final[Mapping[Result, str]] = MappingProxyType(
    {
        **{"measured": "good", "skipped": "", "failed": "bad"},
        **{"damaged": "bad", "unreadable": "bad"},
    }
)


def page_of(
    done: Evaluation, names: Names, target: Path, told: Iterable[str] = ()
) -> Iterator[str]:
    """Write an evaluation as a page, in pieces.

    Args:
        done: the evaluation.
        names: of its logs.
        target: the page's file, from which the links go.
        told: lines on the whole folder.
    """
    count = len(done.rows)
    title = f"{count} recording{'s' * (count != 1)}"
    style = _style()
    yield head_of(f"{title}, measured", policy_of(style), style)
    yield '\n<body>\n<header id="head">\n<div class="title"><p class="mark">Antiphon</p>'
    yield f"<h1>{title}</h1>\n{_pills(done)}</div>\n{_facts(done)}</header>\n"
    for text in told:
        yield f'<p class="notice">{_text(text)}</p>\n'
    yield "<main>\n<h2>Measures</h2>\n"
    yield from _summary(done, names)
    yield from _compared(done)
    yield from _recordings(done, names, target)
    yield from _definitions(done)
    yield "</main>\n</body>\n</html>\n"


def _pills(done: Evaluation) -> str:
    pills = (
        f'<span class="pill {tone}">{n} {result}</span>'
        for result, tone in _TONES.items()
        if (n := done.count(result))
    )
    return f'<div id="pills">{"".join(pills)}</div>'


def _facts(done: Evaluation) -> str:
    length = show_span(done.duration_ns // NS_PER_MS)
    redacted = sum("speech" in row.lost for row in done.rows)
    facts = {"length": length} | ({"redacted": str(redacted)} if redacted else {})
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f'<dl id="facts">{shown}</dl>'


def _summary(done: Evaluation, names: Names) -> Iterator[str]:
    if not done.summary:
        yield '<p class="soft">No log could be measured.</p>\n'
        return
    heads = "".join(f"<th>{name}</th>" for name in COLUMNS[:-1])
    yield '<div class="table"><table>\n<thead><tr>'
    yield f'{heads}<th class="text">{COLUMNS[-1]}</th></tr></thead>\n<tbody>\n'
    for name, found in done.summary.items():
        yield _line(MEASURES[name], found, names)
    yield "</tbody></table></div>\n"


def _line(measure: Measure, found: Statistics, names: Names) -> str:
    amounts = (found.value, found.median, found.p90, found.worst)
    first, *cells = (show_number(each) for each in amounts)
    numbers = "".join(f"<td>{cell}</td>" for cell in (*cells, str(found.count)))
    worst = escaped(names[found.worst_log].path) if found.has_worst(measure) else ""
    return (
        f'<tr><th scope="row">{_abbreviation(measure)}</th>'
        f"<td>{first} <small>{_text(measure.unit)}</small></td>{numbers}"
        f'<td class="text">{worst}</td></tr>\n'
    )


def _compared(done: Evaluation) -> Iterator[str]:
    if done.comparison is None:
        return
    found = done.comparison
    yield f"<h2>Compared with {_text(found.name)}, {found.sessions} sessions in both</h2>\n"
    heads = "".join(f"<th>{name}</th>" for name in PAIRED_COLUMNS if name != "unit")
    yield f'<div class="table"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n'
    for name, paired in found.paired.items():
        _, unit, before, *cells = paired_cells(MEASURES[name], paired)
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        yield (
            f'<tr><th scope="row">{_abbreviation(MEASURES[name])}</th>'
            f"<td>{before} <small>{_text(unit)}</small></td>{numbers}</tr>\n"
        )
    yield "</tbody></table></div>\n"


def _abbreviation(measure: Measure) -> str:
    return f'<abbr title="{_text(measure.definition)}">{_foldable(measure.name)}</abbr>'


def _foldable(measure: str) -> str:
    return _text(measure).replace("_", "_<wbr>")


def _recordings(done: Evaluation, names: Names, target: Path) -> Iterator[str]:
    what = "" if done.comparison is None else "the difference of "
    order = "" if done.by is None else f", worst first by {what}{done.by}"
    yield f"<h2>Recordings{order}</h2>\n"
    if done.by is not None and not any(done.by in row.own for row in done.rows):
        yield f'<p class="soft">No recording has {done.by}.</p>\n'
    for row in done.rows[:RECORDINGS_MAX]:
        apart = {} if done.comparison is None else done.comparison.own.get(row.log, {})
        yield _recording(row, names[row.log], done.by, target, apart)
    more = len(done.rows) - RECORDINGS_MAX
    if more > 0:
        yield f'<p class="soft">and {more} more: <code>antiphon eval --json</code></p>\n'


def _recording(
    row: Row, name: Name, by: str | None, target: Path, apart: Mapping[str, float]
) -> str:
    facts = [str(row.body.get(each, "")) for each in ("mode", "dialect")]
    facts += [show_span(row.duration_ns // NS_PER_MS)] if row.body else []
    facts += [f"redacted: {', '.join(sorted(row.lost))}"] if row.lost else []
    about = " · ".join(_text(each) for each in facts if each)
    error = f'<p class="bad">{_text(row.error)}</p>\n' if row.error else ""
    values = "".join(_value(row, each, by, apart.get(each)) for each in row.own)
    shown = f'<dl class="values">{values}</dl>\n' if values else ""
    links = [_link(name, target)]
    if isinstance(made := row.body.get("made"), str):
        links.append(f"<code>{_text(f'antiphon recordings view {shlex.quote(made)}')}</code>")
    return (
        f"<article>\n<h3>{escaped(name.path)}</h3>\n"
        f'<p class="soft">{" · ".join([*[about] * bool(about), *links])}</p>\n'
        f"{error}{shown}</article>\n"
    )


def _value(row: Row, measure: str, by: str | None, apart: float | None) -> str:
    found, unit = row.own[measure], MEASURES[measure].unit
    mark = ' class="by"' if measure == by else ""
    at_s = row.worst_at_s(measure)
    worst = ""
    if at_s is not None:
        amount = f"worst {show_number(found.worst)} " if found.count > 1 else ""
        worst = f" <small>{amount}at {show_number(at_s)} s</small>"
    if apart:
        worst += f" <small>({'+' * (apart > 0)}{show_number(apart)})</small>"
    return (
        f"<div{mark}><dt>{_foldable(measure)}</dt>"
        f"<dd>{show_number(found.value)} <small>{_text(unit)}</small>{worst}</dd></div>"
    )


def _link(name: Name, target: Path) -> str:
    """Link the page of a recording if there is one; else name the command that writes it."""
    if not name.page.is_file():
        return f"<code>{escaped(name.command)}</code>"
    page = name.page.parent.resolve() / name.page.name
    path = Path(os.path.relpath(page, target.parent.resolve()))
    # The dot keeps a name such as `javascript:` from being a scheme.
    return f'<a href="{escaped(f"./{quote(os.fsencode(path))}")}">view</a>'


def _definitions(done: Evaluation) -> Iterator[str]:
    yield "<details>\n<summary>Definitions</summary>\n<dl>\n"
    for name in done.summary:
        measure = MEASURES[name]
        better = f", {measure.better} is better" if measure.better else ""
        yield f"<dt>{_text(name)} ({_text(measure.unit)}{better})</dt>"
        yield f"<dd>{_text(measure.definition)} [{_text(measure.source)}]</dd>\n"
    yield "</dl>\n<ul>\n"
    yield from _items(SETTINGS)
    yield "</ul>\n</details>\n"


def _items(texts: Iterable[str]) -> Iterator[str]:
    return (f"<li>{_text(text)}</li>\n" for text in texts)


def _text(text: str) -> str:
    return escaped(printable(text))


@cache
def _style() -> str:
    return style_with((files(__package__) / "page.css").read_text("utf-8"))
