"""Conversations of clients whose worker is lost, and what is held to of their logs.

For `tests.soak.workers`, which says what that is, and the tests that are a small part of it.
"""

from __future__ import annotations

import asyncio
import json
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
from protocol.values.records import derive_id
from recorder.format.format import Record, recording_id_of
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import LogReader
from replay.rerun.full import Loading, replay_fully
from replay.rerun.logic import replay
from runtime.model.backends.base import Backend
from tests.golden.stage import picture
from tests.sessions.in_memory import append_frame, append_sound, base64, init_frame

PACE_S: Final = 0.25
"""Between two seconds of sound: quicker than in life, and slow enough to be killed amid."""
SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
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
    """One client's end of a session.

    Attributes:
        socket: its connection.
        pace_s: the time between two seconds of sound.
        heard: what it heard, verbatim.
    """

    socket: ClientConnection
    pace_s: float = PACE_S
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
            await asyncio.sleep(talk.pace_s)
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
            await talk.socket.send('{"type": "input_audio_buffer.commit", "final": false}')
            await asyncio.sleep(talk.pace_s)
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


async def hold(url: str, mode: str, seed: int = 0, pace_s: float = PACE_S) -> Talk:
    """Hold one conversation to its end."""
    chance = Random(seed)
    async with connect(f"{url}?mode={mode}", max_size=None) as socket:
        talk = Talk(socket, pace_s)
        if mode == "transcription":
            await dictate(talk, chance)
        elif mode == "chat":
            await ask(talk, chance)
        else:
            await speak(talk, chance, sees=mode == "video")
    return talk


# -- what the logs say -----------------------------------------------------------------------------


@attrs.define
class Found:
    """What was found so far; times in seconds.

    `silences_s`: from a loss to the next frame, but of transcriptions: those wait for a word.
    """

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
        name = derive_id(recording_id_of(path), "sess", 0)
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
        was_lost = is_written = False
        for record in records:
            event = event_of(record.fields, record.at_ns) if record.kind in EVENT_KINDS else None
            match event:
                case ev.ConnectionOpened(mode=mode):
                    is_written = mode == "transcription"
                case ev.UnitDone() | ev.ChunkDone():
                    self.counts["units"] += 1
                case ev.BackendLost(at_ns=at_ns) | ev.LeaseRevoked(at_ns=at_ns):
                    lost_ns, was_lost = at_ns, True
                case ev.Rebuilt(steps=steps, cost_us=cost_us):
                    self.counts["rebuilds"] += 1
                    self.counts["steps_fed_again"] += steps
                    self.rebuilds_s.append(cost_us / 1e6)
            if record.kind == "tx" and lost_ns is not None and not is_written:
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


def differences(log: Path, load: Load) -> str:
    """Replay a log without and with the model; returns where it diverges, or nothing."""
    with LogReader(log) as reader:
        head, items = reader.head.fields, list(reader)
    logic = replay(items)
    full = anyio.run(replay_fully, head, items, load, backend="trio")
    if logic.identical and full.compared and full.identical:
        return ""
    return f"replay: {logic.divergence}, with the model: {full.first_divergence or full}"


def spread(values: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, in seconds."""
    if not values:
        return {}
    return {f"p{at}": round(float(np.percentile(values, at)), 3) for at in (50, 99)}
