"""A session gives the same bits alone and in any company: Hypothesis chooses the company.

Each slot has tenants, one after the other. They join at a turn of the scheduler, run units with
their own settings, windows, voices and pictures, are interrupted before a request, fail at one,
roll back and go on, and leave. A device that fails does so after it has written, and takes the
whole batch with it, so that honest requests are computed twice. What a tenant got is then compared,
bit for bit, with what the same session gets alone, cut where its recording says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values.model import Cut, DuplexConfig, Opening, Silent, Unit, Voice
from runtime.model.backends.base import BackendError
from runtime.model.backends.minicpmo.decoder import RowByRowDecoder
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.session import SteppedSession
from runtime.model.backends.minicpmo.work import Steps, Work
from runtime.model.engine.engine import BACKGROUND, Scheduler, Task
from tests.models import random_model
from tests.models.blocking import alone
from tests.models.random_model import FEW_UNITS, IN_SLOTS, SLIDING, facts, picture, sound
from tests.project.sampling import sample

EXAMPLES = sample(100, 2)
UNITS = sample(20, 12)
SLOTS = 8
MS = 1_000_000
BROKEN = picture(0)[:200]
Diary = list[tuple[object, ...]]


# `test_rebuild.py` has the layout in slots.
@pytest.fixture(scope="module", params=sample([(), (IN_SLOTS,)], [()]), ids=str)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DuplexModel]:
    """A model whose encoder and windows start over often enough for twelve units."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.model.backends.minicpmo.state.CONTEXT_UNITS", 4)
        patch.setattr("runtime.model.backends.minicpmo.state.BASIC_HIGH", 260)
        patch.setattr("runtime.model.backends.minicpmo.state.BASIC_LOW", 160)
        folder, changes = tmp_path_factory.mktemp("model"), (SLIDING, FEW_UNITS, *request.param)
        yield random_model.load(folder, *changes, slots=SLOTS)


@attrs.frozen(kw_only=True)
class Second:
    """One unit of a tenant, and what befalls it; in few words, since Hypothesis prints it.

    Attributes:
        index: the unit's.
        place: which sound is heard.
        frames: number, width and height of the pictures seen.
        force_listen: as in `Unit`.
        max_slice_nums: as in `Unit`.
        due_ms: to its deadline, or `BACKGROUND`.
        interrupt_at: the request before which it is interrupted.
        fail_at: the request at which the device fails in a first attempt.
        is_broken: a first attempt has a frame that cannot be decoded.
    """

    index: int
    place: int
    frames: tuple[tuple[int, int, int], ...] = ()
    force_listen: bool = False
    max_slice_nums: int = 1
    due_ms: float = 1000
    interrupt_at: int | None = None
    fail_at: int | None = None
    is_broken: bool = False

    @property
    def unit(self) -> Unit:
        return Unit(
            index=self.index,
            pcm=sound(self.place),
            frames=tuple(picture(*frame) for frame in self.frames),
            force_listen=self.force_listen,
            max_slice_nums=self.max_slice_nums,
        )


@attrs.frozen(kw_only=True)
class Tenant:
    """One session.

    Attributes:
        instructions: as in `Opening`, as are `config` and `seed`.
        voice: number and samples of the reference audio.
        config: see `instructions`.
        seed: see `instructions`.
        seconds: its units.
    """

    instructions: str
    voice: tuple[int, int]
    config: DuplexConfig
    seed: int
    seconds: tuple[Second, ...]

    @property
    def opening(self) -> Opening:
        return Opening(
            instructions=self.instructions,
            voice=Voice(llm_pcm=sound(*self.voice)),
            config=self.config,
            seed=self.seed,
        )


@attrs.frozen(eq=False)
class Poisoned:
    """A request at which the device fails."""

    work: Work

    @property
    def stage(self) -> int:
        return self.work.stage

    @property
    def bucket(self) -> Hashable:
        return self.work.bucket


def passing(steps: Steps[Any], each: Callable[[int, Work], Any]) -> Steps[Any]:
    """The same requests, each by its number handed to `each`, which gives what is asked instead."""
    answer: Any = None
    number = 0
    try:
        while True:
            work = each(number, steps.send(answer))
            number += 1
            try:
                answer = yield work
            except RuntimeError as error:
                steps.throw(error)
    except StopIteration as end:
        return end.value


def fail_once(session: SteppedSession, second: Second) -> Steps[None]:
    """Attempt a unit in which something breaks, and undo it."""
    unit = second.unit
    if second.is_broken:
        unit = attrs.evolve(unit, frames=(*unit.frames, BROKEN))
    with suppress(BackendError):  # Where it would fail later than the unit ends, it only runs.
        yield from passing(
            session.unit(unit, None),
            lambda number, work: Poisoned(work) if number == second.fail_at else work,
        )
    session.rollback(unit.index)


def run_live(session: SteppedSession, second: Second) -> Steps[Any]:
    """Run a unit and interrupt it as told."""
    unit = second.unit

    def each(number: int, work: Work) -> Work:
        if number == second.interrupt_at:
            session.interrupt(unit.index)
        return work

    return passing(session.unit(unit, None), each)


def life(
    session: SteppedSession,
    tenant: Tenant,
    diary: Diary,
    cuts: Mapping[int, tuple[Cut | None, Silent | None]] | None = None,
    due: Callable[[float], None] = lambda _: None,
) -> Steps[None]:
    """A session from open to release.

    Args:
        session: in an empty slot.
        tenant: what it does.
        diary: where its results go.
        cuts: of a recording, by unit, with its silent part; None lets happen what the tenant says.
        due: told the deadline of each unit.
    """
    opened = yield from session.open()
    diary.append((opened.prompt_length, opened.fed_ids))
    for second in tenant.seconds:
        index = second.unit.index
        due(second.due_ms)
        if cuts is not None:
            steps = session.unit(second.unit, cuts[index][0])
        else:
            if second.is_broken or second.fail_at is not None:
                yield from fail_once(session, second)
            steps = run_live(session, second)
        result = yield from steps
        interrupted, silent = result.cut is not None, None if cuts is None else cuts[index][1]
        if silent is None:
            done = yield from session.finalize(index, interrupted=interrupted)
        else:
            done = yield from session.finalize_again(
                index, interrupted=interrupted, silent=silent, forced=False
            )
        diary.append((*facts(result), done.kv_length, done.fed_ids, result.cut, done.silent))
    session.release()


def together(
    model: DuplexModel, slots: Sequence[tuple[int, int, Sequence[Tenant]]], batch_max: int
) -> list[list[Diary]]:
    """Run the tenants of several slots on one scheduler.

    Args:
        model: to run on.
        slots: of each its number, the turn at which it is taken, and its tenants.
        batch_max: most requests answered together.

    Returns:
        The diaries, by slot and tenant.
    """

    def compute(works: Sequence[Any]) -> list[Any]:
        answers = model.compute([w.work if isinstance(w, Poisoned) else w for w in works])
        if any(isinstance(work, Poisoned) for work in works):
            raise RuntimeError("the device failed")
        return answers

    def tenancy(slot: int, tenants: Sequence[Tenant], diaries: list[Diary]) -> Steps[None]:
        def due(ms: float) -> None:
            tasks[slot].deadline_ns = ms * MS

        for tenant, diary in zip(tenants, diaries, strict=True):
            yield from life(model.session(tenant.opening, slot=slot), tenant, diary, None, due)

    scheduler = Scheduler(compute, batch_max=batch_max)
    tasks: dict[int, Task] = {}
    errors: list[BaseException] = []
    out: list[list[Diary]] = [[[] for _ in tenants] for _, _, tenants in slots]
    for (slot, _, tenants), diaries in zip(slots, out, strict=True):
        tasks[slot] = Task(
            steps=tenancy(slot, tenants, diaries),
            deadline_ns=0,
            done=lambda _, error: errors.append(error) if error else None,
        )
    waiting = sorted((join, slot) for slot, join, _ in slots)
    turn = 0
    while waiting or not scheduler.is_idle:
        while waiting and (waiting[0][0] <= turn or scheduler.is_idle):
            scheduler.add(tasks[waiting.pop(0)[1]])
        if not scheduler.is_idle:
            scheduler.turn(0)
        turn += 1
    if errors:
        raise errors[0]
    return out


def by_itself(model: DuplexModel, tenant: Tenant, recorded: Diary, slot: int) -> Diary:
    """The same session alone, cut where a recording says."""
    rows = zip(tenant.seconds, recorded[1:], strict=True)
    where: dict[int, Any] = {second.unit.index: row[-2:] for second, row in rows}
    diary: Diary = []
    alone(life(model.session(tenant.opening, slot=slot), tenant, diary, where), model.compute)
    return diary


# -- what Hypothesis chooses ---------------------------------------------------------------------

CONFIGS = st.builds(
    DuplexConfig,
    generate_audio=st.sampled_from((True, True, False)),
    force_listen_count=st.sampled_from((0, 0, 1)),
    max_new_speak_tokens_per_chunk=st.sampled_from((4, 8, 20)),
    temperature=st.sampled_from((0.7, 0.0, 1.5)),
    listen_prob_scale=st.sampled_from((1.0, 10.0)),
    sliding_window=st.sampled_from(("context", "basic", "off")),
)
VOICES = st.tuples(st.integers(0, 3), st.sampled_from((0, 0, 8_000, 17_000)))
WORDS = st.sampled_from(("", "the lazy dog", "seven wizards box five quacking kings"))
SMALL, BIG, TALL = (1, 112, 112), (2, 200, 100), (3, 90, 170)
FRAMES = st.sampled_from(((),) * 8 + ((SMALL,), (BIG,), (SMALL, TALL)))
RARELY = st.sampled_from((False,) * 7 + (True,))
SOMETIMES = st.sampled_from((False,) * 2 + (True,))
REQUESTS = st.integers(0, 35)


@st.composite
def tenants(draw: st.DrawFn, units: int) -> Tenant:
    """A session of so many units."""
    seconds = [
        Second(
            index=index,
            place=draw(st.integers(0, 50)),
            frames=draw(FRAMES),
            force_listen=draw(RARELY),
            max_slice_nums=draw(st.integers(1, 4)),
            due_ms=draw(st.sampled_from((1000, 1000, 100, BACKGROUND))),
            interrupt_at=draw(REQUESTS) if draw(SOMETIMES) else None,
            fail_at=draw(REQUESTS) if draw(RARELY) else None,
            is_broken=draw(RARELY),
        )
        for index in range(units)
    ]
    return Tenant(
        instructions=draw(WORDS),
        voice=draw(VOICES),
        config=draw(CONFIGS),
        seed=draw(st.integers(0, 1000)),
        seconds=tuple(seconds),
    )


@st.composite
def companies(draw: st.DrawFn, size: int) -> list[tuple[int, int, list[Tenant]]]:
    """A session of `UNITS` in the first place, and its neighbours, in any slots."""
    slots = draw(st.permutations(range(SLOTS)))[:size]
    out = [(slots[0], draw(st.integers(0, 50)), [draw(tenants(UNITS))])]
    for slot in slots[1:]:
        lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        out.append((slot, draw(st.integers(0, 300)), [draw(tenants(n)) for n in lengths]))
    return out


def check(model: DuplexModel, company: list[tuple[int, int, list[Tenant]]], batch_max: int) -> None:
    """Compare the first tenants of the first two slots with the same sessions alone."""
    diaries = together(model, company, batch_max)
    for (slot, _, tenants_), (recorded, *_) in list(zip(company, diaries, strict=True))[:2]:
        other = (slot + 3) % SLOTS
        assert by_itself(model, tenants_[0], recorded, other) == recorded


@settings(max_examples=EXAMPLES)
@given(company=companies(4), batch_max=st.sampled_from((64, 3)))
def test_a_session_is_the_same_alone_and_among_four(
    model: DuplexModel, company: list[tuple[int, int, list[Tenant]]], batch_max: int
) -> None:
    """A caller's answers would change with who else is connected, and no log could be replayed."""
    check(model, company, batch_max)


@pytest.mark.soak
@settings(max_examples=EXAMPLES)
@given(company=companies(8), batch_max=st.sampled_from((64, 5)))
def test_a_session_is_the_same_alone_and_among_eight(
    model: DuplexModel, company: list[tuple[int, int, list[Tenant]]], batch_max: int
) -> None:
    """As among four, on a full server (B8)."""
    check(model, company, batch_max)


def plain(index: int, place: int) -> Tenant:
    """A session of two units that nothing befalls."""
    seconds = tuple(Second(index=at, place=place + at) for at in range(2))
    config = DuplexConfig(force_listen_count=0, generate_audio=False)
    return Tenant(instructions="", voice=(0, 0), config=config, seed=index, seconds=seconds)


def test_a_leak_is_caught(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would be green whatever the model does."""
    run = RowByRowDecoder.run

    def mixed(self: RowByRowDecoder, works: Any) -> Any:
        hidden, logits = run(self, works)
        return hidden, logits + 1e-6 * logits.mean(dim=0, keepdim=True) * (len(works) > 1)

    monkeypatch.setattr(RowByRowDecoder, "run", mixed)
    company = [(slot, 0, [plain(slot, 10 * slot)]) for slot in range(3)]
    with pytest.raises(AssertionError):
        check(model, company, 64)
