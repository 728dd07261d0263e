"""One client's connection: a reader task and a writer task around one `WebSocket`.

The session's driver owns it: it awaits `run`, and calls `send` and `close`, which never block.

- The reader hands each message to `on_frame` and awaits it: that is the backpressure.
- The writer sends what is queued, in order, each frame once its `ready` has returned (the log has
  written it). Frames that wait for the same `ready` go out in one call. A `close` goes out after
  everything that was queued before it.
- Neither task waits for the other.
- A connection ends in one of three ways, and only the first that happens is told: our own close
  was handed to the WebSocket (nothing is called), `on_gone` (the peer closed or was lost), or
  `on_send_failed` (the peer reads too slowly; TCP is dropped). After it nothing is sent, and `run`
  ends: a frame still in `on_frame` is given up then.
- A send that finds the WebSocket closed leaves it to the reader to say so, after the messages that
  came before the end (a client says `session.close` and leaves in one go); `on_send_failed` is told
  where the reader cannot within `DRAIN_S`.
- What is queued is bounded in bytes, a frame's sending in time, and a close with all before it too.
  A peer that takes nothing at all is noticed sooner by the WebSocket (`WebSocketStalled`), which
  sees how far it has come within a frame.

It knows nothing of sessions, logs or wire formats, and reads no clock but for those bounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import anyio
import attrs

from protocol.utf8 import Frame, frame_bytes

from .websocket import WebSocket, WebSocketClosed, WebSocketStalled

SEND_BUFFER_BYTES: Final = 8 * 1024 * 1024
"""A minute of speech in base64: who is that far behind does not listen any more. A single frame may
be larger: an answer of chat, with all its speech."""
QUEUED_BYTES_MIN: Final = 256
"""What a queued frame is counted as at least, so that tiny ones cannot take memory uncounted."""
SEND_STALL_S: Final = 10.0
"""A peer that takes nothing for so long will not catch up; the default of an operator's setting."""
SEND_BYTES_PER_S_MIN: Final = 16 * 1024
"""A mobile network at its worst: a large frame may take longer by this rate, and is then of no use
to a call, but still to a chat."""
SEND_TOGETHER_BYTES_MAX: Final = 256 * 1024
"""A unit's answer goes out in one call; what is larger gains nothing, and is copied for it."""
CLOSE_FLUSH_S: Final = 5.0
"""For a close, beside one stall: the answer; what is queued before it counts by its bytes."""
DRAIN_S: Final = 1.0
"""For the messages that came before the end; a reader that is held longer is not waited for."""
ABORT_S: Final = 1.0
"""Dropping a connection waits for nobody; should it ever, the session must not."""

Ready = Callable[[], Awaitable[None]]


class Outlet(Protocol):
    """The writing side of a connection; all of it returns at once."""

    def send(self, frame: str, ready: Ready) -> None:
        """Queue a frame, to be sent once `ready` returns."""
        ...

    def close(self, code: int, reason: str, ready: Ready) -> None:
        """Queue the WebSocket close behind what was queued before."""
        ...


@attrs.frozen(kw_only=True)
class _Frame:
    text: str
    size_bytes: int
    ready: Ready


@attrs.frozen(kw_only=True)
class _Close:
    code: int
    reason: str
    ready: Ready


class Connection:
    """The two tasks of a connection, and the outbox between the driver and the peer.

    Args:
        websocket: open; `run` closes it in every case.
        on_frame: takes a message, None for one that was too big; awaited: it may hold the reader.
        on_gone: told once that the peer closed or was lost.
        on_send_failed: told once that a frame cannot be sent.
        stall_s: for a frame to be taken, however small it is.

    It is made in the event loop that runs it.
    """

    def __init__(
        self,
        websocket: WebSocket,
        *,
        on_frame: Callable[[Frame], Awaitable[None]],
        on_gone: Callable[[], None],
        on_send_failed: Callable[[], None],
        stall_s: float = SEND_STALL_S,
    ) -> None:
        self._websocket = websocket
        self._on_frame = on_frame
        self._on_gone = on_gone
        self._on_send_failed = on_send_failed
        self._stall_s = stall_s
        self._outbox: deque[_Frame | _Close] = deque()
        self._queued_bytes = 0
        self._wakeup = anyio.Event()
        self._close_queued = False
        self._ended = False
        self._reading = anyio.CancelScope()
        self._writing = anyio.CancelScope()

    def send(self, frame: str, ready: Ready) -> None:
        """Queue a text frame; never blocks, and does nothing once the connection ended.

        Args:
            frame: the message.
            ready: awaited before it is sent.
        """
        if self._ended or self._close_queued:
            return
        size_bytes = max(frame_bytes(frame), QUEUED_BYTES_MIN)
        if self._queued_bytes and self._queued_bytes + size_bytes > SEND_BUFFER_BYTES:
            self._fail()
            return
        self._queued_bytes += size_bytes
        self._put(_Frame(text=frame, size_bytes=size_bytes, ready=ready))

    def close(self, code: int, reason: str, ready: Ready) -> None:
        """Queue a close after all that is queued; never blocks, and only the first one counts.

        Args:
            code: the close code (RFC 6455, 7.4).
            reason: 123 bytes of UTF-8 at most.
            ready: awaited before it is sent.
        """
        if self._ended or self._close_queued:
            return
        self._close_queued = True
        flush_s = self._stall_s + CLOSE_FLUSH_S + self._queued_bytes / SEND_BYTES_PER_S_MIN
        self._writing.deadline = anyio.current_time() + flush_s
        self._put(_Close(code=code, reason=reason, ready=ready))

    async def run(self) -> None:
        """Read and write until the WebSocket is closed; cancelled, it aborts the WebSocket.

        Raises:
            ExceptionGroup: what `on_frame` or a `ready` raised; the WebSocket is aborted.
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
                while True:
                    await self._on_frame(await self._websocket.receive())
            except WebSocketStalled:
                self._fail()
            except WebSocketClosed:
                self._lose()
        self._fail()  # Told only where the writer found the end and the reader could not reach it.

    async def _write(self) -> None:
        lost = False
        with self._writing:
            lost = await self._write_to_the_end()
        if lost:
            self._reading.deadline = anyio.current_time() + DRAIN_S
            return
        self._fail()  # Told only where the time for the close was up.
        await self._websocket.abort()
        self._reading.cancel()

    async def _write_to_the_end(self) -> bool:
        """Send what comes until the close is done (False) or a send finds it closed (True)."""
        with anyio.CancelScope() as sending:
            while True:
                while not self._outbox:
                    self._wakeup = anyio.Event()
                    await self._wakeup.wait()
                item = self._outbox[0]
                await item.ready()
                if isinstance(item, _Close):
                    self._ended = True
                    await self._websocket.close(item.code, item.reason)
                    return False
                try:
                    await self._send_step(item.ready, sending)
                except WebSocketStalled:
                    break
                except WebSocketClosed:
                    return True
        self._fail()
        return False

    async def _send_step(self, ready: Ready, sending: anyio.CancelScope) -> None:
        """Send the frames at the head of the outbox that wait for the same as the first."""
        frames, size_bytes = list[str](), 0
        for item in self._outbox:
            if item.ready is not ready or isinstance(item, _Close):
                break
            if frames and size_bytes + item.size_bytes > SEND_TOGETHER_BYTES_MAX:
                break
            frames.append(item.text)
            size_bytes += item.size_bytes
        limit_s = self._stall_s + size_bytes / SEND_BYTES_PER_S_MIN
        sending.deadline = anyio.current_time() + limit_s
        await self._websocket.send(*frames)
        sending.deadline = math.inf
        self._queued_bytes -= size_bytes
        for _ in frames:
            self._outbox.popleft()

    def _put(self, item: _Frame | _Close) -> None:
        self._outbox.append(item)
        self._wakeup.set()

    def _lose(self) -> None:
        """The peer is gone: there is nobody to send to."""
        if not self._ended:
            self._ended = True
            self._writing.cancel()
            self._on_gone()

    def _fail(self) -> None:
        """A frame cannot be sent: drop the connection."""
        if not self._ended:
            self._ended = True
            self._writing.cancel()
            self._on_send_failed()
