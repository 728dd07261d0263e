"""A server that is killed under load, at a random moment, again and again: `make soak`.

    python -m tests.soak.crash [--kills N] [--seed S] [--out docs/evidence]

A real `antiphon serve` with the scripted model, recording; 8 to 20 clients hold conversations by
voice and by text over real sockets, and some of them leave without a word. Then SIGKILL, and the
next server starts on the same folder. Each client keeps what it said and what it was told.

Held to, after each kill:

- Every log is sound as far as it goes, and logic replay finds nothing else in it; only a log whose
  session nobody had heard of yet may lack its head.
- All that a client was told stands in its session's log, byte for byte and in order; so does all
  that the log says it was told by the client, and every input that was answered.
- No log is held any more, and the server that comes next changes none.

All that is drawn comes from one seed, which is printed; the kernel's own timing does not. What was
found goes to `crash.json`, without a date; it exits with 1 where anything was not so.
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
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import attrs
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from protocol.values.records import derive_id
from recorder.format.format import Record, Unreadable, recording_id_of
from recorder.read.reader import LogReader
from recorder.repair import verify
from recorder.write.files import is_held
from replay.rerun.logic import replay
from runtime import RUN
from tests.live.servers import LiveServer, live_server
from tests.project.evidence import add_out
from tests.sessions.in_memory import base64, init_frame

KILLS: Final = 50
CLIENTS: Final = (8, 20)
HEARD_MAX: Final = 1000
"""Frames that all clients have heard when the kill comes, at most: some 10 s of such a load."""
SLACK_S: Final = 0.1
"""And then up to so much more, so that no kill is tied to what a client has just heard."""
LOAD_S_MAX: Final = 120
"""A server that answers nobody fails the run instead of hanging it."""
NOISE: Final = tuple(
    base64(np.random.default_rng(seed).normal(scale=0.1, size=16_000).astype("<f4").tobytes())
    for seed in range(4)
)
"""Seconds of sound that hardly compress, so that a kill comes amid a write now and then."""

Frame = dict[str, Any]


class LeftError(Exception):
    """The client has had enough, and is gone without a word."""


# -- clients ---------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Conversation:
    """What one client said and heard over one connection, verbatim."""

    sent: list[str] = attrs.field(factory=list)
    heard: list[str] = attrs.field(factory=list)


@attrs.define(eq=False)
class Load:
    """All clients of one server.

    Attributes:
        talks: every conversation so far.
        heard: frames that all clients were told so far.
        is_enough: set once that are as many as were asked for.
    """

    url: str
    wanted: int
    talks: list[Conversation] = attrs.field(factory=list)
    heard: int = 0
    is_enough: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def talk_on(self, chance: Random) -> None:
        """Hold one conversation after the other, until there is no server any more."""
        with suppress(OSError, InvalidHandshake, asyncio.IncompleteReadError):
            while True:
                mode, hold = chance.choice((*[("audio", speak)] * 3, ("chat", ask)))
                async with connect(f"{self.url}?mode={mode}", max_size=None) as socket:
                    self.talks.append(Conversation())
                    client = Client(self, self.talks[-1], socket)
                    with suppress(ConnectionClosed, LeftError):
                        await hold(client, chance)
                        while True:
                            await client.hear()


@attrs.frozen
class Client:
    """One end of a connection; it keeps what passes."""

    load: Load
    talk: Conversation
    socket: ClientConnection

    async def say(self, frame: str) -> None:
        """Send a frame; it counts as said even where the server never gets it."""
        self.talk.sent.append(frame)
        await self.socket.send(frame)

    async def hear(self) -> Frame:
        """Receive a frame."""
        frame = str(await self.socket.recv())
        self.talk.heard.append(frame)
        self.load.heard += 1
        if self.load.heard >= self.load.wanted:
            self.load.is_enough.set()
        body: Frame = json.loads(frame)
        return body

    async def hear_until(self, *kinds: str) -> None:
        """Receive until a frame of a type or a kind."""
        while not {(body := await self.hear())["type"], body.get("kind")} & set(kinds):
            pass

    async def begin(self, init: str) -> None:
        """Wait for a slot, and set the session up."""
        await self.hear_until("session.queue_done")
        await self.say(init)
        await self.hear_until("session.created")

    async def end(self, chance: Random) -> None:
        """Say goodbye, or be gone."""
        if chance.random() < 0.3:
            self.socket.transport.abort()
            raise LeftError
        await self.say('{"type": "session.close"}')


async def speak(client: Client, chance: Random) -> None:
    """Talk for some seconds, as quick as is answered, up to three seconds ahead."""
    await client.begin(init_frame())
    seconds, ahead = chance.randint(1, 30), chance.randint(1, 3)
    for number in range(seconds + ahead):
        if number >= ahead:
            await client.hear_until("listen", "audio")
        if number < seconds:
            audio = chance.choice(NOISE)
            forced = json.dumps(chance.random() < 0.1)
            await client.say(
                f'{{"type": "input.append", "input_id": "s{number}", "input": '
                f'{{"audio": "{audio}", "force_listen": {forced}}}}}'
            )
    await client.end(chance)


async def ask(client: Client, chance: Random) -> None:
    """Ask some questions."""
    await client.begin('{"type": "session.init", "payload": {}}')
    for number in range(chance.randint(1, 6)):
        messages = [{"role": "user", "content": f"question {number} of {chance.random()}"}]
        body = {"type": "input.append", "input_id": f"q{number}", "input": {"messages": messages}}
        await client.say(json.dumps(body))
        await client.hear_until("response.done")
    await client.end(chance)


# -- one kill --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Plan:
    """What is drawn for one kill.

    Attributes:
        seeds: of the clients' own choices, one each.
        slots: of the server; where there are fewer than clients the queue is used.
        durability: when it syncs.
        heard: frames that were heard in all when the kill comes.
        slack_s: and how much later it comes.
    """

    seeds: tuple[int, ...]
    slots: int
    durability: str
    heard: int
    slack_s: float

    @classmethod
    def draw(cls, chance: Random, *, heard_max: int = HEARD_MAX) -> Plan:
        """Draw one; one in three comes while clients are only just being let in."""
        clients = chance.randint(*CLIENTS)
        is_early = chance.random() < 1 / 3
        return cls(
            seeds=tuple(chance.getrandbits(32) for _ in range(clients)),
            slots=chance.choice((clients // 2, clients)),
            durability=chance.choice(("none", "interval", "unit")),
            heard=chance.randint(1, 4 * clients if is_early else heard_max),
            slack_s=chance.random() * SLACK_S,
        )

    def carry_out(self, folder: Path, run: Sequence[str] = RUN) -> list[Conversation]:
        """Serve, talk and kill; gives what the clients know of it."""
        options = ("--slots", str(self.slots), "--durability", self.durability)
        with live_server("--record", str(folder), *options, run=run) as server:
            return asyncio.run(self._talk(server))

    async def _talk(self, server: LiveServer) -> list[Conversation]:
        load = Load(server.url, self.heard)
        async with asyncio.timeout(LOAD_S_MAX), asyncio.TaskGroup() as clients:
            for seed in self.seeds:
                clients.create_task(load.talk_on(Random(seed)))
            await load.is_enough.wait()
            await asyncio.sleep(self.slack_s)
            server.kill()
        return load.talks


@attrs.frozen(kw_only=True)
class Log:
    """What a killed server's log says.

    Attributes:
        path: of the file.
        told: frames that its session sent.
        taken: frames that its session was sent.
    """

    path: Path
    told: list[object]
    taken: list[object]

    @property
    def session_id(self) -> str:
        """What its client knows it by."""
        return derive_id(recording_id_of(self.path), "sess", 0)


@attrs.define
class Found:
    """What was found so far."""

    counts: Counter[str] = attrs.field(factory=Counter)
    failures: list[str] = attrs.field(factory=list)

    def read(self, path: Path) -> Log | None:
        """Check one log; gives None where nothing can be read."""
        self.counts["logs"] += 1
        if is_held(path):
            self.failures.append(f"{path.name} seems to be written still")
        report = verify(path)
        self.counts[report.state] += 1
        self.counts["torn"] += report.tail_bytes > 0
        self.counts["units"] += report.units
        try:
            with LogReader(path) as reader:
                items = list(reader)
        except Unreadable:
            return None
        if report.exit_code:
            self.failures.append(f"{path.name} is {report.state}: {report.damage}")
        replayed = replay(items)
        if replayed.divergence is not None:
            self.failures.append(f"{path.name} replays otherwise: {replayed.divergence}")
        records = [item for item in items if isinstance(item, Record)]
        self.counts["records"] += len(records)
        return Log(path=path, told=_frames(records, "tx"), taken=_frames(records, "rx"))

    def compare(self, talks: Iterable[Conversation], logs: list[Log]) -> None:
        """Look for each client's conversation in the logs; none is claimed twice."""
        left = list(logs)
        for talk in sorted(talks, key=lambda talk: -len(talk.heard)):
            self.counts["conversations"] += 1
            if not talk.heard:
                continue
            self.counts["frames_told"] += len(talk.heard)
            fitting = [log for log in left if _is_of(log, talk)]
            log = max(fitting, key=lambda log: len(log.taken), default=None)
            if log is None:
                said = f"{len(talk.sent)} sent, {_session(talk)}: {talk.heard[0]:.200}"
                self.failures.append(f"no log holds {len(talk.heard)} frames, {said}")
                continue
            left.remove(log)
            self.failures += [f"{log.path.name}: {problem}" for problem in _problems(talk, log)]
            self.counts["frames_taken"] += len(log.taken)
            self.counts["frames_not_told"] += len(log.told) - len(talk.heard)


def _frames(records: Iterable[Record], kind: str) -> list[object]:
    return [record.fields["frame"] for record in records if record.kind == kind]


def _session(talk: Conversation) -> str | None:
    """Name a client's session; None where it was not told the name yet."""
    created = (frame for frame in talk.heard if '"session.created"' in frame)
    return next((str(json.loads(frame)["session_id"]) for frame in created), None)


def _is_of(log: Log, talk: Conversation) -> bool:
    """Whether a log is that of a conversation; before it has a name, by all that was said.

    Then a log in which less was taken fits many.
    """
    name = _session(talk)
    return not _problems(talk, log) if name is None else log.session_id == name


def _problems(talk: Conversation, log: Log) -> list[str]:
    """What one end knows and the other does not."""
    problems = []
    if log.told[: len(talk.heard)] != talk.heard:
        problems.append(f"{len(talk.heard)} frames were heard, the log has {len(log.told)} others")
    if log.taken != talk.sent[: len(log.taken)]:
        problems.append(f"{len(log.taken)} frames were taken that were not sent so")
    answered = {json.loads(frame).get("input_id") for frame in talk.heard} - {None}
    lost = answered - {json.loads(str(frame)).get("input_id") for frame in log.taken}
    if lost:
        problems.append(f"answered, and not in the log: {sorted(lost)}")
    return problems


def kill_once(plan: Plan, folder: Path, found: Found, *, run: Sequence[str] = RUN) -> list[Path]:
    """Carry a plan out on a folder that may hold the logs of others; gives those that it left.

    Args:
        plan: what is drawn.
        folder: of the logs.
        found: takes what comes of it.
        run: runs `antiphon`.
    """
    before = _stamps(folder)
    talks = plan.carry_out(folder, run)
    after = _stamps(folder)
    if {path: after.get(path) for path in before} != before:
        found.failures.append("a server changed logs that another left")
    left = sorted(after.keys() - before.keys())
    logs = [log for path in left if (log := found.read(path)) is not None]
    found.compare(talks, logs)
    found.counts["kills"] += 1
    found.counts["clients"] += len(plan.seeds)
    found.counts[f"durability_{plan.durability}"] += 1
    return left


def _stamps(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """What shows that a log was touched."""
    found = ((path, path.stat()) for path in folder.iterdir())
    return {path: (seen.st_ino, seen.st_size, seen.st_mtime_ns) for path, seen in found}


# -- the run ---------------------------------------------------------------------------------------


def soak(seed: int, kills: int, found: Found) -> None:
    """Kill servers on one folder, in which the logs of one are left to the next."""
    chance = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        old: list[Path] = []
        for number in range(1, kills + 1):
            left = kill_once(Plan.draw(chance), Path(folder), found)
            for path in old:
                path.unlink()
            old = left
            print(
                f"{number} of {kills} kills: {found.counts['conversations']} conversations, "
                f"{found.counts['frames_told']} frames, {len(found.failures)} failures",
                file=sys.stderr,
                flush=True,
            )


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=7)
    add_out(parser)
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    began_s, found = time.monotonic(), Found()
    soak(given.seed, given.kills, found)
    result = {
        "what": "servers killed under load at a random moment; what clients saw, in their logs",
        "good": not found.failures,
        "seed": given.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **dict(sorted(found.counts.items())),
        "failures": found.failures,
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    text = json.dumps(result, indent=2) + "\n"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "crash.json").write_text(text, "utf-8")
    print(text)
    if found.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
