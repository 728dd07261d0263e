"""A WebSocket whose messages are rewritten: another protocol in front of a session's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import orjson

from protocol.values.frames import Received

from ..net.connection import OnMessages, WebSocket


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
