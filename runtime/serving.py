"""A server on its port: from loading the model to a clean shutdown.

The port is bound first, so that `/health` and `/ready` answer while the model loads.

The first SIGINT or SIGTERM drains: nobody is admitted, `/ready` is 503, and who is served is warned
and may go on for `drain_s`. Then, or at the second signal, every session gets its `session.closed`
with `server_shutdown` and every log its `fin`. The third signal waits for nobody.

Nurseries: `run` owns the listener and the model calls; a connection's tasks live in the listener's.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from protocol.errors import CLOSE_TRY_LATER, ErrorCode
from protocol.limits import FRAME_BYTES_MAX_OF
from protocol.messages import ErrorReport
from recorder.writer import Recorder, RecorderPolicy

from . import listener
from .backends.base import Backend, BackendError, Remote
from .http import error_body, make_app
from .identity import SystemIdentities
from .listener import Address, WebSocketRequest
from .media.decoder import MediaDecoder
from .models import load_backend
from .routing import NotServedError, Route, route
from .server import Server
from .settings import MODES, Settings
from .voices import VoiceLibrary
from .websocket import WebSocket

SHUTDOWN_WAIT_S: Final = 40.0
"""Longer than a hanging call, its release and a slow disk are waited for, one after the other."""

_logger = logging.getLogger("antiphon.server")


class Gateway:
    """Routes connections to the server, once there is one.

    Args:
        settings: the operator's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.server: Server | None = None

    def readiness(self) -> str:
        """Say what `/ready` says."""
        return "loading" if self.server is None else self.server.readiness

    def speech(self) -> str | None:
        """Say what `/health` says of the model's speech."""
        return None if self.server is None else self.server.speech

    async def on_websocket(self, request: WebSocketRequest) -> None:
        """Serve one WebSocket request to its end."""
        modes = MODES if self.server is None else self.server.modes
        try:
            to = route(request.path, request.query, modes, default=self._settings.default_mode)
        except NotServedError as error:
            body = error_body(error.code, error.message, **error.details)
            await request.reject(error.status, body)
            return
        websocket = await request.accept(frame_bytes_max=FRAME_BYTES_MAX_OF[to.mode])
        if self.server is None:
            await self._turn_away(websocket, to)
        else:
            await self.server.handle(websocket, to.mode, endpoint=to.endpoint, label=to.label)

    async def _turn_away(self, websocket: WebSocket, to: Route) -> None:
        code = ErrorCode.SERVICE_UNAVAILABLE
        for frame in to.dialect.encode(ErrorReport(code=code, message="the model is being loaded")):
            await websocket.send(frame)
        await websocket.close(CLOSE_TRY_LATER, code)


class CannotServeError(Exception):
    """The port, the folder or the model cannot be had; the text says which, in one line."""


async def _bind(settings: Settings) -> list[listener.SocketListener]:
    """Take the port, then make the folder: a server that cannot start leaves nothing behind."""
    try:
        listeners = await listener.bind(settings.host, settings.port)
    except OSError as error:
        address = f"{settings.host} port {settings.port}"
        raise CannotServeError(f"cannot listen on {address}: {error.strerror}") from error
    try:
        if settings.record_to is not None:
            settings.record_to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for bound in listeners:
            await bound.aclose()
        raise CannotServeError(
            f"cannot record to {settings.record_to}: {error.strerror}"
        ) from error
    return listeners


async def run(
    settings: Settings,
    *,
    load: Callable[..., Backend] = load_backend,
    on_bound: Callable[[tuple[Address, ...]], None] = lambda _: None,
    on_ready: Callable[[], None] = lambda: None,
    on_stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal ends it.

    Args:
        settings: the operator's.
        load: loads the model, called as `load_backend` is, in a thread.
        on_bound: told the addresses, before the model is loaded.
        on_ready: told that sessions are taken.
        on_stopping: told that all sessions are over, or are cut off; what still hangs now, a thread
            in the model, is no session's any more.

    Raises:
        CannotServeError: the port, the folder of the logs or the model cannot be had.
    """
    voices = None if settings.voices is None else VoiceLibrary(settings.voices)
    listeners = await _bind(settings)
    gateway = Gateway(settings)
    recorder = Recorder(RecorderPolicy(durability=settings.durability))
    failure: CannotServeError | None = None
    try:
        async with anyio.create_task_group() as tasks:
            serve = partial(
                listener.serve,
                listeners,
                on_websocket=gateway.on_websocket,
                app=make_app(gateway.readiness, speech=gateway.speech),
            )
            on_bound(await tasks.start(serve))
            tasks.start_soon(_watch_signals, gateway, tasks, settings.drain_s, on_stopping)
            try:
                backend = await anyio.to_thread.run_sync(
                    partial(load, device=settings.device, dtype=settings.dtype),
                    settings.model,
                    settings.slots,
                )
                if isinstance(backend, Remote):
                    await backend.check()
            except (OSError, ValueError, RuntimeError, BackendError) as error:
                failure = CannotServeError(f"cannot load the model {settings.model}: {error}")
                tasks.cancel_scope.cancel()
                return
            gateway.server = Server(
                settings,
                backend,
                tasks=tasks,
                recorder=recorder,
                identities=SystemIdentities(),
                decode_media=MediaDecoder(voices).decode,
            )
            tasks.start_soon(gateway.server.refresh_estimates)
            on_ready()
    finally:
        with anyio.CancelScope(shield=True):
            await recorder.aclose()
        if failure is not None:
            raise failure


async def _watch_signals(
    gateway: Gateway, tasks: TaskGroup, drain_s: int, on_stopping: Callable[[], None]
) -> None:
    patience = anyio.CancelScope()
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            server = gateway.server
            if server is None or patience.cancel_called:
                break
            if gateway.readiness() == "draining":
                _logger.warning("%s: ending %d sessions now", number.name, server.sessions)
                patience.cancel()
            else:
                _logger.warning(
                    "%s: %d sessions have %d s to finish", number.name, server.sessions, drain_s
                )
                shut_down = partial(_shut_down, server, tasks, drain_s, patience, on_stopping)
                tasks.start_soon(shut_down)
    on_stopping()
    tasks.cancel_scope.cancel()


async def _shut_down(
    server: Server,
    tasks: TaskGroup,
    drain_s: int,
    patience: anyio.CancelScope,
    on_stopping: Callable[[], None],
) -> None:
    if drain_s:
        server.begin_drain(drain_s)
        patience.deadline = anyio.current_time() + drain_s
        with patience:
            await server.wait_until_empty()
    patience.cancel()  # from here on a signal waits for nobody
    server.drain()
    with anyio.move_on_after(SHUTDOWN_WAIT_S) as scope:
        await server.wait_until_empty()
    if scope.cancelled_caught:
        _logger.error("%d sessions did not end in %s s", server.sessions, SHUTDOWN_WAIT_S)
    on_stopping()
    tasks.cancel_scope.cancel()
