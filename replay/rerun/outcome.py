"""The result of replaying one log: a verdict, the report behind it, and both as JSON.

Damage outweighs a divergence, which it can cause; of several logs the worst counts. The keys of the
JSON are stable: scripts read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import attrs
from cattrs import unstructure

from protocol.values.limits import NS_PER_S

from .report import Divergence, FullReport, ReplayReport

Result = Literal["identical", "not_comparable", "diverged", "damaged", "unreadable"]
EXIT_CODES: Final[Mapping[Result, int]] = MappingProxyType(
    {"identical": 0, "not_comparable": 3, "diverged": 1, "damaged": 2, "unreadable": 2}
)
"""The exit code of each verdict, from the best to the worst."""


@attrs.frozen(kw_only=True)
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
    """Judge a logic replay."""
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


def times_real_time(span_ns: int, elapsed_s: float) -> float | None:
    """How much faster than the session its replay was; None if it took no time."""
    return round(span_ns / NS_PER_S / elapsed_s, 1) if elapsed_s > 0 else None


def to_json(outcome: Outcome) -> dict[str, object]:
    """Write an outcome as plain values."""
    body: dict[str, object] = {
        "log": outcome.log,
        "result": outcome.result,
        "exit_code": outcome.exit_code,
        "elapsed_ms": round(outcome.elapsed_s * 1000, 3),
        "times_real_time": times_real_time(outcome.span_ns, outcome.elapsed_s),
    }
    if outcome.error is not None:
        body["error"] = outcome.error
    if outcome.report is not None:
        body |= unstructure(outcome.report)
        body["divergence"] = unstructure(outcome.divergence)
    return body
