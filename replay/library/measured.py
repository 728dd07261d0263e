"""Measures of listed recordings, for which their logs are read whole, one after the other.

Only the measures that were asked for are kept of each, so memory does not grow with what was said.
A log that is damaged or unreadable stops no other; the damaged one is measured, with gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from recorder.storage.store import LogInfo, Logs
from recorder.storage.summary import Summary

from ..eval.condition import Condition, Figure, judge
from ..eval.evaluate import Row, measure_log, worst_key
from ..eval.summary import Json, Statistics
from ..eval.text import show_number
from ..shared.commands import reason
from ..shared.page import printable
from ..shared.progress import Watch, progress


@attrs.frozen(kw_only=True)
class Asked:
    """What to measure: the figures to show, the one to sort by, and conditions to meet."""

    figures: tuple[Figure, ...]
    by: Figure | None
    conditions: tuple[Condition, ...]

    @property
    def columns(self) -> tuple[Figure, ...]:
        """The figures to show, each once; that to sort by is the last unless it is named."""
        shown = (*self.figures, *([] if self.by is None else [self.by]))
        return tuple({figure.text: figure for figure in shown}.values())

    @property
    def needs_all(self) -> bool:
        """Whether all recordings are read, or only those that are shown."""
        return self.by is not None or bool(self.conditions)

    @property
    def measures(self) -> set[str]:
        """The names of the measures that are needed."""
        return {figure.measure for figure in (*self.columns, *self.conditions)}


@attrs.frozen(kw_only=True)
class Measured:
    """A recording with what was asked for.

    Attributes:
        own: its own values of each measure.
        measures: the same as plain values, as `antiphon eval` writes them.
        complaint: why it is not measured, or has gaps; empty otherwise.
    """

    summary: Summary
    own: dict[str, Statistics] = attrs.field(factory=dict)
    measures: dict[str, Json] = attrs.field(factory=dict)
    complaint: str = ""

    def cells(self, columns: Sequence[Figure]) -> tuple[str, ...]:
        """Write its values, empty where it does not have the measure."""
        values = (self.value(figure) for figure in columns)
        return tuple("" if value is None else show_number(value) for value in values)

    def value(self, figure: Figure) -> float | None:
        """Return a value; None without the measure."""
        return figure.value(self.own) if figure.measure in self.own else None

    def meets(self, conditions: Sequence[Condition]) -> bool:
        """Whether all conditions hold; one on a measure that it does not have does not."""
        return len(judge(conditions, self.own)[0]) == len(conditions)


def measure_listed(
    logs: Logs, found: Sequence[Summary], asked: Asked, limit: int | None
) -> tuple[list[Measured], list[str]]:
    """Measure listed recordings, choose and sort them as asked; return complaints too.

    Unless recordings are chosen or sorted, only the first `limit` are read, and the others have no
    measures.
    """
    read = found if asked.needs_all else found[:limit]
    kept, complaints = list[Measured](), list[str]()
    with progress(sum(it.file_bytes for it in read), "measuring") as watch:
        for each in _measured(logs, read, asked.measures, watch):
            complaints += [each.complaint] if each.complaint else []
            if each.meets(asked.conditions):
                kept.append(each)
    if asked.by is not None:
        by = asked.by
        kept.sort(key=lambda it: worst_key(by.measure, it.value(by)))
    return [*kept, *(Measured(summary=it) for it in found[len(read) :])], complaints


def _measured(
    logs: Logs, read: Sequence[Summary], measures: set[str], watch: Watch
) -> Iterator[Measured]:
    for summary in read:
        info = logs.find(summary.recording_id)
        if info is None:
            complaint = f"{summary.recording_id}: it was removed meanwhile"
            yield Measured(summary=summary, complaint=complaint)
            continue
        row = _row(info, watch)
        yield Measured(
            summary=summary,
            own={name: it for name, it in row.own.items() if name in measures},
            measures={name: it for name, it in row.measures.items() if name in measures},
            complaint=_complaint(row),
        )


def _complaint(row: Row) -> str:
    if not row.error:
        return ""
    error = "it is damaged, and measured with gaps" if row.result == "damaged" else row.error
    return f"{printable(row.log)}: {error}"


def _row(info: LogInfo, watch: Watch) -> Row:
    try:
        source = info.open()
    except OSError as error:
        return Row(log=info.place, result="unreadable", error=reason(error))
    return measure_log(source, info.place, watch)
