"""A server at an address: cases over real sockets, with all that can go wrong on them.

The handshake is done by the sans-IO protocol of `websockets`; what follows is `sockets`'s.

After each case a client of good manners must get a session. `check` asks `/ready`, where there is
such a thing: a server whose slots are lost is not ready any more.
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

from runtime.routing import REALTIME_PATH

from .case import Case
from .judge import Judge
from .play import Connect, FuzzerError, Pace, Player, Wire, own_of, probe_case
from .report import Outcome
from .sockets import LOST, READ_BYTES, SocketWire

CONNECT_WAIT_S: Final = 10.0
"""TCP, TLS and the handshake across the world take one."""
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
        """Play one case, and see that the server still lives.

        Raises:
            FuzzerError: the fuzzer itself is broken.
        """
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
            good = probe_case(case, with_sound=False)
            other = Judge(good)
            await Player(good, other, connect, self._pace).play()
            for finding in other.findings:
                judge.found(finding.kind, f"afterwards: {finding.label}", finding.detail)
        except* CannotFuzzError as group:
            judge.found("crash", "the server takes no connection", str(group.exceptions[0]))
        except* Exception as group:  # the server is elsewhere
            error = group.exceptions[0]
            raise FuzzerError(f"{type(error).__name__}: {error}") from group

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
