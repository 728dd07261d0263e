"""The client's end of one WebSocket over TCP, with the faults that libraries avoid.

Messages are written in fragments with pings between them, byte by byte, invalid or too big. The
sans-IO protocol of `websockets` reads all the time: the end may arrive during a send.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

import anyio
from anyio.abc import ByteStream, SocketAttribute
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode

from protocol.values.errors import CLOSE_NORMAL
from protocol.values.limits import CHAT_FRAME_BYTES_MAX

from .closes import ABNORMAL
from .judge import Judge
from .play import Broken

SEND_WAIT_S: Final = 15.0
"""A server that takes nothing for so long has stopped reading, which it never should."""
READ_BYTES: Final = 262_144
"""A second of speech in one read."""
CLOSE_WAIT_S: Final = 2.0
"""A live server answers a close within a round trip."""
FRAGMENT_BYTES: Final = 7
"""Cuts characters and base64 in pieces; frames may end anywhere."""
FRAGMENTS_MAX: Final = 64
"""Then the rest in one: a second of sound in pieces of 7 bytes would be 12,000 frames."""
DRIBBLE_BYTES: Final = 64
"""The head of a frame and a little, byte by byte; then the rest."""
PIECE_BYTES: Final = 65_536
"""A message that is too big is made in such pieces, and never held."""
TOO_BIG_BYTES: Final = CHAT_FRAME_BYTES_MAX + PIECE_BYTES
"""The bytes of a message larger than any mode takes."""
LOST: Final = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
"""Exceptions of a connection that is over."""


class SocketWire:
    """One WebSocket over TCP, written by hand; the target closes it, and did the handshake."""

    def __init__(self, stream: ByteStream, protocol: ClientProtocol, judge: Judge) -> None:
        self._stream = stream
        self._protocol = protocol
        self._judge = judge
        self._sending = anyio.Lock()
        self._ended = anyio.Event()
        self._reading = anyio.CancelScope()
        self._pieces: list[bytes] = []
        self._is_text = True
        self._fragments = self._dribbles = False
        self._left = False

    # -- sending --------------------------------------------------------------------------------

    async def send(self, frame: str | bytes | None) -> None:
        """As `Wire`."""
        opcode = Opcode.BINARY if isinstance(frame, bytes) else Opcode.TEXT
        if frame is None:
            await self._put(self._too_big())
            return
        data = frame.encode() if isinstance(frame, str) else frame
        for piece in self._cut(opcode, data):
            await self._put([piece])

    def _too_big(self) -> Iterator[bytes]:
        """A frame above every limit, piece by piece, until the connection ends."""
        yield b"\x81\xff" + struct.pack("!Q4x", TOO_BIG_BYTES)
        piece = bytes(PIECE_BYTES)
        for _ in range(TOO_BIG_BYTES // PIECE_BYTES):
            if self._judge.is_over:
                return
            yield piece

    def _cut(self, opcode: Opcode, data: bytes) -> list[bytes]:
        """A message as frames, with their masks."""
        count = FRAGMENTS_MAX if self._fragments else 0
        starts = range(0, min(len(data), count * FRAGMENT_BYTES), FRAGMENT_BYTES)
        made: list[bytes] = []
        for start in starts:
            piece = Frame(opcode, data[start : start + FRAGMENT_BYTES], fin=False)
            made += [piece.serialize(mask=True), Frame(Opcode.PING, b"?").serialize(mask=True)]
            opcode = Opcode.CONT
        rest = data[len(starts) * FRAGMENT_BYTES :]
        return [*made, Frame(opcode, rest).serialize(mask=True)]

    async def raw(self, data: bytes, /) -> None:
        """As `Wire`."""
        await self._put([data])

    async def _put(self, pieces: Iterable[bytes]) -> None:
        """Send bytes; a server that does not take them is a finding."""
        try:
            async with self._sending:
                for data in pieces:
                    with anyio.fail_after(SEND_WAIT_S):
                        await self._put_piece(data)
            with anyio.fail_after(SEND_WAIT_S):
                await self._answer()
        except TimeoutError:
            self._judge.found("hang", "the server reads no more")
            raise Broken from None
        except LOST:
            raise Broken from None

    async def _put_piece(self, data: bytes) -> None:
        if self._dribbles:
            for at in range(min(len(data), DRIBBLE_BYTES)):
                await self._stream.send(data[at : at + 1])
            data = data[DRIBBLE_BYTES:]
        if data:
            await self._stream.send(data)

    async def _answer(self) -> None:
        """Send pongs and the answer to a close, after a message in progress; reading goes on."""
        if self._sending.locked():
            return
        async with self._sending:
            if answers := b"".join(self._protocol.data_to_send()):
                await self._stream.send(answers)

    async def fault(self, name: str) -> None:
        """As `Wire`."""
        match name:
            case "fragments":
                self._fragments = True
            case "dribble":
                self._dribbles = True
            case "ping":
                await self._put([Frame(Opcode.PING, b"ping").serialize(mask=True)])
                await self._put([Frame(Opcode.PONG, b"unasked").serialize(mask=True)])
            case "stall":
                self._reading.cancel()
            case "half_close":
                with suppress(NotImplementedError, *LOST):  # TLS has no half-close
                    await self._stream.send_eof()
            case "reset":
                self._left = True
                held = self._stream.extra(SocketAttribute.raw_socket)
                with suppress(OSError):
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await anyio.aclose_forcefully(self._stream)

    async def leave(self) -> None:
        """As `Wire`; the wait for the answer is bounded."""
        if self._left:
            return
        self._left = True
        if not self._judge.is_over:
            self._judge.broke = True
            with suppress(Broken):
                reason = struct.pack("!H", CLOSE_NORMAL)
                await self._put([Frame(Opcode.CLOSE, reason).serialize(mask=True)])
            if not self._reading.cancel_called:
                with anyio.move_on_after(CLOSE_WAIT_S):
                    await self._ended.wait()
        await anyio.aclose_forcefully(self._stream)

    # -- reading --------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read to the end of the connection, or until the client stalls."""
        with self._reading:
            try:
                while True:
                    for event in self._protocol.events_received():
                        if isinstance(event, Frame):
                            self._take(event)
                    with suppress(*LOST):  # received data can still be read
                        await self._answer()
                    self._protocol.receive_data(await self._stream.receive(READ_BYTES))
            except LOST:
                with suppress(EOFError):
                    self._protocol.receive_eof()
            told = self._protocol.close_rcvd
            self._judge.closed(*((ABNORMAL, "") if told is None else (told.code, told.reason)))
            self._ended.set()

    def _take(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE and (told := self._protocol.close_rcvd) is not None:
            self._judge.closed(told.code, told.reason)
        if frame.opcode not in {Opcode.TEXT, Opcode.BINARY, Opcode.CONT}:
            return
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._pieces.append(bytes(frame.data))
        if frame.fin:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._judge.heard(data.decode(errors="replace") if self._is_text else data)
