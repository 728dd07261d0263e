"""An engine that is given up: its worker hung, and another is to take its place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import pytest

from runtime.backends.base import BackendGone
from runtime.engine.engine import Engine

WAIT_S = 10
DUE_NS = 1_000_000_000


@attrs.frozen
class Ask:
    """A request; all go together."""

    stage = 0
    bucket = "all"


def steps() -> Generator[Ask, int, int]:
    """Ask twice."""
    return (yield Ask()) + (yield Ask())


def test_what_waits_for_an_engine_that_is_stopped_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Sessions of a hung worker would wait for ever, its old model compute on beside the new."""
    begun, gate = threading.Event(), threading.Event()

    def compute(asked: Sequence[Any]) -> list[int]:
        begun.set()
        gate.wait(WAIT_S)
        return [1] * len(asked)

    engine = Engine(compute, batch_max=1)
    with caplog.at_level(logging.DEBUG):
        under_way, waiting = (engine.submit(steps(), due_ns=DUE_NS) for _ in range(2))
        assert begun.wait(WAIT_S)
        engine.stop()
        late = engine.submit(steps(), due_ns=DUE_NS)
        gate.set()
        for future in (under_way, waiting, late):
            with pytest.raises(BackendGone):
                future.result(WAIT_S)
    assert engine.statistics.answers == 1
    assert not caplog.records
