"""One WebSocket to a remote backend: wsproto on AnyIO's streams, for both event loops.

Rules: one task uses it. Nothing reads between its calls, so data waits in TCP, and pings are
answered with the next call. `receive` may be cancelled and called again; a cancelled send may leave
half a frame, so only `close` may follow. Every end of the connection is a `BackendGone`; an invalid
peer is a `BackendError`. There is no reconnect.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import anyio
import attrs
import wsproto
from anyio.abc import ByteStream
from wsproto import events as ws
from wsproto.connection import ConnectionState
from wsproto.utilities import ProtocolError as WsprotoError

from .base import BackendError, BackendGone
from .llama_omni_http import READ_BYTES, Address

MESSAGE_CHARS_MAX: Final = 4 * 1024 * 1024
"""The 30 s of sound that an event may carry, in base64, with room for the rest."""
CONNECT_WAIT_S: Final = 2.0
"""TCP, TLS and the handshake across the world take one second; see `llama_omni.OPEN_WAIT_S`."""
CLOSE_WAIT_S: Final = 1.0
"""A live server answers a close within a round trip."""
WEBSOCKET_PATH: Final = "/backend"


@attrs.frozen(kw_only=True)
class Pong:
    """The server's answer to our ping."""

    payload: bytes


class Link:
    """One WebSocket, opened by `connect`; the opener closes it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._waiting: deque[str | bytes | Pong] = deque()
        self._parts: list[str | None] = []
        self._part_chars = 0
        self._has_heard = False
        self._is_open = False
        self._end: BackendError | None = None

    @classmethod
    async def connect(cls, address: Address) -> Link:
        """Open the WebSocket, within `CONNECT_WAIT_S`.

        `BackendGone`: there is no server; `BackendError`: the peer refuses, or is no WebSocket
        server.
        """
        link: Link | None = None
        try:
            with anyio.fail_after(CONNECT_WAIT_S):
                link = cls(await address.dial())
                await link._shake_hands(address)
        except BaseException as error:
            if link is not None:
                await anyio.aclose_forcefully(link._stream)
            if isinstance(error, TimeoutError):
                text = f"cannot connect to {address.netloc}: no WebSocket in {CONNECT_WAIT_S:g} s"
                raise BackendGone(text) from None
            raise
        return link

    async def send(self, text: str) -> None:
        """Send a text message; `BackendGone` if the connection has ended."""
        await self._send(ws.TextMessage(data=text))

    async def ping(self, payload: bytes) -> None:
        """Send a ping of at most 125 bytes; `BackendGone` if the connection has ended."""
        await self._send(ws.Ping(payload=payload))

    async def receive(self, wait_s: float = math.inf) -> str | bytes | Pong | None:
        """Wait for a message or a pong; None after `wait_s` without any data.

        `BackendGone`: the connection has ended, and all earlier messages were received;
        `BackendError`: it is no WebSocket, or a message is too large.
        """
        while not self._waiting:
            if self._end is not None:
                raise self._end
            if not await self._read(wait_s):
                return None
        return self._waiting.popleft()

    def receive_waiting(self) -> list[str | bytes]:
        """Take the messages already received, without waiting."""
        messages = [message for message in self._waiting if not isinstance(message, Pong)]
        self._waiting.clear()
        return messages

    async def close(self) -> None:
        """Close it, waiting `CLOSE_WAIT_S` for the server; shielded, and never raises."""
        with anyio.move_on_after(CLOSE_WAIT_S, shield=True):
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

    async def _shake_hands(self, address: Address) -> None:
        target = address.base + WEBSOCKET_PATH
        await self._send(ws.Request(host=address.netloc, target=target))
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
        if data is None and not self._has_heard:
            self._end = BackendGone("the connection to the remote was lost")
            return True
        self._has_heard = True
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
