"""A session's WebSocket that outlives its connections, for any dialect (docs/resume.md).

It asks for a session that can be resumed. When the connection is lost it connects again, gets the
frames that it has not heard, and sends again what the server has not; its user only waits. `seq`
and `ack` in the server's frames say what was heard on either side. `may_pass` says which failures
are worth another attempt, and `backoff_s` how long to wait before it.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import anyio
import attrs

from protocol.values.errors import CLOSE_TRY_LATER
from protocol.values.messages import Resumable, ResumeRequest
from protocol.wire.codec import parse_frame
from protocol.wire.dialects.shared import RESUMABLE, RESUME, SESSION_REPLACED, SESSION_RESUMABLE

from . import errors
from .websocket import ClientSocket, background

# -- retries ---------------------------------------------------------------------------------------


RETRIES: Final = 4
"""With the waits below some five seconds: a server with a small model has restarted."""
RETRIES_MAX: Final = 100
"""With `BACKOFF_S_MAX` most of an hour; more is for a service manager."""
BACKOFF_S: Final = 0.5
"""Longer than a lost packet, shorter than a person notices."""
BACKOFF_S_MAX: Final = 30.0
"""A server that is gone for long is tried twice a minute."""
PASSING_CLOSE_CODES: Final = frozenset({1001, 1006, 1011, 1012, 1013, 1014})
"""Going away, lost, failed, restarting, full, and a gateway without its server (RFC 6455, 7.4)."""
PASSING_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Too many requests, and a gateway or server that is not up yet (RFC 9110, 15.6)."""


def may_pass(error: errors.ClientError) -> bool:
    """Whether an attempt that failed like this could succeed later."""
    match error:
        case errors.CannotConnectError():
            return error.may_pass
        case errors.HandshakeRejectedError():
            return error.status in PASSING_STATUSES
        case errors.SessionClosedError():
            return error.code in PASSING_CLOSE_CODES
    return isinstance(error, errors.SessionRefusedError)


def backoff_s(attempt: int, chance: float) -> float:
    """The wait after `attempt` (from 0) in seconds, less up to a half by `chance` in [0, 1)."""
    return float(min(BACKOFF_S * 2**attempt, BACKOFF_S_MAX) * (1 - chance / 2))


# -- the session -----------------------------------------------------------------------------------


PENDING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Messages that the server has not acknowledged: eight minutes of sound; older ones are let go."""
GREETING_S: Final = 10.0
"""For the first frame of a connection: a server that has room answers at once."""
FIRST_S: Final = 1.0
"""For the first frame of a session: a server that cannot resume one may have nothing to say yet."""
_NUMBERS: Final = re.compile(r',"seq":(\d{1,15}),"ack":(\d{1,15})\}$')
_NUMBERS_CHARS: Final = 64
"""Both numbers stand in so many characters at the end of a frame."""


@attrs.frozen
class Reconnecting:
    """The connection is lost; the next attempt to reconnect is `wait_s` seconds away."""

    attempt: int
    wait_s: float


@attrs.frozen
class Reconnected:
    """The session goes on.

    Attributes:
        away_s: seconds without a connection.
        skipped: messages to the server that are lost, since more than may be kept had not arrived.
    """

    away_s: float
    skipped: int


OnConnection = Callable[[Reconnecting | Reconnected], object]
Open = Callable[[str], AbstractAsyncContextManager[ClientSocket]]


class ResumingSocket:
    """As `session.FrameSocket`, within the block of `opened`."""

    def __init__(
        self, address: str, *, open_: Open, frame_bytes_max: int, on_connection: OnConnection
    ) -> None:
        self._current: ClientSocket | None = None
        self._address = with_query(address, resumable="1")
        self._open = open_
        self._frame_bytes_max = frame_bytes_max
        self._on_connection = on_connection
        self._resumable: Resumable | None = None
        self._last_seq = -1
        self._recording_id = ""
        self._pending = deque[str]()
        self._pending_bytes = 0
        self._acked = self._sent = 0
        self._sending = anyio.Lock()
        self._lost, self._reconnected = anyio.Event(), anyio.Event()
        self._cause = errors.SessionClosedError(errors.ABNORMAL_CLOSURE, "")
        self._is_over = False
        self._first: str | bytes | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[ResumingSocket]:
        """Connect, and reconnect whenever the connection is lost, until the block is left.

        Errors as of `websocket.open_socket`.
        """
        async with self._open(self._address) as self._current, background() as tasks:
            await self._begin(self._current)
            tasks.start_soon(self._reconnect_until_over)
            yield self

    # -- as a socket ----------------------------------------------------------------------------

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and reason of the close; None while the session may go on."""
        if self._is_over:
            return self._cause.code, self._cause.reason
        closed = None if self._current is None else self._current.closed
        return None if closed is None or self._may_reconnect(closed[0]) else closed

    @property
    def recording_id(self) -> str:
        """The session's recording; empty before its first frame, and without one."""
        return self._recording_id

    async def receive(self) -> str | bytes:
        """Wait for a message. Raises `SessionClosedError` if the session cannot go on."""
        while True:
            first, self._first = self._first, None
            if first is not None:
                return first
            socket = await self._connected()
            try:
                frame = self._note_numbers(await socket.receive())
            except errors.SessionClosedError as closed:
                await self._wait_for_reconnect(socket, closed)
                continue
            if frame is not None:
                return frame

    async def send(self, message: str) -> None:
        """Send a text message, now or when the connection is back.

        `LocalProtocolError`: it is above the limit; `SessionClosedError`: the session cannot go on.
        """
        if self._resumable is None:
            async with self._sending:
                await (await self._connected()).send(message)
            return
        if len(message.encode()) > self._frame_bytes_max:
            text = (
                f"a message of {len(message)} bytes, at most {self._frame_bytes_max} are accepted"
            )
            raise errors.LocalProtocolError(text)
        self._add_pending(message)
        await self._send_pending()

    async def _send_pending(self) -> None:
        """Send what is not acknowledged and was not sent on this connection, in order."""
        async with self._sending:
            while self._sent < self._acked + len(self._pending):
                socket = await self._connected()
                self._sent = max(self._sent, self._acked)
                try:
                    await socket.send(self._pending[self._sent - self._acked])
                except errors.SessionClosedError as closed:
                    await self._wait_for_reconnect(socket, closed)
                else:
                    self._sent += 1 if self._current is socket else 0

    # -- what was heard on either side ----------------------------------------------------------

    def _add_pending(self, message: str) -> None:
        self._pending.append(message)
        self._pending_bytes += len(message)
        while self._pending_bytes > PENDING_BYTES_MAX and len(self._pending) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._pending_bytes -= len(self._pending.popleft())
        self._acked += 1

    def _acknowledge(self, count: int) -> int:
        """Forget messages that the server has; returns how many it has not, and are forgotten."""
        while self._pending and self._acked < count:
            self._drop_oldest()
        return max(0, self._acked - count)

    def _note_numbers(self, frame: str | bytes) -> str | bytes | None:
        """Note a frame's numbers; None for one that is not for the session's user."""
        if isinstance(frame, bytes):
            return frame
        greeting = self._greeting(frame)
        if greeting is not None:
            self._resumable = greeting if greeting.token else None
            self._recording_id = self._recording_id or greeting.recording_id
            return None
        if frame.startswith(f'{{"type":"{SESSION_REPLACED}"'):
            self._resumable = None
            return None
        numbers = _NUMBERS.search(frame, max(0, len(frame) - _NUMBERS_CHARS))
        if numbers is None or self._resumable is None:
            return frame
        seq, ack = int(numbers[1]), int(numbers[2])
        self._acknowledge(ack)
        if seq <= self._last_seq:
            return None
        self._last_seq = seq
        return frame

    async def _begin(self, socket: ClientSocket) -> None:
        """Wait for the greeting, so that nothing is sent before it is known how to come back.

        A server that knows nothing of this may stay silent, or say something else.
        """
        with anyio.move_on_after(FIRST_S):
            self._first = self._note_numbers(await socket.receive())

    def _greeting(self, frame: str | bytes) -> Resumable | None:
        """Read a greeting; None for any other frame."""
        if isinstance(frame, bytes) or not frame.startswith(f'{{"type":"{SESSION_RESUMABLE}"'):
            return None
        with errors.as_client_errors():
            greeting: Resumable = RESUMABLE.parse(parse_frame(frame, self._frame_bytes_max))
        return greeting

    # -- reconnecting -------------------------------------------------------------------------

    def _may_reconnect(self, code: int) -> bool:
        is_refusal = code == CLOSE_TRY_LATER  # which ends a session, if it had begun
        return self._resumable is not None and code in PASSING_CLOSE_CODES and not is_refusal

    async def _connected(self) -> ClientSocket:
        """Wait for a connection; raises `SessionClosedError` if there comes none."""
        while self._current is None:
            if self._is_over:
                raise self._cause
            await self._reconnected.wait()
        return self._current

    async def _wait_for_reconnect(
        self, socket: ClientSocket, closed: errors.SessionClosedError
    ) -> None:
        if self._current is socket:
            if not self._may_reconnect(closed.code):
                raise closed
            self._current, self._cause, self._reconnected = None, closed, anyio.Event()
            self._lost.set()
        await self._connected()

    async def _reconnect_until_over(self) -> None:
        while not self._is_over:
            await self._lost.wait()
            since = anyio.current_time()
            attempt = 1
            while not self._is_over and not await self._reconnect_once(attempt, since):
                attempt += 1

    async def _reconnect_once(self, attempt: int, since: float) -> bool:
        """Connect once, and hold the connection until it is lost; return whether there was one."""
        assert self._resumable is not None
        wait_s = backoff_s(attempt - 1, random.random())
        if anyio.current_time() + wait_s - since > self._resumable.expires_in_s:
            self._end(f"not back within {self._resumable.expires_in_s:g} s")
            return False
        self._on_connection(Reconnecting(attempt, wait_s))
        await anyio.sleep(wait_s)
        address = with_query(self._address, resume=self._resumable.recording_id)
        is_resumed = False
        try:
            async with self._open(address) as socket:
                skipped = await self._resume(socket)
                is_resumed = True
                self._on_connection(Reconnected(anyio.current_time() - since, skipped))
                async with background() as tasks:
                    tasks.start_soon(self._resend)
                    await self._lost.wait()
        except errors.ClientError as error:
            if not is_resumed and not may_pass(error):
                self._end(f"reconnecting failed: {error}")
        return is_resumed

    async def _resume(self, socket: ClientSocket) -> int:
        """Greet the server, send again what it has not; returns how many messages are lost."""
        assert self._resumable is not None
        request = ResumeRequest(token=self._resumable.token, last_seq=self._last_seq)
        await socket.send(RESUME.encode(request))
        with anyio.move_on_after(GREETING_S):
            greeting = None
            while greeting is None:  # a server that loads its model says so instead, and closes
                greeting = self._greeting(await socket.receive())
            self._resumable = greeting if greeting.token else None
            skipped = self._acknowledge(greeting.ack)
            self._sent = self._acked
            self._current, self._lost = socket, anyio.Event()
            self._reconnected.set()
            return skipped
        raise errors.SessionClosedError(errors.ABNORMAL_CLOSURE, "no answer")

    async def _resend(self) -> None:
        with suppress(errors.SessionClosedError):  # it is known by then
            await self._send_pending()

    def _end(self, reason: str) -> None:
        self._cause = errors.SessionClosedError(errors.ABNORMAL_CLOSURE, reason)
        self._is_over = True
        self._reconnected.set()


def with_query(address: str, **values: str) -> str:
    """Put names with their values into an address."""
    parts = urlsplit(address)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in values]
    query += values.items()
    return urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode(query), ""))
