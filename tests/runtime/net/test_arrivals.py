"""How many connections an address may open: the buckets, with time as a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.net.arrivals import ADDRESSES_MAX, Arrivals
from runtime.settings.bounds import CONNECTIONS_PER_ADDRESS_MAX, CONNECTIONS_PER_ADDRESS_PER_S_MAX

PER_S, BURST = 4.0, 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.125, 0.25, 1, 9]))))
def test_an_address_opens_its_burst_and_its_rate(moves: list[tuple[str, float]]) -> None:
    """A flood would get through in the right rhythm, or one address pay for another."""
    arrivals, now_s, let_in = Arrivals(PER_S, BURST), 0.0, dict[str, list[float]]()
    for origin, pause_s in moves:
        now_s += pause_s
        before = let_in.setdefault(origin, [])
        # Since any moment no more than the burst and the rate; a full bucket is the worst of them.
        fits = all(
            len(before) - i + 1 <= BURST + (now_s - before[i]) * PER_S for i in range(len(before))
        )
        assert arrivals.take(origin, now_s) == fits
        if fits:
            before.append(now_s)


def test_who_is_refused_is_let_in_again_at_the_rate() -> None:
    """A client that tries again too eagerly would be shut out for as long as it tries."""
    arrivals = Arrivals(PER_S, BURST)
    tried = [arrivals.take("a", at / 100) for at in range(1000)]
    assert sum(tried) == BURST + 9.75 // (1 / PER_S)


def test_a_fleet_that_comes_back_at_once_is_let_in() -> None:
    """After a restart of the server, the clients behind one address would see 429."""
    arrivals = Arrivals(CONNECTIONS_PER_ADDRESS_PER_S_MAX, CONNECTIONS_PER_ADDRESS_MAX)
    assert all(arrivals.take("a", 0.0) for _ in range(CONNECTIONS_PER_ADDRESS_MAX))
    assert not arrivals.take("a", 0.0)


@pytest.mark.parametrize("addresses_max", [4, ADDRESSES_MAX])
def test_addresses_are_forgotten_and_those_seen_last_are_not(addresses_max: int) -> None:
    """Whoever has a network of addresses would take the server's memory, one each."""
    arrivals = Arrivals(PER_S, 1, addresses_max)
    assert arrivals.take("flood", 0.0)
    for number in range(2 * addresses_max):
        assert arrivals.take(f"{number}", 0.0)
        assert not arrivals.take("flood", 0.0)
    assert len(arrivals._buckets) == addresses_max
    assert arrivals.take("0", 0.0)
