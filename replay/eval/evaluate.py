"""Evaluates the logs of a folder one after the other, sums them up, and compares two evaluations.

A damaged or unreadable log stops no other; a damaged one is measured, with gaps, and left out of
the summary. Of each recording only its measures are kept, packed: a recording takes about a
kilobyte, as objects it would take twenty, and a folder has thousands.

**A summary.** Percentiles are by the nearest rank: a value that was measured. Sums and shares are
made of the integers of all recordings, so they do not depend on the order. Each value takes 8
bytes: it is an integer that a float holds exactly (nanoseconds of a hundred days), or a recording's
ratio.

**A comparison** of the same sessions: is the difference of a measure more than chance? For each
measure, the sessions that have it in both are pairs. The interval is a bootstrap's: the mean
difference of sessions that are drawn again. p is that of a test by signs: if nothing changed, each
difference could as well have had the other sign. All signs are tried if they are few enough, else
drawn. Draws have a fixed seed, so the same values give the same numbers.

**The table of measures** is `measures.txt`. Of each measure it has name, kind, unit, which values
are good, sessions that have it, source; below them it says what holds for several. `antiphon eval
--definitions` and the reference of the site show it. A measure that means nothing in a recording is
absent there: it has no value, and not 0. Those of `--mode forced` say what a model decides on a
recording's past. A decision is the first token of a unit that was free to decide: to be silent, or
to be heard. Each is judged on the recorded past, so that one difference has no consequences.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from math import fsum, isnan, nan
from pathlib import Path
from statistics import median_low
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs
import numpy as np
from cattrs import structure
from numpy.typing import NDArray

from protocol.values.limits import MS_PER_S, NS_PER_S, SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from recorder.format.format import Fields, RecorderError
from recorder.read.reader import LogReader
from recorder.read.scan import OpenSource
from runtime.measures import conversation as at
from runtime.measures.conversation import KINDS, SCALES, Measure, Ratio, Scores, Times, Total, Value
from runtime.measures.talk import JITTER_MS
from runtime.media import speech_detector as sd
from runtime.telemetry.meters import DEADLINE_NS

from ..rerun.outputs import NEAR_TIE_DRAW_GAP, NEAR_TIE_MARGIN
from ..shared.commands import Watch, reason, size_of, unwatched
from ..shared.recordings import below, typed
from .scores import Facts, Lost, gather, score

# -- the table of measures -------------------------------------------------------------------------


OWN_VOICE: Final = "own_voice_word_error"


def _text() -> str:
    facts = {"SPEECH_THRESHOLD": SPEECH_THRESHOLD, "SPEECH_SILENCE_MS": SPEECH_SILENCE_MS}
    facts |= {"NEAR_TIE_MARGIN": NEAR_TIE_MARGIN, "NEAR_TIE_DRAW_GAP": NEAR_TIE_DRAW_GAP}
    facts |= {"JITTER_MS": JITTER_MS, "DEADLINE_S": DEADLINE_NS // NS_PER_S}
    spans = {name: f"{ms / MS_PER_S:g} s" for name, ms in vars(at).items() if "_MS" in name}
    text = (files(__package__) / "measures.txt").read_text("utf-8")
    return text.format(at=at, sd=sd, s=spans, **facts)


def _read(table: str) -> Iterator[Measure]:
    for rows in table.split("\n\n"):
        head, *lines = rows.splitlines()
        name, kind, unit, better, *rest = head.split(" | ")
        modes, source = (*rest, *("duplex", "Antiphon")[len(rest) :])
        fields = {"name": name, "kind": kind, "unit": unit, "better": better.strip("-")}
        fields |= {"modes": modes, "source": source, "definition": _joined(" ".join(lines))}
        yield structure(fields, Measure)


def _joined(text: str) -> str:
    return " ".join(text.split())


_TABLE, _SETTINGS = _text().split("\n\n\n")
MEASURES: Final[Mapping[str, Measure]] = MappingProxyType({it.name: it for it in _read(_TABLE)})
"""All measures by name, in the order in which they are shown."""
SETTINGS: Final = tuple(map(_joined, _SETTINGS.split("\n\n")))
"""What holds for several definitions: one paragraph each."""


# -- values, and a summary of recordings -----------------------------------------------------------


DIGITS: Final = 6
"""Microseconds, where a sample takes 42 or 63."""
P90: Final = 90

Json = dict[str, object]


@attrs.frozen
class Statistics:
    """A measure over several recordings, in its unit.

    Attributes:
        recordings: how many have it.
        count: values that were measured; of a share, the cases that it is a share of.
        value: of single moments the median, of amounts the sum, of ratios that of all recordings
            together.
        median, p90: of all single moments, else of the recordings.
        worst_log: the recording with the worst value.
    """

    recordings: int
    count: int
    value: float
    median: float
    p90: float
    worst: float
    worst_log: str

    def has_worst(self, measure: Measure) -> bool:
        """Whether it is worth saying where the worst is: not if it is nothing."""
        return bool(self.worst) or measure.better == "higher"


@attrs.define
class _Tally:
    """One measure so far; `values` are raw, and of recordings if it has no single moments."""

    measure: Measure
    values: array[float] = attrs.Factory(lambda: array("d"))
    recordings: int = 0
    part: int = 0
    whole: int = 0
    worst: float | None = None
    worst_log: str = ""

    def add(self, value: Value, log: str) -> None:
        self.recordings += 1
        raws = raw_values(value)
        if isinstance(value, Ratio):
            self.part += value.part
            self.whole += value.whole
        self.values.extend(raws)
        worst = worst_of(self.measure, raws)
        if self.worst is None or worst_of(self.measure, [self.worst, worst]) != self.worst:
            self.worst, self.worst_log = worst, log

    def statistics(self) -> Statistics:
        ordered, kind = sorted(self.values), self.measure.kind
        value: float = median_low(ordered)
        if kind == "total":
            value = fsum(ordered)
        elif kind == "ratio":
            value = self.part / self.whole
        assert self.worst is not None
        count = self.whole if self.measure.unit == "share" else len(ordered)
        raw = (value, median_low(ordered), percentile(ordered, P90), self.worst)
        value, median, p90, worst = (scaled(self.measure, it) for it in raw)
        return Statistics(self.recordings, count, value, median, p90, worst, self.worst_log)


class Summary:
    """Measures over recordings, added one by one."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    @classmethod
    def of(cls, log: str, scores: Scores) -> dict[str, Statistics]:
        """Return the statistics of one recording."""
        summary = cls()
        summary.add(log, scores)
        return summary.statistics()

    def add(self, log: str, scores: Scores) -> None:
        """Add a recording."""
        for name, value in scores.items():
            if name not in self._tallies:
                self._tallies[name] = _Tally(MEASURES[name])
            self._tallies[name].add(value, log)

    def statistics(self) -> dict[str, Statistics]:
        """Return the measures that any recording has, in the order of the table."""
        return {
            name: self._tallies[name].statistics() for name in MEASURES if name in self._tallies
        }


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted values: the least that so many do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def worst_of(measure: Measure, values: Sequence[float]) -> float:
    """Return the worst value; the largest of a measure that only describes."""
    return min(values) if measure.better == "higher" else max(values)


def raw_values(value: Value) -> list[float]:
    """List what a recording has of a measure: its single moments, or one number."""
    match value:
        case Times(values=values):
            return [amount for _, amount in values]
        case Total(amount=amount):
            return [amount]
        case Ratio(part=part, whole=whole):
            return [part / whole]


def own_value(value: Value) -> float:
    """Return what a recording has of a measure, as one raw number."""
    return median_low(raw_values(value))


def scaled(measure: Measure, value: float) -> float:
    """Write a raw value in the measure's unit."""
    return round(value * SCALES[measure.unit], DIGITS)


def own_values(scores: Scores) -> dict[str, float]:
    """Return the value of each measure in its unit; none of a forged log with endless numbers."""
    try:
        return {name: scaled(MEASURES[name], own_value(it)) for name, it in scores.items()}
    except OverflowError:  # numbers of a server fit
        return {}


def scores_json(scores: Scores) -> dict[str, Json]:
    """Write a recording's measures as plain values, in the order of the table."""
    return {
        name: _value_json(measure, scores[name])
        for name, measure in MEASURES.items()
        if name in scores
    }


def _value_json(measure: Measure, value: Value) -> Json:
    body: Json = {"value": scaled(measure, own_value(value))}
    if isinstance(value, Ratio) and measure.unit == "share":
        body["count"] = value.whole
    if isinstance(value, Times):
        amounts = sorted(amount for _, amount in value.values)
        worst = worst_of(measure, amounts)
        at_ns = next(at_ns for at_ns, amount in value.values if amount == worst)
        body |= {
            "count": len(amounts),
            "p90": scaled(measure, percentile(amounts, P90)),
            "worst": scaled(measure, worst),
            "worst_at_s": round(at_ns * SCALES["s"], DIGITS),
        }
    return body


def statistics_json(found: Mapping[str, Statistics] | Mapping[str, Paired]) -> dict[str, Json]:
    """Write a summary, or a comparison, as plain values."""
    return {name: {"unit": MEASURES[name].unit, **attrs.asdict(it)} for name, it in found.items()}


# -- a recording, packed ---------------------------------------------------------------------------


_MADE: Final[Mapping[str, type[Value]]] = {kind: cls for cls, kind in KINDS.items()}
OPENED_MAX: Final = 4
"""Recordings that are kept unpacked: a report asks for several things of one."""


def raw_of(scores: Scores) -> dict[str, tuple[Any, ...]]:
    """Write measures as plain values, in the order of the table."""
    return {name: attrs.astuple(scores[name]) for name in MEASURES if name in scores}


def scores_of(raw: Mapping[str, list[Any]]) -> Scores:
    """Read measures; `ValueError`, `LookupError` or `TypeError` unless `raw_of` wrote them."""
    return {name: _value(name, values) for name, values in raw.items()}


def _value(name: str, raw: list[Any]) -> Value:
    match _MADE[MEASURES[name].kind], raw:
        case cls, [list(values)] if cls is Times:
            return Times(tuple((int(at_ns), int(amount)) for at_ns, amount in values))
        case cls, [int(amount)] if cls is Total:
            return Total(amount)
        case cls, [int(part), int(whole)] if cls is Ratio and whole > 0:
            return Ratio(part, whole)
    raise ValueError(f"{name}: {raw!r}")


def pack(log: str, scores: Scores, body: Json) -> bytes:
    """Pack a recording; `OverflowError`: a forged log has numbers that no server writes."""
    Summary.of(log, scores)
    data = json.dumps([log, raw_of(scores), body], separators=(",", ":"))
    return zlib.compress(data.encode("ascii"))


@lru_cache(maxsize=OPENED_MAX)
def opened(packed: bytes) -> tuple[Scores, Mapping[str, Statistics], Json]:
    """Unpack a recording: a row's scores, own values and body; of nothing, nothing is known."""
    if not packed:
        return {}, {}, {}
    log, raw, body = json.loads(zlib.decompress(packed))
    scores = scores_of(raw)
    return scores, Summary.of(log, scores), {**body, "measures": scores_json(scores)}


class Values(Mapping[str, float]):
    """A number for each of some measures, in 8 bytes a measure."""

    __slots__ = ("_numbers",)

    def __init__(self, found: Mapping[str, float]) -> None:
        self._numbers: Final = array("d", (found.get(name, nan) for name in MEASURES))

    def __getitem__(self, name: str) -> float:
        number = self._numbers[_PLACES[name]]
        if isnan(number):
            raise KeyError(name)
        return number

    def __iter__(self) -> Iterator[str]:
        return (name for name, it in zip(MEASURES, self._numbers, strict=True) if not isnan(it))

    def __len__(self) -> int:
        return sum(not isnan(it) for it in self._numbers)


_PLACES: Final = {name: place for place, name in enumerate(MEASURES)}


# -- a comparison with a baseline ------------------------------------------------------------------


DRAWS: Final = 10_000
"""p is never below about a ten-thousandth, and an interval's ends are known to a few percent."""
ALL_SIGNS_MAX: Final = 13
"""Pairs of which all signs are tried: 8,192 ways."""
NUMBERS_MAX: Final = 1 << 20
"""Numbers drawn at once, so that memory does not grow with the sessions: 8 MB."""
SEED: Final = 20_260_101
INTERVAL: Final = (2.5, 97.5)
"""Percent: a 95 % interval."""
P_MAX: Final = 0.05
"""Above this a difference is called chance."""
P_DIGITS: Final = 4

Numbers = NDArray[np.float64]
Own = Mapping[str, float]
"""What one session has of each measure, in its unit."""


@attrs.frozen
class Paired:
    """A measure in sessions that have it in both evaluations, in its unit.

    Attributes:
        recordings: the pairs.
        unpaired: sessions that have the measure in only one of the evaluations.
        value, baseline: the means over the pairs.
        difference: their difference: positive if the value is above the baseline.
        low, high: of the difference, a 95 % interval.
        p: how often chance gives a difference at least as large; 1 if the difference is 0.
    """

    recordings: int
    unpaired: int
    value: float
    baseline: float
    difference: float
    low: float
    high: float
    p: float


@attrs.frozen(kw_only=True)
class Baseline:
    """What sessions are compared with: its name, and what each session has there, by its log."""

    name: str
    owns: Mapping[str, Own]


@attrs.frozen(kw_only=True)
class Comparison:
    """Sessions compared with a baseline: its name, all sessions, and each one's own differences."""

    name: str
    sessions: int
    paired: dict[str, Paired]
    own: Mapping[str, Own]


def compare(baseline: Baseline, owns: Mapping[str, Own]) -> Comparison:
    """Compare the own values of sessions, by log, with those of a baseline."""
    pairs, unpaired = defaultdict[str, list[tuple[float, float]]](list), Counter[str]()
    own: dict[str, Own] = {}
    for log in [log for log in owns if log in baseline.owns]:
        here, before = owns[log], baseline.owns[log]
        both = [name for name in MEASURES if name in here and name in before]
        for name in both:
            pairs[name].append((here[name], before[name]))
        own[log] = Values({it: round(here[it] - before[it], DIGITS) + 0.0 for it in both})
        unpaired.update(here.keys() ^ before.keys())
    found = [name for name in MEASURES if name in pairs]
    paired = {name: _paired(np.array(pairs[name]), unpaired[name]) for name in found}
    return Comparison(name=baseline.name, sessions=len(own), paired=paired, own=own)


def verdict_of(measure: Measure, found: Paired) -> str:
    """Say whether a measure is `worse`, `better` or `other`; empty if that may be chance.

    Of few sessions an interval is too narrow, and p cannot be small: both must agree.
    """
    if found.low <= 0 <= found.high or found.p > P_MAX:
        return ""
    if not measure.better:
        return "other"
    return "worse" if (found.low > 0) == (measure.better == "lower") else "better"


def _paired(pairs: Numbers, unpaired: int) -> Paired:
    own, before = pairs.T  # each (N,)
    apart = np.round(own - before, DIGITS)
    if apart.any():
        low, high = _interval(apart)
        p = round(chance(apart), P_DIGITS)
    else:
        low, high, p = 0.0, 0.0, 1.0
    means = (float(each.mean()) for each in (own, before, apart))
    value, baseline, difference = (round(mean, DIGITS) + 0.0 for mean in means)
    return Paired(len(apart), unpaired, value, baseline, difference, low, high, p)


def _interval(apart: Numbers) -> tuple[float, float]:
    """The interval of the mean of (N,) differences, by drawing sessions again."""
    draw, count = np.random.default_rng(SEED), len(apart)
    means = [
        apart[draw.integers(0, count, (rows, count))].mean(axis=1) for rows in _portions(count)
    ]
    low, high = np.percentile(np.concatenate(means), INTERVAL)
    return round(float(low), DIGITS) + 0.0, round(float(high), DIGITS) + 0.0


def chance(apart: Numbers) -> float:
    """Return how often random signs of (N,) differences give a mean as far from 0, in (0, 1]."""
    count = len(apart)
    least = abs(float(apart.sum())) * (1 - 1e-9)  # Sums of other orders differ by rounding.
    if count <= ALL_SIGNS_MAX:
        ways = np.arange(1 << count)[:, None] >> np.arange(count) & 1  # (2^N, N)
        return float((abs((1.0 - 2.0 * ways) @ apart) >= least).mean())
    draw, hits = np.random.default_rng(SEED), 0
    for rows in _portions(count):
        signs = 1.0 - 2.0 * draw.integers(0, 2, (rows, count))
        hits += int((abs(signs @ apart) >= least).sum())
    return (hits + 1) / (DRAWS + 1)


def _portions(count: int) -> Iterable[int]:
    """Part `DRAWS` draws of `count` numbers into portions that fit."""
    most = max(1, NUMBERS_MAX // count)
    return (min(most, DRAWS - at) for at in range(0, DRAWS, most))


# -- an evaluation ---------------------------------------------------------------------------------


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
        packed: what was measured, by `pack`; empty if nothing was.
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
        return opened(self.packed)[0]

    @property
    def own(self) -> Mapping[str, Statistics]:
        """Its own values of each measure, as if it were the only recording."""
        return opened(self.packed)[1]

    @property
    def values(self) -> Own:
        """Its own value of each measure, in few bytes."""
        return Values({name: it.value for name, it in self.own.items()})

    @property
    def body(self) -> Json:
        """Its measures and what they are of, as plain values."""
        return opened(self.packed)[2]

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
            **({} if compared is None else {"comparison": statistics_json(compared.paired)}),
        }

    def _row_json(self, row: Row) -> Json:
        body = {"log": row.log, "result": row.result}
        body |= {"error": row.error} if row.error else {}
        own = {} if self.comparison is None else self.comparison.own.get(row.log, {})
        return body | row.body | ({"differences": dict(own)} if own else {})


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
            facts = gather(head, reader.watched(watch))
        row = row_of(name, {**score(facts), **also}, _body(head, facts))
    except (OSError, RecorderError) as error:
        return Row(log=name, result="unreadable", error=reason(error))
    except OverflowError:  # a forged log: numbers of a server fit
        return Row(log=name, result="unreadable", error="a number in it is too large")
    damage = facts.damage_count
    return attrs.evolve(
        row,
        result="damaged" if damage else "measured",
        error=f"damaged, not in the summary; places: {damage}" if damage else "",
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
    worst = worst_values(rows := [*rows], by, compared)
    return sorted(rows, key=lambda row: worst_key(by, worst.get(row.log)))


def worst_values(rows: Iterable[Row], by: str, compared: Comparison | None) -> Own:
    """Return the worst value of a measure in each log that has it, or its difference."""
    if compared is not None:
        return {log: found[by] for log, found in compared.own.items() if by in found}
    return {row.log: row.own[by].worst for row in rows if by in row.own}


def worst_key(measure: str, value: float | None) -> tuple[bool, float]:
    """Return a key that sorts values of a measure, the worst first; None comes last."""
    sign = 1 if MEASURES[measure].better == "higher" else -1
    return value is None, 0 if value is None else sign * value
