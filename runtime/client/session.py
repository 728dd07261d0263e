"""A client's session over a WebSocket, message by message: `protocol.client` on AnyIO.

    async with connect("ws://127.0.0.1:8006", mode="audio") as session:
        async for message in session:
            match message:
                case QueueDone(): await session.init(Init(instructions="be brief"))
                case Created(): await session.append(Append(pcm=one_second))
                case Listen(): await session.close()

This is what `antiphon.connect` (`sdk`) and the commands stand on: every message is seen,
those of the queue too, and every request is the caller's. All that can go wrong is a `ClientError`
(`errors`).

Rules: one task receives and one sends. The messages of a session that ended in order run out;
any other end raises. Leaving the block closes the connection, but says no `session.close`. It runs
on asyncio and on trio.

It does not pace, play, cut, retry or reconnect.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from uuid import uuid4

from protocol.client import ClientConnection
from protocol.errors import ADMISSION_ERRORS
from protocol.limits import FRAME_BYTES_MAX, FRAME_BYTES_MAX_OF
from protocol.messages import ErrorReport, Mode, ServerMessage
from protocol.requests import Append, Ask, Init, See
from protocol.state import Gate

from .errors import (
    ABNORMAL_CLOSURE,
    AddressError,
    SessionClosedError,
    SessionRefusedError,
    as_client_errors,
)
from .websocket import open_socket

Asked = ParamSpec("Asked")

REALTIME_PATH: Final = "/v1/realtime"
"""The endpoint of an address that names none, but in the legacy dialects."""
CHAT_PATH: Final = "/ws/chat"
"""That of `legacy-chat` (004)."""
DUPLEX_PATH: Final = "/ws/duplex"
"""That of `legacy-duplex` (002); the client's own label follows."""


class FrameSocket(Protocol):
    """What a session needs of a WebSocket; see `websocket.ClientSocket`."""

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and reason of the close; None while the WebSocket is open."""

    async def receive(self) -> str | bytes:
        """Wait for a message. Raises `SessionClosedError`."""

    async def send(self, message: str) -> None:
        """Send a text message. Raises `SessionClosedError`."""


class ClientSession:
    """One session, from the client's side; made by `connect`, which closes it.

    Args:
        websocket: open.
        mode: what the session carries.
        dialect: see `connect`.

    Attributes:
        connection: where the session stands; read it for `gate` and `closed_with`.
        dialect: as given.
    """

    def __init__(self, websocket: FrameSocket, *, mode: Mode, dialect: str) -> None:
        self._websocket = websocket
        self.connection = ClientConnection(dialect, mode)
        self.dialect = dialect
        self._refusal: ErrorReport | None = None
        self._waiting: list[ServerMessage] = []

    @property
    def can_append(self) -> bool:
        """Whether the server takes input now: the session is set up, and not over."""
        return self.connection.gate is Gate.ACTIVE

    # Each of the requests raises `LocalProtocolError` where it is not the time for it, or the
    # dialect has no such request, and `SessionClosedError` where it is not sent. Cancelled, it may
    # leave half a message, and the connection is dropped.

    async def init(self, init: Init) -> None:
        """Set the session up, once the server said `QueueDone`; raises as said above."""
        await self._request(self.connection.init, init)

    async def append(self, append: Append) -> None:
        """Send audio, once `can_append`; raises as said above."""
        await self._request(self.connection.append, append)

    async def see(self, see: See) -> None:
        """Send a frame that goes with the next audio (002); raises as said above."""
        await self._request(self.connection.see, see)

    async def pause(self, timeout_s: float | None = None) -> None:
        """Ask for a pause, of so many seconds at most (002); raises as said above."""
        await self._request(self.connection.pause, timeout_s)

    async def resume(self) -> None:
        """Ask to go on after a pause (002); raises as said above."""
        await self._request(self.connection.resume)

    async def interrupt(self) -> None:
        """Ask the model to stop speaking (002); raises as said above."""
        await self._request(self.connection.interrupt)

    async def report(self) -> None:
        """Leave a mark in the session's log (002, client_diagnostic); raises as said above."""
        await self._request(self.connection.report)

    async def ask(self, ask: Ask) -> None:
        """Ask for a turn of chat; raises as said above."""
        await self._request(self.connection.ask, ask)

    async def choose(self, model: str) -> None:
        """Choose the model of a transcription; raises as said above."""
        await self._request(self.connection.choose, model)

    async def append_sound(self, pcm16: bytes) -> None:
        """Send 16-bit sound to be transcribed; raises as said above."""
        await self._request(self.connection.append_sound, pcm16)

    async def commit(self, *, final: bool = False) -> None:
        """Have sound transcribed; final, end its utterance. Raises as said above."""
        await self._request(self.connection.commit, final=final)

    async def close(self, reason: str | None = None) -> None:
        """Ask for the session's end; the last messages are still to be received. Raises as said."""
        await self._request(self.connection.close, reason)

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
                frame = await self._websocket.receive()
            except SessionClosedError as closed:
                self._end(closed)
                return None
            with as_client_errors():
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

    @property
    def closed_with(self) -> tuple[int, str]:
        """Code and reason of the close; 1006 while the WebSocket is open, or where there is none.

        It may be told before the last messages were received.
        """
        return self._websocket.closed or (ABNORMAL_CLOSURE, "")

    async def _request(
        self, write: Callable[Asked, str], *args: Asked.args, **more: Asked.kwargs
    ) -> None:
        with as_client_errors():
            frame = write(*args, **more)
        await self._websocket.send(frame)

    def _end(self, closed: SessionClosedError) -> None:
        in_order = self.connection.closed_with is not None  # told before: nothing new to say
        if not in_order:
            in_order = self.connection.connection_closed(closed.code, closed.reason)
        if self._refusal is not None:
            raise SessionRefusedError(self._refusal) from None
        if not in_order:
            raise closed


@asynccontextmanager
async def connect(
    url: str,
    *,
    mode: Mode,
    dialect: str = "realtime",
    tls: ssl.SSLContext | None = None,
    key: str | None = None,
) -> AsyncIterator[ClientSession]:
    """Open a session's connection; cancelled or left, it is closed.

    Args:
        url: of the server; see `endpoint`.
        mode: what the session carries.
        dialect: a name of `protocol.dialects.DIALECTS`.
        tls: for `wss://`; None trusts whom the system trusts.
        key: the API key, where the server asks for one.

    Yields:
        The session, before its first message is received.

    Raises:
        AddressError: the address cannot be one.
        CannotConnectError: nobody answers there.
        HandshakeRejectedError: the server answered with an HTTP error.
        LocalProtocolError: there is no such dialect, it has no such mode, or the key is none.
    """
    with as_client_errors():
        ClientConnection(dialect, mode)  # raises before anybody is called
    address = endpoint(url, mode, dialect)
    frame_bytes_max = FRAME_BYTES_MAX_OF.get(mode, FRAME_BYTES_MAX)  # the server says no to others
    opening = open_socket(address, frame_bytes_max=frame_bytes_max, tls=tls, key=key)
    async with opening as socket:
        yield ClientSession(socket, mode=mode, dialect=dialect)


def endpoint(url: str, mode: Mode, dialect: str = "realtime") -> str:
    """Complete a server's address.

    Args:
        url: `ws://` or `wss://`, with or without a port, a path and a query.
        mode: put into the query, or into the label by which 002 tells sound from video.
        dialect: whose endpoint it is, where there was no path, or that of `realtime`.

    Returns:
        The address of the WebSocket.

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
    if dialect not in ("legacy-duplex", "legacy-chat"):
        query.append(("mode", mode))
    elif path == REALTIME_PATH:
        path = CHAT_PATH if dialect == "legacy-chat" else f"{DUPLEX_PATH}/{_label(mode)}"
    return urlunsplit((parts.scheme, parts.netloc, path, urlencode(query), ""))


def _label(mode: Mode) -> str:
    """Name a session of 002; the name need not be unique, but says what the session carries."""
    return f"{'adx' if mode == 'audio' else 'omni'}_{uuid4().hex[:12]}"
