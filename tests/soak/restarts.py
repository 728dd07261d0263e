"""Servers that are killed amid a dozen conversations and started again at once: `make soak`.

    python -m tests.soak.restarts [--kills N] [--model NAME] [--seed S] [--out FOLDER]

A real `antiphon serve --resumable` that records, on one port, with its model in a worker that
stays; clients of every dialect that come back by themselves. Each round, the server is killed with
kill -9 at a random moment (every fourth: stopped by SIGTERM), and another is started on the same
folder. For each conversation: the messages that the client sent are those that the log holds, each
once; so are the frames that it heard; the log is whole, and replays, also with the model.

The moments are drawn from one seed, the kernel's timing is not. What was found goes to
`restarts.json`, without a date; it exits with 1 where anything was not so.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import anyio

from recorder.read.reader import RESTARTED, read
from recorder.repair import verify
from recorder.storage.store import Store
from tests.live.servers import live_server
from tests.live.test_worker import live_worker
from tests.project.evidence import add_out
from tests.sessions.outliving import Load, differences
from tests.sessions.resumed import KINDS, Told, converse, heard_and_said

KILLS: Final = 50
TOGETHER: Final = 12
REFUSED: Final = "refused the session"
"""What a client says where the server is loading or stopping."""
ENDS: Final = ("finished", "open")
"""Of a log: open where its client had all and left in the moment when its server was stopped."""
LIFE_S_MAX: Final = 5.0
"""Of a server: a client whose wait has grown must find one some time."""
TURN_LOST: Final = '"inference_error"'
"""A turn is asked again once: a second loss ends it with this error, and the chat goes on."""
AWAY_S: Final = 30.0
"""Of a client, on a busy machine: then a session that is not set up has ended (docs/resume.md)."""
FLAGS: Final = ("--resumable", "--drain-s", "0")


def free_port() -> int:
    """A port that no one listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def talk(kind: str, url: str, seed: str, told: Told, model: str) -> str:
    """Have one conversation; returns what was wrong, or nothing."""
    try:
        anyio.run(converse, kind, url, told, random.Random(seed), model)
    except Exception as error:  # what it is stands in the evidence
        return f"{kind}, {seed}: {error!r}"
    return ""


def judge(
    folder: Path, kind: str, seed: str, told: Told, found: Counter[str], *, load: Load
) -> str:
    """Hold what a client sent and heard to its log."""
    path = Store(folder).path(told.recording_id)
    if not path.exists():
        return f"{kind}, {seed}: there is no log"
    heard, said = heard_and_said(path)
    wrong = differences(path, load)
    state = verify(path).state
    found["frames"] += len(said)
    found["messages"] += len(heard)
    found["turns that lost their server twice"] += sum(TURN_LOST in frame for frame in said)
    restarts = sum(it.kind == "mark" and it.fields == RESTARTED for it in read(path))
    found["sessions taken up"] += restarts > 0
    found["times taken up"] += restarts
    found["left open"] += state == "open"
    if told.heard == said and told.sent == heard and not wrong and state in ENDS:
        return ""
    counts = f"heard {len(told.heard)} of {len(said)}, sent {len(told.sent)} of {len(heard)}"
    return f"{kind}, {seed}: {counts}, {state}, {wrong}"


def soak(
    ends: Sequence[str],
    seed: int,
    folder: Path,
    found: Counter[str],
    *,
    together: int = TOGETHER,
    model: str = "scripted",
) -> list[str]:
    """Keep conversations going over servers that are killed or stopped; returns what was wrong."""
    rng, port, failures, over = random.Random(seed), free_port(), list[str](), threading.Event()
    url, kinds, told_of = f"ws://127.0.0.1:{port}", tuple(KINDS), list[tuple[str, str, Told]]()

    def go_on_talking(place: int) -> None:
        number = place
        while not over.is_set():
            kind, told, drawn = kinds[number % len(kinds)], Told(), f"{seed} {number}"
            wrong = talk(kind, url, drawn, told, model)
            if wrong and (not told.recording_id or REFUSED in wrong):  # it did not begin
                time.sleep(0.2)
                continue
            if wrong and told.silent_s > AWAY_S:
                found["ended while their client was away"] += 1
                continue
            failures.extend([wrong] if wrong else [])
            told_of.append((kind, drawn, told))
            number += together

    address = f"tcp:127.0.0.1:{free_port()}"
    worker = live_worker("--slots", "16", model=model, listen=address)
    with worker, ThreadPoolExecutor(together) as threads:
        for number, end in enumerate((*ends, "over")):
            words = ("--record", str(folder), "--port", str(port), "--worker-address", address)
            with live_server(*words, *FLAGS) as server:
                if number == 0:
                    for place in range(together):
                        threads.submit(go_on_talking, place)
                time.sleep(rng.uniform(1.0, LIFE_S_MAX))
                found[f"servers: {end}"] += 1
                if end == "over":
                    over.set()
                    threads.shutdown()
                elif end == "stopped":
                    server.stop()
                else:
                    server.kill()
            if number % 10 == 9:
                print(f"{number + 1} servers, {len(failures)} failures", file=sys.stderr)
    found["conversations"] = len(told_of)
    at_once = together if model == "scripted" else 1  # which takes its time, and no processor's
    own = threading.local()

    def judged(one: tuple[str, str, Told]) -> tuple[str, Counter[str]]:
        own.load = getattr(own, "load", None) or Load()
        seen = Counter[str]()
        return judge(folder, *one, seen, load=own.load), seen

    with ThreadPoolExecutor(at_once) as threads:
        for wrong, seen in threads.map(judged, told_of):
            failures += [wrong] if wrong else []
            found.update(seen)
    return failures


def main() -> int:
    """Soak, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=7)
    add_out(parser)
    asked = parser.parse_args()
    found, began_s = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        ends = ["stopped" if number % 4 == 3 else "killed" for number in range(asked.kills)]
        failures = soak(ends, asked.seed, Path(name), found, model=asked.model)
    evidence = {
        "what": "servers killed or stopped amid a dozen conversations, which the next one went on",
        "good": not failures,
        "model": asked.model,
        "seed": asked.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **found,
        "failures": failures,
    }
    (asked.out / "restarts.json").write_text(json.dumps(evidence, indent=2) + "\n", "utf-8")
    print(json.dumps(evidence, indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
