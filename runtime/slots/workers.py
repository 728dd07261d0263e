"""The workers of a server: interchangeable backends, and a replacement for each condemned one.

    worker condemned -> its leases come back, or replace_wait_s -> load -> a new worker in its place

- A worker is one backend with its slots. A session keeps one from lease to release; workers must
  agree on all that sessions are sent, and log (`check_agreement`).
- A worker has a `Place`, which its replacement takes.
- A condemned worker leases no more slots (B4); its other sessions go on. Its backend is dropped
  once its leases are back, and closed if it is `Closes`. No thread that hangs in it can be ended.
- A backend that is lost while no call is in flight (`CanBeLost`) is condemned at once.
- A replacement is loaded once the old worker has no sessions, because memory may not hold both, or
  after `replace_wait_s`; again and again, with a growing pause. For `HOPE_S` sessions may wait for
  it; after that they are refused until it is there.
- A worker that is drained is not replaced: its sessions move, and then it is closed.
- A device lost to this process comes back only in another process: if no other worker serves,
  `on_hopeless` is called, and the server ends.

`Pool` leases their slots, one at a time; only the event loop's thread may call it:

- A lease is a slot of a worker and a generation.
  Generations and worker numbers are never reused, so a late result of an old lease is recognised.
- A slot has one holder and comes back exactly once (B5).
- The worker with the most free slots leases first, then the lowest number; and its lowest slot.
  Load is spread, and the same calls give the same leases.
- A worker with a hung call is condemned as a whole (B4): it leases no more slots. Its other
  sessions go on. A removed worker does not count; its leases come back as others do.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final, Literal

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values.errors import LocalProtocolError
from protocol.values.records import digest

from ..model.backends import base
from ..settings.settings import TEXTS_MAX

# -- the pool --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Lease:
    """The right to use a slot until it is given back.

    `slot`: 0 to the worker's slots - 1. `generation`: counts the pool's leases from 1;
    `SlotLeased.lease` carries it. `worker`: counts the pool's workers from 0.
    """

    slot: int
    generation: int
    worker: int = 0


@attrs.frozen(kw_only=True)
class PoolCounts:
    """Slots of all workers by state; `free + leased + condemned == slots`.

    Condemned slots are not leased again, whether a session still holds them or not.
    """

    slots: int
    free: int
    leased: int
    condemned: int


@attrs.define(eq=False)
class _Worker:
    slots: int
    free: list[int]
    condemned: bool = False


class Pool:
    """Leases the slots of the workers; one without a slot is a `LocalProtocolError`.

    `on_withheld` is called when a worker was condemned, or a slot of one came back; it must return
    at once.
    """

    def __init__(self, *slots: int, on_withheld: Callable[[], None] = lambda: None) -> None:
        self._on_withheld = on_withheld
        self._workers: dict[int, _Worker] = {}
        self._leased: dict[int, Lease] = {}
        self._generation = 0
        self._next_worker = 0
        for count in slots:
            self.add(count)

    # -- workers --------------------------------------------------------------------------------

    def add(self, slots: int) -> int:
        """Add a worker, and return its number; `LocalProtocolError` for no slots."""
        if slots < 1:
            raise LocalProtocolError(f"a worker needs at least 1 slot, not {slots}")
        number = self._next_worker
        self._next_worker += 1
        self._workers[number] = _Worker(slots=slots, free=list(range(slots)))
        return number

    def remove(self, worker: int) -> None:
        """Remove a worker; its leases stay out. `LocalProtocolError` if there is no such worker."""
        if self._workers.pop(worker, None) is None:
            raise LocalProtocolError(f"there is no worker {worker}")

    def is_condemned(self, worker: int) -> bool:
        """Whether a worker's slots are not leased any more; true for a removed one too."""
        found = self._workers.get(worker)
        return found is None or found.condemned

    def condemn(self, worker: int) -> None:
        """Lease no more slots of a worker; a removed one is not there to be leased."""
        found = self._workers.get(worker)
        if found is not None and not found.condemned:
            found.condemned = True
            self._on_withheld()

    def slots_of(self, worker: int) -> tuple[int, int]:
        """A worker's slots, and those that may be leased now; none of a removed worker."""
        found = self._workers.get(worker)
        if found is None:
            return 0, 0
        return found.slots, 0 if found.condemned else len(found.free)

    def leases_of(self, worker: int) -> int:
        """The number of a worker's leases that are out, a removed one's too."""
        return sum(lease.worker == worker for lease in self._leased.values())

    # -- leases ---------------------------------------------------------------------------------

    def lease(self) -> Lease | None:
        """Lease a slot; None where none is free."""
        lenders = [
            (-len(worker.free), number)
            for number, worker in self._workers.items()
            if worker.free and not worker.condemned
        ]
        if not lenders:
            return None
        _, number = min(lenders)
        self._generation += 1
        slot = heapq.heappop(self._workers[number].free)
        lease = Lease(slot=slot, generation=self._generation, worker=number)
        self._leased[lease.generation] = lease
        return lease

    def release(self, lease: Lease, *, condemned: bool = False) -> None:
        """Take a slot back, once its cleanup is done (B5); a `condemned` worker leases no more.

        `LocalProtocolError`: the lease is not out: given back twice, or of another pool.
        """
        if self._leased.get(lease.generation) != lease:
            raise LocalProtocolError(
                f"slot {lease.slot} is not leased as generation {lease.generation} (B5)"
            )
        del self._leased[lease.generation]
        worker = self._workers.get(lease.worker)
        if worker is not None:
            heapq.heappush(worker.free, lease.slot)
            worker.condemned = worker.condemned or condemned
        if self.is_condemned(lease.worker):
            self._on_withheld()

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases that are out, oldest first."""
        return tuple(self._leased.values())

    @property
    def counts(self) -> PoolCounts:
        """The slots by state."""
        sound = [worker for worker in self._workers.values() if not worker.condemned]
        slots = sum(worker.slots for worker in self._workers.values())
        lendable = sum(worker.slots for worker in sound)
        free = sum(len(worker.free) for worker in sound)
        return PoolCounts(
            slots=slots, free=free, leased=lendable - free, condemned=slots - lendable
        )


# -- the workers -----------------------------------------------------------------------------------

DIFFERENCES_REPORTED_MAX: Final = 3
"""Another model differs in everything: a few differences are enough."""
INSTANCE: Final = "instance"
"""The fingerprint entry that names one backend; it may differ between workers."""
HASH_CHARS: Final = 12
"""Enough to tell the models of a server apart."""

_AGREED: Final = (
    "modes",
    "context_limit",
    "sliding_windows",
    "can_rollback",
    "can_rebuild",
    "can_speak",
    "duplex_tools",
    "deterministic",
)
"""Besides the fingerprint."""

WorkerState = Literal["serving", "draining", "condemned", "loading"]
EMBEDDED: Final = "embedded"
"""Where a model in the server's own process is."""
BUSY_SHARE: Final = 0.8
"""Of the slots: the rest serves those who come while a further worker loads its model."""
WAIT_S_MAX: Final = 10
"""A session that has waited longer shows that there are too few workers."""
CLOSE_WAIT_S: Final = 10.0
"""A backend that takes longer to close hangs."""
REPLACE_SPARE_S: Final = 10.0
"""Sessions that hang with the condemning call end within the waits of cleanup and release; one that
is still there after this is served, and may stay long."""
REPLACE_WAIT_S: Final = 20.0 + REPLACE_SPARE_S
"""Those waits are 10 s each by default."""
REBUILDS_MAX: Final = 2
"""Rebuilds at once on a worker: each that is done sets a session free, and live units go first."""
RETRY_S: Final = 1.0
"""Before the second try of loading; it doubles with each."""
RETRY_S_MAX: Final = 60.0
"""Loading a large model over and over costs other processes disk and memory."""
STEADY_S: Final = 60.0
"""A worker that served so long was sound: its replacement is loaded without a pause."""
HOPE_S: Final = 120.0
"""Longer than a large model takes to load, shorter than a client waits in vain."""
WORKERS_MAX: Final = TEXTS_MAX
"""As many as the settings may name."""

Load = Callable[[int], Awaitable[base.Backend]]
"""Loads the backend of a place, 0 to the number of workers - 1; raises its errors."""

_logger = logging.getLogger("antiphon.workers")


class WorkersDifferError(ValueError):
    """A worker cannot stand in for another; the text names the differences."""


def shared(info: base.BackendInfo) -> dict[str, str]:
    """A fingerprint without the entry that names the instance."""
    return {name: value for name, value in info.fingerprint.items() if name != INSTANCE}


def short_hash(info: base.BackendInfo) -> str:
    """A short hash of a fingerprint, the same for all workers that agree: 12 hex digits."""
    return digest(shared(info))[:HASH_CHARS]


def check_agreement(first: base.BackendInfo, other: base.BackendInfo, name: str) -> None:
    """Raise `WorkersDifferError` if the worker called `name` does not agree with the first."""
    values = {name: (getattr(first, name), getattr(other, name)) for name in _AGREED}
    ours, theirs = shared(first), shared(other)
    for entry in sorted(ours | theirs):
        values[f"fingerprint {entry}"] = ours.get(entry), theirs.get(entry)
    differences = [
        f"{name} is {its}, not {own}" for name, (own, its) in values.items() if own != its
    ]
    if differences:
        text = "; ".join(differences[:DIFFERENCES_REPORTED_MAX])
        if len(differences) > DIFFERENCES_REPORTED_MAX:
            text += f"; and {len(differences) - DIFFERENCES_REPORTED_MAX} more"
        raise WorkersDifferError(f"{name} cannot stand in for worker 0: {text}")


class UnknownWorkerError(LocalProtocolError):
    """There is no worker of that number, or not any more."""


@attrs.frozen
class NewPlace:
    """A place for a further worker: where it is, and how it is loaded; `load` raises its errors."""

    where: str
    load: Callable[[], Awaitable[base.Backend]]


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

    load: Callable[[], Awaitable[base.Backend]] | None
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


def where_is(backend: base.Backend) -> str:
    """Where a backend is, for operators."""
    return backend.where if isinstance(backend, base.Located) else EMBEDDED


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


async def close(backend: base.Backend) -> None:
    """Close a backend that is given up; it may hang or fail."""
    if not isinstance(backend, base.Closes):
        return
    try:
        with anyio.move_on_after(CLOSE_WAIT_S, shield=True):
            await backend.aclose()
    except Exception:
        _logger.exception("a backend that was given up could not be closed")


Extend = Callable[[str], NewPlace]
"""Makes a place for a worker at an address; raises `ValueError` if the address is invalid."""


@attrs.frozen(kw_only=True)
class WorkersStatistics:
    """The number of workers, those condemned and not replaced yet, and totals so far."""

    workers: int
    condemned: int
    replaced: int
    failures: int


class Workers:
    """The backends of a server and their slots, which only `Admission` leases from `pool`.

    Args:
        backends: one for each place, at least one, loaded.
        load: loads another for a place; None replaces none.
        extend: makes a place for `add`; None where none can be added.
        replace_wait_s: the wait for a condemned worker's sessions: memory may not hold two models.

    `LocalProtocolError`: `backends` is empty; `WorkersDifferError`: two of them cannot stand in for
    each other.
    """

    def __init__(
        self,
        backends: Sequence[base.Backend],
        *,
        load: Load | None = None,
        extend: Extend | None = None,
        replace_wait_s: float = REPLACE_WAIT_S,
    ) -> None:
        if not backends:
            raise LocalProtocolError("a server needs at least 1 worker, not 0")
        self._first = backends[0].info
        for index, backend in enumerate(backends):
            check_agreement(self._first, backend.info, f"worker {index}")
        self._can_load = load is not None
        self._extend = extend
        self._coming: set[str] = set()
        self._replace_wait_s = replace_wait_s
        self._is_running = False
        self._replaced = self._failures = 0
        self._stirred = anyio.Event()
        self.pool = Pool(*(backend.info.slots for backend in backends), on_withheld=self._stir)
        self._backends = dict(enumerate(backends))
        self._rebuilds: dict[int, anyio.Semaphore] = {}
        self._revokes: dict[Lease, Callable[[], None]] = {}
        self._places = [
            Place(
                None if load is None else partial(load, index),
                index,
                where_is(backend),
                short_hash(backend.info),
            )
            for index, backend in enumerate(backends)
        ]

    @property
    def info(self) -> base.BackendInfo:
        """The workers as one backend: all their slots, and the values on which they agree."""
        backends = self._backends.values()
        return attrs.evolve(
            self._first,
            slots=self.pool.counts.slots,
            fingerprint=shared(self._first),
            speaks=all(backend.info.speaks for backend in backends),
        )

    @property
    def can_replace(self) -> bool:
        """Whether condemned workers are replaced."""
        return self._can_load and self._is_running

    @property
    def more_to_come(self) -> bool:
        """Whether sessions may wait for a replacement."""
        coming = (place for place in self._condemned() if not place.is_drained)
        return self.can_replace and any(not place.is_given_up for place in coming)

    @property
    def statistics(self) -> WorkersStatistics:
        """The counts so far."""
        return WorkersStatistics(
            workers=len(self._places),
            condemned=len(list(self._condemned())),
            replaced=self._replaced,
            failures=self._failures,
        )

    def roster(self) -> tuple[WorkerStatus, ...]:
        """All workers, in the order in which their places were made."""
        return tuple(status_of(place, self.pool) for place in self._places)

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of `roster`, for a placement that adds and drains workers itself."""
        return tuple(self._places)

    @property
    def any_backend(self) -> base.Backend:
        """Any of the backends, for values on which all agree; `BackendGone` if none is there."""
        for backend in self._backends.values():
            return backend
        raise base.BackendGone("no worker is there")

    def backend_of(self, lease: Lease) -> base.Backend:
        """The backend of a lease that is out."""
        return self._backends[lease.worker]

    def watch_lease(self, lease: Lease, on_revoked: Callable[[], None]) -> None:
        """Call `on_revoked` if the lease's worker is drained or lost, until `unwatch_lease`."""
        self._revokes[lease] = on_revoked
        if self._place_of(lease.worker).is_drained:
            on_revoked()

    def unwatch_lease(self, lease: Lease) -> None:
        """Forget a lease that ends."""
        self._revokes.pop(lease, None)

    def drain(self, worker: int) -> None:
        """Lease no more slots of a worker, have its sessions move, and close it when they left.

        Its place is not replaced, and a replacement under way is given up. `UnknownWorkerError`:
        there is no such worker; `LocalProtocolError`: there is no other that serves.
        """
        place = self._place_of(worker)
        if place.is_drained:
            return
        if all(other is place or self.pool.is_condemned(other.worker) for other in self._places):
            raise LocalProtocolError(f"worker {worker} is the only one that serves")
        place.is_drained = True
        if place.replacing is not None:
            place.replacing.cancel()
        self._withdraw(worker)

    async def add(self, address: str) -> int:
        """Connect to a further worker, lease its slots from now on, and return its number.

        `ValueError`: the address is invalid. `LocalProtocolError`: no worker can be added, or this
        one is there. `WorkersDifferError`: it cannot stand in. `BackendError`: it does not serve.
        """
        if self._extend is None:
            raise LocalProtocolError("its workers have no addresses; it needs --worker-address")
        return (await self.take(self._extend(address))).worker

    async def take(self, new: NewPlace) -> Place:
        """Load a further worker, and lease its slots from now on; raises as `add` does."""
        held = {place.where for place in self._places if not place.is_drained}
        if new.where in held | self._coming:
            raise LocalProtocolError(f"there already is a worker at {new.where}")
        if len(self._places) + len(self._coming) >= WORKERS_MAX:
            raise LocalProtocolError(f"a server has at most {WORKERS_MAX} workers")
        self._coming.add(new.where)
        try:
            backend = await self._load_checked(new.load)
        finally:
            self._coming.discard(new.where)
        number = self.pool.add(backend.info.slots)
        self._backends[number] = backend
        place = Place(new.load, number, new.where, short_hash(backend.info))
        self._places.append(place)
        self._stir()
        _logger.warning("worker %d is added: %s", number, new.where)
        return place

    def _withdraw(self, worker: int) -> None:
        """Lease no more slots of a worker, and have sessions without a call in flight move."""
        self.pool.condemn(worker)
        for lease, on_revoked in tuple(self._revokes.items()):
            if lease.worker == worker:
                on_revoked()

    def _place_of(self, worker: int) -> Place:
        for place in self._places:
            if place.worker == worker:
                return place
        raise UnknownWorkerError(f"there is no worker {worker}")

    def rebuilds_of(self, lease: Lease) -> anyio.Semaphore:
        """Admits a few rebuilds at once on the lease's worker."""
        return self._rebuilds.setdefault(lease.worker, anyio.Semaphore(REBUILDS_MAX))

    async def run(
        self,
        on_changed: Callable[[], None],
        on_hopeless: Callable[[base.DeviceLost], None] = lambda _: None,
    ) -> None:
        """Replace condemned workers until cancelled.

        `on_changed` is called when a worker came or was given up (`Admission.review`),
        `on_hopeless` when no worker is left and this process cannot have another.
        """
        self._is_running = True
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    stirred = self._stirred
                    for place in self._places:
                        if place.watched != place.worker:
                            place.watched, place.since_s = place.worker, anyio.current_time()
                            backend = self._backends[place.worker]
                            tasks.start_soon(self._watch, place.worker, backend)
                    for place in self._condemned():
                        if place.is_attended:
                            continue
                        if place.is_drained:
                            place.is_attended = True
                            tasks.start_soon(self._see_off, place)
                        elif self.can_replace:
                            place.is_attended = True
                            tasks.start_soon(self._attend, place, tasks, on_changed, on_hopeless)
                    await stirred.wait()
        finally:
            self._is_running = False

    # -- inside ---------------------------------------------------------------------------------

    def _condemned(self) -> Iterator[Place]:
        return (place for place in self._places if self.pool.is_condemned(place.worker))

    def _stir(self) -> None:
        stirred, self._stirred = self._stirred, anyio.Event()
        stirred.set()

    async def _watch(self, worker: int, backend: base.Backend) -> None:
        """Condemn a worker when its backend is lost, whether a session uses it or not."""
        if isinstance(backend, base.CanBeLost):
            await backend.wait_gone()
            self._withdraw(worker)

    async def _attend(
        self,
        place: Place,
        tasks: TaskGroup,
        on_changed: Callable[[], None],
        on_hopeless: Callable[[base.DeviceLost], None],
    ) -> None:
        _logger.error("worker %d is condemned and will be replaced", place.worker)
        if anyio.current_time() - place.since_s >= STEADY_S:
            place.tries = 0
        retired, backend = anyio.Event(), None
        tasks.start_soon(self._retire, place.worker, retired)
        with anyio.CancelScope() as place.replacing:
            async with anyio.create_task_group() as hoping:
                hoping.start_soon(self._lose_hope, place, on_changed)
                with anyio.move_on_after(self._replace_wait_s):
                    await retired.wait()
                backend = await self._keep_loading(place, on_hopeless)
                hoping.cancel_scope.cancel()
        place.replacing, place.is_loading = None, False
        if backend is None or place.is_drained:
            if backend is not None:
                await close(backend)
            await retired.wait()
            self._forget(place)
            return
        self.pool.remove(place.worker)
        place.worker = self.pool.add(backend.info.slots)
        place.where = where_is(backend)
        self._backends[place.worker] = backend
        place.is_attended = place.is_given_up = False
        self._stir()
        self._replaced += 1
        _logger.warning("worker %d takes the place of the one condemned", place.worker)
        on_changed()

    async def _see_off(self, place: Place) -> None:
        await self._retire(place.worker, anyio.Event())
        self._forget(place)

    def _forget(self, place: Place) -> None:
        self.pool.remove(place.worker)
        self._places.remove(place)
        _logger.warning("worker %d is drained and closed", place.worker)

    async def _lose_hope(self, place: Place, on_changed: Callable[[], None]) -> None:
        await anyio.sleep(HOPE_S)
        _logger.error("no worker in place of %d after %g s", place.worker, HOPE_S)
        place.is_given_up = True
        on_changed()

    async def _retire(self, worker: int, retired: anyio.Event) -> None:
        """Close a condemned worker's backend once its leases are back."""
        while self.pool.leases_of(worker):
            stirred = self._stirred
            await stirred.wait()
        self._rebuilds.pop(worker, None)
        await close(self._backends.pop(worker))
        retired.set()

    async def _keep_loading(
        self, place: Place, on_hopeless: Callable[[base.DeviceLost], None]
    ) -> base.Backend:
        assert place.load is not None
        place.is_loading = True
        while True:
            pause_s = RETRY_S * 2.0 ** min(place.tries - 1, 16) if place.tries else 0.0
            await anyio.sleep(min(pause_s, RETRY_S_MAX))
            place.tries += 1
            try:
                return await self._load_checked(place.load)
            except Exception as error:
                self._failures += 1
                text = str(error) or type(error).__name__
                _logger.error("worker %d cannot be replaced yet: %s", place.worker, text)
                is_last = len(list(self._condemned())) == len(self._places)
                if isinstance(error, base.DeviceLost) and is_last:
                    on_hopeless(error)
                    await anyio.sleep_forever()

    async def _load_checked(self, load: Callable[[], Awaitable[base.Backend]]) -> base.Backend:
        """Load a backend and check that it serves; if not, it is closed; raises any error."""
        backend = await load()
        try:
            if isinstance(backend, base.Remote):
                await backend.check()
            check_agreement(self._first, backend.info, f"worker {where_is(backend)}")
        except BaseException:
            await close(backend)
            raise
        return backend
