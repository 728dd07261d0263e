"""A comparison as text for a terminal: the first difference, then the sessions side by side.

Text from a log is printed as it is, never as markup; a report always fits on a screen.
"""

from __future__ import annotations

from typing import Final

from rich.console import RenderableType

from ..rerun.difference import label, show
from ..shared.recordings import show_bytes, show_seconds
from ..shared.tables import table
from .report import DiffReport, Parting, SessionFacts, Side

ROWS_MAX: Final = 40
"""Differences in the table; the rest is counted, and in JSON."""
SETUP_MAX: Final = 12
"""Lines of settings: two environments can differ in many."""
TEXT_CHARS_MAX: Final = 40
"""Of a unit's text: two of them stand side by side."""


def diff_lines(report: DiffReport) -> list[RenderableType]:
    """Describe the findings, the first difference first."""
    lines: list[RenderableType] = [_verdict(report)]
    if report.first is not None:
        lines += _parting_lines(report.first)
    if report.is_damaged:
        lines.append("damaged: what was lost of a log may be what differs, or hide it")
    lines += [_session("A", report.a), _session("B", report.b)]
    if report.logits_changed is not None:
        unit = "turn" if report.a.mode == "chat" else "unit"
        lines.append(f"the first logits differ from {unit} {report.logits_changed} on")
    if report.setup:
        lines.append("given, and not the same:")
        lines += [
            f"  {label(line.name)}: {line.in_a} | {line.in_b}" for line in report.setup[:SETUP_MAX]
        ]
        more = len(report.setup) - SETUP_MAX
        lines += [f"  and {more} more, see --json"] if more > 0 else []
    return [*lines, _table(report)] if report.partings else lines


def _verdict(report: DiffReport) -> str:
    units = _units(report.a)
    counts = f"{report.same} of {report.compared} {units} that both have are the same"
    counts += f", {report.only_a} only in A" if report.only_a else ""
    counts += f", {report.only_b} only in B" if report.only_b else ""
    first = report.first
    return f"same: {counts}" if first is None else f"differ from {_name(first)} on: {counts}"


def _parting_lines(parting: Parting) -> list[RenderableType]:
    more = f" (and {', '.join(parting.fields[1:])})" if len(parting.fields) > 1 else ""
    lines: list[RenderableType] = [f"  {_name(parting)}: {parting.fields[0]}{more}"]
    if parting.a is not None and parting.b is not None:
        lines += [f"  A         {_said(parting.a)}", f"  B         {_said(parting.b)}"]
    lines += [f"  {parting.path or 'the whole'}", f"    in A    {parting.in_a}"]
    lines.append(f"    in B    {parting.in_b}")
    if parting.snr_db is not None:
        lines.append(f"  sound     that of A is {parting.snr_db} dB above the difference")
    return lines


def _name(parting: Parting) -> str:
    return parting.what if parting.index is None else f"{parting.what} {parting.index}"


def _units(facts: SessionFacts) -> str:
    return {"chat": "turns", "transcription": "seconds"}.get(facts.mode or "", "units")


def _session(name: str, facts: SessionFacts) -> str:
    latency, short = facts.latency, ""
    if facts.shortened:
        messages = "message" if facts.shortened == 1 else "messages"
        size = show_bytes(facts.shortened_bytes)
        short = f", {facts.shortened} refused {messages} kept shortened ({size} in all)"
    took = "" if latency.p50_ms is None else f", took {latency.p50_ms} ms (p95 {latency.p95_ms} ms)"
    return (
        f"{name} {label(facts.recording_id)}: {show_seconds(facts.span_ns)}, mode {facts.mode},"
        f" model {label(facts.model)}, {facts.exchanges} {_units(facts)}, {facts.drops} dropped"
        f"{short}, ended: {label(facts.end_reason or 'not yet')}{took}"
    )


def _table(report: DiffReport) -> RenderableType:
    rows = []
    for parting in report.partings[:ROWS_MAX]:
        more = len(parting.fields) - 1
        row = (
            _name(parting),
            _cell(parting, parting.a, parting.in_a),
            _cell(parting, parting.b, parting.in_b),
            "" if parting.snr_db is None else f"{parting.snr_db} dB",
            "" if parting.index is None else f"{_took(parting.a)} | {_took(parting.b)}",
            parting.fields[0] + (f" and {more} more" if more else ""),
        )
        rows.append(row)
    left = report.parting_count - ROWS_MAX
    columns = ("<", "<A", "<B", "<sound", "<took, ms", "<differs in")
    return table(columns, rows, more=f"and {left} more, see --json" if left > 0 else "")


def _cell(parting: Parting, side: Side | None, shown: str) -> str:
    if side is None:
        return shown if parting.index is None else "not there"
    return _said(side)


def _said(side: Side) -> str:
    words = [side.outcome.replace("_", " ")]
    words += [f"{side.audio_ms} ms"] if side.audio_ms else []
    words += [show(side.text[:TEXT_CHARS_MAX])] if side.text else []
    return ", ".join(words)


def _took(side: Side | None) -> str:
    return "-" if side is None or side.took_ns is None else f"{side.took_ns / 1e6:.0f}"
