"""A client's connection as the rest of the server has it, over TLS or not.

- Whole calls of `send_all` go out one after the other, in the order of the calls: a ping never
  falls into a frame, and nothing follows a close. A call that is cancelled may have sent a part:
  the caller aborts the connection.
- What is sent over TLS goes in pieces, so that a large frame is not encrypted, and kept, at once.
- `drop` cuts it for a cause, which is counted once.

It has no limits of its own: `keeper` looks after time.
"""

from __future__ import annotations

import logging
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import trio

from .counters import Counters, Drop
from .tcp import TcpStream

PIECE_BYTES: Final = 65_536
"""Four records of TLS: encrypting more at once holds other sessions up and gains nothing."""
READ_BYTES: Final = 65_536
"""A read whose bytes are thrown away while a peer is given time to see our last words."""

_LOG: Final = logging.getLogger("antiphon.listener")


class Link(trio.abc.Stream):
    """A connection, with bytes put back.

    Args:
        tcp: the connection; this object closes it.
        counters: `dropped` is kept there.
        peer: the client's address, for the log.
        tls: on `tcp`, its handshake done; None for plain TCP.

    Attributes:
        dropped: why it was dropped, if it was.
        is_sending: a call of `send_all` is under way.
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
        """It is encrypted."""
        return self._tls is not None

    @property
    def socket(self) -> trio.socket.SocketType:
        """Under it; for its addresses."""
        return self.tcp.socket

    @property
    def is_held(self) -> bool:
        """Its reader waits for its rate or for room, not for the client."""
        return self._held is not None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold its reader up while the block waits.

        Raises:
            trio.ClosedResourceError: the connection was dropped, before or meanwhile.
        """
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
        """Shake hands over TLS, as the server; the caller bounds the time.

        Raises:
            trio.BrokenResourceError: the peer left, or speaks no TLS that we do.
        """
        tls = trio.SSLStream(self.tcp, context, server_side=True, https_compatible=True)
        await tls.do_handshake()
        self._tls = self._stream = tls

    def put_back(self, data: bytes) -> None:
        """Let `data` be read again, before all else."""
        self._put_back = data + self._put_back

    def expect(self, count: int) -> None:
        """Wake the reader for no fewer bytes than `count`, where the system can.

        Not over TLS: its records are longer than what they hold.
        """
        if self._tls is None:
            self.tcp.expect(count)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read what is put back, then what arrives; empty at the end."""
        if not self._put_back:
            return bytes(await self._stream.receive_some(max_bytes))
        await trio.lowlevel.checkpoint()
        size = max_bytes or len(self._put_back)
        data, self._put_back = self._put_back[:size], self._put_back[size:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send it all, after what others send, or raise."""
        if self.is_sending:  # Not a lock: taking one costs more than a ping is worth.
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
        """Let whoever has waited longest send next; others find that somebody is sending."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self.is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel takes more."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Send no more; reading goes on. TLS is not told: what it carries says where it ends."""
        await self.tcp.send_eof()

    async def aclose(self) -> None:
        """Close; what the kernel holds is still delivered."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Drop the connection at once, with a reset and without what is unsent; never waits."""
        self._is_aborted = True
        self.tcp.abort()
        if self._held is not None:
            self._held.cancel()

    def drop(self, cause: Drop) -> None:
        """Drop the connection at once, for a cause; dropped already, do nothing."""
        if self.dropped is None:
            self.dropped = cause
            self._counters.dropped[cause] += 1
            _LOG.info("the connection of %s is dropped: %s", self.peer, cause)
            self.abort()

    async def linger(self) -> None:
        """Say that we are done and read on to the peer's end: a reset would eat our last words.

        The caller bounds the time. A peer that is gone is an end like any other.
        """
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            await self.send_eof()
            while await self.receive_some(READ_BYTES):
                pass
