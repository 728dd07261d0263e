"""The time for a request's body: a slow client must not hold a handler up.

To the application a late body looks like a client that has left; neither is an error of ours.
"""

from __future__ import annotations

from typing import Final

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_WAIT_S: Final = 60.0
"""A voice's recording of 12 MiB over a line of 2 Mbit/s."""


def bounded(app: ASGIApp) -> ASGIApp:
    """Give each request's body `BODY_WAIT_S`, from its first read."""

    async def bounded_app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, _Body(receive).receive, send)
        except ClientDisconnect:
            return

    return bounded_app


class _Body:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._deadline_s: float | None = None
        self._is_whole = False

    async def receive(self) -> Message:
        """Wait for the next part of the body, or for a disconnect once it is whole."""
        if self._is_whole:
            return await self._receive()
        if self._deadline_s is None:
            self._deadline_s = anyio.current_time() + BODY_WAIT_S
        with anyio.CancelScope(deadline=self._deadline_s):
            message = await self._receive()
            self._is_whole = not message.get("more_body", False)
            return message
        return {"type": "http.disconnect"}
