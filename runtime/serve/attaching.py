"""Clients that attach to a running session of `live`, and only listen (`api.sideband`).

`/v1/live/sessions/{id}/attach` is for the session's own key and for `admin`. It is a view of the
session's log, like its live tail over HTTP: it changes neither the session nor its timing. So only
a session that is recorded has it; others, and those that the key may not see, are a 404. A client
that reads too slowly is dropped, as a session's own client is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Final

import anyio
from starlette.exceptions import HTTPException

from protocol.values.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_NORMAL,
    FrameError,
)
from protocol.values.utf8 import Frame
from protocol.wire.dialects import LIVE
from recorder.keep.store import LogInfo
from recorder.read.places import next_seq

from ..access.gate import Admitted
from ..access.keys import Key
from ..api.recordings import Recordings
from ..api.requests import ConcurrencyLimit, in_thread
from ..api.sideband import Sideband, refused
from ..api.tail import Tail, follow
from ..net.connection import Connection
from ..net.http import body_of
from ..net.listener import WebSocketRequest
from ..net.websocket import WebSocket
from ..session.journal import ready_now
from ..session.server import Server
from ..telemetry.watching import SessionStatus

ATTACHED_MAX: Final = 16
"""Each may hold 16 MiB of its log, and takes part of a thread, as a live tail does."""
ATTACHED_PER_KEY_MAX: Final = 4
"""One client leaves some for the others."""
NO_SESSION: Final = "no recorded session of the live api runs by that name"
LOST: Final = "the recording has ended before its session"


class Attaching:
    """Serves the attached clients of one server; `server` returns None while the model loads."""

    def __init__(
        self, server: Callable[[], Server | None], recordings: Recordings, *, stall_s: float
    ) -> None:
        self._server = server
        self._recordings = recordings
        self._stall_s = stall_s
        self._places = ConcurrencyLimit(ATTACHED_MAX, ATTACHED_PER_KEY_MAX)
        self._attached = 0
        self._all_left = anyio.Event()

    def find(self, name: str, principal: Key) -> SessionStatus | None:
        """The running session of a name, its own or its recording's, if the client may see it."""
        server = self._server()
        for it in () if server is None else server.roster(lambda _: 0):
            if name in {it.session_id, it.recording_id} and principal.may_see(it.owner):
                return it
        return None

    async def serve(
        self, request: WebSocketRequest, admitted: Admitted, session: SessionStatus
    ) -> None:
        """Attach a client to a session that it may see, until either leaves."""
        try:
            with self._places.take_for(admitted.principal, request.peer.host):
                info = await self._log_of(session)
                from_seq = await in_thread(partial(_next_seq, info))
                websocket = await request.accept(subprotocol=admitted.subprotocol)
                self._attached += 1
                try:
                    await self._carry(websocket, info, from_seq)
                finally:
                    self._attached -= 1
                    self._all_left.set()
        except HTTPException as error:
            headers = tuple((error.headers or {}).items())
            await request.reject(error.status_code, body_of(error), headers)

    async def wait_until_left(self) -> None:
        """Wait until no client is attached: a session that ends ends its attached clients."""
        while self._attached:
            self._all_left = anyio.Event()
            await self._all_left.wait()

    async def _log_of(self, session: SessionStatus) -> LogInfo:
        info = None
        if session.dialect == LIVE.name:
            info = await self._recordings.written(session.recording_id)
        if info is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, NO_SESSION)
        return info

    async def _carry(self, websocket: WebSocket, info: LogInfo, from_seq: int) -> None:
        """Send what the log holds, and refuse what the client sends."""

        async def answer(*frames: Frame) -> None:
            for frame in frames:
                try:
                    connection.send(refused(frame), ready_now)
                except FrameError as error:
                    connection.close(error.close_code, error.reason, ready_now)

        connection = Connection(
            websocket,
            on_frames=answer,
            on_gone=lambda _: None,
            on_send_failed=lambda: None,
            stall_s=self._stall_s,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell, connection, info, from_seq)
            await connection.run()
            tasks.cancel_scope.cancel()


async def _tell(connection: Connection, info: LogInfo, from_seq: int) -> None:
    sideband = Sideband(from_seq)
    try:
        async with aclosing(follow(Tail(info, sideband.frames))) as batches:
            async for frames in batches:
                for frame in frames:
                    connection.send(frame, ready_now)
                if sideband.is_over:
                    break
    except OSError:
        pass  # The log cannot be read any more.
    if sideband.is_over:
        connection.close(CLOSE_NORMAL, "", ready_now)
    else:
        connection.close(CLOSE_INTERNAL_ERROR, LOST, ready_now)


def _next_seq(info: LogInfo) -> int:
    source = info.open()
    try:
        return next_seq(source)
    finally:
        source.close()
