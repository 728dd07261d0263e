"""Connection limits: rates, places and the memory of incoming messages."""

from __future__ import annotations

import random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.net.limits import (
    ADDRESSES_MAX,
    BURST_S,
    LARGE_WAIT_S,
    PARTY_SHARE,
    AddressRateLimiter,
    Budget,
    ConnectionLimiter,
    Counters,
    PartyRates,
    RateLimiter,
    Share,
    origin_of,
)
from runtime.settings.settings import (
    BYTES_PER_S_MAX,
    CONNECTIONS_PER_ADDRESS_MAX,
    CONNECTIONS_PER_ADDRESS_PER_S_MAX,
    MESSAGES_PER_S_MAX,
    Settings,
)
from tests.network.transport import limits
from tests.sessions.in_memory import on_virtual_time

UNIT_BYTES = 64_000 * 4 // 3
"""A second of sound: float32, 16 kHz, base64."""
PICTURE_BYTES = 4 * 1024 * 1024 * 4 // 3
"""The largest picture, base64."""

steps = st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 1), st.integers(0, 500)), max_size=30)


@given(steps)
def test_no_more_passes_than_the_burst_and_the_rate(found: list[tuple[float, float, int]]) -> None:
    """A flood would get through by being sent in the right rhythm."""
    rate, now_s, messages, size_bytes = RateLimiter(10, 1000, 1, 0.0), 0.0, 0.0, 0
    for pause_s, cost, size in found:
        now_s += pause_s
        while wait_s := rate.wait_s(now_s):
            now_s += max(wait_s, 0.001)
        rate.take(cost, size)
        messages += cost
        size_bytes += size
        assert messages <= 10 * (BURST_S + now_s) + 1e-6
        assert size_bytes <= 1000 * (BURST_S + now_s) + size + 1e-6


@given(st.floats(0, 1e6), st.floats(0, 100), st.integers(0, 100_000))
def test_after_the_wait_there_is_enough(now_s: float, messages: float, size_bytes: int) -> None:
    """A reader would wake up for nothing, again and again, or sleep too long."""
    rate = RateLimiter(10, 1000, 1, now_s)
    rate.take(messages, size_bytes)
    wait_s = rate.wait_s(now_s)
    left_s = rate.wait_s(now_s + wait_s)
    assert left_s == pytest.approx(0, abs=1e-3)
    if wait_s:
        assert min(rate.messages - 1, rate.size_bytes / 100) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("per_s", "size_bytes"),
    [(1, UNIT_BYTES), (50, UNIT_BYTES // 50), (4, UNIT_BYTES // 4 + PICTURE_BYTES // 2)],
    ids=["units", "20 ms", "pictures"],
)
def test_a_client_in_real_time_never_waits(per_s: int, size_bytes: int) -> None:
    """Sound would arrive late that was sent on time, by the server's own doing."""
    rate = RateLimiter(MESSAGES_PER_S_MAX, BYTES_PER_S_MAX, 24 << 20, 0.0)
    for i in range(600 * per_s):
        now_s = (i - i % per_s) / per_s  # The worst: all of a second at once.
        assert rate.wait_s(now_s) == 0.0
        rate.take(1.0, size_bytes)


def test_the_connections_of_a_party_share_a_rate() -> None:
    """A few dozen connections stopped the event loop, each within its own rate."""
    settings = Settings(messages_per_s_max=10, connections_per_address_max=20 * PARTY_SHARE)
    rates, now_s, passed = PartyRates(settings), 0.0, 0
    flood = [rates.of("flooder", 1, now_s) for _ in range(100)]
    honest = rates.of("honest", 1, now_s)
    for _ in range(100):  # ten seconds
        for rate in flood:
            if not rate.wait_s(now_s):
                rate.take(1.0, 2)
                passed += 1
        assert honest.wait_s(now_s) == 0.0
        now_s += 0.1
    assert 10 * 20 * 10 <= passed <= 10 * 20 * (BURST_S + 10) + len(flood)


def test_one_largest_message_is_never_held_up() -> None:
    """A chat with a video would take minutes on a fast line."""
    rate = RateLimiter(10, 1000, 96 << 20, 0.0)
    rate.take(1.0, 96 << 20)
    assert rate.wait_s(0.0) == 0.0
    rate.take(1.0, 1)
    assert rate.wait_s(0.0) > 0.0


def test_silence_earns_no_more_than_a_burst() -> None:
    """A client that was quiet for an hour could flood the server for a minute."""
    rate = RateLimiter(10, 1000, 1, 0.0)
    assert rate.wait_s(3600.0) == 0.0
    assert rate.messages == 10 * BURST_S


PER_S, BURST = 4.0, 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.125, 0.25, 1, 9]))))
def test_an_address_opens_its_burst_and_its_rate(moves: list[tuple[str, float]]) -> None:
    """A flood would get through in the right rhythm, or one address pay for another."""
    arrivals, now_s, let_in = AddressRateLimiter(PER_S, BURST), 0.0, dict[str, list[float]]()
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
    arrivals = AddressRateLimiter(PER_S, BURST)
    tried = [arrivals.take("a", at / 100) for at in range(1000)]
    assert sum(tried) == BURST + 9.75 // (1 / PER_S)


def test_a_fleet_that_comes_back_at_once_is_let_in() -> None:
    """After a restart of the server, the clients behind one address would see 429."""
    arrivals = AddressRateLimiter(CONNECTIONS_PER_ADDRESS_PER_S_MAX, CONNECTIONS_PER_ADDRESS_MAX)
    assert all(arrivals.take("a", 0.0) for _ in range(CONNECTIONS_PER_ADDRESS_MAX))
    assert not arrivals.take("a", 0.0)


@pytest.mark.parametrize("addresses_max", [4, ADDRESSES_MAX])
def test_addresses_are_forgotten_and_those_seen_last_are_not(addresses_max: int) -> None:
    """Whoever has a network of addresses would take the server's memory, one each."""
    arrivals = AddressRateLimiter(PER_S, 1, addresses_max)
    assert arrivals.take("flood", 0.0)
    for number in range(2 * addresses_max):
        assert arrivals.take(f"{number}", 0.0)
        assert not arrivals.take("flood", 0.0)
    assert len(arrivals._buckets) == addresses_max
    assert arrivals.take("0", 0.0)


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
    limiter = ConnectionLimiter(ALLOWED, counters)
    inside: list[str] = []
    for now_s, (host, enters) in enumerate(moves):
        if enters:
            same = sum(origin_of(it) == origin_of(host) for it in inside)
            expected = "full" if len(inside) >= 4 else "address" if same >= 2 else None
            assert limiter.enter(host, float(now_s)) == expected
            if expected is None:
                inside.append(host)
        elif host in inside:
            inside.remove(host)
            limiter.leave(host)
        assert counters.connections == len(inside)
    for host in inside:
        limiter.leave(host)
    assert counters.connections == 0
    assert limiter._entered == {}


def test_who_is_refused_takes_no_place_and_pays_nothing() -> None:
    """A client that met a full server would be told to slow down, though it did nothing."""
    counters = Counters()
    limiter = ConnectionLimiter(ALLOWED, counters)
    entered = [limiter.enter("10.0.0.1", 0.0) for _ in range(9)]
    assert entered == [None, None] + ["address"] * 7
    limiter.leave("10.0.0.1")
    assert limiter.enter("10.0.0.1", 0.0) == "rate"
    assert limiter.enter("10.0.0.1", 1.0) is None
    assert (counters.connections, counters.refused) == (2, {"address": 7, "rate": 1})


ROOM = 100
MESSAGE_MAX = 60
PIECE = 5


async def receive_one(share: Share, number: int, size: int, piece_s: float) -> None:
    """Let one message come in, piece by piece."""
    for come in range(PIECE, size + 1, PIECE):
        await share.hold(come)
        await anyio.sleep(piece_s)
    share.finish(number)


@pytest.mark.parametrize("seed", range(20))
def test_every_message_comes_in_and_the_room_is_kept(seed: int) -> None:
    """Twenty clients with a video each would take the server's memory, or wait for ever."""

    async def body() -> None:
        chance, counters = random.Random(seed), Counters()
        budget, come_in = Budget(ROOM, counters), 0

        async def connection() -> None:
            nonlocal come_in
            share = Share(budget)
            for number in range(3):
                await anyio.sleep(chance.random() * 20)
                size = chance.randrange(PIECE, MESSAGE_MAX + 1, PIECE)
                await receive_one(share, number, size, chance.random())
                come_in += 1
                assert counters.receiving_bytes <= 2 * ROOM + MESSAGE_MAX
                await anyio.sleep(chance.random() * 2)
                share.release(number)
            share.close()

        with anyio.fail_after(3600):
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(connection)
        assert come_in == 60
        assert counters.receiving_bytes == 0

    on_virtual_time(body, seed=seed)


def test_room_is_given_in_the_order_in_which_messages_began() -> None:
    """A client could be overtaken for ever by others that are faster."""

    async def body() -> None:
        budget, order = Budget(ROOM, Counters()), []

        async def connection(name: int) -> None:
            await anyio.sleep(name)
            share = Share(budget)
            await receive_one(share, 0, MESSAGE_MAX, 10.0)
            order.append(name)
            share.release(0)
            share.close()

        async with anyio.create_task_group() as tasks:
            for name in range(6):
                tasks.start_soon(connection, name)
        assert order == sorted(order)

    on_virtual_time(body)


def test_whole_messages_that_are_unread_let_nobody_exceed_the_room() -> None:
    """Each connection in turn would be the eldest, and exceed it by a message of its own."""

    async def body() -> None:
        counters = Counters()
        budget = Budget(ROOM, counters)
        shares = [Share(budget) for _ in range(5)]
        async with anyio.create_task_group() as tasks:
            for share in shares:
                tasks.start_soon(receive_one, share, 0, MESSAGE_MAX, 1.0)
            await anyio.sleep(1000)
            assert counters.receiving_bytes <= 2 * ROOM + MESSAGE_MAX
            for _ in range(10):
                for share in shares:
                    share.release(0)
                await anyio.sleep(100)
        assert counters.receiving_bytes == 0

    on_virtual_time(body)


def test_only_a_slow_message_that_others_wait_for_is_a_laggard() -> None:
    """A patient client would be cut off for nothing; or one that trickles would stop all others."""

    async def body() -> None:
        budget = Budget(ROOM, Counters())
        slow, next_ = Share(budget), Share(budget)
        await slow.hold(ROOM)
        await anyio.sleep(10 * LARGE_WAIT_S)
        assert budget.laggards(anyio.current_time()) == ()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(next_.hold, ROOM)
            await anyio.sleep(1)
            assert budget.laggards(anyio.current_time()) == (slow,)
            slow.close()
        assert budget.laggards(anyio.current_time()) == ()

    on_virtual_time(body)


def test_who_gives_up_while_waiting_leaves_nothing_behind() -> None:
    """A client that leaves while it waits would be the eldest for ever."""

    async def body() -> None:
        counters = Counters()
        budget = Budget(ROOM, counters)
        first, gone, last = Share(budget), Share(budget), Share(budget)
        await first.hold(ROOM)
        with anyio.move_on_after(1):
            await gone.hold(PIECE)
        gone.close()
        first.close()
        await last.hold(2 * ROOM)
        last.close()
        assert counters.receiving_bytes == 0

    on_virtual_time(body)
