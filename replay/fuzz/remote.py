"""A server at an address: cases over real sockets, with all that can go wrong on them.

The client's side of the WebSocket is the sans-IO protocol of `websockets`, for the handshake and
for what is received. What is sent is written frame by frame here, for a well-kept library sends
nothing that is wrong: messages in fragments with pings between them, byte after byte, frames that
are none.

After each case a client of good manners must get a session. `check` asks `/ready`, where there is
such a thing: a server whose slots are lost is not ready any more.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
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

from protocol.errors import CLOSE_NORMAL
from protocol.limits import CHAT_FRAME_BYTES_MAX
from runtime.routing import REALTIME_PATH

from .case import Case
from .judge import ABNORMAL, Judge
from .play import Broken, Connect, Pace, Player, Wire, probe_case
from .report import Outcome

CONNECT_WAIT_S: Final = 10.0
"""TCP, TLS and the handshake across the world take one."""
SEND_WAIT_S: Final = 15.0
"""A server that takes nothing for so long reads no more, and it always should."""
READ_BYTES: Final = 262_144
"""A second of speech in one read."""
CLOSE_WAIT_S: Final = 2.0
"""A server that lives answers a close within a round trip."""
FRAGMENT_BYTES: Final = 7
"""Cuts characters and base64 in pieces; no frame of a message need end where either does."""
FRAGMENTS_MAX: Final = 64
"""Then the rest in one: a second of sound in pieces of 7 bytes would be 12,000 frames."""
DRIBBLE_BYTES: Final = 64
"""The head of a frame and a little, byte by byte; then the rest."""
WAIT_SCALE: Final = 0.005
"""Waits of a case are for clocks that leap."""
QUIET_S: Final = 0.1
"""What a server has begun to answer by then is an answer; the judge does not count on it."""
SILENCE_S: Final = 0.01
"""On a loopback what must not come after the end is there by then."""
READY_WAIT_S: Final = 45.0
"""Longer than a stalled reader is waited for, and its slot's cleanup after it."""
READY_POLL_S: Final = 0.5
"""How often it is asked meanwhile."""
TOO_BIG_BYTES: Final = CHAT_FRAME_BYTES_MAX + 1024
"""What is sent where a message is larger than any mode takes."""
_LOST: Final = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class CannotFuzzError(Exception):
    """Nothing can be fuzzed at that address; the text is one line."""


@attrs.frozen(kw_only=True)
class Address:
    """Where a server is.

    Attributes:
        origin: `ws://` or `wss://` with host and port, and what comes before its paths.
        key: an API key; None where it asks for none.
        tls: for `wss://`; None trusts whom the system trusts.
    """

    origin: str
    key: str | None = None
    tls: ssl.SSLContext | None = None


def read_address(url: str, key: str | None = None) -> Address:
    """Read an address as users give it: an origin, or one of the endpoints there.

    Raises:
        CannotFuzzError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"ws", "wss"} or not parts.hostname:
        raise CannotFuzzError(f"{url!r} is no address of a WebSocket, ws://host:port")
    path = parts.path.removesuffix("/").removesuffix(REALTIME_PATH)
    return Address(origin=f"{parts.scheme}://{parts.netloc}{path}", key=key)


class SocketWire:
    """One WebSocket over TCP, sent by hand; made by `_connect`, which closes it.

    Args:
        stream: the connection.
        protocol: its handshake is done.
        judge: hears what comes.
    """

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
        """Send a message; None is one above every limit."""
        opcode = Opcode.BINARY if isinstance(frame, bytes) else Opcode.TEXT
        data = frame.encode() if isinstance(frame, str) else frame
        if data is None:
            data = b"x" * TOO_BIG_BYTES
        for piece in self._cut(opcode, data):
            await self._put(piece)

    def _cut(self, opcode: Opcode, data: bytes) -> list[bytes]:
        """Write a message as frames, with their masks."""
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
        """Put bytes on the connection."""
        await self._put(data)

    async def _put(self, data: bytes) -> None:
        """Send bytes; a server that does not take them in time is found out by the judge."""
        try:
            with anyio.fail_after(SEND_WAIT_S):
                async with self._sending:
                    if self._dribbles:
                        for at in range(min(len(data), DRIBBLE_BYTES)):
                            await self._stream.send(data[at : at + 1])
                        data = data[DRIBBLE_BYTES:]
                    if data:
                        await self._stream.send(data)
        except TimeoutError:
            self._judge.found("hang", "the server reads no more")
            raise Broken from None
        except _LOST:
            raise Broken from None

    async def fault(self, name: str) -> None:
        """Break something of the client's: see `case.FAULTS`."""
        match name:
            case "fragments":
                self._fragments = True
            case "dribble":
                self._dribbles = True
            case "ping":
                await self._put(Frame(Opcode.PING, b"ping").serialize(mask=True))
                await self._put(Frame(Opcode.PONG, b"unasked").serialize(mask=True))
            case "stall":
                self._reading.cancel()
            case "half_close":
                with suppress(NotImplementedError, *_LOST):  # TLS has no half
                    await self._stream.send_eof()
            case "reset":
                self._left = True
                held = self._stream.extra(SocketAttribute.raw_socket)
                with suppress(OSError):
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await anyio.aclose_forcefully(self._stream)

    async def leave(self) -> None:
        """Close in order: a close frame, and its answer within a bound."""
        if self._left:
            return
        self._left = True
        if not self._judge.is_over:
            self._judge.broke = True
            with suppress(Broken):
                reason = struct.pack("!H", CLOSE_NORMAL)
                await self._put(Frame(Opcode.CLOSE, reason).serialize(mask=True))
            if not self._reading.cancel_called:
                with anyio.move_on_after(CLOSE_WAIT_S):
                    await self._ended.wait()
        await anyio.aclose_forcefully(self._stream)

    # -- reading --------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read to the end of the connection, or until the client is deaf."""
        with self._reading:
            try:
                while True:
                    for event in self._protocol.events_received():
                        if isinstance(event, Frame):
                            self._take(event)
                    if answers := b"".join(self._protocol.data_to_send()):
                        async with self._sending:
                            await self._stream.send(answers)
                    self._protocol.receive_data(await self._stream.receive(READ_BYTES))
            except _LOST:
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


# -- the server -----------------------------------------------------------------------------------


class RemoteTarget:
    """Plays cases to a server at an address.

    Args:
        address: where it is.
        answer_s: how long an answer may take; longer is a hang.
    """

    is_local = False

    def __init__(self, address: Address, *, answer_s: float) -> None:
        self._address = address
        self._pace = Pace(
            answer_s=answer_s, quiet_s=QUIET_S, wait_scale=WAIT_SCALE, silence_s=SILENCE_S
        )
        self._has_ready = False

    def begin(self) -> None:
        """See that a server is there.

        Raises:
            CannotFuzzError: there is none, or it takes nobody.
        """
        status = self._ask_ready()
        if status == 503:
            raise CannotFuzzError(f"{self._address.origin} is not ready: /ready says 503")
        self._has_ready = status == 200

    def run(self, case: Case) -> Outcome:
        """Play one case, and see that the server still lives."""
        judge = Judge(case)
        anyio.run(self._run, case, judge, backend="trio")
        return Outcome(findings=tuple(judge.findings), told=tuple(judge.told), pairs=judge.pairs)

    async def _run(self, case: Case, judge: Judge) -> None:
        connect: Connect = partial(_connect, self._address)
        try:
            await Player(case, judge, connect, self._pace).play()
            good = probe_case(case, with_sound=False)
            other = Judge(good)
            await Player(good, other, connect, self._pace).play()
            for finding in other.findings:
                judge.found(finding.kind, f"afterwards: {finding.label}", finding.detail)
        except* CannotFuzzError as group:
            judge.found("crash", "the server takes no connection", str(group.exceptions[0]))

    def check(self) -> str:
        """Say what is wrong with the server after a while of rest; empty where nothing is."""
        if not self._has_ready:
            return ""
        until_s = time.monotonic() + READY_WAIT_S
        while (status := self._ask_ready()) != 200:
            if time.monotonic() > until_s:
                return f"/ready says {status or 'nothing'}"
            time.sleep(READY_POLL_S)
        return ""

    def _ask_ready(self) -> int:
        """Ask `/ready`; 0 where nobody answers.

        Raises:
            CannotFuzzError: nobody answers, and nobody ever did.
        """
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
            raise CannotFuzzError(f"nobody answers at {self._address.origin}: {error}") from error
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
    """Connect and shake hands."""
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
    except (InvalidURI, InvalidHandshake, TimeoutError, *_LOST) as error:
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
