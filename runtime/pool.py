"""The slots of all workers, lent one at a time.

A worker is one backend with its slots. A lease is a slot of a worker and a generation. Generations
count up over all workers and are never reused, so a late result of an old lease can be told from
one of the lease that followed it. Workers are numbered likewise.

Rules:

- A slot is lent to one holder at a time and comes back exactly once (B5). Giving back a lease that
  is not out is a bug of ours and raises.
- The worker with most free slots lends first, the lowest-numbered of those; and its lowest slot. So
  load is spread, and the same calls give the same leases.
- A worker with a call that hangs is condemned as a whole (B4): its free slots are lent no more, nor
  those that come back. Who is on one of them goes on.
- A worker that was removed counts no more; leases of it that are still out come back as others do.

It does not queue anybody (`runtime.admission`), nor load, watch or replace workers
(`runtime.workers`). It is not thread-safe: the event loop's thread alone calls it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import attrs

from protocol.errors import LocalProtocolError


@attrs.frozen(kw_only=True)
class Lease:
    """The right to use a slot until it is given back.

    Attributes:
        slot: 0 to the worker's slots - 1.
        generation: counts the pool's leases from 1; what `SlotLeased.lease` carries.
        worker: whose slot it is; counts the pool's workers from 0.
    """

    slot: int
    generation: int
    worker: int = 0


@attrs.frozen(kw_only=True)
class PoolCounts:
    """Where the slots of the workers are; `free + leased + condemned == slots`.

    Attributes:
        slots: of all workers.
        free: can be lent now.
        leased: held, and lent again once they come back.
        condemned: lent no more, be somebody on them still or not.
    """

    slots: int
    free: int
    leased: int
    condemned: int


@attrs.define(eq=False)
class _Worker:
    """One backend's slots."""

    slots: int
    free: list[int]
    condemned: bool = False


class Pool:
    """Lends the slots of the workers.

    Args:
        slots: of each worker that is there from the start, at least 1.
        on_withheld: told that a slot came back which is not lent again; it must return at once.

    Raises:
        LocalProtocolError: a worker without slots could never serve anybody.
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
        """Take in a worker.

        Args:
            slots: how many it has, at least 1.

        Returns:
            Its number.

        Raises:
            LocalProtocolError: it has no slots.
        """
        if slots < 1:
            raise LocalProtocolError(f"a worker needs at least 1 slot, not {slots}")
        number = self._next_worker
        self._next_worker += 1
        self._workers[number] = _Worker(slots=slots, free=list(range(slots)))
        return number

    def remove(self, worker: int) -> None:
        """Forget a worker, but not those who still hold a slot of it.

        Raises:
            LocalProtocolError: there is none of that number.
        """
        if self._workers.pop(worker, None) is None:
            raise LocalProtocolError(f"there is no worker {worker}")

    def is_condemned(self, worker: int) -> bool:
        """Say whether a worker is lent no more; one that was removed is not either."""
        found = self._workers.get(worker)
        return found is None or found.condemned

    def leases_of(self, worker: int) -> int:
        """Count the leases of a worker that are out, also of one that was removed."""
        return sum(lease.worker == worker for lease in self._leased.values())

    # -- leases ---------------------------------------------------------------------------------

    def lease(self) -> Lease | None:
        """Lend a slot, or None where none is free."""
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
        """Take a slot back, once its cleanup is done (B5).

        Args:
            lease: as `lease` gave it.
            condemned: its worker hangs or is lost, and is not lent again.

        Raises:
            LocalProtocolError: the lease is not out: given back twice, or not of this pool.
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

    def is_out(self, lease: Lease) -> bool:
        """Say whether a lease is still held."""
        return self._leased.get(lease.generation) == lease

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases that are out, oldest first."""
        return tuple(self._leased.values())

    @property
    def counts(self) -> PoolCounts:
        """Where the slots are now."""
        sound = [worker for worker in self._workers.values() if not worker.condemned]
        slots = sum(worker.slots for worker in self._workers.values())
        lendable = sum(worker.slots for worker in sound)
        free = sum(len(worker.free) for worker in sound)
        return PoolCounts(
            slots=slots, free=free, leased=lendable - free, condemned=slots - lendable
        )
