"""The slots of one backend, lent one at a time.

A lease is a slot and a generation. Generations count up over the whole pool and are never reused,
so a late message about an old lease can be told from one about the lease that followed it.

Rules:

- A slot is lent to one holder at a time and comes back exactly once (B5). Giving back a lease that
  is not out is a bug of ours and raises.
- The lowest free slot is lent first, so the same calls give the same leases.
- A condemned slot, whose worker hangs (B4), is never lent again.

It does not queue anybody (`runtime.admission`), nor start, watch or replace workers. It is not
thread-safe: the event loop's thread alone calls it.
"""

from __future__ import annotations

import heapq

import attrs

from protocol.errors import LocalProtocolError


@attrs.frozen(kw_only=True)
class Lease:
    """The right to use a slot until it is given back.

    Attributes:
        slot: 0 to the pool's slots - 1.
        generation: counts the pool's leases from 1; what `SlotLeased.lease` carries.
    """

    slot: int
    generation: int


@attrs.frozen(kw_only=True)
class PoolCounts:
    """Where the slots are; `free + leased + condemned == slots`."""

    slots: int
    free: int
    leased: int
    condemned: int


class Pool:
    """Lends the slots of one backend.

    Args:
        slots: how many there are, at least 1.

    Raises:
        LocalProtocolError: a pool without slots could never serve anybody.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise LocalProtocolError(f"a pool needs at least 1 slot, not {slots}")
        self._slots = slots
        self._free = list(range(slots))
        self._leased: dict[int, Lease] = {}
        self._condemned: set[int] = set()
        self._generation = 0

    def lease(self) -> Lease | None:
        """Lend the lowest free slot, or None where none is free."""
        if not self._free:
            return None
        self._generation += 1
        lease = Lease(slot=heapq.heappop(self._free), generation=self._generation)
        self._leased[lease.generation] = lease
        return lease

    def give_back(self, lease: Lease, *, condemned: bool = False) -> None:
        """Take a slot back, once its cleanup is done (B5).

        Args:
            lease: as `lease` gave it.
            condemned: its worker hangs; the slot is not lent again.

        Raises:
            LocalProtocolError: the lease is not out: given back twice, or not of this pool.
        """
        if self._leased.get(lease.generation) != lease:
            raise LocalProtocolError(
                f"slot {lease.slot} is not leased as generation {lease.generation} (B5)"
            )
        del self._leased[lease.generation]
        if condemned:
            self._condemned.add(lease.slot)
        else:
            heapq.heappush(self._free, lease.slot)

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
        return PoolCounts(
            slots=self._slots,
            free=len(self._free),
            leased=len(self._leased),
            condemned=len(self._condemned),
        )
