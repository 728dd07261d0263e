"""Eight sessions on one worker, which is killed; two workers are left, and all eight go on.

    one worker, eight sessions -> two more are added -> kill -9 of the first -> to the end

The workers are real processes with eight slots each, found at addresses. Sound comes as in life, a
second each second, so that units that are late count.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Final

from protocol.values.limits import Mode
from tests.live.servers import LiveServer, live_server
from tests.live.test_worker import LiveWorker, live_worker
from tests.network.requesting import request
from tests.sessions.outliving import Found, Load, Talk, hold
from tests.soak.worker_twins import roster

MODES: Final[tuple[Mode, ...]] = (
    *("audio", "audio", "audio", "video", "video", "video"),
    *("transcription", "transcription"),
)
"""Those that hold a slot to their end: a chat would ask on one of the others."""
KILL_S_MAX: Final = 3.0
SECONDS_MIN: Final = 8
"""Of those who talk: they do so until after the kill."""
ROUND_S_MAX: Final = 120
SLOTS: Final = 8
COUNTED: Final = ("units_late", "units_dropped")
"""Counters of the server that would show it, if the others suffered."""


async def talk_and_kill(
    server: LiveServer,
    workers: list[LiveWorker],
    modes: Sequence[Mode],
    chance: Random,
    pace_s: float = 1.0,
) -> list[Talk]:
    """Hold conversations on the first worker, add the others, and kill the first."""
    async with asyncio.timeout(ROUND_S_MAX), asyncio.TaskGroup() as tasks:
        held = [
            tasks.create_task(hold(server.url, mode, _lasting(chance), pace_s)) for mode in modes
        ]
        await asyncio.to_thread(_bring_others, server, workers[1:], len(modes))
        await asyncio.sleep((1 + KILL_S_MAX * chance.random()) * pace_s)
        os.kill(workers[0].process.pid, signal.SIGKILL)
    return [task.result() for task in held]


def _bring_others(server: LiveServer, workers: list[LiveWorker], count: int) -> None:
    """Add workers once the first one has as many sessions."""
    until_s = time.monotonic() + ROUND_S_MAX
    while roster(server)[0]["leased"] < count:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    for worker in workers:
        body = json.dumps({"address": str(worker.address)}).encode()
        added = request(server.address, "/api/workers", method="POST", body=body, headers={})
        assert added.status == 201, added.said


def _lasting(chance: Random) -> int:
    """Draw the seed of a client that talks for long, see `speak`."""
    while Random(seed := chance.getrandbits(32)).randint(4, 11) < SECONDS_MIN:
        pass
    return seed


def count_metrics(server: LiveServer, found: Found) -> None:
    """Add the server's counters to what was found."""
    text = request(server.address, "/metrics", headers={}).body.decode()
    for name in COUNTED:
        values = re.findall(rf"^antiphon_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        found.counts[name] += int(sum(map(float, values)))


def one_round(
    folder: Path,
    chance: Random,
    found: Found,
    load: Load,
    *,
    rebuild: str,
    modes: Sequence[Mode] = MODES,
    model: str = "tiny",
    pace_s: float = 1.0,
) -> None:
    """Lose the worker of all sessions, and judge them; `folder` is empty."""
    logs = folder / "logs"
    addresses = [f"unix:{folder}/worker-{number}" for number in range(3)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(live_worker("--slots", str(SLOTS), model=model, listen=address))
            for address in addresses
        ]
        options = ("--worker-address", addresses[0], "--record", str(logs), "--rebuild", rebuild)
        server = stack.enter_context(live_server(*options))
        talks = asyncio.run(talk_and_kill(server, workers, modes, chance, pace_s))
        count_metrics(server, found)
        assert server.stop() == 0
    lost = found.counts["lost"]
    for path in sorted(logs.glob("*.session.zst")):
        found.judge(path, talks, load)
    if found.counts["lost"] != lost + len(talks):
        found.failures.append(f"{found.counts['lost'] - lost} sessions lost their worker, not all")


def soak(
    seed: int, rounds: int, folder: Path, found: Found, load: Load, *, rebuild: str = "exact"
) -> None:
    """Lose as many workers, each under eight sessions."""
    chance = Random(seed)
    for number in range(rounds):
        here = folder / str(number)
        here.mkdir(parents=True)
        one_round(here, chance, found, load, rebuild=rebuild)
        print(f"{number + 1} of {rounds} crowds, {found.failures}", file=sys.stderr)
