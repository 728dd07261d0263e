"""A server on its port: from loading the model to a clean shutdown.

The port is bound first, so that `/health` and `/ready` answer while the model loads. `run`'s
nursery owns the listener and the model calls; a connection's tasks live in the listener's.

A connection takes a descriptor, and its session's log another, maybe for longer. Connections are
taken only while there is room for both: a log that cannot be opened is a lost recording.

The first SIGINT, SIGTERM or SIGHUP drains, and so does `POST /api/drain`, after which a signal
counts as the second: no session is admitted, `/ready` is 503, and running sessions are warned and
may go on for `drain_s`. Then, or at the second signal, every session gets `session.closed` with
`server_shutdown` and every log its `fin`, within `shutdown_wait_s`. The third signal cuts off the
rest. While the model loads, the first one ends the server. A lost device acts as a second signal,
but is an error.
"""

from __future__ import annotations

import logging
import resource
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import attrs
from anyio.abc import TaskGroup

from recorder.storage.remote import RemoteStore
from recorder.write.writer import Recorder, RecorderPolicy

from ..access.keys import KeyFileError
from ..api.views import LoadViewer
from ..media import speech_detector as vad
from ..media.voices import VoiceLibrary
from ..model.backends.base import Backend, BackendError, DeviceLost, Remote
from ..model.models import load_backend, require_deterministic
from ..net import listener
from ..net.connection import CLOSE_FLUSH_S, Ready
from ..net.limits import Counters
from ..net.listener import Address
from ..net.process import freeze_gc, keep_freed_memory, unfreeze_gc
from ..net.tls import Certificate, CertificateError
from ..session.journal import FIN_WAIT_S, ready_now
from ..session.model_calls import RELEASE_WAIT_S
from ..session.server import Server
from ..session.setup import SystemIdentities
from ..session.speech_input import ENERGY_ONLY, SpeechInput, Transcriber
from ..settings.settings import Settings
from ..slots.workers import REPLACE_SPARE_S, Workers
from ..telemetry.metrics import TracesMissingError
from .gateway import Gateway
from .placement import Load, Placement, ScalingPlacement, placement_of

# -- open files ------------------------------------------------------------------------------------


OTHER_FILES: Final = 512
"""Model files, Python's own files, connections being refused, and logs that end."""
LOGS_ENDING_MAX: Final = 256
"""Logs of ended sessions that wait to be synced: half of the reserve."""

_logger = logging.getLogger("antiphon.server")


def allow(wanted: int, *, files: int | None) -> tuple[int, int]:
    """The limits that `files` open files allow; None means no limit.

    Returns:
        Of connections, at most `wanted`, and of logs of ended sessions.
    """
    if files is None or files >= 2 * wanted + OTHER_FILES:
        return wanted, LOGS_ENDING_MAX
    reserve = min(OTHER_FILES, files // 2)
    connections_max = max(1, min(wanted, (files - reserve) // 2))
    return connections_max, max(1, reserve * LOGS_ENDING_MAX // OTHER_FILES)


def allow_open_files(settings: Settings) -> tuple[Settings, int]:
    """Raise the limit of open files; return the settings that fit, and `logs_ending_max`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.connections_max
    needed = 2 * wanted + OTHER_FILES
    files = None if resource.RLIM_INFINITY in (soft, hard) else min(max(soft, needed), hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if files is None else files, hard))
    connections_max, logs_ending_max = allow(wanted, files=files)
    if connections_max < wanted:
        text = (
            "%d files may be open: connections_max is lowered from %d to %d. Raise the limit "
            "(ulimit -n) to %d"
        )
        _logger.warning(text, files, wanted, connections_max, needed)
    return attrs.evolve(settings, connections_max=connections_max), logs_ending_max


# -- the end ---------------------------------------------------------------------------------------


SHUTDOWN_SPARE_S: Final = 10.0
"""Added to the bounds of a session's end, for a busy machine."""
ATTACHED_WAIT_S: Final = 2.0
"""Attached clients read the end of a log within `tail.POLL_S`; one that is slow is cut off."""
CUT_OFF_S: Final = max(RELEASE_WAIT_S, FIN_WAIT_S)
"""The most that cut-off sessions take: slots are released while logs are finished."""

OnStopping = Callable[[signal.Signals | None], None]
"""Called with None when all sessions are over, or with the signal that cuts them off."""


def shutdown_wait_s(settings: Settings) -> float:
    """The time for sessions that are asked to end, in seconds: the longest of the settings.

    A hung model call, its slot's release and the log's last sync come in turn; the last frames to a
    client that takes nothing at the same time. A client that takes minutes of speech slowly is cut
    off.
    """
    model_s = settings.cleanup_wait_s + RELEASE_WAIT_S + FIN_WAIT_S
    client_s = settings.stall_s + CLOSE_FLUSH_S
    return max(model_s, client_s) + SHUTDOWN_SPARE_S


class Shutdown:
    """The end of one server: `tasks` are all of its tasks; `on_stopping` is called when it comes.

    `patience`: cancelled when sessions are asked to end; `cut_by`: the signal that cut them off, or
    None; `has_begun`: the end has begun; `lost`: the device whose loss ended the server, or None;
    `attached_left` waits until all attached clients have left.
    """

    def __init__(
        self,
        settings: Settings,
        tasks: TaskGroup,
        on_stopping: OnStopping,
        attached_left: Ready = ready_now,
    ) -> None:
        self.attached_left = attached_left
        self.settings = settings
        self.tasks = tasks
        self.patience = anyio.CancelScope()
        self.cut_by: signal.Signals | None = None
        self.lost: DeviceLost | None = None
        self._on_stopping = on_stopping
        self.has_begun = False

    def drain(self, server: Server, asked_by: str, level: int = logging.INFO) -> None:
        """Start the shutdown as the first signal does, and log who asked for it.

        `level`: of that, where no session is warned.
        """
        drain_s = self.settings.drain_s
        level = logging.WARNING if server.sessions and drain_s else level
        text = "%s: %d sessions have %d s to finish; another signal ends them at once"
        _logger.log(level, text, asked_by, server.sessions, drain_s)
        self.begin(server)

    def begin(self, server: Server) -> None:
        """Start the shutdown; a second call does nothing."""
        if not self.has_begun:
            self.has_begun = True
            self.tasks.start_soon(shut_down, server, self)

    def give_up(self, server: Server, lost: DeviceLost) -> None:
        """End a server that has lost its device, without a drain; it may be ending already."""
        _logger.error("%s: ending %d sessions", lost, server.sessions)
        self.lost = lost
        self.patience.cancel()
        self.begin(server)

    def cancel_all(self, cut_by: signal.Signals | None = None) -> None:
        """Cancel all that is left; `cut_by` is the signal that cuts sessions off, or None."""
        self.cut_by = cut_by
        self._on_stopping(cut_by)
        self.tasks.cancel_scope.cancel()


async def watch_signals(server: Callable[[], Server | None], end: Shutdown) -> None:
    """Act on signals until the end cancels it; `server` returns None while the model loads."""
    come = 0
    heeded = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under `nohup`
        heeded.append(signal.SIGHUP)
    with anyio.open_signal_receiver(*heeded) as signals:
        async for number in signals:
            serving = server()
            if serving is not None:
                come = max(come, int(end.has_begun)) + 1
            if serving is None:
                end.cancel_all()
            elif come > 2:
                _logger.warning("%s: %d sessions are cut off", number.name, serving.sessions)
                end.cancel_all(cut_by=number)
            elif come == 2:
                _logger.warning("%s: ending %d sessions now", number.name, serving.sessions)
                end.patience.cancel()
            else:
                end.drain(serving, number.name)


async def shut_down(server: Server, end: Shutdown) -> None:
    """Drain a server, end its sessions, then cancel its tasks."""
    drain_s = end.settings.drain_s
    if drain_s and not end.patience.cancel_called:
        server.begin_drain(drain_s)
        end.patience.deadline = anyio.current_time() + drain_s
        with end.patience:
            await server.wait_until_empty()
    end.patience.cancel()
    server.drain()
    wait_s = shutdown_wait_s(end.settings)
    with anyio.move_on_after(wait_s) as scope:
        await server.wait_until_empty()
    if scope.cancelled_caught:
        _logger.error("%d sessions did not end in %g s", server.sessions, wait_s)
    with anyio.move_on_after(ATTACHED_WAIT_S):
        await end.attached_left()
    end.cancel_all()


# -- the server ------------------------------------------------------------------------------------


LAST_WAIT_S: Final = 10.0
"""For the last spans and uploads, after all sessions ended and their logs are closed."""


class CannotServeError(Exception):
    """A requirement of the settings is not available; the text says which, in one line."""


async def run(
    settings: Settings,
    *,
    load: Load = load_backend,
    load_viewer: LoadViewer | None = None,
    on_bound: Callable[[tuple[Address, ...]], None] = lambda _: None,
    on_ready: Callable[[], None] = lambda: None,
    on_stopping: OnStopping = lambda _: None,
) -> signal.Signals | None:
    """Serve until a signal ends it; return the signal that cut sessions off, or None.

    Args:
        load: loads a model in a thread; called as `load_backend` is.
        load_viewer: loads what makes the views of a recording; None for no views.
        on_bound: called with the addresses, before the model is loaded.
        on_ready: called when sessions are taken.
        on_stopping: called when all sessions are over or cut off; no session waits for a thread
            that still hangs in the model.

    `CannotServeError`: the port, the log folder, the object store, the model, the keys or the
    certificate is not available; or the device was lost meanwhile.
    """
    counters, certificate = Counters(), _certificate(settings)
    voices = None if settings.voices is None else VoiceLibrary(settings.voices)
    remote = await _store(settings)
    recorder = Recorder(RecorderPolicy(durability=settings.durability))
    failure: CannotServeError | None = None
    gateway: Gateway | None = None
    placement: Placement | None = None
    speech_input = ENERGY_ONLY
    try:
        settings, logs_ending_max = allow_open_files(settings)
        open_gateway = partial(Gateway, settings, counters=counters, recorder=recorder)
        with _needing(KeyFileError, TracesMissingError, ValueError):
            gateway = open_gateway(load_viewer=load_viewer, voices=voices, remote=remote)
        keep_freed_memory()
        listeners = await _bind(settings)
        async with anyio.create_task_group() as tasks:
            serve_port = partial(
                listener.serve,
                on_websocket=gateway.on_websocket,
                app=gateway.app(),
                settings=settings,
                certificate=certificate,
                counters=counters,
                has_files=partial(_has_files, logs_ending_max, recorder, gateway),
            )
            on_bound(await tasks.start(serve_port, listeners))
            for work in (gateway.watch_keys, gateway.keep_recordings, gateway.store_recordings):
                tasks.start_soon(work)
            end = Shutdown(settings, tasks, on_stopping, gateway.attached_left)
            gateway.drain = partial(end.drain, level=logging.WARNING)  # by whom is to be known
            tasks.start_soon(watch_signals, lambda: gateway.server, end)
            placement = placement_of(settings, load, tasks)
            try:
                workers = await _load_workers(settings, placement)
                classifier = await _classifier(settings)
                speech_input = SpeechInput(classifier, await _transcriber(settings, load, workers))
            except CannotServeError as error:
                failure = error
                tasks.cancel_scope.cancel()
                return None
            if placement.is_named_by_workers:
                settings = attrs.evolve(settings, model=workers.info.name)
            gateway.model = settings.model
            make = partial(Server, settings, workers, tasks=tasks, telemetry=gateway.telemetry.hub)
            make = partial(make, decode_media=gateway.decoder.decode, has_key=gateway.has_key)
            make = partial(make, recorder=recorder, speech_input=speech_input)
            gateway.server = await _make(make, settings)
            tasks.start_soon(gateway.server.refresh)
            tasks.start_soon(gateway.server.replace_workers, partial(end.give_up, gateway.server))
            if isinstance(placement, ScalingPlacement):
                tasks.start_soon(placement.scale, workers, gateway.workers_wanted)
            on_ready()
    finally:
        await _close(recorder, gateway, placement, speech_input.transcriber)
        if failure is not None:
            raise failure
    if end.lost is not None:
        raise CannotServeError(f"{end.lost}: the process must be restarted") from end.lost
    return end.cut_by


async def _transcriber(settings: Settings, load: Load, workers: Workers) -> Transcriber | None:
    """Load the model that transcribes what users say, with a slot for each session."""
    if settings.transcriber is None:
        return None
    name, slots = settings.transcriber, workers.pool.counts.slots
    try:
        backend = await anyio.to_thread.run_sync(
            partial(load, name, slots, device=settings.device, dtype=settings.dtype),
            abandon_on_cancel=True,
        )
        return Transcriber(backend)
    except (OSError, ValueError, RuntimeError, BackendError) as error:
        raise CannotServeError(f"cannot load the transcriber {name}: {error}") from error


async def _classifier(settings: Settings) -> Callable[[], vad.FrameClassifier]:
    """What finds users' speech; a model is loaded before the first of them comes."""
    if settings.detector == "energy":
        return vad.EnergyClassifier
    try:
        await anyio.to_thread.run_sync(vad.network, abandon_on_cancel=True)
    except vad.NoSileroError as error:
        if settings.detector is None:
            return vad.EnergyClassifier
        raise CannotServeError(str(error)) from error
    return vad.SileroClassifier


async def _make(make: Callable[..., Server], settings: Settings) -> Server:
    """Make the server, and go on with the sessions of the one before; clients wait meanwhile."""
    server = make(identities=SystemIdentities())
    with _needing(OSError, what="cannot read the recordings: "):
        sessions = await server.recover() if settings.resumable else 0
    if sessions:
        _logger.warning("%d sessions of the previous server were resumed", sessions)
    return server


# -- what serving needs ----------------------------------------------------------------------------


@contextmanager
def _needing(*wrong: type[Exception], what: str = "") -> Iterator[None]:
    """Raise `CannotServeError` for these errors, with `what` before their text."""
    try:
        yield
    except wrong as error:
        raise CannotServeError(f"{what}{error}") from error


def _certificate(settings: Settings) -> Certificate | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    with _needing(CertificateError):
        return Certificate(settings.tls_cert, settings.tls_key)


async def _store(settings: Settings) -> RemoteStore | None:
    """Open the object store, and list it: it cannot be seen otherwise whether it is usable."""
    if settings.store is None or settings.record_to is None:
        return None
    with _needing(OSError, what="cannot use the object store "):
        remote = RemoteStore.open(settings.store)
        await anyio.to_thread.run_sync(remote.check, abandon_on_cancel=True)
        return remote


def _has_files(logs_ending_max: int, recorder: Recorder, gateway: Gateway) -> bool:
    """Whether another connection leaves enough file descriptors for the logs."""
    sessions = 0 if gateway.server is None else gateway.server.sessions
    return recorder.statistics.logs - sessions < logs_ending_max


async def _close(
    recorder: Recorder,
    gateway: Gateway | None,
    placement: Placement | None,
    transcriber: Transcriber | None,
) -> None:
    """Close the logs, send the last spans and store the last logs, even when cancelled."""
    unfreeze_gc()
    with anyio.CancelScope(shield=True):
        await recorder.aclose()
        if gateway is not None:
            with anyio.move_on_after(LAST_WAIT_S):
                await gateway.finish()
        if transcriber is not None:
            await transcriber.aclose()
    if placement is not None:
        placement.close()


async def _bind(settings: Settings) -> list[listener.SocketListener]:
    """Bind the port, then make the folder: a server that cannot start leaves nothing behind."""
    try:
        listeners = await listener.bind(settings.host, settings.port)
    except OSError as error:
        address = f"{settings.host} port {settings.port}"
        text = f"cannot listen on {address}: {error.strerror}; give another --port or --host"
        raise CannotServeError(text) from error
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


async def _load_workers(settings: Settings, placement: Placement) -> Workers:
    """Load the model of every place in turn; the placement is kept for replacements."""
    load = partial(_load_one, settings, placement)
    loaded: list[Backend] = []
    for place, name in enumerate(placement.names):
        wrong = (OSError, ValueError, RuntimeError, BackendError)
        with _needing(*wrong, what=f"cannot load the model {name}: "):
            loaded.append(await load(place))
    freeze_gc()
    wait_s = settings.cleanup_wait_s + RELEASE_WAIT_S + REPLACE_SPARE_S
    with _needing(ValueError):
        return Workers(
            loaded, load=partial(_reload, load), extend=placement.extend, replace_wait_s=wait_s
        )


async def _load_one(settings: Settings, placement: Placement, place: int) -> Backend:
    backend = await placement.load(place)
    if settings.deterministic:
        require_deterministic(placement.names[place], backend.info)
    if isinstance(backend, Remote):
        await backend.check()
    return backend


async def _reload(load: Callable[[int], Awaitable[Backend]], place: int) -> Backend:
    unfreeze_gc()
    return await load(place)
