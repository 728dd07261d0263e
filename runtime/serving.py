"""A server on its port: from loading the model to a clean shutdown.

The port is bound first, so that `/health` and `/ready` answer while the model loads.

The first SIGINT or SIGTERM drains: nobody is admitted, `/ready` is 503, and who is served is warned
and may go on for `drain_s`. Then, or at the second signal, every session gets its `session.closed`
with `server_shutdown` and every log its `fin`. The third signal waits for nobody.

Nurseries: `run` owns the listener and the model calls; a connection's tasks live in the listener's.
"""

from __future__ import annotations

import gc
import logging
import resource
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from recorder.writer import Recorder, RecorderPolicy

from . import listener
from .access.keyfile import KeyFileError
from .backends.base import Backend, BackendError, Remote
from .gateway import Gateway
from .identity import SystemIdentities
from .listener import Address
from .media.decoder import MediaDecoder
from .models import load_backend
from .server import Server
from .settings import Settings
from .telemetry.setup import TracesMissingError
from .transport.counters import Counters
from .transport.limits import Limits
from .transport.tls import Certificate, CertificateError
from .voices import VoiceLibrary
from .workers import Workers

SHUTDOWN_WAIT_S: Final = 40.0
"""Longer than a hanging call, its release and a slow disk are waited for, one after the other."""
OTHER_FILES: Final = 512
"""Model files, and what Python holds open."""
LAST_WAIT_S: Final = 10.0
"""For logs to be closed and spans to be sent, when all sessions are over."""

_logger = logging.getLogger("antiphon.server")

Load = Callable[..., Backend]


class CannotServeError(Exception):
    """Something that the settings name cannot be had; the text says what, in one line."""


async def run(
    settings: Settings,
    *,
    load: Load = load_backend,
    on_bound: Callable[[tuple[Address, ...]], None] = lambda _: None,
    on_ready: Callable[[], None] = lambda: None,
    on_stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal ends it.

    Args:
        settings: the operator's.
        load: loads a model, called as `load_backend` is, in a thread.
        on_bound: told the addresses, before the model is loaded.
        on_ready: told that sessions are taken.
        on_stopping: told that all sessions are over, or are cut off; what still hangs now, a thread
            in the model, is no session's any more.

    Raises:
        CannotServeError: the port, the folder of the logs, the model, the keys or the certificate
            cannot be had.
    """
    counters, certificate, voices = Counters(), _certificate(settings), _voices(settings)
    recorder = Recorder(RecorderPolicy(durability=settings.durability))
    failure: CannotServeError | None = None
    gateway: Gateway | None = None
    try:
        gateway = _gateway(settings, counters, recorder)
        _allow_open_files(settings)
        listeners = await _bind(settings)
        async with anyio.create_task_group() as tasks:
            serve = partial(
                listener.serve,
                listeners,
                on_websocket=gateway.on_websocket,
                app=gateway.app(),
                limits=Limits.of(settings),
                certificate=certificate,
                counters=counters,
            )
            on_bound(await tasks.start(serve))
            tasks.start_soon(gateway.watch_keys)
            tasks.start_soon(_watch_signals, gateway, tasks, settings.drain_s, on_stopping)
            try:
                workers = await _load_workers(settings, load)
            except CannotServeError as error:
                failure = error
                tasks.cancel_scope.cancel()
                return
            gateway.server = Server(
                settings,
                workers,
                tasks=tasks,
                recorder=recorder,
                identities=SystemIdentities(),
                decode_media=MediaDecoder(voices).decode,
                telemetry=gateway.sight.hub,
            )
            tasks.start_soon(gateway.server.refresh_estimates)
            tasks.start_soon(gateway.server.replace_workers)
            on_ready()
    finally:
        gc.unfreeze()
        with anyio.CancelScope(shield=True):
            await recorder.aclose()
            if gateway is not None:
                with anyio.move_on_after(LAST_WAIT_S):
                    await anyio.to_thread.run_sync(gateway.sight.close, abandon_on_cancel=True)
        if failure is not None:
            raise failure


# -- what is needed before anybody can be served ---------------------------------------------------


def _certificate(settings: Settings) -> Certificate | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        return Certificate(settings.tls_cert, settings.tls_key)
    except CertificateError as error:
        raise CannotServeError(str(error)) from error


def _voices(settings: Settings) -> VoiceLibrary | None:
    return None if settings.voices is None else VoiceLibrary(settings.voices)


def _gateway(settings: Settings, counters: Counters, recorder: Recorder) -> Gateway:
    try:
        return Gateway(settings, counters=counters, recorder=recorder)
    except (KeyFileError, TracesMissingError, ValueError) as error:
        raise CannotServeError(str(error)) from error


def _spare_what_stays() -> None:
    """Take what was loaded out of the garbage collector's sight until the server ends.

    With a model that is some 400000 objects, and looking at them holds all sessions up for 0.2 s.
    """
    gc.collect()
    gc.freeze()


def _allow_open_files(settings: Settings) -> None:
    """See that as many connections as are allowed can be open, beside logs and what else is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * settings.connections_max + OTHER_FILES  # each may have a log
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    if top < wanted:
        text = "%d files may be open, and %d connections want %d: raise the limit (ulimit -n)"
        _logger.warning(text, top, settings.connections_max, wanted)


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
            with tempfile.TemporaryFile(dir=settings.record_to):
                pass  # it can be written to
    except OSError as error:
        for bound in listeners:
            await bound.aclose()
        raise CannotServeError(
            f"cannot record to {settings.record_to}: {error.strerror}"
        ) from error
    return listeners


async def _load_workers(settings: Settings, load: Load) -> Workers:
    """Load every worker's model, one after the other; each is loaded anew where it is replaced."""
    names = (settings.model, *settings.workers)
    loaders = [partial(_load_one, settings, load, name) for name in names]
    loaded: list[Backend] = []
    for name, load_it in zip(names, loaders, strict=True):
        try:
            loaded.append(await load_it())
        except (OSError, ValueError, RuntimeError, BackendError) as error:
            raise CannotServeError(f"cannot load the model {name}: {error}") from error
    _spare_what_stays()
    try:
        return Workers(loaded, load=partial(_reload, loaders))
    except ValueError as error:
        raise CannotServeError(str(error)) from error


async def _load_one(settings: Settings, load: Load, name: str) -> Backend:
    backend = await anyio.to_thread.run_sync(
        partial(load, device=settings.device, dtype=settings.dtype),
        name,
        settings.slots,
        abandon_on_cancel=True,  # a server that is to end does not wait for a large model
    )
    if isinstance(backend, Remote):
        await backend.check()
    return backend


async def _reload(loaders: Sequence[Callable[[], Awaitable[Backend]]], place: int) -> Backend:
    gc.unfreeze()  # The model that is replaced must be found, once nobody holds it any more.
    return await loaders[place]()


# -- the end ---------------------------------------------------------------------------------------


async def _watch_signals(
    gateway: Gateway, tasks: TaskGroup, drain_s: int, on_stopping: Callable[[], None]
) -> None:
    patience, has_begun = anyio.CancelScope(), False
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            server = gateway.server
            if server is None or patience.cancel_called:
                break
            if has_begun:
                _logger.warning("%s: ending %d sessions now", number.name, server.sessions)
                patience.cancel()
            else:
                has_begun = True
                told = logging.WARNING if server.sessions and drain_s else logging.INFO
                text = "%s: %d sessions have %d s to finish"
                _logger.log(told, text, number.name, server.sessions, drain_s)
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
