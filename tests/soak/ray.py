"""Nodes of a Ray cluster that are killed under conversations, again and again: `make soak`.

    python -m tests.soak.ray [--rounds N] [--seed S] [--out docs/evidence]

Two raylets on this machine, each with one GPU that it only claims to have, and a real `antiphon
serve --placement ray` with two workers of `tiny`, recording. Clients hold one conversation after
the other, of all kinds, on both workers. Then the raylet of the second node is killed with SIGKILL,
and Ray ends the worker with it. Its sessions go on with the other worker; after the round another
node is started, where Ray starts the worker again.

Held to, for each session, as in `tests/soak/workers.py`: it goes on to the end that its client
asked for, its client heard what its log holds as sent, and its log replays, in logic and in full.

What was found goes to `ray.json`, without a date; it exits with 1 where anything was not so. It
needs `examples/ray_placement`, and ends its own Ray processes only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, Final

import attrs
import ray

from tests.live.servers import LiveServer, live_server
from tests.live.test_placement import antiphon
from tests.project.evidence import add_out
from tests.soak.workers import Found, Load, Talk, hold, spread

ROUNDS: Final = 8
AT_ONCE: Final = 4
"""Two on each worker, and all of them on one when the other is lost."""
ROUND_S_MAX: Final = 180
TALK_S: Final = 3.0
"""Of conversations on both workers, before the node is killed."""
BACK_S_MAX: Final = 120
MODES: Final = ("audio", "video", "transcription", "chat")
STORE_BYTES: Final = 100_000_000
"""Of each node's object store, which nothing uses."""


@attrs.define
class Nodes:
    """The raylets of one cluster; `address` is of its head, and its files are in `folder`."""

    folder: Path
    address: str

    def start(self, *arguments: str) -> int:
        """Start a node with a GPU; return the process id of its raylet."""
        before = self.raylets()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
        command += ["--num-gpus", "1", "--num-cpus", "1"]
        command += ["--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=BACK_S_MAX, check=False
        )
        assert ran.returncode == 0, ran.stderr
        (started,) = self.raylets() - before
        return started

    def start_head(self) -> int:
        """Start the node that the server and its connection to Ray are on."""
        head = ("--head", "--port", self.address.rpartition(":")[2], "--include-dashboard", "false")
        return self.start(*head, "--temp-dir", str(self.folder))

    def start_other(self) -> int:
        """Start a further node."""
        return self.start("--address", self.address)

    def raylets(self) -> set[int]:
        """The process ids of the raylets that run."""
        return {pid for pid, command in self.processes() if b"raylet/raylet\0" in command}

    def processes(self) -> Iterator[tuple[int, bytes]]:
        """All processes that name the folder, with their command lines."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if bytes(self.folder) in command and int(path.name) != os.getpid():
                yield int(path.name), command

    def end(self) -> None:
        """End all processes; what Ray starts without the folder's name ends with its raylet."""
        until_s = time.monotonic() + BACK_S_MAX
        while (there := list(self.processes())) and time.monotonic() < until_s:
            for pid, _ in there:
                kill(pid)
            time.sleep(0.2)


def kill(pid: int) -> None:
    """Kill a process that may have ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def cluster() -> Iterator[Nodes]:
    """A cluster with one node, its head."""
    with socket.socket() as free:
        free.bind(("", 0))
        address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a socket's path must be short
    nodes = Nodes(folder, address)
    try:
        nodes.start_head()
        yield nodes
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)


def workers(server: LiveServer) -> list[dict[str, Any]]:
    """The workers of the server, as `antiphon workers list` shows them."""
    told = antiphon("workers", "list", "--url", server.url.removesuffix("/v1/realtime"), "--json")
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


def serving(server: LiveServer) -> list[dict[str, Any]]:
    """Those that serve."""
    return [worker for worker in workers(server) if worker["state"] == "serving"]


def wait(condition: Callable[[], bool]) -> float:
    """Wait until a condition holds; return the seconds."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < BACK_S_MAX
        time.sleep(0.1)
    return time.monotonic() - began_s


async def one_round(server: LiveServer, chance: Random, killed: int) -> list[Talk]:
    """Conversations, one after the other, until the worker of the killed node is lost."""
    is_lost = asyncio.Event()
    talks: list[Talk] = []

    async def talk(seed: int) -> None:
        own = Random(seed)
        while not is_lost.is_set():
            talks.append(await hold(server.url, own.choice(MODES), own.getrandbits(32)))

    async with asyncio.timeout(ROUND_S_MAX), asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(talk(chance.getrandbits(32)))
        await asyncio.sleep(TALK_S * (1 + chance.random()))
        there = await asyncio.to_thread(serving, server)
        assert all(each["leased"] for each in there)
        os.kill(killed, signal.SIGKILL)
        await asyncio.to_thread(wait, lambda: len(serving(server)) == 1)
        is_lost.set()
    return talks


def soak(seed: int, rounds: int, found: Found) -> list[float]:
    """Hold the rounds, and judge all sessions; return how long each worker took to come back."""
    chance, talks, back_s = Random(seed), list[Talk](), list[float]()
    with tempfile.TemporaryDirectory() as folder, cluster() as nodes:
        address = ("--placement", f"ray:{nodes.address}")
        options = ("--workers-wanted", "2", "--slots", "4", "--record", folder)
        with live_server(*address, *options, model="tiny") as server:
            for number in range(rounds):
                raylet = nodes.start_other()
                back_s.append(wait(lambda: len(serving(server)) == 2))
                talks += asyncio.run(one_round(server, chance, raylet))
                found.counts["nodes_killed"] += 1
                print(f"{number + 1} of {rounds} nodes", file=sys.stderr, flush=True)
        load = Load()
        for path in sorted(Path(folder).glob("*.session.zst")):
            found.judge(path, talks, load)
    return back_s


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=7)
    add_out(parser)
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    began_s, found = time.monotonic(), Found()
    back_s = soak(given.seed, given.rounds, found)
    result = {
        "what": "Ray nodes killed amid conversations, which went on elsewhere, byte for byte",
        "good": not found.failures and found.counts["lost"] > 0,
        "seed": given.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **dict(sorted(found.counts.items())),
        "rebuild_s": spread(found.rebuilds_s),
        "loss_to_next_frame_s": spread(found.silences_s),
        "node_to_worker_s": spread(back_s),
        "failures": found.failures,
        "ray": version("ray"),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    text = json.dumps(result, indent=2) + "\n"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "ray.json").write_text(text, "utf-8")
    print(text)
    if not result["good"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
