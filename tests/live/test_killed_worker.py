"""Worker processes are killed amid conversations, which go on byte for byte.

A small part of `tests.soak.workers`, at moments that are chosen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.live.servers import LiveServer, live_server
from tests.live.test_placement import workers_of
from tests.sessions.outliving import Found, Load, Talk, hold
from tests.soak.worker_crowd import one_round
from tests.soak.worker_twins import Part, compare

SOUND_BYTES: Final = 100_000
"""A log has as much when some seconds of its session's sound were answered."""
TALKS: Final = (("audio", 9), ("video", 12))
"""Modes, and seeds of long conversations: one a worker."""
WAIT_S = 120


async def talk_and_kill(server: LiveServer, folder: Path) -> list[Talk]:
    """Hold a conversation on each of two workers, and kill one of them amid both."""
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(hold(server.url, mode, seed)) for mode, seed in TALKS]
        await asyncio.to_thread(_kill_amid, server, folder)
    return [task.result() for task in held]


def _kill_amid(server: LiveServer, folder: Path) -> None:
    sizes: list[int] = []
    while len(sizes) < len(TALKS) or min(sizes) < SOUND_BYTES:
        time.sleep(0.05)
        sizes = [path.stat().st_size for path in folder.glob("*.session.zst")]
    os.kill(workers_of(server)[0], signal.SIGKILL)


def test_a_conversation_outlives_the_process_of_its_model(tmp_path: Path) -> None:
    """A caller is cut off, hears something twice, or a model that forgot what was said."""
    options = ("--isolate", "--worker", "tiny", "--slots", "2", "--record", str(tmp_path))
    with live_server(*options, model="tiny") as server:
        talks = asyncio.run(talk_and_kill(server, tmp_path))
        assert server.stop() == 0
    found, load = Found(), Load()
    for path in sorted(tmp_path.glob("*.session.zst")):
        found.judge(path, talks, load)
    assert found.failures == []
    assert (found.counts["lost"], found.counts["rebuilds"]) == (1, 1)
    assert found.counts["steps_fed_again"] > 1


@pytest.mark.soak
def test_a_conversation_is_the_one_that_was_not_killed(tmp_path: Path) -> None:
    """A client would hear other words, or another sound, than with a worker that lives."""
    parts = [
        Part(mode="audio", seconds=8, step=6, moment="unit", delay_s=0.01, silent=False),
        Part(mode="video", seconds=6, step=4, moment="finalize", delay_s=0.0, silent=False),
        Part(mode="chat", seconds=0, step=3, moment="between", delay_s=0.0, silent=False),
    ]
    found = Found()
    compare(parts, tmp_path, found, Load())
    assert found.failures == []
    assert (found.counts["compared"], found.counts["lost"]) == (3, 3)


def test_all_sessions_of_a_worker_go_on_without_it(tmp_path: Path) -> None:
    """A worker that dies with many sessions would end some of them."""
    found, modes = Found(), ("audio", "video", "audio")
    one_round(
        *(tmp_path, Random(5), found, Load()),
        rebuild="fast",
        modes=modes,
        model="scripted",
        pace_s=0.4,
    )
    assert found.failures == []
    assert found.counts["rebuilds"] == len(modes)
