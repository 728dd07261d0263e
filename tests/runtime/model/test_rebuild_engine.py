"""The embedded model and the script: sessions are rebuilt, turns and chunks run again.

A worker that is lost takes duplex sessions, chat turns and utterances with it. A session is rebuilt
on another engine; a turn and an utterance are run again there from their inputs. All of it happens
among other sessions, which change the batches, and must change nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from llama_omni import LlamaOmniSession

from protocol.values.errors import LocalProtocolError
from protocol.values.model import (
    PAST_UNITS_MAX,
    Chunk,
    Costs,
    Cut,
    DuplexConfig,
    Finalized,
    Opening,
    PastUnit,
    Prefill,
    Turn,
    Unit,
    UnitResult,
    Voice,
)
from recorder.read.past import voiced
from runtime.commands.bench import load_speech
from runtime.model.backends.base import (
    Backend,
    BackendError,
    BackendSession,
    Chats,
    Piece,
    Rebuilds,
    Transcribes,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.scripted import Call, ScriptedBackend, Step, default_script
from runtime.model.engine.backend import EngineBackend
from tests.models.random_model import facts, picture
from tests.project.sampling import ONE_LOOP, sample
from tests.runtime.model.test_engine import WAIT_S, Ask, FakeModel, FakeSession, enter
from tests.runtime.model.test_minicpmo_chat import ask, everything, said

TINY = Path(__file__).parents[3] / "fixtures" / "tiny"
UNITS = 22
COUNTS = sample((3, 11, 18), (11, 18))
"""Units after which a session is lost; the last takes more than one call of a rebuild."""
COMPARED = sample(UNITS, 7)
"""Units that are compared after a loss, at most: a cut, a picture and a unit that must listen."""
NEIGHBOURS = sample((2, 3), (2,))
"""Slots of the sessions that run beside the rebuilt one."""
SPEECH = load_speech()

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tinies() -> tuple[DuplexModel, DuplexModel]:
    """Two of the embedded model, as on two workers."""
    return DuplexModel.load(TINY, slots=1), DuplexModel.load(TINY, slots=4)


Pair = tuple[Backend, Backend]
Ran = list[tuple[Unit, UnitResult, Finalized]]


def at_once(unit: Unit, seed: int) -> Step:
    """The default script, without its pauses."""
    step = default_script(unit, seed)
    return attrs.evolve(step, prefill_s=0.0, generate_s=0.0, finalize=Call())


@pytest.fixture(params=["tiny", "scripted"])
def pair(request: pytest.FixtureRequest, tinies: tuple[DuplexModel, DuplexModel]) -> Pair:
    """Two workers of one model."""
    if request.param == "scripted":
        return ScriptedBackend(at_once), ScriptedBackend(at_once)
    return EngineBackend(tinies[0]), EngineBackend(tinies[1])


def opening(seed: int) -> Opening:
    config = DuplexConfig(force_listen_count=1, listen_prob_scale=0.3, length_penalty=1.5)
    return Opening(instructions="Answer what you hear.", voice=Voice(), config=config, seed=seed)


def unit(index: int, offset_s: int = 0) -> Unit:
    """A second of speech; some are seen, one must listen."""
    frames = (picture(index),) if index % 7 == 4 else ()
    pcm = SPEECH.second(index + offset_s)
    return Unit(index=index, pcm=pcm, frames=frames, force_listen=index == 15)


CUTS = {9: Cut(stage="llm", step=2), 12: Cut(stage="tts", step=5)}
"""Reached where the unit speaks; a script has only the first stage."""


async def run(session: BackendSession, first: int, end: int) -> Ran:
    """Run and finalize units; those that were cut are interrupted."""
    out = []
    for index in range(first, end):
        each = unit(index)
        result = await session.run(each, CUTS.get(index))
        made = await session.finalize(index, interrupted=result.cut is not None)
        out.append((each, result, attrs.evolve(made, cost_us=0)))
    return out


NeverLost = Callable[[Backend], Awaitable[Ran]]


@pytest.fixture(scope="module")
def never_lost() -> NeverLost:
    """Runs the whole session on a backend, once for each model."""
    known: dict[str, Ran] = {}

    async def run_once(backend: Backend) -> Ran:
        name = backend.info.name
        if name not in known:
            session = await backend.open(opening(5), slot=0)
            known[name] = await run(session, 0, UNITS)
            await session.release()
        return known[name]

    return run_once


def past_of(done: Sequence[tuple[Unit, UnitResult, Finalized]]) -> list[PastUnit]:
    return list(
        voiced(
            PastUnit(
                unit=each, result=attrs.evolve(result, pcm=b""), interrupted=result.cut is not None
            )
            for each, result, _ in done
        )
    )


@asynccontextmanager
async def neighbours(backend: Backend) -> AsyncIterator[None]:
    """Sessions that run without a pause, in slots of their own."""
    async with anyio.create_task_group() as tasks:

        async def live(slot: int) -> None:
            session = await backend.open(opening(slot), slot=slot)
            try:
                for index in range(1000):
                    await session.run(unit(index, offset_s=slot))
                    await session.finalize(index, interrupted=False)
            finally:
                with anyio.CancelScope(shield=True):
                    await session.release()

        for slot in NEIGHBOURS:
            tasks.start_soon(live, slot)
        yield
        tasks.cancel_scope.cancel()


async def rebuilt(backend: Backend, past: Sequence[PastUnit], *, exact: bool) -> BackendSession:
    """Open a session in slot 1 and feed it a past."""
    session = await backend.open(opening(5), slot=1)
    assert isinstance(session, Rebuilds)
    try:
        for begin in range(0, len(past), PAST_UNITS_MAX):
            some = past[begin : begin + PAST_UNITS_MAX]
            made = await session.rebuild(some, exact=exact)
            assert made.index == some[-1].unit.index
    except BaseException:
        await session.release()
        raise
    return session


def compared(done: Sequence[tuple[Unit, UnitResult, Finalized]]) -> list[tuple[object, ...]]:
    return [(*facts(result), made) for _, result, made in done]


@pytest.mark.costly
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("count", COUNTS)
async def test_a_session_goes_on_on_another_worker(
    pair: Pair, never_lost: NeverLost, count: int
) -> None:
    """A caller would hear that a worker was lost."""
    unbroken = await never_lost(pair[0])
    assert sum(bool(result.codec_ids) for _, result, _ in unbroken) >= 3
    async with neighbours(pair[1]):
        again = await rebuilt(pair[1], past_of(unbroken[:count]), exact=True)
        end = min(UNITS, count + COMPARED)
        rest = await run(again, count, end)
        await again.release()
    assert compared(rest) == compared(unbroken[count:end])


async def test_a_fast_rebuild_goes_on(pair: Pair, never_lost: NeverLost) -> None:
    """A session that takes too long to rebuild exactly would be lost."""
    unbroken = await never_lost(pair[0])
    again = await rebuilt(pair[1], past_of(unbroken[:18]), exact=False)
    rest = await run(again, 18, UNITS)
    await again.release()
    # The first unit's tokens in the cache depend only on the past's.
    assert rest[0][1].input_hash == unbroken[18][1].input_hash
    assert rest[0][1].kv_length - len(rest[0][1].fed_ids) == (
        unbroken[18][1].kv_length - len(unbroken[18][1].fed_ids)
    )


def damaged(one: PastUnit) -> list[PastUnit]:
    """The unit with another id, with another count of tokens, and with another lowest bit."""
    ids = (*one.result.decided_ids[:-1], 7)
    pcm = bytes([one.unit.pcm[0] ^ 1]) + one.unit.pcm[1:]
    return [
        attrs.evolve(one, result=attrs.evolve(one.result, decided_ids=ids)),
        attrs.evolve(one, result=attrs.evolve(one.result, kv_length=one.result.kv_length + 1)),
        attrs.evolve(one, unit=attrs.evolve(one.unit, pcm=pcm)),
    ]


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_a_damaged_past_is_refused(pair: Pair, never_lost: NeverLost) -> None:
    """A caller would go on in a session that is not theirs."""
    past = past_of((await never_lost(pair[0]))[:8])
    for place in (0, 7):
        for one in damaged(past[place]):
            with pytest.raises(BackendError, match=f"unit {place}\\b"):
                await rebuilt(pair[1], [*past[:place], one, *past[place + 1 :]], exact=True)


async def test_speech_that_was_left_out_is_missed(
    tinies: tuple[DuplexModel, DuplexModel], never_lost: NeverLost
) -> None:
    """A turn would go on in another voice, without an error."""
    first, other = map(EngineBackend, tinies)
    done = await never_lost(first)
    at = next(at for at in range(2, UNITS) if past_of(done[:at])[-1].result.codec_ids)
    past = [attrs.evolve(one, is_voiced=False) for one in past_of(done[:at])]
    again = await rebuilt(other, past, exact=True)
    with pytest.raises(BackendError, match="without its speech"):
        await again.run(unit(at))
    await again.release()


async def test_the_bounds_of_a_call(
    tinies: tuple[DuplexModel, DuplexModel], never_lost: NeverLost
) -> None:
    """Hours of sound could be handed over at once, or units in any order."""
    first, other = map(EngineBackend, tinies)
    past = past_of((await never_lost(first))[:2])
    again = await other.open(opening(5), slot=1)
    for count in (0, PAST_UNITS_MAX + 1):
        with pytest.raises(LocalProtocolError):
            await again.rebuild(past[:1] * count, exact=True)
    await again.rebuild(past, exact=True)
    with pytest.raises(BackendError, match="is not after unit 1"):
        await again.rebuild(past[1:], exact=True)
    await again.release()


async def test_not_every_model_can_be_rebuilt() -> None:
    """A session on such a model would end later, with a worse reason."""
    assert not issubclass(LlamaOmniSession, Rebuilds)
    session = await EngineBackend(FakeModel()).open(opening(0), slot=0)
    past = PastUnit(
        unit=unit(0), result=UnitResult(index=0, is_listen=True), interrupted=False, is_voiced=False
    )
    with pytest.raises(BackendError, match="cannot be rebuilt"):
        await session.rebuild([past], exact=True)


class RebuiltFake(FakeSession):
    """A session of the fake model whose past units are two requests each."""

    def rebuild(
        self, past: PastUnit, *, exact: bool, is_last: bool
    ) -> Generator[Ask, str, Finalized]:
        yield from self._ask(f"past {past.unit.index}, exact {exact}")
        yield from self._ask(f"past {past.unit.index}, last {is_last}")
        return Finalized(index=past.unit.index, kv_length=20)


class RebuiltFakeModel(FakeModel):
    """The fake model with such sessions; it computes one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.info = attrs.evolve(self.info, can_rebuild=True)

    def session(self, opening: Opening, *, slot: int) -> FakeSession:
        return RebuiltFake(self, opening.instructions, slot)

    def compute(self, works: Sequence[Ask]) -> list[str]:
        assert len(works) == 1
        return super().compute(works)


async def test_live_units_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every caller of a worker would wait while it takes over a session."""
    model = RebuiltFakeModel()
    backend = EngineBackend(model, batch_max=1)
    submit, came = backend.engine.submit, threading.Semaphore(0)

    def counted(steps: Generator[Ask, str, Any], *, due_ns: float) -> Future[Any]:
        future = submit(steps, due_ns=due_ns)
        came.release()
        return future

    sessions = [await backend.open(opening(seed), slot=seed) for seed in range(2)]
    live = Unit(index=3, pcm=SPEECH.second(3))
    past = [
        PastUnit(
            unit=Unit(index=index, pcm=SPEECH.second(index)),
            result=UnitResult(index=index, is_listen=True),
            interrupted=False,
            is_voiced=False,
        )
        for index in (1, 2)
    ]
    for _ in range(2):
        await enter(model)
    model.diary.clear()
    model.gate.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sessions[0].rebuild, past, exact=False))
        await enter(model)
        monkeypatch.setattr(backend.engine, "submit", counted)
        tasks.start_soon(sessions[1].run, live)
        assert await anyio.to_thread.run_sync(lambda: came.acquire(timeout=WAIT_S))
        model.gate.set()
    said_ = [line.removeprefix("Answer what you hear. ") for line in model.diary]
    assert said_ == [
        "past 1, exact False",
        "unit 3",
        "past 1, last False",
        "past 2, exact False",
        "past 2, last True",
    ]


# -- what is run again ---------------------------------------------------------------------------


async def answered(
    backend: Backend, turn: Turn, slot: int, cut: int | None = None
) -> tuple[object, ...]:
    """A turn's pieces, in order, and its end."""
    assert isinstance(backend, Chats)
    pieces: list[Piece] = []
    session = await backend.chat(slot=slot)
    try:
        where = None if cut is None else Cut(stage="llm", step=cut)
        result = await session.run(turn, where, emit=pieces.append)
    finally:
        await session.release()
    prefill, *rest = pieces
    assert isinstance(prefill, Prefill)
    return (attrs.evolve(prefill, cost_us=0), *rest, attrs.evolve(result, costs=Costs()))


@pytest.mark.costly
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("number", [0, 1])
async def test_a_turn_is_run_again_piece_by_piece(pair: Pair, number: int, cut: int | None) -> None:
    """What a client has of an answer would not be the beginning of what it gets."""
    turn = ask(*everything(number), seed=number, length_penalty=1.0, max_new_tokens=12)
    if number:
        turn = ask(said("user", "read me the news"), temperature=0.7, length_penalty=1.0)
    once = await answered(pair[0], turn, 0, cut)
    assert len(once) > 3
    async with neighbours(pair[1]):
        assert await answered(pair[1], turn, 1, cut) == once


async def heard(backend: Backend, seconds: Sequence[tuple[int, int]], slot: int) -> list[object]:
    """The results of chunks: numbers of utterance and second."""
    assert isinstance(backend, Transcribes)
    session = await backend.transcribe(slot=slot)
    results = []
    for utterance, index in seconds:
        pcm, is_last = SPEECH.second(3 * utterance + index), index == 3
        chunk = Chunk(utterance=utterance, index=index, pcm=pcm, is_last=is_last, seed=9)
        results.append(attrs.evolve(await session.run(chunk), costs=Costs()))
    await session.release()
    return results


@pytest.mark.costly
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_an_open_utterance_is_run_again(pair: Pair) -> None:
    """A transcript would have other words after a worker was lost."""
    seconds = [(utterance, index) for utterance in range(3) for index in range(4)]
    once = await heard(pair[0], seconds, 0)
    async with neighbours(pair[1]):
        assert await heard(pair[1], seconds[8:], 1) == once[8:]
