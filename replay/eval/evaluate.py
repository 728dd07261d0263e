"""Evaluates the logs of a folder one after the other: a damaged or unreadable one stops no other.

A damaged log is measured, with gaps, and left out of the summary. Of each recording only its
measures are kept, so memory does not grow with what was said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import attrs

from protocol.values.limits import NS_PER_S
from recorder.format.errors import RecorderError
from recorder.format.records import Fields
from recorder.read.reader import LogReader
from recorder.read.scan import OpenSource
from runtime.measures.measure import Scores

from ..shared.commands import Watch, reason, size_of, unwatched, watched
from ..shared.fields import below, typed
from .facts import Facts, Lost
from .gather import gather
from .packing import Values, opened, pack
from .paired import Baseline, Comparison, Own, compare, paired_json
from .score import score
from .summary import (
    DIGITS,
    Json,
    Statistics,
    Summary,
    statistics_json,
)
from .table import MEASURES

Result = Literal["measured", "damaged", "unreadable", "skipped", "failed"]
"""`skipped` and `failed`: no model could be run on it, and a model that was run failed."""
NOTHING: Final[Scores] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class Row:
    """One log's outcome.

    Attributes:
        error: why it is not measured, or has gaps; empty otherwise.
        duration_ns: of the session.
        lost: what redactions took out.
        packed: what was measured, by `row_of`; empty if nothing was.
    """

    log: str
    result: Result
    error: str = ""
    duration_ns: int = 0
    lost: frozenset[Lost] = frozenset()
    packed: bytes = attrs.field(default=b"", repr=False)

    @property
    def scores(self) -> Scores:
        """What was measured."""
        return opened(self.packed).scores

    @property
    def own(self) -> Mapping[str, Statistics]:
        """Its own values of each measure, as if it were the only recording."""
        return opened(self.packed).own

    @property
    def values(self) -> Own:
        """Its own value of each measure, in few bytes."""
        return Values({name: it.value for name, it in self.own.items()})

    @property
    def body(self) -> Json:
        """Its measures and what they are of, as plain values."""
        return opened(self.packed).body

    @property
    def measures(self) -> Mapping[str, Json]:
        """Its measures, as plain values."""
        found = self.body.get("measures", {})
        assert isinstance(found, Mapping)
        return found

    def with_body(self, **more: object) -> Row:
        """Return the row with more that is known of the recording; the measures come last."""
        packed = pack(self.log, self.scores, {**self.about, **more})
        return attrs.evolve(self, packed=packed)

    @property
    def about(self) -> Json:
        """What its measures are of."""
        return {name: value for name, value in self.body.items() if name != "measures"}

    def worst_at_s(self, measure: str) -> float | None:
        """Return where the worst moment of a measure is; None if it has no single moments."""
        at_s = self.measures.get(measure, {}).get("worst_at_s")
        return at_s if isinstance(at_s, float) else None


@attrs.frozen(kw_only=True)
class Evaluation:
    """All logs.

    Attributes:
        by: the measure whose worst recordings come first, if any has one; those that are worse
            than their baseline by most, if there is one.
        about: how a model was run, as plain values; empty if none was.
        comparison: with a baseline; None without one.
    """

    rows: tuple[Row, ...]
    summary: dict[str, Statistics]
    by: str | None
    about: Json = attrs.field(factory=dict)
    comparison: Comparison | None = None

    def count(self, result: Result) -> int:
        """Count the logs with a result."""
        return sum(row.result == result for row in self.rows)

    @property
    def has_failures(self) -> bool:
        """Whether a log is damaged or could not be read, or a model failed on it."""
        return self.count("measured") + self.count("skipped") < len(self.rows)

    @property
    def duration_ns(self) -> int:
        """Of all recordings in the summary."""
        return sum(row.duration_ns for row in self.rows if row.result == "measured")

    def to_json(self) -> Json:
        """Write everything as plain values; the recordings as an iterator."""
        compared = self.comparison
        return {
            **self.about,
            "by": self.by,
            "recordings": map(self._row_json, self.rows),
            "summary": statistics_json(self.summary),
            **({} if compared is None else {"comparison": paired_json(compared.paired)}),
        }

    def _row_json(self, row: Row) -> Json:
        body = {"log": row.log, "result": row.result}
        body |= {"error": row.error} if row.error else {}
        own = {} if self.comparison is None else self.comparison.own.get(row.log, {})
        return body | row.body | ({"differences": dict(own)} if own else {})


def evaluate(logs: Iterable[Path], watch: Watch, by: str | None = None) -> Evaluation:
    """Measure logs; those that are worst by a measure come first (by default the first of all)."""
    return sum_up(measure_logs(logs, watch), by)


def measure_logs(logs: Iterable[Path], watch: Watch) -> Iterator[Row]:
    """Measure logs one after the other."""
    for log in logs:
        row = measure_log(log, str(log), watch)
        if row.result == "unreadable":
            watch(size_of(log))
        yield row


def sum_up(
    measured: Iterable[Row],
    by: str | None = None,
    baseline: Baseline | None = None,
    about: Json | None = None,
) -> Evaluation:
    """Sum up recordings, and compare them with a baseline if there is one."""
    summary, rows = Summary(), list[Row]()
    for row in measured:
        if row.result == "measured":
            summary.add(row.log, row.scores)
        rows.append(row)
    statistics = summary.statistics()
    judging = (name for name in statistics if MEASURES[name].better)
    by = by or next(judging, None)
    compared = None
    if baseline is not None:
        owns = {row.log: row.values for row in rows if row.result == "measured"}
        compared = compare(baseline, owns)
    return Evaluation(
        rows=tuple(_worst_first(rows, by, compared)),
        summary=statistics,
        by=by,
        about=about or {},
        comparison=compared,
    )


def measure_log(
    log: Path | OpenSource, name: str, watch: Watch = unwatched, also: Scores = NOTHING
) -> Row:
    """Measure one log, a path or a source, which is closed; `name` is for people.

    `also` is what was measured in it elsewhere.
    """
    try:
        with LogReader(log) as reader:
            head = reader.head.fields
            facts = gather(head, watched(reader, watch))
        row = row_of(name, {**score(facts), **also}, _body(head, facts))
    except (OSError, RecorderError) as error:
        return Row(log=name, result="unreadable", error=reason(error))
    except OverflowError:  # a forged log: numbers of a server fit
        return Row(log=name, result="unreadable", error="a number in it is too large")
    damage = facts.damage_count
    return attrs.evolve(
        row,
        result="damaged" if damage else "measured",
        error=f"damaged, {damage} times: not in the summary" if damage else "",
        duration_ns=facts.duration_ns,
        lost=facts.lost,
    )


def row_of(name: str, scores: Scores, body: Json) -> Row:
    """Make the row of a recording that was measured; `body` has more about it."""
    return Row(log=name, result="measured", packed=pack(name, scores, body))


def _body(head: Fields, facts: Facts) -> Json:
    parent = typed(below(head, "parent"), "recording", str)
    return {
        "recording_id": facts.recording_id,
        **({} if parent is None else {"parent": parent}),
        "mode": facts.mode,
        "dialect": facts.dialect,
        "duration_s": round(facts.duration_ns / NS_PER_S, DIGITS),
        "finished": facts.finished,
        "speech_source": facts.speech_source,
        "lost": sorted(facts.lost),
    }


def _worst_first(rows: Iterable[Row], by: str | None, compared: Comparison | None) -> list[Row]:
    """Sort by a measure, or its difference, logs without it last; equal ones keep their order."""
    if by is None:
        return [*rows]
    if compared is not None:
        own = compared.own
        return sorted(rows, key=lambda row: worst_key(by, own.get(row.log, {}).get(by)))
    return sorted(rows, key=lambda row: worst_key(by, row.own[by].worst if by in row.own else None))


def worst_key(measure: str, value: float | None) -> tuple[bool, float]:
    """Return a key that sorts values of a measure, the worst first; None comes last."""
    sign = 1 if MEASURES[measure].better == "higher" else -1
    return value is None, 0 if value is None else sign * value
