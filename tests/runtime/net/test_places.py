"""Places for connections, against a model that counts with lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.net.counters import Counters
from runtime.net.places import Places, origin_of
from tests.network.transport import (
    limits,
)

HOSTS = ["10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"]
ALLOWED = limits(
    connections_max=4, connections_per_address_max=2, connections_per_address_per_s_max=1.0
)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1:2", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("no address", "no address"),
    ],
)
def test_an_address_counts_as_whoever_has_it(host: str, origin: str) -> None:
    """One machine with IPv6 could take every place, each from an address of its own."""
    assert origin_of(host) == origin


@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.booleans()), max_size=60))
def test_places_are_kept_as_a_list_would(moves: list[tuple[str, bool]]) -> None:
    """A place would leak with each refusal, until the server is full of nobody."""
    counters = Counters()
    places = Places(ALLOWED, counters)
    inside: list[str] = []
    for now_s, (host, enters) in enumerate(moves):
        if enters:
            same = sum(origin_of(it) == origin_of(host) for it in inside)
            expected = "full" if len(inside) >= 4 else "address" if same >= 2 else None
            assert places.enter(host, float(now_s)) == expected
            if expected is None:
                inside.append(host)
        elif host in inside:
            inside.remove(host)
            places.leave(host)
        assert counters.connections == len(inside)
    for host in inside:
        places.leave(host)
    assert counters.connections == 0
    assert places._taken == {}


def test_who_is_refused_takes_no_place_and_pays_nothing() -> None:
    """A client that met a full server would be told to slow down, though it did nothing."""
    counters = Counters()
    places = Places(ALLOWED, counters)
    entered = [places.enter("10.0.0.1", 0.0) for _ in range(9)]
    assert entered == [None, None] + ["address"] * 7
    places.leave("10.0.0.1")
    assert places.enter("10.0.0.1", 0.0) == "rate"
    assert places.enter("10.0.0.1", 1.0) is None
    assert (counters.connections, counters.refused) == (2, {"address": 7, "rate": 1})
