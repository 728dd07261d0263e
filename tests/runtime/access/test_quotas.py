"""How many sessions a key may have: against a model of a few lines."""

from __future__ import annotations

import anyio
import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runtime.access.gate import HOUR_S, PLACE_WAIT_S, QuotaPlace, Quotas
from runtime.access.keys import ANYONE, Key
from tests.sessions.in_memory import on_virtual_time

LIMITS = st.none() | st.integers(0, 3)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def client(**limits: int | None) -> Key:
    """A client with such limits."""
    return attrs.evolve(Key(name="anna", scope="use"), **limits)


class QuotaMachine(RuleBasedStateMachine):
    """Keys that come, go, wait and are changed."""

    passes = Bundle("passes")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.quotas = Quotas(self.clock)
        self.open: dict[str, int] = {"a": 0, "b": 0}
        self.begun: list[tuple[str, float]] = []

    @rule(target=passes, name=st.sampled_from("ab"), at_once=LIMITS, an_hour=LIMITS)
    def enter(
        self, name: str, at_once: int | None, an_hour: int | None
    ) -> tuple[str, QuotaPlace] | None:
        """A session is asked for; the limits may have changed since the last."""
        principal = Key(name=name, scope="use", sessions_max=at_once, sessions_per_hour=an_hour)
        recent = sum(who == name and self.clock() - at < HOUR_S for who, at in self.begun)
        has_room = (at_once is None or self.open[name] < at_once) and (
            an_hour is None or recent < an_hour
        )
        entered = self.quotas.enter(principal)
        assert (entered is not None) == has_room
        if entered is None:
            return None
        self.open[name] += 1
        if an_hour is not None:
            self.begun.append((name, self.clock()))
        return name, entered

    @rule(taken=consumes(passes), twice=st.booleans())
    def leave(self, taken: tuple[str, QuotaPlace] | None, twice: bool) -> None:
        """A session ends."""
        if taken is not None:
            name, entered = taken
            entered.leave()
            if twice:
                entered.leave()
            self.open[name] -= 1

    @rule(seconds=st.sampled_from([0.0, 1.0, HOUR_S / 2, HOUR_S - 1, HOUR_S]))
    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.clock.now += seconds

    @invariant()
    def counts(self) -> None:
        """What is counted is what is open."""
        used = {name: used.now for name, used in self.quotas._used.items()}
        assert {"a": 0, "b": 0} | used == self.open


TestQuotas = QuotaMachine.TestCase


def test_an_hour_slides() -> None:
    """A key could have twice its sessions around the full hour."""
    clock = Clock()
    quotas = Quotas(clock)
    anna = client(sessions_per_hour=2)
    for at in (0.0, 1_800.0):
        clock.now = at
        (quotas.enter(anna) or pytest.fail("refused")).leave()
    clock.now = HOUR_S - 0.001
    assert quotas.enter(anna) is None
    clock.now = HOUR_S
    assert quotas.enter(anna) is not None
    assert quotas.enter(anna) is None


def test_a_session_that_ends_gives_its_place_back() -> None:
    """A key would be locked out by its own sessions."""
    quotas = Quotas(Clock())
    anna = client(sessions_max=1)
    entered = quotas.enter(anna) or pytest.fail("refused")
    assert quotas.enter(anna) is None
    entered.leave()
    assert quotas.enter(anna) is not None


def test_without_keys_there_are_no_quotas() -> None:
    """A server without keys would refuse its clients."""
    quotas = Quotas(Clock())
    assert all(quotas.enter(ANYONE) is not None for _ in range(1_000))


def test_what_is_over_is_forgotten() -> None:
    """A server would keep something of each key that ever was."""
    clock = Clock()
    quotas = Quotas(clock)
    for number in range(100):
        entered = quotas.enter(Key(name=f"k{number}", scope="use", sessions_per_hour=5))
        assert entered is not None
        entered.leave()
    assert len(quotas._used) == 100
    clock.now = HOUR_S
    assert quotas.enter(client()) is not None
    assert len(quotas._used) == 1


def test_a_refused_session_does_not_count_for_the_hour() -> None:
    """A client that tries again while the server is busy would lock itself out for an hour."""
    quotas = Quotas(lambda: 0.0)
    key = client(sessions_per_hour=1)
    for _ in range(3):
        place = quotas.enter(key)
        assert place is not None
        place.leave(is_refund=True)
    counted = quotas.enter(key)
    assert counted is not None
    counted.leave()
    assert quotas.enter(key) is None


def test_a_place_that_is_about_to_be_free_is_waited_for() -> None:
    """A client that lost its line would be refused until its old session is cleaned up."""

    async def body() -> None:
        quotas = Quotas(anyio.current_time)
        key = client(sessions_max=1)
        old = quotas.enter(key)
        assert old is not None
        async with anyio.create_task_group() as tasks:

            async def end_soon() -> None:
                await anyio.sleep(PLACE_WAIT_S / 2)
                old.leave()

            tasks.start_soon(end_soon)
            new = await quotas.enter_soon(key)
        assert new is not None
        began_s = anyio.current_time()
        assert await quotas.enter_soon(key) is None
        assert anyio.current_time() - began_s >= PLACE_WAIT_S

    on_virtual_time(body)
