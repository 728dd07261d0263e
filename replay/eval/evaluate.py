"""Evaluates the logs of a folder one after the other: a damaged or unreadable one stops no other.

A damaged log is measured, with gaps, and left out of the summary. Of each recording only its
measures are kept, so memory does not grow with what was said.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import attrs

from protocol.values.limits import NS_PER_S
from recorder.format.errors import RecorderError
from recorder.read.reader import LogReader

from ..shared.commands import reason
from ..shared.progress import Watch, size_of, watched
from .facts import Facts, Lost
from .gather import gather
from .score import score
from .summary import (
    DIGITS,
    Json,
    Statistics,
    Summary,
    raw_values,
    scaled,
    scores_json,
    statistics_json,
    worst_of,
)
from .table import MEASURES

Result = Literal["measured", "damaged", "unreadable"]


@attrs.frozen(kw_only=True)
class Row:
    """One log's outcome.

    Attributes:
        error: why it is not measured, or has gaps; empty otherwise.
        duration_ns: of the session.
        lost: what redactions took out.
        worst: the worst value of each measure, in its unit.
        body: its measures and what they are of, as plain values.
    """

    log: str
    result: Result
    error: str = ""
    duration_ns: int = 0
    lost: frozenset[Lost] = frozenset()
    worst: dict[str, float] = attrs.field(factory=dict)
    body: Json = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Evaluation:
    """All logs; `by` is the measure whose worst recordings come first, if any has one."""

    rows: tuple[Row, ...]
    summary: dict[str, Statistics]
    by: str | None

    def count(self, result: Result) -> int:
        """Count the logs with a result."""
        return sum(row.result == result for row in self.rows)

    @property
    def has_failures(self) -> bool:
        """Whether a log is damaged or could not be read."""
        return self.count("measured") < len(self.rows)

    @property
    def duration_ns(self) -> int:
        """Of all recordings in the summary."""
        return sum(row.duration_ns for row in self.rows if row.result == "measured")

    def to_json(self) -> Json:
        """Write all of it as plain values."""
        return {
            "by": self.by,
            "recordings": [
                {"log": row.log, "result": row.result}
                | ({"error": row.error} if row.error else {})
                | row.body
                for row in self.rows
            ],
            "summary": statistics_json(self.summary),
        }


def evaluate(logs: Iterable[Path], watch: Watch, by: str | None = None) -> Evaluation:
    """Measure logs; those that are worst by a measure come first (by default the first of all)."""
    summary, rows = Summary(), list[Row]()
    for log in logs:
        rows.append(_row(log, watch, summary))
    statistics = summary.statistics()
    judging = (name for name in statistics if MEASURES[name].better)
    by = by or next(judging, None)
    return Evaluation(rows=tuple(_worst_first(rows, by)), summary=statistics, by=by)


def _row(log: Path, watch: Watch, summary: Summary) -> Row:
    try:
        with LogReader(log) as reader:
            facts = gather(reader.head.fields, watched(reader, watch))
        scores = score(facts)
        worst = {
            name: scaled(MEASURES[name], worst_of(MEASURES[name], raw_values(value)))
            for name, value in scores.items()
        }
        measures = scores_json(scores)
    except (OSError, RecorderError) as error:
        watch(size_of(log))
        return Row(log=str(log), result="unreadable", error=reason(error))
    except OverflowError:  # a forged log: numbers of a server fit
        return Row(log=str(log), result="unreadable", error="a number in it is too large")
    damage = facts.damage_count
    if not damage:
        summary.add(str(log), scores)
    return Row(
        log=str(log),
        result="damaged" if damage else "measured",
        error=f"damaged, {damage} times: not in the summary" if damage else "",
        duration_ns=facts.duration_ns,
        lost=facts.lost,
        worst=worst,
        body=_body(facts) | {"measures": measures},
    )


def _body(facts: Facts) -> Json:
    return {
        "recording_id": facts.recording_id,
        "mode": facts.mode,
        "dialect": facts.dialect,
        "duration_s": round(facts.duration_ns / NS_PER_S, DIGITS),
        "finished": facts.finished,
        "speech_source": facts.speech_source,
        "lost": sorted(facts.lost),
    }


def _worst_first(rows: Iterable[Row], by: str | None) -> list[Row]:
    """Sort by a measure, logs without it last; equal ones keep their order."""
    if by is None:
        return [*rows]
    sign = 1 if MEASURES[by].better == "higher" else -1

    def key(row: Row) -> tuple[bool, float]:
        value = row.worst.get(by)
        return value is None, 0 if value is None else sign * value

    return sorted(rows, key=key)
