"""The findings of a replay: plain values, the same for text, JSON and tests.

Times are nanoseconds of the session's clock, 0 at its start. Values are short, readable text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import attrs
from cattrs import unstructure

from protocol.values.limits import NS_PER_S
from recorder.read.scan import Damage

_OfLogic = Literal["changed", "missing", "left_over", "state", "head", "refused", "unmapped", "fin"]
Kind = Literal[_OfLogic, "model", "model_failed"]
"""How a replay differs from its log:

| kind | the log has | the replay has |
|---|---|---|
| `changed` | an effect | another effect, or one with another content |
| `missing` | the next event, or the end | an effect that was never recorded |
| `left_over` | an effect | nothing more, or an end |
| `state` | a state's hash | another state |
| `refused` | an event | a machine that refuses it |
| `unmapped` | a record | no event that it could stand for |
| `fin` | a session's end, counts and state | others, or a session that goes on |
| `head` | the session | a session that begins as another |
| `model` | the model's output | another output (full replay) |
| `model_failed` | the model's output | a model that failed (full replay) |
"""


@attrs.frozen(kw_only=True)
class Cause:
    """The event that caused something: the record `seq`, its class and its shortened fields."""

    seq: int
    kind: str
    summary: str


@attrs.frozen
class Divergence:
    """The first place at which a replay differs from its log.

    Attributes:
        seq: the record that differs, of a kind such as `tx` or `effect StartUnit` in `record`.
        unit: the last unit started by then; None before the first.
        field: path in the record; empty if all of it differs.
        cause: the last event the machine took; None before the first.
        snr_db: of PCM that differs: the recorded signal's level against the difference.
    """

    kind: Kind
    seq: int
    record: str
    at_ns: int
    unit: int | None
    field: str
    recorded: str
    came_out: str
    cause: Cause | None
    snr_db: float | None = None

    @property
    def place(self) -> str:
        """The record and the field, such as `record 12 (effect Send), frame[3]`."""
        field = f", {self.field}" if self.field else ""
        return f"record {self.seq} ({self.record}){field}"


@attrs.frozen(kw_only=True)
class Version:
    """The version that recorded a session, or replays it; `software` is empty if the log has none.

    `behaviour` is the session's version (`protocol.values.behaviour`), or the newest known to
    replay.
    """

    software: str = ""
    schema: int = 1
    behaviour: int = 0


@attrs.define(kw_only=True)
class ReplayReport:
    """The findings of logic replay; effects, frames and states count those equal to the recorded.

    Attributes:
        events: events the machine took.
        effects: effects equal to the recorded ones, frames included.
        states_of_old: hashes of another snapshot's keys, and so not compared.
        span_ns: the session's time from its start to the last record.
        finished: `fin` was reached; without it the server was killed, or still writes the log.
        truncated: the log ends, without `fin`, among the effects of its last event.
        damage: the first damages, bounded; replay stops at the first unless `go_on`.
        damage_count: all damages.
    """

    recorded_by: Version = Version()
    replayed_by: Version
    records: int = 0
    events: int = 0
    effects: int = 0
    frames: int = 0
    states: int = 0
    states_of_old: int = 0
    units: int = 0
    span_ns: int = 0
    finished: bool = False
    truncated: bool = False
    divergence: Divergence | None = None
    damage: tuple[Damage, ...] = ()
    damage_count: int = 0

    @property
    def is_newer(self) -> bool:
        """Whether this software does not know the version that recorded the session."""
        there, here = self.recorded_by, self.replayed_by
        return there.schema > here.schema or there.behaviour > here.behaviour

    @property
    def identical(self) -> bool:
        """Whether all effects came out as recorded, and all that was read is sound."""
        return self.divergence is None and not self.damage_count


@attrs.frozen(kw_only=True)
class Mismatch:
    """A line of the environment's fingerprint that differs; None where the line is missing."""

    name: str
    recorded: str | None
    here: str | None


@attrs.frozen
class UnitDifference:
    """The difference of one unit; the other fields are those of `Divergence`.

    Attributes:
        margin: of a forced decision: logits of the model's own choice above the recorded one.
        draw_gap: of a forced decision: how far the random number was from the recorded choice.
        near_tie: of a forced decision: rounding could have turned it.
    """

    unit: int
    seq: int
    field: str
    recorded: str
    came_out: str
    snr_db: float | None
    margin: float | None
    draw_gap: float | None
    near_tie: bool | None


@attrs.define(kw_only=True)
class FullReport:
    """The findings of full replay; counts of `changed` include every difference in an output.

    Attributes:
        environment: differences between the recorded environment and this one.
        fingerprint: this environment, line by line.
        compared: the model ran; it does not if the environment differs, unless `anyway`.
        units: units that the model ran again, as `turns` of chat and `chunks` of a transcription.
        units_held: those held to a fork's parent's (`full`).
        changed: how each unit differs, the first of them up to a bound.
        logits_changed: the first unit whose first logits differ, even if its tokens do not.
        divergence: the first difference in the model's outputs.
        recorded: logic replay of the log as it is; None if nothing was compared.
        renewed: logic replay of the log with the model's new outputs.
    """

    model: str
    environment: tuple[Mismatch, ...]
    compared: bool
    fingerprint: Mapping[str, str] = attrs.field(factory=dict)
    units: int = 0
    units_held: int = 0
    units_changed: int = 0
    changed: tuple[UnitDifference, ...] = ()
    turns: int = 0
    turns_changed: int = 0
    chunks: int = 0
    chunks_changed: int = 0
    logits_changed: int | None = None
    divergence: Divergence | None = None
    recorded: ReplayReport | None = None
    renewed: ReplayReport | None = None

    @property
    def first_divergence(self) -> Divergence | None:
        """The model's first; without one the machine's, which then got the log's outputs."""
        reports = (self.recorded, self.renewed)
        return self.divergence or next((r.divergence for r in reports if r and r.divergence), None)

    @property
    def identical(self) -> bool:
        """Whether all outputs of the model and the machine are as recorded."""
        reports = (self.recorded, self.renewed)
        return self.divergence is None and all(r is not None and r.identical for r in reports)


Result = Literal["identical", "not_comparable", "diverged", "damaged", "unreadable"]
EXIT_CODES: Final[Mapping[Result, int]] = {
    **{"identical": 0, "not_comparable": 3, "diverged": 1, "damaged": 2, "unreadable": 2}
}
"""The exit code of each verdict, from the best to the worst."""


@attrs.frozen
class Outcome:
    """The result of replaying one log, in `elapsed_s` with its opening.

    `report` is None if nothing could be replayed; then `error` says why, in one line.
    """

    log: str
    result: Result
    elapsed_s: float
    report: ReplayReport | FullReport | None = None
    error: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of a command that replayed only this log."""
        return EXIT_CODES[self.result]

    @property
    def logic(self) -> ReplayReport | None:
        """The logic replay of the log as it is; None if it was not run."""
        return self.report.recorded if isinstance(self.report, FullReport) else self.report

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence."""
        report = self.report
        if isinstance(report, FullReport):
            return report.first_divergence
        return None if report is None else report.divergence

    @property
    def span_ns(self) -> int:
        """The session's length, as far as it was replayed."""
        return 0 if self.logic is None else self.logic.span_ns


def logic_result(report: ReplayReport) -> Result:
    """Judge a logic replay; damage outweighs a divergence, which it can cause."""
    if report.is_newer or any(damage.reason == "version" for damage in report.damage):
        return "not_comparable"
    if report.damage_count:
        return "damaged"
    return "identical" if report.identical else "diverged"


def full_result(report: FullReport) -> Result:
    """Judge a full replay."""
    if report.recorded is None:
        return "not_comparable"
    result = logic_result(report.recorded)
    return "diverged" if result == "identical" and not report.identical else result


def exit_code_of(outcomes: Iterable[Outcome]) -> int:
    """The exit code of a command that replayed several logs: that of the worst."""
    severity = list(EXIT_CODES)
    results: list[Result] = ["identical", *(outcome.result for outcome in outcomes)]
    return EXIT_CODES[max(results, key=severity.index)]


def to_json(outcome: Outcome) -> dict[str, object]:
    """Write an outcome as plain values; the keys are stable, for scripts read them."""
    span_s, elapsed_s = outcome.span_ns / NS_PER_S, outcome.elapsed_s
    body: dict[str, object] = {
        "log": outcome.log,
        "result": outcome.result,
        "exit_code": outcome.exit_code,
        "elapsed_ms": round(elapsed_s * 1000, 3),
        "times_real_time": round(span_s / elapsed_s, 1) if elapsed_s > 0 else None,
    }
    if outcome.error is not None:
        body["error"] = outcome.error
    if outcome.report is not None:
        body |= unstructure(outcome.report)
        body["divergence"] = unstructure(outcome.divergence)
    return body
