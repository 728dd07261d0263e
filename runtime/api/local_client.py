"""The client of a session that is a request over HTTP: both ends of a WebSocket, in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final, NoReturn

import anyio
import orjson

from ..net.connection import OnMessages, WebSocketClosed, deliver_received
from ..net.http import CodedError

FRAMES_MAX: Final = 64
"""Between the session and its client; then the session's writer waits, as for a slow socket."""
_LOST: Final = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)
_ABNORMAL: Final = 1006


RETRY: Final = {"Retry-After": "5"}


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
                raise WebSocketClosed(_ABNORMAL, "") from None
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
