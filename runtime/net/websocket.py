"""One WebSocket: a small interface of our own, and trio-websocket behind it.

- One task receives or delivers, one task sends; any task may call `close` and `abort`.
- `receive` returns None once for a message above the limit, and then only the end; the WebSocket
  stays open, so that the client can be told. `WebSocketClosed` ends everything.
- A cancelled send may have left half a frame: the connection is aborted.
- `close` waits at most `CLOSE_WAIT_S` for the peer; `abort` does not wait.

How trio-websocket is used, and why (design.md, "Transport facts"):

- It gets a handshake that we write from the checked head: its reader task fails on some heads (an
  odd `Host`), and loses bytes sent before the 101.
- It reads 256 KiB at a time, and each connection gets our own decoders (`transport.codec`).
- It sees no message above the limit: its own limit would end the WebSocket before the client can be
  told. Instead the channel from its reader is closed, through a private name.
- Its reader task lives in `TrioWebSocket.run` and cannot end a session, though it may raise.
- It answers pings, but after a frame in flight and a full queue. Our pings bypass it: its `ping`
  waits for the pong. So do our messages: the lock of `send_message` costs a task switch for each.
- It offers no permessage-deflate, which costs ten times what it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from types import MappingProxyType
from typing import Final, NoReturn, Protocol

import attrs
import trio
import trio_websocket
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection
from wsproto.frame_protocol import CloseReason

from protocol.values.utf8 import Frame

from .budget import Share
from .codec import message_of, tune
from .frames import text_frames
from .intake import Intake
from .keeper import Keeper, Line
from .link import Link
from .tcp import RECEIVE_BUFFER_BYTES

MESSAGE_QUEUE_SIZE: Final = 4
"""A burst of small messages does not stall the reader; four of the largest fit in memory."""
CLOSE_WAIT_S: Final = 2.0
"""A live peer answers a close within a round trip; others are given up."""

BROKEN: Final = MappingProxyType(
    {
        CloseReason.PROTOCOL_ERROR: "no frame of RFC 6455",
        CloseReason.INVALID_FRAME_PAYLOAD_DATA: "invalid UTF-8",
    }
)
"""The text sent for a protocol error that the codec finds, by close code."""
ABNORMAL_CLOSURE: Final = 1006
"""The peer left without a close (RFC 6455, 7.1.5): never sent, only reported."""

_LOG: Final = logging.getLogger("antiphon.websocket")


class WebSocketClosed(Exception):  # noqa: N818 - an end, not an error
    """The WebSocket is closed, by either side, or lost: `code` 1006 (RFC 6455, 7.4)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class WebSocketStalled(WebSocketClosed):
    """The WebSocket was dropped because the peer took no bytes."""


class OnMessages(Protocol):
    """Takes messages at once, from whichever task; only small ones of text come together."""

    def __call__(self, *messages: Frame) -> Awaitable[None] | None:
        """Take messages in order, and return what to wait for before the next."""


class WebSocket(Protocol):
    """An open WebSocket; its acceptor closes or aborts it."""

    async def receive(self) -> Frame:
        """Wait for a message; None, once, for one above the limit. Raises `WebSocketClosed`."""

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        """Give messages to `on_messages`, each as `receive` would return it, in order.

        Raises `WebSocketClosed` at the end, and what `on_messages` raises.
        """

    async def send(self, *frames: str) -> None:
        """Send text messages in one go; cancelled, it aborts. Raises `WebSocketClosed`."""

    async def close(self, code: int, reason: str) -> None:
        """Send a close and wait a bounded time for the answer; no effect once closed.

        Messages before the answer are discarded. Cancelled, it closes at once. `code` as in RFC
        6455, 7.4; `reason` is cut to 123 bytes of UTF-8.
        """

    async def abort(self) -> None:
        """Drop the TCP connection and unsent data at once; no effect once closed."""


@attrs.frozen(kw_only=True)
class Handshake:
    """A checked request: its `Sec-WebSocket-Key`, our subprotocol or None, the message limit."""

    key: str
    subprotocol: str | None
    frame_bytes_max: int

    def head(self) -> bytes:
        """A plain request for the library, without the client's other headers."""
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


async def deliver_received(websocket: WebSocket, on_messages: OnMessages) -> NoReturn:
    """Do what `WebSocket.deliver` does by `receive`, in the calling task."""
    while True:
        waits = on_messages(await websocket.receive())
        if waits is not None:
            await waits


class TrioWebSocket:
    """A server's WebSocket on trio-websocket; the keeper watches it while it is open.

    `link`: the connection, with the bytes after the request's head put back. The task that awaits
    `run` reads; cancelling it ends the WebSocket. The caller closes or aborts it.
    """

    def __init__(self, link: Link, handshake: Handshake, keeper: Keeper) -> None:
        self._link = link
        self._handshake = handshake
        self._keeper = keeper
        self._share = Share(keeper.budget)
        self._intake = Intake(
            link,
            head=handshake.head(),
            settings=keeper.settings,
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
        self._waiting: trio.CancelScope | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer the request with 101, and hold the library's reader task; started then.

        `WebSocketClosed`: the peer left before it was open.
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
            # The library's bugs and the peer's departure look the same here: the connection is
            # over.
            _LOG.debug("the reader of a WebSocket ended early: %r", errors.exceptions)
            self._link.abort()
        finally:
            self._reader_ended.set()
            self._keeper.discard(self._line)
            self._keeper.counters.websockets -= opened
            if opened:
                # We and the library refer to each other: the pieces of an unfinished message would
                # wait minutes for the garbage collector.
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
        """As `WebSocket`."""
        self._saw()
        if self._told_too_big:
            await self._reader_ended.wait()
            raise self._closed()
        try:
            message: str | bytes = await self._connection.get_message()
            while self._intake.is_closing:
                message = await self._connection.get_message()
        except trio_websocket.ConnectionClosed:
            if not self._intake.is_too_big:
                raise self._closed() from None
            self._told_too_big = True
            return None
        self._received += 1
        return message_of(message)

    def _saw(self) -> None:
        """Note that the session has seen all messages that it was given."""
        self._intake.seen = self._received
        self._share.release(self._received - 1)

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        """As `WebSocket`; most messages are given by the library's task, which reads them."""
        failures: list[Exception] = []

        def fail(error: Exception) -> None:
            failures.append(error)
            self._intake.take = None
            delivering.cancel()

        def take(messages: Sequence[str]) -> Awaitable[None] | None:
            self._received += len(messages)
            try:
                waits = on_messages(*messages)
            except Exception as error:
                fail(error)
                return None
            if waits is not None:
                return wait(waits)
            self._saw()
            return None

        async def wait(waits: Awaitable[None]) -> None:
            with trio.CancelScope() as self._waiting:
                try:
                    await waits
                except Exception as error:
                    fail(error)
            self._saw()

        try:
            with trio.CancelScope() as delivering:
                self._intake.take = take
                await deliver_received(self, on_messages)
            raise failures[0]
        finally:
            self._stop_delivering()

    def _stop_delivering(self) -> None:
        """Leave what still comes to the library, which discards it at a close."""
        self._intake.take = None
        if self._waiting is not None:
            self._waiting.cancel()

    def _too_big_comes(self) -> None:
        """Let `receive` run dry while the WebSocket stays open."""
        self._connection._send_channel.close()

    def _answer_to_no_frame(self) -> bytes:
        """The close frame for the rule of RFC 6455 that the peer broke (7.1.7), seen only here."""
        codec, broken = self._connection._wsproto, self._connection.closed
        if broken is None or codec.state is not ConnectionState.OPEN or broken.code not in BROKEN:
            return b""
        code = CloseReason(broken.code)
        close: bytes = codec.send(CloseConnection(code=code, reason=BROKEN[code]))
        return close

    async def send(self, *frames: str) -> None:
        """As `WebSocket`."""
        is_open = self._connection._wsproto.state is ConnectionState.OPEN
        if self._connection.closed is not None or not is_open:
            raise self._closed()
        try:
            await self._link.send_all(text_frames(frames))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._closed() from None
        except BaseException:
            self._link.abort()  # Half a frame may be out: nothing can follow it.
            raise

    async def close(self, code: int, reason: str) -> None:
        """As `WebSocket`."""
        self._intake.is_closing = True
        self._link.expect(1)
        self._stop_delivering()
        self._line.pings = False
        try:
            with trio.move_on_after(CLOSE_WAIT_S):
                await self._connection.aclose(code, reason or None)
                await self._reader_ended.wait()
                await self._link.linger()
        finally:
            self._link.socket.close()  # Not a reset: the kernel still delivers its buffers.

    async def abort(self) -> None:
        """As `WebSocket`."""
        self._link.abort()

    def _closed(self) -> WebSocketClosed:
        if self._link.dropped == "stalled":
            return WebSocketStalled(ABNORMAL_CLOSURE, "the peer takes nothing")
        reason = self._connection.closed
        if reason is None:
            return WebSocketClosed(ABNORMAL_CLOSURE, "")
        return WebSocketClosed(reason.code, reason.reason or "")
