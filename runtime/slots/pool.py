"""The slots of all workers, leased one at a time; only the event loop's thread may call it.

- A worker is one backend with its slots. A lease is a slot of a worker and a generation.
  Generations and worker numbers are never reused, so a late result of an old lease is recognised.
- A slot has one holder and comes back exactly once (B5).
- The worker with the most free slots leases first, then the lowest number; and its lowest slot.
  Load is spread, and the same calls give the same leases.
- A worker with a hung call is condemned as a whole (B4): it leases no more slots. Its other
  sessions go on. A removed worker does not count; its leases come back as others do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import attrs

from protocol.values.errors import LocalProtocolError


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

    def give_back(self, lease: Lease, *, condemned: bool = False) -> None:
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
