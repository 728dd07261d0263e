"""A Ray cluster as a server sees it: workers by number, found, ended, and asked for.

Ray is used in a process of its own (`ray_driver.py`), which is started with the first call, and
again with the next one after it ended. With that process Ray ends all its workers.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import anyio
import attrs
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from ..access.origins import read_authority
from ..model.backends.base import BackendGone, BackendRefused
from .isolated import Words

CONNECT_WAIT_S: Final = 120.0
"""Ray itself gives up after a minute, and its import takes seconds."""
REACH_WAIT_S: Final = 10.0
"""For a TCP connection, which takes milliseconds."""
END_WAIT_S: Final = 10.0
"""For the request to the autoscaler that is withdrawn; Ray ends the workers in any case."""
LINE_BYTES_MAX: Final = 64 << 10
"""Of an answer: an address, or one line of an error."""
DRIVER: Final = (
    *(sys.executable, "-P", "-c"),
    "from runtime.placement.ray_driver import main; main()",
)

_logger = logging.getLogger("antiphon.workers")


class Cluster(Protocol):
    """The workers of a cluster, each on a GPU of its own, by numbers that the caller gives.

    All calls raise `BackendGone` if the cluster is lost or cannot be reached.
    """

    async def find(self, worker: int) -> str:
        """Wait until a worker takes gateways, and return its address; start it if there is none.

        `BackendRefused`: it does not start; the next call starts another one.
        """
        ...

    async def end(self, worker: int, *, again: bool = False) -> None:
        """Kill a worker; `again`: the cluster starts it again, maybe elsewhere."""
        ...

    async def want(self, count: int) -> None:
        """Have the cluster grow to as many GPUs, or be free to shrink."""
        ...


class RayCluster:
    """The cluster at an address, as for `ray.init`; `tasks` hold the process that talks to it."""

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
        """Wait for a worker's address."""
        return str(await self._call(do="find", worker=worker))

    async def end(self, worker: int, *, again: bool = False) -> None:
        """Kill a worker; with the process that started it, it has ended already."""
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
            text = driver.failure or driver.words.last
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
        self.words = Words("Ray", logging.INFO)

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
        """Take what the process says until it ends; cancelled, it ends within `END_WAIT_S`."""
        process = self._process
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_when_told, tasks)
                async with anyio.create_task_group() as hearing:
                    hearing.start_soon(self.words.log, process.stderr)  # to its last words
                    await self._hear()
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

    async def _end_when_told(self, tasks: TaskGroup) -> None:
        await self.ended.wait()
        tasks.cancel_scope.cancel()

    async def _hear(self) -> None:
        assert self._process.stdout is not None
        lines = BufferedByteReceiveStream(self._process.stdout)
        while True:
            try:
                said = json.loads(await lines.receive_until(b"\n", LINE_BYTES_MAX))
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.DelimiterNotFound):
                return
            call = self._calls.get(said.get("call", 0))
            if call is not None:
                call.came = said
                call.done.set()
            elif "note" in said:
                _logger.warning("%s", said["note"])
            elif "call" not in said:
                self.failure = said.get("failed", "")
                self.is_connected.set()
