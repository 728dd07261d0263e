"""A client's request on its way to another server, and that server's answer.

One connection carries one request. A WebSocket's handshake is a request like any other; after its
answer (101) the connection carries the WebSocket's bytes, which nothing here reads.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Final

import anyio
import attrs
import h11
from anyio.abc import ByteStream

from .http1 import HEAD_BYTES_MAX

CONNECT_WAIT_S: Final = 3.0
"""For TCP and TLS in one network."""
ANSWER_WAIT_S: Final = 30.0
"""For the head of an answer: a recording's page takes seconds to make."""
READ_BYTES: Final = 65_536
"""A WebSocket's frame of sound in two reads, little memory for each connection."""
SWITCHING: Final = 101
HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
    | {"proxy-authorization", "proxy-connection", "content-length"}
)
"""Headers of one connection (RFC 9110, 7.6.1), and the length, which is written again."""

Headers = tuple[tuple[str, str], ...]


class UpstreamError(Exception):
    """The other server cannot be reached, or does not answer in HTTP; the text says why."""


@attrs.frozen(kw_only=True)
class Address:
    """Another server: a host (IPv6 without brackets), a port, and TLS or None."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


@attrs.frozen(kw_only=True)
class UpstreamRequest:
    """A client's request; names of headers are in lower case.

    `target`: as the client wrote it. `is_websocket`: the request is a WebSocket's handshake.
    """

    method: str
    target: str
    headers: Headers
    body: bytes = b""
    is_websocket: bool = False

    def to_send(self, added: Headers) -> list[tuple[str, str]]:
        """The headers for another server: the client's, those of this connection, and `added`."""
        kept = [(name, value) for name, value in self.headers if name not in HOP_BY_HOP]
        if self.is_websocket:
            kept += [("connection", "Upgrade"), ("upgrade", "websocket")]
        else:
            kept.append(("connection", "close"))
        if self.body:
            kept.append(("content-length", str(len(self.body))))
        return [*kept, *added]


class Upstream:
    """Another server's answer to a request; `ask` makes it, and its user closes it.

    Attributes:
        status: of the answer; 101: the connection is the WebSocket's.
        headers: but for those of the connection, names in lower case.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.status = 0
        self.headers: Headers = ()
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._head: Iterable[tuple[bytes, bytes]] = ()

    async def request(self, asked: UpstreamRequest, added: Headers) -> None:
        """Send a request, and read the head of its answer; errors as of `ask`."""
        try:
            head = h11.Request(
                method=asked.method, target=asked.target, headers=asked.to_send(added)
            )
            sent = [self._http.send(head), self._http.send(h11.Data(data=asked.body))]
            sent.append(self._http.send(h11.EndOfMessage()))
            await self.stream.send(b"".join(part or b"" for part in sent))
            while True:
                event = await self._next()
                if isinstance(event, h11.Response):
                    break
                if isinstance(event, h11.InformationalResponse) and event.status_code == SWITCHING:
                    break
        except h11.LocalProtocolError as error:
            raise UpstreamError(f"the request cannot be relayed: {error}") from error
        self.status, self._head = event.status_code, event.headers.raw_items()
        items = ((name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers)
        self.headers = tuple(item for item in items if item[0] not in HOP_BY_HOP)

    async def body(self) -> AsyncIterator[bytes]:
        """Read the answer's body piece by piece; `UpstreamError` if it breaks off."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    def switched(self) -> bytes:
        """The answer to a WebSocket's handshake as it came, and the bytes that came with it."""
        lines = [b"HTTP/1.1 101 Switching Protocols", *(b": ".join(it) for it in self._head)]
        return b"\r\n".join([*lines, b"", b""]) + self._http.trailing_data[0]

    async def aclose(self) -> None:
        """Drop the connection."""
        await anyio.aclose_forcefully(self.stream)

    async def _next(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                try:
                    data = await self.stream.receive(READ_BYTES)
                except anyio.EndOfStream:
                    data = b""
                self._http.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise UpstreamError(f"it gives no whole answer: {error}") from error
        except (OSError, anyio.BrokenResourceError) as error:
            raise UpstreamError("it left before the end of its answer") from error
        return event


async def ask(address: Address, asked: UpstreamRequest, added: Headers = ()) -> Upstream:
    """Send a request to another server, with headers `added`, and wait for its answer's head.

    `UpstreamError`: there is none within `CONNECT_WAIT_S` and `ANSWER_WAIT_S`.
    """
    upstream: Upstream | None = None
    try:
        with anyio.fail_after(CONNECT_WAIT_S):
            upstream = Upstream(await _connect(address))
        with anyio.fail_after(ANSWER_WAIT_S):
            await upstream.request(asked, added)
    except BaseException as error:
        if upstream is not None:
            await upstream.aclose()
        if isinstance(error, (OSError, TimeoutError, anyio.BrokenResourceError, anyio.EndOfStream)):
            raise UpstreamError(f"{address.host} port {address.port} does not answer") from error
        raise
    return upstream


async def _connect(address: Address) -> ByteStream:
    if address.tls is None:
        return await anyio.connect_tcp(address.host, address.port)
    return await anyio.connect_tcp(
        address.host, address.port, ssl_context=address.tls, tls_standard_compatible=False
    )
