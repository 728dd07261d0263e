"""A placement: it loads the model of each place of a server, at the start and as a replacement.

| placement | setting | a place is |
|---|---|---|
| `Embedded` | none | a model in the server's own process |
| `Isolated` | `isolate` | a worker process that the server starts and ends |
| `Static` | `worker_addresses` | a worker that something else keeps running |
| of `PLACEMENTS` | `placement` | as that module says: with `ray` a worker on a GPU of a cluster |

A further placement is a module with the functions of `Offer`, and its name in `PLACEMENTS` and in
the setting; nothing else of the server names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Final, Protocol, cast, runtime_checkable

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from ..model.backends.base import Backend
from ..settings.settings import Settings
from ..slots.workers import Extend, Workers
from .isolated import Isolated
from .static import Static

PLACEMENTS: Final[Mapping[str, str]] = MappingProxyType({"ray": ".ray"})
"""The module of each value of the setting `placement` but `auto`."""
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


class Offer(Protocol):
    """A module of `PLACEMENTS`."""

    def make(self, settings: Settings, tasks: TaskGroup) -> Placement:
        """The placement that the settings ask for; `tasks` hold its links and processes."""
        ...

    def problems(self, settings: Settings) -> Iterator[str]:
        """What it lacks, and what is set for it where it is not asked for; each with its remedy."""
        ...


def offer(name: str) -> Offer:
    """Import a module of `PLACEMENTS`."""
    return cast("Offer", import_module(PLACEMENTS[name], __package__))


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
