"""An evaluation as text, as JUnit XML for CI systems, and as a page to look at.

Names of files are untrusted: they are written printable, and two different ones stay different.
JUnit and the page have no times of their own: the same logs give the same bytes.

**JUnit** has a test case for each recording. A recording fails by its own values. It has an error,
and no failures, if its log is damaged or unreadable, or the model failed on it; it is skipped if no
model can be run on it. Conditions on the whole folder are in the output of the suite; the exit code
judges them.

**The page** has the measures, then the recordings, worst first. It makes no requests and has no
script. All text is escaped.
"""

from __future__ import annotations

import os
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import attrs
from rich.console import Console, RenderableType

from protocol.values.limits import NS_PER_MS, NS_PER_S
from recorder.format.format import SUFFIX
from recorder.write.files import PART_PREFIX, check_new_file, new_file
from runtime.measures.conversation import Measure

from ..shared.commands import (
    escaped,
    fitted,
    head_of,
    policy_of,
    printable,
    refuse_log_as_output,
    style_with,
    table,
    unwritable,
)
from ..shared.recordings import page_next_to, show_span
from .condition import Condition, judge, show_number
from .evaluate import (
    MEASURES,
    OWN_VOICE,
    SETTINGS,
    Evaluation,
    Json,
    Paired,
    Result,
    Row,
    Statistics,
    verdict_of,
    worst_values,
)

# -- names of logs ---------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Name:
    """A log's name in reports; its texts are printable.

    Attributes:
        folder: as it was given; empty if it is this folder, or if the log was downloaded.
        path: of the log in that folder, with `/`.
        page: the page that `antiphon recordings view` writes about this log; it may be missing.
        command: shows this log.
    """

    folder: str
    path: str
    page: Path
    command: str


Names = Mapping[str, Name]
"""By the path of the log, as it was found."""


def names_of(given: Iterable[Path], logs: Iterable[Path]) -> Names:
    """Name logs that were found in files and folders."""
    folders = [path for path in given if path.is_dir()]
    return {str(log): _name(log, folders) for log in logs}


def _name(log: Path, folders: Iterable[Path]) -> Name:
    is_copy = log.parent.name.startswith(PART_PREFIX)  # of a stored log: its folder is random
    folder = next((it for it in folders if log.is_relative_to(it)), log.parent)
    shown = log.name.removesuffix(SUFFIX) if is_copy else str(log)
    return Name(
        folder="" if is_copy or folder == Path() else printable(str(folder)),
        path=printable(log.relative_to(folder).as_posix()),
        page=page_next_to(log),
        command=f"antiphon recordings view {shlex.quote(printable(shown))}",
    )


# -- text ------------------------------------------------------------------------------------------


WORST_MAX: Final = 10
"""Recordings listed below the table; JSON has all."""
CHANGED_MAX: Final = 20
"""Units listed that came out otherwise."""
TROUBLE: Final[tuple[Result, ...]] = ("skipped", "failed", "damaged", "unreadable")
PAIRED_COLUMNS: Final = (
    *("measure", "unit", "baseline", "value", "difference", "low", "high", "p", "pairs"),
    "",
)
_BETTER: Final = {"lower": "lower is better", "higher": "higher is better", "": "describes"}
_COLUMNS: Final = ("measure", "unit", "value", "median", "p90", "worst", "count", "worst in")


def lines_of(done: Evaluation, terminal: Console) -> Iterator[RenderableType]:
    """Write an evaluation for a terminal: the table of its measures, and its worst recordings."""
    if done.summary:
        cells = (_cells(MEASURES[it], found) for it, found in done.summary.items())
        yield _fitted(terminal, _COLUMNS, cells, _COLUMNS[-1:])
        yield ""
    compared = done.comparison
    if compared is not None:
        count = f"{compared.sessions} session{'s' * (compared.sessions != 1)} in both"
        name = printable(compared.name)
        yield f"compared with {name}, {count}; low to high is the 95 % interval:"
        cells = (paired_cells(MEASURES[it], paired) for it, paired in compared.paired.items())
        yield _fitted(terminal, PAIRED_COLUMNS, cells, ("unit", "baseline", "value", "pairs"))
        yield ""
    if done.by is not None:
        yield from _worst(done, done.by)
    changed = [(row, it) for row in done.rows for it in _changed(row)]
    if changed:
        yield "units with other results:"
        yield _changed_table(changed)
    measured = done.count("measured")
    counts = [f"{measured} recording{'s' * (measured != 1)} measured"]
    counts += [f"{n} {result}" for result in TROUBLE if (n := done.count(result))]
    redacted = sum("speech" in row.lost for row in done.rows)
    if redacted:
        yield f"{redacted} redacted: without the user's speech they have no measures of turns"
    yield f"{', '.join(counts)}; {show_span(done.duration_ns // NS_PER_MS)} in all"


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


def _fitted(
    terminal: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    dispensable: Sequence[str],
) -> RenderableType:
    texts = ("measure", "unit", "worst in", "")
    how = {name: {"justify": "left" if name in texts else "right"} for name in columns}
    return fitted(terminal, how, rows, [dispensable])[0]


def _cells(measure: Measure, found: Statistics) -> tuple[str, ...]:
    numbers = (found.value, found.median, found.p90, found.worst)
    return (
        measure.name,
        measure.unit,
        *map(show_number, numbers),
        str(found.count),
        _short(found.worst_log) if found.has_worst(measure) else "",
    )


def paired_cells(measure: Measure, found: Paired) -> tuple[str, ...]:
    """Write the cells of a comparison's row."""
    numbers = (found.baseline, found.value, found.difference, found.low, found.high)
    shown = map(show_number, numbers)
    rest = (f"{found.p:.4f}", str(found.recordings), verdict_of(measure, found))
    return (measure.name, measure.unit, *shown, *rest)


def _short(log: str) -> str:
    return printable(Path(log).name.removesuffix(SUFFIX))


def _worst(done: Evaluation, by: str) -> Iterator[str]:
    own = worst_values(done.rows, by, done.comparison)
    rows = [row for row in done.rows if row.log in own][:WORST_MAX]
    if not rows:
        yield f"no recording has {by}{': give a --transcriber' if by == OWN_VOICE else ''}"
        return
    what = f"the difference of {by}" if done.comparison is not None else by
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


# -- JUnit -----------------------------------------------------------------------------------------


SUITE: Final = "antiphon eval"
"""Also the class of the recordings in this folder."""


def junit_of(
    done: Evaluation, names: Names, conditions: Iterable[Condition], notes: Sequence[str] = ()
) -> bytes:
    """Write an evaluation in UTF-8.

    Args:
        done: the evaluation.
        names: of its logs.
        conditions: those that a recording must not meet; those on counts are left out.
        notes: lines on the whole folder.
    """
    judged = [it for it in conditions if it.is_of_recordings]
    rows = sorted(done.rows, key=lambda row: row.log)
    cases = [_case(row, names[row.log], judged) for row in rows]
    tags = ["failure", "error"] + ["skipped"] * any(row.result == "skipped" for row in rows)
    time = {"time": _seconds(sum(row.duration_ns for row in rows))}
    return junit_xml(SUITE, cases, tags, time, notes)


def junit_xml(
    name: str,
    cases: Sequence[ET.Element],
    tags: Iterable[str],
    more: Mapping[str, str] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> bytes:
    """Write test cases as one suite, counting those with each tag; `notes` are its output."""
    counts = {"tests": str(len(cases))}
    for tag in tags:
        plural = tag if tag == "skipped" else f"{tag}s"
        counts[plural] = str(sum(case.find(tag) is not None for case in cases))
    counts |= more
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": name, **counts})
    suite.extend(cases)
    if notes:
        ET.SubElement(suite, "system-out").text = "\n".join(map(printable, notes))
    ET.indent(suites)
    text: bytes = ET.tostring(suites, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _case(row: Row, name: Name, conditions: Iterable[Condition]) -> ET.Element:
    about = {"classname": name.folder or SUITE, "name": name.path}
    case = ET.Element("testcase", {**about, "time": _seconds(row.duration_ns)})
    if row.error or row.result == "skipped":
        tag = "skipped" if row.result == "skipped" else "error"
        _finding(case, tag, row.result, printable(row.error))
        return case
    for condition in conditions:
        met, _ = judge([condition], row.own)
        for message in met:
            worst = row.worst_at_s(condition.measure)
            place = [] if worst is None else [f"{condition.measure} is worst at {worst:g} s"]
            details = (*place, name.command)
            _finding(case, "failure", condition.measure, printable(message), details)
    return case


def _finding(
    case: ET.Element, tag: str, kind: str, message: str, details: Iterable[str] = ()
) -> None:
    """Add a failure or an error; some systems show the message, others the text."""
    found = ET.SubElement(case, tag, {"type": kind, "message": message})
    found.text = "\n".join((message, *details))


def _seconds(span_ns: int) -> str:
    return f"{span_ns / NS_PER_S:.3f}"


# -- the page --------------------------------------------------------------------------------------


RECORDINGS_MAX: Final = 1_000
"""A page of so many takes 3 MB; more are in the JSON."""
COLUMNS: Final = ("measure", "value", "median", "p90", "worst", "count", "worst in")
_TONES: Final[Mapping[Result, str]] = {
    **{"measured": "good", "skipped": "", "failed": "bad", "damaged": "bad", "unreadable": "bad"}
}


def page_of(
    done: Evaluation, names: Names, target: Path, notes: Iterable[str] = ()
) -> Iterator[str]:
    """Write an evaluation as a page, in pieces.

    Args:
        done: the evaluation.
        names: of its logs.
        target: the page's file, from which the links go.
        notes: lines on the whole folder.
    """
    count = len(done.rows)
    title = f"{count} recording{'s' * (count != 1)}"
    style = _style()
    yield head_of(f"{title}, measured", policy_of(style), style)
    yield '\n<body>\n<header id="head">\n<div class="title"><p class="mark">Antiphon</p>'
    yield f"<h1>{title}</h1>\n{_pills(done)}</div>\n{_facts(done)}</header>\n"
    for text in notes:
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
    heads = (*(f"<th>{name}</th>" for name in COLUMNS[:-1]), f'<th class="text">{COLUMNS[-1]}</th>')
    lines = (_line(MEASURES[name], found, names) for name, found in done.summary.items())
    yield from _html_table(heads, lines)


def _html_table(heads: Iterable[str], lines: Iterable[str]) -> Iterator[str]:
    yield f'<div class="table"><table>\n<thead><tr>{"".join(heads)}</tr></thead>\n<tbody>\n'
    yield from lines
    yield "</tbody></table></div>\n"


def _line(measure: Measure, found: Statistics, names: Names) -> str:
    worst = escaped(names[found.worst_log].path) if found.has_worst(measure) else ""
    cells = _cells(measure, found)[2:-1]
    return _html_row(measure, cells, f'<td class="text">{worst}</td>')


def _html_row(measure: Measure, cells: Sequence[str], last: str = "") -> str:
    numbers = "".join(f"<td>{cell}</td>" for cell in cells[1:])
    head = f'<abbr title="{_text(measure.definition)}">{_foldable(measure.name)}</abbr>'
    return (
        f'<tr><th scope="row">{head}</th>'
        f"<td>{cells[0]} <small>{_text(measure.unit)}</small></td>{numbers}{last}</tr>\n"
    )


def _compared(done: Evaluation) -> Iterator[str]:
    found = done.comparison
    if found is not None:
        yield f"<h2>Compared with {_text(found.name)}; sessions in both: {found.sessions}</h2>\n"
        heads = (f"<th>{name}</th>" for name in PAIRED_COLUMNS if name != "unit")
        pairs = ((MEASURES[name], paired) for name, paired in found.paired.items())
        lines = (_html_row(it, paired_cells(it, paired)[2:]) for it, paired in pairs)
        yield from _html_table(heads, lines)


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
    yield from (f"<li>{_text(text)}</li>\n" for text in SETTINGS)
    yield "</ul>\n</details>\n"


def _text(text: str) -> str:
    return escaped(printable(text))


@cache
def _style() -> str:
    return style_with((files(__package__) / "page.css").read_text("utf-8"))


# -- the files -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Reports:
    """Files to write; `force` replaces those that are there."""

    junit: Path | None
    html: Path | None
    force: bool

    def check(self, logs: Iterable[Path]) -> None:
        """See that they can be written, before logs are read that take minutes.

        `click.UsageError`: a file is a log; `UnusableError`: it cannot be written.
        """
        for option, target in (("--junit", self.junit), ("--html", self.html)):
            if target is None:
                continue
            refuse_log_as_output(target, logs, option)
            if not (self.force and target.is_file()):
                try:
                    check_new_file(target)
                except OSError as error:
                    raise unwritable(error, target) from error

    def write(
        self,
        done: Evaluation,
        given: Iterable[Path],
        conditions: Iterable[Condition],
        notes: Sequence[str],
    ) -> None:
        """Write them, each whole or not at all; raises `UnusableError`.

        Args:
            done: the evaluation.
            given: the folders and logs that it is of.
            conditions: on each recording.
            notes: lines on conditions of all recordings together.
        """
        names = names_of(given, (Path(row.log) for row in done.rows))
        self.write_junit(junit_of(done, names, conditions, notes))
        if self.html is not None:
            pieces = page_of(done, names, self.html, notes)
            self._write(self.html, (piece.encode() for piece in pieces))

    def write_junit(self, xml: bytes) -> None:
        """Write tests, if that was asked for; raises `UnusableError`."""
        if self.junit is not None:
            self._write(self.junit, [xml])

    def _write(self, target: Path, pieces: Iterable[bytes]) -> None:
        try:
            with new_file(target, replaces=self.force) as part, part.open("wb") as file:
                file.writelines(pieces)
        except OSError as error:
            raise unwritable(error, target) from error
