"""Connections that are cut at any byte, again and again: `make soak`.

    python -m tests.soak.cuts [--conversations N] [--model NAME] [--seed S] [--out FOLDER]

Two real `antiphon serve` that record and know each other, a proxy that sends each connection to
the other one and cuts it after some bytes, also while a client comes back, and clients of every
dialect that come back by themselves. For each conversation: the messages that the client sent are
those that the log holds, each once; so are the frames that it heard; and the log replays, without
and with the model: so it is the conversation that the same messages give without a cut.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import attrs

from recorder.storage.store import Store
from tests.live.servers import LiveServer, live_server
from tests.network.cutting import cutting
from tests.project.evidence import add_out
from tests.sessions.outliving import Load, differences
from tests.sessions.resumed import KINDS, Told, converse, cuts_of, heard_and_said
from tests.soak.restarts import free_port

CONVERSATIONS: Final = 200
TOGETHER: Final = 6


@attrs.define
class Gateways:
    """Servers that know each other, each with its folder of recordings."""

    servers: list[LiveServer]
    folders: list[Path]

    def log_of(self, recording_id: str) -> Path:
        """A recording's log, which is in one of the folders."""
        paths = [Store(folder).path(recording_id or "none") for folder in self.folders]
        return next((path for path in paths if path.exists()), paths[0])


@contextmanager
def gateways(folder: Path, *flags: str, model: str = "scripted") -> Iterator[Gateways]:
    """Run two servers with the same list of both."""
    ports, folders = [free_port(), free_port()], [folder / "one", folder / "two"]
    known = [word for port in ports for word in ("--gateway", f"http://127.0.0.1:{port}")]
    with ExitStack() as running:
        servers = list[LiveServer]()
        for port, logs in zip(ports, folders, strict=True):
            words = ("--port", str(port), "--record", str(logs), *known, *flags)
            servers.append(running.enter_context(live_server(*words, model=model)))
        yield Gateways(servers, folders)


@attrs.define
class Judged:
    """What came of one conversation."""

    kind: str
    seed: str
    cuts: list[int]
    told: Told = attrs.field(factory=Told)
    connections: int = 0
    wrong: str = ""


def talk(to: Gateways, model: str, seed: int, number: int) -> Judged:
    """Have one conversation."""
    kind = tuple(KINDS)[number % len(KINDS)]
    rng = random.Random(f"{seed} {number}")
    made = Judged(kind, f"{seed} {number}", cuts_of(kind, rng))
    addresses = [server.address for server in rng.sample(to.servers, len(to.servers))]
    with cutting(*addresses, cuts=made.cuts) as cutter:
        try:
            anyio.run(converse, kind, f"ws://127.0.0.1:{cutter.port}", made.told, rng, model)
        except Exception as error:  # what it is stands in the evidence
            made.wrong = repr(error)
        made.connections = cutter.connections
    return made


def judge(made: Judged, log: Path, found: Counter[str], load: Load) -> str:
    """Hold a conversation to its log; returns what was wrong, or nothing."""
    name = f"{made.kind}, {made.seed}, {made.cuts}"
    found["conversations"] += 1
    found[made.kind] += 1
    found["connections"] += made.connections
    found["cuts"] += min(made.connections - 1, len(made.cuts))
    if made.wrong or not log.exists():
        return f"{name}: {made.wrong or 'there is no log'}"
    heard, said = heard_and_said(log)
    found["frames"] += len(said)
    found["messages"] += len(heard)
    told, wrong = made.told, differences(log, load)
    found["replayed with the model"] += not wrong
    if told.heard != said or told.sent != heard or wrong:
        counts = f"heard {len(told.heard)} of {len(said)}, sent {len(told.sent)} of {len(heard)}"
        return f"{name}: {counts}, {wrong}"
    return ""


def soak(
    folder: Path, model: str, numbers: Sequence[int], seed: int, found: Counter[str]
) -> list[str]:
    """Have conversations, some at once; returns what was wrong."""
    failures, load = list[str](), Load()
    with (
        gateways(folder, "--slots", "8", model=model) as to,
        ThreadPoolExecutor(TOGETHER) as threads,
    ):
        for made in threads.map(partial(talk, to, model, seed), numbers):
            log = to.log_of(made.told.recording_id)
            found[f"of gateway {log.parent.name}"] += 1
            wrong = judge(made, log, found, load)
            failures += [wrong] if wrong else []
            if found["conversations"] % 20 == 0:
                print(f"{found['conversations']}: {len(failures)} failed", file=sys.stderr)
    return failures


def main() -> int:
    """Soak, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=7)
    add_out(parser)
    asked = parser.parse_args()
    found, began_s = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        numbers = range(asked.conversations)
        failures = soak(Path(name), asked.model, numbers, asked.seed, found)
    evidence = {
        "what": "connections cut at random bytes amid conversations, which went on without a loss",
        "good": not failures,
        "model": asked.model,
        "seed": asked.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **dict(sorted(found.items())),
        "failures": failures,
    }
    (asked.out / "cuts.json").write_text(json.dumps(evidence, indent=2) + "\n", "utf-8")
    print(json.dumps(evidence, indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
