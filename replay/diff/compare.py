"""Two sessions aligned by unit, and their differences; it reads any two logs, also unrelated ones.

Rules:
- Units and turns of chat are aligned by index, not time. A unit that only one session has is a
  difference.
- The model's input and output are compared, and ends if both logs have one. Times, costs and names
  never count; settings (seed, environment) and logits, which rounding changes without another
  difference, are reported separately.
- Both logs are streamed, with one exchange of each in memory and a bounded list of differences.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Final, Literal

import attrs

from recorder.format.records import Fields, Record, Value
from recorder.read.scan import Damage

from ..rerun.difference import NOTHING, Difference, show
from ..rerun.environment import model_of
from ..rerun.outputs import compare_outputs, output_difference, snr_db
from ..shared.fields import typed
from ..story.exchanges import Exchange, audio_ms
from ..story.reading import SessionStory
from .report import DiffReport, Latency, Parting, SessionFacts, SetupLine, Side

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
PARTINGS_KEPT: Final = 1000
"""More units than a session of ten minutes has; further differences are only counted."""
TEXT_CHARS_MAX: Final = 200
"""Of an exchange's text that differs: some seconds of speech."""
P95: Final = 95

Items = Iterable[Record | Damage]


def compare(head_a: Fields, items_a: Items, head_b: Fields, items_b: Items) -> DiffReport:
    """Compare two sessions: for each the fields of its `session` record, records and damage."""
    a, b = _Reading(head_a, items_a), _Reading(head_b, items_b)
    tally = _Tally()
    pairs = _aligned(iter(a), iter(b))
    begun = list(islice(pairs, 1))
    tally.note(_opening_parting(a.story, b.story))  # both openings were read by now
    for first, second in chain(begun, pairs):
        tally.take(first, second)
    tally.note(_end_parting(a.story, b.story))
    return DiffReport(
        a=a.facts(),
        b=b.facts(),
        setup=tuple(_setup(a, b)),
        compared=tally.compared,
        same=tally.same,
        only_a=tally.only_a,
        only_b=tally.only_b,
        first=tally.partings[0] if tally.partings else None,
        partings=tuple(tally.partings),
        parting_count=tally.count,
        logits_changed=tally.logits_changed,
    )


class _Reading:
    def __init__(self, head: Fields, items: Items) -> None:
        self.head: Final = head
        self.story: Final = SessionStory()
        self._items: Final = items
        self._took_ns: list[int] = []
        self._exchanges = 0

    def __iter__(self) -> Iterator[Exchange]:
        for exchange in self.story.read(self._items):
            self._exchanges += 1
            if exchange.took_ns is not None:
                self._took_ns.append(exchange.took_ns)
            yield exchange

    def facts(self) -> SessionFacts:
        story = self.story
        return SessionFacts(
            recording_id=typed(self.head, "recording_id", str),
            model=model_of(self.head),
            mode=None if story.opened is None else story.opened.mode,
            seed=typed(self.head, "seed", int),
            span_ns=story.duration_ns,
            exchanges=self._exchanges,
            drops=len(story.drops),
            shortened=len(story.shortened),
            shortened_bytes=sum(short.size_bytes for short in story.shortened),
            end_reason=story.end.reason,
            latency=_latency(self._took_ns),
            damage_count=story.damage_count,
        )


@attrs.define
class _Tally:
    compared: int = 0
    same: int = 0
    only_a: int = 0
    only_b: int = 0
    count: int = 0
    logits_changed: int | None = None
    partings: list[Parting] = attrs.Factory(list)

    def take(self, a: Exchange | None, b: Exchange | None) -> None:
        parting = _parting(a, b)
        self.only_a += b is None
        self.only_b += a is None
        if a is not None and b is not None:
            self.compared += 1
            self.same += parting is None
            are_answered = a.is_answered and b.is_answered
            if self.logits_changed is None and are_answered and a.logits_hash != b.logits_hash:
                self.logits_changed = a.index
        self.note(parting)

    def note(self, parting: Parting | None) -> None:
        if parting is not None:
            self.count += 1
            if len(self.partings) < PARTINGS_KEPT:
                self.partings.append(parting)


def _aligned(
    a: Iterator[Exchange], b: Iterator[Exchange]
) -> Iterator[tuple[Exchange | None, Exchange | None]]:
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


def _parting(a: Exchange | None, b: Exchange | None) -> Parting | None:
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
    return Parting(
        what=there.kind,
        index=there.index,
        fields=fields,
        path=found.path,
        in_a=found.recorded,
        in_b=found.came_out,
        snr_db=snr,
        a=_side(a),
        b=_side(b),
    )


def _compared(a: Exchange, b: Exchange) -> tuple[str, ...]:
    if not (a.is_answered and b.is_answered):
        return UNANSWERED_FIELDS
    are_finalized = None not in (a.finalized_ids, b.finalized_ids)
    return (*FIELDS, *FINALIZED_FIELDS) if are_finalized else FIELDS


def _side(exchange: Exchange | None) -> Side | None:
    if exchange is None:
        return None
    return Side(
        outcome=exchange.outcome,
        text=exchange.text[:TEXT_CHARS_MAX],
        audio_ms=audio_ms(exchange.pcm),
        took_ns=exchange.took_ns,
    )


def _opening_parting(a: SessionStory, b: SessionStory) -> Parting | None:
    if a.prepared is not None and b.prepared is not None:
        found = compare_outputs(a.prepared, b.prepared)
    elif a.prepared is b.prepared:
        return None
    else:
        shown = [NOTHING if one.prepared is None else "opened" for one in (a, b)]
        found = Difference(path="opened", recorded=shown[0], came_out=shown[1])
    return None if found is None else _bare("opening", found)


def _end_parting(a: SessionStory, b: SessionStory) -> Parting | None:
    ends = a.end.reason, b.end.reason
    if ends[0] is None or ends[1] is None or ends[0] == ends[1]:
        return None
    return _bare("end", Difference(path="reason", recorded=ends[0], came_out=ends[1]))


def _bare(what: Literal["opening", "end"], found: Difference) -> Parting:
    return Parting(
        what=what,
        index=None,
        fields=(found.path.partition("[")[0],),
        path=found.path,
        in_a=found.recorded,
        in_b=found.came_out,
    )


# -- settings and times ---------------------------------------------------------------------------


def _setup(a: _Reading, b: _Reading) -> Iterator[SetupLine]:
    given_a, given_b = _given(a), _given(b)
    for name in [*given_a, *(name for name in given_b if name not in given_a)]:
        values = [given.get(name) for given in (given_a, given_b)]
        if values[0] != values[1]:
            shown = [NOTHING if value is None else show(value) for value in values]
            yield SetupLine(name=name, in_a=shown[0], in_b=shown[1])


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
        return Latency(p50_ms=None, p95_ms=None, max_ms=None)
    ordered = sorted(took_ns)
    p95 = ordered[min(len(ordered) - 1, len(ordered) * P95 // 100)]
    p50_ms, p95_ms, max_ms = (
        round(it / 1e6, 1) for it in (statistics.median(ordered), p95, ordered[-1])
    )
    return Latency(p50_ms=p50_ms, p95_ms=p95_ms, max_ms=max_ms)
