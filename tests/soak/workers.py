"""Workers that are killed under conversations, at a random moment, again and again: `make soak`.

    python -m tests.soak.workers [--sessions N] [--twins N] [--crowds N] [--seed S] [--out FOLDER]

Rounds: a real `antiphon serve --isolate` with two worker processes of `tiny`, recording. Clients
talk with sound, with sound and pictures, are written down, or ask; some interrupt. Amid that one
worker process is killed with SIGKILL; the server starts another. Then the next round begins.

Twins (`worker_twins`): sessions whose worker is killed, compared with the same without a loss.
Crowds (`worker_crowd`): a worker with eight sessions is killed, and two are left. Once with
`--rebuild exact`, once with `fast`.

Held to, for each session:

- It goes on to the end that its client asked for. What the client heard is what its log holds as
  sent, byte for byte and in order.
- Its log replays, and a full replay comes to the same: the model of a replay is never killed, so a
  session that was rebuilt exactly is, byte for byte, the one that did not lose its worker. Where it
  was rebuilt fast, the replay rebuilds the model there in the same way.

The choices are drawn from one seed, the kernel's timing is not. What was found goes to
`workers.json`, without a date; it exits with 1 where anything was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.live.servers import LiveServer, live_server
from tests.live.test_placement import workers_of
from tests.project.evidence import add_out
from tests.sessions.outliving import Found, Load, Talk, hold, spread

from . import worker_crowd as crowd
from . import worker_twins as twins

SESSIONS: Final = 60
"""Of the rounds; a third or more lose their worker."""
TWINS: Final = 60
"""Not all are killed in time."""
CROWDS: Final = 5
AT_ONCE: Final = 4
ROUND_S_MAX: Final = 180
WORKERS: Final = 2
KILL_S_MAX: Final = 2.0
BACK_S_MAX: Final = 120
LOAD_S: Final = 4.0
"""A worker process loads its model in some seconds; the next kill must find both there."""


async def one_round(server: LiveServer, chance: Random, killed: int) -> list[Talk]:
    """Some conversations at once; one worker process is killed amid them."""
    modes = [chance.choice(("audio", "video", "transcription", "chat")) for _ in range(AT_ONCE)]
    async with asyncio.timeout(ROUND_S_MAX), asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(hold(server.url, mode, chance.getrandbits(32))) for mode in modes]
        await asyncio.sleep(0.2 + KILL_S_MAX * chance.random())
        os.kill(killed, signal.SIGKILL)
    return [task.result() for task in held]


def _is_whole(server: LiveServer, killed: int) -> bool:
    return len(set(workers_of(server)) - {killed}) == WORKERS


def soak(seed: int, sessions: int, found: Found, load: Load) -> None:
    """Hold as many sessions, and judge them."""
    chance, talks = Random(seed), list[Talk]()
    with tempfile.TemporaryDirectory() as folder:
        options = ("--isolate", "--worker", "tiny", "--slots", "4", "--record", folder)
        with live_server(*options, model="tiny") as server:
            while len(talks) < sessions:
                killed = chance.choice(sorted(workers_of(server)))
                talks += asyncio.run(one_round(server, chance, killed))
                until_s = time.monotonic() + BACK_S_MAX
                while not _is_whole(server, killed):  # the server waits longer after each kill
                    assert time.monotonic() < until_s
                    time.sleep(0.2)
                time.sleep(LOAD_S)
                print(f"{len(talks)} of {sessions} sessions", file=sys.stderr, flush=True)
        for path in sorted(Path(folder).glob("*.session.zst")):
            found.judge(path, talks, load)


def told(found: Found) -> dict[str, Any]:
    """What was found, as it is kept."""
    return {
        **dict(sorted(found.counts.items())),
        "rebuild_s": spread(found.rebuilds_s),
        "loss_to_next_frame_s": spread(found.silences_s),
        "failures": found.failures,
    }


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--twins", type=int, default=TWINS)
    parser.add_argument("--crowds", type=int, default=CROWDS)
    parser.add_argument("--seed", type=int, default=7)
    add_out(parser)
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    began_s, load = time.monotonic(), Load()
    parts = {name: Found() for name in ("rounds", "twins", "crowds", "crowds_fast")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        twins.soak(given.seed, given.twins, folder / "twins", parts["twins"], load)
        crowd.soak(given.seed, given.crowds, folder / "crowds", parts["crowds"], load)
        fast = folder / "crowds_fast"
        crowd.soak(given.seed, given.crowds, fast, parts["crowds_fast"], load, rebuild="fast")
        soak(given.seed, given.sessions, parts["rounds"], load)
    result = {
        "what": "worker processes killed amid conversations, which went on, byte for byte",
        "good": all(not found.failures and found.counts["lost"] for found in parts.values()),
        "seed": given.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **{name: told(found) for name, found in parts.items()},
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    text = json.dumps(result, indent=2) + "\n"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "workers.json").write_text(text, "utf-8")
    print(text)
    if not result["good"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
