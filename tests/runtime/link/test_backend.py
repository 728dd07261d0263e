"""A backend over a link gives what it gives in one process, byte for byte, errors too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from protocol.values.model import (
    PAST_UNITS_MAX,
    UNIT_BYTES,
    ChatConfig,
    Chunk,
    Cut,
    DuplexConfig,
    Message,
    Opening,
    PastUnit,
    Prefill,
    SpeechConfig,
    Text,
    Tool,
    ToolCall,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
    Voice,
)
from runtime.link import link
from runtime.model.backends.base import (
    Backend,
    BackendError,
    BackendRefused,
    CanBeLost,
    Chats,
    Closes,
    ContextFull,
    Piece,
    Rebuilds,
    Remote,
    Transcribes,
)
from runtime.model.backends.scripted import Call, ScriptedBackend, ScriptedSession, Step
from runtime.model.backends.scripted_chat import Answer, call, default_answer
from tests.network.linked import QUICKLY, linked, quick, until, worker_of
from tests.sessions.in_memory import pcm

pytestmark = pytest.mark.anyio

OPENING = Opening(
    instructions="be brief", voice=Voice(llm_pcm=pcm(2.0)), config=DuplexConfig(), seed=7
)
SILENCE = bytes(UNIT_BYTES)


def turn(text: str = "who are you?", *, index: int = 0) -> Turn:
    return Turn(
        index=index,
        messages=(Message(role="user", content=(Text(text=text),)),),
        config=ChatConfig(),
        speech=SpeechConfig(),
        max_slice_nums=1,
        use_image_id=False,
        omni=False,
        thinking=False,
        seed=3,
    )


async def equal(make: Callable[[], Backend], play: Callable[[Backend], Awaitable[Any]]) -> Any:
    """Play the same on a backend in this process and on one over a link; return what came."""
    here = await play(make())
    async with linked(make()) as backend:
        there = await play(backend)
    assert there == here
    return here


async def failure(call: Awaitable[object]) -> tuple[type[Exception], str]:
    """The error that a call raises."""
    try:
        await call
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("it did not fail")


def scripted(**options: Any) -> Callable[[], ScriptedBackend]:
    return lambda: ScriptedBackend(**({"script": quick} | options))


async def test_it_is_a_backend_of_every_kind() -> None:
    """The server would not chat, transcribe, check, close or watch it."""
    async with linked(ScriptedBackend(slots=3)) as backend:
        assert isinstance(backend, Chats)
        assert isinstance(backend, Transcribes)
        assert isinstance(backend, Closes)
        assert isinstance(backend, Remote)
        assert isinstance(backend, CanBeLost)
        assert backend.info == ScriptedBackend(slots=3).info
        await backend.check()


async def test_a_duplex_session_is_equal() -> None:
    """A recording would depend on where the model ran."""

    async def play(backend: Backend) -> list[object]:
        session = await backend.open(OPENING, slot=1)
        said: list[object] = [session.opened]
        for index in range(10):
            unit = Unit(
                index=index, pcm=pcm(), frames=(b"jpeg" * 999,) * 2, force_listen=index == 9
            )
            said += [await session.run(unit), await session.finalize(index, interrupted=False)]
        cut = Cut(stage="llm", step=3)
        said.append(await session.run(Unit(index=13, pcm=SILENCE), cut))
        said.append(await session.finalize(13, interrupted=True))
        await session.release()
        return said

    said = await equal(scripted(), play)
    assert sum(bool(getattr(result, "pcm", b"")) for result in said) == 4


async def test_failures_and_their_undoing_are_equal() -> None:
    """A session would go on where it must end, or end where it could go on."""

    def script(unit: Unit, seed: int) -> Step:
        faults = {1: "fail", 2: "context_full"}
        return attrs.evolve(quick(unit, seed), fault=faults.get(unit.index))

    async def play(backend: Backend) -> list[object]:
        session = await backend.open(OPENING, slot=0)
        said: list[object] = [await session.run(Unit(index=0, pcm=SILENCE))]
        said.append(await session.finalize(0, interrupted=False))
        said.append(await failure(session.run(Unit(index=1, pcm=SILENCE))))
        await session.rollback(1)
        said.append(await failure(session.run(Unit(index=2, pcm=SILENCE))))
        said.append(await session.run(Unit(index=3, pcm=SILENCE)))
        await session.release()
        return said

    said = await equal(scripted(script=script), play)
    assert [kind for it in said if isinstance(it, tuple) for kind in it[:1]] == [
        BackendError,
        ContextFull,
    ]


@pytest.mark.parametrize("fault", ["fail", "context_full"])
async def test_an_opening_that_fails_leaves_the_slot_empty(fault: Any) -> None:
    """A worker would lose a slot for each prompt that is too long."""
    async with linked(
        ScriptedBackend(opening=lambda _: Call(fault=fault), chat=lambda _: Answer(), slots=1)
    ) as backend:
        for _ in range(3):
            kind, text = await failure(backend.open(OPENING, slot=0))
            assert kind is (ContextFull if fault == "context_full" else BackendError)
            assert text == f"the script says so (open: {fault})"
        held = await backend.chat(slot=0)
        assert (await held.run(turn())).reason == "turn_end"
        await held.release()


async def test_a_turn_is_equal() -> None:
    """A conversation would depend on where the model ran."""

    async def play(backend: Backend) -> list[object]:
        assert isinstance(backend, Chats)
        said: list[object] = []
        for cut in (None, Cut(stage="llm", step=2)):
            held = await backend.chat(slot=2)
            pieces: list[Piece] = []
            said += [await held.run(turn(), cut, emit=pieces.append), pieces]
            await held.release()
        return said

    said = await equal(scripted(), play)
    assert [type(piece) for piece in said[1][:2]] == [Prefill, TurnChunk]
    assert said[2].cut == 2


async def test_a_turn_that_fails_is_equal() -> None:
    """Its client would hear another reason, or none."""

    async def play(backend: Backend) -> list[object]:
        assert isinstance(backend, Chats)
        said: list[object] = []
        for text in ("full", "fail"):
            held, pieces = await backend.chat(slot=0), list[Piece]()
            said += [await failure(held.run(turn(text), emit=pieces.append)), pieces]
            await held.release()
        return said

    def answer(asked: Turn) -> Answer:
        is_full = asked.messages[0].content == (Text(text="full"),)
        fault: Any = "context_full" if is_full else "fail"
        return attrs.evolve(default_answer(asked), fault=fault, fault_at=1)

    said = await equal(scripted(chat=answer), play)
    assert [said[0][0], said[2][0]] == [ContextFull, BackendError]
    assert [len(said[1]), len(said[3])] == [0, 2]


async def test_a_turn_that_cannot_be_served_is_refused() -> None:
    """Its client would not be told why."""

    class Picky(ScriptedBackend):
        async def chat(self, *, slot: int) -> Any:
            raise BackendRefused("this model has no voice")

    async with linked(Picky(slots=1)) as backend:
        for _ in range(2):
            held = await backend.chat(slot=0)
            assert await failure(held.run(turn())) == (BackendRefused, "this model has no voice")
            await held.release()


async def test_a_turn_with_tools_is_equal_and_refused_by_a_model_without() -> None:
    """Calls would depend on where the model ran, or a worker of before be lost to a client."""
    asked = attrs.evolve(turn(), tools=(Tool(name="clock", parameters='{"type":"object"}'),))

    async def play(backend: Backend) -> list[object]:
        assert isinstance(backend, Chats)
        held = await backend.chat(slot=0)
        result = await held.run(asked)
        await held.release()
        return [result]

    (made,) = await equal(scripted(chat=lambda _: Answer(tokens=call("clock"))), play)
    assert isinstance(made, TurnResult)
    assert made.calls == (ToolCall(name="clock", arguments="{}"),)
    async with linked(ScriptedBackend(slots=1, tools=False)) as backend:
        assert not backend.info.tools
        kind, text = await failure((await backend.chat(slot=0)).run(asked))
        assert (kind, text) == (BackendRefused, "tools: this server's model has none")


async def test_a_transcription_is_equal() -> None:
    """A transcript would depend on where the model ran."""

    async def play(backend: Backend) -> list[object]:
        assert isinstance(backend, Transcribes)
        held = await backend.transcribe(slot=0)
        said = []
        for utterance in range(2):
            for index in range(3):
                chunk = Chunk(
                    utterance=utterance, index=index, pcm=pcm(), is_last=index == 2, seed=5
                )
                said.append(await held.run(chunk))
        await held.release()
        return said

    assert any(result.text for result in await equal(scripted(), play))


async def test_a_transcription_that_never_began_holds_nothing() -> None:
    """A client that sends no sound would be an error."""
    backend_here = ScriptedBackend()
    async with linked(backend_here) as backend:
        held = await backend.transcribe(slot=0)
        await held.release()
        assert not backend_here.held_slots


SLOW = Step(prefill_s=QUICKLY, generate_s=60.0, steps=6000)


@pytest.mark.parametrize("turns", range(3))
async def test_an_interrupt_cuts_the_unit_in_flight(turns: int) -> None:
    """A barge-in would wait for the answer that it is about."""
    async with linked(ScriptedBackend(script=lambda *_: SLOW)) as backend:
        session = await backend.open(OPENING, slot=0)
        results = []

        async def run() -> None:
            results.append(await session.run(Unit(index=4, pcm=SILENCE, frames=(b"j" * 9999,))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            for _ in range(turns):
                await anyio.sleep(QUICKLY)
            session.interrupt(3)
            while not results:
                session.interrupt(4)
                await anyio.sleep(QUICKLY)
        assert results[0].cut is not None
        assert (await session.finalize(4, interrupted=True)).index == 4


async def test_an_interrupt_that_overtakes_its_unit_is_kept() -> None:
    """It would be lost between a large unit and its call."""
    async with linked(ScriptedBackend(script=lambda *_: SLOW)) as backend:
        session = await backend.open(OPENING, slot=0)
        results = []

        async def run() -> None:
            unit = Unit(index=0, pcm=SILENCE, frames=(b"jpeg" * 500_000,))
            results.append(await session.run(unit))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while session._running is None:
                await anyio.lowlevel.checkpoint()
            session.interrupt(0)
        assert results[0].cut is not None


async def test_a_large_unit_does_not_wait_for_another_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each piece that the system took at once would wait for the next heartbeat."""
    monkeypatch.setattr(link, "HEARTBEAT_S", 600.0)
    async with linked(ScriptedBackend(script=quick)) as backend:
        session = await backend.open(OPENING, slot=0)
        with anyio.fail_after(20):
            unit = Unit(index=0, pcm=SILENCE, frames=(b"jpeg" * 500_000,))
            assert (await session.run(unit)).index == 0
        await session.release()


async def test_a_turn_is_cut() -> None:
    """Its client would wait for an answer that it cancelled."""
    slow = Answer(tokens=("a ",) * 999, token_s=0.05)
    async with linked(ScriptedBackend(chat=lambda _: slow)) as backend:
        held = await backend.chat(slot=0)
        pieces: list[Piece] = []

        def emit(piece: Piece) -> None:
            pieces.append(piece)
            held.interrupt(0)

        result = await held.run(turn(), emit=emit)
        assert result.reason == "interrupted"
        assert len(pieces) < 100
        await held.release()
        for waits in range(3):
            held = await backend.chat(slot=0)
            large = turn("x" * 4_000_000 * waits)
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(failure, held.run(large))
                    for _ in range(waits):
                        await anyio.lowlevel.checkpoint()
                    held.interrupt(0)  # It may overtake the turn, which is cut all the same.
            await held.release()


async def test_gateways_share_the_slots_of_a_worker() -> None:
    """Two gateways would write into one session's memory."""
    served = ScriptedBackend(script=quick, slots=2)
    async with worker_of(served) as pair:
        one, other = await pair.connect(), await pair.connect()
        first = await one.open(OPENING, slot=0)
        second = await other.open(OPENING, slot=0)
        assert served.held_slots == {0, 1}
        kind, text = await failure(one.open(OPENING, slot=1))
        assert (kind, text) == (
            BackendError,
            "no slot of the worker is free: other gateways hold them",
        )
        await second.release()
        third = await one.open(OPENING, slot=1)
        for session in (first, third):
            assert (await session.run(Unit(index=0, pcm=SILENCE))).index == 0
            await session.release()
        assert not served.held_slots
        assert not served.violations


async def test_a_cancelled_call_ends_at_the_worker_too() -> None:
    """A session that is over would keep the model busy."""
    served = ScriptedBackend(opening=lambda _: Call(duration_s=60), slots=1)
    async with linked(served) as backend:
        with anyio.move_on_after(0.05):
            await backend.open(OPENING, slot=0)
        await until(lambda: not served.held_slots)


async def test_a_cancelled_opening_costs_no_other_session() -> None:
    """All sessions of a gateway would be lost with one that was left while it was opened."""

    def opening(asked: Opening) -> Call:
        return Call(duration_s=60 if asked.instructions == "slow" else 0)

    served = ScriptedBackend(script=quick, opening=opening, slots=2)
    async with linked(served) as backend:
        session = await backend.open(OPENING, slot=0)
        with anyio.move_on_after(0.05):
            await backend.open(attrs.evolve(OPENING, instructions="slow"), slot=1)
        await until(lambda: served.held_slots == {0})
        other = await backend.open(OPENING, slot=1)
        for each in (session, other):
            assert (await each.run(Unit(index=0, pcm=SILENCE))).index == 0
            await each.release()


async def test_a_cancelled_opening_that_is_done_is_released() -> None:
    """Its slot would be lost: its gateway does not know that it is open."""
    served = ScriptedBackend(slots=1)
    async with linked(served) as backend, anyio.create_task_group() as tasks:

        async def run() -> None:
            await backend.open(OPENING, slot=0)

        tasks.start_soon(run)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.05)
            assert not served.held_slots


async def test_a_released_session_can_be_opened_again() -> None:
    """A worker would serve each slot once."""
    served = ScriptedBackend(script=quick, slots=1)
    async with linked(served) as backend:
        for _ in range(20):
            session = await backend.open(OPENING, slot=0)
            await session.release()
    assert not served.violations


async def test_a_voice_that_is_lost_is_told() -> None:
    """Pages would offer speech that does not come."""
    served = ScriptedBackend()
    async with linked(served) as backend:
        assert backend.info.speaks
        served.info = attrs.evolve(served.info, speaks=False)
        await until(lambda: not backend.info.speaks)


async def test_a_rebuild_is_equal() -> None:
    """A session that lost its worker would go on as another."""

    async def play(backend: Backend) -> list[object]:
        first, other = [await backend.open(OPENING, slot=slot) for slot in range(2)]
        assert isinstance(other, Rebuilds)
        past = []
        for index in range(PAST_UNITS_MAX):
            unit = Unit(index=index, pcm=pcm(1.0, 0.01 * index), frames=(b"jpeg" * 99,))
            result = attrs.evolve(await first.run(unit), pcm=b"")
            await first.finalize(index, interrupted=False)
            past.append(PastUnit(unit=unit, result=result, interrupted=False, is_voiced=False))
        unit = Unit(index=PAST_UNITS_MAX, pcm=SILENCE)
        return [await other.rebuild(past, exact=True), await other.run(unit)]

    assert (await equal(scripted(), play))[0].index == PAST_UNITS_MAX - 1


class Older:
    """A session that knows no rebuild."""

    def __init__(self, session: ScriptedSession) -> None:
        self.opened, self.run, self.release = session.opened, session.run, session.release
        self.interrupt = session.interrupt


async def test_a_model_that_cannot_rebuild_says_so() -> None:
    """Its gateway would wait, or take the worker for lost."""

    class OlderBackend(ScriptedBackend):
        async def open(self, opening: Opening, *, slot: int) -> Any:
            return Older(await super().open(opening, slot=slot))

    async with linked(OlderBackend(script=quick)) as backend:
        session = await backend.open(OPENING, slot=0)
        assert isinstance(session, Rebuilds)
        unit = Unit(index=0, pcm=SILENCE)
        past = PastUnit(
            unit=unit,
            result=UnitResult(index=0, is_listen=True),
            interrupted=False,
            is_voiced=False,
        )
        kind, text = await failure(session.rebuild([past], exact=True))
        assert (kind, text) == (BackendError, "model scripted cannot rebuild a session")
        assert (await session.run(unit)).index == 0


async def test_a_bug_of_the_backend_is_no_backend_error() -> None:
    """A session would go on with a state that is not known."""

    class Buggy(ScriptedBackend):
        async def open(self, opening: Opening, *, slot: int) -> Any:
            raise ZeroDivisionError("secret words")

    async with linked(Buggy()) as backend:
        kind, text = await failure(backend.open(OPENING, slot=0))
        assert not issubclass(kind, BackendError)
        assert text == "ZeroDivisionError"
