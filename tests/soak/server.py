"""A server under clients that come and go for ten minutes, one in five misbehaving: `make soak`.

    python -m tests.soak.server [--minutes M] [--clients N] [--out docs/evidence]

A real `antiphon serve` with the scripted model and recording on; its clients use real
sockets. The good ones hold short conversations, by voice and by text, and must never see an error.
The bad ones flood, vanish, send garbage, never read, or stop amid a handshake.

Held to: no error of the server's own in its log; its memory flat within `GROWTH_MAX` from the
middle of the run to its end; when all have left, no session, slot, queue place, task or file
descriptor left over. What was found goes to `soak.json`, without a date; it exits with 1 where
anything was not so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import attrs
import numpy as np
import pybase64
import simplejpeg

import antiphon
from runtime.commands.demo import served
from tests.project.evidence import add_out

SLOTS: Final = 32
"""Fewer than clients, so that the queue is used too."""
BAD_SHARE: Final = 5
"""One client in so many misbehaves."""
GROWTH_MAX: Final = 0.05
SAMPLE_S: Final = 1.0
SETTLE_S: Final = 30.0
"""A bad client's leavings are noticed within this: stalls, handshakes and idle HTTP."""
CHANCE: Final = random.Random(7)

SECOND: Final = (0.1 * np.sin(np.arange(16_000) / 9)).astype("<f4").tobytes()
JPEG: Final = simplejpeg.encode_jpeg(np.zeros((48, 64, 3), np.uint8))


@attrs.define
class Found:
    """What was found so far."""

    done: Counter[str] = attrs.Factory(Counter)
    failures: list[str] = attrs.Factory(list)
    rss_kib: list[int] = attrs.Factory(list)
    descriptors: list[int] = attrs.Factory(list)

    def fail(self, what: str) -> None:
        """Note what was not so, the first few times."""
        if len(self.failures) < 50:
            self.failures.append(what)


@attrs.frozen(kw_only=True)
class Server:
    """The server, seen from outside.

    Attributes:
        url: of its WebSockets.
        pid: of its process.
    """

    url: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    def rss_kib(self) -> int:
        """Memory that it holds."""
        status = Path(f"/proc/{self.pid}/status").read_text("ascii")
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None
        return int(found[1])

    def descriptors(self) -> int:
        """Files and sockets that it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        host, port = self.address
        request = urllib.request.Request(
            f"http://{host}:{port}/status", headers={"Accept": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)
        return said


# -- good clients ----------------------------------------------------------------------------------


async def speak(server: Server) -> None:
    """Hold a conversation of some seconds, with pictures."""
    seconds = CHANCE.randint(3, 15)
    heard = 0
    async with antiphon.connect(server.url, mode="video", retries=20) as session:

        async def listen() -> None:
            nonlocal heard
            async for event in session:
                if isinstance(event, antiphon.ErrorReport):
                    raise RuntimeError(f"a good client was told {event.code}: {event.message}")
                heard += isinstance(event, antiphon.Listen | antiphon.Speech)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            for _ in range(seconds):
                await session.append(SECOND, [JPEG])
                await anyio.sleep(1)
            await session.close()
    if heard < seconds - 3:
        raise RuntimeError(f"a good client heard {heard} answers to {seconds} seconds")


async def chat(server: Server) -> None:
    """Ask a few questions."""
    async with antiphon.connect(server.url, mode="chat", retries=20) as session:
        for number in range(CHANCE.randint(1, 4)):
            response = await session.answer(f"question {number}")
            if f"question {number}" not in response.text:
                raise RuntimeError(f"a good client was answered {response.text!r}")
            await anyio.sleep(CHANCE.random() * 2)


# -- bad clients -----------------------------------------------------------------------------------


def _handshake(server: Server) -> bytes:
    host, port = server.address
    return handshake(f"{host}:{port}", "/v1/realtime?mode=audio")


def handshake(authority: str, path: str) -> bytes:
    """Write the request for a WebSocket."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {pybase64.b64encode(os.urandom(16)).decode()}\r\n\r\n"
    ).encode()


def frame_of(text: str) -> bytes:
    """Write a text message with a mask of zeros."""
    data = text.encode()
    head = bytes([0x81, 0xFF]) + len(data).to_bytes(8, "big")
    if len(data) < 1 << 16:
        head = bytes([0x81, 0xFE]) + len(data).to_bytes(2, "big")
    if len(data) < 126:
        head = bytes([0x81, 0x80 | len(data)])
    return head + bytes(4) + data


APPEND: Final = frame_of(
    json.dumps({"type": "input.append", "input": {"audio": pybase64.b64encode(SECOND).decode()}})
)
INIT: Final = frame_of('{"type": "session.init", "payload": {}}')


async def _dial(server: Server) -> anyio.abc.SocketStream:
    host, port = server.address
    return await anyio.connect_tcp(host, port)


async def vanish(server: Server) -> None:
    """Stop amid a second of sound, without a word."""
    stream = await _dial(server)
    await stream.send(_handshake(server))
    await stream.receive()
    await stream.send(INIT + APPEND + APPEND[: CHANCE.randint(1, len(APPEND))])
    await anyio.sleep(CHANCE.random())
    await anyio.aclose_forcefully(stream)


async def flood(server: Server) -> None:
    """Send a minute of sound at once, and leave before it is answered."""
    stream = await _dial(server)
    async with stream:
        await stream.send(_handshake(server))
        await stream.receive()
        await stream.send(INIT)
        with anyio.move_on_after(5):
            for _ in range(60):
                await stream.send(APPEND)


async def babble(server: Server) -> None:
    """Send what is no message, and then what is no WebSocket."""
    stream = await _dial(server)
    async with stream:
        await stream.send(_handshake(server))
        await stream.receive()
        for text in ('{"type": 7}', '{"type": "session.init", "payload": 3}', '{"type": "x"}'):
            await stream.send(frame_of(text))
            await anyio.sleep(0.1)
        await stream.send(CHANCE.randbytes(500))
        with anyio.move_on_after(5):
            while await stream.receive():
                pass


async def stare(server: Server) -> None:
    """Talk without ever reading an answer, until the server has had enough."""
    stream = await _dial(server)
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with stream:
        await stream.send(_handshake(server))
        await stream.send(INIT)
        with anyio.move_on_after(20):
            while True:
                await stream.send(APPEND)
                await anyio.sleep(1)


async def dither(server: Server) -> None:
    """Begin a handshake and never end it."""
    stream = await _dial(server)
    async with stream:
        await stream.send(_handshake(server)[: CHANCE.randint(1, 100)])
        with anyio.move_on_after(15):
            await stream.receive()


async def browse(server: Server) -> None:
    """Ask for what there is not, over HTTP."""
    stream = await _dial(server)
    async with stream:
        for path in ("/nothing", "/../../etc/passwd", "/v1/realtime", "/health"):
            await stream.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            with anyio.move_on_after(5):
                await stream.receive()


Client = Callable[[Server], Awaitable[None]]
GOOD: Final[tuple[Client, ...]] = (speak, speak, chat)
BAD: Final[tuple[Client, ...]] = (vanish, flood, babble, stare, dither, browse)
LOST: Final = (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError)


async def come_and_go(server: Server, number: int, until_s: float, found: Found) -> None:
    """Be one client after the other until the time is up."""
    is_bad = number % BAD_SHARE == 0
    while anyio.current_time() < until_s:
        client = CHANCE.choice(BAD if is_bad else GOOD)
        name = getattr(client, "__name__", "client")
        try:
            with suppress(*(LOST if is_bad else ())):
                await client(server)
            found.done[name] += 1
        except Exception as error:
            found.fail(f"{name}: {_innermost(error)!r}")
        await anyio.sleep(CHANCE.random())


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# -- the run ---------------------------------------------------------------------------------------


async def watch(server: Server, found: Found) -> None:
    """Look at the server's process again and again."""
    while True:
        found.rss_kib.append(server.rss_kib())
        found.descriptors.append(server.descriptors())
        await anyio.sleep(SAMPLE_S)


def growth_of(samples: list[int]) -> float:
    """Say how much more the last sixth holds than the sixth in the middle; 0.01 is one in 100."""
    sixth = max(1, len(samples) // 6)
    middle = statistics.median(samples[3 * sixth : 4 * sixth])
    return statistics.median(samples[-sixth:]) / middle - 1


def errors_in(log: Path) -> list[str]:
    """Find what the server says of its own failures."""
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return [line[:300] for line in lines if re.search(r'"level": ?"(error|critical)"', line)]


async def soak(minutes: float, clients: int) -> tuple[Found, dict[str, object]]:
    """Run it, and say what was found."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        options = ("--slots", str(SLOTS), "--queue-max", "256", "--log-format", "json")
        async with served("scripted", Path(folder), *options) as url:
            server = Server(url=url, pid=_server_pid(urlsplit(url).port or 0))
            await chat(server)
            await anyio.sleep(5)
            descriptors, before = server.descriptors(), server.status()  # which opens one itself
            until_s = anyio.current_time() + 60 * minutes
            async with anyio.create_task_group() as watching:
                watching.start_soon(watch, server, found)
                async with anyio.create_task_group() as tasks:
                    for number in range(clients):
                        tasks.start_soon(come_and_go, server, number, until_s, found)
                watching.cancel_scope.cancel()
            await anyio.sleep(SETTLE_S)
            left = {"descriptors": server.descriptors() - descriptors}
            after = server.status()
            left["tasks"] = after["tasks"] - before["tasks"]
            left |= {"sessions": len(after["sessions"]), "queue": after["queue_length"]}
            left["slots"] = after["slots"]["slots"] - after["slots"]["free"]
        for what, count in left.items():
            if count > 0:
                found.fail(f"{count} {what} left over")
        for line in errors_in(Path(folder) / "server.log"):
            found.fail(f"the server's log: {line}")
    growth = growth_of(found.rss_kib)
    if growth > GROWTH_MAX:
        found.fail(f"memory grew by {growth:.1%}")
    return found, {"left_over": left, "memory_growth": round(growth, 4)}


def _server_pid(port: int) -> int:
    """Find the process that listens on a port, among our children."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text("ascii").split()
    assert len(children) == 1, f"one child is the server on port {port}, not {children}"
    return int(children[0])


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=50)
    add_out(parser)
    given = parser.parse_args()
    began_s = time.monotonic()
    found, sums = anyio.run(partial(soak, given.minutes, given.clients))
    result = {
        "what": "a server under clients that come and go, one in five of them misbehaving",
        "good": not found.failures,
        "clients": given.clients,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "done": dict(sorted(found.done.items())),
        **sums,
        "memory_mib": [round(kib / 1024) for kib in (min(found.rss_kib), max(found.rss_kib))],
        "descriptors_max": max(found.descriptors),
        "failures": found.failures,
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    text = json.dumps(result, indent=2) + "\n"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "soak.json").write_text(text, "utf-8")
    print(text)
    if found.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
