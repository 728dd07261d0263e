"""The pool: slots are lent to one holder at a time and come back exactly once."""

from __future__ import annotations

import pytest

from protocol.values.errors import LocalProtocolError
from runtime.slots.workers import Lease, Pool, PoolCounts


def lend(pool: Pool) -> Lease:
    """A lease that must be there."""
    lease = pool.lease()
    assert lease is not None
    return lease


def test_lends_each_slot_once_lowest_first() -> None:
    """Two sessions would share a slot, and hear each other (B8)."""
    pool = Pool(2)
    assert [pool.lease(), pool.lease(), pool.lease()] == [
        Lease(slot=0, generation=1),
        Lease(slot=1, generation=2),
        None,
    ]


def test_lends_of_the_worker_with_most_free_slots() -> None:
    """One GPU would answer late while another has nothing to do."""
    pool = Pool(2, 3, 1)
    lent = [lend(pool) for _ in range(6)]
    assert [(lease.worker, lease.slot) for lease in lent] == [
        (1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (2, 0),
    ]  # fmt: skip
    assert [lease.generation for lease in lent] == [1, 2, 3, 4, 5, 6]
    assert pool.lease() is None


def test_lends_a_returned_slot_under_a_new_generation() -> None:
    """A late message about the old lease would be taken for one about the new."""
    pool = Pool(1)
    first = lend(pool)
    pool.release(first)
    second = pool.lease()
    assert second == Lease(slot=0, generation=2)
    assert pool.leases == (second,)


def test_never_gives_two_workers_a_number_or_two_leases_a_generation() -> None:
    """A late result of a worker that was replaced would reach the session on the new one."""
    pool = Pool(1)
    pool.release(lend(pool), condemned=True)
    pool.remove(0)
    assert pool.add(1) == 1
    assert pool.lease() == Lease(slot=0, generation=2, worker=1)


def test_refuses_a_second_return() -> None:
    """A slot given back twice would be lent to two sessions (B5)."""
    pool = Pool(1)
    lease = lend(pool)
    pool.release(lease)
    with pytest.raises(LocalProtocolError, match="slot 0 is not leased as generation 1"):
        pool.release(lease)
    pool.lease()
    with pytest.raises(LocalProtocolError, match="slot 0 is not leased as generation 1"):
        pool.release(lease)


@pytest.mark.parametrize("mixed_up", [{"slot": 1}, {"worker": 1}, {"generation": 2}])
def test_refuses_a_lease_that_is_mixed_up(mixed_up: dict[str, int]) -> None:
    """It would free a slot that somebody uses."""
    pool = Pool(2, 1)
    pool.lease()
    with pytest.raises(LocalProtocolError, match="is not leased"):
        pool.release(Lease(**{"slot": 0, "generation": 1, "worker": 0} | mixed_up))


def test_condemns_a_worker_with_all_its_slots() -> None:
    """A new session would be put on a worker that hangs (B4)."""
    pool = Pool(3, 1)
    hung, other = lend(pool), lend(pool)
    assert (hung.worker, other.worker) == (0, 0)
    pool.release(hung, condemned=True)
    assert pool.is_condemned(0)
    assert pool.counts == PoolCounts(slots=4, free=1, leased=0, condemned=3)
    assert lend(pool).worker == 1
    assert pool.lease() is None
    pool.release(other)
    assert pool.counts == PoolCounts(slots=4, free=0, leased=1, condemned=3)
    assert pool.lease() is None


def test_a_removed_worker_counts_no_more_and_its_last_lease_comes_back() -> None:
    """A session that outlives its worker's replacement would break as it ends."""
    pool = Pool(2)
    hung, other = lend(pool), lend(pool)
    pool.release(hung, condemned=True)
    pool.remove(0)
    pool.add(1)
    assert pool.counts == PoolCounts(slots=1, free=1, leased=0, condemned=0)
    assert pool.leases == (other,)
    assert (pool.leases_of(0), pool.leases_of(1)) == (1, 0)
    pool.release(other)
    assert pool.counts.free == 1
    assert pool.leases_of(0) == 0
    with pytest.raises(LocalProtocolError, match="no worker 0"):
        pool.remove(0)


def test_tells_of_each_slot_that_is_withheld() -> None:
    """A worker would wait for ever to be replaced."""
    told: list[int] = []
    pool = Pool(3, on_withheld=lambda: told.append(pool.leases_of(0)))
    sound, hung, other = lend(pool), lend(pool), lend(pool)
    pool.release(sound)
    assert told == []
    pool.release(hung, condemned=True)
    pool.remove(0)
    pool.release(other)
    assert told == [1, 0]


def test_refuses_a_worker_without_slots() -> None:
    """A server without slots would let everybody wait for ever."""
    with pytest.raises(LocalProtocolError, match="at least 1 slot, not 0"):
        Pool(0)
