"""Adversaries of one kind each, for `tests.law`: clients that take what they can of a server.

    python -m tests.fairness.adversaries NAME URL

Each runs until it is killed, and says `ready` once it is at work, with the number of connections
that it counts. It keeps to no rule but those of the sockets; whatever the server does to a
connection, the next one takes its place.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import anyio.to_thread
import pybase64
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from runtime.net.link import PING
from tests.fairness.heavy_pictures import heavy_jpeg
from tests.sessions.in_memory import append_frame
from tests.soak.server import INIT, LOST, SECOND, frame_of, handshake

FLOODERS: Final = 24
"""Chats that flood: what one address could have is twenty times as much."""
FLOODERS_WITH_SLOT: Final = 4
SMALL_SENDERS: Final = 64
SMALL_PER_S: Final = 200
"""Messages a second of each, as many as one connection may send."""
ABANDONERS: Final = 16
FORKERS: Final = 16
RESUMERS: Final = 100
LINKS: Final = 100
"""To a worker, which has places for 64 gateways."""
SPOKEN: Final = 20
"""Seconds of speech of a session that is forked, or whose frames are asked for: 2.5 MB as sent."""
FLOOD_BYTES: Final = 20_000_000
"""Of one message: a fifth of what a chat may send."""
IDLE: Final = 4096
ADDRESSES: Final = 10
"""Of the loopback network, for an address may have 512 connections."""
SLOW_READERS: Final = 16
POLLS: Final = 4
RETRY_S: Final = 0.05
PICTURES: Final = 4
"""A unit."""

EMPTY_FRAGMENT: Final = b"\x00\x80" + bytes(4)
PONG: Final = b"\x8a\x80" + bytes(4)
"""Masked, as all that a client sends."""
CHAT: Final = "/v1/realtime?mode=chat"
VIDEO: Final = "/v1/realtime?mode=video"
AUDIO: Final = "/v1/realtime?mode=audio"


def _append(**fields: object) -> bytes:
    body = {"type": "input.append", "input": {"audio": base64(SECOND), **fields}}
    return frame_of(json.dumps(body))


def base64(data: bytes) -> str:
    """Encode as the wire does."""
    return pybase64.b64encode(data).decode()


async def ended_session(url: str) -> tuple[str, str]:
    """Have a session of some seconds, and end it; gives its recording, and the token to resume."""
    async with connect(f"{url}?mode=audio&resumable=1", max_size=None) as session:
        first = json.loads(await session.recv())
        config = {"force_listen_count": 0}
        await session.send(json.dumps({"type": "session.init", "payload": {"config": config}}))
        while json.loads(await session.recv())["type"] != "session.created":
            pass
        for _ in range(SPOKEN):
            await session.send(append_frame())
            while json.loads(await session.recv()).get("kind") not in ("listen", "audio"):
                pass
        await session.send('{"type": "session.close"}')
        with suppress(ConnectionClosed):
            while True:
                await session.recv()
    return first["recording_id"], first["token"]


class Adversary:
    """One process of clients.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._url = url
        self._host, self._port = str(parts.hostname), int(parts.port or 0)
        self._open = 0

    async def dial(self, *, number: int = 0, buffer: int | None = None) -> anyio.abc.SocketStream:
        """Connect, from one of several addresses."""
        local = f"127.0.0.{2 + number % ADDRESSES}"
        stream = await anyio.connect_tcp(self._host, self._port, local_host=local)
        if buffer is not None:
            raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        return stream

    async def open(
        self, path: str, *, number: int = 0, buffer: int | None = None
    ) -> anyio.abc.SocketStream:
        """Connect, and open a WebSocket."""
        stream = await self.dial(number=number, buffer=buffer)
        await stream.send(handshake(f"{self._host}:{self._port}", path))
        await stream.receive()
        return stream

    async def again(self, client: Callable[[int], Awaitable[None]], number: int) -> None:
        """Be one client after the other."""
        while True:
            try:
                await client(number)
            except LOST:
                pass
            except BaseExceptionGroup as group:
                if group.split(LOST)[1] is not None:
                    raise
            await anyio.sleep(RETRY_S)

    async def many(self, client: Callable[[int], Awaitable[None]], count: int) -> None:
        """Be many clients at once; the first connections of all are awaited."""
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(self.again, client, number)
            await anyio.sleep(1)
            print("ready", self._open, flush=True)

    async def _repeat(
        self, path: str, message: bytes, number: int, *, first: bytes = b"", every_s: float = 0
    ) -> None:
        """Send a message over and over, and read what is answered."""
        stream = await self.open(path, number=number)
        async with stream, anyio.create_task_group() as tasks:
            tasks.start_soon(_read, stream)
            await stream.send(first)
            while True:
                await stream.send(message)
                await anyio.sleep(every_s)

    # -- the kinds ------------------------------------------------------------------------------

    async def flood_without_slot(self) -> None:
        """Repeat a message of 20 MB in chats, each of which is refused: none was set up."""
        message = _append(padding="A" * FLOOD_BYTES)
        await self.many(partial(self._repeat, CHAT, message), FLOODERS)

    async def flood_with_slot(self) -> None:
        """Repeat a message of 20 MB that is taken, in sessions that hold slots."""
        message = _append(padding=base64(os.urandom(FLOOD_BYTES * 3 // 4)))
        repeat = partial(self._repeat, VIDEO, message, first=INIT)
        await self.many(repeat, FLOODERS_WITH_SLOT)

    async def small_messages(self) -> None:
        """Send messages of two bytes in chats without a slot, each of which is refused."""
        repeat = partial(self._repeat, CHAT, frame_of("{}"), every_s=1 / SMALL_PER_S)
        await self.many(repeat, SMALL_SENDERS)

    async def small_acknowledgements(self) -> None:
        """Send small messages that are valid, in chats without a slot."""
        message = frame_of('{"type": "playback.ack", "played_ms": 0}')
        repeat = partial(self._repeat, CHAT, message, first=INIT, every_s=1 / SMALL_PER_S)
        await self.many(repeat, SMALL_SENDERS)

    async def fragments(self) -> None:
        """Send a message in fragments of no bytes, without an end."""
        message, first = EMPTY_FRAGMENT * 8, bytes([0x01, *EMPTY_FRAGMENT[1:]])
        repeat = partial(self._repeat, CHAT, message, first=first, every_s=1 / SMALL_PER_S)
        await self.many(repeat, SMALL_SENDERS)

    async def abandoned(self) -> None:
        """Set up sessions that could be resumed, and drop them at once."""

        async def abandon(number: int) -> None:
            path = (CHAT, VIDEO)[number % 2] + "&resumable=1"
            async with await self.open(path, number=number) as stream:
                if number % 4 > 1:
                    await stream.send(INIT)
                await stream.receive()

        await self.many(abandon, ABANDONERS)

    async def forks(self) -> None:
        """Fork a recording over and over, from one address, and drop each fork once it began."""
        recording, _ = await self._ended_session()

        async def fork(number: int) -> None:
            path = f"{AUDIO}&fork={recording}&at={SPOKEN}"
            async with await self.open(path) as stream:
                await stream.send(INIT)
                await stream.receive()

        await self.many(fork, FORKERS)

    async def resumes(self) -> None:
        """Ask for the frames of an ended session, read none, and come back when replaced."""
        recording, token = await self._ended_session()
        hello = frame_of(json.dumps({"type": "session.resume", "token": token, "last_seq": -1}))

        async def resume(number: int) -> None:
            path = f"{AUDIO}&resume={recording}"
            async with await self.open(path, number=number, buffer=4096) as stream:
                await stream.send(hello)
                while True:
                    await anyio.sleep(0.5)
                    await stream.send(PONG)

        await self.many(resume, RESUMERS)

    async def _ended_session(self) -> tuple[str, str]:
        return await anyio.to_thread.run_sync(asyncio.run, ended_session(self._url))

    async def pictures(self) -> None:
        """Send four progressive pictures of 20 megapixels with each second."""
        message = _append(video_frames=[base64(heavy_jpeg())] * PICTURES)
        await self.many(partial(self._repeat, VIDEO, message, first=INIT, every_s=1), 1)

    async def slow_readers(self) -> None:
        """Speak and never read; ask for recordings and pages, and read a few bytes of them."""
        append = _append()

        async def stare(number: int) -> None:
            async with await self.open(VIDEO, number=number, buffer=4096) as stream:
                await stream.send(INIT)
                while True:
                    await stream.send(append)
                    await anyio.sleep(1)

        async def sip(number: int) -> None:
            if not (listed := json.loads(await self._get("/api/recordings", number))["recordings"]):
                return  # and come back
            name = listed[number % len(listed)]["recording_id"]
            what = ("/log", "/view")[number // 2 % 2]
            async with await self.dial(number=number, buffer=4096) as stream:
                await stream.send(self._request(f"/api/recordings/{name}{what}"))
                for _ in range(1_000_000):
                    await stream.receive(1)
                    await anyio.sleep(0.5)

        async def both(number: int) -> None:
            await (sip if number % 2 else stare)(number)

        await self.many(both, SLOW_READERS)

    async def forged_logs(self) -> None:
        """Ask for the list of recordings over and over; the folder holds forged ones."""

        async def poll(number: int) -> None:
            while True:
                await self._get("/api/recordings", number)

        await self.many(poll, POLLS)

    async def idle(self) -> None:
        """Open as many chats as there may be, and say nothing."""

        async def sit(number: int) -> None:
            async with await self.open(CHAT, number=number) as stream, self._counted():
                await _stay(stream)

        async with anyio.create_task_group() as tasks:
            for number in range(IDLE):
                tasks.start_soon(self.again, sit, number)
                await anyio.sleep(0.002)
            for _ in range(200):
                if self._open < IDLE - 8:
                    await anyio.sleep(0.1)
            print("ready", self._open, flush=True)

    async def worker_links(self) -> None:
        """Connect to a worker without its token: say nothing, half a greeting, or a false one."""
        says = (b"", b"\x00", os.urandom(256))

        async def link(number: int) -> None:
            async with await self.dial(number=number) as stream, self._counted():
                await stream.send(says[number % len(says)])
                await _read(stream)

        await self.many(link, LINKS)

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def _request(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n\r\n".encode()

    async def _get(self, path: str, number: int) -> bytes:
        async with await self.dial(number=number) as stream:
            request = self._request(path).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            await stream.send(request)
            answer = bytearray()
            with anyio.move_on_after(30):
                while True:
                    try:
                        answer += await stream.receive()
                    except anyio.EndOfStream:
                        break
            return bytes(answer.partition(b"\r\n\r\n")[2])


async def _read(stream: anyio.abc.SocketStream) -> None:
    while True:
        await stream.receive()


async def _stay(stream: anyio.abc.SocketStream) -> None:
    """Read and answer pings, those that come alone: whoever says nothing is dropped as dead."""
    while True:
        if await stream.receive() == PING:
            await stream.send(PONG)


KINDS: Final[Mapping[str, Callable[[Adversary], Awaitable[None]]]] = {
    kind.__name__: kind
    for kind in (
        Adversary.flood_without_slot,
        Adversary.flood_with_slot,
        Adversary.small_messages,
        Adversary.small_acknowledgements,
        Adversary.fragments,
        Adversary.abandoned,
        Adversary.forks,
        Adversary.resumes,
        Adversary.pictures,
        Adversary.slow_readers,
        Adversary.forged_logs,
        Adversary.idle,
        Adversary.worker_links,
    )
}
"""Each adversary by its name."""


if __name__ == "__main__":
    anyio.run(KINDS[sys.argv[1]], Adversary(sys.argv[2]), backend="trio")
