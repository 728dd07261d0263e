"""Two gateways that are restarted one after the other under a crowd of conversations: `make soak`.

    python -m tests.soak.gateways [--sessions N] [--rounds N] [--model NAME] [--out FOLDER]

Real processes: two workers, two `antiphon serve --resumable` that know each other, and HAProxy with
`deploy/haproxy.cfg` in front (where it is not installed, a balancer of the tests). Clients send a
second of sound each second. In each round one gateway is stopped by SIGTERM and started again, then
the other one. For each conversation: it goes on to its end; the messages that the client sent are
those that its log holds, each once; so are the frames that it heard; the log replays, also with the
model.

The longest time without a frame is reported. What was found goes to `gateways.json`, without a
date; it exits with 1 where anything was not so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np

from protocol.values.messages import Created, Listen, QueueDone, Speech
from protocol.values.requests import Append, Init
from recorder.storage.store import Store
from runtime.client.session import ClientSession, FrameSocket, connect
from tests.live.servers import LiveServer, live_server
from tests.live.test_worker import live_worker
from tests.network.cutting import cutting
from tests.project.evidence import add_out
from tests.sessions.outliving import Load, differences, seconds_of_speech
from tests.sessions.resumed import Tap, Told, heard_and_said, until
from tests.soak.restarts import free_port

SESSIONS: Final = 30
ROUNDS: Final = 3
SETTLE_S: Final = 4.0
"""Between two restarts: all clients are back by then, or their silence is seen."""
HAPROXY: Final = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
FLAGS: Final = ("--resumable", "--drain-s", "0", "--connections-per-address-max", "4096")


@attrs.define
class Talk:
    """One conversation: what crossed, and when the client heard something."""

    told: Told = attrs.field(factory=Told)
    times: list[float] = attrs.field(factory=list)
    units: int = 0
    wrong: str = ""

    @property
    def silence_s(self) -> float:
        """The longest time between two frames."""
        return max(
            (later - at for at, later in zip(self.times, self.times[1:], strict=False)), default=0
        )


class Ear(Tap):
    """A socket that notes what crosses it, and when."""

    def __init__(self, socket: FrameSocket, talk: Talk) -> None:
        super().__init__(socket, talk.told)
        self._talk = talk

    async def receive(self) -> str | bytes:
        """As `FrameSocket`."""
        frame = await super().receive()
        self._talk.times.append(anyio.current_time())
        return frame


async def speak(session: ClientSession, talk: Talk, over: threading.Event) -> None:
    """Speak until it is over, a second each second."""
    await until(session, QueueDone)
    await session.init(Init(instructions="be brief"))
    await until(session, Created)
    speech = [np.frombuffer(second, dtype="<f4") for second in seconds_of_speech()]

    async def hear() -> None:
        async for message in session:
            talk.units += isinstance(message, Listen | Speech)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        number = 0
        while not over.is_set():
            await session.append(Append(pcm=speech[number % len(speech)]))
            number += 1
            await anyio.sleep(1.0)
        await anyio.sleep(1.0)
        await session.close("enough")


async def hold(url: str, talk: Talk, over: threading.Event) -> None:
    """Hold one conversation to its end."""
    try:
        async with connect(url, mode="audio", dialect="realtime", resume=True) as session:
            socket = session._websocket
            session._websocket = Ear(socket, talk)
            try:
                await speak(session, talk, over)
            finally:
                talk.told.recording_id = socket.recording_id  # type: ignore[attr-defined]
    except Exception as error:  # what it is stands in the evidence
        talk.wrong = repr(error)


@contextmanager
def balanced(addresses: list[tuple[str, int]], folder: Path) -> Iterator[int]:
    """Run HAProxy in front of two gateways, or what is like it; gives its port."""
    if shutil.which("haproxy") is None:
        with cutting(*addresses, cuts=[]) as balancer:
            yield balancer.port
        return
    port, text = free_port(), HAPROXY.read_text()
    text = text.replace("bind :8006", f"bind 127.0.0.1:{port}")
    for number, (host, at) in enumerate(addresses, 1):
        text = text.replace(f"gateway-{number}:8006\n", f"{host}:{at}\n")
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen(["haproxy", "-db", "-q", "-f", str(folder / "haproxy.cfg")])
    try:
        time.sleep(1.5)  # until it has looked at the gateways
        yield port
    finally:
        process.terminate()
        process.wait()


class House:
    """Two workers, two gateways and a balancer, as processes."""

    def __init__(self, folder: Path, model: str, slots: int) -> None:
        self._running = ExitStack()
        self._ports = [free_port(), free_port()]
        self._at: list[ExitStack] = []
        self._servers: list[LiveServer] = []
        self.folders = [folder / "one", folder / "two"]
        self.port = 0
        workers = [f"tcp:127.0.0.1:{free_port()}" for _ in self._ports]
        self._flags = [word for address in workers for word in ("--worker-address", address)]
        for port in self._ports:
            self._flags += ["--gateway", f"http://127.0.0.1:{port}"]
        with ExitStack() as starting:
            for address in workers:
                made = live_worker("--slots", str(slots), model=model, listen=address)
                starting.enter_context(made)
            for number in range(2):
                self._at.append(ExitStack())
                starting.callback(self._at[number].close)
                self._servers.append(self._start(number))
            addresses = [("127.0.0.1", port) for port in self._ports]
            self.port = starting.enter_context(balanced(addresses, folder))
            self._running = starting.pop_all()

    def _start(self, number: int) -> LiveServer:
        words = ("--port", str(self._ports[number]), "--record", str(self.folders[number]))
        return self._at[number].enter_context(live_server(*words, *FLAGS, *self._flags))

    def restart(self, number: int) -> float:
        """Stop a gateway by SIGTERM and start it again; returns how many seconds it was away."""
        began_s = time.monotonic()
        assert self._servers[number].stop() == 0
        self._at[number].close()
        self._servers[number] = self._start(number)
        return time.monotonic() - began_s

    def log_of(self, recording_id: str) -> Path:
        """A recording's log, which is in one of the folders."""
        paths = [Store(folder).path(recording_id) for folder in self.folders]
        return next((path for path in paths if path.exists()), paths[0])

    def close(self) -> None:
        """End all processes."""
        self._running.close()


def judge(path: Path, talk: Talk, load: Load) -> str:
    """Hold a conversation to its log; returns what was wrong."""
    told = talk.told
    if talk.wrong or not told.recording_id or not path.exists():
        return f"{told.recording_id or 'a session'} was lost: {talk.wrong or 'it has no log'}"
    heard, said = heard_and_said(path)
    if (told.heard, told.sent) != (said, heard):
        counts = f"heard {len(told.heard)} of {len(said)}, sent {len(told.sent)} of {len(heard)}"
        return f"{told.recording_id}: {counts}"
    wrong = differences(path, load)
    return f"{told.recording_id}: {wrong}" if wrong else ""


def soak(
    folder: Path, model: str, sessions: int, rounds: int, settle_s: float = SETTLE_S
) -> dict[str, Any]:
    """Restart both gateways under conversations; returns what was found."""
    house, over = House(folder, model, slots=sessions), threading.Event()
    talks, away_s = [Talk() for _ in range(sessions)], list[float]()

    async def crowd() -> None:
        async with anyio.create_task_group() as tasks:
            for talk in talks:
                tasks.start_soon(hold, f"ws://127.0.0.1:{house.port}", talk, over)
                await anyio.sleep(1.0 / sessions)

    try:
        holding = threading.Thread(target=anyio.run, args=(crowd,))
        holding.start()
        time.sleep(settle_s)
        for number in [0, 1] * rounds:
            away_s.append(house.restart(number))
            time.sleep(settle_s)
        over.set()
        holding.join()
    finally:
        over.set()
        house.close()
    load, counts, failures = Load(), Counter[str](), list[str]()
    for talk in talks:
        log = house.log_of(talk.told.recording_id or "none")
        counts[log.parent.name] += 1
        wrong = judge(log, talk, load)
        failures += [wrong] if wrong else []
    silences = [talk.silence_s for talk in talks]
    return {
        "good": not failures,
        "model": model,
        "balancer": "HAProxy" if shutil.which("haproxy") else "of the tests",
        "sessions": sessions,
        "sessions of each gateway": dict(sorted(counts.items())),
        "gateways restarted": len(away_s),
        "a gateway was away, s": [round(value, 1) for value in away_s],
        "units": sum(talk.units for talk in talks),
        "frames": sum(len(talk.told.heard) for talk in talks),
        "longest silence of a session, ms": {
            "p50": round(1000 * float(np.percentile(silences, 50))),
            "max": round(1000 * max(silences)),
        },
        "failures": failures,
    }


def main() -> int:
    """Soak, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="tiny")
    add_out(parser)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = soak(Path(name), asked.model, asked.sessions, asked.rounds)
    what = "two gateways restarted one after the other under conversations, which went on"
    text = json.dumps({"what": what, **found}, indent=2)
    (asked.out / "gateways.json").write_text(text + "\n", "utf-8")
    print(text)
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
