"""Conversations of every dialect whose client comes back by itself, and what both sides count."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import attrs
import numpy as np

from protocol.values.limits import Mode
from protocol.values.messages import Created, ErrorReport, QueueDone, Response, TranscriptDone
from protocol.values.model import INPUT_RATE_HZ
from protocol.values.openai import (
    CancelResponse,
    CommitSound,
    Configure,
    CreateItem,
    InputStep,
    Item,
    ItemStep,
    LiveSettings,
    Part,
    Respond,
    TurnDetection,
)
from protocol.values.requests import Append, Ask, ChatMessage, Init, TextPart
from recorder.read.reader import read
from runtime.client.session import ClientSession, FrameSocket, connect
from tests.sessions.in_memory import pcm
from tests.sessions.outliving import seconds_of_speech

UNITS: Final = 5
RATE_HZ: Final = 24_000
LAST_ITEM: Final = "item_last"
WAIT_S: Final = 240
"""The back-off of a client that finds no server is 30 s at most, several times in a row."""


@attrs.define
class Told:
    """What a client sent and heard, once each, and its longest time without hearing anything."""

    recording_id: str = ""
    sent: list[str] = attrs.Factory(list)
    heard: list[str] = attrs.Factory(list)
    silent_s: float = 0.0


class Tap:
    """A socket that notes what crosses it."""

    def __init__(self, socket: FrameSocket, told: Told) -> None:
        self._socket = socket
        self._told = told
        self._heard_s = time.monotonic()

    @property
    def closed(self) -> tuple[int, str] | None:
        """As `FrameSocket`."""
        return self._socket.closed

    async def receive(self) -> str | bytes:
        """As `FrameSocket`."""
        try:
            frame = await self._socket.receive()
        finally:
            silent_s, self._heard_s = time.monotonic() - self._heard_s, time.monotonic()
            self._told.silent_s = max(self._told.silent_s, silent_s)
        assert isinstance(frame, str)
        self._told.heard.append(frame)
        return frame

    async def send(self, message: str) -> None:
        """As `FrameSocket`."""
        self._told.sent.append(message)
        await self._socket.send(message)


async def _hear(session: ClientSession) -> None:
    async for _ in session:
        pass


TRANSCRIBED: Final = ("transcript_done", "transcript_failed")
"""How the text of an item ends."""


async def until(session: ClientSession, kind: type | tuple[type, ...]) -> None:
    """Hear messages until one of a kind."""
    async for message in session:
        if isinstance(message, kind):
            return
    raise AssertionError(f"no {kind}: {session._websocket.closed}")


async def _duplex(session: ClientSession, rng: random.Random, model: str) -> None:
    await until(session, QueueDone)
    await session.init(Init(instructions="be brief"))
    await until(session, Created)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_hear, session)
        for number in range(UNITS):
            await session.append(Append(pcm=pcm(level=0.1 + number / 10)))
            await anyio.sleep(rng.uniform(0, 0.2))
        await anyio.sleep(0.5)
        await session.close("enough")


async def _live(session: ClientSession, rng: random.Random, model: str) -> None:
    await until(session, QueueDone)
    await session.init(Init(instructions="be brief", live=LiveSettings(model=model)))
    await until(session, Created)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_hear, session)
        for _ in range(UNITS * 10):
            await session.append_sound(bytes(rng.randint(1000, 3200) * 2))
            await anyio.sleep(rng.uniform(0, 0.02))
        await anyio.sleep(0.5)
        await session.close()


async def _openai(session: ClientSession, rng: random.Random, model: str) -> None:
    """Ask something and be quiet, twice; then have the model be silent for good."""
    await until(session, Created)
    detection = TurnDetection(kind="server_vad", interrupts=rng.random() < 0.5)
    await session.send(Configure(detection=detection))
    sound = (_spoken() + bytes(4 * RATE_HZ)) * 2
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_hear_the_last, session)
        at = 0
        while at < len(sound):
            size = 2 * rng.randint(2_000, 9_600)
            await session.append_sound(sound[at : at + size])
            at += size
            await anyio.sleep(rng.uniform(0, 0.1))
        await session.send(Respond())
        await anyio.sleep(0.5)
        await session.send(Configure(detection=TurnDetection(creates=False)))
        await session.send(CancelResponse())
        part = Part(kind="input_text", text="enough")
        await session.send(CreateItem(item=Item(id=LAST_ITEM, role="user", parts=(part,))))


def _spoken() -> bytes:
    """A question: signed 16-bit LE, 24 kHz."""
    pcm = np.concatenate([np.frombuffer(second, "<f4") for second in seconds_of_speech()])
    at = np.arange(len(pcm) * RATE_HZ // INPUT_RATE_HZ) * INPUT_RATE_HZ / RATE_HZ
    return (np.interp(at, np.arange(len(pcm)), pcm) * 32767).astype("<i2").tobytes()


async def _hear_the_last(session: ClientSession) -> None:
    """Hear messages until an item after which nothing is said."""
    async for message in session:
        if isinstance(message, ItemStep) and (message.kind, message.item.id) == ("done", LAST_ITEM):
            return
    raise AssertionError("the last item is not done")


async def _chat(session: ClientSession, rng: random.Random, model: str) -> None:
    await until(session, QueueDone)
    await session.init(Init(instructions=""))
    await until(session, Created)
    for number in range(2):
        await session.ask(_question(f"{number} two three four five six " * rng.randint(1, 5)))
        await until(session, (Response, ErrorReport))  # the latter: its server was lost twice
    await session.close("enough")
    await _hear(session)


async def _request(session: ClientSession, rng: random.Random, model: str) -> None:
    await session.ask(_question("one two three four five six " * rng.randint(150, 200)))
    await _hear(session)


async def _transcription(session: ClientSession, rng: random.Random, model: str) -> None:
    await until(session, Created)
    await session.choose(model)
    for _ in range(2):
        for _ in range(UNITS):
            await session.append_sound(bytes(rng.randint(1, 8000) * 2))
            await anyio.sleep(rng.uniform(0, 0.1))
        await session.commit(final=True)
        await until(session, TranscriptDone)


async def _dictation(session: ClientSession, rng: random.Random, model: str) -> None:
    """Say two utterances in pieces, and end each."""
    await until(session, Created)
    await session.send(Configure(is_undetected=True))
    for _ in range(2):
        for _ in range(UNITS):
            await session.append_sound(bytes(2 * rng.randint(1, 12_000)))
            await anyio.sleep(rng.uniform(0, 0.1))
        await session.send(CommitSound())
        async for message in session:
            if isinstance(message, InputStep) and message.kind in TRANSCRIBED:
                break


def _question(text: str) -> Ask:
    return Ask(messages=(ChatMessage(role="user", content=(TextPart(text=text),)),))


_Course = Callable[[ClientSession, random.Random, str], Awaitable[None]]
KINDS: Final[dict[str, tuple[str, Mode, _Course]]] = {
    "realtime, audio": ("realtime", "audio", _duplex),
    "realtime, video": ("realtime", "video", _duplex),
    "duplex-v1": ("duplex-v1", "audio", _duplex),
    "legacy-duplex": ("legacy-duplex", "audio", _duplex),
    "live": ("live", "audio", _live),
    "openai": ("openai", "audio", _openai),
    "realtime, chat": ("realtime", "chat", _chat),
    "legacy-chat": ("legacy-chat", "chat", _request),
    "transcription": ("transcription", "transcription", _transcription),
    "transcription-responses": ("transcription-responses", "transcription", _transcription),
    "openai-transcription": ("openai-transcription", "transcription", _dictation),
}


async def converse(
    kind: str, url: str, told: Told, rng: random.Random, model: str = "scripted"
) -> None:
    """Have a conversation with a model, and note it."""
    dialect, mode, session_kind = KINDS[kind]
    url += f"?model={model}" if dialect == "openai" else ""
    with anyio.fail_after(WAIT_S):
        async with connect(url, mode=mode, dialect=dialect, resume=True) as session:
            socket = session._websocket
            session._websocket = Tap(socket, told)
            try:
                await session_kind(session, rng, model)
            finally:
                told.recording_id = socket.recording_id  # type: ignore[attr-defined]


def heard_and_said(log: Path) -> tuple[list[str], list[str]]:
    """The messages that a log's session got, and the frames that it said."""
    heard, said = list[str](), list[str]()
    for record in read(log):
        if record.kind == "rx":
            heard.append(str(record.fields["frame"]))
        elif record.kind == "tx":
            said.append(str(record.fields["frame"]))
    return heard, said


def cuts_of(kind: str, rng: random.Random) -> list[int]:
    """Draw the bytes of each connection before its cut; by then the first was greeted."""
    is_sound = KINDS[kind][2] in (_duplex, _live, _openai)
    most = 5.6 if is_sound else 3.6
    return [int(10 ** rng.uniform(3.0, most)) for _ in range(rng.randint(1, 4))]
