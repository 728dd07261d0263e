"""Reports as text for a terminal, by rich.

Text from a log is printed as it is, never as rich's markup, with control characters escaped; a
report fits on a screen however long its session was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType

from protocol.values.limits import MS_PER_S, NS_PER_S

from ..rerun.difference import NOTHING, label, show
from ..rerun.report import Divergence, FullReport, Maker, ReplayReport
from ..shared.recordings import show_ms, show_seconds
from ..shared.tables import table
from ..story.exchanges import Exchange
from ..story.inspection import Inspection, Mark, UtteranceStory
from ..story.tools import calls_text
from .moved import absence_text, move_text, playback_text
from .verify import SHOWN_MAX, damage_lines

ROWS_MAX: Final = 40
"""Rows of the table of units; the rest is counted, and in JSON."""
SHOWN_UNITS_MAX: Final = 12
"""Units that differ, listed one by one."""
HASH_CHARS_MIN: Final = 32
"""Shorter texts of hexadecimal digits may be words or versions."""
HASH_CHARS_SHOWN: Final = 12
TEXT_CHARS_MAX: Final = 60
"""Of a unit's text."""


def replay_lines(report: ReplayReport, elapsed_s: float) -> list[RenderableType]:
    """Describe the findings of logic replay."""
    lines: list[RenderableType] = [_verdict(report)]
    old = f", {report.states_of_old} of an older kind not compared" if report.states_of_old else ""
    lines.append(
        f"{report.records} records, {report.events} events, {report.units} units; as recorded:"
        f" {report.effects} effects ({report.frames} frames byte for byte),"
        f" {report.states} states{old}"
    )
    lines.append(
        f"{show_seconds(report.span_ns)} of session {speed_text(report.span_ns, elapsed_s)}"
    )
    if report.divergence is not None:
        lines += [*divergence_lines(report.divergence), makers_line(report)]
    return lines + damage_lines(report.damage, report.damage_count)


def makers_line(report: ReplayReport) -> str:
    """Name the software and the behaviour of both sides."""
    return f"  {_made('recorded', report.recorded_by)}; {_made('replayed', report.replayed_by)}"


def _made(how: str, maker: Maker) -> str:
    software = label(maker.software) if maker.software else "another version"
    return f"{how} by antiphon {software}, behaviour {maker.behaviour}, schema {maker.schema}"


def _verdict(report: ReplayReport) -> str:
    if report.is_newer:
        return "not comparable: a newer version recorded it\n" + makers_line(report)
    if report.divergence is not None:
        return f"diverged at record {report.divergence.seq}"
    if report.damage_count:
        return "damaged: what could be compared came out as recorded"
    if report.finished:
        return "identical"
    amid = ", in the middle of its last event's effects" if report.truncated else ""
    return f"identical as far as the log goes: it ends without fin{amid}"


def full_lines(report: FullReport, elapsed_s: float) -> list[RenderableType]:
    """Describe the findings of full replay, the environment first."""
    lines = _environment_lines(report)
    if not report.compared or report.recorded is None:
        return [*lines, "to compare all the same: --anyway, or antiphon eval --mode forced"]
    if report.recorded.is_newer:
        return [*lines, _verdict(report.recorded)]
    first, span_ns = report.first_divergence, report.recorded.span_ns
    at = None if first is None else f"diverged at record {first.seq}"
    lines.append(at or _verdict(report.recorded))
    turns = f", {report.turns} turns answered again" if report.turns else ""
    turns += f", {report.turns_changed} of them otherwise" if report.turns_changed else ""
    turns += f", {report.chunks} seconds heard again" if report.chunks else ""
    turns += f", {report.chunks_changed} of them otherwise" if report.chunks_changed else ""
    lines.append(
        f"model {label(report.model)}: {report.units} units run again,"
        f" {report.units_changed} came out otherwise{turns};"
        f" {show_seconds(span_ns)} of session {speed_text(span_ns, elapsed_s)}"
    )
    if report.units_held:
        held = f"{report.units_held} of {report.units} units"
        lines.append(f"{held} were held to the recording that this is a fork of, and are again")
    if report.logits_changed is not None:
        lines.append(f"the first logits differ from unit {report.logits_changed} on")
    if first is not None:
        lines += [*divergence_lines(first), makers_line(report.recorded)]
    renewed = report.renewed.divergence if report.renewed is not None else None
    if renewed is not None and renewed is not first:
        lines.append("what the client would have got differs:")
        lines += divergence_lines(renewed)
    return lines + damage_lines(report.recorded.damage, report.recorded.damage_count)


def _environment_lines(report: FullReport) -> list[RenderableType]:
    if not report.environment:
        here = [f"{label(name)} {_brief(line)}" for name, line in report.fingerprint.items()]
        return [f"environment as recorded: {'; '.join(here)}"]
    differs = "not comparable" if not report.compared else "the environment differs"
    return [
        differs,
        *(
            f"  {label(line.name)}: recorded {_or_nothing(line.recorded)},"
            f" here {_or_nothing(line.here)}"
            for line in report.environment
        ),
    ]


def _brief(line: str) -> str:
    is_hash = len(line) >= HASH_CHARS_MIN and not line.strip("0123456789abcdef")
    return line[:HASH_CHARS_SHOWN] if is_hash else label(line)


def _or_nothing(text: str | None) -> str:
    return NOTHING if text is None else label(text)


def divergence_lines(divergence: Divergence) -> list[RenderableType]:
    """Explain a divergence."""
    unit = "before the first unit" if divergence.unit is None else f"unit {divergence.unit}"
    field = f", {divergence.field}" if divergence.field else ""
    lines: list[RenderableType] = [
        f"  {divergence.kind}: record {divergence.seq} ({divergence.record}){field},"
        f" {unit}, at {show_seconds(divergence.at_ns)}",
        f"  recorded  {divergence.recorded}",
        f"  came out  {divergence.came_out}",
    ]
    if divergence.snr_db is not None:
        lines.append(f"  sound     {divergence.snr_db} dB above the difference")
    if divergence.cause is not None:
        cause = divergence.cause
        lines.append(f"  event     {cause.seq}, {cause.kind} {cause.summary}")
    return lines


# -- inspect --------------------------------------------------------------------------------------


def inspect_lines(told: Inspection) -> list[RenderableType]:
    """Describe a session on one screen."""
    lines: list[RenderableType] = [
        f"{label(told.recording_id)}: session {label(told.session_id)},"
        f" {show_seconds(told.duration_ns)}, mode {told.mode},"
        f" dialect {told.dialect}, model {label(told.model)}, seed {told.seed}",
        "states    "
        + " > ".join(f"{span.state} {show_seconds(span.at_ns)}" for span in told.states)
        + f"    ended: {_end(told)}",
        f"frames    {told.frames_received} received, {told.frames_sent} sent"
        f"    units {len(told.units)}, dropped {len(told.drops)}, errors {len(told.errors)}"
        + (f", marks {len(told.marks)}" if told.marks else ""),
    ]
    if told.damage_count:
        lines.append(f"damaged   {told.damage_count} times: what is told here has gaps")
    if told.diverged_seq is not None:
        lines.append(f"diverged  at record {told.diverged_seq}: no states are known from there on")
    if told.fields_ignored:
        lines.append(
            f"ignored   {told.fields_ignored} fields of the client's that mean nothing here"
        )
    lines += _first(
        "error    ",
        [f"{show_seconds(it.at_ns)} {it.code}: {show(it.message)}" for it in told.errors],
    )
    lines += _first("shortened", [f"{show_seconds(it.at_ns)} {it.told}" for it in told.shortened])
    lines += _first(
        "dropped  ",
        [f"{show_seconds(it.at_ns)} second {it.ordinal} of the input" for it in told.drops],
    )
    lines += _first("moved    ", [move_text(it) for it in told.moves])
    lines += _first("away     ", [absence_text(it) for it in told.absences])
    lines += [f"playback  {playback_text(told.playback)}"] if told.playback else []
    lines += _first(
        "user     ", [f"{it.start_ms / MS_PER_S:.1f} s {show(it.text.strip())}" for it in told.said]
    )
    lines += _first("mark     ", [_mark(it) for it in told.marks])
    lines += [_turn_table(told.turns)] if told.turns else []
    lines += [_utterance_table(told.utterances)] if told.utterances else []
    return [*lines, _unit_table(told.units)] if told.units else lines


def _mark(mark: Mark) -> str:
    later = " (next to the log)" if mark.is_later else ""
    return f"{show_seconds(mark.at_ns)} {show(mark.text)}{later}"


def _first(name: str, told: Sequence[str]) -> list[RenderableType]:
    shown = [f"{name} {text}" for text in told[:SHOWN_MAX]]
    more = len(told) - SHOWN_MAX
    return [*shown, f"{name} and {more} more, see --json"] if more > 0 else [*shown]


def _end(told: Inspection) -> str:
    end = told.end
    close = "" if end.close_code is None else f", close {end.close_code}"
    close += f" {show(end.close_reason)}" if end.close_reason else ""
    fin = "" if end.finished else ", no fin: still open, or its server was killed"
    return f"{label(end.reason or 'not yet')}{close}{fin}"


def _turn_table(turns: Sequence[Exchange]) -> RenderableType:
    rows = []
    for turn in turns[:ROWS_MAX]:
        outcome = f"{turn.outcome.replace('_', ' ')}{_spoken(turn.audio_ms)}"
        tokens = f"{turn.input_tokens or 0} + {turn.generated_tokens}"
        told = " ".join(filter(None, (turn.text, calls_text(turn.calls))))
        rows.append((*_asked(turn), outcome, tokens, _said(told)))
    columns = ("turn", "started", "took", "<outcome", "tokens", "<text")
    return table(columns, rows, more=_more(len(turns) - ROWS_MAX, "turns"))


def _utterance_table(utterances: Sequence[UtteranceStory]) -> RenderableType:
    rows = []
    for told in utterances[:ROWS_MAX]:
        tokens = f"{told.prompt_tokens} + {told.completion_tokens}"
        outcome = told.outcome.replace("_", " ")
        rows.append((*_asked(told), f"{told.chunks} s", outcome, tokens, _said(told.text)))
    columns = ("utterance", "started", "took", "heard", "<outcome", "tokens", "<text")
    return table(columns, rows, more=_more(len(utterances) - ROWS_MAX, "utterances"))


def _unit_table(units: Sequence[Exchange]) -> RenderableType:
    runs = _runs(units)
    more = _more(sum(map(len, runs[ROWS_MAX:])), "units")
    columns = ("unit", "started", "took", "<outcome", "kv", "<text")
    return table(columns, map(_row, runs[:ROWS_MAX]), more=more)


def _more(count: int, what: str) -> str:
    return f"and {count} more {what}, see --json" if count > 0 else ""


def _asked(told: Exchange | UtteranceStory) -> tuple[str, str, str]:
    took = "" if told.done_ns is None else show_ms(told.done_ns - told.started_ns)
    return str(told.index), show_seconds(told.started_ns), took


def _said(text: str) -> str:
    return show(text[:TEXT_CHARS_MAX]) if text else ""


def _spoken(audio_ms: int) -> str:
    return f", {audio_ms} ms" if audio_ms else ""


def _runs(units: Sequence[Exchange]) -> list[list[Exchange]]:
    """Split units into rows: units that only listen, a turn of speech, or one that is special."""
    runs: list[list[Exchange]] = []
    for unit in units:
        if runs and _is_plain(unit) and _goes_on(runs[-1][-1], unit):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _is_plain(unit: Exchange) -> bool:
    return unit.outcome in ("listen", "speech") and not unit.forced and not unit.frames


def _goes_on(last: Exchange, unit: Exchange) -> bool:
    return _is_plain(last) and last.outcome == unit.outcome and not last.end_of_turn


def _row(run: Sequence[Exchange]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    took = [unit.took_ns for unit in run if unit.took_ns is not None]
    return (
        f"{first.index}" if first is last else f"{first.index}-{last.index}",
        show_seconds(first.started_ns),
        show_ms(max(took)) if took else "",
        _outcome(run),
        "" if last.kv_length is None else str(last.kv_length),
        _said("".join(unit.text for unit in run)),
    )


def _outcome(run: Sequence[Exchange]) -> str:
    unit = run[-1]
    return (
        unit.outcome.replace("_", " ")
        + (", forced" if unit.forced else "")
        + (f", cut at {unit.cut}" if unit.cut else "")
        + _spoken(sum(unit.audio_ms for unit in run))
        + (", end of turn" if unit.end_of_turn else "")
        + (f", {unit.frames} video frames" if unit.frames else "")
    )


def speed_text(span_ns: int, elapsed_s: float) -> str:
    """The time of a replay, and how many times faster than the session it was."""
    if elapsed_s <= 0:
        return "in no time"
    return f"in {elapsed_s:.3f} s, {span_ns / NS_PER_S / elapsed_s:.0f} times real time"
