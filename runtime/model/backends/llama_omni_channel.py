"""A session on a remote backend, which is always closed.

The server holds one session at a time. It refuses a second without a message, and may hold a closed
one for a while. `close` posts to `/sessions/{id}/close`, then the WebSocket; it never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote

from .base import BackendError, BackendGone
from .llama_omni_http import Address, request
from .llama_omni_link import Link, Pong
from .llama_omni_wire import Closed, Created, RemoteEvent, RemoteMode, read_event, shown

CLOSE_WAIT_S: Final = 6.0
"""The server stops its threads first; with the WebSocket's wait, below `calls.RELEASE_WAIT_S`."""
OK: Final = 200
NOT_FOUND: Final = 404

_log = logging.getLogger("antiphon.model")


class Channel:
    """One session on the server; `connect` opens its `link`, and `close` closes both."""

    def __init__(self, address: Address, link: Link) -> None:
        self.link = link
        self._address = address
        self._remote_id: str | None = None

    @classmethod
    async def connect(cls, address: Address) -> Channel:
        """Open the WebSocket of a session; raises as `Link.connect` does."""
        return cls(address, await Link.connect(address))

    async def begin(self, init: str, mode: RemoteMode) -> Created:
        """Send `session.init` and wait for `session.created`, without a time limit.

        `BackendGone`: the server refuses; without a message if it is busy. `BackendError`: any
        other answer.
        """
        await self.link.send(init)
        try:
            event = await self.receive()
        except BackendGone as error:
            raise BackendGone(f"{error} before session.created: it may be busy") from None
        if isinstance(event, Closed):
            raise BackendGone(f"expected session.created, got session.closed {shown(event.reason)}")
        if not isinstance(event, Created):
            raise BackendError("expected session.created, got an answer")
        self._remote_id = event.session_id
        if event.mode not in (mode, None):
            raise BackendError(f"expected a session of mode {mode}, got one of {event.mode}")
        return event

    async def receive(self) -> RemoteEvent:
        """Wait for the server's next event, without a time limit.

        `BackendGone`: the connection has ended; `BackendError`: the event is not valid.
        """
        frame: str | bytes | Pong | None = None
        while not isinstance(frame, str | bytes):
            frame = await self.link.receive()
        return read_event(frame)

    async def close(self) -> None:
        """Close the session on the server and then the WebSocket; a failure is logged."""
        try:
            await self._close_remote()
        except BackendError as error:
            _log.warning("remote %s: closing a session: %s", self._address.netloc, error)
        finally:
            await self.link.close()

    async def _close_remote(self) -> None:
        """Have the server close the session; `BackendGone` or `BackendError` if that fails."""
        if self._remote_id is None:
            return
        path = f"/sessions/{quote(self._remote_id, safe='')}/close"
        status, _ = await request(self._address, "POST", path, wait_s=CLOSE_WAIT_S)
        if status not in (OK, NOT_FOUND):
            raise BackendError(f"expected HTTP {OK} or {NOT_FOUND}, got HTTP {status}")


@contextmanager
def told(address: Address) -> Iterator[None]:
    """Prefix errors with the server's address."""
    try:
        yield
    except BackendError as error:
        raise type(error)(f"remote {address.netloc}: {error}") from error


def gone(event: Closed) -> BackendGone:
    """The error for a session that the server has ended."""
    why = f", reason {shown(event.reason)}" if event.reason else ""
    return BackendGone(f"the remote ended the session{why}")
