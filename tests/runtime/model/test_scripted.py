"""The scripted backend: it keeps time and its word, and catches a server that breaks the rules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from protocol.values.model import UNIT_BYTES, Cut, DuplexConfig, Opening, Unit, UnitResult, Voice
from protocol.values.records import digest
from runtime.model.backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendSession,
    ContextFull,
)
from runtime.model.backends.scripted import (
    Call,
    Script,
    ScriptedBackend,
    ScriptedSession,
    Speaks,
    Step,
    default_script,
)
from runtime.model.backends.scripted_chat import CHUNK_EOS_ID, LISTEN_ID, UNIT_END_ID, Fault, tone
from tests.strategies.random_scripts import random_script

Value = TypeVar("Value")

OPENING = Opening(instructions="be brief", voice=Voice(), config=DuplexConfig(), seed=7)
PCM = bytes(UNIT_BYTES)
SPEECH = Step(
    speech=Speaks(text="one two three four", pcm=tone(0, 7, samples=24_000)),
    prefill_s=0.1,
    generate_s=0.8,
    steps=4,
)


def run(main: Callable[[], Awaitable[Value]]) -> Value:
    """Run in virtual time, in which only sleeping passes it."""
    clock = MockClock(autojump_threshold=0)
    return anyio.run(main, backend="trio", backend_options={"clock": clock})


def always(step: Step) -> Script:
    return lambda unit, seed: step


def unit(index: int = 0, *, force_listen: bool = False, frames: tuple[bytes, ...] = ()) -> Unit:
    return Unit(index=index, pcm=PCM, force_listen=force_listen, frames=frames)


async def play(session: BackendSession, indices: range) -> list[UnitResult]:
    results = []
    for index in indices:
        results.append(await session.run(unit(index)))
        await session.finalize(index, interrupted=False)
    return results


@pytest.mark.anyio
async def test_satisfies_the_protocol_on_both_loops() -> None:
    """A server on the other event loop could not be tried without a model."""
    step = Step(prefill_s=0, generate_s=0, finalize=Call())
    backend: Backend = ScriptedBackend(always(step))
    session: BackendSession = await backend.open(OPENING, slot=0)
    assert [result.is_listen for result in await play(session, range(2))] == [True, True]
    await session.release()


def test_listens_and_speaks_in_turns() -> None:
    """A demonstration without a model would never show a turn from its start to its end."""

    async def main() -> list[UnitResult]:
        return await play(await ScriptedBackend().open(OPENING, slot=0), range(10))

    results = run(main)
    assert [result.is_listen for result in results] == [True, True, True, False, False] * 2
    assert [result.end_of_turn for result in results] == [False] * 4 + [True] + [False] * 4 + [True]
    assert [len(result.pcm) // 4 for result in results[3:5]] == [24_000, 18_000]
    assert [len(result.codec_ids) for result in results[3:5]] == [25, 19]
    assert all(result.text for result in results if not result.is_listen)
    assert all(not result.text + result.pcm.decode("latin1") for result in results[:3])


def test_takes_the_time_it_says() -> None:
    """A simulation of minutes would take minutes, or take no time where a model takes some."""

    async def main() -> float:
        began = anyio.current_time()
        opening, release = Call(duration_s=2), Call(duration_s=0.5)
        backend = ScriptedBackend(always(SPEECH), opening=lambda _: opening, release=release)
        session = await backend.open(OPENING, slot=0)
        await play(session, range(1))
        await session.release()
        return anyio.current_time() - began

    assert run(main) == pytest.approx(2 + 0.1 + 0.8 + 0.037 + 0.5)


def test_counts_its_tokens() -> None:
    """A client would be told a context that is fuller or emptier than the model's (B10)."""

    async def main() -> list[int]:
        session = await ScriptedBackend().open(OPENING, slot=0)
        lengths = [session.opened.prompt_length]
        for index, frames in enumerate([(), (b"jpeg", b"jpeg")]):
            lengths.append((await session.run(unit(index, frames=frames))).kv_length)
            done = await session.finalize(index, interrupted=False)
            assert done.fed_ids == (LISTEN_ID, UNIT_END_ID)
            lengths.append(done.kv_length)
        return lengths

    assert run(main) == [12, 12 + 11, 12 + 13, 25 + 11 + 132, 25 + 13 + 132]


def test_refuses_what_may_not_fit_before_feeding_it() -> None:
    """A session would be cut off in the middle of a word (B10)."""

    async def main() -> None:
        session = await ScriptedBackend(context_limit=12 + 13 + 20).open(OPENING, slot=0)
        await play(session, range(1))
        with pytest.raises(ContextFull, match="unit 1 may need 58 tokens"):
            await session.run(unit(1))
        await session.release()
        with pytest.raises(ContextFull):
            await ScriptedBackend(context_limit=11).open(OPENING, slot=0)

    run(main)


def test_listens_where_it_must() -> None:
    """`force_listen` could not be tried without a model."""

    async def main() -> UnitResult:
        session = await ScriptedBackend(always(SPEECH)).open(OPENING, slot=0)
        return await session.run(unit(force_listen=True))

    result = run(main)
    assert (result.is_listen, result.text, result.pcm) == (True, "", b"")


def test_speaks_without_audio_where_asked() -> None:
    """A client that asked for text alone would be sent sound."""

    async def main() -> UnitResult:
        opening = attrs.evolve(OPENING, config=DuplexConfig(generate_audio=False))
        session = await ScriptedBackend(always(SPEECH)).open(opening, slot=0)
        return await session.run(unit())

    result = run(main)
    assert (result.is_listen, result.text, result.pcm) == (False, "one two three four", b"")


@pytest.mark.parametrize(
    ("after_s", "step"), [(0.0, 0), (0.05, 0), (0.15, 1), (0.45, 2), (0.65, 3), (0.75, None)]
)
def test_cuts_before_its_next_step_and_does_so_again(after_s: float, step: int | None) -> None:
    """A replay of a session that was interrupted would not give the same bytes (B6)."""

    async def interrupted() -> UnitResult:
        session = await ScriptedBackend(always(SPEECH)).open(OPENING, slot=0)
        results = []

        async def run_it() -> None:
            results.append(await session.run(unit()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_it)
            await anyio.sleep(after_s)
            session.interrupt(0)
        done = await session.finalize(0, interrupted=True)
        assert done.fed_ids == (CHUNK_EOS_ID, UNIT_END_ID)
        return results[0]

    result = run(interrupted)
    cut = result.cut
    assert cut == (None if step is None else Cut(stage="llm", step=step))
    assert len(result.pcm) == 24_000 * (4 if step is None else step)

    async def again() -> UnitResult:
        session = await ScriptedBackend(always(SPEECH)).open(OPENING, slot=0)
        return await session.run(unit(), cut)

    assert run(again) == result


@pytest.mark.parametrize(
    ("fault", "error"),
    [("fail", BackendError), ("context_full", ContextFull), ("gone", BackendGone)],
)
def test_fails_as_told(fault: Fault, error: type[BackendError]) -> None:
    """How the server meets a failing model could not be tried."""

    async def main() -> None:
        backend = ScriptedBackend(always(attrs.evolve(SPEECH, fault=fault)))
        session = await backend.open(OPENING, slot=0)
        with pytest.raises(error) as failed:
            await session.run(unit())
        assert type(failed.value) is error
        await session.release()
        backend = ScriptedBackend(opening=lambda _: Call(fault=fault))
        with pytest.raises(error):
            await backend.open(OPENING, slot=0)
        assert backend.held_slots == set()

    run(main)


def test_a_rolled_back_unit_leaves_nothing() -> None:
    """After a failure the session would go on from half-fed state (B3)."""

    async def main() -> list[int]:
        script: Script = lambda unit, _: Step(fault="fail" if unit.index == 0 else None)  # noqa: E731
        session = await ScriptedBackend(script).open(OPENING, slot=0)
        with pytest.raises(BackendError):
            await session.run(unit(0))
        await session.rollback(0)
        return [(await session.run(unit(1))).kv_length, session.opened.prompt_length]

    assert run(main) == [12 + 11, 12]


def test_hangs_until_cancelled_and_can_be_released_then() -> None:
    """A worker that hangs could not be tried (B4)."""

    async def main() -> None:
        backend = ScriptedBackend(always(Step(fault="hang")))
        session = await backend.open(OPENING, slot=0)
        with anyio.move_on_after(1_000) as scope:
            await session.run(unit())
        assert scope.cancelled_caught
        await session.release()
        assert backend.held_slots == set()

    run(main)


# -- it catches a server that breaks the rules --------------------------------------------------


async def misuse(session: ScriptedSession, calls: str) -> None:
    """Make calls as written: `run 0, finalize 0`; after `beside`, while a unit runs."""
    if calls.startswith("beside "):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run, unit(0))
            await anyio.sleep(0.01)
            await misuse(session, calls.removeprefix("beside "))
    for call in calls.split(", "):
        match call.split():
            case ["run", index]:
                await session.run(unit(int(index)))
            case ["fail", index]:
                with pytest.raises(BackendError):
                    await session.run(unit(int(index), frames=(b"jpeg",)))
            case ["abandon", index]:
                with anyio.move_on_after(0.01):
                    await session.run(unit(int(index)))
            case ["cut", index]:
                await session.run(unit(int(index)), Cut(stage="llm", step=0))
            case ["half", index]:
                await session.run(Unit(index=int(index), pcm=PCM[:4000]))
            case ["finalize", index]:
                await session.finalize(int(index), interrupted=False)
            case ["rollback", index]:
                await session.rollback(int(index))
            case ["release"]:
                await session.release()


@pytest.mark.parametrize(
    ("calls", "rule"),
    [
        ("beside finalize 0", "B1: finalize while run_unit is in flight"),
        ("beside release", "B4: release while run_unit is in flight"),
        ("run 0, run 1", "B1: the unit that ran is not finalized; run_unit was called"),
        ("finalize -1", "B1/B3: no unit has run or failed; finalize was called"),
        ("run 0, rollback 0", "B1: the unit that ran is not finalized; rollback was called"),
        ("fail 0, run 1", "B3: the unit that failed is not rolled back; run_unit was called"),
        ("abandon 0, finalize 0", "B3: the session's state is unknown; finalize was called"),
        ("release, run 0", "B5: the session is released; run_unit was called"),
        ("release, release", "B5: the session is released; release was called"),
        ("run 0, finalize 0, run 0", "B9: run_unit of unit 0, not 1"),
        ("run 0, finalize 1", "B9: finalize of unit 1, not 0"),
        ("cut 0, finalize 0", "B6: unit 0 was cut, its finalize does not say so"),
        ("half 0", "B1: unit 0 has 4000 bytes of PCM"),
    ],
)
def test_catches(calls: str, rule: str) -> None:
    """A server that feeds a model out of order would pass its tests, and garble real sessions."""

    def script(unit: Unit, _: int) -> Step:
        return Step(fault="fail" if unit.frames else None)

    async def main() -> list[str]:
        backend = ScriptedBackend(script)
        session = await backend.open(OPENING, slot=0)
        with pytest.raises((AssertionError, ExceptionGroup)):
            await misuse(session, calls)
        return backend.violations

    assert run(main) == [rule]


def test_catches_a_slot_that_is_opened_twice() -> None:
    """Two sessions on one slot would hear each other (B8)."""

    async def main() -> None:
        backend = ScriptedBackend(slots=2)
        session = await backend.open(OPENING, slot=1)
        for slot in (1, 2, -1):
            with pytest.raises(AssertionError, match=f"B5: slot {slot} of 2"):
                await backend.open(OPENING, slot=slot)
        await session.release()
        await backend.open(OPENING, slot=1)

    run(main)


def test_catches_a_rollback_that_cannot_be() -> None:
    """A server would go on with a backend that cannot undo a failed unit (B3)."""

    async def main() -> None:
        backend = ScriptedBackend(always(Step(fault="fail")), can_rollback=False)
        session = await backend.open(OPENING, slot=0)
        with pytest.raises(BackendError):
            await session.run(unit())
        with pytest.raises(AssertionError, match="B3"):
            await session.rollback(0)

    run(main)


# -- scripts ------------------------------------------------------------------------------------


async def live_by(script: Script, seed: int) -> list[object]:
    """Drive a session by the rules for 30 units, or until it is lost; return all it gave."""
    backend = ScriptedBackend(script)
    session = await backend.open(attrs.evolve(OPENING, seed=seed), slot=0)
    gave: list[object] = []
    try:
        with anyio.fail_after(1_000):
            for index in range(30):
                try:
                    gave.append(await session.run(unit(index)))
                    gave.append(await session.finalize(index, interrupted=False))
                except BackendError as error:
                    gave.append(str(error))
                    if type(error) is not BackendError or "finalize" in str(error):
                        break
                    await session.rollback(index)
    except (BackendError, TimeoutError) as error:
        gave.append(type(error).__name__)
    await session.release()
    assert not backend.violations
    assert not backend.held_slots
    return gave


@given(script_seed=st.integers(0, 2**64), session_seed=st.integers(0, 2**63))
def test_a_random_script_gives_the_same_session_twice(script_seed: int, session_seed: int) -> None:
    """A failure that a simulation found could not be run again."""
    script = random_script(script_seed)

    async def main() -> list[object]:
        return await live_by(script, session_seed)

    assert run(main) == run(main)


def test_a_random_script_does_everything() -> None:
    """A simulation would pass without having met a failure, a slow unit or a hang."""
    steps = [random_script(seed)(unit(index), 7) for seed in range(40) for index in range(100)]
    assert {step.fault for step in steps} == {None, "fail", "context_full", "gone", "hang"}
    assert {step.finalize.fault for step in steps} == {None, "fail", "gone", "hang"}
    assert {step.rollback.fault for step in steps} == {None, "fail", "gone", "hang"}
    speeches = [step.speech for step in steps if step.speech]
    assert {speech.end_of_turn for speech in speeches} == {True, False}
    assert all(len(speech.pcm) == 96_000 for speech in speeches if not speech.end_of_turn)
    assert any(not speech.text for speech in speeches)
    assert 1_000 < len(speeches) < 2_000
    assert max(step.generate_s for step in steps) > 2


def test_default_script_is_pinned() -> None:
    """Golden logs and the README's example would stop matching what the server does."""
    steps = [attrs.asdict(default_script(unit(index), 7)) for index in range(5)]
    for step in steps:
        assert (step.pop("silent"), step.pop("silent_fails")) == ((), False)
        del step["silent_s"]  # of a part that it does not have
    assert digest(steps) == "ae118411a86b5ce6b0617c9f24de9757"
    assert tone(3, 7, samples=100) not in (tone(3, 8, samples=100), tone(8, 7, samples=100))
