"""Pairs of sessions that are equal but for this: the worker of one is killed.

    [the same seed, and each second sent when the one before was answered] -> killed | not killed

The server is a real one with processes of `tiny`, `--rebuild exact`, and identities that are
counted instead of drawn: the n-th session has the same seed and ids in both runs. One session runs
at a time, and the moment of the kill is drawn: amid a unit, amid its finalize, between two, in the
midst of an interrupt, amid a chunk or an answer.

What both clients heard must be equal, byte for byte, but for measured times. A unit that is
interrupted is cut where the moment has it: such a session is compared with a run of the model that
is forced to the same cuts, as all are (`Found.judge`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import attrs
import numpy as np
from websockets.asyncio.client import connect

from protocol.values.limits import Mode
from recorder.format.format import SUFFIX
from tests.golden.stage import picture
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request
from tests.sessions.in_memory import append_frame, append_sound, base64, init_frame
from tests.sessions.outliving import Found, Load, Talk, seconds_of_speech

Moment = Literal["unit", "finalize", "between", "interrupt"]
MOMENTS: Final[tuple[Moment, ...]] = ("unit", "unit", "finalize", "between", "interrupt")
MODES: Final[tuple[Mode, ...]] = ("audio", "video", "transcription", "chat")
UNIT_S: Final = 0.06
"""A unit of `tiny` that speaks takes about as long, one that listens a sixth."""
FINALIZE_S: Final = 0.002
QUIET_S: Final = 0.1
ANSWER_PIECES: Final = 10
"""An answer of `tiny` has a few more."""
SERVING_S_MAX: Final = 120
TALK_S_MAX: Final = 60
CHAPTER: Final = 8
"""Sessions of a server: it waits longer with each worker that it loses."""
WORKERS: Final = 3
COUNTED: Final = """
from runtime.cli import main
from runtime.serve import serving
from tests.sessions.identities import CountedIdentities

serving.SystemIdentities = lambda: CountedIdentities(drawn={first})
main()
"""


@attrs.frozen(kw_only=True)
class Part:
    """One session's part: what its client does, and when its worker is killed."""

    mode: Mode
    seconds: int
    step: int
    moment: Moment
    delay_s: float
    silent: bool

    @property
    def is_cut(self) -> bool:
        """Whether its units depend on the moment of an interrupt."""
        return self.moment == "interrupt" and self.mode in {"audio", "video"}


def draw(chance: Random, mode: Mode) -> Part:
    """Draw a part in a mode."""
    moment, seconds = chance.choice(MOMENTS), chance.randint(5, 11)
    longest_s = {"finalize": FINALIZE_S, "between": QUIET_S}.get(moment, UNIT_S)
    steps = ANSWER_PIECES if mode == "chat" else seconds
    return Part(
        mode=mode,
        seconds=seconds,
        step=chance.randrange(steps),
        moment=moment,
        delay_s=chance.random() * longest_s,
        silent=chance.random() < 0.2,
    )


@attrs.define
class Blow:
    """Kills the worker of the only session, once; in the run without losses it does nothing.

    Attributes:
        is_real: whether it kills.
        spent: the processes that were killed before.
        victim: the one to be killed.
    """

    server: LiveServer
    is_real: bool
    spent: set[int] = attrs.field(factory=set)
    victim: int | None = None

    async def aim(self) -> None:
        """Find the process that has the session."""
        if self.is_real and self.victim is None:
            for worker in await asyncio.to_thread(roster, self.server):
                if worker["leased"]:
                    self.victim = int(worker["where"].removeprefix("pid "))

    async def fall(self, delay_s: float) -> None:
        """Kill it after a delay, in seconds."""
        await asyncio.sleep(delay_s)
        if self.victim is not None and self.victim not in self.spent:
            self.spent.add(self.victim)
            os.kill(self.victim, signal.SIGKILL)


def roster(server: LiveServer) -> list[dict[str, Any]]:
    """The server's workers."""
    workers: list[dict[str, Any]] = request(server.address, "/api/workers", headers={}).said[
        "workers"
    ]
    return workers


def _sound(part: Part, number: int) -> bytes:
    speech = seconds_of_speech()
    return bytes(64_000) if part.silent else speech[number % len(speech)]


async def _speak(talk: Talk, part: Part, blow: Blow) -> None:
    await talk.hear_until("session.queue_done")
    await talk.socket.send(init_frame(config={"force_listen_count": 0}))
    await talk.hear_until("session.created")
    await blow.aim()
    for number in range(part.seconds):
        is_it = number == part.step
        pictures = {"video_frames": [picture()]} if part.mode == "video" and number % 3 == 0 else {}
        body = json.loads(append_frame(**pictures))
        body["input"]["audio"] = base64(_sound(part, number))
        await talk.socket.send(json.dumps(body))
        if is_it and part.moment == "interrupt":
            await asyncio.sleep(part.delay_s)
            await talk.socket.send(append_frame(force_listen=True))
        if is_it and part.moment in {"unit", "interrupt"}:
            await blow.fall(part.delay_s)
        await talk.hear_until("listen", "audio")
        if is_it and part.moment == "interrupt":
            await talk.hear_until("listen", "audio")
        if is_it and part.moment in {"finalize", "between"}:
            await blow.fall(part.delay_s)
    await talk.end()


async def _dictate(talk: Talk, part: Part, blow: Blow) -> None:
    await talk.hear_until("session.created")
    await talk.socket.send('{"type": "session.update", "model": "tiny"}')
    for utterance in range(2):
        for number in range(part.seconds):
            floats = np.frombuffer(_sound(part, number), dtype="<f4")
            await talk.socket.send(append_sound((floats * 32767).astype("<i2").tobytes()))
            await talk.socket.send('{"type": "input_audio_buffer.commit", "final": false}')
            await blow.aim()
            if utterance and number == part.step:
                await blow.fall(part.delay_s)
        await talk.socket.send('{"type": "input_audio_buffer.commit", "final": true}')
        await talk.hear_until("transcription.done")


async def _ask(talk: Talk, part: Part, blow: Blow) -> None:
    await talk.hear_until("session.queue_done")
    await talk.socket.send('{"type": "session.init", "payload": {}}')
    await talk.hear_until("session.created")
    for number in range(3):  # the last one finds the loss, where an answer was over before it
        words = [{"role": "user", "content": f"tell me {number} of {part.delay_s}"}]
        asked = {"messages": words, "streaming": True, "tts": {"enabled": True}}
        await talk.socket.send(json.dumps({"type": "input.append", "input": asked}))
        pieces = 0
        while (await talk.hear_until("text", "audio", "response.done"))["type"] != "response.done":
            await blow.aim()
            if pieces == part.step and number == 1:
                await blow.fall(part.delay_s / ANSWER_PIECES)
            pieces += 1
    await talk.end()


async def act(part: Part, blow: Blow) -> Talk:
    """Play a part to its end."""
    async with (
        asyncio.timeout(TALK_S_MAX),
        connect(f"{blow.server.url}?mode={part.mode}", max_size=None) as socket,
    ):
        talk = Talk(socket)
        if part.mode == "transcription":
            await _dictate(talk, part, blow)
        elif part.mode == "chat":
            await _ask(talk, part, blow)
        else:
            await _speak(talk, part, blow)
    return talk


def plain(frame: str) -> dict[str, Any]:
    """A frame without what was measured."""
    body: dict[str, Any] = json.loads(frame)
    metrics = body.get("metrics", {})
    kept = {name: value for name, value in metrics.items() if not name.endswith("_ms")}
    return body | {"metrics": kept}


@contextmanager
def counting_server(folder: Path, first: int, workers: int) -> Iterator[LiveServer]:
    """A server whose sessions have counted seeds, from `first` on."""
    run = (sys.executable, "-P", "-c", COUNTED.format(first=first))
    options = ("--isolate", *("--worker", "tiny") * (workers - 1), "--slots", "2")
    recording = ("--record", str(folder), "--rebuild", "exact")
    with live_server(*options, *recording, model="tiny", run=run) as server:
        yield server


def play(folder: Path, first: int, parts: list[Part], *, workers: int, is_real: bool) -> list[Talk]:
    """Play parts one after the other; `is_real`: their workers are killed."""
    talks, spent = [], set[int]()
    with counting_server(folder, first, workers) as server:
        for part in parts:
            _wait_for(1 + is_real, server, spent)
            talks.append(asyncio.run(act(part, Blow(server, is_real, spent))))
        assert server.stop() == 0
    return talks


def _wait_for(count: int, server: LiveServer, spent: set[int]) -> None:
    """Wait until as many workers serve; that one is dead is not noticed at once."""
    until_s, dead = time.monotonic() + SERVING_S_MAX, {f"pid {pid}" for pid in spent}
    while True:
        serving = [each["where"] for each in roster(server) if each["state"] == "serving"]
        if len(set(serving) - dead) >= count:
            return
        assert time.monotonic() < until_s
        time.sleep(0.2)


def compare(parts: list[Part], folder: Path, found: Found, load: Load, first: int = 0) -> None:
    """Play parts twice, and compare and judge them; `folder` is empty."""
    killed = play(folder / "killed", first, parts, workers=WORKERS, is_real=True)
    whole = play(folder / "whole", first, parts, workers=1, is_real=False)
    for number, (part, ours, others) in enumerate(zip(parts, killed, whole, strict=True), 1):
        name = f"rec-{first + number:06}"
        found.judge(folder / "killed" / f"{name}{SUFFIX}", [ours], load)
        found.counts[f"killed in {part.mode}"] += 1
        found.counts[f"killed in {part.moment}"] += part.mode in {"audio", "video"}
        if part.is_cut:
            continue
        found.counts["compared"] += 1
        ours_plain, others_plain = map(plain, ours.heard), map(plain, others.heard)
        if list(ours_plain) != list(others_plain):
            found.failures.append(f"{name} heard something else than without the loss: {part}")


def soak(seed: int, sessions: int, folder: Path, found: Found, load: Load) -> None:
    """Play as many sessions, in all modes in turn."""
    chance = Random(seed)
    parts = [draw(chance, MODES[number % len(MODES)]) for number in range(sessions)]
    for first in range(0, sessions, CHAPTER):
        chapter = folder / str(first)
        compare(parts[first : first + CHAPTER], chapter, found, load, first)
        print(f"{found.counts['sessions']} twins, {found.failures}", file=sys.stderr)
