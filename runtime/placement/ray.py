"""Workers on a Ray cluster: an actor on each GPU that the server asks for.

- Ray chooses the node of a worker, keeps the worker running, and starts it again on another node if
  its own is lost. Sound and units do not pass through Ray: the server connects to the worker, as to
  one at an address.
- The server is ready with its first worker; the others join it when they come.
- There are `workers_wanted` workers. With `workers_max` there are as many as the load asks for,
  between the two: more at once, fewer once the load was lower for `SHRINK_WAIT_S`. A worker is
  drained before it is ended.
- A worker that was drained by an operator is ended; another one takes its place.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from protocol.values.errors import LocalProtocolError

from ..access.origins import read_authority
from ..link.address import read_address
from ..link.backend import WorkerBackend, connect
from ..link.hello import read_token
from ..model.backends.base import BackendError, BackendGone
from ..settings.declaration import shown
from ..settings.extras import install
from ..settings.settings import Settings
from ..slots.place import NewPlace, Place
from ..slots.workers import RETRY_S, RETRY_S_MAX, Workers
from .isolated import model_options
from .ray_cluster import Cluster, RayCluster
from .ray_driver import TLS_AUTHORITY, uses_tls
from .static import trusting

LOOK_S: Final = 1.0
"""Between two looks at the load, which changes with sessions that begin and end."""
SHRINK_WAIT_S: Final = 300.0
"""A node and a large model take minutes to come back; a lull is often shorter."""
_OF_RAY: Final = ("ray_address", "workers_wanted", "workers_max")
_NOT_OF_RAY: Final = ("isolate", "workers", "worker_addresses")
TOKEN_BYTES: Final = 32
"""Of a token that is drawn for one run of the server."""

_logger = logging.getLogger("antiphon.workers")


def problems(settings: Settings) -> Iterator[str]:
    """Check what the workers on a Ray cluster need, and what only they have."""
    if settings.placement != "ray":
        for name in _OF_RAY:
            if getattr(settings, name) != getattr(Settings(), name):
                yield f"{name}: it is for workers on a Ray cluster: give placement ray"
        return
    if importlib.util.find_spec("ray") is None:
        yield f"placement: ray needs the extra: {install('ray')}"
    for name in _NOT_OF_RAY:
        if getattr(settings, name):
            yield f"{name}: the workers are on the Ray cluster; leave it out, or placement ray"
    address = read_authority(settings.ray_address)
    if settings.ray_address != "auto" and (address is None or address.port is None):
        yield f"ray_address: {shown(settings.ray_address)} is neither auto nor HOST:PORT"
    if settings.workers_max is not None and settings.workers_max < settings.workers_wanted:
        yield (
            f"workers_max: {settings.workers_max} is less than workers_wanted, "
            f"{settings.workers_wanted}"
        )


def make(settings: Settings, tasks: TaskGroup) -> OnRay:
    """The placement on the cluster that the settings name."""
    file = settings.worker_token_file
    token = secrets.token_hex(TOKEN_BYTES) if file is None else read_token(file)
    cluster = RayCluster(
        settings.ray_address,
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
        cluster: Cluster,
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
