"""Estimates: what those who wait are told is near what they wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from statistics import median
from typing import Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.limits import NS_PER_S, Mode
from protocol.values.messages import QueuePlace
from runtime.slots.admission import (
    SESSION_S_ASSUMED,
    SESSIONS_AVERAGED,
    TURN_S_ASSUMED,
    Admission,
    Durations,
    Refused,
    waits_ns,
)
from runtime.slots.workers import Lease, Pool

MODES: Final[tuple[Mode, ...]] = ("video", "audio", "chat")


def knowing(**took_s: list[int]) -> Durations:
    """What is known after sessions took so long."""
    durations = Durations()
    for mode in MODES:
        for took in took_s.get(mode, []):
            durations.add(mode, took * NS_PER_S)
    return durations


def waits_s(durations: Durations, held: list[tuple[Mode, int]], waiting: list[Mode]) -> list[float]:
    """Estimates in seconds; `held` is too."""
    held_ns = [(mode, held_s * NS_PER_S, 0) for mode, held_s in held]
    waiting_ns = [(mode, 0) for mode in waiting]
    return [wait_ns / NS_PER_S for wait_ns in waits_ns(durations, held_ns, waiting_ns)]


def test_no_estimate_exceeds_what_the_limits_allow() -> None:
    """A client would be told to wait 90 s where a session lasts 20 s at most, and give up."""
    durations = Durations(lambda mode: {"video": 20, "audio": 60}.get(mode, 0))
    assert waits_s(durations, [("video", 0)], ["video"]) == [20]
    assert waits_s(durations, [("video", 15)], ["video"]) == [5]
    assert waits_s(durations, [("video", 25)], ["video"]) == [0]
    assert waits_s(durations, [("audio", 0)], ["video", "audio"]) == [60, 60]
    for _ in range(3):
        durations.add("video", 50 * NS_PER_S)
    assert durations.average_ns("video") == 20 * NS_PER_S
    assert waits_s(durations, [("video", 4)], ["video"]) == [16]


def test_those_who_wait_have_less_of_their_limit_left() -> None:
    """The limit counts from the connection: who has waited long holds a slot for less."""
    durations = Durations(lambda _: 20)
    held, waiting = [("video", 10 * NS_PER_S, 0)], [("video", 8 * NS_PER_S), ("video", 0)]
    told = waits_ns(durations, held, waiting)  # type: ignore[arg-type]
    assert [wait_ns // NS_PER_S for wait_ns in told] == [10, 12]


def test_the_queue_before_a_slot_counts_against_the_limit_of_its_holder() -> None:
    """The next in line is told the time that is left, not the whole limit."""
    durations = Durations(lambda _: 12)
    held = [("video", NS_PER_S // 10, 8 * NS_PER_S)]
    told = waits_ns(durations, held, [("video", 0)])  # type: ignore[arg-type]
    assert told == [3_900_000_000]


def test_a_server_that_has_served_nobody_tells_no_more_than_its_limit() -> None:
    """The limits of the settings reach those who wait."""
    told: list[QueuePlace] = []
    admission = Admission(
        Pool(1), clock_ns=lambda: 0, new_ticket_id=lambda: f"{len(told)}", limit_s=lambda _: 20
    )
    for _ in range(2):
        admission.enter(
            "video",
            on_leased=lambda _: None,
            on_moved=told.append,
            on_cancelled=lambda: None,
            on_refused=lambda _: None,
        )
    assert [place.estimated_wait_s for place in told] == [20]


def test_assumes_something_until_a_session_has_ended() -> None:
    """The first who wait would be told nothing, or that it takes no time."""
    told = waits_s(Durations(), [("video", 0)], ["chat", "audio", "chat"])
    assert told == [SESSION_S_ASSUMED, 100, 190]
    assert TURN_S_ASSUMED == 10


def test_each_mode_has_an_average_of_its_own() -> None:
    """Somebody behind ten turns of chat would be told to wait a quarter of an hour."""
    durations = knowing(video=[100, 200], chat=[2, 4])
    assert waits_s(durations, [("chat", 1)], ["chat"] * 3) == [2, 5, 8]
    assert waits_s(durations, [("video", 0)], ["video", "chat", "chat"]) == [150, 300, 303]


def test_the_average_follows_the_day() -> None:
    """Estimates would be those of last week for ever."""
    durations = knowing(video=[1000] * SESSIONS_AVERAGED + [10] * SESSIONS_AVERAGED)
    assert durations.average_ns("video") == 10 * NS_PER_S


def test_a_slot_held_for_long_is_judged_by_those_that_took_longer() -> None:
    """Past the average everybody would be told for minutes that it is a second."""
    durations = knowing(video=[10, 10, 10, 130])
    assert waits_s(durations, [("video", 30)], ["video"]) == [100]
    assert waits_s(durations, [("video", 200)], ["video"]) == [20]  # half of 40: nothing is known


def test_of_many_slots_the_first_comes_free_sooner_than_each_on_average() -> None:
    """With many slots everybody would be told many times too long."""
    durations = knowing(video=list(range(1, 33)))
    told = waits_s(durations, [("video", 0)] * 7, ["video"])
    assert told[0] < 16.5 / 3


@given(
    took_s=st.lists(st.tuples(st.sampled_from(MODES), st.integers(0, 900)), max_size=80),
    held=st.lists(st.tuples(st.sampled_from(MODES), st.integers(0, 900)), max_size=20),
    waiting=st.lists(st.sampled_from(MODES), max_size=20),
)
def test_nobody_behind_is_told_less(
    took_s: list[tuple[Mode, int]], held: list[tuple[Mode, int]], waiting: list[Mode]
) -> None:
    """Somebody would be told that waiting behind others is faster."""
    durations = Durations()
    for mode, took in took_s:
        durations.add(mode, took * NS_PER_S)
    told = waits_s(durations, held, waiting)
    assert len(told) == len(waiting)
    assert told == sorted(told)
    assert all(wait >= 0 for wait in told)


# -- how true they are ----------------------------------------------------------------------------

ARRIVALS: Final = 900
WARM_UP: Final = 300
"""Arrivals that are not judged: the averages are learned from them."""
MEANS_S: Final[dict[Mode, float]] = {"video": 80, "audio": 150, "chat": 6}
SHARES: Final = (1, 1, 4)
KINDS: Final[dict[str, Callable[[random.Random], float]]] = {
    "exponential": lambda dice: dice.expovariate(1),
    "uniform": lambda dice: dice.uniform(0.2, 1.8),
    "capped": lambda dice: min(0.2 + dice.expovariate(1 / 0.8), 4),
}
"""How long sessions take, as a share of the mean of their mode."""


@attrs.define
class Waits:
    """What was told at first and what came true, in seconds, of everybody who waited."""

    told: list[float] = attrs.Factory(list)
    ratios: list[float] = attrs.Factory(list)


class Street:
    """Sessions that come, wait, stay and go, on a clock of their own."""

    def __init__(self, seed: int, slots: int, kind: str, load: float) -> None:
        self.dice = random.Random(seed)
        self.kind, self.waits = kind, Waits()
        self.now_ns = 0
        self.ends: list[tuple[int, int, Lease]] = []
        mean_s = sum(MEANS_S[mode] * share for mode, share in zip(MODES, SHARES, strict=True))
        self.pause_s = mean_s / sum(SHARES) / slots / load
        ids, self.order = count(), count()
        self.admission = Admission(
            Pool(slots),
            clock_ns=lambda: self.now_ns,
            new_ticket_id=lambda: f"ticket_{next(ids):012x}",
        )

    def run(self) -> Waits:
        """Let all come; those that leave before the next comes leave first."""
        for number in range(ARRIVALS):
            arrives_ns = self.now_ns + self.ns(self.dice.expovariate(1 / self.pause_s))
            while self.ends and self.ends[0][0] <= arrives_ns:
                self.now_ns, _, lease = heappop(self.ends)
                self.admission.release(lease)
            self.now_ns = arrives_ns
            self.arrive(number)
        return self.waits

    def arrive(self, number: int) -> None:
        mode = self.dice.choices(MODES, SHARES)[0]
        came_ns, told_s = self.now_ns, list[int]()

        def leased(lease: Lease) -> None:
            waited_s = (self.now_ns - came_ns) / NS_PER_S
            takes_ns = self.ns(MEANS_S[mode] * KINDS[self.kind](self.dice))
            heappush(self.ends, (self.now_ns + takes_ns, next(self.order), lease))
            if number >= WARM_UP and told_s and waited_s > 2:
                self.waits.ratios.append(told_s[0] / waited_s)

        def moved(place: QueuePlace) -> None:
            told_s.append(place.estimated_wait_s)

        with suppress(Refused):  # the queue is bounded, here as elsewhere
            self.admission.enter(
                mode,
                on_leased=leased,
                on_moved=moved,
                on_cancelled=lambda: None,
                on_refused=lambda _: None,
            )

    @staticmethod
    def ns(seconds: float) -> int:
        return round(seconds * NS_PER_S)


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("load", [0.9, 1.1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 4, 16])
def test_what_is_told_is_within_a_factor_of_two(slots: int, kind: str, load: float) -> None:
    """Clients give up on waits that would have been short, or wait for what does not come."""
    ratios = [ratio for seed in range(3) for ratio in Street(seed, slots, kind, load).run().ratios]
    assert len(ratios) > 100
    assert 0.5 < median(ratios) < 2
    within = sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
    assert within > 0.7
