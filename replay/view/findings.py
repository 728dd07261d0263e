"""Remarks on places of a session: the divergence of a replay, or a difference from another session.

Another comparison of sessions makes its own `Finding`s, and the page shows them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from recorder.read.reader import LogReader
from recorder.read.scan import OpenSource

from ..diff import DiffReport, Parting, compare
from ..rerun.report import Divergence

Open = Callable[[], OpenSource]


@attrs.frozen(kw_only=True)
class Finding:
    """A remark on a place in a session: one of `seq`, `unit`, `turn` and `at_ns`; the last wins."""

    title: str
    detail: tuple[str, ...] = ()
    seq: int | None = None
    unit: int | None = None
    turn: int | None = None
    at_ns: int | None = None


@attrs.frozen(kw_only=True)
class Comparison:
    """The comparison with the session `name`; `findings` is empty if both are the same."""

    name: str
    findings: Sequence[Finding] = ()


def finding_of(divergence: Divergence) -> Finding:
    """Describe the divergence of logic replay."""
    field = f", {divergence.field}" if divergence.field else ""
    cause = divergence.cause
    return Finding(
        title=f"Replay parts here: {divergence.record}{field} ({divergence.kind})",
        detail=(
            f"recorded: {divergence.recorded}",
            f"came out: {divergence.came_out}",
            *([] if cause is None else [f"event: {cause.seq}, {cause.kind} {cause.summary}"]),
        ),
        seq=divergence.seq,
        at_ns=divergence.at_ns,
    )


def comparison_of(report: DiffReport, name: str) -> Comparison:
    """Describe how the session `name` differs; in the report it is `b`, the shown session `a`."""
    found = [_parting(parting, name, report.a.span_ns) for parting in report.partings]
    return Comparison(name=name, findings=found)


def compared_with(one: Open, other: Open, name: str) -> Comparison:
    """Compare the log that `one` opens with that of `other`, the session `name`."""
    with LogReader(one()) as a, LogReader(other()) as b:
        return comparison_of(compare(a.head.fields, a, b.head.fields, b), name)


def _parting(parting: Parting, name: str, end_ns: int) -> Finding:
    place = parting.what if parting.index is None else f"{parting.what} {parting.index}"
    is_missing = parting.fields == (parting.what,)
    fields = "" if is_missing else f", {', '.join(parting.fields)}"
    sound = None if parting.snr_db is None else f"sound: {parting.snr_db} dB above the difference"
    return Finding(
        title=f"Differs from {name}: {place}{fields}",
        detail=(
            f"here: {parting.in_a}",
            f"there: {parting.in_b}",
            *([] if sound is None else [sound]),
        ),
        unit=parting.index if parting.what == "unit" else None,
        turn=parting.index if parting.what == "turn" else None,
        at_ns={"opening": 0, "end": end_ns}.get(parting.what),
    )
