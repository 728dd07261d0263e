"""What comes to the UDP sockets of a call, before a library sees it.

Any host can send to a port. Each socket belongs to the call in whose context it was made; what
comes too fast, or under ever new names, is dropped here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

DATAGRAMS_PER_S: Final = 300
"""Sound has 50, and the data channel needs few."""
BURST: Final = 600
SOURCES_MAX: Final = 8
"""Streams (SSRC) of sound and reports: a browser has two or three; the library keeps each."""
_MEDIA: Final = range(128, 192)
"""The first byte of a packet of RTP or RTCP (RFC 7983)."""
_REPORTS: Final = range(192, 224)
"""The second one of RTCP."""


class Arrivals:
    """The datagrams of one call.

    Attributes:
        last_s: when the last one came.
    """

    def __init__(self) -> None:
        self.last_s = time.monotonic()
        self._left = float(BURST)
        self._sources = set[bytes]()

    def takes(self, data: bytes) -> bool:
        """Whether a datagram is passed on."""
        now_s = time.monotonic()
        self._left = min(BURST, self._left + (now_s - self.last_s) * DATAGRAMS_PER_S)
        self.last_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        if len(data) < 12 or data[0] not in _MEDIA:
            return True
        source = data[4:8] if data[1] in _REPORTS else data[8:12]
        if source not in self._sources and len(self._sources) >= SOURCES_MAX:
            return False
        self._sources.add(source)
        return True


CALL: Final[ContextVar[Arrivals | None]] = ContextVar("call", default=None)
"""Of the call whose sockets are made."""


class _Guard(asyncio.DatagramProtocol):
    """A socket's protocol behind a call's `Arrivals`."""

    def __init__(self, inner: Any, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._inner = inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio`."""
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio`."""
        self._inner.connection_lost(exc)

    def error_received(self, exc: Exception) -> None:
        """As `asyncio`."""
        self._inner.error_received(exc)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """As `asyncio`."""
        if self._arrivals.takes(data):
            self._inner.datagram_received(data, addr)


class CallLoop(asyncio.SelectorEventLoop):
    """An event loop whose sockets of UDP take free ports of a range, and belong to a call."""

    def __init__(self, ports: range) -> None:
        super().__init__()
        self._ports = ports
        self._after = 0

    async def create_datagram_endpoint(  # type: ignore[override]
        self, factory: Callable[[], Any], **asked: Any
    ) -> Any:
        """As `asyncio`, where the port is 0."""
        host, port = asked.get("local_addr") or ("", -1)
        arrivals = CALL.get()
        if port != 0 or arrivals is None:
            return await super().create_datagram_endpoint(factory, **asked)
        inner = factory()
        for step in range(len(self._ports)):
            at = (self._after + step) % len(self._ports)
            place = asked | {"local_addr": (host, self._ports[at])}
            try:
                transport, _ = await super().create_datagram_endpoint(
                    lambda: _Guard(inner, arrivals), **place
                )
            except OSError:
                continue
            self._after = at + 1
            return transport, inner
        raise OSError(f"no port from {self._ports[0]} to {self._ports[-1]} is free")
