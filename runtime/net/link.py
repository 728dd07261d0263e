"""A client's connection as the rest of the server uses it, over TLS or not.

- Calls of `send_all` are sent whole, in order: a ping never falls into a frame, and nothing follows
  a close. A cancelled call may have sent a part: the caller aborts the connection.
- Over TLS bytes are sent in pieces, so that a large frame is not encrypted, and kept, at once.
- `drop` cuts the connection for a cause, which is counted once.
"""

from __future__ import annotations

import logging
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import anyio
import trio
from anyio.abc import ByteStream

from .counters import Counters, Drop
from .tcp import TcpStream

PIECE_BYTES: Final = 65_536
"""Four records of TLS: encrypting more at once delays other sessions and gains nothing."""
READ_BYTES: Final = 65_536
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

    async def carry(self, first: bytes, upstream: ByteStream) -> None:
        """Send `first`, then carry bytes to another server and back, until either side ends.

        A slow reader on one side slows the other. Neither side's end or loss is an error.
        """
        lost = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
        gone = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)

        async def carry_there() -> None:
            with suppress(*lost, *gone):
                while data := await self.receive_some(READ_BYTES):
                    await upstream.send(data)
            both.cancel_scope.cancel()

        async with trio.open_nursery() as both:
            both.start_soon(carry_there)
            with suppress(*lost, *gone):
                await self.send_all(first)
                while True:
                    await self.send_all(await upstream.receive(READ_BYTES))
            both.cancel_scope.cancel()

    async def linger(self) -> None:
        """End sending and read to the peer's end, in the caller's time: a reset loses bytes."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            await self.send_eof()
            while await self.receive_some(READ_BYTES):
                pass
