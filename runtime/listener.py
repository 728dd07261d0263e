"""One TCP port for both: WebSockets go to a handler, all other HTTP to an ASGI application.

The rules:

- A connection's first request head is read here, bounded in bytes and time, and parsed by h11. A
  WebSocket upgrade becomes a `WebSocketRequest`; anything else goes, with its bytes put back, to
  Hypercorn, which keeps the connection for the HTTP requests that follow.
- What is no request is answered (400, 408, 431, 505) and closed; so is a WebSocket request that
  does not follow RFC 6455, 4.2.1. A peer that leaves, in any phase, is no error.
- Whatever goes wrong in one connection stays in it: it is logged, and the others never see it.
- A WebSocket has a connection of its own: on one that HTTP has used it is refused.

One nursery, `serve`'s, holds a task for each connection; that task holds all others of it.
Cancelling `serve` drops every connection at once; whoever wants to part politely does so first.

It knows no path, no mode and no session, and does not speak TLS.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

import anyio
import anyio.abc
import attrs
import h11
import trio
from starlette.types import ASGIApp

from protocol.limits import FRAME_BYTES_MAX

from .http import (
    HEAD_BYTES_MAX,
    HTTP_VERSIONS,
    HttpServer,
    error_body,
    header_tokens,
    wants_websocket,
)
from .websocket import Handshake, TcpStream, TrioWebSocket, WebSocket, WebSocketClosed, accept

CONNECTIONS_MAX: Final = 4096
"""Many times the sessions that a machine can serve, with room for those that look at it."""
BACKLOG: Final = 1024
"""Connections that the kernel keeps for us: a fleet of clients comes back all at once."""
HEAD_READ_BYTES: Final = 4096
"""A head is read in few pieces, and exceeds its bound by less than one."""
HEAD_WAIT_S: Final = 10.0
"""Enough for a bad mobile link; longer, and a slow-loris holds sockets for nothing."""
ANSWER_WAIT_S: Final = 2.0
"""For a refusal to reach its client before the socket closes under it."""
QUERY_FIELDS_MAX: Final = 32
"""No source's URL has more than three."""
HTTP_PIECE_BYTES: Final = 65_536
"""A response is sent in pieces of this, each of which must go out in `HTTP_STALL_S`."""
HTTP_STALL_S: Final = 30.0
"""A download at 2 KB/s still works; one that stands still frees its socket."""

WEBSOCKET_KEY_BYTES: Final = 16

_LOG: Final = logging.getLogger("antiphon.listener")


SocketListener = trio.SocketListener
"""A bound port, for those who hold one without knowing its event loop."""


class Address(NamedTuple):
    """Where a listener is bound, the port as the kernel gave it."""

    host: str
    port: int


class _Refusal(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """The request is answered here and now, and the connection closed."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.body = error_body(code, message)
        self.headers = tuple((name.replace("_", "-"), value) for name, value in headers.items())


@attrs.frozen(kw_only=True)
class _Head:
    """A request's head: as parsed, as it came, and what came after it."""

    request: h11.Request
    raw: bytes
    trailing: bytes


@attrs.define(kw_only=True, eq=False)
class WebSocketRequest:
    """A valid WebSocket handshake that waits for its answer: accept it or reject it, once.

    Attributes:
        path: percent-decoded.
        query: each name's values in their order; a name that came twice has two.
        headers: names in lower case; the key of a client may be among them, so they are not logged.
        subprotocols: what the client offers, in its order.
        peer: the client's address.
    """

    path: str
    query: Mapping[str, tuple[str, ...]]
    headers: tuple[tuple[str, str], ...]
    subprotocols: tuple[str, ...]
    peer: Address
    _key: str
    _stream: TcpStream
    _nursery: trio.Nursery
    _websocket: TrioWebSocket | None = None
    _answered: bool = False

    async def accept(
        self, *, subprotocol: str | None = None, frame_bytes_max: int = FRAME_BYTES_MAX
    ) -> WebSocket:
        """Open the WebSocket; what the handler leaves open is closed when it returns.

        Args:
            subprotocol: one of `subprotocols`, or None.
            frame_bytes_max: `receive` gives None for a longer message.

        Raises:
            WebSocketClosed: the peer left first; the handler may let it pass.
        """
        assert subprotocol is None or subprotocol in self.subprotocols
        self._answer_once()
        self._stream.notice_dead_peer()
        handshake = Handshake(
            key=self._key, subprotocol=subprotocol, frame_bytes_max=frame_bytes_max
        )
        self._websocket = await accept(self._nursery, self._stream, handshake)
        return self._websocket

    async def reject(
        self, status: int, body: bytes, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Refuse the handshake with an HTTP response; a peer that has left does not matter.

        Args:
            status: 400 or more.
            body: JSON, such as `http.error_body` writes.
            headers: more headers, beside the type, the length and `Connection: close`.
        """
        self._answer_once()
        await _answer(self._stream, status, body, headers)

    async def finish(self, code: int) -> None:
        """Leave nothing open; called by the listener when the handler is done."""
        if self._websocket is not None:
            await self._websocket.close(code, "")
        elif not self._answered:
            await self.reject(500, error_body("internal_error", "the server failed to answer"))

    def _answer_once(self) -> None:
        assert not self._answered, f"the request for {self.path} is answered already"
        self._answered = True


async def bind(host: str, port: int) -> list[trio.SocketListener]:
    """Bind the port on each address that the host's name has.

    Args:
        host: a name or an address; `0.0.0.0` and `::` are all of IPv4 and of IPv6.
        port: 0 lets the kernel choose, for each address anew.

    Returns:
        The listeners, for `serve`, which closes them.
    """
    return await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)


async def serve(
    listeners: Sequence[trio.SocketListener],
    *,
    on_websocket: Callable[[WebSocketRequest], Awaitable[None]],
    app: ASGIApp,
    task_status: anyio.abc.TaskStatus[tuple[Address, ...]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; cancelled, drop every connection.

    Args:
        listeners: bound; closed at the end.
        on_websocket: run for each WebSocket request in its connection's task, for as long as it
            lives. It answers the request. An exception of it is logged and ends its connection.
        app: the ASGI application for all other requests.
        task_status: started with the bound addresses, once connections are taken.
    """
    server = _Server(on_websocket, app)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, server.serve_connection, list(listeners))
        task_status.started(tuple(_address(it.socket.getsockname()) for it in listeners))


class _Server:
    """What the connections of one `serve` share."""

    def __init__(
        self, on_websocket: Callable[[WebSocketRequest], Awaitable[None]], app: ASGIApp
    ) -> None:
        self._on_websocket = on_websocket
        self._app = app
        self._connections = 0

    async def serve_connection(self, socket_stream: trio.SocketStream) -> None:
        """Serve one connection to its end; raises nothing but `Cancelled`."""
        self._connections += 1
        try:
            await self._route(socket_stream, _address(socket_stream.socket.getpeername()))
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            _LOG.debug("a peer left", exc_info=True)
        except* Exception:
            _LOG.exception("a connection failed")
        finally:
            self._connections -= 1

    async def _route(self, socket_stream: trio.SocketStream, peer: Address) -> None:
        stream = TcpStream(socket_stream)
        try:
            if self._connections > CONNECTIONS_MAX:
                raise _Refusal(503, "too_many_connections", "the server has no room for another")
            head = await _read_head(stream)
            if head is None:
                return
            if head.request.http_version not in HTTP_VERSIONS:
                raise _Refusal(505, "http_version_not_supported", "HTTP/1.1 is spoken here")
            if not wants_websocket(head.request):
                await self._serve_http(_HttpStream(socket_stream, head.raw))
                return
            await self._serve_websocket(TcpStream(socket_stream, head.trailing), head.request, peer)
        except _Refusal as refusal:
            await _answer(stream, refusal.status, refusal.body, refusal.headers)

    async def _serve_websocket(self, stream: TcpStream, head: h11.Request, peer: Address) -> None:
        target = _parse_target(head)
        key = _check_handshake(head)
        async with trio.open_nursery() as nursery:
            request = WebSocketRequest(
                path=target.path,
                query=target.query,
                headers=_headers(head),
                subprotocols=header_tokens(head, b"sec-websocket-protocol"),
                peer=peer,
                key=key,
                stream=stream,
                nursery=nursery,
            )
            try:
                await self._on_websocket(request)
                await request.finish(1000)
            except* WebSocketClosed:
                pass
            except* Exception:
                _LOG.exception("the handler of %s failed", request.path)
                await request.finish(1011)
            nursery.cancel_scope.cancel()

    async def _serve_http(self, stream: _HttpStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.abort_when_cancelled)
            await HttpServer(self._app, stream).run()
            nursery.cancel_scope.cancel()


# -- the head of a request ----------------------------------------------------------------------


async def _read_head(stream: TcpStream) -> _Head | None:
    """Read the first request's head; None if the peer left, or never said a word."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
    raw = bytearray()
    with trio.move_on_after(HEAD_WAIT_S):
        while data := await stream.receive_some(HEAD_READ_BYTES):
            raw += data
            parser.receive_data(data)
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                status = error.error_status_hint
                raise _Refusal(status, "bad_request", "this is no HTTP/1.1 request") from None
            if isinstance(event, h11.Request):
                return _Head(request=event, raw=bytes(raw), trailing=parser.trailing_data[0])
        return None
    if not raw:
        return None
    raise _Refusal(408, "request_timeout", f"no request head within {HEAD_WAIT_S:g} s")


class _Target(NamedTuple):
    path: str
    query: Mapping[str, tuple[str, ...]]


def _parse_target(head: h11.Request) -> _Target:
    path, _, query = head.target.decode("ascii").partition("?")
    if not path.startswith("/"):
        raise _Refusal(400, "bad_request", "the request's target is no path")
    values: dict[str, tuple[str, ...]] = {}
    try:
        for name, value in parse_qsl(
            query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX
        ):
            values[name] = (*values.get(name, ()), value)
    except ValueError:
        text = f"the query has more than {QUERY_FIELDS_MAX} fields"
        raise _Refusal(400, "bad_request", text) from None
    return _Target(unquote(path), values)


def _check_handshake(head: h11.Request) -> str:
    """Hold a request to RFC 6455, 4.2.1, and return its key."""
    names = [name for name, _ in head.headers]
    if head.http_version != b"1.1" or b"content-length" in names or b"transfer-encoding" in names:
        raise _Refusal(400, "bad_request", "a WebSocket request is HTTP/1.1 without a body")
    if header_tokens(head, b"sec-websocket-version") != ("13",):
        text = "the WebSocket version must be 13"
        raise _Refusal(426, "upgrade_required", text, Sec_WebSocket_Version="13")
    keys = header_tokens(head, b"sec-websocket-key")
    if len(keys) == 1:
        try:
            if len(base64.b64decode(keys[0], validate=True)) == WEBSOCKET_KEY_BYTES:
                return keys[0]
        except (ValueError, binascii.Error):
            pass
    raise _Refusal(400, "bad_request", "sec-websocket-key must be 16 bytes in base64, once")


def _headers(head: h11.Request) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers)


async def _answer(
    stream: TcpStream, status: int, body: bytes, headers: Sequence[tuple[str, str]]
) -> None:
    """Send a whole response and wait, a bounded time, until the client has taken it."""
    response = h11.Response(
        status_code=status,
        reason=HTTPStatus(status).phrase,
        headers=[
            ("Connection", "close"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            *headers,
        ],
    )
    writer = h11.Connection(h11.SERVER)
    parts = (writer.send(event) for event in (response, h11.Data(data=body), h11.EndOfMessage()))
    with trio.move_on_after(ANSWER_WAIT_S):
        await stream.send_all(b"".join(part or b"" for part in parts))
        await stream.linger()


def _address(name: tuple[Any, ...]) -> Address:
    return Address(str(name[0]), int(name[1]))


class _HttpStream(TcpStream):
    """A connection whose sends are bounded in time: Hypercorn shields them from cancellation."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as view:
            for start in range(0, len(view), HTTP_PIECE_BYTES):
                with trio.move_on_after(HTTP_STALL_S) as scope:
                    await super().send_all(view[start : start + HTTP_PIECE_BYTES])
                if scope.cancelled_caught:
                    self.abort()
                    raise trio.BrokenResourceError("the client stopped reading its response")

    async def abort_when_cancelled(self) -> None:
        """Wait to be cancelled, then drop the connection: that wakes a shielded send."""
        try:
            await trio.sleep_forever()
        finally:
            self.abort()
