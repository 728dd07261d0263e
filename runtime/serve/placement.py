"""A placement: it loads the model of each place of a server, at the start and as a replacement.

| placement | setting | a place is |
|---|---|---|
| `Embedded` | none | a model in the server's own process |
| `Isolated` | `isolate` | a worker process that the server starts and ends |
| `Static` | `worker_addresses` | a worker that something else keeps running |
| of a package | `placement` | as the package says: with `ray` a worker on a GPU of a cluster |

A package offers a placement as an entry point of the group `PLACEMENTS`: a module with the
functions of `PlacementModule` (`examples/ray_placement`). It is imported only when it is named.

Static workers are kept running by systemd, Slurm or Kubernetes. A worker that is not there when the
server starts is waited for: both may be started at once. Later it is tried again by `Workers`,
which pauses between.

Isolated workers are one process a place, each on a Unix socket:

- There is one for each model that the settings name, or one on each GPU where they name one.
- The sockets are in a folder that only the server's user can enter. A worker ends when its standard
  input does: with the server, also if that was killed.
- A worker that dies is replaced as any backend that is gone (`Workers`). One that is given up is
  ended, and killed if it does not.
- What a worker says on standard error goes to the server's log, line by line, within bounds.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol, cast, runtime_checkable

import anyio
import anyio.to_thread
from anyio.abc import ByteReceiveStream, Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from .. import ERROR, RUN
from ..link.backend import WorkerBackend, connect, greet
from ..link.link import UnixAddress, WorkerAddress, read_address, read_token
from ..model.backends.base import Backend, BackendError, BackendGone, BackendRefused
from ..model.models import MODELS, is_installed
from ..settings.settings import Settings, declared, nearest
from ..settings.sources import OF_LOADING
from ..slots.workers import Extend, NewPlace, Workers

# -- workers at addresses --------------------------------------------------------------------------


START_WAIT_S: Final = 600.0
"""A large model from a cold disk takes minutes; the server is not ready meanwhile."""
START_PAUSE_S: Final = 1.0
"""Between two tries: a refused connection costs nothing."""

_logger = logging.getLogger("antiphon.workers")


class Static:
    """Workers at the addresses of the settings, which `check` has read before."""

    is_named_by_workers = True

    def __init__(self, settings: Settings, tasks: TaskGroup) -> None:
        self.names = settings.worker_addresses
        self._addresses = tuple(map(read_address, self.names))
        file = settings.worker_token_file
        self._token = "" if file is None else read_token(file)
        self._ca = settings.worker_ca
        self._tasks = tasks
        self._met: set[int] = set()

    async def load(self, place: int) -> WorkerBackend:
        """Connect to a worker; the first time it is waited for, `START_WAIT_S` at most."""
        address = self._addresses[place]
        patience_s = 0.0 if place in self._met else START_WAIT_S
        began_s, tries = anyio.current_time(), 0
        while True:
            try:
                backend = await self._connect(address)
            except BackendGone as error:
                if anyio.current_time() - began_s >= patience_s:
                    raise
                if not tries:
                    _logger.warning("%s: waiting for it", error)
                tries += 1
                await anyio.sleep(START_PAUSE_S)
            else:
                self._met.add(place)
                return backend

    def extend(self, address: str) -> NewPlace:
        """Make a place for a worker that exists; `ValueError`: an invalid address."""
        where = read_address(address)
        if not self._token and not where.is_local:
            raise ValueError(f"{where} is not on this machine: the server has no worker_token_file")
        return NewPlace(str(where), partial(self._connect, where))

    async def _connect(self, address: WorkerAddress) -> WorkerBackend:
        # For another machine, or where an authority is named.
        tls = None if address.is_local and self._ca is None else trusting(self._ca)
        return await connect(address, token=self._token, tls=tls, tasks=self._tasks)

    def close(self) -> None:
        """Nothing was made."""


def trusting(ca: Path | str | None) -> ssl.SSLContext:
    """The context for a worker, by the authority in a file; None takes those of the system.

    `BackendRefused`: the file holds no certificates.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:
        raise BackendRefused(f"{ca}: holds no certificates: {error}") from error


# -- worker processes of the server ----------------------------------------------------------------


LINE_BYTES_MAX: Final = 4096
"""Of a worker's words; the rest of a longer line is a line of its own."""
LINES_PER_S_MAX: Final = 50
"""A trace has as many. More are counted and left out: a worker must not fill the server's log."""
END_WAIT_S: Final = 5.0
"""A worker whose input has ended is gone at once; one that hangs is killed."""
GPUS: Final = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU, numbered as CUDA does on a machine of equal GPUs."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

_LEVELS: Final = logging.getLevelNamesMapping()
_LINE: Final = re.compile(r"\S+Z (?P<level>debug|info|warning|error|critical) +(?P<text>.*)")
"""A line of a worker's own log; other lines are of libraries, or traces."""


class Isolated:
    """Worker processes; `tasks` hold them."""

    is_named_by_workers = False
    extend = None

    def __init__(self, settings: Settings, tasks: TaskGroup) -> None:
        self._settings = settings
        self._tasks = tasks
        is_folder = settings.model not in MODELS and not is_installed(settings.model)
        on_gpu = settings.device == "cuda" or (settings.device is None and is_folder)
        self._gpus = gpus() if on_gpu else ()
        names = (settings.model, *settings.workers)
        self.names = names if settings.workers else names * max(1, len(self._gpus))
        self._folder = tempfile.TemporaryDirectory(prefix="antiphon-")
        self._started = 0

    async def load(self, place: int) -> WorkerBackend:
        """Start a worker and connect to it; `BackendError`: it did not start, and says why."""
        self._started += 1
        address = UnixAddress(Path(self._folder.name) / f"worker-{self._started}")
        own = {VISIBLE: self._gpus[place % len(self._gpus)]} if self._gpus else {}
        process = await anyio.open_process(
            self._command(place, address),
            env={**os.environ, **own},
            start_new_session=True,  # Ctrl-C is for the server: sessions end with their models.
        )
        worker = _Process(place, process)
        self._tasks.start_soon(worker.run)
        try:
            await worker.wait_until_ready()
            backend = await greet(IsolatedBackend, address)
        except BaseException:
            worker.ended.set()
            raise
        backend.process = worker
        self._tasks.start_soon(backend.run)
        return backend

    def close(self) -> None:
        """Remove the sockets' folder."""
        self._folder.cleanup()

    def _command(self, place: int, address: UnixAddress) -> list[str]:
        command = [*RUN, "workers", "start", "--until-stdin-ends", "--listen", str(address)]
        return command + model_options(self._settings, self.names[place])


class IsolatedBackend(WorkerBackend):
    """The model of a worker that ends with its backend."""

    process: _Process

    @property
    def where(self) -> str:
        """Its process."""
        return f"pid {self.process.pid}"

    async def aclose(self) -> None:
        """Close the link and end the process; a hanging one is killed."""
        await super().aclose()
        self.process.ended.set()
        await self.process.over.wait()


class _Process:
    """A worker's process at a place.

    `ended`: it is to end. `over`: it has ended.
    """

    def __init__(self, place: int, process: Process) -> None:
        self._place = place
        self._process = process
        self.pid = process.pid
        self.ended = anyio.Event()
        self.over = anyio.Event()
        self._stderr = StderrLog(f"worker {place}", logging.WARNING)

    async def wait_until_ready(self) -> None:
        """Wait until it takes gateways; `BackendError` with its last words if it ends before."""
        assert self._process.stdout is not None
        lines = BufferedByteReceiveStream(self._process.stdout)
        try:
            while await lines.receive_until(b"\n", LINE_BYTES_MAX) != b"ready":
                pass
        except (anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.EndOfStream):
            self.ended.set()
            await self.over.wait()
            raise BackendError(f"the worker did not start: {self._stderr.last}") from None

    async def run(self) -> None:
        """Log what it says until it ends, or is to end; cancelled, it is killed."""
        process = self._process
        assert process.stdin is not None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_on_request, tasks)
                assert process.stderr is not None
                await self._stderr.log(process.stderr)
                await process.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                await process.aclose()
            _logger.info("the process of worker %d ended: %s", self._place, process.returncode)
            self.over.set()

    async def _end_on_request(self, tasks: TaskGroup) -> None:
        assert self._process.stdin is not None
        await self.ended.wait()
        await self._process.stdin.aclose()
        await anyio.sleep(END_WAIT_S)
        tasks.cancel_scope.cancel()


class StderrLog:
    """What a process says on standard error, logged at most `LINES_PER_S_MAX` a second on average.

    `level`: of lines that are not of our own log. `last`: the last line.
    """

    def __init__(self, name: str, level: int) -> None:
        self._name = name
        self._level = level
        self.last = "it does not say why"

    async def log(self, stderr: ByteReceiveStream) -> None:
        """Log it line by line to its end."""
        began_s, lines, left_out = anyio.current_time(), 0, 0
        async for line in _lines(stderr):
            self.last = line.removeprefix(ERROR)
            now_s = anyio.current_time()
            if now_s - began_s >= 1:
                if left_out:
                    _logger.warning("%s: %d lines are left out", self._name, left_out)
                began_s, lines, left_out = now_s, 0, 0
            lines += 1
            if lines <= LINES_PER_S_MAX:
                found = _LINE.fullmatch(line)
                level = self._level if found is None else _LEVELS[found["level"].upper()]
                text = line if found is None else found["text"]
                _logger.log(level, "%s: %s", self._name, text)
            else:
                left_out += 1


async def _lines(stream: ByteReceiveStream) -> AsyncIterator[str]:
    """Yield the lines of a stream that are not empty; a long one in parts."""
    kept = b""
    async for data in stream:
        *lines, kept = (kept + data).split(b"\n")
        while len(kept) > LINE_BYTES_MAX:
            lines.append(kept[:LINE_BYTES_MAX])
            kept = kept[LINE_BYTES_MAX:]
        for line in lines:
            if line.strip():
                yield line.decode(errors="replace").rstrip()
    if kept.strip():
        yield kept.decode(errors="replace").rstrip()


def model_options(settings: Settings, model: str) -> list[str]:
    """The options of an `antiphon workers start` of a server's own."""
    options = ["--model", model]
    for setting in declared(Settings):
        value = getattr(settings, setting.name)
        if setting.name in OF_LOADING - {"model"} and value is not None and value is not False:
            options += [setting.flag] if value is True else [setting.flag, str(value)]
    return options + (["--verbose"] if settings.log_level in {"info", "debug"} else [])


def gpus() -> tuple[str, ...]:
    """The GPUs of this machine that the server may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    try:
        return tuple(str(number) for number, _ in enumerate(GPUS.iterdir()))
    except OSError:
        return ()


# -- the placement of a server ---------------------------------------------------------------------


PLACEMENTS: Final = "antiphon.placements"
"""The group of entry points, by the names that the setting `placement` may have besides `auto`."""
Load = Callable[..., Backend]
"""Loads a model in a thread; called as `load_backend` is."""


class Placement(Protocol):
    """The models of a server.

    `is_named_by_workers`: the settings do not say which model it is.
    """

    is_named_by_workers: bool

    @property
    def extend(self) -> Extend | None:
        """Makes places for further workers; None where none can be added."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The places, for errors."""
        ...

    async def load(self, place: int) -> Backend:
        """Load the model of a place, or connect to it; raises the errors of loading."""
        ...

    def close(self) -> None:
        """Remove what was made for it, when the server's tasks are over."""
        ...


@runtime_checkable
class ScalingPlacement(Protocol):
    """A placement that adds and drains workers by itself."""

    async def scale(self, workers: Workers, load: Callable[[], int]) -> None:
        """Keep as many workers as `load` says, within the bounds, until cancelled."""
        ...


class PlacementModule(Protocol):
    """The module of an entry point of `PLACEMENTS`."""

    def make(self, settings: Settings, tasks: TaskGroup) -> Placement:
        """The placement that the settings ask for; `tasks` hold its links and processes."""
        ...

    def problems(self, settings: Settings) -> Iterator[str]:
        """What it lacks, each with its remedy."""
        ...


def offer(name: str) -> PlacementModule:
    """Import the package of a `NAME` or `NAME:TEXT`; `ValueError`: none of this name is there."""
    wanted, found = name.partition(":")[0], entry_points(group=PLACEMENTS)
    if wanted not in found.names:
        there = ", ".join(("auto", *sorted(found.names)))
        hint = "; it is in the sources of Antiphon: pip install ./examples/ray_placement"
        hint = hint if wanted == "ray" else nearest(wanted, found.names)
        raise ValueError(f"no package offers {wanted!r}: choose from {there}{hint}")
    return cast("PlacementModule", found[wanted].load())


def placement_of(settings: Settings, load: Load, tasks: TaskGroup) -> Placement:
    """The placement that the settings ask for; `tasks` hold its links and processes."""
    if settings.placement != "auto":
        return offer(settings.placement).make(settings, tasks)
    if settings.worker_addresses:
        return Static(settings, tasks)
    if settings.isolate:
        return Isolated(settings, tasks)
    return Embedded(settings, load)


class Embedded:
    """Models in the server's own process."""

    is_named_by_workers = False
    extend = None

    def __init__(self, settings: Settings, load: Load) -> None:
        self.names = (settings.model, *settings.workers)
        self._slots = settings.slots
        names = OF_LOADING - {"model", "slots"}
        self._load = partial(load, **{name: getattr(settings, name) for name in names})

    async def load(self, place: int) -> Backend:
        """Load a model in a thread."""
        return await anyio.to_thread.run_sync(
            self._load,
            self.names[place],
            self._slots,
            abandon_on_cancel=True,  # a server that is told to end does not wait for a large model
        )

    def close(self) -> None:
        """Nothing was made."""
