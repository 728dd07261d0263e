"""Worker processes of `tiny` are killed amid conversations, which go on byte for byte.

`tests.soak_workers` does it for longer, at any moment; here the kill comes amid a session's sound.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Final

from tests.live.servers import LiveServer, live_server
from tests.live.test_placement import workers_of
from tests.soak_workers import Found, Load, Talk, hold

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
