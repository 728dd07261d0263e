"""One WebSocket: our own small interface, and trio-websocket behind it.

`WebSocket` is all that the rest of the runtime knows, so that a leaner codec can take this one's
place. The rules of the interface:

- One task receives, one task sends; `close` and `abort` may come from anywhere.
- `receive` returns None once for a message above the limit; `WebSocketClosed` ends everything.
- A send that is cancelled may have left half a frame: the connection is aborted.
- `close` waits at most `CLOSE_WAIT_S` for the peer; `abort` waits for nobody.

How trio-websocket is used here, and why (design.md, "Transport facts"):

- It is given a handshake that we wrote ourselves from a head that the listener has checked: it
  fails in its reader task on some heads (an odd `Host`), and loses bytes sent before the 101.
- It reads 256 KiB at a time, and its codec's mask is replaced by `FastMasker`.
- Its reader task lives in `TrioWebSocket.run` and cannot take a session down with it: it raises,
  for one, when a ping comes after we sent a close.
- It answers pings itself, but waits for a frame that is being sent, and for a queue that is full.
- It offers no permessage-deflate, which costs ten times what it saves.

It does not know sessions, JSON or HTTP.
"""

from __future__ import annotations

import logging
import socket
import struct
from contextlib import suppress
from typing import Final, Protocol

import attrs
import numpy as np
import trio
import trio_websocket
import wsproto.frame_protocol
from wsproto.utilities import LocalProtocolError

RECEIVE_BUFFER_BYTES: Final = 262_144
"""A second of audio and a frame of video in one read; the library's 4 KiB take 29."""
MESSAGE_QUEUE_SIZE: Final = 4
"""A burst of small messages does not stall the reader; four of the largest still fit in memory."""
CLOSE_WAIT_S: Final = 2.0
"""A peer that lives answers a close within a round trip; one that does not is not waited for."""
KEEPALIVE_IDLE_S: Final = 15
"""A client sends every second; after this long in silence it is worth asking TCP."""
KEEPALIVE_INTERVAL_S: Final = 5
"""How often a silent peer is probed, so that a pulled cable frees its slot within half a minute."""
KEEPALIVE_PROBES: Final = 3
"""Unanswered probes after which it is gone; one may be lost on the way."""
UNACKNOWLEDGED_MS_MAX: Final = 30_000
"""What we sent and TCP could not deliver for so long will not arrive (RFC 5482)."""
READ_BYTES: Final = 65_536
"""A read whose bytes are thrown away while a peer is given time to see our last words."""

ABNORMAL_CLOSURE: Final = 1006
"""The peer went without a close (RFC 6455, 7.1.5): never sent, only told."""

_LOG: Final = logging.getLogger("antiphon.websocket")
_TOO_BIG_BY_LIBRARY: Final = "Exceeded maximum message size"
"""How trio-websocket's own 1009 is told from one that the peer sent."""


class WebSocketClosed(Exception):  # noqa: N818 - an end, not an error
    """The WebSocket is closed, by either side, or lost (1006).

    Args:
        code: the close code (RFC 6455, 7.4).
        reason: what the closing side said, or nothing.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class WebSocket(Protocol):
    """A WebSocket that is open; whoever accepted it closes or aborts it."""

    async def receive(self) -> str | bytes | None:
        """Wait for a message; None, once, for one that was too big. Raises `WebSocketClosed`."""

    async def send(self, frame: str) -> None:
        """Send a text message; cancelled, it aborts. Raises `WebSocketClosed`."""

    async def close(self, code: int, reason: str) -> None:
        """Close, waiting a bounded time for the peer's answer; closed already, do nothing."""

    async def abort(self) -> None:
        """Drop the TCP connection at once, with all that is unsent; closed already, do nothing."""


def frame_bytes(frame: str | bytes) -> int:
    """Say how many bytes a message takes on the wire; for ASCII without looking at it."""
    if isinstance(frame, bytes) or frame.isascii():
        return len(frame)
    return len(frame.encode())


class FastMasker:
    """The mask of RFC 6455, 5.3, eight bytes at a time; a frame's payload may come in pieces.

    Args:
        masking_key: the frame's four bytes.
    """

    def __init__(self, masking_key: bytes | bytearray) -> None:
        self._key = bytes(masking_key)

    def process(self, data: bytes | bytearray) -> bytearray:
        """Mask or unmask the next piece, which itself is left as it is."""
        masked = bytearray(data)
        words = len(masked) // 8
        if words:
            view = np.frombuffer(masked, dtype=np.uint64, count=words)
            np.bitwise_xor(view, np.frombuffer(self._key * 2, dtype=np.uint64), out=view)
        for i in range(words * 8, len(masked)):
            masked[i] ^= self._key[i % 4]
        turn = len(masked) % 4
        self._key = self._key[turn:] + self._key[:turn]
        return masked


def install_fast_masker() -> None:
    """Let wsproto mask with `FastMasker`: its codec looks this name up for every frame.

    A wsproto without that name works as it comes, only slower; a test of ours says so.
    """
    if hasattr(wsproto.frame_protocol, "XorMaskerSimple"):
        wsproto.frame_protocol.XorMaskerSimple = FastMasker  # type: ignore[misc, assignment]


install_fast_masker()


class TcpStream(trio.abc.Stream):
    """A TCP connection with bytes put back, that can be dropped at once.

    Args:
        stream: the connection; this object closes it.
        put_back: what was read of it already, read again first.
    """

    def __init__(self, stream: trio.SocketStream, put_back: bytes = b"") -> None:
        self._stream = stream
        self._put_back = put_back
        self._head = b""
        self._released = trio.Event()
        self._released.set()
        self.socket = stream.socket

    def hold_after(self, head: bytes) -> trio.Event:
        """Let `head` be read next, and nothing after it until the returned event is set."""
        self._head = head
        self._released = trio.Event()
        return self._released

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read what is put back, then what arrives; empty at the end."""
        if self._head:
            await trio.lowlevel.checkpoint()
            head, self._head = self._head, b""
            return head
        await self._released.wait()
        if not self._put_back:
            return bytes(await self._stream.receive_some(max_bytes))
        await trio.lowlevel.checkpoint()
        size = max_bytes or len(self._put_back)
        data, self._put_back = self._put_back[:size], self._put_back[size:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send it all, or raise."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel takes more."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Send no more; reading goes on."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close; what the kernel holds is still delivered."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Drop the connection at once, with a reset and without what is unsent; never waits."""
        with suppress(OSError):  # It is closed already, or the peer has reset it.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    async def linger(self) -> None:
        """Say that we are done and read on to the peer's end: a reset would eat our last words.

        The caller bounds the time. A peer that is gone is an end like any other.
        """
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            await self.send_eof()
            while await self.receive_some(READ_BYTES):
                pass

    def notice_dead_peer(self) -> None:
        """Let TCP find out that a peer is gone without a word, where the system can."""
        options = (
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEPALIVE_PROBES),
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS_MAX),
        )
        for level, name, value in options:
            option = getattr(socket, name, None)
            if option is not None:
                with suppress(OSError):  # It is gone already: the first read will say so.
                    self.socket.setsockopt(level, option, value)


@attrs.frozen(kw_only=True)
class Handshake:
    """What a checked WebSocket request comes down to.

    Attributes:
        key: its `Sec-WebSocket-Key`, 16 bytes in base64.
        subprotocol: the one we select of those offered, or None.
        frame_bytes_max: messages above this are not taken.
    """

    key: str
    subprotocol: str | None
    frame_bytes_max: int

    def head(self) -> bytes:
        """Write the request anew, with nothing in it that the library could stumble over."""
        lines = [
            "GET / HTTP/1.1",
            "Host: antiphon",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {self.key}",
        ]
        if self.subprotocol is not None:
            lines.append(f"Sec-WebSocket-Protocol: {self.subprotocol}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")


async def accept(nursery: trio.Nursery, stream: TcpStream, handshake: Handshake) -> TrioWebSocket:
    """Answer a checked request with 101 and open its WebSocket.

    Args:
        nursery: owns the task that reads; cancelling it ends the WebSocket.
        stream: the connection, with the bytes after the request's head put back.
        handshake: the request.

    Returns:
        The open WebSocket; the caller closes or aborts it.

    Raises:
        WebSocketClosed: the peer left before it was open.
    """
    websocket = TrioWebSocket(stream, handshake.frame_bytes_max)
    await nursery.start(websocket.run, handshake)
    return websocket


class TrioWebSocket:
    """A server's WebSocket on trio-websocket; see `WebSocket` for its rules.

    Args:
        stream: the connection.
        frame_bytes_max: messages above this are not taken.
    """

    def __init__(self, stream: TcpStream, frame_bytes_max: int) -> None:
        self._stream = stream
        self._frame_bytes_max = frame_bytes_max
        self._connection: trio_websocket.WebSocketConnection
        self._reader_ended = trio.Event()
        self._told_too_big = False

    async def run(
        self,
        handshake: Handshake,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Hold the library's reader task; started once the 101 is sent, ended when it ends.

        Raises:
            WebSocketClosed: the peer left before the 101 was sent.
        """
        opened = False
        try:
            async with trio.open_nursery() as nursery:
                self._connection = await self._open(nursery, handshake)
                opened = True
                task_status.started()
        except* Exception as errors:
            # The library's bugs and the peer's departure look alike here: the connection is over.
            _LOG.debug("the reader of a WebSocket ended early: %r", errors.exceptions)
            self._stream.abort()
        finally:
            self._reader_ended.set()
        if not opened:
            raise WebSocketClosed(ABNORMAL_CLOSURE, "the peer left during the handshake")

    async def _open(
        self, nursery: trio.Nursery, handshake: Handshake
    ) -> trio_websocket.WebSocketConnection:
        release = self._stream.hold_after(handshake.head())
        request = await trio_websocket.wrap_server_stream(
            nursery,
            self._stream,
            message_queue_size=MESSAGE_QUEUE_SIZE,
            max_message_size=self._frame_bytes_max,
            receive_buffer_size=RECEIVE_BUFFER_BYTES,
        )
        connection = await request.accept(subprotocol=handshake.subprotocol)
        release.set()
        return connection

    async def receive(self) -> str | bytes | None:
        """Wait for a message.

        Returns:
            The message, or None, once, for one above the limit: when it could still be read the
            WebSocket is open, otherwise it was cut off and 1009 is sent already.

        Raises:
            WebSocketClosed: there will be none.
        """
        try:
            message: str | bytes = await self._connection.get_message()
        except trio_websocket.ConnectionClosed:
            closed = self._closed()
            if self._told_too_big or not closed.reason.startswith(_TOO_BIG_BY_LIBRARY):
                raise closed from None
            self._told_too_big = True
            return None
        return message if frame_bytes(message) <= self._frame_bytes_max else None

    async def send(self, frame: str) -> None:
        """Send a text message; cancelled, it aborts the connection.

        Raises:
            WebSocketClosed: it is not sent.
        """
        try:
            await self._connection.send_message(frame)
        except (trio_websocket.ConnectionClosed, LocalProtocolError):
            raise self._closed() from None
        except BaseException:
            self._stream.abort()  # Half a frame may be out: nothing can follow it.
            raise

    async def close(self, code: int, reason: str) -> None:
        """Send what is left to send and a close, and wait `CLOSE_WAIT_S` for its answer.

        What the peer has sent before it is read and thrown away. Cancelled, it closes at once.

        Args:
            code: the close code (RFC 6455, 7.4).
            reason: 123 bytes of UTF-8 at most, cut there.
        """
        try:
            with trio.move_on_after(CLOSE_WAIT_S):
                await self._connection.aclose(code, reason or None)
                await self._reader_ended.wait()
                await self._stream.linger()
        finally:
            self._stream.socket.close()  # Not a reset: the kernel still delivers what it holds.

    async def abort(self) -> None:
        """Drop the TCP connection at once, with all that is unsent; never waits."""
        self._stream.abort()

    def _closed(self) -> WebSocketClosed:
        reason = self._connection.closed
        if reason is None:
            return WebSocketClosed(ABNORMAL_CLOSURE, "")
        return WebSocketClosed(reason.code, reason.reason or "")
