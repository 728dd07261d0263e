"""How fast logic replay is: a session of hundreds of units, as a server records it.

CPU time is measured, so that whatever else the machine does slows the test and does not fail it.
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Final

import attrs
import pytest

from protocol.values.limits import NS_PER_S
from protocol.values.model import UnitResult
from replay.rerun.folder import replay_log
from runtime.model.backends.scripted_chat import tone
from tests.project.sampling import sample
from tests.replay.test_logs import LIMITS, OPENED, Scene, write_log
from tests.sessions.in_memory import append_frame

UNITS: Final = sample(1000, 300)
TIMES_REAL_TIME_MIN: Final = 200
MEMORY_MB_MAX: Final = 24
"""Some blocks and their blobs; each hundred units hold 16 MB of sound."""
SOUNDS: Final = tuple(tone(number, 0, samples=24_000) for number in range(7))
FRAME: Final = append_frame()


class Talkative(Scene):
    """A scene in which each unit is spoken, for a whole second."""

    def result(self, index: int, number: int) -> UnitResult:
        made = attrs.evolve(super().result(index, 1), end_of_turn=False)
        return attrs.evolve(made, pcm=SOUNDS[index % len(SOUNDS)], decided_ids=(*range(100, 112),))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of hundreds of units."""
    limits = attrs.evolve(LIMITS, session_s=3600, context_tokens=1 << 30)
    scene = Talkative(attrs.evolve(OPENED, limits=limits))
    scene.activate()
    for second in range(UNITS):
        scene.unit(frame=FRAME)
        scene.wait(600 if second else 1000)
    scene.finish()
    return write_log(tmp_path_factory.mktemp("long"), scene.records)


@pytest.mark.slow
def test_a_long_log_replays_fast(log: Path) -> None:
    """A corpus of recordings could not be replayed with each change of the server."""
    began = time.process_time()
    outcome = replay_log(log)
    spent_s = time.process_time() - began
    assert (outcome.result, outcome.logic and outcome.logic.units) == ("identical", UNITS)
    assert outcome.span_ns / NS_PER_S / spent_s >= TIMES_REAL_TIME_MIN


@pytest.mark.slow
def test_a_long_log_is_not_held_in_memory(log: Path) -> None:
    """Ten minutes of a session would take all the memory of whoever replays them."""
    tracemalloc.start()
    replay_log(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY_MB_MAX << 20
