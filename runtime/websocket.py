"""One WebSocket: our own small interface, and trio-websocket behind it.

`WebSocket` is all that the rest of the runtime knows, so that a leaner codec can take this one's
place. The rules of the interface:

- One task receives, one task sends; `close` and `abort` may come from anywhere.
- `receive` returns None once for a message above the limit, and then nothing more but the end; the
  WebSocket is still open, so that its client can be told. `WebSocketClosed` ends everything.
- A send that is cancelled may have left half a frame: the connection is aborted.
- `close` waits at most `CLOSE_WAIT_S` for the peer; `abort` waits for nobody.
- A peer that takes nothing, or from which nothing comes at all, is dropped (`transport.keeper`),
  and one that sends too much waits (`transport.intake`).

How trio-websocket is used here, and why (design.md, "Transport facts"):

- It is given a handshake that we wrote ourselves from a head that the listener has checked: it
  fails in its reader task on some heads (an odd `Host`), and loses bytes sent before the 101.
- It reads 256 KiB at a time, and each connection gets our own decoders (`transport.codec`).
- It sees no message above the limit: its own limit ends the WebSocket before it can be explained.
  In place of one, the channel between its reader and us is closed, which has no public name.
- Its reader task lives in `TrioWebSocket.run` and cannot take a session down with it: it raises,
  for one, when a ping comes after we sent a close.
- It answers pings itself, but waits for a frame that is being sent, and for a queue that is full.
  Ours are not sent by it: its `ping` waits for the pong.
- Messages are written by its codec, past its `send_message`: that takes one at a time, and its lock
  costs a switch of tasks for each. Whole calls never mix: `Link` sees to that.
- It offers no permessage-deflate, which costs ten times what it saves.

It does not know sessions, JSON or HTTP.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import Final, Protocol

import attrs
import trio
import trio_websocket
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from protocol.utf8 import Frame

from .transport.budget import Share
from .transport.codec import message_of, tune
from .transport.intake import Intake
from .transport.keeper import Keeper, Line
from .transport.link import Link
from .transport.tcp import RECEIVE_BUFFER_BYTES

MESSAGE_QUEUE_SIZE: Final = 4
"""A burst of small messages does not stall the reader; four of the largest still fit in memory."""
CLOSE_WAIT_S: Final = 2.0
"""A peer that lives answers a close within a round trip; one that does not is not waited for."""

BROKEN: Final = MappingProxyType(
    {
        CloseReason.PROTOCOL_ERROR: "no frame of RFC 6455",
        CloseReason.INVALID_FRAME_PAYLOAD_DATA: "invalid UTF-8",
    }
)
"""What the codec finds wrong with a peer's bytes, by close code, and what the peer is told."""
ABNORMAL_CLOSURE: Final = 1006
"""The peer went without a close (RFC 6455, 7.1.5): never sent, only told."""

_LOG: Final = logging.getLogger("antiphon.websocket")


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


class WebSocketStalled(WebSocketClosed):
    """It was dropped because the peer took nothing of what was sent."""


class WebSocket(Protocol):
    """A WebSocket that is open; whoever accepted it closes or aborts it."""

    async def receive(self) -> Frame:
        """Wait for a message; None, once, for one that is too big. Raises `WebSocketClosed`."""

    async def send(self, *frames: str) -> None:
        """Send text messages in one go; cancelled, it aborts. Raises `WebSocketClosed`."""

    async def close(self, code: int, reason: str) -> None:
        """Close, waiting a bounded time for the peer's answer; closed already, do nothing."""

    async def abort(self) -> None:
        """Drop the TCP connection at once, with all that is unsent; closed already, do nothing."""


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


async def accept(
    nursery: trio.Nursery, link: Link, handshake: Handshake, keeper: Keeper
) -> TrioWebSocket:
    """Answer a checked request with 101 and open its WebSocket.

    Args:
        nursery: owns the task that reads; cancelling it ends the WebSocket.
        link: the connection, with the bytes after the request's head put back.
        handshake: the request.
        keeper: looks after it while it is open.

    Returns:
        The open WebSocket; the caller closes or aborts it.

    Raises:
        WebSocketClosed: the peer left before it was open.
    """
    websocket = TrioWebSocket(link, handshake, keeper)
    await nursery.start(websocket.run)
    return websocket


class TrioWebSocket:
    """A server's WebSocket on trio-websocket; see `WebSocket` for its rules.

    Args:
        link: the connection.
        handshake: the request that it answers.
        keeper: looks after it while it is open.
    """

    def __init__(self, link: Link, handshake: Handshake, keeper: Keeper) -> None:
        self._link = link
        self._handshake = handshake
        self._keeper = keeper
        self._share = Share(keeper.budget)
        self._intake = Intake(
            link,
            head=handshake.head(),
            limits=keeper.limits,
            message_bytes_max=handshake.frame_bytes_max,
            share=self._share,
            counters=keeper.counters,
            on_too_big=self._too_big_comes,
            last_words=self._answer_to_no_frame,
        )
        self._line = Line(link=link, share=self._share)
        self._connection: trio_websocket.WebSocketConnection
        self._reader_ended = trio.Event()
        self._received = 0
        self._told_too_big = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the library's reader task; started once the 101 is sent, ended when it ends.

        Raises:
            WebSocketClosed: the peer left before the 101 was sent.
        """
        opened = False
        try:
            async with trio.open_nursery() as nursery:
                self._connection = await self._open(nursery)
                opened = True
                self._keeper.counters.websockets += 1
                self._keeper.add(self._line)
                task_status.started()
        except* Exception as errors:
            # The library's bugs and the peer's departure look alike here: the connection is over.
            _LOG.debug("the reader of a WebSocket ended early: %r", errors.exceptions)
            self._link.abort()
        finally:
            self._reader_ended.set()
            self._keeper.discard(self._line)
            self._keeper.counters.websockets -= opened
            if opened:
                # We and the library refer to each other: what has come of a message that will not
                # end would wait for the garbage collector, that is, for minutes.
                self._connection._message_parts.clear()
            self._share.close()
        if not opened:
            raise WebSocketClosed(ABNORMAL_CLOSURE, "the peer left during the handshake")

    async def _open(self, nursery: trio.Nursery) -> trio_websocket.WebSocketConnection:
        request = await trio_websocket.wrap_server_stream(
            nursery,
            self._intake,
            message_queue_size=MESSAGE_QUEUE_SIZE,
            max_message_size=self._handshake.frame_bytes_max,
            receive_buffer_size=RECEIVE_BUFFER_BYTES,
        )
        connection = await request.accept(subprotocol=self._handshake.subprotocol)
        tune(connection._wsproto.connection)
        self._intake.open()
        return connection

    async def receive(self) -> Frame:
        """Wait for a message.

        Returns:
            The message, or None, once, for one above the limit; none comes after it.

        Raises:
            WebSocketClosed: there will be none.
        """
        self._share.release(self._received - 1)
        if self._told_too_big:
            await self._reader_ended.wait()
            raise self._closed()
        try:
            message: str | bytes = await self._connection.get_message()
        except trio_websocket.ConnectionClosed:
            if not self._intake.is_too_big:
                raise self._closed() from None
            self._told_too_big = True
            return None
        self._received += 1
        return message_of(message)

    def _too_big_comes(self) -> None:
        """Let `receive` run dry: there is no more for it, while the WebSocket stays open."""
        self._connection._send_channel.close()

    def _answer_to_no_frame(self) -> bytes:
        """Say which rule of RFC 6455 the peer broke (7.1.7): the library tells us alone."""
        codec, broken = self._connection._wsproto, self._connection.closed
        if broken is None or codec.state is not ConnectionState.OPEN or broken.code not in BROKEN:
            return b""
        code = CloseReason(broken.code)
        close: bytes = codec.send(CloseConnection(code=code, reason=BROKEN[code]))
        return close

    async def send(self, *frames: str) -> None:
        """Send text messages in one go; cancelled, it aborts the connection.

        Raises:
            WebSocketClosed: not all of them are sent.
        """
        if self._connection.closed is not None:
            raise self._closed()
        try:
            codec = self._connection._wsproto
            data = [codec.send(TextMessage(data=frame)) for frame in frames]
            await self._link.send_all(data[0] if len(data) == 1 else b"".join(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError, LocalProtocolError):
            raise self._closed() from None
        except BaseException:
            self._link.abort()  # Half a frame may be out: nothing can follow it.
            raise

    async def close(self, code: int, reason: str) -> None:
        """Send what is left to send and a close, and wait `CLOSE_WAIT_S` for its answer.

        What the peer has sent before it is read and thrown away. Cancelled, it closes at once.

        Args:
            code: the close code (RFC 6455, 7.4).
            reason: 123 bytes of UTF-8 at most, cut there.
        """
        self._line.pings = False
        try:
            with trio.move_on_after(CLOSE_WAIT_S):
                await self._connection.aclose(code, reason or None)
                await self._reader_ended.wait()
                await self._link.linger()
        finally:
            self._link.socket.close()  # Not a reset: the kernel still delivers what it holds.

    async def abort(self) -> None:
        """Drop the TCP connection at once, with all that is unsent; never waits."""
        self._link.abort()

    def _closed(self) -> WebSocketClosed:
        if self._link.dropped == "stalled":
            return WebSocketStalled(ABNORMAL_CLOSURE, "the peer takes nothing")
        reason = self._connection.closed
        if reason is None:
            return WebSocketClosed(ABNORMAL_CLOSURE, "")
        return WebSocketClosed(reason.code, reason.reason or "")
