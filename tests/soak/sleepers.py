"""Many sessions that sleep without a slot and come back in any order: `make soak`.

    python -m tests.soak.sleepers [--sessions N] [--slots S] [--seed X] [--out FOLDER]

A real `antiphon serve` of `tiny` that records, with few slots. Each client says some seconds of its
own, and its connection is reset. When all sessions sleep, they come back in a drawn order, several
at once: each one says another second, and leaves.

Held to:

- While all sleep, every slot is free. In the end there is no session and every slot is free.
- Each client comes back to its own recording. What it said is what its log holds as received, and
  what it heard, over both connections, is what its log holds as sent: byte for byte and in order.
- Each log replays. A full replay, whose model never slept, comes to the same: so no session got
  another's state back.
- A sleeping session takes less than `SLEEPER_KIB_MAX` of the server's private memory: measured with
  the scripted model, of the second half of as many sessions; the first half warms the server up.

The order and the sound are drawn from one seed, the kernel's timing is not. What was found goes to
`sleepers.json`, without a date; it exits with 1 where anything was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import attrs
import numpy as np
from websockets.asyncio.client import connect

from protocol.values import events as ev
from recorder.format.format import Record
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.rerun.full import replay_fully
from replay.rerun.logic import replay
from tests.live.servers import live_server
from tests.project.evidence import add_out
from tests.sessions.in_memory import append_frame, base64, init_frame
from tests.sessions.outliving import Load, Talk, spread
from tests.sessions.resumed import heard_and_said
from tests.soak.server import Server

SESSIONS: Final = 100
SLOTS: Final = 4
AT_ONCE: Final = 3
"""So many clients for each slot: some wait in the queue."""
MEASURED_SLOTS: Final = 8
SECONDS: Final = 2
SLEEPER_KIB_MAX: Final = 64
ASLEEP_S_MAX: Final = 30
"""All have gone by then, and `--detach-s` is one second."""


@attrs.define(eq=False, kw_only=True)
class Sleeper:
    """One client, and all that crossed its connections.

    Attributes:
        chance: draws what it says.
        recording_id: of its session, from its first greeting.
        failure: what was wrong; empty if nothing was.
    """

    number: int
    chance: Random
    recording_id: str = ""
    token: str = ""
    sent: list[str] = attrs.field(factory=list)
    heard: list[str] = attrs.field(factory=list)
    failure: str = ""

    async def say(self, talk: Talk, frame: str) -> None:
        """Send a frame, and note it."""
        self.sent.append(frame)
        await talk.socket.send(frame)

    async def speak(self, talk: Talk, seconds: int) -> None:
        """Say some seconds, and hear an answer to each."""
        for _ in range(seconds):
            body = json.loads(append_frame())
            body["input"]["audio"] = base64(self._second())
            await self.say(talk, json.dumps(body))
            await talk.hear_until("listen", "audio")

    def _second(self) -> bytes:
        """A second of noise that no other client says."""
        noise = np.random.default_rng(self.chance.getrandbits(32)).normal(0, 0.1, 16_000)
        return noise.astype("<f4").tobytes()

    async def fall_asleep(self, server: Server) -> None:
        """Begin a session, and lose the connection."""
        async with connect(f"{server.url}?mode=audio&resumable=1", max_size=None) as socket:
            talk = Talk(socket)
            greeting = await talk.hear_until("session.resumable")
            self.recording_id, self.token = greeting["recording_id"], greeting["token"]
            await talk.hear_until("session.queue_done")
            words = f"you are number {self.number}"
            await self.say(talk, init_frame(system_prompt=words, config={"force_listen_count": 0}))
            await talk.hear_until("session.created")
            await self.speak(talk, SECONDS)
            socket.transport.abort()
        self.heard += talk.heard[1:]

    async def wake(self, server: Server) -> None:
        """Come back, go on for a second, and leave."""
        last_seq = json.loads(self.heard[-1])["seq"]
        asked = {"type": "session.resume", "token": self.token, "last_seq": last_seq}
        address = f"{server.url}?mode=audio&resume={self.recording_id}"
        async with connect(address, max_size=None) as socket:
            talk = Talk(socket)
            await socket.send(json.dumps(asked))
            greeting = await talk.hear_until("session.resumable")
            told = greeting["recording_id"], greeting["next_seq"], greeting["ack"]
            if told != (self.recording_id, last_seq + 1, len(self.sent)):
                self.failure = f"number {self.number} was greeted with {told}"
            await self.speak(talk, 1)
            self.sent.append('{"type": "session.close"}')
            await talk.end()
        self.heard += talk.heard[1:]


async def each(
    sleepers: Iterable[Sleeper], do: Callable[[Sleeper], Awaitable[None]], most: int
) -> None:
    """Let each client do something, in order, `most` at once."""
    limiter = asyncio.Semaphore(most)

    async def one(sleeper: Sleeper) -> None:
        try:
            await do(sleeper)
        except Exception as error:  # what it is stands in the evidence
            sleeper.failure = f"number {sleeper.number}: {error!r}"
        finally:
            limiter.release()

    async with asyncio.TaskGroup() as tasks:
        for sleeper in sleepers:
            await limiter.acquire()
            tasks.create_task(one(sleeper))


def private_kib(server: Server) -> int:
    """Memory that only the server has, in KiB."""
    text = Path(f"/proc/{server.pid}/smaps_rollup").read_text("ascii")
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def wait_until_asleep(server: Server, count: int) -> dict[str, Any]:
    """Wait until so many sessions sleep and no other one is there; returns the status."""
    until_s = time.monotonic() + ASLEEP_S_MAX
    while True:
        status = server.status()
        if [it["connection"] for it in status["sessions"]] == ["asleep"] * count:
            return status
        assert time.monotonic() < until_s, status
        time.sleep(0.2)


def soak(server: Server, sleepers: list[Sleeper], slots: int, chance: Random) -> dict[str, Any]:
    """Let all fall asleep and come back; returns what the server said meanwhile."""
    asyncio.run(each(sleepers, lambda it: it.fall_asleep(server), slots * AT_ONCE))
    asleep = wait_until_asleep(server, len(sleepers))
    print(f"asleep: {len(sleepers)}", file=sys.stderr, flush=True)
    order = chance.sample(sleepers, len(sleepers))
    asyncio.run(each(order, lambda it: it.wake(server), slots * AT_ONCE))
    over = wait_until_asleep(server, 0)
    return {
        "slots_asleep": asleep["slots"],
        "slots_over": over["slots"],
        "queue_over": over["queue_length"],
    }


def sleeper_kib(sessions: int, seed: int) -> float:
    """Measure a sleeping session of a server without a model, whose memory would hide it."""
    half, held_kib = sessions // 2, list[int]()
    with tempfile.TemporaryDirectory() as name:
        options = ("--record", name, "--slots", str(MEASURED_SLOTS), "--detach-s", "1")
        with live_server(*options, "--detached-max", str(sessions)) as live:
            server = Server(url=live.url, pid=live.process.pid)
            for part in (1, 2):
                some = [
                    Sleeper(number=number, chance=Random(f"{seed} {part} {number}"))
                    for number in range(half)
                ]
                asyncio.run(each(some, lambda it: it.fall_asleep(server), MEASURED_SLOTS))
                wait_until_asleep(server, half * part)
                held_kib.append(private_kib(server))
    return round((held_kib[1] - held_kib[0]) / half, 1)


def judge(sleeper: Sleeper, folder: Path, load: Load) -> tuple[str, float]:
    """Hold a client to its log; returns what was wrong, or nothing, and the seconds to rebuild."""
    path = Store(folder).path(sleeper.recording_id)
    heard, said = heard_and_said(path)
    with LogReader(path) as reader:
        head, items = reader.head.fields, list(reader)
    records = [it for it in items if isinstance(it, Record)]
    events = [event_of(it.fields, it.at_ns) for it in records if it.kind in EVENT_KINDS]
    rebuilt = [it for it in events if isinstance(it, ev.Rebuilt)]
    full = anyio.run(replay_fully, head, items, load, backend="trio")
    is_so = {
        "said": sleeper.sent == heard,
        "heard": sleeper.heard == said,
        "numbered": [json.loads(it)["seq"] for it in said] == list(range(len(said))),
        "rebuilt once": [it.steps for it in rebuilt] == [SECONDS],
        "over": records[-1].fields.get("reason") == "client",
        "replays": replay(items).identical,
        "replays fully": full.compared and full.identical,
    }
    wrong = ", ".join(name for name, is_it in is_so.items() if not is_it)
    return wrong and f"number {sleeper.number}: not {wrong}", sum(
        it.cost_us for it in rebuilt
    ) / 1e6


def main() -> int:
    """Soak, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--seed", type=int, default=7)
    add_out(parser)
    asked = parser.parse_args()
    began_s, chance, load = time.monotonic(), Random(asked.seed), Load()
    sleepers = [
        Sleeper(number=number, chance=Random(f"{asked.seed} {number}"))
        for number in range(asked.sessions)
    ]
    with tempfile.TemporaryDirectory() as name:
        options = ("--record", name, "--slots", str(asked.slots), "--detach-s", "1")
        most = ("--detached-max", str(asked.sessions))
        with live_server(*options, *most, model="tiny") as live:
            found = soak(Server(url=live.url, pid=live.process.pid), sleepers, asked.slots, chance)
        judged = [judge(it, Path(name), load) for it in sleepers if not it.failure]
        logs = len(list(Path(name).glob("*.session.zst")))
    failures = [it.failure for it in sleepers if it.failure] + [
        wrong for wrong, _ in judged if wrong
    ]
    free = {"slots": asked.slots, "free": asked.slots, "leased": 0, "condemned": 0}
    is_given_back = [found["slots_asleep"], found["slots_over"]] == [free, free]
    held_kib = sleeper_kib(asked.sessions, asked.seed)
    is_small = held_kib < SLEEPER_KIB_MAX
    is_good = not failures and is_given_back and is_small and logs == asked.sessions
    evidence = {
        "what": "sessions that slept without a slot and came back in a drawn order to their own",
        "good": is_good and found["queue_over"] == 0,
        "seed": asked.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "sessions": asked.sessions,
        "slots": asked.slots,
        **found,
        "sleeper_kib": held_kib,
        "rebuild_s": spread([seconds for _, seconds in judged]),
        "failures": failures,
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    (asked.out / "sleepers.json").write_text(json.dumps(evidence, indent=2) + "\n", "utf-8")
    print(json.dumps(evidence, indent=2))
    return 0 if evidence["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
