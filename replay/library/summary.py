"""The replay of several logs as one table for a terminal, the worst first; rules as in `text`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os.path import commonpath
from pathlib import Path
from typing import Final

from rich.console import RenderableType

from protocol.values.limits import NS_PER_S
from recorder.format.format import SUFFIX

from ..rerun.difference import label
from ..rerun.outcome import EXIT_CODES, Outcome
from ..rerun.report import Divergence, FullReport
from ..shared.tables import table
from .text import speed_text

ROWS_MAX: Final = 60
"""Of a larger folder only failures are listed; --json has all."""
NAME_CHARS_MAX: Final = 48
"""A recording's id, and a folder; a longer name is the first column to wrap."""
COLUMNS: Final = ("<log", "<result", "units", "session", "<where")


def summary_lines(outcomes: Sequence[Outcome], elapsed_s: float) -> list[RenderableType]:
    """Describe the replay of logs, at least one; `elapsed_s` is for all, less with processes."""
    severity = list(EXIT_CODES)
    ordered = sorted(outcomes, key=lambda outcome: -severity.index(outcome.result))
    folder = Path(commonpath([Path(outcome.log).absolute().parent for outcome in outcomes]))
    rows = [_row(outcome, folder) for outcome in ordered[:ROWS_MAX]]
    name_chars = min(max(len(row[0]) for row in rows), NAME_CHARS_MAX)
    lines = [table(COLUMNS, rows, overflow="fold", first_chars_min=name_chars)]
    if len(ordered) > ROWS_MAX:
        lines.append(f"and {len(ordered) - ROWS_MAX} more, see --json")
    return [*lines, _total(outcomes, elapsed_s)]


def _row(outcome: Outcome, folder: Path) -> tuple[str, ...]:
    name = Path(outcome.log).absolute().relative_to(folder).as_posix().removesuffix(SUFFIX)
    units = "" if outcome.logic is None else str(outcome.logic.units)
    session = "" if outcome.logic is None else f"{outcome.span_ns / NS_PER_S:.1f} s"
    return (label(name), outcome.result.replace("_", " "), units, session, _where(outcome))


def _where(outcome: Outcome) -> str:
    if outcome.error is not None:
        return outcome.error
    if outcome.divergence is not None and outcome.result != "damaged":
        return _parted(outcome.divergence)
    if isinstance(outcome.report, FullReport) and outcome.logic is None:
        return "environment: " + ", ".join(line.name for line in outcome.report.environment)
    logic = outcome.logic
    if logic is None:
        return ""
    if logic.is_newer:
        return f"recorded by antiphon {label(logic.recorded_by.software)}, which is newer"
    if logic.damage_count:
        return f"byte {logic.damage[0].offset}: {logic.damage[0].reason}"
    return "" if logic.finished else "no fin: as far as it goes"


def _parted(divergence: Divergence) -> str:
    field = f", {divergence.field}" if divergence.field else ""
    return f"record {divergence.seq} ({divergence.record}){field}"


def _total(outcomes: Sequence[Outcome], elapsed_s: float) -> str:
    counts = Counter(outcome.result for outcome in outcomes)
    told = [f"{counts[name]} {name.replace('_', ' ')}" for name in EXIT_CODES if counts[name]]
    span_ns = sum(outcome.span_ns for outcome in outcomes)
    units = sum(outcome.logic.units for outcome in outcomes if outcome.logic is not None)
    return (
        f"{len(outcomes)} logs: {', '.join(told)}; {units} units,"
        f" {span_ns / NS_PER_S:.1f} s of session {speed_text(span_ns, elapsed_s)}"
    )
