"""The load of the gateway bench: many WebSocket clients in one process and one thread.

It is made to be no bottleneck: a unit's frame is masked once and sent as it is, an answer's bytes
are counted and thrown away, but for each session's first, which is read whole and held to what a
delta must be. Units come by the clock and not by when others were answered (`flat` apart, which
keeps `WINDOW` units of each session under way). A unit's time begins when the last of its bytes was
due and ends with the last byte of its audio delta; so what the load itself is late by counts too.
It says how late that was, and what part of the time it was busy.

It reads a line of JSON that says where to and what, connects, says `{"ready": true}`, waits for a
line, runs, says what it found, waits for a line, leaves, and is ready for the next.
"""

from __future__ import annotations

import base64
import gc
import heapq
import itertools
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES
from tests.bench.gateway.material import PATHS, Coding, Pace, make_exchanges

WINDOW: Final = 2
"""Units of a session under way when it goes flat out: one is answered while the next is read."""
SETUP_WAIT_S: Final = 60.0
ANSWERS_WAIT_S: Final = 10.0
"""For what was not answered when the last unit was sent; what is not by then never will be."""
NS: Final = 1_000_000_000
SLOW_BYTES: Final = 3 << 10
SLOW_STEP_NS: Final = NS // 1000
"""3 KiB a millisecond, 25 Mbit/s: what arrives over a good uplink, segment by segment."""
SPIN_NS: Final = NS // 1000
"""epoll waits for whole milliseconds; what is due sooner is waited for without sleeping."""
LEAD_NS: Final = NS // 20
SMALL_BYTES: Final = 8 << 10
"""Messages up to this are read whole; an answer's sound is larger."""
BUFFER_BYTES: Final = 1 << 18
MASK: Final = b"\x5a\xc3\x17\x88"
INIT: Final = b'{"type":"session.init","payload":{"instructions":"Answer what you hear and see."}}'
CHOICE: Final[dict[Coding, tuple[bytes, ...]]] = {
    "pcm16": (
        b'{"type":"session.update","model":"bench"}',
        b'{"type":"input_audio_buffer.commit"}',
    ),
    "openai": (
        b'{"type":"session.update","session":{"type":"realtime","audio":{"input":'
        b'{"turn_detection":{"type":"server_vad","interrupt_response":false}}}}}',
    ),
}
"""What a session is told when it is there. The model speaks all the time, also over its user."""
START: Final = b'{"type":"session.start","session":{"model":"bench"}}'
"""What begins one of the Live API."""

TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA
_FIN: Final = 0x80


class LoadError(Exception):
    """A server did not do what a server must; the text says which and what."""


def client_frame(opcode: int, payload: bytes) -> bytes:
    """Write a frame as a client does, masked (RFC 6455, 5.2)."""
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", _FIN | opcode, _FIN | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", _FIN | opcode, _FIN | 126, size)
    else:
        head = struct.pack("!BBQ", _FIN | opcode, _FIN | 127, size)
    key = np.frombuffer((MASK * (size // 4 + 1))[:size], np.uint8)
    return head + MASK + (np.frombuffer(payload, np.uint8) ^ key).tobytes()


def connect(port: int, path: str) -> socket.socket:
    """Open a WebSocket, blocking.

    Args:
        port: of this machine.
        path: of the address, with the query.

    Raises:
        LoadError: it is refused.
        OSError: nobody listens, or answers in time.
    """
    stream = socket.create_connection(("127.0.0.1", port), timeout=SETUP_WAIT_S)
    try:
        _shake_hands(stream, port, path)
    except BaseException:
        stream.close()
        raise
    return stream


def _shake_hands(stream: socket.socket, port: int, path: str) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = (
        f"GET {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
    )
    stream.sendall("\r\n".join((*lines, "", "")).encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = stream.recv(1)  # a byte at a time, so that no frame is read with it
        head += piece
        if not piece or len(head) > SMALL_BYTES:
            raise LoadError(f"no WebSocket: {head[:200]!r}")
    if not head.startswith(b"HTTP/1.1 101 "):
        raise LoadError(f"no WebSocket: {head[:200]!r}")


class Link:
    """One session's connection.

    Args:
        stream: connected, and open as a WebSocket; it blocks nobody from now on.
        coding: of its sound: `pcm16` is transcribed, the others are answered by speech.

    Attributes:
        is_ready: the session is set up.
        due_ns: when the units were due that are not answered, oldest first.
        latency_ns: of those that were.
        sent: units handed over, whole or in part.
    """

    def __init__(self, stream: socket.socket, coding: Coding = "float32") -> None:
        self.socket = stream
        self._coding: Coding = coding
        self.socket.setblocking(False)
        self.is_ready = False
        self.due_ns: deque[int] = deque()
        self.latency_ns: list[int] = []
        self.sent = 0
        self._out: deque[memoryview] = deque()
        self._head = bytearray()
        self._kept = bytearray()
        self._left = 0
        self._opcode = 0
        self._keep = False
        self._is_sound = False
        self._has_proof = False
        if coding == "live":
            self.send(memoryview(client_frame(TEXT, START)))

    # -- out ------------------------------------------------------------------------------------

    def send(self, data: memoryview) -> bool:
        """Send what the kernel takes, and keep the rest; whether there is a rest."""
        self._out.append(data)
        return self.flush()

    def flush(self) -> bool:
        """Send on; whether something is left."""
        while self._out:
            try:
                count = self.socket.send(self._out[0])
            except BlockingIOError:
                return True
            rest = self._out[0][count:]
            if len(rest):
                self._out[0] = rest
                return True
            self._out.popleft()
        return False

    # -- in -------------------------------------------------------------------------------------

    def receive(self, buffer: memoryview) -> int:
        """Read once; returns how many units were answered by it."""
        try:
            count = self.socket.recv_into(buffer)
        except BlockingIOError:
            return 0
        if not count:
            raise LoadError("the server closed a connection")
        answered, at = 0, 0
        while at < count:
            if self._left == 0:
                at += self._begin_frame(buffer[at:count])
                if self._left == 0 and self._opcode:
                    answered += self._end_frame()
                continue
            step = min(self._left, count - at)
            if self._keep:
                self._kept += buffer[at : at + step]
            self._left -= step
            at += step
            if self._left == 0:
                answered += self._end_frame()
        return answered

    def _begin_frame(self, data: memoryview) -> int:
        """Read a frame's head, which may come in pieces; returns how many bytes it took."""
        before = len(self._head)
        self._head += data[: 10 - before]
        self._opcode = 0
        if len(self._head) < 2:
            return len(self._head) - before
        size, width = self._head[1] & 0x7F, 2
        if size >= 126:
            width = 4 if size == 126 else 10
            if len(self._head) < width:
                return len(self._head) - before
            size = int.from_bytes(self._head[2:width])
        self._opcode = self._head[0] & 0x0F or TEXT
        self._left = size
        self._is_sound = size > SMALL_BYTES
        self._keep = not (self._is_sound and self._has_proof)
        self._head.clear()
        return width - before

    def _end_frame(self) -> int:
        opcode, self._opcode = self._opcode, 0
        if opcode == CLOSE:
            raise LoadError(f"the server closed a session: {bytes(self._kept[2:])!r}")
        if opcode == PING:
            self.send(memoryview(client_frame(PONG, bytes(self._kept))))
        elif self._is_sound:
            self._take_sound()
        elif self._take_words(bytes(self._kept)):
            self._answered()
            self._is_sound = True
        self._kept.clear()
        return int(self._is_sound)

    def _answered(self) -> None:
        self.latency_ns.append(time.perf_counter_ns() - self.due_ns.popleft())

    def _take_sound(self) -> None:
        self._answered()
        if not self._has_proof:
            body = json.loads(self._kept)
            pcm = base64.b64decode(body.get("audio") or body["delta"], validate=True)
            sample_bytes = SAMPLE_BYTES if self._coding == "float32" else SAMPLE16_BYTES
            if body.get("kind", "audio") != "audio" or len(pcm) != OUTPUT_RATE_HZ * sample_bytes:
                raise LoadError("an answer that is no second of speech")
            self._has_proof = True

    def _take_words(self, text: bytes) -> bool:
        """Whether it is a second's words."""
        if b'"session.queue_done"' in text:
            self.send(memoryview(client_frame(TEXT, INIT)))
        elif b'"session.created"' in text or b'"session.started"' in text:
            for message in CHOICE.get(self._coding, ()):
                self.send(memoryview(client_frame(TEXT, message)))
            self.is_ready = True
        elif b'"type":"error"' in text:
            raise LoadError(f"the server complained: {text.decode(errors='replace')}")
        return self._coding == "pcm16" and b'"transcription.delta"' in text

    def close(self) -> None:
        """Leave politely, as far as the kernel takes it at once."""
        self.send(memoryview(client_frame(CLOSE, struct.pack("!H", 1000))))
        self.socket.close()


class Load:
    """One run.

    Args:
        port: the server's.
        sessions: at once.
        units: of each.
        pace: when they come.
        coding: of the sound.
        frames: of the units that are sent, in turn; masked.
    """

    def __init__(
        self,
        port: int,
        *,
        sessions: int,
        units: int,
        pace: Pace,
        coding: Coding,
        frames: list[list[bytes]],
    ) -> None:
        self._pace = pace
        self._units = units
        self._frames = [[memoryview(frame) for frame in unit] for unit in frames]
        self._selector = selectors.DefaultSelector()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._links = [Link(connect(port, PATHS[coding]), coding) for _ in range(sessions)]
        self._due: list[tuple[int, int, Link, memoryview, bool]] = []
        self._order = itertools.count()
        self._answered = 0
        self._lag_ns: list[int] = []
        self._waited_ns = 0
        for link in self._links:
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._turn_until(lambda: all(link.is_ready for link in self._links), SETUP_WAIT_S)

    def run(self) -> dict[str, Any]:
        """Send all units and wait for all answers; say what was found."""
        self._waited_ns = 0
        began_ns = time.perf_counter_ns() + LEAD_NS
        last_s = 1.0 if self._pace == "flat" else float(self._units)
        if self._pace == "flat":
            for link in self._links:
                for _ in range(min(WINDOW, self._units)):
                    self._schedule(link, began_ns)
        else:
            for unit in range(self._units):
                for number, link in enumerate(self._links):
                    late_ns = 0 if self._pace == "together" else NS * number // len(self._links)
                    self._schedule(link, began_ns + unit * NS + late_ns)
        cpu_ns = time.process_time_ns()
        expected = self._units * len(self._links)
        try:
            self._turn_until(lambda: self._answered == expected, last_s + ANSWERS_WAIT_S)
        except TimeoutError:
            if not self._answered:
                raise
        wall_ns = time.perf_counter_ns() - began_ns
        latency = [ns for link in self._links for ns in link.latency_ns]
        return {
            "units": self._answered,
            "missed": expected - self._answered,
            "wall_ns": wall_ns,
            "latency_ns": latency,
            "lag_p99_ns": int(np.percentile(self._lag_ns, 99)),
            "busy": max(0.0, 1 - self._waited_ns / wall_ns),
            "cpu_ns": time.process_time_ns() - cpu_ns,
        }

    def close(self) -> None:
        """Leave all sessions."""
        for link in self._links:
            link.close()
        self._selector.close()

    def _schedule(self, link: Link, at_ns: int) -> None:
        """Have the next unit of a session sent, in one go or in pieces."""
        frames = self._frames[link.sent % len(self._frames)]
        link.sent += 1
        if self._pace == "slow":
            (frame,) = frames
            starts = range(0, len(frame), SLOW_BYTES)
            frames = [frame[start : start + SLOW_BYTES] for start in starts]
            pause_ns = SLOW_STEP_NS
        else:
            pause_ns = 0 if self._pace == "flat" else NS // len(frames)
        for number, frame in enumerate(frames):
            due_ns = at_ns + number * pause_ns
            is_last = number == len(frames) - 1
            heapq.heappush(self._due, (due_ns, next(self._order), link, frame, is_last))

    def _turn_until(self, is_done: Callable[[], bool], wait_s: float) -> None:
        deadline_ns = time.perf_counter_ns() + int(wait_s * NS)
        while not is_done():
            now_ns = time.perf_counter_ns()
            if now_ns > deadline_ns:
                raise TimeoutError(f"not done after {wait_s:g} s, {self._answered} units answered")
            while self._due and self._due[0][0] <= now_ns:
                self._send_due(now_ns)
            self._wait()

    def _send_due(self, now_ns: int) -> None:
        due_ns, _, link, piece, is_last = heapq.heappop(self._due)
        self._lag_ns.append(now_ns - due_ns)
        if is_last:
            link.due_ns.append(due_ns)
        if link.send(piece):
            self._selector.modify(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _wait(self) -> None:
        """Wait for the first of all connections, or for what is due next."""
        now_ns = time.perf_counter_ns()
        wait_ns = min(NS // 10, self._due[0][0] - now_ns) if self._due else NS // 10
        ready = self._selector.select(0 if wait_ns < 2 * SPIN_NS else (wait_ns - SPIN_NS) / NS)
        self._waited_ns += time.perf_counter_ns() - now_ns
        for key, events in ready:
            link: Link = key.data
            if events & selectors.EVENT_WRITE and not link.flush():
                self._selector.modify(link.socket, selectors.EVENT_READ, link)
            if events & selectors.EVENT_READ:
                answered = link.receive(self._buffer)
                self._answered += answered
                if self._pace == "flat":
                    for _ in range(min(answered, self._units - link.sent)):
                        self._schedule(link, time.perf_counter_ns())


def main() -> None:
    """Serve requests on the standard streams, until the input ends."""
    exchanges = make_exchanges()

    @cache
    def frames_of(has_picture: bool, pieces: int, coding: Coding) -> list[list[bytes]]:
        texts = ([each.frame] if has_picture else each.pieces(pieces, coding) for each in exchanges)
        return [[client_frame(TEXT, text.encode()) for text in unit] for unit in texts]

    gc.disable()  # a collection would be lag
    _tell({"frame_bytes": len(exchanges[0].frame)})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            load = Load(
                order["port"],
                sessions=order["sessions"],
                units=order["units"],
                pace=order["pace"],
                coding=order["coding"],
                frames=frames_of(order["has_picture"], order["pieces"], order["coding"]),
            )
            _tell({"ready": True})
            sys.stdin.readline()
            _tell(load.run())
            sys.stdin.readline()
            load.close()
            _tell({"left": True})
        except (LoadError, OSError, ValueError, KeyError) as error:
            _tell({"error": f"{type(error).__name__}: {error}"})
            return
        gc.collect()


def _tell(body: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
