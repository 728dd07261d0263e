"""A client's request on its way to another server, and that server's answer.

One connection carries one request. A WebSocket's handshake is a request like any other; after its
answer (101) the connection carries the WebSocket's bytes, which nothing here reads.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import anyio
import attrs
import httpcore2

CONNECT_WAIT_S: Final = 3.0
"""For TCP and TLS in one network."""
ANSWER_WAIT_S: Final = 30.0
"""For the head of an answer: a recording's page takes seconds to make."""
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
        status: of the answer; 101: `stream` is the WebSocket's.
        headers: but for those of the connection, names in lower case.
        stream: the bytes after the answer's head.
    """

    def __init__(
        self, connection: httpcore2.AsyncHTTPConnection, answer: httpcore2.Response
    ) -> None:
        self._connection = connection
        self._answer = answer
        self.status = answer.status
        items = (
            (it.decode("ascii").lower(), value.decode("latin-1")) for it, value in answer.headers
        )
        self.headers: Headers = tuple(item for item in items if item[0] not in HOP_BY_HOP)
        self.stream: httpcore2.AsyncNetworkStream = answer.extensions["network_stream"]

    async def body(self) -> AsyncGenerator[bytes]:
        """Read the answer's body piece by piece; `UpstreamError` if it breaks off."""
        try:
            async with aclosing(self._answer.aiter_stream()) as pieces:
                async for piece in pieces:
                    yield piece
        except (httpcore2.ProtocolError, httpcore2.NetworkError) as error:
            raise UpstreamError("it left before the end of its answer") from error

    def switched(self) -> bytes:
        """The answer to a WebSocket's handshake as it came."""
        lines = [b"HTTP/1.1 101 Switching Protocols", *map(b": ".join, self._answer.headers)]
        return b"\r\n".join([*lines, b"", b""])

    async def aclose(self) -> None:
        """Drop the connection."""
        await self._connection.aclose()


async def ask(address: Address, asked: UpstreamRequest, added: Headers = ()) -> Upstream:
    """Send a request to another server, with headers `added`, and wait for its answer's head.

    `UpstreamError`: there is none within `CONNECT_WAIT_S` and `ANSWER_WAIT_S`.
    """
    scheme = "http" if address.tls is None else "https"
    url = httpcore2.URL(scheme=scheme, host=address.host, port=address.port, target=asked.target)
    request = httpcore2.Request(
        asked.method,
        url,
        headers=[(it.encode(), value.encode("latin-1")) for it, value in asked.to_send(added)],
        content=asked.body,
        extensions={"timeout": {"connect": CONNECT_WAIT_S}},
    )
    connection = httpcore2.AsyncHTTPConnection(url.origin, address.tls)
    try:
        with anyio.fail_after(CONNECT_WAIT_S + ANSWER_WAIT_S):
            return Upstream(connection, await connection.handle_async_request(request))
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await connection.aclose()
        if isinstance(error, httpcore2.ProtocolError):
            raise UpstreamError(f"the request cannot be relayed: {error}") from error
        if isinstance(error, (TimeoutError, httpcore2.TimeoutException, httpcore2.NetworkError)):
            raise UpstreamError(f"{address.host} port {address.port} does not answer") from error
        raise
