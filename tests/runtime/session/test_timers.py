"""Timers of a session fire in order of time, each once, unless they were cancelled."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import anyio
from hypothesis import given
from hypothesis import strategies as st

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.events import TimerName
from recorder.read.past import Past
from runtime.session.driver import Timers
from tests.sessions.in_memory import on_virtual_time

S = 1_000_000_000
NAMES: tuple[TimerName, ...] = ("session", "idle", "pause", "detach")
Step = tuple[TimerName, bool, int, int]
"""A timer, whether it is set or only cancelled, the time since the last step, how far ahead [s]."""
STEPS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.booleans(), st.integers(1, 5), st.integers(-2, 9)),
    max_size=20,
)


class Inbox:
    """Keeps the timers that fired: the whole second, and which."""

    def __init__(self, fired: list[tuple[int, int]]) -> None:
        self.fired = fired
        self._start = anyio.current_time()

    def now_ns(self) -> int:
        return round((anyio.current_time() - self._start) * S)

    def step_or_post(self, event: ev.Event) -> None:
        assert isinstance(event, ev.TimerFired)
        self.fired.append((event.at_ns // S, event.generation))

    def past(self) -> AbstractAsyncContextManager[Past]:
        raise NotImplementedError


@given(steps=STEPS)
def test_each_fires_once_at_its_time_in_order(steps: list[Step]) -> None:
    """A session would end early or never, or a cancelled timer end it."""
    fired: list[tuple[int, int]] = []

    async def body() -> None:
        inbox, now_s = Inbox(fired), 0
        timers = Timers(inbox)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(timers.run)
            begun = anyio.current_time() + 0.5  # timers are due at whole seconds, steps are not
            for generation, (name, is_set, wait_s, ahead_s) in enumerate(steps):
                now_s += wait_s
                await anyio.sleep_until(begun + now_s)
                timers.cancel(ef.CancelTimer(name=name, generation=0))
                if is_set:
                    at_ns = (now_s + ahead_s) * S
                    timers.set(ef.SetTimer(name=name, generation=generation, at_ns=at_ns))
            await anyio.sleep(10)
            tasks.cancel_scope.cancel()

    on_virtual_time(body)
    assert fired == fired_of(steps)


def fired_of(steps: list[Step]) -> list[tuple[int, int]]:
    """Return the seconds at which timers fire, and which."""
    now_s, due, fired = 0, dict[TimerName, tuple[int, int]](), list[tuple[int, int]]()
    for generation, (name, is_set, wait_s, ahead_s) in enumerate(steps):
        now_s += wait_s
        fired += [it for it in due.values() if it[0] <= now_s]
        due = {key: it for key, it in due.items() if it[0] > now_s and key != name}
        if is_set and ahead_s <= 0:
            fired.append((now_s, generation))
        elif is_set:
            due[name] = now_s + ahead_s, generation
    return sorted([*fired, *due.values()])
