"""What the tests share: sessions run whole, in memory, on virtual time.

`World` is a server without sockets: the real driver, connection, queue, recorder and machine around
a scripted backend. `Peer` is both ends of one in-memory WebSocket: the server's side of it is what
`runtime.net.connection.WebSocket` asks for, the test's side sends, listens, stalls and vanishes.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeGuard
from unittest.mock import patch

import anyio
import numpy as np
import pybase64
import trio
from trio.testing import MockClock

from protocol.values.effects import DecodeMedia
from protocol.values.events import Endpoint
from protocol.values.limits import Mode
from protocol.values.messages import ResumeRequest
from protocol.values.model import Unit
from recorder.storage.store import LogInfo, Store
from recorder.write.files import Disk
from recorder.write.writer import Recorder
from runtime.media.decoder import Client, MediaDecoder
from runtime.media.values import Decoded
from runtime.model.backends.base import Backend
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_chat import tone
from runtime.net.connection import OnMessages, WebSocketClosed
from runtime.net.websocket import MESSAGES_A_READ, TOGETHER_BYTES_MAX
from runtime.session import journal, speech_input
from runtime.session.server import Server
from runtime.session.setup import Parent, SessionSpec
from runtime.settings.settings import Settings
from runtime.slots.workers import Load, Workers
from tests.sessions.identities import CountedIdentities

Body = dict[str, Any]


def numbers(value: object) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def pcm(seconds: float = 1.0, level: float = 0.1) -> bytes:
    """Make a tone: float32 LE, 16 kHz mono."""
    at = np.arange(int(16_000 * seconds)) / 16_000
    return (level * np.sin(2 * np.pi * 220 * at)).astype("<f4").tobytes()


def base64(data: bytes) -> str:
    """Encode as the wire does."""
    return pybase64.b64encode(data).decode()


def init_frame(**payload: object) -> str:
    """Write a `session.init` of the `realtime` dialect."""
    body = {"type": "session.init", "payload": {"system_prompt": "be brief", **payload}}
    return json.dumps(body)


def append_frame(seconds: float = 1.0, **fields: object) -> str:
    """Write an `input.append` of the `realtime` dialect."""
    body = {"type": "input.append", "input": {"audio": base64(pcm(seconds)), **fields}}
    return json.dumps(body)


def append_sound(pcm16: bytes) -> str:
    """Write an append of a transcription."""
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64(pcm16)})


def close_frame(reason: str | None = None) -> str:
    """Write a `session.close`."""
    return json.dumps({"type": "session.close"} | ({"reason": reason} if reason else {}))


def talkative(unit: Unit, seed: int) -> Step:
    """Speak in every second that may be spoken in."""
    speech = Speaks(text="and ", pcm=tone(unit.index, seed, samples=24_000), end_of_turn=False)
    return Step(speech=speech, generate_s=0.3, steps=10)


class Peer:
    """One in-memory WebSocket, seen from both ends.

    Attributes:
        events: what the server sent, parsed.
        frames: the same, verbatim.
        closed: the code and reason with which the server closed; None while it has not.
        aborted: the server dropped the connection.
    """

    def __init__(self, mode: Mode = "audio") -> None:
        self.mode = mode
        self.events: list[Body] = []
        self.frames: list[str] = []
        self.closed: tuple[int, str] | None = None
        self.aborted = False
        self._to_server: list[str | bytes | None] = []
        self._gone = False
        self._broken = False
        self._left_with = 1006
        self._reads = True
        self._changed = anyio.Event()

    # -- the client's end -----------------------------------------------------------------------

    def send(self, *frames: str | bytes | None) -> None:
        """Send frames; None stands for one that is too big."""
        self._to_server += frames
        self._notify()

    def vanish(self) -> None:
        """Be gone, without a close."""
        self._gone = True
        self._notify()

    def leave(self, code: int) -> None:
        """Be gone, with a close."""
        self._left_with = code
        self.vanish()

    def break_down(self) -> None:
        """Fail as a bug in the transport would: what the server receives next raises."""
        self._broken = True
        self._notify()

    def stall(self) -> None:
        """Read nothing more."""
        self._reads = False

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on what was received holds, or the connection is over."""
        while not condition() and not self.is_over:
            changed = self._changed
            await changed.wait()

    async def heard(self, kind: str, count: int = 1) -> Body:
        """Wait for the `count`-th event of a type, or a delta of a kind, and return it."""
        await self.until(lambda: len(self.all(kind)) >= count)
        found = self.all(kind)
        assert len(found) >= count, f"no {kind} number {count}: {self.kinds}, {self.closed}"
        return found[count - 1]

    async def greeted(self) -> Body:
        """Wait for the greeting of a session that can be resumed."""
        await self.until(lambda: bool(self.events))
        first = self.events[0]
        assert first["type"] == "session.resumable"
        assert "seq" not in first
        return first

    @property
    def numbers(self) -> list[int]:
        """The numbers of the frames, where they have some."""
        return [event["seq"] for event in self.events if "seq" in event]

    @property
    def way_back(self) -> tuple[str, str, int, Mode]:
        """What a client needs to come back: recording, token, the last number it has, mode."""
        first, heard = self.events[0], self.numbers
        last = heard[-1] if heard else first["next_seq"] - 1
        return first["recording_id"], first["token"], last, self.mode

    async def over(self) -> None:
        """Wait until the server has closed or dropped the connection."""
        await self.until(lambda: False)

    def all(self, kind: str) -> list[Body]:
        """Return what was received of one type, or of one kind of delta."""
        return [event for event in self.events if kind in (event["type"], event.get("kind"))]

    @property
    def kinds(self) -> list[str]:
        """The types received, in order; a delta is named by its kind."""
        return [event.get("kind", event["type"]) for event in self.events]

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return self.closed is not None or self.aborted or self._gone

    # -- the server's end -----------------------------------------------------------------------

    async def receive(self) -> str | bytes | None:
        """Give the server the next frame."""
        while not self._to_server:
            if self._broken:
                raise RuntimeError("the transport broke")
            if self.is_over:
                raise WebSocketClosed(self._left_with, "")
            changed = self._changed
            await changed.wait()
        await anyio.lowlevel.checkpoint()
        return self._to_server.pop(0)

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        """Give the server messages, small ones that are there together, as a read brings them."""
        while True:
            messages = [await self.receive()]
            while is_small(messages[-1]) and self._to_server and is_small(self._to_server[0]):
                if len(messages) >= MESSAGES_A_READ:
                    break
                messages.append(self._to_server.pop(0))
            waits = on_messages(*messages)
            if waits is not None:
                await waits

    async def send_frames(self, *frames: str) -> None:
        """Take frames from the server."""
        await anyio.lowlevel.checkpoint()
        if self.is_over:
            raise WebSocketClosed(1006, "")
        if not self._reads:
            await anyio.sleep_forever()
        for frame in frames:
            self.frames.append(frame)
            self.events.append(json.loads(frame))
        self._notify()

    async def close(self, code: int, reason: str) -> None:
        """Take the server's close."""
        if not self.is_over:
            self.closed = (code, reason)
        self._notify()
        await anyio.lowlevel.checkpoint()

    async def abort(self) -> None:
        """Be dropped."""
        self.aborted = self.aborted or self.closed is None
        self._notify()
        await anyio.lowlevel.checkpoint()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def server_end(self) -> _ServerEnd:
        """What is given to the server."""
        return _ServerEnd(self)


def is_small(message: object) -> TypeGuard[str]:
    """Whether a connection gives a message together with others."""
    return isinstance(message, str) and len(message) <= TOGETHER_BYTES_MAX


class _ServerEnd:
    """The server's side of a `Peer`, as a `runtime.net.connection.WebSocket`."""

    def __init__(self, peer: Peer) -> None:
        self.deliver = peer.deliver
        self.receive = peer.receive
        self.send = peer.send_frames
        self.close = peer.close
        self.abort = peer.abort


class World:
    """A server in memory, and the peers that talk to it."""

    def __init__(self, server: Server, backend: ScriptedBackend, tasks: anyio.abc.TaskGroup):
        self.server = server
        self.backend = backend
        self._tasks = tasks

    def connect(
        self,
        mode: Mode = "video",
        *,
        endpoint: Endpoint = "realtime",
        label: str = "",
        resumable: bool = False,
        parent: Parent | None = None,
        address: str = "",
    ) -> Peer:
        """Open a connection."""
        peer = Peer(mode)
        arrival = SessionSpec(
            mode=mode,
            endpoint=endpoint,
            label=label,
            resumable=resumable,
            parent=parent,
            address=address,
        )
        self._tasks.start_soon(self.server.handle, peer.server_end, arrival)
        return peer

    def log_of(self, recording_id: str) -> LogInfo:
        """The log of a session."""
        folder = self.server._settings.record_to
        assert folder is not None
        found = Store(folder).find(recording_id)
        assert found is not None
        return found

    def come_back(self, recording_id: str, token: str, last_seq: int, mode: Mode = "audio") -> Peer:
        """Open another connection to a session."""
        peer = Peer(mode)
        asked = ResumeRequest(token=token, last_seq=last_seq)

        async def visit() -> None:
            refusal = await self.server.resume(peer.server_end, recording_id, mode, "", asked)
            if refusal:
                await peer.close(1008, refusal)

        self._tasks.start_soon(visit)
        return peer

    async def activate(
        self, mode: Mode = "video", *, resumable: bool = False, address: str = "", **payload: object
    ) -> Peer:
        """Open a connection and bring it to ACTIVE."""
        peer = self.connect(mode, resumable=resumable, address=address)
        await peer.heard("session.queue_done")
        peer.send(init_frame(**payload))
        await peer.heard("session.created")
        return peer

    async def activate_chat(self, *, resumable: bool = False, **payload: object) -> Peer:
        """Open a chat and bring it to ACTIVE."""
        peer = self.connect("chat", resumable=resumable)
        await peer.heard("session.queue_done")
        peer.send(json.dumps({"type": "session.init", "payload": payload}))
        await peer.heard("session.created")
        return peer

    async def activate_transcription(self, *, resumable: bool = False) -> Peer:
        """Open a transcription and choose its model."""
        peer = self.connect("transcription", resumable=resumable)
        await peer.heard("session.created")
        peer.send('{"type": "session.update", "model": "scripted"}')
        return peer

    async def quiet(self) -> None:
        """Wait until every session is over and its slot back."""
        await self.server.wait_until_empty()


@asynccontextmanager
async def world(
    backend: ScriptedBackend | None = None,
    *,
    record_to: Path | None = None,
    disk: Disk | None = None,
    threaded: bool = False,
    load: Load | None = None,
    beside: Callable[[], Backend] | None = None,
    has_key: Callable[[str], bool] = lambda _: True,
    decode_s: float = 0.0,
    classify: Callable[..., Awaitable[Any]] | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """Run a server in memory; the sessions that are left at the end are drained.

    Args:
        backend: scripted; the default script where it is None.
        record_to: the folder of the logs; nothing is recorded where it is None.
        disk: where logs go, where it is not the real one.
        threaded: record in a thread, as a server does; only on real time.
        load: loads a backend in place of one that is condemned; None: there comes no other.
        beside: makes a second worker; None: there is one.
        has_key: whether there is still a key of this name.
        decode_s: how long media is decoded.
        classify: has a slow detector classify sound; None: at once.
        settings: of `runtime.settings.settings.Settings`.
    """
    backend = backend or ScriptedBackend()
    recorder = None
    if record_to is not None:
        clock = time.monotonic if threaded else lambda: 0.0
        recorder = Recorder(disk=disk, clock=clock, inline=not threaded)
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        if not threaded:
            stack.enter_context(patch.object(journal, "in_thread", here))
            stack.enter_context(patch.object(speech_input, "in_thread", classify or here))
        server = Server(
            Settings(model="scripted", record_to=record_to, **settings),
            Workers((backend, *(() if beside is None else (beside(),))), load=load),
            tasks=tasks,
            recorder=recorder,
            identities=CountedIdentities(),
            decode_media=partial(decode_here, decode_s=decode_s),
            has_key=has_key,
        )
        tasks.start_soon(server.refresh)
        tasks.start_soon(server.replace_workers)
        try:
            yield World(server, backend, tasks)
            server.drain()
            await server.wait_until_empty()
            assert not backend.violations
        finally:
            if recorder is not None:
                recorder.close()
            tasks.cancel_scope.cancel()


async def here(work: Callable[[], Any]) -> Any:
    """Work in this thread: with one of its own, virtual time would run ahead."""
    await anyio.lowlevel.checkpoint()
    return work()


async def decode_here(effect: DecodeMedia, _client: Client, decode_s: float = 0.0) -> Decoded:
    """Decode in this thread: with one of its own, virtual time would run ahead."""
    await anyio.sleep(decode_s)
    return MediaDecoder().decode_here(effect)


def on_virtual_time(body: Callable[[], Awaitable[None]], *, seed: int = 0) -> None:
    """Run an async test on trio's virtual clock: waiting costs nothing.

    Trio shuffles the tasks that are ready; `seed` decides how, so that what fails fails again. (Its
    generator has no public name; pytest-trio and Hypothesis take hold of it in the same way.)
    """
    trio._core._run._r.seed(seed)
    trio.run(body, clock=MockClock(autojump_threshold=0))
