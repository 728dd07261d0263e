"""One link at work, the same at both ends: it sends, receives, beats, and says when it is lost.

- `send` never blocks. A link is lost at once, and for good, when the other end leaves, breaks the
  protocol, is silent, or takes nothing of what waits for it.
- `run` owns the connection's tasks, and closes the connection at its end.
- A socket of ours is written at once and read into one buffer, without a task, a copy or a wakeup
  in between: a link costs several times as much with them (`SocketPipe`). TLS and asyncio's own
  transports go through their stream (`StreamPipe`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from recorder.format.format import Piece

from .frames import BEAT_S, READ_BYTES, SILENT_BEATS_MAX, WRITE_BYTES, Frame, LinkError, Outbox
from .hello import Wire
from .messages import Beat, Message, Receiver, Sender, stream_of

_logger = logging.getLogger("antiphon.link")

_BROKEN: Final = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


PIECES_MAX: Final = 1024
"""Of one call to the system, which takes no more (IOV_MAX)."""


class Link:
    """A connection after its greeting.

    Args:
        wire: the end that greeted.
        on_message: called with each message of the other end, in order; `LinkError`: it breaks the
            protocol.
        on_lost: called once, when the link is lost, with the reason.
        on_beat: called before each heartbeat.
    """

    def __init__(
        self,
        wire: Wire,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        wire.over()
        self._stream, self._inbox, self._early = wire.stream, wire.inbox, wire.early
        self._pipe = pipe_of(wire.stream)
        self._on_message, self._on_lost, self._on_beat = on_message, on_lost, on_beat
        self._outbox = Outbox()
        self._sender, self._receiver = Sender(), Receiver()
        self._rest: Sequence[Piece] = ()
        self._waiting = anyio.Event()
        self._scope = anyio.CancelScope()
        self._silent = self._stuck = 0
        self.reason = ""
        self.lost = anyio.Event()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._outbox.bytes

    def send(self, message: Message, stream: int | None = None) -> None:
        """Send a message; never blocks.

        `LinkError`: the link is lost. `RecordInvalid`: the message is too large; nothing is sent.
        """
        if self.reason:
            raise LinkError(self.reason)
        stream = stream_of(message) if stream is None else stream
        parts = self._sender.encode(message, stream)
        try:
            self._outbox.put(stream, parts)
        except LinkError as error:
            self.lose(f"it does not receive: {error}")
            raise
        if not self._rest:
            self._send_now()

    def _send_now(self) -> None:
        """Send one write's worth without waiting, and leave the rest to `_write`."""
        try:
            self._rest = self._pipe.send_now(self._pieces()) or self._pieces()
        except OSError:
            self.lose("it closed the connection")
            raise LinkError(self.reason) from None
        if self._rest:
            self._waiting.set()

    def lose(self, reason: str) -> None:
        """Give the link up; a second call does nothing."""
        if not self.reason:
            self.reason = reason
            self.lost.set()
            self._on_lost(reason)
            self._scope.cancel()

    async def run(self) -> None:
        """Send, receive and beat until the link is lost; cancelled, it is lost too."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read)
                    tasks.start_soon(self._write)
                    tasks.start_soon(self._beat)
        finally:
            self.lose("it was closed here")
            await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            for stream, frame in self._early:
                self._take(stream, frame)
            while True:
                data = await self._pipe.receive()
                self._silent = 0
                for stream, frame in self._inbox.feed(data):
                    self._take(stream, frame)
        except LinkError as error:
            self.lose(f"it broke the protocol: {error}")
        except (anyio.EndOfStream, *_BROKEN):
            self.lose("it closed the connection")
        except Exception:  # A bug of ours costs this link, and no other.
            _logger.exception("a message could not be taken")
            self.lose("a message could not be taken")

    def _take(self, stream: int, frame: Frame) -> None:
        message = self._receiver.decode(stream, frame)
        if not isinstance(message, Beat):
            self._on_message(message)

    async def _write(self) -> None:
        try:
            while True:
                if not self._rest:
                    self._waiting = anyio.Event()
                    await self._waiting.wait()
                self._stuck = 0
                await self._pipe.send(self._rest)
                self._rest = self._pieces()
        except _BROKEN:
            self.lose("it closed the connection")

    def _pieces(self) -> list[Piece]:
        """The next pieces, for one write."""
        pieces: list[Piece] = []
        before = self._outbox.bytes
        while before - self._outbox.bytes < WRITE_BYTES and (piece := self._outbox.take()):
            pieces += piece
        return pieces

    async def _beat(self) -> None:
        while True:
            await anyio.sleep(BEAT_S)
            self._silent += 1
            self._stuck += bool(self._rest)
            if self._silent > SILENT_BEATS_MAX:
                self.lose(f"it was silent for {SILENT_BEATS_MAX * BEAT_S:g} s")
            elif self._stuck > SILENT_BEATS_MAX:
                self.lose(f"it took nothing for {SILENT_BEATS_MAX * BEAT_S:g} s")
            else:
                with suppress(LinkError):  # too much waits: it is lost
                    self._on_beat()
                    self.send(Beat())


def pipe_of(stream: ByteStream) -> SocketPipe | StreamPipe:
    """The fastest way to use a connection, which remains its owner's to close."""
    if isinstance(stream, SocketStream):  # not that of TLS
        raw = stream.extra(SocketAttribute.raw_socket)
        if isinstance(raw, socket.socket):  # not that of an asyncio transport
            return SocketPipe(raw)
    return StreamPipe(stream)


class SocketPipe:
    """A connected socket that does not block."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = memoryview(bytearray(READ_BYTES))

    def send_now(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send what the system takes without waiting; return the rest."""
        try:
            sent = self._socket.sendmsg(pieces[:PIECES_MAX])
        except BlockingIOError:
            return pieces
        for number, piece in enumerate(pieces):
            if sent < len(piece):
                return [memoryview(piece)[sent:], *pieces[number + 1 :]]
            sent -= len(piece)
        return ()

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send whenever the system takes some."""
        while pieces := self.send_now(pieces):
            await anyio.wait_writable(self._socket)

    async def receive(self) -> Piece:
        """Wait for bytes, valid until the next call; `EndOfStream` at the end."""
        while True:
            await anyio.wait_readable(self._socket)
            try:
                count = self._socket.recv_into(self._buffer)
            except BlockingIOError:  # another reason to wake up
                continue
            if not count:
                raise anyio.EndOfStream
            return self._buffer[:count]


class StreamPipe:
    """A stream of AnyIO."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def send_now(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send nothing: a stream may wait."""
        return pieces

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send in one call."""
        await self._stream.send(b"".join(pieces))

    async def receive(self) -> Piece:
        """Wait for bytes."""
        return await self._stream.receive(READ_BYTES)
