"""A TCP connection that can be dropped at once, and that measures its peer's progress.

`keeper` checks it now and then, and drops stalled connections. The progress is the peer's
acknowledged bytes where the system reports them (Linux), because the kernel takes megabytes for a
peer that reads nothing; elsewhere the bytes that the kernel has taken.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import sys
import termios
from contextlib import suppress
from typing import Final

import trio

RECEIVE_BUFFER_BYTES: Final = 262_144
"""A second of audio and a frame of video in one read."""
READ_BYTES: Final = 124 << 10
"""Without knowing of more: a second of sound and a picture. A buffer of 128 KiB has to be mapped,
which takes longer than a read."""
LOW_WATER_BYTES_MAX: Final = 65_536
"""The wake-up threshold for a message whose end is far off: fewer reads would gain little, and the
kernel must have room for it."""
KEEPALIVE_IDLE_S: Final = 15
"""A client sends every second; a silence this long is worth a probe."""
KEEPALIVE_INTERVAL_S: Final = 5
"""Between probes of a silent peer: an unplugged cable frees its slot within half a minute."""
KEEPALIVE_PROBES: Final = 3
"""Unanswered probes after which the peer is gone; one may be lost on the way."""
UNACKNOWLEDGED_MS_MAX: Final = 30_000
"""Bytes that TCP could not deliver for so long will not arrive (RFC 5482)."""

_UNACKNOWLEDGED: Final = termios.TIOCOUTQ if sys.platform == "linux" else None
_HAS_LOW_WATER: Final = sys.platform == "linux"
"""Other systems have the option, but wake the reader anyway, or not at the end."""
_LEFT: Final = (getattr(select, "POLLRDHUP", 0)) | select.POLLHUP | select.POLLERR
_CLOSED: Final = frozenset({errno.EBADF, errno.ENOTSOCK})


def _lost(error: OSError) -> Exception:
    """What trio says of a connection that we closed, or that is gone."""
    if error.errno in _CLOSED:
        return trio.ClosedResourceError("this socket was closed")
    return trio.BrokenResourceError("the peer is gone")


class TcpStream(trio.abc.HalfCloseableStream):
    """A TCP connection; closes `stream`. `reads` counts reads with bytes, or the end."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._handed_bytes = 0
        self._is_sending = False
        self.socket = stream.socket
        self.reads = 0
        self.is_reading = False
        self._low_water = 1

    def expect(self, count: int) -> None:
        """Wake the reader for at least `count` bytes (bounded) or the end, where the system can.

        Otherwise each packet of a slow message would wake it.
        """
        low_water = min(count, LOW_WATER_BYTES_MAX)
        if low_water != self._low_water and _HAS_LOW_WATER:
            self._low_water = low_water
            with suppress(OSError):  # It is gone: the next read will say so.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    @property
    def signs_of_life(self) -> tuple[int, int]:
        """A value that changes with any new byte: reads, and bytes that woke no reader."""
        return self.reads, self._told(termios.FIONREAD) if self._low_water > 1 else 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read new bytes; empty at the end."""
        self.is_reading = True
        try:
            data = await self._receive(max_bytes or READ_BYTES)
        finally:
            self.is_reading = False
        self.reads += 1
        return data

    async def _receive(self, max_bytes: int) -> bytes:
        """Wait first, then read: most often there is nothing yet, and trying would fail."""
        try:
            while self.socket.fileno() >= 0:
                await trio.lowlevel.wait_readable(self.socket)
                try:
                    return os.read(self.socket.fileno(), max_bytes)
                except BlockingIOError:
                    pass
        except OSError as error:
            raise _lost(error) from error
        raise trio.ClosedResourceError("this socket was closed")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes, or raise; one task at a time. It waits only where the kernel does."""
        assert not self._is_sending, "two tasks send at once"
        self._is_sending = True
        try:
            sent = 0
            while sent < len(data):
                try:
                    count = os.write(self.socket.fileno(), memoryview(data)[sent:])
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self.socket)
                else:
                    sent += count
                    self._handed_bytes += count
        except OSError as error:
            raise _lost(error) from error
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel takes more."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """End sending; reading goes on."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close; the kernel still delivers its buffers."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Drop the connection and unsent bytes at once, with a reset; never waits."""
        with suppress(OSError):  # It is closed, or the peer has reset it.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def progress(self) -> tuple[bool, int]:
        """Whether bytes wait for the peer, and the bytes that it has taken so far."""
        unacknowledged = 0 if _UNACKNOWLEDGED is None else self._told(_UNACKNOWLEDGED)
        is_owed = self._is_sending or unacknowledged > 0
        return is_owed, self._handed_bytes - unacknowledged

    def _told(self, question: int) -> int:
        """Ask the kernel for a number; 0 where it cannot tell."""
        if self.socket.fileno() >= 0:
            with suppress(OSError):
                told = fcntl.ioctl(self.socket.fileno(), question, b"\0\0\0\0")
                return int.from_bytes(told, sys.byteorder)
        return 0

    def peer_has_left(self) -> bool:
        """Whether the peer's end has arrived, possibly after unread bytes."""
        if self.socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.socket.fileno(), _LEFT)
        return bool(poll.poll(0))

    def notice_dead_peer(self) -> None:
        """Let TCP notice a dead peer, where the system can."""
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
                with suppress(OSError):  # It is gone: the first read will say so.
                    self.socket.setsockopt(level, option, value)
