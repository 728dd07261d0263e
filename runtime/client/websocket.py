"""A client's WebSocket on AnyIO: the sans-IO protocol of `websockets` over a TCP or TLS stream.

- One task receives and one sends. A third one reads: it answers pings and the peer's close even
  without a receiver, until `MESSAGES_WAITING_MAX` messages wait; then TCP slows the peer.
- A message above the limit is not taken (1009) and not sent. A long one is sent in pieces: it is
  not copied as a whole, and pongs pass between the pieces.
- A cancelled send may have left half a message, so the connection is dropped.
- Leaving the block closes: later messages are discarded, and the peer's answer is awaited for at
  most `CLOSE_WAIT_S`; after a cancellation or an interrupt `HURRY_WAIT_S`.
- No compression, which costs ten times what it saves; no pings.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import urlsplit

import anyio
import orjson
from anyio.abc import ByteStream, TaskGroup
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidState, InvalidStatus, InvalidURI
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from .errors import (
    ABNORMAL_CLOSURE,
    AddressError,
    CannotConnectError,
    HandshakeRejectedError,
    LocalProtocolError,
    SessionClosedError,
)


@asynccontextmanager
async def background() -> AsyncIterator[TaskGroup]:
    """A task group that is cancelled when the block is left.

    An error of the block, and its Ctrl-C, is raised as it is and not in a group.
    """
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


CONNECT_WAIT_S: Final = 10.0
"""TCP, TLS and the handshake across the world take a second; a silent port is given up."""
CLOSE_WAIT_S: Final = 2.0
"""A live peer answers a close within a round trip; others are given up."""
HURRY_WAIT_S: Final = 0.2
"""After Ctrl-C a near peer has answered; others are given up."""
READ_BYTES: Final = 262_144
"""A second of speech in one read."""
PIECE_BYTES: Final = 1_048_576
"""Ten seconds of audio in one piece; a video of a chat in dozens."""
MESSAGES_WAITING_MAX: Final = 4
"""A burst of small messages does not stall the reader; four of the largest fit in memory."""
TOKEN: Final = r"[A-Za-z0-9._~+/-]{1,512}=*"
"""The syntax of a bearer token; nothing else is allowed in the header."""
MESSAGE_CHARS_SHOWN: Final = 200
"""Of an HTTP error's body: enough for a sentence, too little for a page of HTML."""

_LOST: Final = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


@asynccontextmanager
async def open_socket(
    address: str, *, frame_bytes_max: int, tls: ssl.SSLContext | None = None, key: str | None = None
) -> AsyncIterator[ClientSocket]:
    """Open a WebSocket; cancelled or left, it is closed.

    Args:
        address: `ws://` or `wss://`, complete.
        frame_bytes_max: larger messages are neither taken nor sent.
        tls: for `wss://`; None trusts the system's authorities.
        key: sent as a bearer token (RFC 6750, 2.1).

    Raises:
        AddressError: the address is invalid.
        CannotConnectError: the address does not answer as a WebSocket server.
        HandshakeRejectedError: the server answered with an HTTP error.
        LocalProtocolError: the key is invalid.
    """
    if key is not None and not re.fullmatch(TOKEN, key):
        raise LocalProtocolError("a key has only letters, digits and -._~+/")  # and is not shown
    wait_s = HURRY_WAIT_S
    socket = await _open(address, frame_bytes_max, tls, key)
    async with background() as tasks:
        tasks.start_soon(socket.read)
        try:
            yield socket
            wait_s = CLOSE_WAIT_S
        except Exception:
            wait_s = CLOSE_WAIT_S
            raise
        finally:
            await socket.aclose(wait_s)


class ClientSocket:
    """An open WebSocket; `open_socket` makes and closes it.

    The handshake of `protocol` is done; messages above `frame_bytes_max` are not sent.
    """

    def __init__(self, stream: ByteStream, protocol: ClientProtocol, frame_bytes_max: int) -> None:
        self._stream = stream
        self._protocol = protocol
        self._frame_bytes_max = frame_bytes_max
        self._sending = anyio.Lock()
        self._ended = anyio.Event()
        self._to_inbox, self._inbox = anyio.create_memory_object_stream[str | bytes](
            MESSAGES_WAITING_MAX
        )
        self._is_dropped = False
        self._pieces: list[bytes] = []
        self._is_text = True

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and reason of the close; None while the WebSocket is open."""
        if self._protocol.state is State.OPEN and not self._ended.is_set():
            return None
        close = self._protocol.close_rcvd
        if close is None and self._protocol.parser_exc is not None:
            close = self._protocol.close_sent  # we could not take a message, and said why
        return (ABNORMAL_CLOSURE, "") if close is None else (int(close.code), close.reason)

    async def receive(self) -> str | bytes:
        """Wait for a message; text as `str`. Raises `SessionClosedError` if there is none."""
        try:
            return await self._inbox.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise self._closed() from None

    async def send(self, message: str) -> None:
        """Send a text message; cancelled, it drops the connection.

        Raises:
            LocalProtocolError: it is above the limit; nothing was sent.
            SessionClosedError: it is not sent.
        """
        data = message.encode()
        if len(data) > self._frame_bytes_max:
            text = f"a message of {len(data)} bytes, at most {self._frame_bytes_max} are accepted"
            raise LocalProtocolError(text)
        try:
            async with self._sending:
                for piece in self._write(data):
                    await self._flush(piece)
        except (InvalidState, *_LOST):
            with anyio.move_on_after(CLOSE_WAIT_S):
                await self._ended.wait()  # the peer's reason may still be on its way
            raise self._closed() from None

    async def aclose(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Close, waiting so long for the peer's answer; cancelled or not, it is closed."""
        self._inbox.close()
        with anyio.move_on_after(wait_s, shield=True):
            with suppress(InvalidState, *_LOST):
                async with self._sending:
                    self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                    await self._flush(self._protocol.data_to_send())
            await self._ended.wait()
        await anyio.aclose_forcefully(self._stream)

    async def read(self) -> None:
        """Read to the end of the connection; `open_socket` runs it in a task."""
        try:
            while True:  # first the bytes that came with the handshake
                if answers := self._protocol.data_to_send():
                    async with self._sending:
                        await self._flush(answers)
                await self._take()
                self._protocol.receive_data(await self._stream.receive(READ_BYTES))
        except _LOST:
            with suppress(EOFError):
                self._protocol.receive_eof()
        finally:
            self._ended.set()
            self._to_inbox.close()

    # -- what came ------------------------------------------------------------------------------

    async def _take(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                await self._take_frame(event)
        if self._protocol.state is not State.OPEN:
            self._to_inbox.close()

    async def _take_frame(self, frame: Frame) -> None:
        if frame.opcode not in {Opcode.TEXT, Opcode.BINARY, Opcode.CONT}:
            return  # the protocol has answered it
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._pieces.append(bytes(frame.data))
        if not frame.fin:
            return
        data = b"".join(self._pieces)
        self._pieces.clear()
        # Invalid UTF-8 goes on as bytes: every dialect refuses a binary message.
        message: str | bytes = data
        if self._is_text:
            with suppress(UnicodeDecodeError):
                message = data.decode()
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._to_inbox.send(message)  # left already: it is thrown away

    # -- what goes out --------------------------------------------------------------------------

    def _write(self, data: bytes) -> Iterator[list[bytes]]:
        if self._is_dropped:
            raise self._closed()
        view = memoryview(data)
        for start in range(0, max(len(data), 1), PIECE_BYTES):
            piece, is_last = view[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(data)
            if start == 0:
                self._protocol.send_text(piece, fin=is_last)
            else:
                self._protocol.send_continuation(piece, fin=is_last)
            yield self._protocol.data_to_send()

    async def _flush(self, writes: list[bytes]) -> None:
        try:
            for data in writes:
                if data:  # an empty one is a half-close, which TLS does not have: `aclose` closes
                    await self._stream.send(data)
        except BaseException:
            self._is_dropped = True
            await anyio.aclose_forcefully(self._stream)
            raise

    def _closed(self) -> SessionClosedError:
        return SessionClosedError(*(self.closed or (ABNORMAL_CLOSURE, "")))


# -- opening ------------------------------------------------------------------------------------


async def _open(
    address: str, frame_bytes_max: int, tls: ssl.SSLContext | None, key: str | None
) -> ClientSocket:
    try:
        protocol = ClientProtocol(parse_uri(address), max_size=frame_bytes_max)
    except (InvalidURI, UnicodeError):
        raise AddressError(f"{address!r} is not the address of a WebSocket") from None
    why, may_pass, is_tls = f"no WebSocket within {CONNECT_WAIT_S:g} s", True, False
    with anyio.move_on_after(CONNECT_WAIT_S):
        try:
            stream = await _dial(protocol, tls)
            await _shake_hands(stream, protocol, key)
            return ClientSocket(stream, protocol, frame_bytes_max)
        except ssl.SSLError as error:
            why, may_pass, is_tls = reason_of(error), False, True
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            why = "the connection was closed"
        except OSError as error:
            why = reason_of(error)
        except InvalidStatus as error:
            response = error.response
            raise HandshakeRejectedError(response.status_code, _reason_in(response.body)) from None
        except InvalidHandshake:
            why, may_pass = "what answers there does not speak WebSocket", False
    raise cannot_connect(address, why, may_pass=may_pass, is_tls=is_tls)


def cannot_connect(
    address: str, why: str, *, may_pass: bool = True, is_tls: bool = False
) -> CannotConnectError:
    """Make the error of an address, without what a command added to it."""
    parts = urlsplit(address)
    text = f"cannot connect to {parts.scheme}://{parts.netloc.rpartition('@')[2]}: {why}"
    return CannotConnectError(text, may_pass=may_pass, is_tls=is_tls)


async def _dial(protocol: ClientProtocol, tls: ssl.SSLContext | None) -> ByteStream:
    uri = protocol.uri
    if not uri.secure:
        return await anyio.connect_tcp(uri.host, uri.port)
    # Many servers end TLS without a close_notify; the WebSocket's own close counts.
    return await anyio.connect_tcp(
        uri.host, uri.port, tls=True, ssl_context=tls, tls_standard_compatible=False
    )


async def _shake_hands(stream: ByteStream, protocol: ClientProtocol, key: str | None) -> None:
    request = protocol.connect()
    if key is not None:
        request.headers["Authorization"] = f"Bearer {key}"
    try:
        protocol.send_request(request)
        for data in protocol.data_to_send():
            await stream.send(data)
        while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
            try:
                protocol.receive_data(await stream.receive(READ_BYTES))
            except anyio.EndOfStream:
                protocol.receive_eof()
        if protocol.handshake_exc is not None:
            if isinstance(protocol.handshake_exc.__cause__, EOFError):
                raise anyio.EndOfStream
            raise protocol.handshake_exc
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise


def _reason_in(body: bytes | bytearray | None) -> str:
    """The text of an HTTP error: the `message` of our JSON, else the start of the body."""
    try:
        found = orjson.loads(body or b"")
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        text = found["message"]
        if isinstance(found.get("allowed"), list):
            text += f", allowed is {', '.join(map(str, found['allowed']))}"
    else:
        text = (body or b"").decode(errors="replace") or "it does not say why"
    return " ".join(text.split())[:MESSAGE_CHARS_SHOWN]


def reason_of(error: OSError) -> str:
    """The system's message, unwrapped from attempts at several addresses, or the TLS library's."""
    if isinstance(error, ssl.SSLError):
        found = getattr(error, "verify_message", None) or error.reason or str(error)
        return f"no TLS, {str(found).replace('_', ' ').lower()}"
    attempts: BaseException | None = error.__cause__ or error
    while isinstance(attempts, BaseExceptionGroup):
        attempts = attempts.exceptions[0]
    number = attempts.errno if isinstance(attempts, OSError) else None
    if number is not None and number in errno.errorcode:
        return os.strerror(number).lower()
    return (error.strerror or str(error)).lower()
