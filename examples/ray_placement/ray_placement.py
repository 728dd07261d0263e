"""Workers on a Ray cluster: an actor on each GPU that the server asks for.

- Ray chooses the node of a worker, keeps the worker running, and starts it again on another node if
  its own is lost. Sound and units do not pass through Ray: the server connects to the worker, as to
  one at an address.
- Ray is used in a process of its own (`ray_driver.py`), which is started with the first call, and
  again with the next one after it ended. With that process Ray ends all its workers.
- The server is ready with its first worker; the others join it when they come.
- There are `workers_wanted` workers. With `workers_max` there are as many as the load asks for,
  between the two: more at once, fewer once the load was lower for `SHRINK_WAIT_S`. A worker is
  drained before it is ended.
- A worker that was drained by an operator is ended; another one takes its place.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import attrs
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from ray_driver import TLS_AUTHORITY, uses_tls

from protocol.values.errors import LocalProtocolError
from runtime.access.origins import read_authority
from runtime.link.backend import WorkerBackend, connect
from runtime.link.link import read_address, read_token
from runtime.model.backends.base import BackendError, BackendGone, BackendRefused
from runtime.serve.placement import StderrLog, model_options, trusting
from runtime.settings.settings import Settings, shown
from runtime.slots.workers import RETRY_S, RETRY_S_MAX, NewPlace, Place, Workers

# -- the cluster -----------------------------------------------------------------------------------


AUTO: Final = "auto"
"""The address of the cluster that this machine belongs to, as Ray has it."""
CONNECT_WAIT_S: Final = 120.0
"""Ray itself gives up after a minute, and its import takes seconds."""
REACH_WAIT_S: Final = 10.0
"""For a TCP connection, which takes milliseconds."""
END_WAIT_S: Final = 10.0
"""For the request to the autoscaler that is withdrawn; Ray ends the workers in any case."""
LINE_BYTES_MAX: Final = 64 << 10
"""Of an answer: an address, or one line of an error."""
DRIVER: Final = (*(sys.executable, "-P", "-c"), "from ray_driver import main; main()")

_logger = logging.getLogger("antiphon.workers")


class RayCluster:
    """The workers of a cluster, each on a GPU of its own, by numbers that the caller gives.

    `address` is as for `ray.init`; `tasks` hold the process that talks to the cluster. All calls
    raise `BackendGone` if the cluster is lost or cannot be reached.
    """

    def __init__(
        self,
        address: str,
        *,
        command: Sequence[str],
        token: str,
        tasks: TaskGroup,
        driver: Sequence[str] = DRIVER,
    ) -> None:
        self._address = address
        self._opening = {"ray": address, "command": list(command), "token": token}
        self._tasks = tasks
        self._command = driver
        self._connecting = anyio.Lock()
        self._driver: _Driver | None = None

    async def find(self, worker: int) -> str:
        """Wait until a worker takes gateways, and return its address; start it if there is none.

        `BackendRefused`: it does not start; the next call starts another one.
        """
        return str(await self._call(do="find", worker=worker))

    async def end(self, worker: int, *, again: bool = False) -> None:
        """Kill a worker; `again`: the cluster starts it again, maybe elsewhere.

        With the process that started it, it has ended already.
        """
        if self._driver is not None and not self._driver.is_over.is_set():
            await self._call(do="end", worker=worker, again=again)

    async def want(self, count: int) -> None:
        """Ask the autoscaler for as many GPUs."""
        await self._call(do="want", count=count)

    async def _call(self, **asked: object) -> object:
        async with self._connecting:
            driver = self._driver
            if driver is None or driver.is_over.is_set():
                driver = self._driver = await self._connect()
        return await driver.call(asked)

    async def _connect(self) -> _Driver:
        await self._check_head()
        process = await anyio.open_process(self._command, start_new_session=True)
        driver = _Driver(process)
        self._tasks.start_soon(driver.run)
        try:
            with anyio.fail_after(CONNECT_WAIT_S):
                await driver.send(self._opening)
                await driver.is_connected.wait()
        except BaseException as error:
            driver.ended.set()
            if isinstance(error, TimeoutError):
                text = f"the Ray cluster at {self._address} does not answer"
                raise BackendGone(f"{text} in {CONNECT_WAIT_S:g} s") from error
            raise
        if driver.failure or driver.is_over.is_set():
            text = driver.failure or driver.stderr.last
            raise BackendGone(f"cannot use the Ray cluster at {self._address}: {text}")
        return driver

    async def _check_head(self) -> None:
        """Check that something listens at the address: Ray would try for minutes, in silence."""
        address = read_authority(self._address)
        if address is None or address.port is None:
            return
        try:
            with anyio.fail_after(REACH_WAIT_S):
                stream = await anyio.connect_tcp(address.host, address.port)
                await stream.aclose()
        except (OSError, TimeoutError) as error:
            text = f"cannot reach the Ray cluster at {self._address}"
            raise BackendGone(f"{text}: {error or 'it does not answer'}") from error


@attrs.define(eq=False)
class _Call:
    """A call in flight; `came` is its answer, or None if the process ended."""

    done: anyio.Event = attrs.Factory(anyio.Event)
    came: Mapping[str, Any] | None = None


class _Driver:
    """The process that uses Ray; `ended`: it is to end, `is_over`: it has ended."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._sending = anyio.Lock()
        self.ended = anyio.Event()
        self.is_over = anyio.Event()
        self.is_connected = anyio.Event()
        self.failure = ""
        self.stderr = StderrLog("Ray", logging.INFO)

    async def send(self, message: Mapping[str, object]) -> None:
        """Send a line; that the process has ended shows elsewhere."""
        assert self._process.stdin is not None
        async with self._sending:
            with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._process.stdin.send(json.dumps(message).encode() + b"\n")

    async def call(self, asked: Mapping[str, object]) -> object:
        """Ask, and wait for the answer; `BackendRefused`, or `BackendGone` if the process ends."""
        number, call = next(self._numbers), _Call()
        self._calls[number] = call
        try:
            if not self.is_over.is_set():
                await self.send({"call": number, **asked})
                await call.done.wait()
        finally:
            del self._calls[number]
        if call.came is None:
            raise BackendGone("the connection with the Ray cluster is lost")
        if "failed" in call.came:
            raise BackendRefused(str(call.came["failed"]))
        return call.came["found"]

    async def run(self) -> None:
        """Read the process's messages until it ends; cancelled, it ends within `END_WAIT_S`."""
        process = self._process
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_on_request, tasks)
                async with anyio.create_task_group() as reading:
                    reading.start_soon(self.stderr.log, process.stderr)  # to its last stderr
                    await self._read()
                    await process.stdin.aclose()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await process.stdin.aclose()
                with anyio.move_on_after(END_WAIT_S if self.is_connected.is_set() else 0):
                    await process.wait()
                with suppress(ProcessLookupError):
                    process.kill()
                await process.aclose()
            self.is_over.set()
            self.is_connected.set()
            for call in self._calls.values():
                call.done.set()

    async def _end_on_request(self, tasks: TaskGroup) -> None:
        await self.ended.wait()
        tasks.cancel_scope.cancel()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        lines = BufferedByteReceiveStream(self._process.stdout)
        while True:
            try:
                message = json.loads(await lines.receive_until(b"\n", LINE_BYTES_MAX))
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.DelimiterNotFound):
                return
            call = self._calls.get(message.get("call", 0))
            if call is not None:
                call.came = message
                call.done.set()
            elif "note" in message:
                _logger.warning("%s", message["note"])
            elif "call" not in message:
                self.failure = message.get("failed", "")
                self.is_connected.set()


# -- the placement ---------------------------------------------------------------------------------


LOOK_S: Final = 1.0
"""Between two looks at the load, which changes with sessions that begin and end."""
SHRINK_WAIT_S: Final = 300.0
"""A node and a large model take minutes to come back; a lull is often shorter."""
TOKEN_BYTES: Final = 32
"""Of a token that is drawn for one run of the server."""


def problems(settings: Settings) -> Iterator[str]:
    """Check the address in `placement`."""
    named = address_of(settings)
    address = read_authority(named)
    if named != AUTO and (address is None or address.port is None):
        yield f"placement: {shown(named)} is not the HOST:PORT of a Ray cluster"


def address_of(settings: Settings) -> str:
    """The cluster's address: the text after `ray:`, else that of the cluster of this machine."""
    return settings.placement.partition(":")[2] or AUTO


def make(settings: Settings, tasks: TaskGroup) -> OnRay:
    """The placement on the cluster that the settings name."""
    file = settings.worker_token_file
    token = secrets.token_hex(TOKEN_BYTES) if file is None else read_token(file)
    cluster = RayCluster(
        address_of(settings),
        command=model_options(settings, settings.model),
        token=token,
        tasks=tasks,
    )
    return OnRay(settings, tasks, cluster, token=token)


class OnRay:
    """Workers on a cluster; `tasks` hold the links to them.

    Numbers of the cluster's workers are not those of `Workers`, where a worker that comes back has
    a new one.
    """

    is_named_by_workers = False
    extend = None

    def __init__(
        self,
        settings: Settings,
        tasks: TaskGroup,
        cluster: RayCluster,
        *,
        token: str,
        shrink_wait_s: float = SHRINK_WAIT_S,
    ) -> None:
        self.names = (settings.model,)
        self._least = settings.workers_wanted
        self._most = max(self._least, settings.workers_max or 0)
        self._tasks = tasks
        self._cluster = cluster
        self._token = token
        self._ca = settings.worker_ca or os.environ.get(TLS_AUTHORITY)
        self._shrink_wait_s = shrink_wait_s
        self._numbers = itertools.count(1)
        self._places: dict[int, Place] = {}
        self._coming: dict[int, anyio.CancelScope] = {}
        self._silent: dict[int, str] = {}
        self._asked = 0

    async def load(self, place: int) -> WorkerBackend:
        """Wait for the first worker, which is replaced by the same number."""
        if not self._asked:
            await self._ask(self._least)
        return await self._load(place)

    def close(self) -> None:
        """The workers end with the process that talks to Ray."""

    async def scale(self, workers: Workers, load: Callable[[], int]) -> None:
        """Keep as many workers as `load` says, within the bounds, until cancelled."""
        (self._places[0],) = workers.places
        enough_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            while True:
                await self._end_those_gone(workers)
                places = [place for place in self._places.values() if not place.is_drained]
                held = len(places) + len(self._coming)
                wanted = min(self._most, max(self._least, load()))
                if wanted >= held:
                    enough_s = anyio.current_time()
                    await self._try(self._ask(wanted))
                elif anyio.current_time() - enough_s >= self._shrink_wait_s:
                    await self._try(self._ask(wanted))
                    self._shrink(workers, places)
                for _ in range(wanted - held):
                    number = next(self._numbers)
                    self._coming[number] = anyio.CancelScope()
                    tasks.start_soon(self._add, workers, number)
                await anyio.sleep(LOOK_S)

    # -- inside ---------------------------------------------------------------------------------

    async def _load(self, number: int) -> WorkerBackend:
        """Connect to a worker; one that was twice not there is killed, and comes again.

        Once may be the moment before Ray knows that it is lost.
        """
        where = await self._cluster.find(number)
        try:
            tls = trusting(self._ca) if uses_tls(os.environ) else None
            return await connect(read_address(where), token=self._token, tls=tls, tasks=self._tasks)
        except BackendGone:
            if self._silent.get(number) == where:
                await self._cluster.end(number, again=True)
            self._silent[number] = where
            raise

    async def _add(self, workers: Workers, number: int) -> None:
        """Start a worker and take it in, again and again with a growing pause, until cancelled."""
        pause_s = RETRY_S
        with self._coming[number]:
            while number not in self._places:
                try:
                    where = await self._cluster.find(number)
                    new = NewPlace(where, partial(self._load, number))
                    self._places[number] = await workers.take(new)
                except Exception as error:
                    text = str(error) or type(error).__name__
                    _logger.error("worker %d of Ray cannot be taken yet: %s", number, text)
                    await self._try(self._cluster.end(number))
                    await anyio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_S_MAX)
        del self._coming[number]
        if number not in self._places:
            await self._try(self._cluster.end(number))

    def _shrink(self, workers: Workers, places: Sequence[Place]) -> None:
        """Give up the worker that came last and does not serve yet, or drain the least busy one."""
        for number, scope in reversed(self._coming.items()):
            if not scope.cancel_called:
                _logger.warning("worker %d of Ray is not wanted any more", number)
                scope.cancel()
                return
        seen = {each.number: (each.state == "serving", each.leased) for each in workers.roster()}
        least = min(places, key=lambda place: seen[place.worker])
        with suppress(LocalProtocolError):  # it is the only one that serves
            workers.drain(least.worker)

    async def _end_those_gone(self, workers: Workers) -> None:
        """End the workers that were drained and have left."""
        there = workers.places
        for number, place in tuple(self._places.items()):
            if place not in there:
                del self._places[number]
                await self._try(self._cluster.end(number))

    async def _ask(self, count: int) -> None:
        if count != self._asked:
            await self._cluster.want(count)
            self._asked = count

    async def _try(self, call: Awaitable[None]) -> None:
        """Do what is done again, or does not matter, if the cluster is lost."""
        try:
            await call
        except (BackendError, OSError) as error:
            _logger.error("%s", error)
