"""Chat on the engine: pieces reach the event loop in order, and nothing of a turn outlives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio
import attrs
import pytest

from protocol.values.effects import StartTurn
from protocol.values.errors import LocalProtocolError
from protocol.values.events import Event, SlotLeased, TurnDone, TurnPrefilled, TurnProgress
from protocol.values.model import (
    Message,
    Picture,
    Prefill,
    Sound,
    Text,
    Turn,
    TurnChunk,
    TurnResult,
)
from replay.rerun.full import ModelRerun
from runtime.model.backends.base import BackendError, Chats, ContextFull, Piece
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.vocoder import Vocode
from runtime.model.backends.minicpmo.work import EncodeImage, EncodeReference, Feed, Speak, Work
from runtime.model.engine.backend import EngineBackend, EngineTurn
from tests.models import random_model
from tests.models.random_model import opening, picture, sound, unit
from tests.project.sampling import ONE_LOOP, sample
from tests.runtime.model.test_engine import FakeModel
from tests.runtime.model.test_minicpmo_chat import ask, everything, facts, said, short_speech, wiped  # noqa: F401

WAIT_S = 60
"""Real seconds after which something hangs."""

pytestmark = pytest.mark.anyio

Alone = Callable[..., tuple[list[TurnChunk], TurnResult]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), slots=8)


@pytest.fixture(scope="module")
def alone(model: DuplexModel) -> Alone:
    """Answers turns by themselves, each but once."""
    known: dict[tuple[Turn, int | None], tuple[list[TurnChunk], TurnResult]] = {}

    def answer(turn: Turn, cut: int | None = None) -> tuple[list[TurnChunk], TurnResult]:
        if (turn, cut) not in known:
            known[turn, cut] = random_model.answer(model, turn, cut=cut)[1:]
        return known[turn, cut]

    return answer


def short(number: int) -> Turn:
    """An answer of some words, with speech."""
    return ask(*everything(number), seed=number, max_new_tokens=6 + number)


async def answered(backend: EngineBackend, turn: Turn, slot: int) -> tuple[object, ...]:
    """Have a turn answered; gives all of it but what it cost."""
    pieces: list[Piece] = []
    session = await backend.chat(slot=slot)
    result = await session.run(turn, emit=pieces.append)
    await session.release()
    return facts(chunks_of(pieces), result)


def chunks_of(pieces: Sequence[Piece]) -> list[TurnChunk]:
    """The pieces of an answer, after its prefill."""
    return [piece for piece in pieces if isinstance(piece, TurnChunk)]


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_chats_and_sessions_at_once_get_what_they_get_alone(
    model: DuplexModel, alone: Alone
) -> None:
    """What a client is told would depend on who else is served (B8)."""
    turns = [short(number) for number in range(4)]
    expected = [facts(*alone(turn)) for turn in turns]
    backend, got = EngineBackend(model), dict[int, tuple[object, ...]]()
    assert isinstance(backend, Chats)

    async def chat(number: int) -> None:
        got[number] = await answered(backend, turns[number], number)

    async def talk(number: int) -> None:
        session = await backend.open(opening(number), slot=4 + number)
        for index in range(3):
            await session.run(unit(index, number))
            await session.finalize(index, interrupted=False)
        await session.release()

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(chat, number)
                group.start_soon(talk, number)
    assert [got[number] for number in range(4)] == expected
    assert backend.engine.statistics.largest > 1


async def test_pieces_come_in_order_on_the_event_loop(model: DuplexModel) -> None:
    """The session's driver would be called from a foreign thread, or texts be mixed up."""
    backend, steps = EngineBackend(model), list[int]()
    here = threading.current_thread()

    def emit(piece: Piece) -> None:
        assert threading.current_thread() is here
        steps.append(piece.step if isinstance(piece, TurnChunk) else -1)

    session = await backend.chat(slot=0)
    result = await session.run(ask(), emit=emit)
    assert steps.pop(0) == -1
    assert steps == list(range(len(steps)))
    assert result.generated_tokens > 10
    await session.release()


async def test_an_interrupt_cuts_the_answer_within_a_token(model: DuplexModel) -> None:
    """A client that left would hold its slot to the end of the answer."""
    backend, told = EngineBackend(model), list[Piece]()
    session = await backend.chat(slot=0)

    def emit(piece: Piece) -> None:
        told.append(piece)
        if len(told) == 4:
            session.interrupt()

    result = await session.run(ask(max_new_tokens=400, speech=None), emit=emit)
    assert result.reason == "interrupted"
    assert result.cut is not None
    assert len(told) < 30, "pieces that were made while the interrupt was on its way"
    await session.release()
    assert wiped(model, 0)


LONG: Final = Message(
    role="user",
    content=(
        Text(text="the lazy dog " * 60),
        Picture(jpeg=picture(1, 900, 900)),
        Picture(jpeg=picture(2, 900, 900)),
        Sound(pcm=sound(1)),
        Sound(pcm=sound(2)),
    ),
)
"""Of several pictures, each of several slices, several sounds, and several blocks to be fed."""


@pytest.mark.costly
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("kind", [EncodeImage, EncodeReference, Feed])
async def test_an_interrupt_cuts_the_prefill(
    model: DuplexModel, alone: Alone, kind: type[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who left amid a long prefill would keep its slot to the end of it, from those who wait."""
    backend, seen = EngineBackend(model), list[type[Work]]()
    session = await backend.chat(slot=3)
    real = ModelRunner.compute

    def noted(self: ModelRunner, works: Sequence[Work]) -> list[Any]:
        seen.append(type(works[0]))
        if type(works[0]) is kind:
            session.interrupt()
        return real(self, works)

    monkeypatch.setattr(ModelRunner, "compute", noted)
    with pytest.raises(BackendError, match="the turn was cut"):
        await session.run(ask(LONG, max_new_tokens=2))
    assert seen.count(kind) == 1
    assert seen[-1] is kind
    assert wiped(model, 3)
    with pytest.raises(BackendError, match="out of order"):
        await session.run(ask())
    await session.release()
    monkeypatch.undo()
    assert await answered(backend, short(1), 3) == facts(*alone(short(1)))


async def test_an_interrupt_in_the_last_block_cuts_the_turn(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that was cut in its prefill would be told of as one that was prefilled."""
    session = await EngineBackend(model).chat(slot=0)
    real = ModelRunner.compute

    def noted(self: ModelRunner, works: Sequence[Work]) -> list[Any]:
        session.interrupt()
        return real(self, works)

    monkeypatch.setattr(ModelRunner, "compute", noted)
    with pytest.raises(BackendError, match="the turn was cut"):
        await session.run(ask())
    assert wiped(model, 0)


async def test_a_turn_that_was_cut_computes_nothing(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that left in the queue would have its pictures decoded and its words fed."""
    calls: list[object] = []
    monkeypatch.setattr(ModelRunner, "compute", lambda _, works: calls.append(works))
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *_, **__: calls.append("a picture"))
    for turn in (ask(), ask(LONG)):
        session = await EngineBackend(model).chat(slot=0)
        session.interrupt()
        with pytest.raises(BackendError, match="the turn was cut"):
            await session.run(turn)
        await session.release()
    assert calls == []


@attrs.define
class Cutting:
    """Interrupts a turn before the vocoder or the speech decoder is asked for the n-th time."""

    kind: type[Work]
    left: int
    session: EngineTurn
    spoken_since: int = 0

    def __call__(self, runner: ModelRunner, works: Sequence[Work], real: Any) -> list[Any]:
        if type(works[0]) is self.kind:
            self.left -= 1
        if self.left == 0 and type(works[0]) is self.kind:
            self.session.interrupt()
        elif self.left <= 0 and isinstance(works[0], Speak | Vocode):
            self.spoken_since += 1
        out: list[Any] = real(runner, works)
        return out


SPOKEN: Final = {"max_new_tokens": 14, "seed": 3}
"""Ten tokens are spoken amid the answer, the rest behind its last token."""


FEW_CUTS: Final[list[tuple[type[Work], int, int]]] = [
    (Speak, 60, 10),  # behind seconds of speech that were told
    (Vocode, 3, 10),
    (Speak, 110, 14),  # behind the last token
    (Vocode, 6, 14),
]
CUTS: Final[list[tuple[type[Work], int, int]]] = [
    (Speak, 1, 10),  # the first code of all
    (Vocode, 1, 10),
    *FEW_CUTS,
]


@pytest.mark.costly
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize(("kind", "at", "cut"), sample(CUTS, FEW_CUTS))
async def test_a_cut_amid_speech_ends_it_and_is_found_again_by_a_replay(  # noqa: PLR0917
    model: DuplexModel,
    alone: Alone,
    kind: type[Work],
    at: int,
    cut: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speech would go on for seconds after a barge-in, or a replay would call the log wrong."""
    backend, pieces, turn = EngineBackend(model), list[Piece](), ask(**SPOKEN)
    session = await backend.chat(slot=0)
    cutting, real = Cutting(kind=kind, left=at, session=session), ModelRunner.compute
    monkeypatch.setattr(ModelRunner, "compute", lambda self, works: cutting(self, works, real))
    result = await session.run(turn, emit=pieces.append)
    await session.release()
    monkeypatch.undo()
    prefill, chunks = pieces[0], chunks_of(pieces)
    assert isinstance(prefill, Prefill)
    assert cutting.left == 0, "the answer had no such moment"
    assert cutting.spoken_since == 0
    assert (result.reason, result.pcm, result.codec_ids) == ("interrupted", b"", ())
    assert result.cut == result.generated_tokens == cut
    assert result.text == "".join(chunk.text for chunk in chunks)

    whole, _ = alone(turn)
    assert chunks == whole[: len(chunks)]
    assert len(chunks) < len(whole)
    first, again = alone(turn, cut=result.cut)
    assert facts((), again) == facts((), result)
    assert chunks[: len(first)] == first
    assert not any(chunk.text for chunk in chunks[len(first) :])

    replay = ModelRerun(backend=backend)
    await replay.renew(SlotLeased(at_ns=0, lease=1, slot=0), [StartTurn(lease=1, turn=turn)])
    events: list[Event] = [
        TurnPrefilled(at_ns=0, prefill=prefill),
        *(TurnProgress(at_ns=0, chunk=chunk) for chunk in chunks),
        TurnDone(at_ns=0, result=result),
    ]
    verdicts = [await replay.renew(event) for event in events]
    assert [verdict.finding for verdict in verdicts] == [None] * len(events)
    assert [verdict.event for verdict in verdicts] == events


async def test_cancelling_cuts_the_answer_and_waits_for_it(
    model: DuplexModel, alone: Alone
) -> None:
    """The answer would go on in the engine, beside whoever gets the slot next (B4)."""
    backend, told = EngineBackend(model), list[Piece]()
    session = await backend.chat(slot=0)
    with anyio.fail_after(WAIT_S), anyio.CancelScope() as scope:

        def emit(piece: Piece) -> None:
            told.append(piece)
            if isinstance(piece, TurnChunk):
                scope.cancel()

        await session.run(ask(max_new_tokens=400, speech=None), emit=emit)
    assert scope.cancelled_caught
    assert len(told) < 30
    await session.release()
    assert wiped(model, 0)
    assert await answered(backend, short(1), 0) == facts(*alone(short(1)))


async def test_an_emit_that_fails_leaves_no_answer_behind(model: DuplexModel) -> None:
    """A mistake of ours would leave a generator running in the slot."""
    backend = EngineBackend(model)
    session = await backend.chat(slot=0)

    def emit(piece: Piece) -> None:
        if isinstance(piece, TurnChunk):
            raise ValueError(piece.index)

    with pytest.raises(BackendError, match="generate failed"):
        await session.run(ask(max_new_tokens=400, speech=None), emit=emit)
    assert backend.engine.statistics.tasks == 2
    await session.release()
    assert wiped(model, 0)


async def test_errors_of_a_turn_are_told(model: DuplexModel) -> None:
    """A conversation that is too long would look like a fault of the server."""
    backend = EngineBackend(model)
    long = await backend.chat(slot=0)
    with pytest.raises(ContextFull):
        await long.run(ask(said("user", "x" * 9000)))
    await long.release()
    broken = await backend.chat(slot=0)
    with pytest.raises(BackendError, match="cannot be decoded"):
        await broken.run(ask(said("user", Picture(jpeg=picture(1)[:300]))))
    await broken.release()
    with pytest.raises(LocalProtocolError, match="slot 8"):
        await backend.chat(slot=8)
    with pytest.raises(BackendError, match="does not chat"):
        await EngineBackend(FakeModel()).chat(slot=0)


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_a_chat_never_holds_a_unit_up_for_long(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations that are prefilled together would make a unit wait for all of them."""
    batches: list[Sequence[Work]] = []
    real = ModelRunner.compute

    def noted(self: ModelRunner, works: Sequence[Work]) -> list[Any]:
        batches.append(works)
        return real(self, works)

    monkeypatch.setattr(ModelRunner, "compute", noted)
    backend = EngineBackend(model)
    texts = ("the lazy dog " * 60, Picture(jpeg=picture(1, 400, 300)), Sound(pcm=sound(1)))
    parts = tuple(Text(text=part) if isinstance(part, str) else part for part in texts)
    turn = ask(Message(role="user", content=parts), max_new_tokens=2, speech=None)

    async def chat(slot: int) -> None:
        session: EngineTurn = await backend.chat(slot=slot)
        await session.run(turn)
        await session.release()

    async with anyio.create_task_group() as group:
        for slot in range(8):
            group.start_soon(chat, slot)
    rows = [sum(len(work.rows) for work in works if isinstance(work, Feed)) for works in batches]
    assert sum(rows) > 8 * 500
    assert max(rows) <= 8 * 127
    assert all(len(works) == 1 for works in batches if isinstance(works[0], EncodeImage))
