"""A model judged on a folder of many recordings: memory, and kills; `make soak`.

    python -m tests.soak.folder [--sessions N] [--only RUN] [--out docs/evidence]

Records N short sessions, then runs `antiphon eval` over a quarter of them and over all, each in a
process of its own whose memory is read, and again under SIGKILLs until it is done: it must give
what the whole run gave. There are three runs:

- `scripted open`: sessions of the scripted model, which costs nothing.
- `tiny open`: `tiny` hears the same clients, who speak.
- `tiny forced`: `tiny` is judged on the logs that `tiny open` made.

What was found goes to `folder.json`, without a date; `--only` replaces one run there (`tiny forced`
needs `tiny open`, which is then made, and not measured). It exits with 1 if results differ, or if
all sessions take over 1.2 times the memory of a quarter. Of a session 2 to 5 kB are held
(tracemalloc); the rest is what 16 sessions need for a moment, and what malloc has not given back:
of 156 MB after 400 sessions `malloc_trim` returns half. With few sessions it says little.
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
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np

from protocol.values.model import INPUT_RATE_HZ
from runtime import RUN
from tests.bench.tiny.staging import known_phrases, read_speech, room
from tests.generated.clients import HELDOUT
from tests.project.evidence import add_out
from tests.sessions.in_memory import base64, close_frame, on_virtual_time, world

SECONDS: Final = 5
KILLS: Final = 8
GROWTH_MAX: Final = 1.2
SMALL: Final = """
import json, os, subprocess, sys
started = subprocess.Popen(sys.argv[2:])
_, status, used = os.wait4(started.pid, 0)
took = [os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime]
open(sys.argv[1], "w").write(json.dumps(took))
"""
"""Starts a command from a small process and says what it used: Linux counts its parent's memory."""
OPEN, HEARD, FORCED = RUNS = ("scripted open", "tiny open", "tiny forced")


def record(folder: Path, count: int) -> None:
    """Record sessions as a server does; they differ in what the user says, and in their seed."""
    items = known_phrases(HELDOUT)

    async def talk(number: int) -> None:
        sound = room(SECONDS * INPUT_RATE_HZ, number)
        speech = read_speech(HELDOUT, items[number % len(items)])[: 2 * INPUT_RATE_HZ]
        sound[: len(speech)] += speech
        async with world(None, record_to=folder) as server:
            server.server._identities.drawn = number
            peer = await server.activate("audio")
            for second in np.split(sound, SECONDS):
                await anyio.sleep(1)
                audio = base64(second.astype("<f4").tobytes())
                peer.send(json.dumps({"type": "input.append", "input": {"audio": audio}}))
            await anyio.sleep(2)
            peer.send(close_frame())
            await peer.over()

    folder.mkdir()
    for number in range(count):
        on_virtual_time(partial(talk, number))


def command(run: str, folder: Path, out: Path) -> list[str]:
    """Make the command that is measured."""
    model, mode = run.split()
    how = ("--mode", mode, "--model", model, "--jobs", "16", "--json", "--out", str(out))
    return [*RUN, "eval", str(folder), *how]


def whole(run: str, folder: Path, out: Path) -> tuple[bytes, dict[str, Any]]:
    """Run it once; give what it prints, and what it took."""
    began, kept = time.monotonic(), out.parent / "used.json"
    small = [sys.executable, "-I", "-c", SMALL, str(kept), *command(run, folder, out)]
    said = subprocess.run(small, stdout=subprocess.PIPE, check=True).stdout
    exit_code, memory_kb, cpu_s = json.loads(kept.read_text("utf-8"))
    return said, {
        "sessions": sum(it["result"] == "measured" for it in json.loads(said)["recordings"]),
        "exit_code": exit_code,
        "memory_mb": memory_kb // 1024,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s, 1),
    }


def killed(run: str, folder: Path, out: Path, whole_s: float) -> tuple[bytes, int]:
    """Kill it several times on its way, then let it end."""
    for kill in range(KILLS):
        process = subprocess.Popen(command(run, folder, out), stdout=subprocess.PIPE)
        try:
            said, _ = process.communicate(timeout=max(3.0, whole_s / KILLS))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        else:
            return said, kill
    return subprocess.run(command(run, folder, out), capture_output=True, check=False).stdout, KILLS


def linked(logs: Iterable[Path], folder: Path) -> Path:
    """Make a folder with these logs."""
    folder.mkdir()
    for log in logs:
        (folder / log.name).hardlink_to(log)
    return folder


def measured(run: str, logs: list[Path], place: Path) -> dict[str, Any]:
    """Run it over a quarter of the logs and over all, whole and killed."""
    folder, few = linked(logs, place / "all"), linked(logs[: len(logs) // 4], place / "few")
    _, quarter = whole(run, few, place / "quarter")
    said, costs = whole(run, folder, place / "whole")
    again, kills = killed(run, folder, place / "again", costs["wall_s"])
    is_same = again.replace(b"/again/", b"/whole/") == said
    growth = costs["memory_mb"] / quarter["memory_mb"]
    more_mb, more = (costs[name] - quarter[name] for name in ("memory_mb", "sessions"))
    return {
        "good": is_same and growth <= GROWTH_MAX and costs["sessions"] == len(logs),
        "whole": costs,
        "a_quarter": quarter,
        "memory_growth": round(growth, 2),
        "kb_a_session_more": round(1024 * more_mb / more),
        "kills": kills,
        "same_after_kills": is_same,
    }


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--only", choices=RUNS)
    add_out(parser)
    asked = parser.parse_args()
    kept = asked.out / "folder.json"
    found = json.loads(kept.read_text("utf-8")) if asked.only and kept.is_file() else {}
    runs = dict(found.get("runs", {}))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        record(place / "recorded", asked.sessions)
        logs = sorted((place / "recorded").glob("*.zst"))
        for run in RUNS if asked.only is None else (asked.only,):
            if run == FORCED:
                made = place / HEARD / "whole"
                if not made.is_dir():
                    subprocess.run(
                        command(HEARD, place / "recorded", made),
                        stdout=subprocess.DEVNULL,
                        check=True,
                    )
                logs = sorted(made.glob("*/*.zst"))
            (place / run).mkdir(exist_ok=True)
            runs[run] = measured(run, logs, place / run)
            print(run, json.dumps(runs[run]), flush=True)
    good = all(run["good"] for run in runs.values())
    found = {
        "what": "eval --mode open and forced over a folder, whole and killed",
        "good": good,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "seconds_each": SECONDS,
        "runs": {run: runs[run] for run in RUNS if run in runs},
    }
    kept.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
