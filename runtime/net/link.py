"""A client's connection: `TcpStream`, over it `Link`, with TLS or not, and what watches them all.

- `TcpStream` can be dropped at once, and measures its peer's progress: the peer's acknowledged
  bytes where the system reports them (Linux), because the kernel takes megabytes for a peer that
  reads nothing; elsewhere the bytes that the kernel has taken.
- Calls of `Link.send_all` are sent whole, in order: a ping never falls into a frame, and nothing
  follows a close. A cancelled call may have sent a part: the caller aborts the connection.
- Over TLS bytes are sent in pieces, so that a large frame is not encrypted, and kept, at once.
- `drop` cuts the connection for a cause, which is counted once.

`ConnectionMonitor` looks at all connections of a listener each `CHECK_S`: it pings, and drops

- `stalled`: bytes wait for the peer, whose machine has acknowledged none for `stall_s`: a slow but
  steady client may take its time. An HTTP answer is kept in memory until it is acknowledged: while
  a send waits, `HTTP_BYTES_PER_S_MIN` must be.
- `silent`: a WebSocket from which no byte, not even a pong, came in `pong_wait_s` while we read;
  without pings none is.
- `slow`: a message that keeps others waiting for room for too long (`Budget`).
- `left`: held to its rate, and its end arrived `LEAVE_S` ago after unread bytes.

A late check drops none: the loop was held up, and new bytes are unread.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import socket
import ssl
import struct
import sys
import termios
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import attrs
import trio
from httpcore2 import AsyncNetworkStream, NetworkError

from ..settings.settings import Settings
from .limits import RECEIVING_BYTES_MAX, Budget, Counters, Drop, PartyRates, Share
from .process import HEAP_SPARE_BYTES, trim_heap

# -- TCP -------------------------------------------------------------------------------------------


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
    def received_marker(self) -> tuple[int, int]:
        """A value that changes with any new byte: reads, and bytes that woke no reader."""
        return self.reads, self._query_kernel(termios.FIONREAD) if self._low_water > 1 else 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read new bytes; empty at the end."""
        self.is_reading = True
        try:
            while self.socket.fileno() >= 0:
                # Wait first, then read: most often there is nothing yet, and trying would fail.
                await trio.lowlevel.wait_readable(self.socket)
                try:
                    data = os.read(self.socket.fileno(), max_bytes or READ_BYTES)
                except BlockingIOError:
                    continue
                self.reads += 1
                return data
        except OSError as error:
            raise _lost(error) from error
        finally:
            self.is_reading = False
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
        unacknowledged = 0 if _UNACKNOWLEDGED is None else self._query_kernel(_UNACKNOWLEDGED)
        is_owed = self._is_sending or unacknowledged > 0
        return is_owed, self._handed_bytes - unacknowledged

    def _query_kernel(self, question: int) -> int:
        """Ask the kernel for a number; 0 where it cannot tell."""
        if self.socket.fileno() >= 0:
            with suppress(OSError):
                answer = fcntl.ioctl(self.socket.fileno(), question, b"\0\0\0\0")
                return int.from_bytes(answer, sys.byteorder)
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


# -- TCP or TLS ------------------------------------------------------------------------------------


PIECE_BYTES: Final = 65_536
"""Four records of TLS: encrypting more at once delays other sessions and gains nothing."""
CARRIED_BYTES: Final = 65_536
"""A read of bytes that are carried on, or discarded while a peer takes our last ones."""

_LOG: Final = logging.getLogger("antiphon.listener")


class Link(trio.abc.Stream):
    """A connection, with bytes put back; closes `tcp`.

    `tls` has its handshake done; None for plain TCP. `dropped` is the cause, or None.
    """

    def __init__(
        self,
        tcp: TcpStream,
        counters: Counters,
        peer: str = "",
        tls: trio.SSLStream[TcpStream] | None = None,
    ) -> None:
        self.tcp = tcp
        self.peer = peer
        self.dropped: Drop | None = None
        self._counters = counters
        self._tls = tls
        self._stream: TcpStream | trio.SSLStream[TcpStream] = tcp if tls is None else tls
        self._put_back = b""
        self.is_sending = False
        self._waiting: deque[trio.Event] = deque()
        self._held: trio.CancelScope | None = None
        self._is_aborted = False

    @property
    def is_tls(self) -> bool:
        """Whether it is encrypted."""
        return self._tls is not None

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket below; for its addresses."""
        return self.tcp.socket

    @property
    def is_held(self) -> bool:
        """Whether its reader waits for its rate or for room, not for the client."""
        return self._held is not None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the reader while the block waits; `trio.ClosedResourceError` once dropped."""
        if self._is_aborted:
            raise trio.ClosedResourceError("the connection was dropped")
        with trio.CancelScope() as held:
            self._held = held
            try:
                yield
            finally:
                self._held = None
        if held.cancelled_caught:
            raise trio.ClosedResourceError("the connection was dropped")

    async def secure(self, context: ssl.SSLContext) -> None:
        """Do the TLS handshake as the server; the caller bounds the time.

        `trio.BrokenResourceError`: the peer left, or its TLS is not supported.
        """
        tls = trio.SSLStream(self.tcp, context, server_side=True, https_compatible=True)
        await tls.do_handshake()
        self._tls = self._stream = tls

    def put_back(self, data: bytes) -> None:
        """Read `data` again, before all other bytes."""
        self._put_back = data + self._put_back

    def expect(self, count: int) -> None:
        """Wake the reader for at least `count` bytes if possible; not over TLS, which adds some."""
        if self._tls is None:
            self.tcp.expect(count)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read the bytes put back, then new ones; empty at the end."""
        if not self._put_back:
            return bytes(await self._stream.receive_some(max_bytes))
        await trio.lowlevel.checkpoint()
        size = max_bytes or len(self._put_back)
        data, self._put_back = self._put_back[:size], self._put_back[size:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes, after other calls' bytes, or raise."""
        if self.is_sending:  # Not a lock: it would cost more than a ping.
            await self._wait_for_turn()
        self.is_sending = True
        try:
            if self._tls is None:
                await self.tcp.send_all(data)
                return
            with memoryview(data) as view:
                for start in range(0, len(view), PIECE_BYTES):
                    await self._tls.send_all(view[start : start + PIECE_BYTES])
        finally:
            self._pass_turn()

    async def _wait_for_turn(self) -> None:
        turn = trio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._pass_turn()
            else:
                self._waiting.remove(turn)
            raise

    def _pass_turn(self) -> None:
        """Let the longest-waiting call send next; `is_sending` stays set."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self.is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel takes more."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """End sending; reading goes on. TLS gets no close_notify: the content marks its end."""
        await self.tcp.send_eof()

    async def aclose(self) -> None:
        """Close; the kernel still delivers its buffers."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Drop the connection and unsent bytes at once, with a reset; never waits."""
        self._is_aborted = True
        self.tcp.abort()
        if self._held is not None:
            self._held.cancel()

    def drop(self, cause: Drop) -> None:
        """Drop the connection at once, for a cause; no effect once dropped."""
        if self.dropped is None:
            self.dropped = cause
            self._counters.dropped[cause] += 1
            _LOG.info("the connection of %s is dropped: %s", self.peer, cause)
            self.abort()

    async def carry(self, first: bytes, upstream: AsyncNetworkStream) -> None:
        """Send `first`, then carry bytes to another server and back, until either side ends.

        A slow reader on one side slows the other. Neither side's end or loss is an error.
        """
        lost = (trio.BrokenResourceError, trio.ClosedResourceError, NetworkError)

        async def carry_there() -> None:
            with suppress(*lost):
                while data := await self.receive_some(CARRIED_BYTES):
                    await upstream.write(data)
            both.cancel_scope.cancel()

        async with trio.open_nursery() as both:
            both.start_soon(carry_there)
            with suppress(*lost):
                await self.send_all(first)
                while data := await upstream.read(CARRIED_BYTES):
                    await self.send_all(data)
            both.cancel_scope.cancel()

    async def linger(self) -> None:
        """End sending and read to the peer's end, in the caller's time: a reset loses bytes."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            await self.send_eof()
            while await self.receive_some(CARRIED_BYTES):
                pass


# -- watching them --------------------------------------------------------------------------------


CHECK_S: Final = 0.5
"""A client is dropped close to its limit; 500 of them cost a millisecond."""
LATE_S: Final = 1.5
"""Two missed looks: the event loop was held up."""
LATE_CHECKS_MAX: Final = 4
"""In a row: a loop that is always late must still drop connections."""
HTTP_BYTES_PER_S_MIN: Final = 16 * 1024
"""A bad mobile network; a slower download is cut, and can be resumed in ranges."""
LEAVE_S: Final = 10.0
"""For a client's messages before it left, at its rate."""

PING: Final = b"\x89\x00"
"""A ping without a payload (RFC 6455, 5.5.2); the codec ignores its pong."""


@attrs.define(kw_only=True, eq=False)
class WatchedConnection:
    """A connection under watch; without `share` it is HTTP: not pinged, and may be silent."""

    link: Link
    share: Share | None = None
    pings: bool = True
    _acknowledged: int = 0
    _progress_at_s: float = 0.0
    _signs: tuple[int, int] = (-1, 0)
    _received_at_s: float = 0.0
    _ping_at_s: float = 0.0
    _left_at_s: float | None = None
    _held: tuple[float, int] | None = None

    def start(self, now_s: float, settings: Settings) -> None:
        """Begin at the present time."""
        self._progress_at_s = self._received_at_s = now_s
        self._ping_at_s = now_s + settings.ping_s

    def check_progress(self, now_s: float, settings: Settings, *, may_drop: bool) -> None:
        """Drop the connection if it made no progress since the last check."""
        self._check_sending(now_s, settings.stall_s, may_drop=may_drop)
        if self.share is None:
            self._check_pace(now_s, settings.stall_s, may_drop=may_drop)
        else:
            self._check_receiving(now_s, settings, may_drop=may_drop)
            self._check_leaving(now_s)

    def _check_sending(self, now_s: float, stall_s: float, *, may_drop: bool) -> None:
        is_owed, acknowledged = self.link.tcp.progress()
        # Less than before: the kernel has counted a send, and we have not yet.
        if not is_owed or acknowledged > self._acknowledged:
            self._acknowledged = acknowledged
            self._progress_at_s = now_s
        elif may_drop and now_s - self._progress_at_s >= stall_s - CHECK_S:
            self.link.drop("stalled")

    def _check_pace(self, now_s: float, stall_s: float, *, may_drop: bool) -> None:
        """Drop a peer that takes an HTTP answer below the least rate, after a while."""
        if not self.link.is_sending:
            self._held = None
            return
        _, acknowledged = self.link.tcp.progress()
        since_s, before = self._held = self._held or (now_s, acknowledged)
        due = (now_s - since_s - stall_s) * HTTP_BYTES_PER_S_MIN
        if may_drop and acknowledged - before < due:
            self.link.drop("stalled")

    def _check_receiving(self, now_s: float, settings: Settings, *, may_drop: bool) -> None:
        tcp = self.link.tcp
        signs = tcp.received_marker
        if signs != self._signs or not tcp.is_reading:
            self._signs = signs
            self._received_at_s = now_s
        elif may_drop and settings.ping_s and now_s - self._received_at_s >= settings.pong_wait_s:
            self.link.drop("silent")

    def _check_leaving(self, now_s: float) -> None:
        if not self.link.is_held or not self.link.tcp.peer_has_left():
            return
        if self._left_at_s is None:
            self._left_at_s = now_s
        if now_s - self._left_at_s >= LEAVE_S:
            self.link.drop("left")

    def is_due(self, now_s: float, ping_s: float) -> bool:
        """Whether to ping it now; then it is due again in `ping_s`.

        Not during a send: a peer that takes it is alive, another is dropped as stalled.
        """
        if not ping_s or self.share is None or now_s < self._ping_at_s or self.link.is_sending:
            return False
        self._ping_at_s = now_s + ping_s
        return True

    async def ping(self) -> None:
        """Ping, unless a frame or a close came first; an ended connection is not an error."""
        if self.pings and not self.link.is_sending:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.link.send_all(PING)


class ConnectionMonitor:
    """Watches the connections of one listener, and holds their shared state."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self.settings = settings
        self.counters = counters
        self.budget = Budget(RECEIVING_BYTES_MAX, counters)
        self.rates = PartyRates(settings)
        self._connections: dict[WatchedConnection, None] = {}
        self._height_bytes = 0

    def add(self, watched: WatchedConnection) -> None:
        """Watch a connection from now on."""
        watched.start(trio.current_time(), self.settings)
        self._connections[watched] = None

    def discard(self, watched: WatchedConnection) -> None:
        """Stop watching; safe to repeat."""
        self._connections.pop(watched, None)

    async def run(self) -> None:
        """Check until cancelled."""
        before_s, late_checks = trio.current_time(), 0
        giving = trio.CapacityLimiter(1)  # its own: other threads may hang on a disk
        async with trio.open_nursery() as pings:
            while True:
                await trio.sleep(CHECK_S)
                now_s = trio.current_time()
                late_checks = late_checks + 1 if now_s - before_s > LATE_S else 0
                before_s = now_s
                may_drop = not 0 < late_checks <= LATE_CHECKS_MAX
                for watched in list(self._connections):
                    watched.check_progress(now_s, self.settings, may_drop=may_drop)
                    if watched.is_due(now_s, self.settings.ping_s):
                        pings.start_soon(watched.ping)
                self._check_messages(now_s)
                if self._memory_has_fallen():
                    pings.start_soon(partial(trio.to_thread.run_sync, trim_heap, limiter=giving))

    def _memory_has_fallen(self) -> bool:
        """Whether messages took much memory since the last time, and take little now."""
        bytes_now = self.counters.receiving_bytes
        self._height_bytes = max(self._height_bytes, bytes_now)
        if self._height_bytes < HEAP_SPARE_BYTES or bytes_now > self._height_bytes // 4:
            return False
        self._height_bytes = bytes_now
        return True

    def _check_messages(self, now_s: float) -> None:
        laggards = self.budget.laggards(now_s)
        for watched in list(self._connections) if laggards else ():
            if watched.share in laggards:
                watched.link.drop("slow")
