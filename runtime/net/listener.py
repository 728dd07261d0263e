"""One TCP port for both: WebSockets go to a handler, all other HTTP to an ASGI application.

- A connection takes a place, of its address and of all. Without one, or if its address opened too
  many lately, it is refused cheaply (503, 429; with TLS, without an answer).
- TLS, where there is a certificate, and the first request's head share one deadline. A WebSocket
  upgrade becomes a `WebSocketRequest`; `http` serves other requests, and those after them.
- An invalid request is answered (400, 408, 431, 505) and closed; so is a WebSocket request that
  breaks RFC 6455, 4.2.1, or comes after an HTTP request. A peer that leaves is not an error.
- An error in one connection is logged and does not reach the others.
- One nursery, `serve`'s, holds a task for each connection, and the `ConnectionMonitor`, which drops
  peers that are silent or take nothing. Cancelling it drops every connection at once.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

import anyio
import anyio.abc
import attrs
import h11
import trio
from starlette.types import ASGIApp

from protocol.values.limits import FRAME_BYTES_MAX

from ..settings.settings import Settings
from . import http
from .connection import WebSocket, WebSocketClosed
from .limits import ConnectionLimiter, Counters, Refusal, origin_of
from .link import ConnectionMonitor, Link, TcpStream, WatchedConnection
from .tls import NO_TLS_ANSWER, TLS_HANDSHAKE, Certificate
from .upstream import Upstream
from .websocket import Handshake, TrioWebSocket

# -- a WebSocket's handshake -----------------------------------------------------------------------


QUERY_FIELDS_MAX: Final = 32
"""No source's URL has more than three."""

WEBSOCKET_KEY_BYTES: Final = 16


class Target(NamedTuple):
    """A request's decoded path, and each query name's values in order."""

    path: str
    query: Mapping[str, tuple[str, ...]]


def parse_target(head: h11.Request) -> Target:
    """Parse a request's target; raises `Refused` for an invalid path or a long query."""
    path, _, query = head.target.decode("ascii").partition("?")
    if not path.startswith("/"):
        raise http.Refused(400, "bad_request", "the request's target is not a path")
    values: dict[str, tuple[str, ...]] = {}
    try:
        for name, value in parse_qsl(
            query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX
        ):
            values[name] = (*values.get(name, ()), value)
    except ValueError:
        text = f"the query has more than {QUERY_FIELDS_MAX} fields"
        raise http.Refused(400, "bad_request", text) from None
    return Target(unquote(path), values)


def check_handshake(head: h11.Request) -> str:
    """Check a request by RFC 6455, 4.2.1, and return its key; raises `Refused`."""
    names = [name for name, _ in head.headers]
    if head.http_version != b"1.1" or b"content-length" in names or b"transfer-encoding" in names:
        raise http.Refused(400, "bad_request", "a WebSocket request is HTTP/1.1 without a body")
    if http.header_tokens(head, b"sec-websocket-version") != ("13",):
        text = "the WebSocket version must be 13"
        raise http.Refused(426, "upgrade_required", text, Sec_WebSocket_Version="13")
    keys = http.header_tokens(head, b"sec-websocket-key")
    if len(keys) == 1:
        try:
            if len(base64.b64decode(keys[0], validate=True)) == WEBSOCKET_KEY_BYTES:
                return keys[0]
        except (ValueError, binascii.Error):
            pass
    raise http.Refused(400, "bad_request", "sec-websocket-key must be 16 bytes in base64, once")


# -- the listener ----------------------------------------------------------------------------------


BACKLOG: Final = 1024
"""Connections in the kernel's queue: a fleet of clients reconnects all at once."""
REFUSALS_MAX: Final = 64
"""Refusals with an answer at once; in a flood, the rest get none."""
RETRY_AFTER_S: Final = 5
"""Sent to refused clients: in that time sessions end, and a burst is over."""

_LOG: Final = logging.getLogger("antiphon.listener")


SocketListener = trio.SocketListener
"""A bound port, as a type that does not name the event loop."""


class Address(NamedTuple):
    """A listener's bound address; the port as the kernel gave it."""

    host: str
    port: int


@attrs.define(kw_only=True, eq=False)
class WebSocketRequest:
    """A valid WebSocket handshake that waits for its answer: accept it or reject it, once.

    `path`: percent-decoded. `query`: each name's values in order. `headers`: names in lower case;
    not logged, because they may hold a client's key. `target`: path and query as they came.
    """

    path: str
    target: str
    query: Mapping[str, tuple[str, ...]]
    headers: tuple[tuple[str, str], ...]
    subprotocols: tuple[str, ...]
    peer: Address
    is_tls: bool
    _key: str
    _link: Link
    _monitor: ConnectionMonitor
    _nursery: trio.Nursery
    _websocket: TrioWebSocket | None = None
    _answered: bool = False

    async def accept(
        self,
        *,
        subprotocol: str | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        party: str = "",
    ) -> WebSocket:
        """Open the WebSocket with one of `subprotocols`, or None; closed when the handler returns.

        `receive` returns None for a message above `frame_bytes_max`. `party`: to whom its messages
        count, else to its address. `WebSocketClosed`: the peer left first; the handler may let it
        pass.
        """
        assert subprotocol is None or subprotocol in self.subprotocols
        self._answer_once()
        self._link.tcp.notice_dead_peer()
        handshake = Handshake(
            key=self._key, subprotocol=subprotocol, frame_bytes_max=frame_bytes_max
        )
        websocket = TrioWebSocket(
            self._link, handshake, self._monitor, party or origin_of(self.peer.host)
        )
        await self._nursery.start(websocket.run)
        self._websocket = websocket
        return websocket

    async def reject(
        self, status: int, body: bytes, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Refuse the handshake with an HTTP error and JSON; a peer that has left is not an error.

        `headers` are in addition to the type, the length and `Connection: close`.
        """
        self._answer_once()
        await http.answer(self._link, status, body, headers)

    async def relay(self, upstream: Upstream) -> None:
        """Give the client another server's WebSocket, and carry bytes until either side ends."""
        self._answer_once()
        self._link.tcp.notice_dead_peer()
        await self._link.carry(upstream.switched(), upstream.stream)
        await http.send_last(self._link, b"")

    async def finish(self, code: int) -> None:
        """Close or reject a request that the handler left open; the listener calls it."""
        if self._websocket is not None:
            await self._websocket.close(code, "")
        elif not self._answered:
            await self.reject(500, http.error_body("internal_error", "the server failed to answer"))

    def _answer_once(self) -> None:
        assert not self._answered, f"the request for {self.path} is answered already"
        self._answered = True


async def bind(host: str, port: int) -> list[trio.SocketListener]:
    """Bind the port on each address of the host, for `serve`, which closes the listeners.

    `0.0.0.0` and `::` are all of IPv4 and of IPv6; port 0 lets the kernel choose for each address.
    """
    return await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)


async def serve(
    listeners: Sequence[trio.SocketListener],
    *,
    on_websocket: Callable[[WebSocketRequest], Awaitable[None]],
    app: ASGIApp,
    settings: Settings | None = None,
    certificate: Certificate | None = None,
    counters: Counters | None = None,
    has_files: Callable[[], bool] = lambda: True,
    task_status: anyio.abc.TaskStatus[tuple[Address, ...]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, then drop every connection.

    Args:
        listeners: bound; closed at the end.
        on_websocket: answers each WebSocket request, in its connection's task. An exception is
            logged and ends the connection.
        settings: the limits of connections; None takes the defaults.
        certificate: serve TLS only, and watch its file; None serves plain TCP.
        has_files: whether enough file descriptors are left for another connection.
        task_status: started with the bound addresses, once connections are taken.
    """
    monitor = ConnectionMonitor(settings or Settings(), counters or Counters())
    limiter = ConnectionLimiter(monitor.settings, monitor.counters, has_files)
    server = _Server(on_websocket, app, monitor, certificate, limiter)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.run)
        if certificate is not None:
            nursery.start_soon(certificate.watch)
        await nursery.start(trio.serve_listeners, server.serve_connection, list(listeners))
        task_status.started(tuple(_address(it.socket.getsockname()) for it in listeners))


@attrs.define(eq=False)
class _Server:
    _on_websocket: Callable[[WebSocketRequest], Awaitable[None]]
    _app: ASGIApp
    _monitor: ConnectionMonitor
    _certificate: Certificate | None
    _limiter: ConnectionLimiter
    _refusals: int = 0

    async def serve_connection(self, socket_stream: trio.SocketStream) -> None:
        """Serve one connection to its end; raises nothing but `Cancelled`."""
        try:
            peer = _address(socket_stream.socket.getpeername())
            link = Link(TcpStream(socket_stream), self._monitor.counters, peer.host)
            refusal = self._limiter.enter(peer.host, trio.current_time())
            if refusal is not None:
                await self._reject(link, refusal)
                return
            try:
                await self._route(link, peer)
            finally:
                self._limiter.leave(peer.host)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            _LOG.debug("a peer left", exc_info=True)
        except* Exception:
            _LOG.exception("a connection failed")

    async def _reject(self, link: Link, refusal: Refusal) -> None:
        """Refuse for lack of a place; without an answer in a flood, or under TLS."""
        if self._certificate is not None or self._refusals >= REFUSALS_MAX:
            link.abort()
            return
        self._refusals += 1
        retry = [("Retry-After", str(RETRY_AFTER_S))]
        try:
            status, text = self._rejection(refusal)
            await http.answer(link, status, http.error_body("too_many_connections", text), retry)
        finally:
            self._refusals -= 1

    def _rejection(self, refusal: Refusal) -> tuple[int, str]:
        if refusal == "full":
            return 503, "the server has no room for another connection"
        if refusal == "address":
            at_once = self._monitor.settings.connections_per_address_max
            return 429, f"the limit of connections at once from an address is {at_once}"
        per_s = self._monitor.settings.connections_per_address_per_s_max
        return 429, f"the limit of connections a second from an address is {per_s:g}"

    async def _route(self, link: Link, peer: Address) -> None:
        wait_s = self._monitor.settings.handshake_s
        deadline_s = trio.current_time() + wait_s
        if self._certificate is not None:
            with trio.move_on_at(deadline_s) as scope:
                is_secure = await self._secure(link, self._certificate)
            if scope.cancelled_caught or not is_secure:
                is_silent = scope.cancelled_caught and not link.tcp.reads
                self._monitor.counters.refused["silent" if is_silent else "tls"] += 1
                link.abort()
                return
        try:
            parser = h11.Connection(h11.SERVER, max_incomplete_event_size=http.HEAD_BYTES_MAX)
            request = await http.read_head(link, parser, deadline_s=deadline_s, wait_s=wait_s)
            if request is None:
                if trio.current_time() >= deadline_s:  # else the peer has left
                    self._monitor.counters.refused["silent"] += 1
            elif http.wants_websocket(request):
                link.put_back(parser.trailing_data[0])
                await self._serve_websocket(link, request, peer)
            else:
                await self._serve_http(link, parser, request)
        except http.Refused as refused:
            self._monitor.counters.refused["head"] += 1
            await http.answer(link, refused.status, refused.body, refused.headers)

    async def _secure(self, link: Link, certificate: Certificate) -> bool:
        """Do the TLS handshake; False where the client does not speak TLS."""
        first = await link.socket.recv(1, trio.socket.MSG_PEEK)
        if first and first[0] != TLS_HANDSHAKE:
            if first.isalpha():
                await http.send_last(link, NO_TLS_ANSWER)
            return False
        try:
            await link.secure(certificate.context)
        except trio.BrokenResourceError:
            return False
        return True

    async def _serve_websocket(self, link: Link, head: h11.Request, peer: Address) -> None:
        target = parse_target(head)
        key = check_handshake(head)
        async with trio.open_nursery() as nursery:
            request = WebSocketRequest(
                path=target.path,
                target=head.target.decode("ascii"),
                query=target.query,
                headers=_headers(head),
                subprotocols=http.header_tokens(head, b"sec-websocket-protocol"),
                peer=peer,
                is_tls=link.is_tls,
                key=key,
                link=link,
                monitor=self._monitor,
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

    async def _serve_http(self, link: Link, parser: h11.Connection, first: h11.Request) -> None:
        watched = WatchedConnection(link=link)
        self._monitor.add(watched)
        try:
            await http.serve_requests(self._app, link, parser, first)
        finally:
            self._monitor.discard(watched)


def tasks_living() -> int:
    """The number of the event loop's tasks; call it inside the loop."""
    return trio.lowlevel.current_statistics().tasks_living


def _headers(head: h11.Request) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers)


def _address(name: tuple[Any, ...]) -> Address:
    return Address(str(name[0]), int(name[1]))
