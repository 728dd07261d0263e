"""A client's session over a WebSocket: `protocol.client` with trio-websocket under it.

    async with connect("ws://127.0.0.1:8006", mode="audio") as session:
        async for message in session:
            match message:
                case QueueDone(): await session.init(Init(instructions="be brief"))
                case Created(): await session.append(Append(pcm=one_second))
                case Listen(): await session.close()

What can go wrong:

    ClientError
      AddressError            the address is no ws:// or wss:// URL
      CannotConnectError      nobody answers there, or it is no WebSocket server
      HandshakeRejectedError  an HTTP error instead of a WebSocket, with the server's message
      SessionRefusedError     the server has no place: its code and message (`queue_full` ...)
      SessionClosedError      the connection is over: its close code and reason

`LocalProtocolError` and `RemoteProtocolError` of `protocol.errors` pass through as they are.

Rules: one task receives and one sends. The messages of a session that ended in order run out;
any other end raises. Leaving the block closes the connection, but says no `session.close`. It
needs trio (or AnyIO on trio), because trio-websocket does.

It does not pace, play, retry or reconnect.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import orjson
import trio
import trio_websocket
from wsproto.utilities import LocalProtocolError as WsprotoError

from protocol.client import ClientConnection
from protocol.errors import ADMISSION_ERRORS
from protocol.limits import FRAME_BYTES_MAX
from protocol.messages import Append, ErrorReport, Init, Mode, ServerMessage
from protocol.state import Gate

from .websocket import ABNORMAL_CLOSURE, CLOSE_WAIT_S, MESSAGE_QUEUE_SIZE, RECEIVE_BUFFER_BYTES

REALTIME_PATH: Final = "/v1/realtime"
"""The endpoint of an address that names none."""
CONNECT_WAIT_S: Final = 10.0
"""TCP, TLS and the handshake across the world take one; a silent port is not waited for."""
MESSAGE_CHARS_SHOWN: Final = 200
"""Of an HTTP error's body: enough for a sentence, too little for a page of HTML."""

_LOG: Final = logging.getLogger("antiphon.client")
_NO_HTTP: Final = "what answers there does not speak WebSocket"


class ClientError(Exception):
    """The root of what goes wrong between a client and its server; the text is one line."""


class AddressError(ClientError):
    """The address cannot be one of a server."""


class CannotConnectError(ClientError):
    """Nobody answers at the address, or not as a WebSocket server does."""


class HandshakeRejectedError(ClientError):
    """The server answered with an HTTP error.

    Args:
        status: of HTTP.
        message: what the server says is wrong, cut where it is long.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server rejected the connection: {message} (HTTP {status})")
        self.status = status
        self.message = message


class SessionRefusedError(ClientError):
    """The server has no place for the session, or lost its worker.

    Args:
        report: its `error` event.
    """

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(f"the server refused the session: {report.message} ({report.code})")
        self.code = report.code
        self.message = report.message


class SessionClosedError(ClientError):
    """The connection is over.

    Args:
        code: the close code (RFC 6455, 7.4); 1006 where the peer went without one.
        reason: what the closing side said, or nothing.
    """

    def __init__(self, code: int, reason: str) -> None:
        said = "connection lost" if code == ABNORMAL_CLOSURE else f"closed with code {code}"
        super().__init__(f"{said}, {reason}" if reason else said)
        self.code = code
        self.reason = reason


class ClientSession:
    """One session, from the client's side; made by `connect`, which closes it.

    Args:
        websocket: open.
        mode: what the session carries.
        dialect: `realtime` or `duplex-v1`.

    Attributes:
        connection: where the session stands; read it for `gate` and `closed_with`.
        dialect: as given.
    """

    def __init__(
        self, websocket: trio_websocket.WebSocketConnection, *, mode: Mode, dialect: str
    ) -> None:
        self._websocket = websocket
        self.connection = ClientConnection(dialect, mode)
        self.dialect = dialect
        self._refusal: ErrorReport | None = None
        self._waiting: list[ServerMessage] = []

    @property
    def can_append(self) -> bool:
        """Whether the server takes audio now: the session is set up, and not over."""
        return self.connection.gate is Gate.ACTIVE

    async def init(self, init: Init) -> None:
        """Set the session up, once the server said `QueueDone`.

        Raises:
            LocalProtocolError: it is not the time for it.
            SessionClosedError: it is not sent.
        """
        await self._send(self.connection.init(init))

    async def append(self, append: Append) -> None:
        """Send audio; cancelled, it may leave half a frame, so leave the session after it.

        Raises:
            LocalProtocolError: the session takes none now (`can_append`).
            SessionClosedError: it is not sent.
        """
        await self._send(self.connection.append(append))

    async def close(self, reason: str | None = None) -> None:
        """Ask for the session's end; the last messages are still to be received.

        Raises:
            LocalProtocolError: it is over, or was asked for before.
            SessionClosedError: it is not sent.
        """
        await self._send(self.connection.close(reason))

    async def receive(self) -> ServerMessage | None:
        """Wait for the server's next message.

        Returns:
            The message, or None at the end of a session that ended in order.

        Raises:
            RemoteProtocolError: the server said what it may not.
            SessionRefusedError: it has no place for the session.
            SessionClosedError: it ended in another way.
        """
        while not self._waiting:
            try:
                frame: str | bytes = await self._websocket.get_message()
            except trio_websocket.ConnectionClosed:
                self._end()
                return None
            self._waiting += self.connection.receive(frame)
        message = self._waiting.pop(0)
        if isinstance(message, ErrorReport) and message.code in ADMISSION_ERRORS:
            self._refusal = message
        return message

    def __aiter__(self) -> ClientSession:
        return self

    async def __anext__(self) -> ServerMessage:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def _send(self, frame: str) -> None:
        try:
            await self._websocket.send_message(frame)
        except (trio_websocket.ConnectionClosed, WsprotoError):
            raise SessionClosedError(*self._closed_with()) from None

    def _end(self) -> None:
        code, reason = self._closed_with()
        in_order = self.connection.closed_with is not None  # told before: nothing new to say
        if not in_order:
            in_order = self.connection.connection_closed(code, reason)
        if self._refusal is not None:
            raise SessionRefusedError(self._refusal)
        if not in_order:
            raise SessionClosedError(code, reason)

    def _closed_with(self) -> tuple[int, str]:
        closed = self._websocket.closed
        return (ABNORMAL_CLOSURE, "") if closed is None else (int(closed.code), closed.reason or "")


@asynccontextmanager
async def connect(
    url: str, *, mode: Mode, dialect: str = "realtime"
) -> AsyncIterator[ClientSession]:
    """Open a session's connection; cancelled or left, it is closed.

    Args:
        url: of the server; see `endpoint`.
        mode: what the session carries.
        dialect: `realtime` or `duplex-v1`.

    Yields:
        The session, before its first message is received.

    Raises:
        AddressError: the address cannot be one.
        CannotConnectError: nobody answers there.
        HandshakeRejectedError: the server answered with an HTTP error.
        LocalProtocolError: there is no such dialect.
    """
    address = endpoint(url, mode)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            websocket = await nursery.start(_hold, address)
            try:
                yield ClientSession(websocket, mode=mode, dialect=dialect)
            finally:
                with trio.move_on_after(CLOSE_WAIT_S, shield=True), suppress(WsprotoError):
                    await websocket.aclose()
        except Exception as error:  # raised below as it is, and not as a group of one
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _hold(
    address: str, *, task_status: trio.TaskStatus[trio_websocket.WebSocketConnection]
) -> None:
    """Hold the connection and the library's reader; it raises nothing once it is open."""
    opened, why = False, _NO_HTTP
    rejected: trio_websocket.ConnectionRejected | None = None
    waiting = trio.CancelScope(deadline=trio.current_time() + CONNECT_WAIT_S)
    with waiting:
        stream = await _dial(address)
        try:
            async with stream, trio.open_nursery() as nursery:
                websocket = await _shake_hands(nursery, stream, address)
                waiting.deadline = math.inf
                opened = True
                task_status.started(websocket)
        except* trio_websocket.ConnectionRejected as errors:
            rejected = errors.exceptions[0]
        except* trio.BrokenResourceError as errors:
            why = f"no TLS, {errors.exceptions[0].__cause__}"
        except* WsprotoError as errors:
            # It cannot take a ping that comes after our close, for one: the connection is over.
            _LOG.debug("the reader of a WebSocket ended early: %r", errors.exceptions)
    if rejected is not None:
        raise HandshakeRejectedError(rejected.status_code, _said(rejected.body))
    if not opened:
        why = f"no WebSocket within {CONNECT_WAIT_S:g} s" if waiting.cancelled_caught else why
        raise CannotConnectError(f"cannot connect to {address}: {why}")


async def _dial(address: str) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    try:
        if parts.scheme == "ws":
            return await trio.open_tcp_stream(parts.hostname, parts.port or 80)
        return await trio.open_ssl_over_tcp_stream(
            parts.hostname, parts.port or 443, https_compatible=True
        )
    except OSError as error:
        why = _reason_of(error)
        raise CannotConnectError(f"cannot connect to {address}: {why}") from None


async def _shake_hands(
    nursery: trio.Nursery,
    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
    address: str,
) -> trio_websocket.WebSocketConnection:
    parts = urlsplit(address)
    if isinstance(stream, trio.SSLStream):
        await stream.do_handshake()
    return await trio_websocket.wrap_client_stream(
        nursery,
        stream,
        parts.netloc.rpartition("@")[2],
        f"{parts.path}?{parts.query}",
        message_queue_size=MESSAGE_QUEUE_SIZE,
        max_message_size=FRAME_BYTES_MAX,
        receive_buffer_size=RECEIVE_BUFFER_BYTES,
    )


def endpoint(url: str, mode: Mode) -> str:
    """Complete a server's address.

    Args:
        url: `ws://` or `wss://`, with or without a port, a path and a query.
        mode: put into the query.

    Returns:
        The address of the WebSocket; `/v1/realtime` where there was no path.

    Raises:
        AddressError: it is no such URL.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise AddressError(f"{url!r} is no address: it is like ws://127.0.0.1:8006")
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "mode"]
    path = parts.path if parts.path.strip("/") else REALTIME_PATH
    return urlunsplit((parts.scheme, parts.netloc, path, urlencode([*query, ("mode", mode)]), ""))


def _said(body: bytes | None) -> str:
    """Read what an HTTP error says: the `message` of our JSON, else the beginning of the text."""
    try:
        said = orjson.loads(body or b"")
    except orjson.JSONDecodeError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("message"), str):
        text = said["message"]
        if isinstance(said.get("allowed"), list):
            text += f", allowed is {', '.join(map(str, said['allowed']))}"
    else:
        text = (body or b"").decode(errors="replace") or "it does not say why"
    return " ".join(text.split())[:MESSAGE_CHARS_SHOWN]


def _reason_of(error: OSError) -> str:
    """Say it in the system's own words, which trio's happy eyeballs wrap twice."""
    attempts = error.__cause__
    if isinstance(attempts, BaseExceptionGroup):
        attempts = attempts.exceptions[0]
    number = attempts.errno if isinstance(attempts, OSError) else None
    if number is not None and number in errno.errorcode:
        return os.strerror(number).lower()
    return (error.strerror or str(error)).lower()
