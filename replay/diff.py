"""Two sessions side by side, unit by unit: `antiphon diff`.

Rules:
- Units and turns of chat are aligned by index, not time. A unit that only one session has is a
  difference.
- The model's input and output are compared, and ends if both logs have one. Times, costs and names
  never count; settings (seed, environment) and logits, which rounding changes without another
  difference, are reported separately.
- Both logs are streamed, with one model call of each in memory and a bounded list of differences.
- In text, what comes from a log is printed as it is, never as markup; a report fits on a screen.

Times are nanoseconds of each session's own clock, 0 at its start. The two logs may be of unrelated
sessions.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Final, Literal

import attrs
import click
from cattrs import unstructure
from rich.console import RenderableType

from recorder.format.format import Fields, Record, Value
from recorder.read.scan import Damage

from .rerun.difference import NOTHING, Difference, label, show
from .rerun.full import model_of
from .rerun.outputs import compare_outputs, output_difference, snr_db
from .shared.commands import finish, opened_log, records_of, table
from .shared.recordings import RecordingType, show_bytes, show_seconds, typed
from .story.model_calls import ModelCall, audio_ms
from .story.reading import SessionStory

What = Literal["opening", "unit", "turn", "chunk", "end"]


@attrs.frozen
class Side:
    """One session's part of a model call that differs: shortened text, and time to answer."""

    outcome: str
    text: str
    audio_ms: int
    took_ns: int | None


@attrs.frozen
class SessionDifference:
    """A place at which two sessions differ; values are shortened.

    Attributes:
        index: of the unit or turn; None for an opening or an end, which have no `a` and `b` either.
        fields: all that differ, nearest to the cause first.
        path: in the first of these.
        snr_db: of sound that differs: `a` relative to the difference; None if not measured.
    """

    what: What
    index: int | None
    fields: tuple[str, ...]
    path: str
    in_a: str
    in_b: str
    snr_db: float | None = None
    a: Side | None = None
    b: Side | None = None


@attrs.frozen
class Latency:
    """The model's times to answer, in milliseconds; None if it never did."""

    p50_ms: float | None
    p95_ms: float | None
    max_ms: float | None


@attrs.frozen(kw_only=True)
class SessionFacts:
    """One of the sessions.

    Attributes:
        span_ns: from its start to its last record.
        exchanges: model calls, which are units or turns.
        drops: seconds of input that were lost.
        shortened: refused messages of which the log keeps length, hash and start.
        shortened_bytes: of all of them, as they came.
        end_reason: None if its log has no end.
        damage_count: of its log; with damage the values have gaps.
    """

    recording_id: str | None
    model: str | None
    mode: str | None
    seed: int | None
    span_ns: int
    exchanges: int
    drops: int
    shortened: int
    shortened_bytes: int
    end_reason: str | None
    latency: Latency
    damage_count: int


@attrs.frozen
class SetupLine:
    """A setting of the sessions that differs; it does not count as a difference."""

    name: str
    in_a: str
    in_b: str


@attrs.frozen
class DiffReport:
    """Two sessions compared.

    Attributes:
        setup: settings that differ, the seed included.
        compared: model calls that both have.
        only_a: model calls that `b` does not have.
        partings: the differences in order, the first included, up to a bound.
        parting_count: all of them.
        logits_changed: the first model call whose first logits differ, even if its tokens do not.
    """

    a: SessionFacts
    b: SessionFacts
    setup: tuple[SetupLine, ...]
    compared: int
    same: int
    only_a: int
    only_b: int
    first: SessionDifference | None
    partings: tuple[SessionDifference, ...]
    parting_count: int
    logits_changed: int | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether a log is damaged, so that a difference may come from lost records."""
        return bool(self.a.damage_count or self.b.damage_count)


# -- the comparison -------------------------------------------------------------------------------


FIELDS: Final = (
    *("kind", "input_hash", "input_tokens", "vision_slices", "vision_tokens", "forced", "outcome"),
    *("decided_ids", "fed_ids", "codec_ids", "kv_added", "generated_tokens", "text", "streamed"),
    *("pcm", "end_of_turn", "cut"),
)
"""In the order of comparison: the first that differs is nearest to the cause."""
FINALIZED_FIELDS: Final = ("finalized_ids", "finalized_kv_added")
"""Compared next, if both are finalized: a session may end before its last unit is."""
UNANSWERED_FIELDS: Final = ("kind", "forced", "outcome")
"""Compared if one of the two has no result."""
DIFFERENCES_KEPT: Final = 1000
"""More units than a session of ten minutes has; further differences are only counted."""
TEXT_CHARS_MAX: Final = 200
"""Of a model call's text that differs: some seconds of speech."""
P95: Final = 95

Items = Iterable[Record | Damage]


def compare(head_a: Fields, items_a: Items, head_b: Fields, items_b: Items) -> DiffReport:
    """Compare two sessions: for each the fields of its `session` record, records and damage."""
    a, b = _Reading(head_a, items_a), _Reading(head_b, items_b)
    counts, partings, logits_changed = Counter[str](), list[SessionDifference](), None

    def note(found: SessionDifference | None) -> None:
        if found is not None:
            counts["partings"] += 1
            if len(partings) < DIFFERENCES_KEPT:
                partings.append(found)

    pairs = _aligned(iter(a), iter(b))
    begun = list(islice(pairs, 1))
    note(_opening_difference(a.story, b.story))  # both openings were read by now
    for first, second in chain(begun, pairs):
        difference = _difference(first, second)
        note(difference)
        if first is None or second is None:
            counts["only_a" if second is None else "only_b"] += 1
            continue
        counts["compared"] += 1
        counts["same"] += difference is None
        are_answered = first.is_answered and second.is_answered
        is_other = are_answered and first.logits_hash != second.logits_hash
        if is_other and logits_changed is None:
            logits_changed = first.index
    ends = a.story.end.reason, b.story.end.reason
    if None not in ends and ends[0] != ends[1]:
        note(_bare("end", Difference("reason", str(ends[0]), str(ends[1]))))
    compared = (counts["compared"], counts["same"], counts["only_a"], counts["only_b"])
    found = (partings[0] if partings else None, tuple(partings), counts["partings"])
    setup = tuple(_setup(a, b))
    return DiffReport(a.facts(), b.facts(), setup, *compared, *found, logits_changed)


class _Reading:
    def __init__(self, head: Fields, items: Items) -> None:
        self.head: Final = head
        self.story: Final = SessionStory()
        self._items: Final = items
        self._took_ns: list[int] = []
        self._model_calls = 0

    def __iter__(self) -> Iterator[ModelCall]:
        for call in self.story.read(self._items):
            self._model_calls += 1
            if call.took_ns is not None:
                self._took_ns.append(call.took_ns)
            yield call

    def facts(self) -> SessionFacts:
        story = self.story
        return SessionFacts(
            recording_id=typed(self.head, "recording_id", str),
            model=model_of(self.head),
            mode=None if story.opened is None else story.opened.mode,
            seed=typed(self.head, "seed", int),
            span_ns=story.duration_ns,
            exchanges=self._model_calls,
            drops=len(story.drops),
            shortened=len(story.shortened),
            shortened_bytes=sum(short.size_bytes for short in story.shortened),
            end_reason=story.end.reason,
            latency=_latency(self._took_ns),
            damage_count=story.damage_count,
        )


def _aligned(
    a: Iterator[ModelCall], b: Iterator[ModelCall]
) -> Iterator[tuple[ModelCall | None, ModelCall | None]]:
    first, second = next(a, None), next(b, None)
    while first is not None or second is not None:
        if first is not None and (second is None or first.index < second.index):
            yield first, None
            first = next(a, None)
        elif second is not None and (first is None or second.index < first.index):
            yield None, second
            second = next(b, None)
        else:
            yield first, second
            first, second = next(a, None), next(b, None)


# -- differences ----------------------------------------------------------------------------------


def _difference(a: ModelCall | None, b: ModelCall | None) -> SessionDifference | None:
    there = a if a is not None else b
    assert there is not None
    fields: tuple[str, ...] = (there.kind,)
    snr = None
    if a is None or b is None:
        shown = [NOTHING if one is None else f"{one.outcome} {show(one.text)}" for one in (a, b)]
        found: Difference | None = Difference(path="", recorded=shown[0], came_out=shown[1])
    else:
        fields = tuple(it for it in _compared(a, b) if getattr(a, it) != getattr(b, it))
        if not fields:
            return None
        found = output_difference(getattr(a, fields[0]), getattr(b, fields[0]), fields[0])
        snr = snr_db(a.pcm, b.pcm)
    assert found is not None, "values of one type that are unequal differ somewhere"
    values = (found.path, found.recorded, found.came_out)
    return SessionDifference(there.kind, there.index, fields, *values, snr, _side(a), _side(b))


def _compared(a: ModelCall, b: ModelCall) -> tuple[str, ...]:
    if not (a.is_answered and b.is_answered):
        return UNANSWERED_FIELDS
    are_finalized = None not in (a.finalized_ids, b.finalized_ids)
    return (*FIELDS, *FINALIZED_FIELDS) if are_finalized else FIELDS


def _side(call: ModelCall | None) -> Side | None:
    if call is None:
        return None
    text = call.text[:TEXT_CHARS_MAX]
    return Side(call.outcome, text, audio_ms(call.pcm), call.took_ns)


def _opening_difference(a: SessionStory, b: SessionStory) -> SessionDifference | None:
    if a.prepared is not None and b.prepared is not None:
        found = compare_outputs(a.prepared, b.prepared)
    elif a.prepared is b.prepared:
        return None
    else:
        shown = [NOTHING if one.prepared is None else "opened" for one in (a, b)]
        found = Difference(path="opened", recorded=shown[0], came_out=shown[1])
    return None if found is None else _bare("opening", found)


def _bare(what: Literal["opening", "end"], found: Difference) -> SessionDifference:
    field = found.path.partition("[")[0]
    return SessionDifference(what, None, (field,), found.path, found.recorded, found.came_out)


# -- settings and times ---------------------------------------------------------------------------


def _setup(a: _Reading, b: _Reading) -> Iterator[SetupLine]:
    given_a, given_b = _given(a), _given(b)
    for name in [*given_a, *(name for name in given_b if name not in given_a)]:
        values = [given.get(name) for given in (given_a, given_b)]
        if values[0] != values[1]:
            yield SetupLine(name, *(NOTHING if it is None else show(it) for it in values))


def _given(reading: _Reading) -> dict[str, Value]:
    head, opened = reading.head, reading.story.opened
    given: dict[str, Value] = {"model": model_of(head), "seed": head.get("seed")}
    if opened is not None:
        given |= {"mode": opened.mode, "endpoint": opened.endpoint}
    lines = [("environment", head.get("fingerprint")), ("", reading.story.opening)]
    for prefix, values in lines:
        given |= _flat(values, prefix)
    return given


def _flat(value: Value, prefix: str) -> dict[str, Value]:
    """Write nested settings as one line each, such as `config.temperature`."""
    if not isinstance(value, Mapping) or "blake2b" in value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Value] = {}
    for name, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{name}" if prefix else name)
    return flat


def _latency(took_ns: list[int]) -> Latency:
    if not took_ns:
        return Latency(None, None, None)
    ordered = sorted(took_ns)
    p95 = ordered[min(len(ordered) - 1, len(ordered) * P95 // 100)]
    return Latency(*(round(it / 1e6, 1) for it in (statistics.median(ordered), p95, ordered[-1])))


# -- as text --------------------------------------------------------------------------------------


ROWS_MAX: Final = 40
"""Differences in the table; the rest is counted, and in JSON."""
SETUP_MAX: Final = 12
"""Lines of settings: two environments can differ in many."""
CELL_CHARS_MAX: Final = 40
"""Of a unit's text: two of them stand side by side."""


def diff_lines(report: DiffReport) -> list[RenderableType]:
    """Describe the findings, the first difference first."""
    lines: list[RenderableType] = [_verdict(report)]
    if report.first is not None:
        lines += _difference_lines(report.first)
    if report.is_damaged:
        lines.append("damaged: the lost part of a log may be what differs, or hide it")
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


def _difference_lines(found: SessionDifference) -> list[RenderableType]:
    more = f" (and {', '.join(found.fields[1:])})" if len(found.fields) > 1 else ""
    lines: list[RenderableType] = [f"  {_name(found)}: {found.fields[0]}{more}"]
    if found.a is not None and found.b is not None:
        lines += [
            f"  A         {_describe_side(found.a)}",
            f"  B         {_describe_side(found.b)}",
        ]
    lines += [f"  {found.path or 'the whole'}", f"    in A    {found.in_a}"]
    lines.append(f"    in B    {found.in_b}")
    if found.snr_db is not None:
        lines.append(f"  sound     that of A is {found.snr_db} dB above the difference")
    return lines


def _name(found: SessionDifference) -> str:
    return found.what if found.index is None else f"{found.what} {found.index}"


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
    for found in report.partings[:ROWS_MAX]:
        more = len(found.fields) - 1
        row = (
            _name(found),
            _cell(found, found.a, found.in_a),
            _cell(found, found.b, found.in_b),
            "" if found.snr_db is None else f"{found.snr_db} dB",
            "" if found.index is None else f"{_took(found.a)} | {_took(found.b)}",
            found.fields[0] + (f" and {more} more" if more else ""),
        )
        rows.append(row)
    left = report.parting_count - ROWS_MAX
    columns = ("<", "<A", "<B", "<sound", "<took, ms", "<differs in")
    return table(columns, rows, more=f"and {left} more, see --json" if left > 0 else "")


def _cell(found: SessionDifference, side: Side | None, shown: str) -> str:
    if side is None:
        return shown if found.index is None else "not there"
    return _describe_side(side)


def _describe_side(side: Side) -> str:
    words = [side.outcome.replace("_", " ")]
    words += [f"{side.audio_ms} ms"] if side.audio_ms else []
    words += [show(side.text[:CELL_CHARS_MAX])] if side.text else []
    return ", ".join(words)


def _took(side: Side | None) -> str:
    return "-" if side is None or side.took_ns is None else f"{side.took_ns / 1e6:.0f}"


# -- the command ----------------------------------------------------------------------------------


@click.command("diff")
@click.argument("log_a", metavar="A", type=RecordingType())
@click.argument("log_b", metavar="B", type=RecordingType())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff_command(log_a: Path, log_b: Path, as_json: bool) -> None:
    """Compare the sessions in the logs A and B, unit by unit, the first difference first.

    The command compares the model's input and output: decisions, tokens, codes, words and sound
    (A's level relative to the difference, in dB: 60 and more is rounding). The time that the model
    took is shown and does not count; nor do names, times, logits, and the settings of the
    sessions, such as their seeds. Frames and errors are not compared: the frames of clients and
    servers may differ while the model's part is equal.

    \b
    Examples:
      antiphon diff monday.session.zst tuesday.session.zst
      antiphon diff parent.session.zst fork.session.zst --json | jq .first

    \b
    Exit codes:
      0  the same
      1  they differ
      2  a log cannot be read, or is damaged: the readable part is compared and reported
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    report = read_and_compare(log_a, log_b)
    exit_code = 2 if report.is_damaged else int(report.first is not None)
    body = {"log_a": str(log_a), "log_b": str(log_b), "exit_code": exit_code}
    body |= unstructure(report)
    finish(body, diff_lines(report), as_json=as_json, exit_code=exit_code)


def read_and_compare(log_a: Path, log_b: Path) -> DiffReport:
    """Compare two logs; `UnusableError` names the one that cannot be read."""
    with opened_log(log_a) as a, opened_log(log_b) as b:
        items_a, items_b = records_of(log_a, a), records_of(log_b, b)
        return compare(a.head.fields, items_a, b.head.fields, items_b)
