"""Conversations in `/metrics`: what a live session is measured by is what its recording says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from runtime.telemetry import catalogue as c
from runtime.telemetry.meters import values_of
from runtime.telemetry.metrics import Metrics
from tests.golden.logs import SAMPLE
from tests.replay.evaluated import facts_in, scores_in
from tests.sessions.telemetry import is_whole, meter_log

Counts = dict[tuple[str, str], list[float]]


def told_by(metrics: Metrics) -> Counts:
    """Give the buckets of the conversations' histograms, and their counters."""
    made = metrics._instruments["audio"]._made
    return {
        (name, mode): [*series.counts] if metric.kind == "histogram" else [series.total]
        for name, metric in c.CONVERSATION.items()
        for (mode,) in metric.series
        for series in [made.series(metric, mode)]
    }


def recorded_in(logs: Iterable[Path]) -> Counts:
    """Give the same, of what `antiphon eval` measures in recordings."""
    counts = told_by(Metrics())
    for log in logs:
        mode = facts_in(log).mode
        for name, value in scores_in(log).items():
            if mode is None or name not in c.CONVERSATION:
                continue
            metric, cells = c.CONVERSATION[name], counts[name, mode]
            for one in values_of(name, value):
                is_counter = metric.kind == "counter"
                cells[0 if is_counter else bisect_left(metric.buckets, one)] += (
                    one if is_counter else 1
                )
    return counts


WHOLE: Final = [log for log in SAMPLE if is_whole(log)]


@pytest.mark.parametrize("log", WHOLE, ids=lambda log: log.name)
def test_golden_logs_measure_as_their_sessions(log: Path) -> None:
    """A session of some dialect would be heard otherwise than its frames say."""
    if "fork" in log.name:
        pytest.skip("a fork is measured in its recording only")
    metrics = Metrics()
    meter_log(log, metrics)
    assert told_by(metrics) == recorded_in([log])
