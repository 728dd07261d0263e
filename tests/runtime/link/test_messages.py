"""Messages: each is read back as it was written, and what is no message is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import (
    PAST_UNITS_MAX,
    ChatConfig,
    Chunk,
    ChunkResult,
    Cut,
    DuplexConfig,
    Finalized,
    Opened,
    Opening,
    PastUnit,
    Picture,
    Prefill,
    Sound,
    SpeechConfig,
    Text,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
    Voice,
)
from protocol.values.model import Message as Said
from runtime.link import messages
from runtime.link.messages import (
    SETUP,
    Answer,
    Ask,
    Cancel,
    Failed,
    Heartbeat,
    LinkError,
    Message,
    Rebuild,
    Receiver,
    Sender,
    Speaks,
    stream_of,
)
from tests.sessions.in_memory import pcm

VOICE = Voice(llm_pcm=pcm(1.0, 0.2), tts_pcm=pcm(0.5, 0.3))


def opening(session: int = 1, voice: Voice = VOICE) -> Ask:
    made = Opening(instructions="be brief \ud800", voice=voice, config=DuplexConfig(), seed=7)
    return Ask(call=1, session=session, effect=ef.OpenBackend(lease=session, opening=made))


TURN = Turn(
    index=0,
    messages=(Said(role="user", content=(Text(text="?"), Picture(jpeg=b"j"), Sound(pcm=pcm()))),),
    config=ChatConfig(min_new_tokens=2),
    speech=SpeechConfig(voice_pcm=pcm()),
    max_slice_nums=9,
    use_image_id=True,
    omni=True,
    thinking=False,
    seed=2**63,
)
CUT = Cut(stage="tts", step=4)
UNIT = Unit(index=3, pcm=pcm(), frames=(b"jpeg" * 40, b"jpeg" * 40), force_listen=True)
EFFECTS: tuple[ef.Effect, ...] = (
    ef.StartTurn(lease=4, turn=TURN),
    ef.StartUnit(unit=UNIT),
    ef.Interrupt(index=3),
    ef.StartFinalize(index=3, interrupted=True),
    ef.Rollback(index=3),
    ef.CutTurn(index=0),
    ef.RunChunk(lease=2, chunk=Chunk(utterance=0, index=1, pcm=pcm(), seed=1)),
    ef.Release(lease=2),
)
EVENTS: tuple[ev.Event, ...] = (
    ev.BackendOpened(at_ns=0, lease=1, opened=Opened(prompt_length=9, fed_ids=(1, -1))),
    ev.UnitDone(
        at_ns=0,
        result=UnitResult(
            index=3, is_listen=False, text="so \x00", pcm=pcm(), cut=CUT, margin=0.1, fed_ids=(4,)
        ),
    ),
    ev.FinalizeDone(at_ns=0, finalized=Finalized(index=3, kv_length=8)),
    ev.RollbackDone(at_ns=0, index=3),
    ev.SlotLeased(at_ns=0, lease=1, slot=2),
    ev.TurnPrefilled(at_ns=0, prefill=Prefill(index=0, input_tokens=4)),
    ev.TurnProgress(at_ns=0, chunk=TurnChunk(index=0, step=1, text="a", pcm=pcm(0.1))),
    ev.TurnDone(at_ns=0, result=TurnResult(index=0, text="a", cut=1)),
    ev.ChunkDone(
        at_ns=0,
        result=ChunkResult(
            utterance=0,
            index=1,
            text="a",
            token_ids=(1,),
            reason="stop",
            prompt_tokens=1,
            generated_tokens=1,
            kv_length=3,
        ),
    ),
    ev.BackendReleased(at_ns=0, lease=1),
)
MESSAGES: tuple[Message, ...] = (
    opening(),
    *(Ask(call=7, session=4, slot=3, effect=effect) for effect in EFFECTS),
    Ask(call=8, session=4, effect=ef.StartUnit(unit=UNIT), cut=CUT),
    *(Answer(call=7, session=4, event=event) for event in EVENTS),
    Rebuild(
        call=9,
        session=4,
        exact=True,
        past=(
            PastUnit(
                unit=UNIT,
                result=UnitResult(index=3, is_listen=False, codec_ids=(1, 2), cut=CUT),
                interrupted=True,
                is_voiced=False,
            ),
        )
        * PAST_UNITS_MAX,
    ),
    Cancel(call=9, session=4),
    Failed(call=9, session=4, why="context_full", text="too long"),
    Speaks(speaks=False),
    Heartbeat(),
)


def joined(parts: list[Any]) -> bytearray:
    return bytearray(b"".join(parts))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda it: type(it).__name__)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    """A model would be asked for something else than in one process."""
    sender, receiver = Sender(), Receiver()
    frame = joined(sender.encode(message))
    assert receiver.decode(stream_of(message), frame) == message


def test_all_messages_cross_in_turn() -> None:
    """One would change how the next is read."""
    sender, receiver = Sender(), Receiver()
    for message in (*MESSAGES, *MESSAGES):
        assert receiver.decode(stream_of(message), joined(sender.encode(message))) == message


def test_a_voice_crosses_once() -> None:
    """Every session would send seconds of sound that the worker has."""
    sender, receiver = Sender(), Receiver()
    sizes = []
    for session in range(1, 6):
        frame = joined(sender.encode(opening(session)))
        sizes.append(len(frame))
        assert receiver.decode(SETUP, frame) == opening(session)
    assert sizes[0] > 96_000
    assert max(sizes[1:]) < 2_000


def test_what_both_ends_keep_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every voice that ever crossed would be kept."""
    monkeypatch.setattr(messages, "SHARED_BYTES_MAX", 200_000)
    sender, receiver = Sender(), Receiver()
    kept = []
    for session in range(1, 30):
        voice = Voice(llm_pcm=pcm(1.0, session / 100))
        for _ in range(2):
            asked = opening(session, voice)
            assert receiver.decode(SETUP, joined(sender.encode(asked))) == asked
        kept.append(sum(len(stored.area) for stored in receiver._shared))
    assert max(kept) <= 200_000 + 64_000
    assert min(kept[5:]) < 100_000


def test_what_both_ends_keep_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Openings without a voice would be kept for ever."""
    monkeypatch.setattr(messages, "SHARED_RECORDS_MAX", 5)
    sender, receiver = Sender(), Receiver()
    for session in range(1, 30):
        asked = opening(session, Voice())
        assert receiver.decode(SETUP, joined(sender.encode(asked))) == asked
        assert len(receiver._shared) <= 5


def test_a_sender_that_shares_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would keep what it is sent."""
    sender, receiver = Sender(), Receiver()
    frames = [joined(sender.encode(opening(1, Voice(llm_pcm=pcm(1.0, n / 100))))) for n in range(9)]
    monkeypatch.setattr(messages, "SHARED_BYTES_MAX", 200_000)
    for frame in frames[:4]:
        receiver.decode(SETUP, frame)
    with pytest.raises(LinkError, match="is not the one that is due"):
        receiver.decode(SETUP, frames[4])


def test_a_reference_to_nothing_is_refused() -> None:
    """A forged record would raise what no reader expects."""
    sender = Sender()
    sender.encode(opening(1))
    with pytest.raises(LinkError):
        Receiver().decode(SETUP, joined(sender.encode(opening(2))))
    with pytest.raises(LinkError):
        Receiver().decode(5, joined(sender.encode(opening(2))))


@pytest.mark.parametrize("count", [0, PAST_UNITS_MAX + 1])
def test_a_rebuild_of_too_many_units_is_refused(count: int) -> None:
    """A worker would hold all pictures of a session at once."""
    past = PastUnit(
        unit=UNIT, result=UnitResult(index=3, is_listen=True), interrupted=False, is_voiced=False
    )
    asked = Rebuild(call=1, session=1, exact=False, past=(past,) * count)
    with pytest.raises(LinkError, match=f"{count} past units, not 1 to 16"):
        Receiver().decode(2, joined(Sender().encode(asked)))


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_is_refused_or_another(message: Message, data: st.DataObject) -> None:
    """A byte of a peer would end the process."""
    frame = joined(Sender().encode(message))
    start = min(len(frame), 600)
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, start - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Receiver().decode(stream_of(message), frame)
    except LinkError:
        return
    assert isinstance(found, Message)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 3))
def test_garbage_is_refused(data: bytes, stream: int) -> None:
    """As above, without any likeness."""
    try:
        found = Receiver().decode(stream, bytearray(data))
    except LinkError:
        return
    assert isinstance(found, Message)
