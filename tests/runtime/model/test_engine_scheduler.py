"""The scheduler: who goes first, who goes along, and whose fault it is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.model.engine.engine import (
    BACKGROUND,
    BACKGROUND_TURNS,
    COMPANY_NS,
    GROUP_NS,
    OPEN_STAGE,
    URGENT_NS,
    Scheduler,
    Task,
)

LATER = 10 * URGENT_NS
STAGES = range(OPEN_STAGE - 1, OPEN_STAGE + 3)
"""Two in which others join a group, and two in which they do not."""


@attrs.frozen(kw_only=True)
class Ask:
    """A request: answered by its own name."""

    name: str
    bucket: Hashable = "a"
    stage: int = 0
    is_bad: bool = False


class Desk:
    """Computes, and keeps a diary of the batches; a bad request fails its batch."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.results: dict[str, object] = {}

    def compute(self, works: Sequence[Ask]) -> list[str]:
        assert len({work.bucket for work in works}) == 1
        self.batches.append([work.name for work in works])
        if any(work.is_bad for work in works):
            raise RuntimeError("bad request")
        return [work.name.upper() for work in works]

    def task(self, steps: Generator[Any, Any, Any], deadline_ns: float, name: str = "") -> Task:
        def done(result: Any, error: BaseException | None) -> None:
            assert name not in self.results, "done is called once"
            self.results[name] = result if error is None else error

        return Task(steps=steps, deadline_ns=deadline_ns, done=done)

    def ask(self, *asks: Ask, deadline_ns: float = LATER) -> Task:
        """A task that asks these, one after the other, and returns the answers."""

        def steps() -> Generator[Ask, str, list[str]]:
            answers: list[str] = []
            for ask in asks:
                answers += [(yield ask)]
            return answers

        return self.task(steps(), deadline_ns, asks[0].name if asks else "")


def run(desk: Desk, *tasks: Task, batch_max: int = 64, now_ns: float = 0) -> Scheduler:
    scheduler = Scheduler(desk.compute, batch_max=batch_max)
    for task in tasks:
        scheduler.add(task)
    while not scheduler.is_idle:
        scheduler.turn(now_ns)
    return scheduler


def test_requests_of_one_bucket_are_answered_together() -> None:
    """Eight sessions would take eight times as long as one."""
    desk = Desk()
    asks = [Ask(name="x"), Ask(name="y"), Ask(name="z", bucket="b"), Ask(name="w")]
    scheduler = run(desk, *(desk.ask(ask) for ask in asks))
    assert desk.batches == [["x", "y", "w"], ["z"]]
    assert desk.results == {"x": ["X"], "y": ["Y"], "z": ["Z"], "w": ["W"]}
    tally = scheduler.tally
    assert (tally.turns, tally.answers, tally.largest) == (2, 4, 3)


def test_a_batch_has_its_bound_and_the_nearest_deadlines() -> None:
    """A crowd would make every unit late, the one due first included."""
    desk = Desk()
    due = {"a": 5, "b": 1, "c": 4, "d": 2, "e": 3}
    tasks = [desk.ask(Ask(name=name), deadline_ns=LATER + at) for name, at in due.items()]
    run(desk, *tasks, batch_max=2)
    assert desk.batches == [["b", "d"], ["e", "c"], ["a"]]


def test_the_earliest_stage_goes_first() -> None:
    """Those that are behind would never catch up, and later stages run alone."""
    desk = Desk()
    late, early = Ask(name="late", bucket="l", stage=4), Ask(name="early", bucket="e", stage=1)
    run(desk, desk.ask(late, deadline_ns=LATER), desk.ask(early, deadline_ns=LATER + 1))
    assert desk.batches == [["early"], ["late"]]


def test_an_urgent_task_does_not_wait_for_company() -> None:
    """A unit would miss its second while others begin theirs."""
    desk = Desk()
    late, early = Ask(name="late", bucket="l", stage=4), Ask(name="early", bucket="e", stage=1)
    run(desk, desk.ask(late, deadline_ns=URGENT_NS - 1), desk.ask(early, deadline_ns=LATER))
    assert desk.batches == [["late"], ["early"]]


def unit(desk: Desk, name: str) -> Task:
    """A task of all `STAGES`."""
    return desk.ask(*(Ask(name=f"{name}{stage}", bucket=stage, stage=stage) for stage in STAGES))


def test_those_that_come_later_wait_for_the_group_and_begin_together() -> None:
    """With sessions spread over the second each would begin by itself, and share no batch."""
    desk = Desk()
    scheduler = Scheduler(desk.compute, batch_max=8)
    scheduler.add(unit(desk, "a"))
    for _ in range(2):
        scheduler.turn(0)
    for name in "bc":
        scheduler.add(unit(desk, name))
    while not scheduler.is_idle:
        scheduler.turn(0)
    own, others = [[f"a{stage}"] for stage in STAGES], [[f"b{at}", f"c{at}"] for at in STAGES]
    assert desk.batches == own + others


def test_those_that_come_during_prefill_belong_to_the_group() -> None:
    """Of units that are due at once the first would begin, and all others wait for it."""
    desk = Desk()
    scheduler = Scheduler(desk.compute, batch_max=8)
    scheduler.add(unit(desk, "a"))
    scheduler.turn(0)
    scheduler.add(unit(desk, "b"))
    while not scheduler.is_idle:
        scheduler.turn(0)
    first, *rest = STAGES
    assert desk.batches == [[f"a{first}"], [f"b{first}"], *([f"a{at}", f"b{at}"] for at in rest)]


def test_who_comes_in_time_for_a_batch_belongs_to_the_group() -> None:
    """It would stop after one batch, and hold memory until the group is done."""
    desk = Desk()
    scheduler = Scheduler(desk.compute, batch_max=8)
    first, *rest = STAGES
    asks = [
        Ask(name=name, bucket=at, stage=OPEN_STAGE + 1) for name, at in (("x", 9), ("y", first))
    ]
    scheduler.add(desk.ask(*asks))
    scheduler.turn(0)
    for name in "ab":
        scheduler.add(unit(desk, name))
    scheduler.turn(0)
    for _ in rest[:-1]:
        scheduler.turn(0)
    scheduler.add(unit(desk, "c"))
    while not scheduler.is_idle:
        scheduler.turn(0)
    assert desk.batches[:2] == [["x"], ["y", f"a{first}", f"b{first}"]]
    assert desk.batches[2:5] == [[f"a{at}", f"b{at}"] for at in rest]
    assert desk.batches[5:] == [[f"c{at}"] for at in STAGES]


def test_sound_that_came_ahead_of_time_waits_for_live_units() -> None:
    """A file that is transcribed would make a conversation stutter."""
    desk = Desk()

    def units(name: str, deadline_ns: int) -> Task:
        asks = [
            Ask(name=f"{name}{stage}", bucket=f"{name}{stage}", stage=stage) for stage in (0, 1)
        ]
        return desk.ask(*asks, deadline_ns=deadline_ns)

    run(desk, units("file", LATER + GROUP_NS), units("live", LATER))
    assert desk.batches == [["live0"], ["live1"], ["file0"], ["file1"]]


def test_an_urgent_task_begins_at_once() -> None:
    """It would be late behind a group that has just begun."""
    desk = Desk()
    scheduler = Scheduler(desk.compute, batch_max=8)
    decoding = OPEN_STAGE + 1
    asks = (Ask(name=f"a{index}", bucket="a", stage=decoding) for index in range(3))
    scheduler.add(desk.ask(*asks))
    scheduler.turn(-1)
    urgent = [Ask(name=f"b{index}", bucket="b", stage=5) for index in (0, 1)]
    scheduler.add(desk.ask(*urgent, deadline_ns=URGENT_NS))
    scheduler.turn(0)
    while not scheduler.is_idle:
        scheduler.turn(1)
    assert desk.batches == [["a0"], ["a1"], ["b0"], ["b1"], ["a2"]]


def test_of_urgent_tasks_the_nearest_deadline_goes_first_even_when_missed() -> None:
    """The session that is most behind would be served last."""
    desk = Desk()
    tasks = [
        desk.ask(Ask(name=name, bucket=name), deadline_ns=at)
        for name, at in (("soon", 2_000), ("missed", 500), ("sooner", 1_500))
    ]
    run(desk, *tasks, now_ns=1_000)
    assert desk.batches == [["missed"], ["sooner"], ["soon"]]


def test_equal_deadlines_are_served_in_the_order_of_asking() -> None:
    """One session would overtake another for ever."""
    desk = Desk()
    run(desk, *(desk.ask(Ask(name=name, bucket=name)) for name in "dcab"))
    assert desk.batches == [["d"], ["c"], ["a"], ["b"]]


def test_background_work_waits_until_nothing_else_does() -> None:
    """A bulk job would make a caller wait."""
    desk = Desk()
    back = desk.ask(Ask(name="back", bucket="b", stage=0), deadline_ns=BACKGROUND)
    call = desk.ask(*(Ask(name=name, bucket="c", stage=5) for name in ("one", "two")))
    run(desk, back, call)
    assert desk.batches == [["one"], ["two"], ["back"]]


def test_background_work_is_done_beside_others_that_never_pause() -> None:
    """With a dozen sessions there is always one that waits: a lost one would never be rebuilt."""
    desk = Desk()
    scheduler = Scheduler(desk.compute, batch_max=8)
    backs = ["old", "young"]
    for name in backs:
        ask = Ask(name=name, bucket=name, stage=len(name))
        scheduler.add(desk.ask(ask, deadline_ns=BACKGROUND))
    for turn in range(2 * BACKGROUND_TURNS + 2):
        if turn % 2 == 0:
            scheduler.add(desk.ask(*(Ask(name=f"{turn}", stage=9) for _ in range(2))))
        scheduler.turn(0)
    own = [at for at, batch in enumerate(desk.batches) if batch[0] in backs]
    assert [desk.batches[at] for at in own] == [["old"], ["young"]]
    assert own == [BACKGROUND_TURNS, 2 * BACKGROUND_TURNS + 1]


def test_background_work_joins_a_batch_behind_real_time() -> None:
    """A bulk job would take ages though there is room, or the place of a caller."""
    desk = Desk()
    tasks = [desk.ask(Ask(name="back"), deadline_ns=BACKGROUND)]
    tasks += [desk.ask(Ask(name=name)) for name in ("one", "two")]
    run(desk, *tasks, batch_max=2)
    assert desk.batches == [["one", "two"], ["back"]]


def test_only_the_task_at_fault_fails() -> None:
    """One bad picture would fail the units of all callers in its batch."""
    desk = Desk()
    bad = Ask(name="bad", is_bad=True)
    run(desk, *(desk.ask(ask) for ask in (Ask(name="x"), bad, Ask(name="y"))))
    assert desk.batches == [["x", "bad", "y"], ["x"], ["bad"], ["y"]]
    assert isinstance(desk.results["bad"], RuntimeError)
    assert (desk.results["x"], desk.results["y"]) == (["X"], ["Y"])


def test_a_task_alone_is_not_tried_twice() -> None:
    """A request that takes a second to fail would take two."""
    desk = Desk()
    run(desk, desk.ask(Ask(name="bad", is_bad=True)))
    assert desk.batches == [["bad"]]


def test_a_task_may_go_on_after_its_request_failed() -> None:
    """A model could not clean up, or try another way."""
    desk = Desk()

    def steps() -> Generator[Ask, str, str]:
        try:
            yield Ask(name="bad", is_bad=True)
        except RuntimeError:
            return (yield Ask(name="again"))
        return "never"

    run(desk, desk.task(steps(), LATER))
    assert desk.results == {"": "AGAIN"}


def test_a_task_that_raises_fails_alone() -> None:
    """A mistake in one session would stop the engine for all."""
    desk = Desk()

    def steps() -> Generator[Ask, str, str]:
        yield Ask(name="x")
        raise KeyError("mistake")

    run(desk, desk.task(steps(), LATER, "wrong"), desk.ask(Ask(name="y")))
    assert isinstance(desk.results["wrong"], KeyError)
    assert desk.results["y"] == ["Y"]


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_a_task_without_requests_is_done_at_once(error: Exception | None) -> None:
    """A release or a rollback would wait for a batch of others."""
    desk = Desk()

    def steps() -> Generator[Ask, str, str]:
        if error is not None:
            raise error
        return "done"
        yield

    scheduler = Scheduler(desk.compute, batch_max=1)
    scheduler.add(desk.task(steps(), LATER))
    assert scheduler.is_idle
    assert desk.results == {"": error or "done"}


def test_a_task_added_amid_others_joins_them() -> None:
    """A caller that comes later would wait until all others are done."""
    desk = Desk()
    scheduler = Scheduler(desk.compute, batch_max=8)
    scheduler.add(desk.ask(Ask(name="a1"), Ask(name="a2"), Ask(name="a3")))
    scheduler.turn(0)
    scheduler.add(desk.ask(Ask(name="b1"), Ask(name="b2")))
    while not scheduler.is_idle:
        scheduler.turn(0)
    assert desk.batches == [["a1"], ["a2", "b1"], ["a3", "b2"]]


ASKS = st.builds(
    Ask,
    name=st.uuids().map(str),
    bucket=st.sampled_from("abc"),
    stage=st.integers(0, 3),
    is_bad=st.sampled_from((False,) * 9 + (True,)),
)
PLANS = st.lists(
    st.tuples(
        st.lists(ASKS, min_size=1, max_size=5),
        st.sampled_from((0, URGENT_NS, LATER, BACKGROUND)),
        st.integers(0, 12),
    ),
    max_size=8,
)


@given(plans=PLANS, batch_max=st.integers(1, 8))
def test_every_task_ends_once_with_its_own_answers(
    plans: list[tuple[list[Ask], float, int]], batch_max: int
) -> None:
    """A caller would get the answer of another, or none (B8, B9)."""
    desk = Desk()
    scheduler = Scheduler(desk.compute, batch_max=batch_max)
    waiting = sorted(plans, key=lambda plan: plan[2])
    turn = 0
    while waiting or not scheduler.is_idle:
        while waiting and waiting[0][2] <= turn:
            asks, deadline_ns, _ = waiting.pop(0)
            scheduler.add(desk.ask(*asks, deadline_ns=deadline_ns))
        if not scheduler.is_idle:
            scheduler.turn(turn * URGENT_NS / 2)
        turn += 1
    assert len(desk.results) == len(plans)
    for asks, _, _ in plans:
        result = desk.results[asks[0].name]
        if any(ask.is_bad for ask in asks):
            assert isinstance(result, RuntimeError)
        else:
            assert result == [ask.name.upper() for ask in asks]
    assert max(map(len, desk.batches), default=0) <= batch_max


@given(deadlines=st.lists(st.integers(0, 3 * URGENT_NS), min_size=1, max_size=6))
def test_no_urgent_task_is_passed_over(deadlines: list[int]) -> None:
    """A unit would be late though the machine was free for it."""
    desk = Desk()
    tasks = [
        desk.ask(Ask(name=str(index), bucket=index, stage=-index), deadline_ns=at)
        for index, at in enumerate(deadlines)
    ]
    run(desk, *tasks)
    order = [deadlines[int(name)] for (name,) in desk.batches]
    for place, at in enumerate(order):
        if at < URGENT_NS:
            assert max(order[: place + 1]) < at + COMPANY_NS


def test_urgent_tasks_that_are_due_together_stay_together() -> None:
    """A crowd of sessions would speak one by one as soon as it is late."""
    desk = Desk()

    def plan(name: str, tokens: int, deadline_ns: int) -> Task:
        asks = [Ask(name=f"{name}{index}", bucket="llm", stage=3) for index in range(tokens)]
        return desk.ask(*asks, Ask(name=f"{name}s", bucket="tts", stage=5), deadline_ns=deadline_ns)

    run(desk, plan("a", 1, 0), plan("b", 2, COMPANY_NS - 1), plan("c", 3, COMPANY_NS))
    assert desk.batches == [["a0", "b0", "c0"], ["b1", "c1"], ["as", "bs"], ["c2"], ["cs"]]


def callbacks(results: list[object]) -> Callable[[Any, BaseException | None], None]:
    return lambda result, error: results.append((result, error))


def test_a_finished_task_is_told_of_before_the_next_turn() -> None:
    """A caller would hear its answer only when others are done as well."""
    desk, results = Desk(), list[object]()
    scheduler = Scheduler(desk.compute, batch_max=1)

    def steps() -> Generator[Ask, str, str]:
        return (yield Ask(name="x"))

    scheduler.add(Task(steps=steps(), deadline_ns=0, done=callbacks(results)))
    scheduler.add(desk.ask(Ask(name="y"), deadline_ns=1))
    scheduler.turn(0)
    assert results == [("X", None)]
