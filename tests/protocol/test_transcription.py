"""A transcription as the machine runs it: every row of its table, and what holds of all of them.

The rows are those of the wire decisions (`transcription`, 003); over a socket they stand in
`test_live_transcription`. Here no model is needed: what it would write is stepped in.
"""

from __future__ import annotations

import json
from typing import Any, Final

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.machine.client import ClientConnection
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST, ONLY_MODEL
from protocol.values.errors import CLOSE_NORMAL, LocalProtocolError
from protocol.values.limits import FRAME_BYTES_MAX, NS_PER_S, UTTERANCES_PENDING_MAX, Mode
from protocol.values.messages import QueuePlace, TranscriptDelta, TranscriptDone
from protocol.values.model import UNIT_BYTES
from protocol.values.requests import AppendSound, ChooseModel, CloseRequest, Commit
from protocol.values.state import State
from tests.sessions.in_memory import base64
from tests.sessions.transcribing import LIMITS, SECOND, Talk, done_of, ready, result

# -- the rows of the table ------------------------------------------------------------------------


def test_the_client_is_greeted_once_there_is_a_slot_and_told_nothing_before() -> None:
    """A client of 003 takes the first message for the greeting, whatever it is."""
    talk = Talk(is_leased=False)
    place = QueuePlace(position=2, estimated_wait_s=9, ticket_id="ticket_1", queue_length=2)
    assert talk.step(ev.TicketMoved, place=place) == []
    assert talk.stands_in(State.QUEUED)
    (greeting,) = talk.step(ev.SlotLeased, lease=1, slot=0)
    assert greeting == {
        "type": "session.created",
        "id": talk.session.session_id,
        "created": 1_700_000_000,
    }
    assert talk.stands_in(State.CONNECTED)


def test_a_commit_before_a_model_is_refused_and_what_was_appended_is_kept() -> None:
    """A client that commits first loses the beginning of its sound."""
    talk = Talk()
    assert talk.append(SECOND) == []
    assert talk.code({"type": "input_audio_buffer.commit"}) == "model_not_validated"
    assert talk.stands_in(State.CONNECTED)
    talk.choose()
    talk.commit(final=True)
    assert done_of(talk.hear_out())["text"] == "0.0 0.1!"


def test_a_commit_before_a_model_takes_the_servers() -> None:
    """A client of a server with one model has to know its name."""
    talk = Talk(behaviour=ONLY_MODEL)
    assert talk.append(SECOND) == []
    talk.commit(final=True)
    assert talk.stands_in(State.ACTIVE)
    assert done_of(talk.hear_out())["text"] == "0.0 0.1!"
    talk.step(ev.TimerFired, name="init", generation=1, later_s=LIMITS.init_wait_s)
    assert talk.stands_in(State.ACTIVE)


def test_a_commit_is_refused_where_no_model_has_a_name() -> None:
    """A session that cannot be answered is set up."""
    talk = Talk(attrs.evolve(LIMITS, models=()), behaviour=ONLY_MODEL)
    assert talk.code({"type": "input_audio_buffer.commit"}) == "model_not_validated"
    assert talk.stands_in(State.CONNECTED)


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": 5}, {"session": {"model": "a"}}])
def test_an_update_without_a_model_is_an_invalid_event(fields: dict[str, Any]) -> None:
    """A client of the other protocol is told that its model is unknown."""
    assert Talk().code({"type": "session.update", **fields}) == "invalid_event"


@pytest.mark.parametrize(
    ("mode", "endpoint", "reason"),
    [
        ("transcription", "realtime", "client"),
        ("audio", "openai", "client"),
        ("audio", "realtime", "peer_gone"),
    ],
)
@pytest.mark.parametrize("code", [CLOSE_NORMAL, 1001, 1006])
def test_a_close_in_order_is_the_end_where_nothing_else_is(
    mode: Mode, endpoint: ev.Endpoint, reason: str, code: int
) -> None:
    """Each transcription would look like a lost client, or the recordings of before part."""
    for behaviour in (0, NEWEST):
        opened = ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1_700_000_000_123,
            mode=mode,
            endpoint=endpoint,
            seed=7,
            limits=LIMITS,
            recording="off",
            behaviour=behaviour,
        )
        session, _ = Session.open(opened)
        session.step(ev.SlotLeased(at_ns=1, lease=1, slot=0))
        session.step(ev.PeerGone(at_ns=2, code=code))
        is_end = behaviour and code == CLOSE_NORMAL
        assert session.end_reason == (reason if is_end else "peer_gone")


def test_an_unknown_model_is_named_and_an_earlier_choice_stays() -> None:
    """A typing error ends a session that was set up, or is not to be found by its message."""
    talk = Talk()
    (body,) = talk.say({"type": "session.update", "model": "mistral"})
    assert body["code"] == "model_not_found"
    assert "'mistral'" in body["error"]
    assert talk.stands_in(State.CONNECTED)
    talk.choose()
    assert talk.code({"type": "session.update", "model": "x" * 9000}) == "model_not_found"
    assert len(talk.frames[-1]["error"]) < 200
    assert talk.stands_in(State.ACTIVE)
    assert talk.commit(final=True) == [done_of(talk.frames)]


def test_the_model_may_be_chosen_by_each_of_its_names() -> None:
    """An unmodified client names the model that it was written for."""
    talk = Talk()
    assert talk.say({"type": "session.update", "model": "whisper-1"}) == []
    assert talk.stands_in(State.ACTIVE)


def test_a_commit_then_sound_then_final_gives_deltas_and_then_done() -> None:
    """The worked flow of 003 does not work."""
    talk = ready()
    talk.commit()
    assert talk.append(SECOND[:20_000]) == []
    assert talk.due(ef.RunChunk) == []
    talk.append(SECOND[20_000:])
    assert talk.hear("one ") == [{"type": "transcription.delta", "delta": "one "}]
    assert talk.hear_out() == []  # nothing is given to the model before there is a second of it
    talk.append(SECOND)
    assert [body["delta"] for body in talk.hear("two")] == ["two"]
    talk.commit(final=True)
    assert talk.hear("") == [
        {
            "type": "transcription.done",
            "text": "one two",
            "usage": {"prompt_tokens": 30, "completion_tokens": 6, "total_tokens": 36},
        }
    ]


def test_a_lone_final_commit_transcribes_what_was_appended() -> None:
    """A client that commits once gets nothing."""
    talk = ready()
    talk.append(SECOND)
    assert talk.due(ef.RunChunk) == []
    talk.commit(final=True)
    assert done_of(talk.hear_out())["text"] == "0.0 0.1!"


def test_commits_without_sound_give_an_empty_done_and_ask_no_model() -> None:
    """Silence occupies the model, or is never answered."""
    talk = ready()
    talk.commit()
    empty = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert talk.commit(final=True) == [{"type": "transcription.done", "text": "", "usage": empty}]
    assert talk.due(ef.RunChunk) == []


@pytest.mark.parametrize("audio", ["%%%", "AAA", base64(b"\0"), base64(b"\0\0\0"), "", None, 5])
def test_bad_sound_is_refused(audio: object) -> None:
    """Noise is transcribed in the place of an error."""
    talk = ready()
    assert talk.code({"type": "input_audio_buffer.append", "audio": audio}) == "invalid_audio"
    assert done_of(talk.commit(final=True))["text"] == ""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_base64_may_have_line_breaks(end: str) -> None:
    """A client whose library breaks lines as mail does is heard only by the source's server."""
    talk, text = ready(), base64(SECOND)
    audio = end.join(text[at : at + 76] for at in range(0, len(text), 76)) + end
    assert talk.say({"type": "input_audio_buffer.append", "audio": audio}) == []
    talk.commit(final=True)
    (asked,) = talk.due(ef.RunChunk)
    samples = np.frombuffer(asked.chunk.pcm, dtype="<f4") * 32_768
    assert np.array_equal(samples, np.frombuffer(SECOND, dtype="<i2"))


@pytest.mark.parametrize("audio", ["AA A=", "AA\tA=", "\n", "AAA\n", "A\u2028A=="])
def test_nothing_else_may_stand_in_base64(audio: str) -> None:
    """Whatever a client sends is taken for sound."""
    assert ready().code({"type": "input_audio_buffer.append", "audio": audio}) == "invalid_audio"


HINTS: Final = [("language", "de"), ("prompt", "names: Ada, Grace"), ("language", 5)]


@pytest.mark.parametrize(("name", "value"), HINTS)
@pytest.mark.parametrize("kind", ["session.update", "session.create"])
def test_a_hint_that_the_model_cannot_take_is_refused_by_name(
    kind: str, name: str, value: object
) -> None:
    """A client believes that its language or its prompt is in force."""
    talk = Talk()
    (body,) = talk.say({"type": kind, "model": "tiny", name: value})
    assert body["code"] == "invalid_payload"
    assert f"$.{name}: " in body["error"]
    assert "the model" in body["error"]
    assert talk.stands_in(State.CONNECTED)


@pytest.mark.parametrize(("name", "value"), HINTS[:2])
def test_a_hint_has_no_effect_and_is_counted(name: str, value: object) -> None:
    """A client of vLLM that names a language gets no session at all."""
    talk = Talk(behaviour=ONLY_MODEL)
    assert talk.say({"type": "session.update", "model": "tiny", name: value}) == []
    assert talk.stands_in(State.ACTIVE)
    assert talk.session.counts["fields_ignored"] == 1


@pytest.mark.parametrize("value", [None, ""])
def test_a_hint_that_hints_at_nothing_is_taken(value: str | None) -> None:
    """A client that fills in every field cannot choose a model."""
    talk = Talk()
    fields = {"model": "tiny", "language": value, "prompt": value}
    assert talk.say({"type": "session.update", **fields}) == []
    assert talk.stands_in(State.ACTIVE)


BEYOND_READING: Final = [
    ("no json", "invalid_json"),
    ("[1]", "invalid_json"),
    ('{"type":"a","type":"b"}', "invalid_json"),
    ('{"type":"session.update","model":NaN}', "invalid_json"),
    (b"\0\1", "invalid_frame"),
    ('{"type":"session.close"}', "unknown_event"),
    ('{"type":"session.init"}', "unknown_event"),
    ("{}", "missing_field"),
]


@pytest.mark.parametrize(("frame", "code"), BEYOND_READING)
def test_what_cannot_be_read_is_an_error_and_the_connection_stays(
    frame: str | bytes, code: str
) -> None:
    """One bad frame ends a session that 003 would go on with."""
    for talk in (Talk(), ready()):
        assert talk.code(frame) == code
        assert talk.due(ef.Close) == []


def test_a_frame_that_is_too_long_ends_the_session() -> None:
    """A client has the server keep whatever it sends."""
    talk = ready()
    assert talk.say("x" * (FRAME_BYTES_MAX + 1)) == []
    (close,) = talk.due(ef.Close)
    assert close.code == 1009


def test_pipelined_utterances_are_answered_in_order() -> None:
    """The second utterance's text comes first, or is the first one's."""
    talk = ready()
    for _ in range(2):
        talk.commit()
        talk.append(SECOND)
        talk.commit(final=True)
    talk.commit(final=True)
    frames = talk.hear_out()
    told = [body["text"] for body in frames if body["type"] == "transcription.done"]
    assert told == ["0.0 0.1!", "1.0 1.1!", ""]
    assert [body.get("delta") for body in frames[:3]] == ["0.0 ", "0.1!", None]


def test_sound_past_the_limit_is_refused_whole_and_what_waits_is_kept() -> None:
    """A client fills the server's memory, or loses what it was told is kept."""
    talk = ready()
    for _ in range(4):
        assert talk.append(SECOND) == []
    assert talk.code({"type": "input_audio_buffer.append", "audio": "AAA="}) == "buffer_full"
    talk.commit()
    assert talk.append(SECOND) == []  # a second went to the model
    assert talk.append(SECOND)[0]["code"] == "buffer_full"
    talk.commit(final=True)
    assert done_of(talk.hear_out())["text"] == "0.0 0.1 0.2 0.3 0.4 0.5!"


def test_utterances_past_their_number_are_refused() -> None:
    """Empty commits fill the server's memory where sound cannot."""
    talk = ready()
    talk.append(SECOND)
    for _ in range(UTTERANCES_PENDING_MAX):
        assert talk.commit(final=True) == []
    assert talk.commit(final=True)[0]["code"] == "buffer_full"
    assert talk.append(SECOND)[0]["code"] == "buffer_full"
    dones = [body for body in talk.hear_out() if body["type"] == "transcription.done"]
    assert len(dones) == UTTERANCES_PENDING_MAX
    assert talk.commit(final=True)[0]["type"] == "transcription.done"


def test_the_last_utterance_that_may_wait_takes_sound_until_it_is_closed() -> None:
    """Its beginning was kept, and the rest refused."""
    talk = ready()
    talk.append(SECOND)
    for _ in range(UTTERANCES_PENDING_MAX - 1):
        talk.commit(final=True)
    assert talk.append(SECOND[:16_000]) == []
    assert talk.append(SECOND[16_000:]) == []
    assert talk.commit() == []
    assert talk.commit(final=True) == []
    assert talk.append(SECOND)[0]["code"] == "buffer_full"
    dones = [body for body in talk.hear_out() if body["type"] == "transcription.done"]
    assert dones[-1]["text"] == f"{UTTERANCES_PENDING_MAX - 1}.0 {UTTERANCES_PENDING_MAX - 1}.1!"


def fire(talk: Talk, name: str, later_s: float) -> None:
    """Let the time of a timer come."""
    timer = [it for it in talk.due(ef.SetTimer) if it.name == name][-1]
    assert timer.at_ns <= talk.now_ns + later_s * NS_PER_S
    talk.step(ev.TimerFired, later_s=later_s, name=name, generation=timer.generation)


def test_a_silent_client_is_let_go() -> None:
    """A client that is gone without a word holds a slot for an hour."""
    talk = ready()
    talk.step(ev.FrameReceived, later_s=20, frame="x")
    fire(talk, "idle", 40)
    assert talk.due(ef.Close) == []
    fire(talk, "idle", 20)
    (close,) = talk.due(ef.Close)
    assert (close.code, close.reason) == (1000, "idle")
    assert talk.session.end_reason == "idle"
    assert talk.frames[-1]["type"] != "transcription.done"
    assert len(talk.due(ef.Release)) == 1


def test_a_client_that_waits_for_the_model_is_not_silent() -> None:
    """Who sends a long file at once is cut off while it is transcribed."""
    talk = ready()
    talk.append(SECOND)
    talk.commit(final=True)
    fire(talk, "idle", 60)
    assert talk.due(ef.Close) == []
    talk.hear()
    talk.hear()
    fire(talk, "idle", 60)
    assert len(talk.due(ef.Close)) == 1


def test_a_client_that_chooses_no_model_is_let_go() -> None:
    """A slot is held by whoever sends nothing but mistakes."""
    talk = Talk()
    talk.step(ev.FrameReceived, later_s=29, frame="x")
    timer = next(it for it in talk.due(ef.SetTimer) if it.name == "init")
    talk.step(ev.TimerFired, name="init", generation=timer.generation)
    assert talk.frames[-1] == {
        "type": "error",
        "error": "the session is over: no model was chosen within 30 s",
        "code": "timeout",
        "session_id": talk.session.session_id,
    }
    (close,) = talk.due(ef.Close)
    assert (close.code, close.reason) == (1000, "timeout")
    assert talk.session.end_reason == "timeout"


# -- the other names ------------------------------------------------------------------------------


def test_who_begins_with_create_is_answered_in_the_other_names() -> None:
    """A client that knows the second set of 003 waits for events that never come."""
    talk = Talk()
    assert talk.say({"type": "session.create", "model": "tiny"}) == []
    talk.say({"type": "response.create"})
    talk.append(SECOND)
    assert talk.hear("hi") == [{"type": "response.text.delta", "delta": "hi"}]
    talk.say({"type": "session.update", "model": "tiny"})
    talk.commit(final=True)
    (done,) = talk.hear("")
    assert (done["type"], done["text"]) == ("response.done", "hi")
    assert talk.session.dialect_name == "transcription-responses"


def test_who_begins_with_update_may_say_the_other_names() -> None:
    """A client that mixes them is told that an event is unknown."""
    talk = ready()
    talk.say({"type": "session.create", "model": "tiny"})
    talk.say({"type": "response.create"})
    talk.append(SECOND)
    assert talk.hear("hi") == [{"type": "transcription.delta", "delta": "hi"}]


# -- what goes wrong on our side ------------------------------------------------------------------


ENDS: Final = [
    (ev.BackendLost, {"lease": 1}, "backend_error", 1011),
    (ev.Draining, {}, "server_shutdown", 1012),
]


@pytest.mark.parametrize(("kind", "fields", "code", "close_code"), ENDS)
def test_an_end_that_is_nobodys_wish_is_told_as_an_error(
    kind: type[Any], fields: dict[str, Any], code: str, close_code: int
) -> None:
    """A client takes a lost model for the end of its utterance."""
    for talk in (Talk(), ready()):
        (body,) = talk.step(kind, **fields)
        assert (body["type"], body["code"]) == ("error", code)
        (close,) = talk.due(ef.Close)
        assert (close.code, close.reason) == (close_code, code)
        assert len(talk.due(ef.Release)) == 1
        talk.step(ev.BackendReleased, lease=1)
        assert talk.session.is_finished


def test_the_limit_of_a_session_is_told_as_a_timeout() -> None:
    """A client is cut off amid an utterance and does not know why."""
    talk = ready()
    timer = next(it for it in talk.due(ef.SetTimer) if it.name == "session")
    assert timer.at_ns == 3600 * NS_PER_S
    (body,) = talk.step(ev.TimerFired, name="session", generation=timer.generation)
    assert body["code"] == "timeout"
    (close,) = talk.due(ef.Close)
    assert (close.code, close.reason) == (1000, "timeout")


def test_cleanup_waits_for_the_chunk_under_way() -> None:
    """A slot is lent to another while the model still works for this one (B4, B5)."""
    talk = ready()
    talk.append(SECOND)
    talk.commit(final=True)
    talk.step(ev.PeerGone)
    assert talk.due(ef.Release) == []
    (asked,) = talk.due(ef.RunChunk)
    assert talk.step(ev.ChunkDone, result=result(asked.chunk, "late")) == []
    (release,) = talk.due(ef.Release)
    assert not release.condemn
    assert talk.due(ef.RunChunk) == []


def test_a_stale_result_changes_nothing() -> None:
    """What a call of before still says is taken for the next one's."""
    talk = ready()
    talk.append(SECOND)
    talk.commit(final=True)
    (asked,) = talk.due(ef.RunChunk)
    stale = attrs.evolve(result(asked.chunk, "x"), index=5)
    assert talk.step(ev.ChunkDone, result=stale) == []
    assert talk.step(ev.ChunkFailed, utterance=3, index=0) == []
    assert talk.due(ef.RunChunk) == []
    talk.step(ev.ChunkDone, result=result(asked.chunk, "one "))
    assert done_of(talk.hear_out())["text"] == "one 0.1!"


def test_a_drain_lets_an_utterance_end_and_takes_the_session_then() -> None:
    """A restart cuts off what could have been finished, or waits for ever."""
    idle = ready()
    assert idle.step(ev.DrainBegan, wait_s=30)[0]["code"] == "server_shutdown"
    talk = ready()
    talk.append(SECOND)
    talk.commit(final=True)
    assert talk.step(ev.DrainBegan, wait_s=30) == []
    *_, done, end = talk.hear_out()
    assert done["type"] == "transcription.done"
    assert end["code"] == "server_shutdown"
    assert talk.due(ef.Close)[0].code == 1012


# -- what holds of all ----------------------------------------------------------------------------


def test_chunks_are_whole_seconds_and_the_last_is_silence() -> None:
    """The model is given half a second, or words at the very end are never heard out."""
    talk = ready()
    talk.append(SECOND + SECOND[:10])
    talk.commit(final=True)
    chunks = []
    while asked := talk.due(ef.RunChunk):
        chunks.append(asked[0].chunk)
        talk.step(ev.ChunkDone, result=result(chunks[-1], ""))
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    assert {len(chunk.pcm) for chunk in chunks} == {UNIT_BYTES}
    assert [chunk.is_last for chunk in chunks] == [False, False, True]
    samples = np.frombuffer(chunks[0].pcm, dtype="<f4")
    assert np.array_equal(samples * 32_768, np.frombuffer(SECOND, dtype="<i2"))
    assert np.frombuffer(chunks[1].pcm, dtype="<f4")[4] * 32_768 == 4
    assert not any(chunks[1].pcm[20:])
    assert not any(chunks[2].pcm)
    assert {chunk.seed for chunk in chunks} == {7}


@settings(deadline=None, max_examples=60)
@given(
    cuts=st.lists(st.integers(1, 60_000).map(lambda samples: 2 * samples), max_size=20),
    samples=st.integers(0, 60_000),
    early=st.booleans(),
    pause=st.integers(0, 5),
)
def test_any_split_into_appends_gives_the_same_chunks(
    cuts: list[int], samples: int, early: bool, pause: int
) -> None:
    """What a client hears depends on the size of its network packets."""
    sound = np.random.default_rng(samples).integers(-999, 999, samples).astype("<i2").tobytes()
    whole = Talk(attrs.evolve(LIMITS, sound_bytes=1 << 20))
    whole.choose()
    split = Talk(attrs.evolve(LIMITS, sound_bytes=1 << 20))
    split.choose()
    if sound:
        whole.append(sound)
    whole.commit(final=True)
    if early:
        split.commit()
    at, given_chunks = 0, []

    def hear(count: int) -> None:
        for _ in range(count):
            for asked in split.due(ef.RunChunk):
                given_chunks.append(asked.chunk)
                split.step(ev.ChunkDone, result=result(asked.chunk, f"{asked.chunk.index} "))

    for cut in (*cuts, len(sound)):
        if sound[at : at + cut]:
            split.append(sound[at : at + cut])
        at += cut
        hear(pause)
    split.commit(final=True)
    hear(9)
    expected = []
    while asked := whole.due(ef.RunChunk):
        chunk = asked[0].chunk
        expected.append(chunk)
        whole.step(ev.ChunkDone, result=result(chunk, f"{chunk.index} "))
    assert given_chunks == expected
    for talk in (whole, split):
        deltas = "".join(it.text for it in talk.heard if isinstance(it, TranscriptDelta))
        (done,) = [it for it in talk.heard if isinstance(it, TranscriptDone)]
        assert done.text == deltas
        assert done.prompt_tokens == 10 * len(expected)


# -- the client's end -----------------------------------------------------------------------------


def test_the_client_says_nothing_that_would_be_refused() -> None:
    """Our own client is told by the server what it could have known."""
    client = ClientConnection("transcription", "transcription")
    with pytest.raises(LocalProtocolError, match="not_ready"):
        client.send(ChooseModel(model="tiny"))
    with pytest.raises(LocalProtocolError, match="not_ready"):
        client.send(Commit())
    with pytest.raises(LocalProtocolError, match="not_ready"):
        client.send(AppendSound(pcm16=SECOND))
    client.receive('{"type":"session.created","id":"s","created":1}')
    client.send(AppendSound(pcm16=SECOND))
    client.send(Commit())
    assert client.state is State.ACTIVE
    client.send(ChooseModel(model="tiny"))
    assert client.state is State.ACTIVE
    assert json.loads(client.send(Commit(final=True)))["final"] is True
    with pytest.raises(LocalProtocolError):
        client.send(CloseRequest())
    client.receive('{"type":"transcription.delta","delta":"a"}')
    assert client.connection_closed(1000, "idle")


def test_the_client_reads_an_end_as_such() -> None:
    """A client goes on to send to a session that is over."""
    client = ClientConnection("transcription", "transcription")
    client.receive('{"type":"session.created","id":"s","created":1}')
    client.send(ChooseModel(model="tiny"))
    client.receive('{"type":"error","error":"gone","code":"backend_error"}')
    assert client.state is State.CLOSED
    with pytest.raises(LocalProtocolError):
        client.send(Commit())
