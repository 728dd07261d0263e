"""A `WebSocket`, as a small interface of our own, and the `Connection` of one client around it.

Of a WebSocket one task receives or delivers, and one sends; any task may call `close` and `abort`.
`receive` returns a `Shortened` once for a message above the limit, and then only the end; the
WebSocket stays open, so that the client can be told. `WebSocketClosed` ends everything.

A connection has a reader task and a writer task:

- The server awaits `run`. The session's driver sends: `send`, `send_again` and `close` return at
  once.
- Messages are given to `on_frames`, small ones that came together at once, and nothing more is read
  until the awaitable that it returns is done: that is the back-pressure. The writer sends frames in
  order, each once its `ready` returned (the log has written it), those with the same `ready` in one
  call, and a `close` last. Neither task waits for the other.
- A connection ends once: our close was handed to the WebSocket (no callback), `on_gone` (the peer
  closed or was lost), or `on_send_failed` (the peer reads too slowly; TCP is dropped). Then nothing
  more is sent, a frame in `on_frames` is given up, and `run` ends.
- If a send finds the WebSocket closed, the reader first delivers the messages before the close,
  within `DRAIN_S` (a client sends `session.close` and leaves); then `on_send_failed` is called.
- The outbox is bounded in bytes; a frame, and a close with the frames before it, in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, NoReturn, Protocol

import anyio
import attrs

from protocol.values.frames import Received
from protocol.wire.codec import frame_bytes

# -- a WebSocket -----------------------------------------------------------------------------------


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

    def __call__(self, *messages: Received) -> Awaitable[None] | None:
        """Take messages in order, and return what to wait for before the next."""


class WebSocket(Protocol):
    """An open WebSocket; its acceptor closes or aborts it."""

    async def receive(self) -> Received:
        """Wait for a message; once a `Shortened` for one above the limit. Or `WebSocketClosed`."""

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


async def deliver_received(websocket: WebSocket, on_messages: OnMessages) -> NoReturn:
    """Do what `WebSocket.deliver` does by `receive`, in the calling task."""
    while True:
        waits = on_messages(await websocket.receive())
        if waits is not None:
            await waits


# -- a client's connection -------------------------------------------------------------------------


SEND_BUFFER_BYTES: Final = 8 * 1024 * 1024
"""A minute of speech in base64: a client that far behind no longer listens. A single frame may be
larger: an answer of chat with all its speech."""
QUEUED_BYTES_MIN: Final = 256
"""The least that a queued frame counts, so that many tiny frames are bounded too."""
SEND_STALL_S: Final = 10.0
"""A peer that takes nothing for so long will not catch up; default of an operator's setting."""
SEND_BYTES_PER_S_MIN: Final = 16 * 1024
"""A bad mobile network: a large frame gets more time at this rate; chat can still use it."""
SEND_TOGETHER_BYTES_MAX: Final = 256 * 1024
"""A unit's answer goes out in one call; a larger call gains nothing and costs a copy."""
CLOSE_FLUSH_S: Final = 5.0
"""Time for the peer's answer to a close, plus one stall and the time for the queued bytes."""
DRAIN_S: Final = 1.0
"""For the messages before the end; a reader that is held up longer is given up."""
ABORT_S: Final = 1.0
"""Dropping a connection does not wait; if it ever does, the session must not."""

Ready = Callable[[], Awaitable[None]]


@attrs.frozen(kw_only=True)
class _Frame:
    text: str
    size_bytes: int
    ready: Ready


@attrs.frozen(kw_only=True)
class _ResentFrames:
    frames: AsyncGenerator[str]


@attrs.frozen(kw_only=True)
class _Close:
    code: int
    reason: str
    ready: Ready


@attrs.define(eq=False)
class Connection:
    """The two tasks of a connection, and the outbox; made in the event loop that runs it.

    Attributes:
        websocket: open; `run` closes it in every case.
        on_frames: takes messages as `WebSocket.receive` gives them; its awaitable holds the reader.
        on_gone: called once, with the code of the close; 1006 without one.
        on_send_failed: called once.
        stall_s: the time for a frame of any size to be taken.
    """

    _websocket: WebSocket
    _on_frames: OnMessages = attrs.field(kw_only=True)
    _on_gone: Callable[[int], None] = attrs.field(kw_only=True)
    _on_send_failed: Callable[[], None] = attrs.field(kw_only=True)
    _stall_s: float = attrs.field(default=SEND_STALL_S, kw_only=True)
    _outbox: deque[_Frame | _ResentFrames | _Close] = attrs.field(factory=deque, init=False)
    _queued_bytes: int = attrs.field(default=0, init=False)
    _wakeup: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _close_queued: bool = attrs.field(default=False, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    _reading: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)
    _writing: anyio.CancelScope = attrs.field(factory=anyio.CancelScope, init=False)

    def send(self, frame: str, ready: Ready) -> None:
        """Queue a text frame, to be sent once `ready` returns; ignored after the end or a close."""
        if self._ended or self._close_queued:
            return
        size_bytes = max(frame_bytes(frame), QUEUED_BYTES_MIN)
        if self._queued_bytes and self._queued_bytes + size_bytes > SEND_BUFFER_BYTES:
            self._fail()
            return
        self._queued_bytes += size_bytes
        self._outbox.append(_Frame(text=frame, size_bytes=size_bytes, ready=ready))
        self._wakeup.set()

    def send_again(self, frames: AsyncGenerator[str]) -> None:
        """Queue frames that are read when they are due; a failure breaks the connection."""
        if not (self._ended or self._close_queued):
            self._put(_ResentFrames(frames=frames))

    def close(self, code: int, reason: str, ready: Ready) -> None:
        """Queue the WebSocket close after all queued frames; only the first one counts.

        `code` as in RFC 6455, 7.4; `reason` has at most 123 bytes of UTF-8.
        """
        if self._ended or self._close_queued:
            return
        self._close_queued = True
        flush_s = self._stall_s + CLOSE_FLUSH_S + self._queued_bytes / SEND_BYTES_PER_S_MIN
        self._writing.deadline = anyio.current_time() + flush_s
        self._put(_Close(code=code, reason=reason, ready=ready))

    async def run(self) -> None:
        """Read and write until the WebSocket is closed; cancelled, abort the WebSocket.

        Errors of `on_frames` or a `ready` abort it too, and are raised as an `ExceptionGroup`.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write)
                await self._read()
        finally:
            self._ended = True
            self._outbox.clear()
            with anyio.move_on_after(ABORT_S, shield=True):
                await self._websocket.abort()

    async def _read(self) -> None:
        with self._reading:
            try:
                await self._websocket.deliver(self._on_frames)
            except WebSocketStalled:
                self._fail()
            except WebSocketClosed as closed:
                self._lose(closed.code)
        self._fail()  # No effect, unless the writer found the end and the reader did not.

    async def _write(self) -> None:
        lost = False
        with self._writing:
            lost = await self._write_to_the_end()
        if lost:
            self._reading.deadline = anyio.current_time() + DRAIN_S
            return
        self._fail()  # Has an effect only if the time for the close was up.
        await self._websocket.abort()
        self._reading.cancel()

    async def _write_to_the_end(self) -> bool:
        """Send until the close is done (False) or a send finds the WebSocket closed (True)."""
        with anyio.CancelScope() as sending:
            while True:
                while not self._outbox:
                    self._wakeup = anyio.Event()
                    await self._wakeup.wait()
                item = self._outbox[0]
                if not isinstance(item, _ResentFrames):
                    await item.ready()
                if isinstance(item, _Close):
                    self._ended = True
                    await self._websocket.close(item.code, item.reason)
                    return False
                try:
                    if isinstance(item, _ResentFrames):
                        await self._send_again(item, sending)
                    else:
                        await self._send_step(item.ready, sending)
                except WebSocketStalled:
                    break
                except WebSocketClosed:
                    return True
        self._fail()
        return False

    async def _send_step(self, ready: Ready, sending: anyio.CancelScope) -> None:
        """Send the frames at the head of the outbox that share the first one's `ready`."""
        frames, size_bytes = list[str](), 0
        for item in self._outbox:
            if not isinstance(item, _Frame) or item.ready is not ready:
                break
            if frames and size_bytes + item.size_bytes > SEND_TOGETHER_BYTES_MAX:
                break
            frames.append(item.text)
            size_bytes += item.size_bytes
        await self._send_in_time(frames, size_bytes, sending)
        self._queued_bytes -= size_bytes
        for _ in frames:
            self._outbox.popleft()

    async def _send_again(self, again: _ResentFrames, sending: anyio.CancelScope) -> None:
        """Send the frames one by one, so that what waits behind them is all that takes memory."""
        async with aclosing(again.frames) as frames:
            async for frame in frames:
                await self._send_in_time([frame], frame_bytes(frame), sending)
        self._outbox.popleft()

    async def _send_in_time(
        self, frames: list[str], size_bytes: int, sending: anyio.CancelScope
    ) -> None:
        limit_s = self._stall_s + size_bytes / SEND_BYTES_PER_S_MIN
        sending.deadline = anyio.current_time() + limit_s
        await self._websocket.send(*frames)
        sending.deadline = math.inf

    def _put(self, item: _ResentFrames | _Close) -> None:
        self._outbox.append(item)
        self._wakeup.set()

    def _lose(self, code: int) -> None:
        if not self._ended:
            self._ended = True
            self._writing.cancel()
            self._on_gone(code)

    def _fail(self) -> None:
        if not self._ended:
            self._ended = True
            self._writing.cancel()
            self._on_send_failed()
