"""A placement: it loads the model of each place of a server, at the start and as a replacement.

| placement | setting | a place is |
|---|---|---|
| `Embedded` | none | a model in the server's own process |
| `Isolated` | `isolate` | a worker process that the server starts and ends |
| `Static` | `worker_addresses` | a worker that something else keeps running |
| `OnRay` | `placement` | a worker on a GPU of a Ray cluster; it adds places itself |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from ..model.backends.base import Backend
from ..settings.settings import Settings
from ..slots.workers import Extend, Workers
from .isolated import Isolated
from .ray import on_ray
from .static import Static

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
class Scales(Protocol):
    """A placement that adds and drains workers by itself."""

    async def scale(self, workers: Workers, load: Callable[[], int]) -> None:
        """Keep as many workers as `load` says, within the bounds, until cancelled."""
        ...


def placement_of(settings: Settings, load: Load, tasks: TaskGroup) -> Placement:
    """The placement that the settings ask for; `tasks` hold its links and processes."""
    if settings.placement == "ray":
        return on_ray(settings, tasks)
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
        self._load = partial(
            load,
            device=settings.device,
            dtype=settings.dtype,
            deterministic=settings.deterministic,
        )

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
