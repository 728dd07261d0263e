"""Connections that are cut at any byte, again and again: `make soak`.

    python -m tests.soak_cuts [--conversations N] [--seed S] [--out FOLDER]

A real `antiphon serve` that records, a proxy that cuts connections after some bytes, also while a
client comes back, and clients of every dialect that come back by themselves. For each conversation:
the messages that the client sent are those that the log holds, each once; so are the frames that it
heard; and the log replays.

The cuts are drawn from one seed, the kernel's timing is not. What was found goes to `cuts.json`,
without a date; it exits with 1 where anything was not so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import anyio

from recorder.keep.store import Store
from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from tests.cutting import cutting
from tests.live.servers import LiveServer, live_server
from tests.resumed import KINDS, Told, converse, cuts_of, heard_and_said

CONVERSATIONS: Final = 200


def one(server: LiveServer, folder: Path, kind: str, seed: str, found: Counter[str]) -> str:
    """Have one conversation; returns what was wrong, or nothing."""
    rng, told = random.Random(seed), Told()
    cuts = cuts_of(kind, rng)
    with cutting(server.address, cuts=cuts) as cutter:
        try:
            anyio.run(converse, kind, f"ws://127.0.0.1:{cutter.port}", told, rng)
        except Exception as error:  # what it is stands in the evidence
            return f"{kind}, {seed}, {cuts}: {error!r}"
        found["connections"] += cutter.connections
        found["cuts"] += min(cutter.connections - 1, len(cuts))
    path = Store(folder).path(told.recording_id)
    heard, said = heard_and_said(path)
    found["frames"] += len(said)
    found["messages"] += len(heard)
    with LogReader(path) as log:
        is_same = replay(log).identical
    if told.heard != said or told.sent != heard or not is_same:
        counts = f"heard {len(told.heard)} of {len(said)}, sent {len(told.sent)} of {len(heard)}"
        return f"{kind}, {seed}, {cuts}: {counts}, replay {is_same}"
    return ""


def main() -> int:
    """Soak, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    asked = parser.parse_args()
    found, failures, began_s = Counter[str](), list[str](), time.monotonic()
    kinds = tuple(KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with live_server("--record", name, "--slots", "8") as server:
            for number in range(asked.conversations):
                kind = kinds[number % len(kinds)]
                wrong = one(server, folder, kind, f"{asked.seed} {number}", found)
                found[kind] += 1
                failures += [wrong] if wrong else []
                if (number + 1) % 20 == 0:
                    print(f"{number + 1} conversations, {len(failures)} failed", file=sys.stderr)
    evidence = {
        "what": "connections cut at random bytes amid conversations, which went on without a loss",
        "good": not failures,
        "seed": asked.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "conversations": asked.conversations,
        **found,
        "failures": failures,
    }
    (asked.out / "cuts.json").write_text(json.dumps(evidence, indent=2) + "\n", "utf-8")
    print(json.dumps(evidence, indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
