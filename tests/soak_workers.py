"""Workers that are killed under conversations, at a random moment, again and again: `make soak`.

    python -m tests.soak_workers [--sessions N] [--seed S] [--out docs/evidence]

A real `antiphon serve --isolate` with two worker processes of `tiny`, recording. Clients talk with
sound, with sound and pictures, are written down, or ask; some interrupt. Amid that one worker
process is killed with SIGKILL; the server starts another. Then the next round begins.

Held to, for each session:

- It goes on to the end that its client asked for. What the client heard is what its log holds as
  sent, byte for byte and in order.
- Its log replays, and a full replay comes to the same: the model of a replay is never killed, so a
  session that lost its worker is, byte for byte, the one that did not.

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
import wave
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import attrs
import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from protocol.values import events as ev
from protocol.values.digest import derive_id
from recorder.format.format import recording_id_of
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.format.records import Record
from recorder.read.reader import LogReader
from replay.rerun.environment import Loading
from replay.rerun.full import replay_fully
from replay.rerun.logic import replay
from runtime.model.backends.base import Backend
from tests.golden_stage import picture
from tests.helpers import append_frame, append_sound, base64, init_frame
from tests.live.servers import LiveServer, live_server
from tests.live.test_placement import workers_of

SESSIONS: Final = 120
"""Of which a third or more lose their worker."""
AT_ONCE: Final = 4
ROUND_S_MAX: Final = 180
WORKERS: Final = 2
KILL_S_MAX: Final = 2.0
BACK_S_MAX: Final = 120
LOAD_S: Final = 4.0
"""A worker process loads its model in some seconds; the next kill must find both there."""
PACE_S: Final = 0.25
"""Between two seconds of sound: quicker than in life, and slow enough to be killed amid."""
SPEECH: Final = Path(__file__).parents[1] / "fixtures" / "speech" / "demo.wav"
NS: Final = 1_000_000_000
ENDS: Final = frozenset({"client", "idle", "peer_gone"})


def seconds_of_speech() -> list[bytes]:
    """The seconds of a recording: float32 LE, 16 kHz."""
    with wave.open(str(SPEECH)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    floats = (samples / 32768).astype("<f4")
    return [floats[at : at + 16_000].tobytes() for at in range(0, len(floats) - 15_999, 16_000)]


@attrs.define(eq=False)
class Talk:
    """One client's end of a session: what it heard, verbatim."""

    socket: ClientConnection
    heard: list[str] = attrs.field(factory=list)

    async def hear_until(self, *kinds: str) -> dict[str, Any]:
        """Receive until a message of a type or kind."""
        while True:
            frame = str(await self.socket.recv())
            self.heard.append(frame)
            body: dict[str, Any] = json.loads(frame)
            if {body["type"], body.get("kind")} & set(kinds):
                return body

    async def end(self) -> None:
        """Say goodbye, and hear the rest."""
        await self.socket.send('{"type": "session.close"}')
        await self.hear_until("session.closed")


async def speak(talk: Talk, chance: Random, *, sees: bool) -> None:
    """Talk for some seconds, two ahead of the answers, and interrupt now and then."""
    await talk.hear_until("session.queue_done")
    await talk.socket.send(init_frame(config={"force_listen_count": 0}))
    await talk.hear_until("session.created")
    speech, seconds, ahead = seconds_of_speech(), chance.randint(4, 11), 2
    for number in range(seconds + ahead):
        if number >= ahead:
            await talk.hear_until("listen", "audio")
        if number < seconds:
            pictures = {"video_frames": [picture()]} if sees and number % 3 == 0 else {}
            body = json.loads(append_frame(force_listen=chance.random() < 0.1, **pictures))
            body["input"]["audio"] = base64(speech[number % len(speech)])
            await talk.socket.send(json.dumps(body))
            await asyncio.sleep(PACE_S)
    await talk.end()


async def dictate(talk: Talk, chance: Random) -> None:
    """Have some seconds written down, as one utterance and another."""
    await talk.hear_until("session.created")
    await talk.socket.send('{"type": "session.update", "model": "tiny"}')
    speech = seconds_of_speech()
    for _ in range(2):
        for number in range(chance.randint(3, 8)):
            floats = np.frombuffer(speech[number % len(speech)], dtype="<f4")
            await talk.socket.send(append_sound((floats * 32767).astype("<i2").tobytes()))
            await asyncio.sleep(PACE_S)
        commit = {"type": "input_audio_buffer.commit", "final": True}
        await talk.socket.send(json.dumps(commit))
        await talk.hear_until("transcription.done")


async def ask(talk: Talk, chance: Random) -> None:
    """Ask some questions, and have the answers spoken."""
    await talk.hear_until("session.queue_done")
    await talk.socket.send('{"type": "session.init", "payload": {}}')
    await talk.hear_until("session.created")
    for number in range(chance.randint(2, 4)):
        words = [{"role": "user", "content": f"tell me {number} of {chance.random()}"}]
        asked = {"messages": words, "streaming": True, "tts": {"enabled": True}}
        await talk.socket.send(json.dumps({"type": "input.append", "input": asked}))
        await talk.hear_until("response.done")
    await talk.end()


async def hold(url: str, mode: str, seed: int = 0) -> Talk:
    """Hold one conversation to its end."""
    chance = Random(seed)
    async with connect(f"{url}?mode={mode}", max_size=None) as socket:
        talk = Talk(socket)
        if mode == "transcription":
            await dictate(talk, chance)
        elif mode == "chat":
            await ask(talk, chance)
        else:
            await speak(talk, chance, sees=mode == "video")
    return talk


async def one_round(server: LiveServer, chance: Random, killed: int) -> list[Talk]:
    """Some conversations at once; one worker process is killed amid them."""
    modes = [chance.choice(("audio", "video", "transcription", "chat")) for _ in range(AT_ONCE)]
    async with asyncio.timeout(ROUND_S_MAX), asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(hold(server.url, mode, chance.getrandbits(32))) for mode in modes]
        await asyncio.sleep(0.2 + KILL_S_MAX * chance.random())
        os.kill(killed, signal.SIGKILL)
    return [task.result() for task in held]


# -- what the logs say -----------------------------------------------------------------------------


@attrs.define
class Found:
    """What was found so far; times in seconds."""

    counts: Counter[str] = attrs.field(factory=Counter)
    failures: list[str] = attrs.field(factory=list)
    rebuilds_s: list[float] = attrs.field(factory=list)
    silences_s: list[float] = attrs.field(factory=list)

    def judge(self, path: Path, talks: Iterable[Talk], load: Load) -> None:
        """Judge one log, and find the talk that it is of."""
        with LogReader(path) as reader:
            head, items = reader.head.fields, list(reader)
        records = [item for item in items if isinstance(item, Record)]
        sent = [record.fields["frame"] for record in records if record.kind == "tx"]
        name = derive_id("sess", recording_id_of(path), 0)
        self.counts["sessions"] += 1
        if not any(talk.heard == sent for talk in talks):
            self.failures.append(f"{name}: no client heard what the log holds")
        logic = replay(items)
        if not logic.identical:
            self.failures.append(f"{name} replays otherwise: {logic.divergence}")
        full = anyio.run(replay_fully, head, items, load, backend="trio")
        if not (full.compared and full.identical):
            self.failures.append(f"{name} was not the same: {full.first_divergence}")
        reason = records[-1].fields.get("reason")
        if reason not in ENDS:
            self.failures.append(f"{name} ended with {reason}")
        self._measure(records)

    def _measure(self, records: list[Record]) -> None:
        lost_ns: int | None = None
        was_lost = False
        for record in records:
            event = event_of(record.fields, record.at_ns) if record.kind in EVENT_KINDS else None
            match event:
                case ev.BackendLost(at_ns=at_ns) | ev.LeaseRevoked(at_ns=at_ns):
                    lost_ns, was_lost = at_ns, True
                case ev.Rebuilt(steps=steps, cost_us=cost_us):
                    self.counts["rebuilds"] += 1
                    self.counts["steps_fed_again"] += steps
                    self.rebuilds_s.append(cost_us / 1e6)
            if record.kind == "tx" and lost_ns is not None:
                self.silences_s.append((record.at_ns - lost_ns) / NS)
                lost_ns = None
        self.counts["lost"] += was_lost


class Load:
    """Loads the model of the replays once."""

    def __init__(self) -> None:
        self._backend: Backend | None = None

    def __call__(self, loading: Loading) -> Backend:
        """Give the model; every log has the same."""
        self._backend = self._backend or loading.load()
        return self._backend


def spread(values: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, in seconds."""
    if not values:
        return {}
    return {f"p{at}": round(float(np.percentile(values, at)), 3) for at in (50, 99)}


def _is_whole(server: LiveServer, killed: int) -> bool:
    return len(set(workers_of(server)) - {killed}) == WORKERS


def soak(seed: int, sessions: int, found: Found) -> None:
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
        load = Load()
        for path in sorted(Path(folder).glob("*.session.zst")):
            found.judge(path, talks, load)


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs") / "evidence")
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    began_s, found = time.monotonic(), Found()
    soak(given.seed, given.sessions, found)
    result = {
        "what": "worker processes killed amid conversations, which went on, byte for byte",
        "good": not found.failures and found.counts["lost"] > 0,
        "seed": given.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **dict(sorted(found.counts.items())),
        "rebuild_s": spread(found.rebuilds_s),
        "loss_to_next_frame_s": spread(found.silences_s),
        "failures": found.failures,
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    text = json.dumps(result, indent=2) + "\n"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "workers.json").write_text(text, "utf-8")
    print(text)
    if found.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
