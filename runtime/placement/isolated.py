"""Workers that the server starts itself: one process a place, each on a Unix socket.

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
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from .. import RUN
from ..link.address import UnixAddress
from ..link.backend import WorkerBackend, greet
from ..model.backends.base import BackendError
from ..model.models import MODELS, is_installed
from ..settings.settings import Settings

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

_logger = logging.getLogger("antiphon.workers")


class Isolated:
    """Worker processes; `tasks` hold them."""

    is_named_by_workers = False
    extend = None

    def __init__(self, settings: Settings, tasks: TaskGroup) -> None:
        self._settings = settings
        self._tasks = tasks
        self._gpus = gpus() if _wants_gpu(settings) else ()
        names = (settings.model, *settings.workers)
        self.names = names if settings.workers else names * max(1, len(self._gpus))
        self._folder = tempfile.TemporaryDirectory(prefix="antiphon-")
        self._started = 0

    async def load(self, place: int) -> WorkerBackend:
        """Start a worker and connect to it; `BackendError`: it did not start, and says why."""
        self._started += 1
        address = UnixAddress(Path(self._folder.name) / f"worker-{self._started}")
        process = await anyio.open_process(
            self._command(place, address),
            env=self._environment(place),
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
        command = [*RUN, "worker", "--until-stdin-ends", "--listen", str(address)]
        return command + model_options(self._settings, self.names[place])

    def _environment(self, place: int) -> dict[str, str]:
        if not self._gpus:
            return dict(os.environ)
        return {**os.environ, VISIBLE: self._gpus[place % len(self._gpus)]}


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
        self._words = Words(f"worker {place}", logging.WARNING)

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
            raise BackendError(f"the worker did not start: {self._words.last}") from None

    async def run(self) -> None:
        """Log what it says until it ends, or is to end; cancelled, it is killed."""
        process = self._process
        assert process.stdin is not None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_when_told, tasks)
                assert process.stderr is not None
                await self._words.log(process.stderr)
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

    async def _end_when_told(self, tasks: TaskGroup) -> None:
        assert self._process.stdin is not None
        await self.ended.wait()
        await self._process.stdin.aclose()
        await anyio.sleep(END_WAIT_S)
        tasks.cancel_scope.cancel()


class Words:
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
            self.last = line
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
    """The options of an `antiphon worker` that a server starts."""
    options = ["--model", model]
    for flag, value in (
        ("--slots", settings.slots),
        ("--device", settings.device),
        ("--dtype", settings.dtype),
    ):
        options += [] if value is None else [flag, str(value)]
    options += ["--deterministic"] if settings.deterministic else []
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


def _wants_gpu(settings: Settings) -> bool:
    is_folder = settings.model not in MODELS and not is_installed(settings.model)
    return settings.device == "cuda" or (settings.device is None and is_folder)
