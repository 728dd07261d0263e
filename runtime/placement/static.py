"""Workers at given addresses, which systemd, Slurm or Kubernetes keeps running.

A worker that is not there when the server starts is waited for: both may be started at once. Later
it is tried again by `Workers`, which pauses between.
"""

from __future__ import annotations

import logging
import ssl
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ..link.address import WorkerAddress, read_address
from ..link.backend import WorkerBackend, connect
from ..link.hello import read_token
from ..model.backends.base import BackendGone, BackendRefused
from ..settings.settings import Settings
from ..slots.workers import NewPlace

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
        """Make a place for a worker that is there already; `ValueError`: an invalid address."""
        where = read_address(address)
        if not self._token and not where.is_local:
            raise ValueError(f"{where} is not on this machine: the server has no worker_token_file")
        return NewPlace(str(where), partial(self._connect, where))

    async def _connect(self, address: WorkerAddress) -> WorkerBackend:
        tls = self._tls(address)
        return await connect(address, token=self._token, tls=tls, tasks=self._tasks)

    def _tls(self, address: WorkerAddress) -> ssl.SSLContext | None:
        """The context for another machine, or where an authority is named; else None."""
        return None if address.is_local and self._ca is None else trusting(self._ca)

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
