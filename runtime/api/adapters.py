"""WebSockets without a socket: of a request over HTTP, and of another protocol.

- `LocalClient`: the client of a session that is a request over HTTP, both ends of it in memory.
- `TranslatedWebSocket`: another protocol in front of a session's own; messages are rewritten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final, NoReturn, Protocol

import anyio
import orjson

from protocol.values.errors import CLOSE_NORMAL
from protocol.values.frames import Received

from ..net.connection import OnMessages, WebSocket, WebSocketClosed, deliver_received
from ..net.http import CodedError

FRAMES_MAX: Final = 64
"""Between the session and its client; then the session's writer waits, as for a slow socket."""
_LOST: Final = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)
_ABNORMAL: Final = 1006
RETRY: Final = {"Retry-After": "5"}
"""With the refusal of a call while the server is full: seconds, a turn in the queue."""


class LocalClient:
    """The session has it as its `WebSocket`; its client sends, receives and leaves.

    `react` answers the session's messages, and returns whether they are the client's too.
    """

    def __init__(self, react: Callable[[LocalClient, dict[str, Any]], bool]) -> None:
        self._react = react
        self._to_session, self._from_client = anyio.create_memory_object_stream[Iterable[object]](
            math.inf
        )
        self._unread: Iterator[object] = iter(())
        self._code = _ABNORMAL
        self._to_client, self._from_session = anyio.create_memory_object_stream[str](FRAMES_MAX)

    # -- the client's end -----------------------------------------------------------------------

    def ask(self, *messages: object) -> None:
        """Send messages, unless the session is over."""
        self.ask_each(messages)

    def ask_each(self, messages: Iterable[object]) -> None:
        """As `ask`; each is made when the session takes it."""
        if self._from_client.statistics().open_receive_streams:
            self._to_session.send_nowait(messages)

    async def next(self) -> dict[str, Any]:
        """Wait for the client's next message; `CodedError`: of `react`, or the session is over."""
        try:
            while True:
                message = orjson.loads(await self._from_session.receive())
                if self._react(self, message):
                    return dict(message)
        except _LOST:
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, "the session ended without an answer"
            raise CodedError(status, "service_unavailable", text, headers=RETRY) from None

    def finish(self) -> None:
        """Close the connection in order, for the client has its answer; it still has to `leave`."""
        self._code = CLOSE_NORMAL
        self._to_session.close()

    def leave(self) -> None:
        """Close the connection; the session still takes what was asked before."""
        self._to_session.close()
        self._from_session.close()

    # -- the session's end ----------------------------------------------------------------------

    async def receive(self) -> str:
        """As `WebSocket`."""
        while (message := next(self._unread, None)) is None:
            try:
                self._unread = iter(await self._from_client.receive())
            except _LOST:
                raise WebSocketClosed(self._code, "") from None
        return orjson.dumps(message).decode()

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        """As `WebSocket`."""
        await deliver_received(self, on_messages)

    async def send(self, *frames: str) -> None:
        """As `WebSocket`."""
        try:
            for frame in frames:
                await self._to_client.send(frame)
        except _LOST:
            raise WebSocketClosed(_ABNORMAL, "") from None

    def end(self) -> None:
        """Close the session's end; its client still reads what was sent."""
        self._to_client.close()
        self._from_client.close()

    async def close(self, _code: int, _reason: str) -> None:
        """As `WebSocket`."""
        self.end()

    async def abort(self) -> None:
        """As `WebSocket`."""
        await self.close(_ABNORMAL, "")


# -- rewritten messages ----------------------------------------------------------------------------


class Translation(Protocol):
    """Between one client and its session, which speaks the dialect of the client's address.

    Attributes:
        due: what the session is to get in answer to its own messages.
    """

    due: list[str]

    def received(self, message: Received) -> list[Received]:
        """Write a message of the client as messages of the session."""
        ...

    def sent(self, body: dict[str, Any]) -> Iterator[str]:
        """Write a message of the session as messages of the client."""
        ...


class TranslatedWebSocket:
    """The `WebSocket` of the session; the one that it has is the client's.

    What is due is given to the session at once, while it reads.
    """

    def __init__(self, websocket: WebSocket, translation: Translation) -> None:
        self._websocket = websocket
        self._translation = translation
        self._unread: deque[Received] = deque()
        self._on_messages: OnMessages | None = None

    async def receive(self) -> Received:
        """As `WebSocket`; each message is one of the session's, or none."""
        while not self._unread:
            self._unread.extend(self._received(await self._websocket.receive()))
        return self._unread.popleft()

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        """As `WebSocket`."""

        def take(*messages: Received) -> Any:
            found = [it for message in messages for it in self._received(message)]
            return on_messages(*found) if found else None

        self._on_messages = on_messages
        try:
            await self._websocket.deliver(take)
        finally:
            self._on_messages = None

    def _received(self, message: Received) -> list[Received]:
        return [*self._translation.received(message), *self._due()]

    def _due(self) -> list[str]:
        due, self._translation.due = self._translation.due, []
        return due

    async def send(self, *frames: str) -> None:
        """As `WebSocket`."""
        messages = [it for frame in frames for it in self._translation.sent(orjson.loads(frame))]
        if messages:
            await self._websocket.send(*messages)
        if self._on_messages is not None and (due := self._due()):
            waits = self._on_messages(*due)
            if waits is not None:
                await waits

    async def close(self, code: int, reason: str) -> None:
        """As `WebSocket`."""
        await self._websocket.close(code, reason)

    async def abort(self) -> None:
        """As `WebSocket`."""
        await self._websocket.abort()


def dump(**body: Any) -> str:
    """Write a message."""
    return orjson.dumps(body).decode()
