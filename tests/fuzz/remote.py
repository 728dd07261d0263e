"""A server at an address: cases over real sockets, with their faults.

- The client's end of a WebSocket is written here, with the faults that libraries avoid: messages in
  fragments with pings between them, byte by byte, invalid or too big. The sans-IO protocol of
  `websockets` reads all the time: the end may arrive during a send.
- After each case a well-behaved client must get a session. `check` asks `/ready`, if there is one:
  a server that lost its slots is not ready.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import anyio
import attrs
from anyio.abc import ByteStream, SocketAttribute
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from protocol.values.errors import CLOSE_NORMAL
from protocol.values.limits import CHAT_FRAME_BYTES_MAX
from runtime.serve.routing import REALTIME_PATH
from tests.fuzz.case import Case, Outcome
from tests.fuzz.judge import ABNORMAL, Judge
from tests.fuzz.play import Broken, Connect, FuzzerError, Pace, Player, Wire, own_of, probe

# -- a WebSocket with faults ----------------------------------------------------------------------

SEND_WAIT_S: Final = 15.0
"""A server that takes nothing for so long has stopped reading, which it never should."""
READ_BYTES: Final = 262_144
"""A second of speech in one read."""
CLOSE_WAIT_S: Final = 2.0
"""A live server answers a close within a round trip."""
FRAGMENT_BYTES: Final = 7
"""Cuts characters and base64 in pieces; frames may end anywhere."""
FRAGMENTS_MAX: Final = 64
"""Then the rest in one: a second of sound in pieces of 7 bytes would be 12,000 frames."""
DRIBBLE_BYTES: Final = 64
"""The head of a frame and a little, byte by byte; then the rest."""
PIECE_BYTES: Final = 65_536
"""A message that is too big is made in such pieces, and never held."""
TOO_BIG_BYTES: Final = CHAT_FRAME_BYTES_MAX + PIECE_BYTES
"""The bytes of a message larger than any mode takes."""
LOST: Final = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
"""Exceptions of a connection that is over."""


class SocketWire:
    """One WebSocket over TCP, written by hand; the target closes it, and did the handshake."""

    def __init__(self, stream: ByteStream, protocol: ClientProtocol, judge: Judge) -> None:
        self._stream = stream
        self._protocol = protocol
        self._judge = judge
        self._sending = anyio.Lock()
        self._ended = anyio.Event()
        self._reading = anyio.CancelScope()
        self._pieces: list[bytes] = []
        self._is_text = True
        self._fragments = self._dribbles = False
        self._left = False

    # -- sending --------------------------------------------------------------------------------

    async def send(self, frame: str | bytes | None) -> None:
        """As `Wire`."""
        opcode = Opcode.BINARY if isinstance(frame, bytes) else Opcode.TEXT
        if frame is None:
            await self._put(self._too_big())
            return
        data = frame.encode() if isinstance(frame, str) else frame
        for piece in self._cut(opcode, data):
            await self._put([piece])

    def _too_big(self) -> Iterator[bytes]:
        """A frame above every limit, piece by piece, until the connection ends."""
        yield b"\x81\xff" + struct.pack("!Q4x", TOO_BIG_BYTES)
        piece = bytes(PIECE_BYTES)
        for _ in range(TOO_BIG_BYTES // PIECE_BYTES):
            if self._judge.is_over:
                return
            yield piece

    def _cut(self, opcode: Opcode, data: bytes) -> list[bytes]:
        """A message as frames, with their masks."""
        count = FRAGMENTS_MAX if self._fragments else 0
        starts = range(0, min(len(data), count * FRAGMENT_BYTES), FRAGMENT_BYTES)
        made: list[bytes] = []
        for start in starts:
            piece = Frame(opcode, data[start : start + FRAGMENT_BYTES], fin=False)
            made += [piece.serialize(mask=True), Frame(Opcode.PING, b"?").serialize(mask=True)]
            opcode = Opcode.CONT
        rest = data[len(starts) * FRAGMENT_BYTES :]
        return [*made, Frame(opcode, rest).serialize(mask=True)]

    async def raw(self, data: bytes, /) -> None:
        """As `Wire`."""
        await self._put([data])

    async def _put(self, pieces: Iterable[bytes]) -> None:
        """Send bytes; a server that does not take them is a finding."""
        try:
            async with self._sending:
                for data in pieces:
                    with anyio.fail_after(SEND_WAIT_S):
                        await self._put_piece(data)
            with anyio.fail_after(SEND_WAIT_S):
                await self._answer()
        except TimeoutError:
            self._judge.found("hang", "the server reads no more")
            raise Broken from None
        except LOST:
            raise Broken from None

    async def _put_piece(self, data: bytes) -> None:
        if self._dribbles:
            for at in range(min(len(data), DRIBBLE_BYTES)):
                await self._stream.send(data[at : at + 1])
            data = data[DRIBBLE_BYTES:]
        if data:
            await self._stream.send(data)

    async def _answer(self) -> None:
        """Send pongs and the answer to a close, after a message in progress; reading goes on."""
        if self._sending.locked():
            return
        async with self._sending:
            if answers := b"".join(self._protocol.data_to_send()):
                await self._stream.send(answers)

    async def fault(self, name: str) -> None:
        """As `Wire`."""
        match name:
            case "fragments":
                self._fragments = True
            case "dribble":
                self._dribbles = True
            case "ping":
                await self._put([Frame(Opcode.PING, b"ping").serialize(mask=True)])
                await self._put([Frame(Opcode.PONG, b"unasked").serialize(mask=True)])
            case "stall":
                self._reading.cancel()
            case "half_close":
                with suppress(NotImplementedError, *LOST):  # TLS has no half-close
                    await self._stream.send_eof()
            case "reset":
                self._left = True
                held = self._stream.extra(SocketAttribute.raw_socket)
                with suppress(OSError):
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await anyio.aclose_forcefully(self._stream)

    async def leave(self) -> None:
        """As `Wire`; the wait for the answer is bounded."""
        if self._left:
            return
        self._left = True
        if not self._judge.is_over:
            self._judge.broke = True
            with suppress(Broken):
                reason = struct.pack("!H", CLOSE_NORMAL)
                await self._put([Frame(Opcode.CLOSE, reason).serialize(mask=True)])
            if not self._reading.cancel_called:
                with anyio.move_on_after(CLOSE_WAIT_S):
                    await self._ended.wait()
        await anyio.aclose_forcefully(self._stream)

    # -- reading --------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read to the end of the connection, or until the client stalls."""
        with self._reading:
            try:
                while True:
                    for event in self._protocol.events_received():
                        if isinstance(event, Frame):
                            self._take(event)
                    with suppress(*LOST):  # received data can still be read
                        await self._answer()
                    self._protocol.receive_data(await self._stream.receive(READ_BYTES))
            except LOST:
                with suppress(EOFError):
                    self._protocol.receive_eof()
            told = self._protocol.close_rcvd
            self._judge.closed(*((ABNORMAL, "") if told is None else (told.code, told.reason)))
            self._ended.set()

    def _take(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE and (told := self._protocol.close_rcvd) is not None:
            self._judge.closed(told.code, told.reason)
        if frame.opcode not in {Opcode.TEXT, Opcode.BINARY, Opcode.CONT}:
            return
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._pieces.append(bytes(frame.data))
        if frame.fin:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._judge.heard(data.decode(errors="replace") if self._is_text else data)


# -- a server at an address -----------------------------------------------------------------------

CONNECT_WAIT_S: Final = 10.0
"""TCP, TLS and the handshake across the world take a second."""
WAIT_SCALE: Final = 0.005
"""A case's waits are made for clocks that leap."""
QUIET_S: Final = 0.1
"""A server's answer begins by then; the judge does not depend on it."""
SILENCE_S: Final = 0.01
"""On a loopback a message after the end arrives by then."""
READY_WAIT_S: Final = 45.0
"""Longer than the wait for a stalled reader and its slot's cleanup."""
READY_POLL_S: Final = 0.5
"""Between two requests."""


class CannotFuzzError(Exception):
    """Nothing can be fuzzed at that address; the text is one line."""


@attrs.frozen(kw_only=True)
class Address:
    """A server: `ws://` or `wss://` with host, port and a path prefix, and an API key, or None.

    `tls` is for `wss://`; None trusts the system's authorities.
    """

    origin: str
    key: str | None = None
    tls: ssl.SSLContext | None = None


def read_address(url: str, key: str | None = None) -> Address:
    """Parse a user's address, an origin or an endpoint; raises `CannotFuzzError`."""
    parts = urlsplit(url)
    if parts.scheme not in {"ws", "wss"} or not parts.hostname:
        raise CannotFuzzError(f"{url!r} is not an address of a WebSocket, ws://host:port")
    path = parts.path.removesuffix("/").removesuffix(REALTIME_PATH)
    return Address(origin=f"{parts.scheme}://{parts.netloc}{path}", key=key)


# -- the server -----------------------------------------------------------------------------------


class RemoteTarget:
    """Plays cases to a server at an address; an answer after `answer_s` is a hang."""

    is_local = False

    def __init__(self, address: Address, *, answer_s: float) -> None:
        self._address = address
        self._pace = Pace(
            answer_s=answer_s, quiet_s=QUIET_S, wait_scale=WAIT_SCALE, silence_s=SILENCE_S
        )
        self._has_ready = False

    def begin(self) -> None:
        """Check that a server is ready; raises `CannotFuzzError`."""
        status = self._ask_ready()
        if status == 503:
            raise CannotFuzzError(f"{self._address.origin} is not ready: /ready says 503")
        self._has_ready = status == 200

    def run(self, case: Case) -> Outcome:
        """Play one case and probe the server; raises `FuzzerError` if the fuzzer is broken."""
        judge = Judge(case)
        try:
            anyio.run(self._run, case, judge, backend="trio")
        except BaseExceptionGroup as group:
            raise own_of(group) from group
        return Outcome(findings=tuple(judge.findings), told=tuple(judge.told), pairs=judge.pairs)

    async def _run(self, case: Case, judge: Judge) -> None:
        connect: Connect = partial(_connect, self._address)
        try:
            await Player(case, judge, connect, self._pace).play()
            await probe(case, judge, connect, self._pace, with_sound=False)
        except* CannotFuzzError as group:
            judge.found("crash", "the server takes no connection", str(group.exceptions[0]))
        except* Exception as group:  # the server is elsewhere
            error = group.exceptions[0]
            raise FuzzerError(f"{type(error).__name__}: {error}") from group

    def check(self) -> str:
        """The server's fault after a rest, or empty."""
        if not self._has_ready:
            return ""
        until_s = time.monotonic() + READY_WAIT_S
        while (status := self._ask_ready()) != 200:
            if time.monotonic() > until_s:
                return f"/ready says {status or 'nothing'}"
            time.sleep(READY_POLL_S)
        return ""

    def _ask_ready(self) -> int:
        """The status of `/ready`; 0 without an answer; `CannotFuzzError` if it never answered."""
        parts = urlsplit(self._address.origin)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "wss" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=CONNECT_WAIT_S)
        try:
            connection.request("GET", f"{parts.path}/ready")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            if self._has_ready:
                return 0
            raise CannotFuzzError(f"no answer at {self._address.origin}: {error}") from error
        finally:
            connection.close()


@asynccontextmanager
async def _connect(address: Address, path: str, judge: Judge) -> AsyncIterator[Wire]:
    stream, protocol = await _open(address, path)
    wire = SocketWire(stream, protocol, judge)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.read)
        try:
            yield wire
        finally:
            with anyio.CancelScope(shield=True):
                await wire.leave()
                await anyio.aclose_forcefully(stream)
            tasks.cancel_scope.cancel()


async def _open(address: Address, path: str) -> tuple[ByteStream, ClientProtocol]:
    url = f"{address.origin}{path}"
    try:
        uri = parse_uri(url)
        protocol = ClientProtocol(uri, max_size=None)
        with anyio.fail_after(CONNECT_WAIT_S):
            stream: ByteStream
            if uri.secure:
                stream = await anyio.connect_tcp(
                    uri.host,
                    uri.port,
                    tls=True,
                    ssl_context=address.tls,
                    tls_standard_compatible=False,
                )
            else:
                stream = await anyio.connect_tcp(uri.host, uri.port)
            try:
                await _shake_hands(stream, protocol, address.key)
            except BaseException:
                await anyio.aclose_forcefully(stream)
                raise
    except InvalidStatus as error:
        raise CannotFuzzError(f"{url} answers {error.response.status_code}") from error
    except (InvalidURI, InvalidHandshake, TimeoutError, *LOST) as error:
        raise CannotFuzzError(f"no WebSocket at {url}: {error or 'no answer'}") from error
    return stream, protocol


async def _shake_hands(stream: ByteStream, protocol: ClientProtocol, key: str | None) -> None:
    request = protocol.connect()
    if key is not None:
        request.headers["Authorization"] = f"Bearer {key}"
    protocol.send_request(request)
    await stream.send(b"".join(protocol.data_to_send()))
    while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
        protocol.receive_data(await stream.receive(READ_BYTES))
    if protocol.handshake_exc is not None:
        raise protocol.handshake_exc
