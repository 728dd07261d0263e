"""A model judged on a folder of many recordings: memory, and kills; `make soak`.

    python -m tests.soak_folder [--sessions N] [--out docs/evidence]

Records N short sessions of the scripted model, then runs `antiphon eval --mode open` over a quarter
of them and over all, each in a process of its own whose memory is read, and again under SIGKILLs
until it is done: it must give what the whole run gave. What was found goes to `folder.json`,
without a date; it exits with 1 if results differ, or if a session more takes over 100 kB: its row
of the summary is kept, its sound is not. With few sessions that figure is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np

from runtime.commands.server_process import RUN
from tests.helpers import base64, close_frame, on_virtual_time, world

SECONDS: Final = 5
KILLS: Final = 8
KB_A_SESSION_MAX: Final = 100


def record(folder: Path, count: int) -> list[Path]:
    """Record sessions as a server does; they differ in their sound and their seed."""

    async def talk(number: int) -> None:
        async with world(None, record_to=folder) as server:
            server.server._identities.drawn = number
            peer = await server.activate("audio")
            noise = np.random.default_rng(number)
            for _ in range(SECONDS):
                await anyio.sleep(1)
                pcm = (0.1 * noise.standard_normal(16_000)).astype("<f4").tobytes()
                peer.send(json.dumps({"type": "input.append", "input": {"audio": base64(pcm)}}))
            await anyio.sleep(2)
            peer.send(close_frame())
            await peer.over()

    folder.mkdir()
    for number in range(count):
        on_virtual_time(partial(talk, number))
    return sorted(folder.glob("*.zst"))


def command(folder: Path, out: Path) -> list[str]:
    """Make the command that is measured."""
    how = ("--mode", "open", "--model", "scripted", "--jobs", "16", "--json", "--out", str(out))
    return [*RUN, "eval", str(folder), *how]


def whole(folder: Path, out: Path) -> tuple[bytes, dict[str, Any]]:
    """Run it once; give what it prints, and what it took."""
    began = time.monotonic()
    process = subprocess.Popen(command(folder, out), stdout=subprocess.PIPE, stderr=sys.stderr)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return said, {
        "sessions": len(json.loads(said)["recordings"]),
        "exit_code": process.returncode,
        "memory_mb": used.ru_maxrss // 1024,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }


def killed(folder: Path, out: Path, whole_s: float) -> tuple[bytes, int]:
    """Kill it several times on its way, then let it end."""
    for kill in range(KILLS):
        process = subprocess.Popen(command(folder, out), stdout=subprocess.PIPE)
        try:
            said, _ = process.communicate(timeout=max(3.0, whole_s / KILLS))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        else:
            return said, kill
    return subprocess.run(command(folder, out), capture_output=True, check=False).stdout, KILLS


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, few = Path(place, "all"), Path(place, "few")
        logs = record(folder, asked.sessions)
        few.mkdir()
        for log in logs[: len(logs) // 4]:
            (few / log.name).hardlink_to(log)
        _, quarter = whole(few, Path(place, "quarter"))
        said, costs = whole(folder, Path(place, "whole"))
        again, kills = killed(folder, Path(place, "again"), costs["wall_s"])
        is_same = again.replace(b"/again/", b"/whole/") == said
    more_mb, more = (costs[name] - quarter[name] for name in ("memory_mb", "sessions"))
    growth_kb = round(1024 * more_mb / more)
    good = is_same and growth_kb <= KB_A_SESSION_MAX and costs["sessions"] == asked.sessions
    found = {
        "what": "eval --mode open --model scripted over a folder, whole and killed",
        "good": good,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "seconds_each": SECONDS,
        "whole": costs,
        "a_quarter": quarter,
        "kb_a_session_more": growth_kb,
        "kills": kills,
        "same_after_kills": is_same,
    }
    text = json.dumps(found, indent=1) + "\n"
    (asked.out / "folder.json").write_text(text, "utf-8")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
