"""A TCP connection that can be dropped at once, and that knows how far its peer has come.

What is counted here costs an addition for each read and send; `keeper` looks at it now and then,
and drops the connections in which nothing moves. `taken_bytes` is what the peer's machine has
acknowledged, where the system tells (Linux), for the kernel takes megabytes for a peer that reads
nothing; elsewhere it is what the kernel has taken.

It knows nothing of what the bytes are.
"""

from __future__ import annotations

import errno
import fcntl
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
LOW_WATER_BYTES_MAX: Final = 65_536
"""Of a message whose end is far off, so much at once: fewer reads would gain little, and the kernel
must have room for it."""
KEEPALIVE_IDLE_S: Final = 15
"""A client sends every second; after this long in silence it is worth asking TCP."""
KEEPALIVE_INTERVAL_S: Final = 5
"""How often a silent peer is probed, so that a pulled cable frees its slot within half a minute."""
KEEPALIVE_PROBES: Final = 3
"""Unanswered probes after which it is gone; one may be lost on the way."""
UNACKNOWLEDGED_MS_MAX: Final = 30_000
"""What we sent and TCP could not deliver for so long will not arrive (RFC 5482)."""

_UNACKNOWLEDGED: Final = termios.TIOCOUTQ if sys.platform == "linux" else None
_HAS_LOW_WATER: Final = sys.platform == "linux"
"""Others have the option, and wake the reader all the same, or do not at the end."""
_LEFT: Final = (getattr(select, "POLLRDHUP", 0)) | select.POLLHUP | select.POLLERR
_CLOSED: Final = frozenset({errno.EBADF, errno.ENOTSOCK})


class TcpStream(trio.abc.HalfCloseableStream):
    """A TCP connection.

    Args:
        stream: the connection; this object closes it.

    Attributes:
        socket: under it.
        reads: how often something, or the end, has come.
        is_reading: it waits for the peer to say something.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._handed_bytes = 0
        self._is_sending = False
        self.socket = stream.socket
        self.reads = 0
        self.is_reading = False
        self._low_water = 1

    def expect(self, count: int) -> None:
        """Wake the reader for no fewer bytes than it lacks, or for the end.

        A message that arrives slowly would wake it for each packet otherwise. Where the system
        knows no such thing, nothing changes.

        Args:
            count: what is missing; less is waited for if it is much.
        """
        low_water = min(count, LOW_WATER_BYTES_MAX)
        if low_water != self._low_water and _HAS_LOW_WATER:
            self._low_water = low_water
            with suppress(OSError):  # It is gone already: the next read will say so.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    @property
    def signs_of_life(self) -> tuple[int, int]:
        """What differs as soon as anything came: reads, and bytes for which none was woken yet."""
        return self.reads, self._told(termios.FIONREAD) if self._low_water > 1 else 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read what arrives; empty at the end."""
        self.is_reading = True
        try:
            data = await self._stream.receive_some(max_bytes or RECEIVE_BUFFER_BYTES)
        finally:
            self.is_reading = False
        self.reads += 1
        return bytes(data)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send it all, or raise; one task at a time."""
        assert not self._is_sending, "two tasks send at once"
        self._is_sending = True
        try:
            sent = 0
            while sent < len(data):
                count = await self.socket.send(memoryview(data)[sent:] if sent else data)
                sent += count
                self._handed_bytes += count
        except OSError as error:
            if error.errno in _CLOSED:
                raise trio.ClosedResourceError("this socket was closed") from None
            raise trio.BrokenResourceError("the peer is gone") from error
        finally:
            self._is_sending = False

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

    def progress(self) -> tuple[bool, int]:
        """Say whether the peer has something to take, and how many bytes it has taken so far."""
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
        """Say whether the peer's end has arrived, behind what may still be unread."""
        if self.socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.socket.fileno(), _LEFT)
        return bool(poll.poll(0))

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
