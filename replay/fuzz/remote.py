"""A server at an address: cases over real sockets, with their faults.

After each case a well-behaved client must get a session. `check` asks `/ready`, if there is one: a
server that lost its slots is not ready.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import anyio
import attrs
from anyio.abc import ByteStream
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
from websockets.protocol import State
from websockets.uri import parse_uri

from runtime.serve.routing import REALTIME_PATH

from .case import Case
from .judge import Judge
from .play import Connect, FuzzerError, Pace, Player, Wire, own_of, probe
from .report import Outcome
from .sockets import LOST, READ_BYTES, SocketWire

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
        raise CannotFuzzError(f"{url!r} is no address of a WebSocket, ws://host:port")
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
