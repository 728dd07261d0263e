"""The bytes of one connection, both ways.

A socket of ours is written at once and read into one buffer, without a task, a copy or a wakeup in
between: a link costs several times as much with them. TLS and asyncio's own transports go through
their stream.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, Protocol

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from recorder.format.format import Piece

from .limits import READ_BYTES

PIECES_MAX: Final = 1024
"""Of one call to the system, which takes no more (IOV_MAX)."""


class Pipe(Protocol):
    """One end of a connection; `OSError` or an error of AnyIO where it is broken."""

    def send_now(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send what can be sent without waiting; return the rest."""
        ...

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send all."""
        ...

    async def receive(self) -> Piece:
        """Wait for bytes; they are valid until the next call. `EndOfStream` at the end."""
        ...


def pipe_of(stream: ByteStream) -> Pipe:
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
        """Send what the system takes."""
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
        """Wait for bytes; they are overwritten by the next call."""
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
