"""A session rebuilt on another engine goes on as the lost one would have: the same bits.

Hypothesis chooses sessions: pictures, forced listens, interrupts with and without a cut, units that
fail and are rolled back, windows. Each is recorded on one model up to some unit. It is then rebuilt
on another one, in another slot and among neighbours, and goes on there; what it gives is compared,
bit for bit, with the session that was never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values.model import PAST_UNITS_MAX, Opening, PastUnit, Silent, Unit, UnitResult
from recorder.read.past import voiced
from runtime.model.backends.base import BackendError
from runtime.model.backends.minicpmo.config import UNIT_FRAMES
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.session import SteppedSession
from runtime.model.backends.minicpmo.state import SessionState
from runtime.model.backends.minicpmo.work import Steps
from runtime.model.engine.engine import BACKGROUND, Scheduler, Task
from tests.models import random_model
from tests.models.blocking import alone
from tests.models.random_model import FEW_UNITS, IN_SLOTS, SLIDING, facts, opening, picture, unit
from tests.project.sampling import sample
from tests.runtime.model.test_engine_isolation import (
    MS,
    RARELY,
    Poisoned,
    Second,
    Tenant,
    fail_once,
    life,
    run_live,
    tenants,
)

EXAMPLES = sample(100, 2)
UNITS = 14
SLOTS = 4
SEED = 3
LONG = 36
"""Units: more than two calls of a rebuild."""
LOSSES = sample(tuple(range(1, LONG, 3)), (13, 16, 34))
"""Units after which the long session is lost; the last needs more than two calls of a rebuild."""
WINDOWS = ("off", "basic", "context")
LAYOUTS = {"plain": (), "in slots": (IN_SLOTS,)}
LOST = sample(
    [(layout, window) for layout in LAYOUTS for window in WINDOWS], [("in slots", "context")]
)
"""Layouts and windows of the long session, one that slides. Hypothesis tries all pairs."""


@attrs.frozen(kw_only=True)
class Done:
    """A unit that was answered and finalized, as a log holds it."""

    unit: Unit
    result: UnitResult
    interrupted: bool
    finalized: tuple[int, tuple[int, ...], Silent | None]

    @property
    def facts(self) -> tuple[object, ...]:
        return (*facts(self.result), *self.finalized)


@pytest.fixture(scope="module", params=sample(list(LAYOUTS), ["in slots"]))
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DuplexModel, DuplexModel]]:
    """Two of one checkpoint, as on two workers; encoder and windows start over soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.model.backends.minicpmo.state.CONTEXT_UNITS", 4)
        patch.setattr("runtime.model.backends.minicpmo.state.BASIC_HIGH", 260)
        patch.setattr("runtime.model.backends.minicpmo.state.BASIC_LOW", 160)
        folder = tmp_path_factory.mktemp("model")
        first = random_model.load(folder, SLIDING, FEW_UNITS, *LAYOUTS[request.param], slots=2)
        yield first, DuplexModel.load(folder, slots=SLOTS)


def past_of(done: Sequence[Done]) -> list[PastUnit]:
    """What is fed again of a session that was lost after these units."""
    return list(
        voiced(
            PastUnit(
                unit=one.unit,
                result=attrs.evolve(one.result, pcm=b""),
                interrupted=one.interrupted,
                silent=one.finalized[2],
            )
            for one in done
        )
    )


def rebuild(session: SteppedSession, past: Sequence[PastUnit], *, exact: bool) -> Steps[None]:
    """Feed a past in calls of as many units as one call may have."""
    for place, each in enumerate(past, 1):
        is_last = place == len(past) or place % PAST_UNITS_MAX == 0
        yield from session.rebuild(each, exact=exact, is_last=is_last)


def go_on(
    session: SteppedSession, seconds: Sequence[Second], late: frozenset[int], done: list[Done]
) -> Steps[None]:
    """Run units as told; those in `late` are interrupted after their last step."""
    for second in seconds:
        index = second.index
        if second.is_broken or second.fail_at is not None:
            yield from fail_once(session, attrs.evolve(second, index=index - 1))
        result = yield from run_live(session, second)
        interrupted = result.cut is not None or index in late
        made = yield from session.finalize(index, interrupted=interrupted)
        done.append(
            Done(
                unit=second.unit,
                result=result,
                interrupted=interrupted,
                finalized=(made.kv_length, made.fed_ids, made.silent),
            )
        )


def computing(model: DuplexModel, works: Sequence[Any]) -> list[Any]:
    """Compute as a device that fails, after it has written, where it is poisoned."""
    answers = model.compute([w.work if isinstance(w, Poisoned) else w for w in works])
    if any(isinstance(work, Poisoned) for work in works):
        raise RuntimeError("the device failed")
    return answers


def on_its_own(model: DuplexModel, steps: Steps[Any]) -> None:
    """Drive a session alone."""
    alone(steps, partial(computing, model))


def among(model: DuplexModel, lives: Sequence[Steps[None]]) -> None:
    """Drive sessions together; the first is background work."""
    errors: list[Exception] = []
    scheduler = Scheduler(partial(computing, model), batch_max=64)
    for number, steps in enumerate(lives):
        task = Task(
            steps=steps,
            deadline_ns=number * MS if number else BACKGROUND,
            done=lambda _, error: errors.append(error) if error else None,
        )
        scheduler.add(task)
    while not scheduler.is_idle:
        scheduler.turn(0)
    if errors:
        raise errors[0]


def bits(runner: ModelRunner, slot: int, state: SessionState) -> list[torch.Tensor]:
    """All keys and values of a slot that are ever read again, and the front end's sound."""
    ends = (
        (runner.llm, state.length),
        (runner.tts, state.speech.length),
        (runner.audio, state.audio_units % runner.config.audio.units * UNIT_FRAMES),
    )
    kept = [store.take(slot, 0, end) for store, end in ends]
    mel = state.mel
    caches = [tensor for one in kept for tensor in (one.keys, one.values)]
    return [*caches, mel.waiting, mel.buffer, mel.peaks]


def plain(state: SessionState) -> tuple[object, ...]:
    """All of a state that can be compared with `==`; the vocoder's is compared by its sound."""
    vocoder_buffer = state.speech.vocoder_buffer
    buffer = None if vocoder_buffer is None else vocoder_buffer.buffer
    return (
        *(state.layout, state.length, state.audio_units, state.history, state.turn_open),
        *(state.text_ids, state.has_seen, state.silent_state),
        *(state.speech.length, state.speech.is_complete, buffer),
    )


def run_to_the_end(session: SteppedSession, life_: Steps[None]) -> Steps[None]:
    yield from session.open()
    yield from life_


# -- sessions that Hypothesis chooses ------------------------------------------------------------


@st.composite
def lost(draw: st.DrawFn) -> tuple[Tenant, frozenset[int], int]:
    """A session with gaps between its units' numbers, those interrupted late, and its loss."""
    tenant = draw(tenants(UNITS))
    seconds = tuple(attrs.evolve(one, index=2 * one.index + 1) for one in tenant.seconds)
    late = frozenset(one.index for one in seconds if draw(RARELY))
    return attrs.evolve(tenant, seconds=seconds), late, draw(st.integers(1, UNITS - 1))


@settings(max_examples=EXAMPLES)
@given(case=lost(), neighbours=st.lists(tenants(3), max_size=SLOTS - 1))
def test_a_rebuilt_session_goes_on_with_the_same_bits(
    models: tuple[DuplexModel, DuplexModel],
    case: tuple[Tenant, frozenset[int], int],
    neighbours: list[Tenant],
) -> None:
    """A caller would hear that a worker was lost, and the log could not be replayed."""
    (tenant, late, count), (model, other) = case, models
    unbroken: list[Done] = []
    session = model.session(tenant.opening, slot=0)
    before = go_on(session, tenant.seconds[:count], late, unbroken)
    on_its_own(model, run_to_the_end(session, before))
    state, kept = session._state, bits(model.runner, 0, session._state)
    past = past_of(unbroken)
    on_its_own(model, go_on(session, tenant.seconds[count:], late, unbroken))
    session.release()

    again = other.session(tenant.opening, slot=SLOTS - 1)
    rebuilt: list[Done] = []

    def second_life() -> Steps[None]:
        yield from again.open()
        yield from rebuild(again, past, exact=True)
        assert plain(again._state) == plain(state)
        assert all(map(torch.equal, bits(other.runner, SLOTS - 1, again._state), kept))
        yield from go_on(again, tenant.seconds[count:], late, rebuilt)

    company = [
        life(other.session(each.opening, slot=slot), each, [])
        for slot, each in enumerate(neighbours)
    ]
    among(other, [second_life(), *company])
    again.release()
    assert [one.facts for one in rebuilt] == [one.facts for one in unbroken[count:]]


@settings(max_examples=EXAMPLES)
@given(case=lost())
def test_a_fast_rebuild_differs_by_rounding(
    models: tuple[DuplexModel, DuplexModel], case: tuple[Tenant, frozenset[int], int]
) -> None:
    """A session that was rebuilt in long prefills would go on from another past."""
    (tenant, late, count), (model, other) = case, models
    unbroken: list[Done] = []
    session = model.session(tenant.opening, slot=0)
    before = go_on(session, tenant.seconds[:count], late, unbroken)
    on_its_own(model, run_to_the_end(session, before))
    state, kept = session._state, bits(model.runner, 0, session._state)
    session.release()
    again = other.session(tenant.opening, slot=0)
    on_its_own(other, run_to_the_end(again, rebuild(again, past_of(unbroken), exact=False)))
    assert plain(again._state) == plain(state)
    for made, true in zip(bits(other.runner, 0, again._state), kept, strict=True):
        torch.testing.assert_close(made, true, rtol=0, atol=1e-3)
    on_its_own(other, go_on(again, tenant.seconds[count:], late, []))
    again.release()


# -- one session, lost after each of its units ---------------------------------------------------


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, models: tuple[DuplexModel, DuplexModel]
) -> tuple[Opening, list[Done]]:
    """A session of several turns, never lost."""
    what = opening(SEED, sliding_window=request.param)
    done: list[Done] = []
    session = models[0].session(what, slot=0)
    on_its_own(models[0], run_to_the_end(session, go_on(session, seconds(LONG), frozenset(), done)))
    session.release()
    return what, done


def seconds(count: int) -> list[Second]:
    """Units with some pictures and a forced listen, of which some are cut."""
    return [
        Second(
            index=index,
            place=1000 * SEED + index,
            frames=((1, 112, 112),) if index % 11 == 5 else (),
            force_listen=index == 20,
            interrupt_at={9: 12, 25: 3, 30: 3}.get(index),
        )
        for index in range(count)
    ]


@pytest.mark.soak  # `test_a_rebuilt_session_goes_on_with_the_same_bits` draws where.
@pytest.mark.parametrize(("models", "recorded"), LOST, indirect=True)
def test_wherever_a_session_is_lost_it_goes_on(
    models: tuple[DuplexModel, DuplexModel], recorded: tuple[Opening, list[Done]]
) -> None:
    """After some slide, turn or start of the encoder, a rebuilt session would be another one."""
    (_, other), (what, done) = models, recorded
    muted = voiced = 0
    for count in LOSSES:
        past = past_of(done[:count])
        muted += any(one.result.codec_ids and not one.is_voiced for one in past)
        voiced += any(one.result.codec_ids and one.is_voiced for one in past)
        again: list[Done] = []
        session = other.session(what, slot=1)
        on_its_own(other, run_to_the_end(session, rebuild(session, past, exact=True)))
        on_its_own(other, go_on(session, seconds(LONG)[count : count + 4], frozenset(), again))
        session.release()
        assert [one.facts for one in again] == [one.facts for one in done[count : count + 4]]
    assert min(muted, voiced) >= 3, "the session has no turns that matter here"
    cuts = {one.result.cut.stage for one in done if one.result.cut is not None}
    assert cuts == {"llm", "tts"}
    lengths = [one.result.kv_length for one in done]
    slid = any(after < before for before, after in pairwise(lengths))
    assert slid == (what.config.sliding_window != "off")


Damage = Callable[[PastUnit], PastUnit]


def changed_result(one: PastUnit, **what: Any) -> PastUnit:
    return attrs.evolve(one, result=attrs.evolve(one.result, **what))


def changed_id(one: PastUnit) -> PastUnit:
    """Another last id: a token of text."""
    return changed_result(one, decided_ids=(*one.result.decided_ids[:-1], 7))


def changed_sample(one: PastUnit) -> PastUnit:
    pcm = bytearray(one.unit.pcm)
    pcm[4 * 7000] ^= 1  # The lowest bit of one float's mantissa.
    return attrs.evolve(one, unit=attrs.evolve(one.unit, pcm=bytes(pcm)))


DAMAGES: dict[str, Damage] = {
    "decided_ids": changed_id,
    "input_hash": changed_sample,
    "kv_length": lambda one: changed_result(one, kv_length=one.result.kv_length + 1),
    "logits_hash": lambda one: changed_result(one, logits_hash="0" * 32),
    "fed_ids": lambda one: changed_result(one, fed_ids=(*one.result.fed_ids, 7)),
    "frames": lambda one: attrs.evolve(one, unit=attrs.evolve(one.unit, frames=(picture(3),))),
    "an id that the model lacks": lambda one: changed_result(one, decided_ids=(10**9,)),
    "no ids": lambda one: changed_result(one, decided_ids=()),
}


@pytest.mark.costly
@pytest.mark.parametrize(("models", "recorded"), LOST, indirect=True)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_past_is_refused(
    models: tuple[DuplexModel, DuplexModel],
    recorded: tuple[Opening, list[Done]],
    damage: str,
    exact: bool,
) -> None:
    """A caller would talk to a session whose past is not theirs."""
    (_, other), (what, done) = models, recorded
    past = past_of(done[:8])
    if damage == "logits_hash" and not exact:
        return  # Rounding changes it, so a fast rebuild cannot tell.
    for place in sample((0, 3, 7), (0, 7)):
        broken = [*past]
        broken[place] = DAMAGES[damage](past[place])
        session = other.session(what, slot=0)
        with pytest.raises(BackendError, match=f"unit {place}\\b"):
            on_its_own(other, run_to_the_end(session, rebuild(session, broken, exact=exact)))
        with pytest.raises(BackendError, match="out of order"):
            on_its_own(other, session.unit(unit(99), None))
        session.release()
