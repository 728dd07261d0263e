"""An HTTP answer that is written piece by piece, until it ends or its client leaves.

A writer waits until the connection has taken each piece: a slow client delays only its own answer.
When the client leaves, the writer is cancelled; its resources are always closed. The end of the
answer is sent after the wait for the client's leaving: Hypercorn then reports a disconnect, and
must not be cancelled while it handles the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Write = Callable[[bytes], Awaitable[None]]
"""Sends a piece of the body, and waits until it was taken."""
WriteBody = Callable[[Write], Awaitable[None]]


async def while_there(request: Request, step: Callable[[], Awaitable[bool]]) -> None:
    """Take steps, the last of which is False, until the client leaves: `ClientDisconnect`.

    A step is never cut off: its thread would go on, and no place would be counted for it.
    """
    has_left, failure = False, None

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            while not has_left and await step():
                pass
        except Exception as error:
            failure = error  # a task group would raise it in a group
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if has_left:
        raise ClientDisconnect


class Stream(Response):
    """An answer that `write_body` writes while it is sent.

    `opened` has its resources, entered before; left when the answer is over, in every case.
    """

    def __init__(
        self,
        write_body: WriteBody,
        *,
        opened: AbstractContextManager[object],
        status: int = HTTPStatus.OK,
        headers: Mapping[str, str],
        media_type: str,
    ) -> None:
        self._write_body = write_body
        self._opened = opened
        self.status_code = status
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def write(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        async def leave_with_the_client() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        start = {"status": self.status_code, "headers": self.raw_headers}
        with self._opened:
            is_whole = False
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave_with_the_client)
                await send({"type": "http.response.start", **start})
                if scope["method"] != "HEAD":
                    await self._write_body(write)
                is_whole = True
                tasks.cancel_scope.cancel()
            if is_whole:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
