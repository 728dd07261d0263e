"""The pool: slots are lent to one holder at a time and come back exactly once."""

from __future__ import annotations

import pytest

from protocol.errors import LocalProtocolError
from runtime.pool import Lease, Pool, PoolCounts


def test_lends_each_slot_once_lowest_first() -> None:
    """Two sessions would share a slot, and hear each other (B8)."""
    pool = Pool(2)
    assert [pool.lease(), pool.lease(), pool.lease()] == [
        Lease(slot=0, generation=1),
        Lease(slot=1, generation=2),
        None,
    ]


def test_lends_a_returned_slot_under_a_new_generation() -> None:
    """A late message about the old lease would be taken for one about the new."""
    pool = Pool(1)
    first = pool.lease()
    assert first is not None
    pool.give_back(first)
    second = pool.lease()
    assert second == Lease(slot=0, generation=2)
    assert not pool.is_out(first)
    assert pool.leases == (second,)


def test_refuses_a_second_return() -> None:
    """A slot given back twice would be lent to two sessions (B5)."""
    pool = Pool(1)
    lease = pool.lease()
    assert lease is not None
    pool.give_back(lease)
    with pytest.raises(LocalProtocolError, match="slot 0 is not leased as generation 1"):
        pool.give_back(lease)
    pool.lease()
    with pytest.raises(LocalProtocolError, match="slot 0 is not leased as generation 1"):
        pool.give_back(lease)


def test_refuses_a_lease_of_another_slot() -> None:
    """A mixed-up lease would free a slot that somebody uses."""
    pool = Pool(2)
    pool.lease()
    with pytest.raises(LocalProtocolError, match="slot 1"):
        pool.give_back(Lease(slot=1, generation=1))


def test_never_lends_a_condemned_slot() -> None:
    """A new session would be put on a worker that hangs (B4)."""
    pool = Pool(2)
    lease = pool.lease()
    assert lease is not None
    pool.give_back(lease, condemned=True)
    assert pool.lease() == Lease(slot=1, generation=2)
    assert pool.lease() is None
    assert pool.counts == PoolCounts(slots=2, free=0, leased=1, condemned=1)


def test_refuses_to_be_empty() -> None:
    """A server without slots would let everybody wait for ever."""
    with pytest.raises(LocalProtocolError, match="at least 1 slot, not 0"):
        Pool(0)
