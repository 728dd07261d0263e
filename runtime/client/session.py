"""A client's session over a WebSocket, message by message: `protocol.machine.client` on AnyIO.

    async with connect("ws://127.0.0.1:8006", mode="audio") as session:
        async for message in session:
            match message:
                case QueueDone(): await session.init(Init(instructions="be brief"))
                case Created(): await session.append(Append(pcm=one_second))
                case Listen(): await session.close()

It shows every message, those of the queue too; every request is the caller's, and every error a
`ClientError`. One task receives and one sends. The messages of a session that ended in order run
out; any other end raises. Leaving the block closes the connection without a `session.close`. It
runs on asyncio and on trio.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from uuid import uuid4

import anyio

from protocol.machine.client import ClientConnection
from protocol.values import requests as rq
from protocol.values.errors import ADMISSION_ERRORS
from protocol.values.limits import OF_MODE, Mode
from protocol.values.messages import Closed, ErrorReport, ServerMessage
from protocol.values.openai import CancelResponse
from protocol.values.state import Gate

from . import errors
from .resuming import OnConnection, ResumingSocket
from .websocket import open_socket

REALTIME_PATH: Final = "/v1/realtime"
"""The default endpoint, except in the dialects below, whose address has no mode."""
CHAT_PATH: Final = "/ws/chat"
"""That of `legacy-chat` (004)."""
LIVE_PATH: Final = "/v1/live/sessions"
"""That of `live`."""
_HOST_PORT: Final = re.compile(r"(\[[\d:.a-fA-F]+\]|[\w.-]+):\d+([/?#].*)?")
DUPLEX_PATH: Final = "/ws/duplex"
"""That of `legacy-duplex` (002); the client's own label follows."""


class FrameSocket(Protocol):
    """The WebSocket of a session; see `websocket.ClientSocket`."""

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and reason of the close; None while the WebSocket is open."""

    async def receive(self) -> str | bytes:
        """Wait for a message. Raises `SessionClosedError`."""

    async def send(self, message: str) -> None:
        """Send a text message. Raises `SessionClosedError`."""


class ClientSession:
    """One session, from the client's side; `connect` makes and closes it.

    `connection` holds its state: read `gate` and `closed_with`. `ended` is the server's word on the
    end, once received.
    """

    def __init__(self, websocket: FrameSocket, *, mode: Mode, dialect: str) -> None:
        self._websocket = websocket
        self.connection = ClientConnection(dialect, mode)
        self.dialect = dialect
        self.ended: Closed | None = None
        self._refusal: ErrorReport | None = None
        self._waiting: list[ServerMessage] = []
        self._sending = anyio.Lock()

    @property
    def can_append(self) -> bool:
        """Whether the server takes input now: the session is set up, and not over."""
        return self.connection.gate is Gate.ACTIVE

    # Each request raises `LocalProtocolError` if the state or the dialect does not allow it, and
    # `SessionClosedError` if it is not sent. A cancelled one may leave half a message, and the
    # connection is dropped.

    async def send(self, message: rq.ClientMessage) -> None:
        """Send any message of the dialect."""
        with errors.as_client_errors():
            frame = self.connection.send(message)
        async with self._sending:
            await self._websocket.send(frame)

    async def init(self, init: rq.Init) -> None:
        """Set the session up, after `QueueDone`."""
        await self.send(init)

    async def append(self, append: rq.Append) -> None:
        """Send audio, once `can_append`."""
        await self.send(append)

    async def see(self, see: rq.See) -> None:
        """Send a frame that goes with the next audio (002)."""
        await self.send(see)

    async def pause(self, timeout_s: float | None = None) -> None:
        """Ask for a pause, of so many seconds at most (002)."""
        await self.send(rq.Pause(timeout_s=timeout_s))

    async def resume(self) -> None:
        """Ask to go on after a pause (002)."""
        await self.send(rq.Resume())

    async def interrupt(self) -> None:
        """Ask the model to stop speaking (002)."""
        await self.send(rq.Interrupt())

    async def report(self) -> None:
        """Leave a mark in the session's log (002, client_diagnostic)."""
        await self.send(rq.Report())

    async def played(self, played_ms: int) -> None:
        """Tell how much of the speech was played, in milliseconds since the session began."""
        await self.send(rq.Played(played_ms=played_ms))

    async def ask(self, ask: rq.Ask) -> None:
        """Ask for a turn of chat."""
        await self.send(ask)

    async def cancel(self) -> None:
        """Ask for the end of the answer that is under way, in a chat."""
        await self.send(CancelResponse())

    async def choose(self, model: str, *, record: bool = True) -> None:
        """Choose the model of a transcription, and whether it may be recorded."""
        await self.send(rq.ChooseModel(model=model, record=record))

    async def append_sound(self, pcm16: bytes) -> None:
        """Send 16-bit sound to be transcribed."""
        await self.send(rq.AppendSound(pcm16=pcm16))

    async def commit(self, *, final: bool = False) -> None:
        """Have sound transcribed; `final` ends its utterance."""
        await self.send(rq.Commit(final=final))

    async def close(self, reason: str | None = None) -> None:
        """Ask for the session's end; the last messages are still to be received."""
        await self.send(rq.CloseRequest(reason=reason))

    async def receive(self) -> ServerMessage | None:
        """Wait for the server's next message; None at the end of a session that ended in order.

        Raises:
            RemoteProtocolError: the server broke the protocol.
            SessionRefusedError: it has no place for the session.
            SessionClosedError: it ended in another way.
        """
        while not self._waiting:
            try:
                frame = await self._websocket.receive()
            except errors.SessionClosedError as closed:
                self._end(closed)
                return None
            with errors.as_client_errors():
                self._waiting += self.connection.receive(frame)
        message = self._waiting.pop(0)
        if isinstance(message, Closed):
            self.ended = message
        if isinstance(message, ErrorReport) and message.code in ADMISSION_ERRORS:
            self._refusal = message
        return message

    async def receive_more(self) -> ServerMessage:
        """Wait for the server's next message; any end raises, with the reason that it gave.

        Raises as `receive` does.
        """
        message = await self.receive()
        if message is None:
            code, reason = self.closed_with
            raise errors.SessionClosedError(code, reason or self.end_reason)
        return message

    @property
    def end_reason(self) -> str:
        """Why the session ended, in the client's words or the server's; empty before."""
        return "" if self.ended is None else self.ended.client_reason or self.ended.reason

    def __aiter__(self) -> ClientSession:
        return self

    async def __anext__(self) -> ServerMessage:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    @property
    def closed_with(self) -> tuple[int, str]:
        """Code and reason of the close, maybe before the last messages; 1006 without a close."""
        return self._websocket.closed or (errors.ABNORMAL_CLOSURE, "")

    def _end(self, closed: errors.SessionClosedError) -> None:
        in_order = self.connection.closed_with is not None  # reported before: nothing new
        if not in_order:
            in_order = self.connection.connection_closed(closed.code, closed.reason)
        if self._refusal is not None:
            raise errors.SessionRefusedError(self._refusal) from None
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
    resume: bool = False,
    on_connection: OnConnection | None = None,
) -> AsyncIterator[ClientSession]:
    """Open a session's connection, before its first message; cancelled or left, it is closed.

    Args:
        url: of the server; see `endpoint`.
        dialect: a name of `protocol.wire.dialects.DIALECTS`.
        tls: for `wss://`; None trusts the system's authorities.
        key: the API key, if the server needs one.
        resume: come back to the session when the connection is lost, where the server can.
        on_connection: called with each attempt to come back, and when the session goes on.

    Raises:
        AddressError: the address is invalid.
        CannotConnectError: no server answers there.
        HandshakeRejectedError: the server answered with an HTTP error.
        LocalProtocolError: an unknown dialect, a mode that it does not have, or an invalid key.
    """
    with errors.as_client_errors():
        ClientConnection(dialect, mode)  # raises before the connection is made
    address = endpoint(url, mode, dialect)
    frame_bytes_max = OF_MODE[mode].frame_bytes_max
    open_ = partial(open_socket, frame_bytes_max=frame_bytes_max, tls=tls, key=key)
    opening: AbstractAsyncContextManager[FrameSocket] = open_(address)
    if resume:
        opening = ResumingSocket(
            address,
            open_=open_,
            frame_bytes_max=frame_bytes_max,
            on_connection=on_connection or (lambda _: None),
        ).opened()
    async with opening as socket:
        yield ClientSession(socket, mode=mode, dialect=dialect)


def endpoint(url: str, mode: Mode, dialect: str = "realtime") -> str:
    """Complete a server's address, as `normal_url` takes it; raises `AddressError`.

    The mode goes into the query, or into the label in which 002 carries it. The dialect's endpoint
    replaces a missing path, or that of `realtime`.
    """
    parts = urlsplit(normal_url(url))
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "mode"]
    if (asked := dict(parse_qsl(parts.query)).get("mode", mode)) != mode:
        raise errors.AddressError(f"{url!r} asks for mode {asked}, not {mode}: leave the mode out")
    path = parts.path if parts.path.strip("/") else REALTIME_PATH
    paths = {"legacy-chat": CHAT_PATH, "live": LIVE_PATH, "openai": REALTIME_PATH}
    label = f"{'adx' if mode == 'audio' else 'omni'}_{uuid4().hex[:12]}"
    paths["legacy-duplex"] = f"{DUPLEX_PATH}/{label}"
    if dialect == "openai-transcription":
        query.append(("intent", "transcription"))
    elif dialect == "vllm-omni":
        query += [("duplex", "1"), ("mode", mode)]
    elif dialect not in paths:
        query.append(("mode", mode))
    elif path == REALTIME_PATH:
        path = paths[dialect]
    return urlunsplit((parts.scheme, parts.netloc, path, urlencode(query), ""))


def normal_url(url: str) -> str:
    """Write an address as `ws://` or `wss://`; raises `AddressError`.

    `http://` and `https://` are those of the console, in a browser; HOST:PORT has no TLS.
    """
    given = f"ws://{url}" if _HOST_PORT.fullmatch(url) else url
    try:
        parts = urlsplit(given)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        is_address = scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise errors.AddressError(f"{url!r} is not the address of a server, such as 127.0.0.1:8006")
    return parts._replace(scheme=scheme).geturl()
