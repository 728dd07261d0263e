"""Reports on replays and on sessions as text for a terminal, by rich.

Text from a log is printed as it is, never as rich's markup, with control characters escaped; a
report fits on a screen however long its session was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os.path import commonpath
from pathlib import Path
from typing import Final

from rich.console import RenderableType

from protocol.values.limits import MS_PER_S, NS_PER_S
from recorder.format.format import SUFFIX
from runtime.measures.conversation import TrackedToolCall

from ..rerun.difference import NOTHING, label, show
from ..rerun.report import EXIT_CODES, Divergence, FullReport, Outcome, ReplayReport, Version
from ..shared.commands import counted, table
from ..shared.recordings import show_ms, show_seconds
from ..story.inspect import Inspection, UtteranceStory
from ..story.model_calls import ModelCall, calls_text
from ..story.reading import Absence, Mark, Move, Playback
from .keep import SHOWN_MAX, damage_lines

ROWS_MAX: Final = 40
"""Rows of the table of units; the rest is counted, and in JSON."""
HASH_CHARS_MIN: Final = 32
"""Shorter texts of hexadecimal digits may be words or versions."""
HASH_CHARS_SHOWN: Final = 12
TEXT_CHARS_MAX: Final = 60
"""Of a unit's text."""
LOGS_MAX: Final = 60
"""Of a larger folder only failures are listed; --json has all."""
NAME_CHARS_MAX: Final = 48
"""A recording's id, and a folder; a longer name is the first column to wrap."""
_COLUMNS: Final = ("<log", "<result", "units", "session", "<where")

# -- the replay of a log ---------------------------------------------------------------------------


def replay_lines(report: ReplayReport, elapsed_s: float) -> list[RenderableType]:
    """Describe the findings of logic replay."""
    lines: list[RenderableType] = [_verdict(report)]
    old = f", {report.states_of_old} of an older kind not compared" if report.states_of_old else ""
    lines.append(
        f"{counted(report.records, 'record')}, {counted(report.events, 'event')},"
        f" {counted(report.units, 'unit')}; as recorded: {counted(report.effects, 'effect')} "
        f"({counted(report.frames, 'frame')} byte for byte), {counted(report.states, 'state')}{old}"
    )
    lines.append(
        f"{show_seconds(report.span_ns)} of session {speed_text(report.span_ns, elapsed_s)}"
    )
    if report.divergence is not None:
        lines += [*divergence_lines(report.divergence), versions_line(report)]
    return lines + damage_lines(report.damage, report.damage_count)


def versions_line(report: ReplayReport) -> str:
    """Name the software and the behaviour of both sides."""
    return f"  {_made('recorded', report.recorded_by)}; {_made('replayed', report.replayed_by)}"


def _made(how: str, version: Version) -> str:
    software = label(version.software) if version.software else "another version"
    return f"{how} by antiphon {software}, behaviour {version.behaviour}, schema {version.schema}"


def _verdict(report: ReplayReport) -> str:
    if report.is_newer:
        return "not comparable: recorded by a newer version\n" + versions_line(report)
    if report.divergence is not None:
        return f"diverged at record {report.divergence.seq}"
    if report.damage_count:
        return "damaged: the parts that could be compared are identical"
    if report.finished:
        return "identical"
    amid = ", in the middle of its last event's effects" if report.truncated else ""
    return f"identical up to the end of the log, which has no fin{amid}"


def full_lines(report: FullReport, elapsed_s: float) -> list[RenderableType]:
    """Describe the findings of full replay, the environment first."""
    lines = _environment_lines(report)
    if not report.compared or report.recorded is None:
        return [*lines, "to compare anyway: --anyway, or antiphon eval --mode forced"]
    if report.recorded.is_newer:
        return [*lines, _verdict(report.recorded)]
    first, span_ns = report.first_divergence, report.recorded.span_ns
    at = None if first is None else f"diverged at record {first.seq}"
    lines.append(at or _verdict(report.recorded))
    turns = f", {counted(report.turns, 'turn')} answered again" if report.turns else ""
    turns += f", {report.turns_changed} with other results" if report.turns_changed else ""
    turns += f", {counted(report.chunks, 'second')} heard again" if report.chunks else ""
    turns += f", {report.chunks_changed} with other results" if report.chunks_changed else ""
    lines.append(
        f"model {label(report.model)}: {counted(report.units, 'unit')} run again,"
        f" {report.units_changed} with other results{turns};"
        f" {show_seconds(span_ns)} of session {speed_text(span_ns, elapsed_s)}"
    )
    if report.units_held:
        held = f"{report.units_held} of {counted(report.units, 'unit')}"
        lines.append(f"forced to the recording of which this is a fork, then and now: {held}")
    if report.logits_changed is not None:
        lines.append(f"the first logits differ from unit {report.logits_changed} on")
    if first is not None:
        lines += [*divergence_lines(first), versions_line(report.recorded)]
    renewed = report.renewed.divergence if report.renewed is not None else None
    if renewed is not None and renewed is not first:
        lines.append("what the client would have received differs:")
        lines += divergence_lines(renewed)
    return lines + damage_lines(report.recorded.damage, report.recorded.damage_count)


def _environment_lines(report: FullReport) -> list[RenderableType]:
    if not report.environment:
        here = []
        for name, line in report.fingerprint.items():
            is_hash = len(line) >= HASH_CHARS_MIN and not line.strip("0123456789abcdef")
            here.append(f"{label(name)} {line[:HASH_CHARS_SHOWN] if is_hash else label(line)}")
        return [f"environment as recorded: {'; '.join(here)}"]
    differs = "not comparable" if not report.compared else "the environment differs"
    texts = [
        f"  {label(line.name)}: recorded {_or_nothing(line.recorded)},"
        f" here {_or_nothing(line.here)}"
        for line in report.environment
    ]
    return [differs, *texts]


def _or_nothing(text: str | None) -> str:
    return NOTHING if text is None else label(text)


def divergence_lines(divergence: Divergence) -> list[RenderableType]:
    """Explain a divergence."""
    unit = "before the first unit" if divergence.unit is None else f"unit {divergence.unit}"
    lines: list[RenderableType] = [
        f"  {divergence.kind}: {divergence.place}, {unit}, at {show_seconds(divergence.at_ns)}",
        f"  recorded  {divergence.recorded}",
        f"  came out  {divergence.came_out}",
    ]
    if divergence.snr_db is not None:
        lines.append(f"  sound     {divergence.snr_db} dB above the difference")
    if divergence.cause is not None:
        cause = divergence.cause
        lines.append(f"  event     {cause.seq}, {cause.kind} {cause.summary}")
    return lines


def speed_text(span_ns: int, elapsed_s: float) -> str:
    """The time of a replay, and how many times faster than the session it was."""
    if elapsed_s <= 0:
        return "in no time"
    return f"in {elapsed_s:.3f} s, {span_ns / NS_PER_S / elapsed_s:.0f} times real time"


# -- the replay of several logs, the worst first ---------------------------------------------------


def summary_lines(outcomes: Sequence[Outcome], elapsed_s: float) -> list[RenderableType]:
    """Describe the replay of logs, at least one; `elapsed_s` is for all, less with processes."""
    severity = list(EXIT_CODES)
    ordered = sorted(outcomes, key=lambda outcome: -severity.index(outcome.result))
    folder = Path(commonpath([Path(outcome.log).absolute().parent for outcome in outcomes]))
    folder = Path() if folder.parent == folder else folder  # else paths would lack their root
    rows = [_outcome_row(outcome, folder) for outcome in ordered[:LOGS_MAX]]
    name_chars = min(max(len(row[0]) for row in rows), NAME_CHARS_MAX)
    lines = [table(_COLUMNS, rows, overflow="fold", first_chars_min=name_chars)]
    if len(ordered) > LOGS_MAX:
        lines.append(f"and {len(ordered) - LOGS_MAX} more, see --json")
    return [*lines, _total(outcomes, elapsed_s)]


def _outcome_row(outcome: Outcome, folder: Path) -> tuple[str, ...]:
    path = Path(outcome.log).absolute()
    name = (path.relative_to(folder) if folder.parts else path).as_posix().removesuffix(SUFFIX)
    units = "" if outcome.logic is None else str(outcome.logic.units)
    session = "" if outcome.logic is None else f"{outcome.span_ns / NS_PER_S:.1f} s"
    return (label(name), outcome.result.replace("_", " "), units, session, _where(outcome))


def _where(outcome: Outcome) -> str:
    if outcome.error is not None:
        return outcome.error
    if outcome.divergence is not None and outcome.result != "damaged":
        return outcome.divergence.place
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


def _total(outcomes: Sequence[Outcome], elapsed_s: float) -> str:
    counts = Counter(outcome.result for outcome in outcomes)
    results = [f"{counts[name]} {name.replace('_', ' ')}" for name in EXIT_CODES if counts[name]]
    span_ns = sum(outcome.span_ns for outcome in outcomes)
    units = sum(outcome.logic.units for outcome in outcomes if outcome.logic is not None)
    return (
        f"{counted(len(outcomes), 'log')}: {', '.join(results)}; {counted(units, 'unit')},"
        f" {span_ns / NS_PER_S:.1f} s of session {speed_text(span_ns, elapsed_s)}"
    )


# -- what happened in a session --------------------------------------------------------------------


def inspect_lines(found: Inspection) -> list[RenderableType]:
    """Describe a session on one screen."""
    lines: list[RenderableType] = [
        f"{label(found.recording_id)}: session {label(found.session_id)},"
        f" {show_seconds(found.duration_ns)}, mode {found.mode},"
        f" dialect {found.dialect}, model {label(found.model)}, seed {found.seed}",
        "states    "
        + " > ".join(f"{span.state} {show_seconds(span.at_ns)}" for span in found.states)
        + f"    ended: {_end(found)}",
        f"frames    {found.frames_received} received, {found.frames_sent} sent"
        f"    units {len(found.units)}, dropped {len(found.drops)}, errors {len(found.errors)}"
        + (f", marks {len(found.marks)}" if found.marks else ""),
    ]
    if found.damage_count:
        lines.append(f"damaged   in {counted(found.damage_count, 'place')}: this report has gaps")
    if found.diverged_seq is not None:
        lines.append(f"diverged  at record {found.diverged_seq}: no states are known after it")
    if found.fields_ignored:
        named = f": {', '.join(found.ignored)}" if found.ignored else ""
        lines.append(f"ignored   {found.fields_ignored} unknown fields of the client{named}")
    seconds = show_seconds
    for name, texts in (
        ("error", [f"{seconds(it.at_ns)} {it.code}: {show(it.message)}" for it in found.errors]),
        ("shortened", [f"{seconds(it.at_ns)} {it.told}" for it in found.shortened]),
        (
            "dropped",
            [f"{seconds(it.at_ns)} second {it.ordinal} of the input" for it in found.drops],
        ),
        ("moved", [*map(_move, found.moves)]),
        ("away", [*map(_absence, found.absences)]),
        ("playback", [_playback(found.playback)] if found.playback else []),
        ("user", [f"{it.start_ms / MS_PER_S:.1f} s {show(it.text.strip())}" for it in found.said]),
        ("call", [*map(_call, found.calls)]),
        ("mark", [*map(_mark, found.marks)]),
    ):
        lines += [f"{name:9} {text}" for text in texts[:SHOWN_MAX]]
        if len(texts) > SHOWN_MAX:
            lines.append(f"{name:9} and {len(texts) - SHOWN_MAX} more, see --json")
    lines += [_turn_table(found.turns)] if found.turns else []
    lines += [_utterance_table(found.utterances)] if found.utterances else []
    return [*lines, _unit_table(found.units)] if found.units else lines


def _call(call: TrackedToolCall) -> str:
    """Say what a model called, when its result was told, and when it spoke next."""
    what = show(f"{call.name} {call.arguments}") if call.name else "not a call"
    if call.ended_ns is None:
        return f"{show_seconds(call.at_ns)} {what}: no result"
    spoke = "" if call.spoken_ns is None else f", speech {show_seconds(call.spoken_ns)}"
    came = f"{show_seconds(call.ended_ns)} {show(call.result)}"
    return f"{show_seconds(call.at_ns)} {what}: {came}{spoke}"


def _move(move: Move) -> str:
    """Say when a session moved to another slot, and why."""
    to = "and nowhere else" if move.to_ns is None else f"to {show_seconds(move.to_ns)}"
    fed = f", {move.steps} s fed again" + ("" if move.exact else " fast") if move.steps else ""
    what = "server" if move.why == "restarted" else "worker"
    return f"{show_seconds(move.at_ns)} {to}: the {what} was {move.why}{fed}"


def _absence(absence: Absence) -> str:
    """Say when a client had no connection, and what that cost."""
    to = "for good" if absence.to_ns is None else f"to {show_seconds(absence.to_ns)}"
    slept = f", without a slot, {absence.steps} s fed again" if absence.slept else ""
    return f"{show_seconds(absence.at_ns)} {to}: the client had no connection{slept}"


def _playback(reports: Sequence[Playback]) -> str:
    """Say how far behind a client's playback was, at last and at most; `reports` is not empty."""
    last, most = reports[-1], max(reports, key=lambda it: it.behind_ms)
    return (
        f"{show_seconds(last.at_ns)} {last.played_ms} ms played, {last.behind_ms} ms behind; "
        f"at most {most.behind_ms} ms behind, at {show_seconds(most.at_ns)}"
    )


def _mark(mark: Mark) -> str:
    later = " (next to the log)" if mark.is_later else ""
    return f"{show_seconds(mark.at_ns)} {show(mark.text)}{later}"


def _end(found: Inspection) -> str:
    end = found.end
    close = "" if end.close_code is None else f", close {end.close_code}"
    close += f" {show(end.close_reason)}" if end.close_reason else ""
    fin = "" if end.finished else ", no fin: still open, or its server was killed"
    return f"{label(end.reason or 'not yet')}{close}{fin}"


def _turn_table(turns: Sequence[ModelCall]) -> RenderableType:
    rows = []
    for turn in turns[:ROWS_MAX]:
        outcome = f"{turn.outcome.replace('_', ' ')}{_spoken(turn.audio_ms)}"
        tokens = f"{turn.input_tokens or 0} + {turn.generated_tokens}"
        text = " ".join(filter(None, (turn.text, calls_text(turn.calls))))
        rows.append((*_began(turn), outcome, tokens, _words(text)))
    columns = ("turn", "started", "took", "<outcome", "tokens", "<text")
    return table(columns, rows, more=_more(len(turns) - ROWS_MAX, "turn"))


def _utterance_table(utterances: Sequence[UtteranceStory]) -> RenderableType:
    rows = []
    for it in utterances[:ROWS_MAX]:
        tokens, outcome = f"{it.prompt_tokens} + {it.completion_tokens}", it.outcome
        cells = (f"{it.chunks} s", outcome.replace("_", " "), tokens, _words(it.text))
        rows.append((*_began(it), *cells))
    columns = ("utterance", "started", "took", "heard", "<outcome", "tokens", "<text")
    return table(columns, rows, more=_more(len(utterances) - ROWS_MAX, "utterance"))


def _unit_table(units: Sequence[ModelCall]) -> RenderableType:
    runs = _runs(units)
    more = _more(sum(map(len, runs[ROWS_MAX:])), "unit")
    columns = ("unit", "started", "took", "<outcome", "kv", "<text")
    return table(columns, map(_unit_row, runs[:ROWS_MAX]), more=more)


def _more(count: int, what: str) -> str:
    return f"and {counted(count, f'more {what}')}, see --json" if count > 0 else ""


def _began(it: ModelCall | UtteranceStory) -> tuple[str, str, str]:
    took = "" if it.done_ns is None else show_ms(it.done_ns - it.started_ns)
    return str(it.index), show_seconds(it.started_ns), took


def _words(text: str) -> str:
    return show(text[:TEXT_CHARS_MAX]) if text else ""


def _spoken(audio_ms: int) -> str:
    return f", {audio_ms} ms" if audio_ms else ""


def _runs(units: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """Split units into rows: units that only listen, a turn of speech, or one that is special."""
    runs: list[list[ModelCall]] = []
    for unit in units:
        if runs and _is_plain(unit) and _goes_on(runs[-1][-1], unit):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _is_plain(unit: ModelCall) -> bool:
    return unit.outcome in ("listen", "speech") and not unit.forced and not unit.frames


def _goes_on(last: ModelCall, unit: ModelCall) -> bool:
    return _is_plain(last) and last.outcome == unit.outcome and not last.end_of_turn


def _unit_row(run: Sequence[ModelCall]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    took = [unit.took_ns for unit in run if unit.took_ns is not None]
    return (
        f"{first.index}" if first is last else f"{first.index}-{last.index}",
        show_seconds(first.started_ns),
        show_ms(max(took)) if took else "",
        _outcome(run),
        "" if last.kv_length is None else str(last.kv_length),
        _words("".join(unit.text for unit in run)),
    )


def _outcome(run: Sequence[ModelCall]) -> str:
    unit = run[-1]
    return (
        unit.outcome.replace("_", " ")
        + (", forced" if unit.forced else "")
        + (f", cut at {unit.cut}" if unit.cut else "")
        + _spoken(sum(unit.audio_ms for unit in run))
        + (", end of turn" if unit.end_of_turn else "")
        + (f", {counted(unit.frames, 'video frame')}" if unit.frames else "")
    )
