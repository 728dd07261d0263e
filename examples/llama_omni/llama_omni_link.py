"""The connections to a remote backend: HTTP requests, its WebSocket, and a session over both.

- A request has its own connection, is bounded in time and bytes, and is not retried.
- One task uses the WebSocket (wsproto on AnyIO's streams, for both event loops). Nothing reads
  between its calls, so data waits in TCP, and pings are answered with the next call. `receive`
  may be cancelled and called again; a cancelled send may leave half a frame, so only `close` may
  follow.
- Every end of a connection is a `BackendGone`; an invalid peer is a `BackendError`. There is no
  reconnect.
- The server holds one session at a time. It refuses a second without a message, and may hold a
  closed one for a while. `Channel.close` posts to `/sessions/{id}/close`, then closes the
  WebSocket; it never raises.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import math
import os
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Final
from urllib.parse import quote, urlsplit

import anyio
import attrs
import httpcore2
import wsproto
from anyio.abc import ByteStream
from llama_omni_wire import Closed, Created, RemoteEvent, RemoteMode, read_event, shown
from wsproto import events as ws
from wsproto.connection import ConnectionState
from wsproto.utilities import ProtocolError as WsprotoError

from runtime.model.backends.base import BackendError, BackendGone

# -- HTTP ---------------------------------------------------------------------------------------

READ_BYTES: Final = 262_144
"""A second of speech in one read, which bounds the queue."""
BODY_BYTES_MAX: Final = 64 * 1024
"""Answers of `/health` and a close fit in a line."""


@attrs.frozen(kw_only=True)
class Address:
    """A remote backend's address; `base` precedes every path, and is usually empty."""

    host: str
    port: int
    is_tls: bool
    base: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read `ws://host:port` or `wss://host:port`, perhaps with a path; else `ValueError`."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "wss" else 80)
            is_address = parts.scheme in ("ws", "wss") and parts.port != 0 and url.isascii()
            has_more = "@" in parts.netloc or bool(parts.query or parts.fragment)
        except ValueError:
            is_address = has_more = False
        if not is_address or has_more or parts.hostname is None:
            raise ValueError("the remote's address is not like ws://127.0.0.1:22500")
        base = quote(parts.path.rstrip("/"), safe="/%")
        return cls(host=parts.hostname, port=port, is_tls=parts.scheme == "wss", base=base)

    @property
    def netloc(self) -> str:
        """Host and port, as in a `Host` header."""
        return f"[{self.host}]:{self.port}" if _is_ipv6(self.host) else f"{self.host}:{self.port}"

    async def dial(self) -> ByteStream:
        """Open a connection, which the caller closes; `BackendGone` if there is no server."""
        try:
            if self.is_tls:
                return await anyio.connect_tcp(
                    self.host, self.port, tls=True, tls_standard_compatible=False
                )
            return await anyio.connect_tcp(self.host, self.port)
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise BackendGone(f"cannot connect to {self.netloc}: {_reason_of(error)}") from None


async def request(address: Address, method: str, path: str, *, wait_s: float) -> tuple[int, bytes]:
    """Make one HTTP request on its own connection; return status and body.

    `method` is `GET`, or `POST` with an empty JSON object; `path` is percent-encoded.
    `BackendGone`: there is no answer in time; `BackendError`: the peer does not speak HTTP, or
    sends too much.
    """
    scheme, target = "https" if address.is_tls else "http", address.base + path
    url = httpcore2.URL(scheme=scheme, host=address.host, port=address.port, target=target)
    body = b"{}" if method == "POST" else b""
    headers = [("Host", address.netloc), ("Connection", "close")]
    headers.append(("Content-Type", "application/json"))
    tls = ssl.create_default_context() if address.is_tls else None
    received = bytearray()
    try:
        with anyio.fail_after(wait_s):
            async with (
                httpcore2.AsyncConnectionPool(tls) as pool,
                pool.stream(method, url, headers=headers, content=body) as answer,
                aclosing(answer.aiter_stream()) as parts,
            ):
                async for part in parts:
                    received += part
                    if len(received) > BODY_BYTES_MAX:
                        raise BackendError(f"expected at most {BODY_BYTES_MAX} bytes, got more")
                return answer.status, bytes(received)
    except TimeoutError:
        raise BackendGone(f"expected an answer in {wait_s:g} s, got none") from None
    except httpcore2.ConnectError as error:
        raise BackendGone(f"cannot connect to {address.netloc}: {_reason_of(error)}") from None
    except httpcore2.NetworkError:
        raise BackendGone("the connection was lost before its answer") from None
    except httpcore2.RemoteProtocolError:
        what = f"{method} {path.partition('?')[0]}"
        raise BackendError(f"expected HTTP to {what}, got something else") from None


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _reason_of(error: Exception) -> str:
    """Describe an error in the system's words, unwrapping AnyIO's."""
    cause: BaseException = error
    inner: BaseException | None = error
    while inner is not None:  # httpcore's pool raises without a cause
        cause = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
        inner = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLError):  # its errno is not the system's
        return (cause.reason or "no TLS there").replace("_", " ").lower()
    number = cause.errno if isinstance(cause, OSError) else None
    if number is not None and number in errno.errorcode:
        return os.strerror(number).lower()
    return (str(error) or "no TLS there").lower()


# -- a session ----------------------------------------------------------------------------------

MESSAGE_CHARS_MAX: Final = 4 * 1024 * 1024
"""The 30 s of sound that an event may carry, in base64, with room for the rest."""
CONNECT_WAIT_S: Final = 2.0
"""TCP, TLS and the handshake across the world take one second; see `llama_omni.OPEN_WAIT_S`."""
WEBSOCKET_CLOSE_WAIT_S: Final = 1.0
"""A live server answers a close within a round trip."""
WEBSOCKET_PATH: Final = "/backend"
CLOSE_WAIT_S: Final = 6.0
"""The server stops its threads first; with the WebSocket's wait, below `RELEASE_WAIT_S`."""
OK: Final = 200
NOT_FOUND: Final = 404

_log = logging.getLogger("antiphon.model")


@attrs.frozen(kw_only=True)
class Pong:
    """The server's answer to our ping."""

    payload: bytes


class Channel:
    """One session on the server, over its own WebSocket, which `connect` opens and `close` ends."""

    def __init__(self, address: Address, stream: ByteStream) -> None:
        self._address, self._stream = address, stream
        self._remote_id: str | None = None
        self._connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._waiting: deque[str | bytes | Pong] = deque()
        self._parts: list[str | None] = []
        self._part_chars = 0
        self._has_received = False
        self._is_open = False
        self._end: BackendError | None = None

    @classmethod
    async def connect(cls, address: Address) -> Channel:
        """Open the WebSocket, within `CONNECT_WAIT_S`.

        `BackendGone`: there is no server; `BackendError`: the peer refuses, or is not a WebSocket
        server.
        """
        channel: Channel | None = None
        try:
            with anyio.fail_after(CONNECT_WAIT_S):
                channel = cls(address, await address.dial())
                await channel._shake_hands()
        except BaseException as error:
            if channel is not None:
                await anyio.aclose_forcefully(channel._stream)
            if isinstance(error, TimeoutError):
                text = f"cannot connect to {address.netloc}: no WebSocket in {CONNECT_WAIT_S:g} s"
                raise BackendGone(text) from None
            raise
        return channel

    async def begin(self, init: str, mode: RemoteMode) -> Created:
        """Send `session.init` and wait for `session.created`, without a time limit.

        `BackendGone`: the server refuses; without a message if it is busy. `BackendError`: any
        other answer.
        """
        await self.send(init)
        try:
            event = await self.receive_event()
        except BackendGone as error:
            raise BackendGone(f"{error} before session.created: it may be busy") from None
        if isinstance(event, Closed):
            raise BackendGone(f"expected session.created, got session.closed {shown(event.reason)}")
        if not isinstance(event, Created):
            raise BackendError("expected session.created, got an answer")
        self._remote_id = event.session_id
        if event.mode not in (mode, None):
            raise BackendError(f"expected a session of mode {mode}, got one of {event.mode}")
        return event

    async def send(self, text: str) -> None:
        """Send a text message; `BackendGone` if the connection has ended."""
        await self._send(ws.TextMessage(data=text))

    async def ping(self, payload: bytes) -> None:
        """Send a ping of at most 125 bytes; `BackendGone` if the connection has ended."""
        await self._send(ws.Ping(payload=payload))

    async def receive(self, wait_s: float = math.inf) -> str | bytes | Pong | None:
        """Wait for a message or a pong; None after `wait_s` without any data.

        `BackendGone`: the connection has ended, and all earlier messages were received;
        `BackendError`: it is not a WebSocket, or a message is too large.
        """
        while not self._waiting:
            if self._end is not None:
                raise self._end
            if not await self._read(wait_s):
                return None
        return self._waiting.popleft()

    async def receive_event(self) -> RemoteEvent:
        """Wait for the server's next event, without a time limit.

        `BackendGone`: the connection has ended; `BackendError`: the event is not valid.
        """
        frame: str | bytes | Pong | None = None
        while not isinstance(frame, str | bytes):
            frame = await self.receive()
        return read_event(frame)

    def receive_waiting(self) -> list[str | bytes]:
        """Take the messages already received, without waiting."""
        messages = [message for message in self._waiting if not isinstance(message, Pong)]
        self._waiting.clear()
        return messages

    async def close(self) -> None:
        """Close the session on the server and then the WebSocket; a failure is logged."""
        try:
            await self._close_remote()
        except BackendError as error:
            _log.warning("remote %s: closing a session: %s", self._address.netloc, error)
        finally:
            await self._close_socket()

    async def _close_remote(self) -> None:
        """Have the server close the session; `BackendGone` or `BackendError` if that fails."""
        if self._remote_id is None:
            return
        path = f"/sessions/{quote(self._remote_id, safe='')}/close"
        status, _ = await request(self._address, "POST", path, wait_s=CLOSE_WAIT_S)
        if status not in (OK, NOT_FOUND):
            raise BackendError(f"expected HTTP {OK} or {NOT_FOUND}, got HTTP {status}")

    async def _close_socket(self) -> None:
        """Close the WebSocket and wait for the server a little; shielded, and never raises."""
        with anyio.move_on_after(WEBSOCKET_CLOSE_WAIT_S, shield=True):
            try:
                if self._connection.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
                    await self._stream.send(self._connection.send(ws.CloseConnection(code=1000)))
                while self._end is None:
                    self._waiting.clear()
                    await self._read()
            except (BackendError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # The connection has ended anyway.
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self._stream)

    async def _shake_hands(self) -> None:
        target = self._address.base + WEBSOCKET_PATH
        await self._send(ws.Request(host=self._address.netloc, target=target))
        while not self._is_open:
            if self._end is not None:
                raise self._end
            await self._read()

    async def _send(self, event: ws.Event) -> None:
        if self._end is not None:
            raise self._end
        try:
            await self._stream.send(self._connection.send(event))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, WsprotoError):
            raise self._end or BackendGone("the connection to the remote was lost") from None

    async def _read(self, wait_s: float = math.inf) -> bool:
        """Read once and process the data; cancellation loses nothing. False: nothing in time."""
        data: bytes | None = b""
        try:
            with anyio.move_on_after(wait_s):
                data = await self._stream.receive(READ_BYTES)
        except anyio.EndOfStream:
            data = None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise BackendGone("the connection to the remote was lost") from None
        if data == b"":
            return False
        if data is None and not self._has_received:
            self._end = BackendGone("the connection to the remote was lost")
            return True
        self._has_received = True
        try:
            self._connection.receive_data(data)
            replies = [reply for event in self._connection.events() if (reply := self._take(event))]
        except WsprotoError:
            self._end = self._end or BackendError("expected a WebSocket, got something else")
            return True
        for reply in replies if self._end is None else ():
            await self._send(reply)
        return True

    def _take(self, event: ws.Event) -> ws.Event | None:
        """Take one event of the WebSocket; return its reply."""
        match event:
            case ws.AcceptConnection():
                self._is_open = True
            case ws.RejectConnection(status_code=status):
                self._end = BackendError(
                    f"expected a WebSocket at {WEBSOCKET_PATH}, got HTTP {status}"
                )
            case ws.TextMessage(data=part) | ws.BytesMessage(data=part):
                self._take_part(part, is_last=event.message_finished)
            case ws.Ping():
                return event.response()
            case ws.Pong(payload=payload):
                self._waiting.append(Pong(payload=bytes(payload)))
            case ws.CloseConnection(code=code):
                self._end = self._end or self._closed(int(code))
        return None

    def _closed(self, code: int) -> BackendError:
        if self._connection.state is ConnectionState.OPEN:  # wsproto closes on invalid frames
            return BackendError(f"expected WebSocket frames, got what would be closed with {code}")
        if code == 1006:
            return BackendGone("the connection to the remote was lost")
        return BackendGone(f"the remote closed the connection with code {code}")

    def _take_part(self, part: str | bytes | bytearray, *, is_last: bool) -> None:
        self._part_chars += len(part)
        if self._part_chars > MESSAGE_CHARS_MAX:
            text = f"expected messages of at most {MESSAGE_CHARS_MAX} characters, got a longer one"
            self._end = BackendError(text)
            self._parts.clear()
            return
        if part or is_last:  # empty parts are not bounded by their length
            self._parts.append(part if isinstance(part, str) else None)
        if is_last:
            parts, self._parts, self._part_chars = self._parts, [], 0
            texts = [part for part in parts if part is not None]
            self._waiting.append("".join(texts) if len(texts) == len(parts) else b"")


@contextmanager
def naming_server(address: Address) -> Iterator[None]:
    """Prefix errors with the server's address."""
    try:
        yield
    except BackendError as error:
        raise type(error)(f"remote {address.netloc}: {error}") from error


def gone(event: Closed) -> BackendGone:
    """The error for a session that the server has ended."""
    why = f", reason {shown(event.reason)}" if event.reason else ""
    return BackendGone(f"the remote ended the session{why}")
