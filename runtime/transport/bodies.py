"""The time in which a request's body must come: a client that trickles it holds a handler up.

`bounded` wraps an ASGI application; a body that is late looks to it like a client that has left,
and so does one whose client has: neither is an error of ours. How large a body may be is for the
application to say, which alone knows what it is.
"""

from __future__ import annotations

from typing import Final

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_WAIT_S: Final = 60.0
"""A voice's recording of 12 MiB over a line of 2 Mbit/s."""


def bounded(app: ASGIApp) -> ASGIApp:
    """Give each request's body `BODY_WAIT_S` to come, from when it is first asked for."""

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
        """Wait for the next part of the body, or for the client to leave once it is whole."""
        if self._is_whole:
            return await self._receive()
        if self._deadline_s is None:
            self._deadline_s = anyio.current_time() + BODY_WAIT_S
        with anyio.CancelScope(deadline=self._deadline_s):
            message = await self._receive()
            self._is_whole = not message.get("more_body", False)
            return message
        return {"type": "http.disconnect"}
