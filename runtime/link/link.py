"""One link: its address, its greeting, and its work, the same at both ends.

It sends, receives, beats, and says when it is lost:

- `send` never blocks. A link is lost at once, and for good, when the other end leaves, breaks the
  protocol, is silent, or takes nothing of what waits for it.
- `run` owns the connection's tasks, and closes the connection at its end.
- A socket of ours is written at once and read into one buffer, without a task, a copy or a wakeup
  in between: a link costs several times as much with them (`SocketPipe`). TLS and asyncio's own
  transports go through their stream (`StreamPipe`).

The greeting: versions, a mutual proof of a shared token, then the worker's model.

    gateway -> { link: [major, minor], software, nonce }
    worker  -> { link: [major, minor], software, nonce }
    gateway -> { proof }
    worker  -> { proof }
    worker  -> { info }                    any of them instead: { refused: text }

- The token is never sent. A proof is the HMAC-SHA256 of the sender's role and both nonces, with the
  token as key (empty without one). A proof that was recorded, or came from this end, is refused.
- The worker's minor version is the gateway's, or the one before: workers are updated last.
- Each message is one JSON frame of the urgent stream, of at most `HELLO_BYTES_MAX` bytes. Unknown
  fields are ignored here, and only here: a newer gateway must be able to read an older greeting.

A worker listens at `unix:PATH` or `tcp:HOST:PORT`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal, TypeVar

import anyio
import attrs
import orjson
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from recorder.format.format import Piece
from recorder.format.mapping import MappingError, plain_of, value_of

from ..access.origins import is_loopback, read_authority
from ..model.backends.base import BackendInfo
from ..settings.settings import shown
from .messages import (
    FRAME_BYTES_MAX,
    HEARTBEAT_S,
    HELLO_BYTES_MAX,
    READ_BYTES,
    SILENT_HEARTBEATS_MAX,
    URGENT,
    WRITE_BYTES,
    Frame,
    Heartbeat,
    Inbox,
    LinkError,
    LinkLeft,
    LinkRefused,
    Message,
    Outbox,
    Receiver,
    Sender,
    stream_of,
)

# -- the worker's address --------------------------------------------------------------------------

UNIX_PATH_BYTES_MAX: Final = 100
"""The system's own bound is 107 on Linux and 103 elsewhere."""


@attrs.frozen
class UnixAddress:
    """A socket in the file system."""

    path: Path

    is_local = True

    def __str__(self) -> str:
        return f"unix:{self.path}"


@attrs.frozen
class TcpAddress:
    """A host (IPv6 without brackets) and a port."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """No other machine can reach it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


WorkerAddress = UnixAddress | TcpAddress


def read_address(text: str) -> WorkerAddress:
    """Parse an address; `ValueError` if it is of neither kind."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        if len(rest.encode()) > UNIX_PATH_BYTES_MAX:
            raise ValueError(f"a path of more than {UNIX_PATH_BYTES_MAX} bytes is not a socket's")
        return UnixAddress(Path(rest))
    if kind == "tcp" and (found := read_authority(rest)) is not None and found.port is not None:
        return TcpAddress(found.host, found.port)
    raise ValueError(f"{shown(text)} is not an address: unix:PATH or tcp:HOST:PORT")


async def connect(address: WorkerAddress, tls: ssl.SSLContext | None) -> ByteStream:
    """Connect to a worker; `OSError` if nothing listens there, or TLS fails."""
    if isinstance(address, UnixAddress):
        return await anyio.connect_unix(address.path)
    if tls is None:
        return await anyio.connect_tcp(address.host, address.port)
    try:
        return await anyio.connect_tcp(
            address.host, address.port, ssl_context=tls, tls_standard_compatible=False
        )
    except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise OSError(f"no TLS at {address}") from error


# -- the greeting ----------------------------------------------------------------------------------

LINK_VERSION: Final = (1, 0)
"""The protocol of a link. A change that the other end must know of is a new minor version, one that
an end of the version before cannot work with is a new major one."""
VERSION: Final = version("antiphon")
"""Said in the greeting, for people."""
NONCE_BYTES: Final = 32
"""Never drawn twice."""
TOKEN_CHARS_MIN: Final = 16
"""A shorter token could be guessed from one greeting that was overheard."""
TOKEN_BYTES_MAX: Final = 4096
"""A longer file is not a token."""

Role = Literal["gateway", "worker"]
Body = TypeVar("Body", bound=attrs.AttrsInstance)


@attrs.frozen(kw_only=True)
class _Greeting:
    link: tuple[int, int]
    software: str
    nonce: str


@attrs.frozen(kw_only=True)
class _Proof:
    proof: str


@attrs.frozen(kw_only=True)
class _Info:
    info: BackendInfo


@attrs.frozen(kw_only=True)
class _Refused:
    refused: str


def read_token(path: Path) -> str:
    """Read a token from its file; `ValueError` if it is unreadable, or too short."""
    try:
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX + 1).decode("utf-8").strip()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8") from error
    if not TOKEN_CHARS_MIN <= len(token.encode()) <= TOKEN_BYTES_MAX:
        raise ValueError(f"{path}: a token of {len(token)} characters, at least {TOKEN_CHARS_MIN}")
    return token


async def greet_worker(wire: Wire, token: str) -> BackendInfo:
    """Greet as a gateway, and return the worker's model; errors as of `greet_gateway`."""
    ours = _greeting()
    await wire.send(ours)
    theirs = await wire.receive(_Greeting)
    await _check_version(wire, gateway=ours.link, worker=theirs.link)
    await wire.send(_prove("gateway", token, ours.nonce, theirs.nonce))
    await _check_proof(wire, "worker", token, ours.nonce, theirs.nonce)
    return (await wire.receive(_Info)).info


async def greet_gateway(wire: Wire, token: str, info: BackendInfo) -> None:
    """Greet as a worker, and describe the model.

    Raises:
        LinkRefused: one end refuses the other: its token is wrong, or its version.
        LinkError: the other end does not greet, or leaves.
    """
    theirs = await wire.receive(_Greeting)
    ours = _greeting()
    await wire.send(ours)
    await _check_version(wire, gateway=theirs.link, worker=ours.link)
    await _check_proof(wire, "gateway", token, theirs.nonce, ours.nonce)
    await wire.send(_prove("worker", token, theirs.nonce, ours.nonce))
    await wire.send(_Info(info=info))


class Wire:
    """One end of a connection that greets; then `stream` and `inbox` belong to the link.

    `early`: frames of the link that came with the greeting.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.inbox = Inbox(HELLO_BYTES_MAX)
        self.early: list[tuple[int, Frame]] = []

    def over(self) -> None:
        """The greeting is over: larger frames may come."""
        self.inbox.frame_bytes_max = FRAME_BYTES_MAX

    async def send(self, message: attrs.AttrsInstance) -> None:
        """Send a message of the greeting; `LinkError` if the other end is gone."""
        outbox = Outbox()
        outbox.put(URGENT, [orjson.dumps(plain_of(message))])
        try:
            while piece := outbox.take():
                await self.stream.send(b"".join(piece))
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise LinkLeft("it disconnected during the greeting") from error

    async def receive(self, kind: type[Body]) -> Body:
        """Wait for a message of the greeting; `LinkError` if it is another, or none comes."""
        while not self.early:
            try:
                self.early += self.inbox.feed(await self.stream.receive(READ_BYTES))
            except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
                raise LinkLeft("it disconnected during the greeting") from error
        stream, frame = self.early.pop(0)
        if stream != URGENT:
            raise LinkError("it did not greet")
        try:
            body = orjson.loads(frame)
            if "refused" in body:
                raise LinkRefused(f"it refuses: {shown(value_of(_Refused, body).refused)}")
            known = {field.name for field in attrs.fields(kind)}
            return value_of(kind, {name: body[name] for name in known & body.keys()})
        except (ValueError, TypeError, AttributeError, MappingError) as error:
            raise LinkError(f"it did not greet: {error}") from error


def _greeting() -> _Greeting:
    nonce = secrets.token_hex(NONCE_BYTES)
    return _Greeting(link=LINK_VERSION, software=VERSION, nonce=nonce)


def _prove(role: Role, token: str, gateway: str, worker: str) -> _Proof:
    text = f"antiphon link {role} {gateway} {worker}"
    return _Proof(proof=hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest())


async def _check_proof(wire: Wire, role: Role, token: str, gateway: str, worker: str) -> None:
    found = (await wire.receive(_Proof)).proof
    if not hmac.compare_digest(found.encode(), _prove(role, token, gateway, worker).proof.encode()):
        await _refuse(wire, "the token is wrong")


async def _check_version(wire: Wire, *, gateway: tuple[int, int], worker: tuple[int, int]) -> None:
    if gateway[0] != worker[0] or not gateway[1] - 1 <= worker[1] <= gateway[1]:
        ours, theirs = (".".join(map(str, version)) for version in (gateway, worker))
        await _refuse(wire, f"a gateway of link version {ours} cannot use a worker of {theirs}")


async def _refuse(wire: Wire, text: str) -> None:
    with suppress(LinkError):  # It may refuse too, and have left.
        await wire.send(_Refused(refused=text))
    raise LinkRefused(text)


# -- the link --------------------------------------------------------------------------------------

_logger = logging.getLogger("antiphon.link")

_BROKEN: Final = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


PIECES_MAX: Final = 1024
"""Of one call to the system, which takes no more (IOV_MAX)."""


class Link:
    """A connection after its greeting.

    Args:
        wire: the end that greeted.
        on_message: called with each message of the other end, in order; `LinkError`: it breaks the
            protocol.
        on_lost: called once, when the link is lost, with the reason.
        on_beat: called before each heartbeat.
    """

    def __init__(
        self,
        wire: Wire,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        wire.over()
        self._stream, self._inbox, self._early = wire.stream, wire.inbox, wire.early
        self._pipe = pipe_of(wire.stream)
        self._on_message, self._on_lost, self._on_beat = on_message, on_lost, on_beat
        self._outbox = Outbox()
        self._sender, self._receiver = Sender(), Receiver()
        self._rest: Sequence[Piece] = ()
        self._waiting = anyio.Event()
        self._scope = anyio.CancelScope()
        self._silent = self._stuck = 0
        self.reason = ""
        self.lost = anyio.Event()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._outbox.bytes

    def send(self, message: Message, stream: int | None = None) -> None:
        """Send a message; never blocks.

        `LinkError`: the link is lost. `RecordInvalid`: the message is too large; nothing is sent.
        """
        if self.reason:
            raise LinkError(self.reason)
        stream = stream_of(message) if stream is None else stream
        parts = self._sender.encode(message, stream)
        try:
            self._outbox.put(stream, parts)
        except LinkError as error:
            self.lose(f"it does not receive: {error}")
            raise
        if not self._rest:
            self._send_now()

    def _send_now(self) -> None:
        """Send one write's worth without waiting, and leave the rest to `_write`."""
        try:
            self._rest = self._pipe.send_now(self._pieces()) or self._pieces()
        except OSError:
            self.lose("it closed the connection")
            raise LinkError(self.reason) from None
        if self._rest:
            self._waiting.set()

    def lose(self, reason: str) -> None:
        """Give the link up; a second call does nothing."""
        if not self.reason:
            self.reason = reason
            self.lost.set()
            self._on_lost(reason)
            self._scope.cancel()

    async def run(self) -> None:
        """Send, also heartbeats, and receive until the link is lost; cancelled, it is lost too."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read)
                    tasks.start_soon(self._write)
                    tasks.start_soon(self._send_heartbeats)
        finally:
            self.lose("it was closed here")
            await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            for stream, frame in self._early:
                self._take(stream, frame)
            while True:
                data = await self._pipe.receive()
                self._silent = 0
                for stream, frame in self._inbox.feed(data):
                    self._take(stream, frame)
        except LinkError as error:
            self.lose(f"it broke the protocol: {error}")
        except (anyio.EndOfStream, *_BROKEN):
            self.lose("it closed the connection")
        except Exception:  # A bug of ours costs this link, and no other.
            _logger.exception("a message could not be taken")
            self.lose("a message could not be taken")

    def _take(self, stream: int, frame: Frame) -> None:
        message = self._receiver.decode(stream, frame)
        if not isinstance(message, Heartbeat):
            self._on_message(message)

    async def _write(self) -> None:
        try:
            while True:
                if not self._rest:
                    self._waiting = anyio.Event()
                    await self._waiting.wait()
                self._stuck = 0
                await self._pipe.send(self._rest)
                self._rest = self._pieces()
        except _BROKEN:
            self.lose("it closed the connection")

    def _pieces(self) -> list[Piece]:
        """The next pieces, for one write."""
        pieces: list[Piece] = []
        before = self._outbox.bytes
        while before - self._outbox.bytes < WRITE_BYTES and (piece := self._outbox.take()):
            pieces += piece
        return pieces

    async def _send_heartbeats(self) -> None:
        while True:
            await anyio.sleep(HEARTBEAT_S)
            self._silent += 1
            self._stuck += bool(self._rest)
            if self._silent > SILENT_HEARTBEATS_MAX:
                self.lose(f"it was silent for {SILENT_HEARTBEATS_MAX * HEARTBEAT_S:g} s")
            elif self._stuck > SILENT_HEARTBEATS_MAX:
                self.lose(f"it took nothing for {SILENT_HEARTBEATS_MAX * HEARTBEAT_S:g} s")
            else:
                with suppress(LinkError):  # too much waits: it is lost
                    self._on_beat()
                    self.send(Heartbeat())


def pipe_of(stream: ByteStream) -> SocketPipe | StreamPipe:
    """The fastest way to use a connection, which remains its owner's to close."""
    if isinstance(stream, SocketStream):  # not that of TLS
        raw = stream.extra(SocketAttribute.raw_socket)
        if isinstance(raw, socket.socket):  # not that of an asyncio transport
            return SocketPipe(raw)
    return StreamPipe(stream)


class SocketPipe:
    """A connected socket that does not block."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = memoryview(bytearray(READ_BYTES))

    def send_now(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send what the system takes without waiting; return the rest."""
        try:
            sent = self._socket.sendmsg(pieces[:PIECES_MAX])
        except BlockingIOError:
            return pieces
        for number, piece in enumerate(pieces):
            if sent < len(piece):
                return [memoryview(piece)[sent:], *pieces[number + 1 :]]
            sent -= len(piece)
        return ()

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send whenever the system takes some."""
        while pieces := self.send_now(pieces):
            await anyio.wait_writable(self._socket)

    async def receive(self) -> Piece:
        """Wait for bytes, valid until the next call; `EndOfStream` at the end."""
        while True:
            await anyio.wait_readable(self._socket)
            try:
                count = self._socket.recv_into(self._buffer)
            except BlockingIOError:  # another reason to wake up
                continue
            if not count:
                raise anyio.EndOfStream
            return self._buffer[:count]


class StreamPipe:
    """A stream of AnyIO."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def send_now(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Send nothing: a stream may wait."""
        return pieces

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send in one call."""
        await self._stream.send(b"".join(pieces))

    async def receive(self) -> Piece:
        """Wait for bytes."""
        return await self._stream.receive(READ_BYTES)
