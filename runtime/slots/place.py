"""A worker's place, which its replacement takes, and its status for operators."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

import anyio
import attrs

from protocol.values.errors import LocalProtocolError

from ..model.backends.base import Backend, Closes, Located
from .pool import Pool

WorkerState = Literal["serving", "draining", "condemned", "loading"]
EMBEDDED: Final = "embedded"
"""Where a model in the server's own process is."""
BUSY_SHARE: Final = 0.8
"""Of the slots: the rest serves those who come while a further worker loads its model."""
WAIT_S_MAX: Final = 10
"""A session that has waited longer shows that there are too few workers."""
CLOSE_WAIT_S: Final = 10.0
"""A backend that takes longer to close hangs."""

_logger = logging.getLogger("antiphon.workers")


class UnknownWorkerError(LocalProtocolError):
    """There is no worker of that number, or not any more."""


@attrs.frozen
class NewPlace:
    """A place for a further worker: where it is, and how it is loaded; `load` raises its errors."""

    where: str
    load: Callable[[], Awaitable[Backend]]


@attrs.frozen(kw_only=True)
class WorkerStatus:
    """One worker at one moment.

    Attributes:
        number: it is never given to another worker of this server.
        where: `embedded`, the process or the address; of a lost worker, the last known.
        state: `condemned` waits for its sessions to end, `loading` for its replacement.
        slots, free: `free` is 0 where none is leased any more.
        leased: slots that sessions hold.
        fingerprint: a short hash, the same for workers that can stand in for each other.
        age_s: since it was taken; None before the server is ready.
    """

    number: int
    where: str
    state: WorkerState
    slots: int
    free: int
    leased: int
    fingerprint: str
    age_s: float | None


@attrs.define(eq=False)
class Place:
    """A worker's place, which its replacement takes.

    Attributes:
        load: loads a backend for it; None where none is replaced.
        where, fingerprint: of its worker, as in `WorkerStatus`.
        watched: the last worker whose loss is waited for.
        since_s: when its worker came, on the event loop's clock.
        tries: replacements tried since a worker last served long.
        replacing: ends when the place is drained and needs no replacement.
        is_attended: a task replaces it.
        is_loading: that task does not wait for sessions any more.
        is_given_up: sessions do not wait for a replacement any more.
        is_drained: its worker is not replaced.
    """

    load: Callable[[], Awaitable[Backend]] | None
    worker: int
    where: str
    fingerprint: str
    watched: int | None = None
    since_s: float = -math.inf
    tries: int = 0
    replacing: anyio.CancelScope | None = None
    is_attended: bool = False
    is_loading: bool = False
    is_given_up: bool = False
    is_drained: bool = False


def where_is(backend: Backend) -> str:
    """Where a backend is, for operators."""
    return backend.where if isinstance(backend, Located) else EMBEDDED


def status_of(place: Place, pool: Pool) -> WorkerStatus:
    """The status of a place's worker."""
    state: WorkerState = "loading" if place.is_loading else "condemned"
    if place.is_drained:
        state = "draining"
    elif not pool.is_condemned(place.worker):
        state = "serving"
    slots, free = pool.slots_of(place.worker)
    return WorkerStatus(
        number=place.worker,
        where=place.where,
        state=state,
        slots=slots,
        free=free,
        leased=pool.leases_of(place.worker),
        fingerprint=place.fingerprint,
        age_s=None if place.watched is None else anyio.current_time() - place.since_s,
    )


def workers_wanted(workers: Sequence[WorkerStatus], first_wait_s: int) -> int:
    """The number of workers that the load asks for, at least 1, for autoscaling.

    The busy slots by `BUSY_SHARE` of a worker's slots, rounded up, and one more if the first in the
    queue has waited longer than `WAIT_S_MAX`. Workers of unequal slots count with their mean.
    """
    busy = sum(worker.leased for worker in workers)
    serving = [worker.slots for worker in workers if worker.state == "serving"]
    slots_each = sum(serving) / len(serving) if serving else 1
    wanted = math.ceil(busy / (slots_each * BUSY_SHARE))
    return max(1, wanted + (first_wait_s > WAIT_S_MAX))


async def close(backend: Backend) -> None:
    """Close a backend that is given up; it may hang or fail."""
    if not isinstance(backend, Closes):
        return
    try:
        with anyio.move_on_after(CLOSE_WAIT_S, shield=True):
            await backend.aclose()
    except Exception:
        _logger.exception("a backend that was given up could not be closed")
