"""A gateway's backend and a worker, in one process, over a real socket.

It is a Unix socket on trio, as in the server. On asyncio it is a port: AnyIO's Unix streams there
report an `InvalidStateError` of their own when a read is cancelled just as bytes come.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import attrs
import sniffio
from anyio.abc import ByteStream, Listener, SocketAttribute, SocketStream, TaskGroup

from protocol.values.model import Unit
from runtime.link.backend import WorkerBackend, connect
from runtime.link.link import TcpAddress, UnixAddress, WorkerAddress
from runtime.link.link import connect as connect_to
from runtime.model.backends.base import Backend
from runtime.model.backends.scripted import Step, default_script
from runtime.worker.worker import Worker

QUICKLY = 0.001
"""Seconds of a call: a real clock runs while sockets are waited for."""
WAIT_S = 20
"""A test that takes longer hangs."""


def quick(unit: Unit, seed: int) -> Step:
    """The default script in a hundredth of its time."""
    step = default_script(unit, seed)
    return attrs.evolve(step, prefill_s=QUICKLY, generate_s=step.generate_s / 100)


async def listen(folder: Path, name: str) -> tuple[Listener[SocketStream], WorkerAddress]:
    """Listen as a worker does."""
    if sniffio.current_async_library() == "trio":
        address = UnixAddress(folder / name)
        return await anyio.create_unix_listener(address.path), address
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    return listener, TcpAddress("127.0.0.1", listener.extra(SocketAttribute.local_port))


async def dial(address: WorkerAddress) -> ByteStream:
    """Connect without a greeting."""
    return await connect_to(address, None)


@attrs.define
class Pair:
    """A worker at its address, and a folder; `tasks` are those of gateways."""

    worker: Worker
    address: WorkerAddress
    folder: Path
    tasks: TaskGroup

    async def connect(self, token: str = "") -> WorkerBackend:
        """Come as another gateway."""
        return await connect(self.address, token=token, tasks=self.tasks)


@asynccontextmanager
async def worker_of(
    backend: Backend, *, token: str = "", tls: Callable[[], ssl.SSLContext] | None = None
) -> AsyncIterator[Pair]:
    """Serve a backend; what the test leaves is over when it leaves."""
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(WAIT_S):
        listener, address = await listen(Path(folder), "worker")
        async with (
            listener,
            anyio.create_task_group() as gateways,
            anyio.create_task_group() as tasks,
        ):
            worker = Worker(backend=backend, tasks=tasks, token=token, tls=tls)
            tasks.start_soon(worker.serve, listener)
            yield Pair(worker, address, Path(folder), gateways)
            gateways.cancel_scope.cancel()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def linked(backend: Backend) -> AsyncIterator[WorkerBackend]:
    """One gateway of a worker that serves a backend."""
    async with worker_of(backend) as pair:
        yield await pair.connect()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; bounded by `worker_of`."""
    while not condition():  # noqa: ASYNC110 - conditions of code that has no events for tests
        await anyio.sleep(QUICKLY)
