"""A transcription session of OpenAI's Realtime API: utterances that are items, and their text."""

from __future__ import annotations

import base64
import json
from typing import Any, Final, Literal

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import TypeAdapter

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST
from protocol.values.limits import NS_PER_S
from protocol.values.model import Chunk
from protocol.wire.codec import parse_frame
from runtime.media.speech_detector import SpeechDetector
from tests.project.sampling import sample
from tests.sessions.transcribing import LIMITS, result

RATE_HZ: Final = 24_000
SECOND_BYTES: Final = 2 * RATE_HZ
OPENED: Final = ev.ConnectionOpened(
    recording_id="rec-1",
    created_ms=1,
    mode="transcription",
    seed=1,
    limits=attrs.evolve(LIMITS, sound_bytes=20 * SECOND_BYTES, rebuild_wait_s=10),
    recording="off",
    behaviour=NEWEST,
    endpoint="openai",
)
NAME: Final = "conversation.item.input_audio_transcription"
COMMITTED: Final = ["input_audio_buffer.committed", "conversation.item.added"]
COMMITTED_ITEM: Final = [*COMMITTED, "conversation.item.done"]
MANUAL: Final = {"input": {"turn_detection": None}}


def tone(seconds: float) -> bytes:
    """Loud sound, which the detector takes for speech."""
    samples = np.sin(np.arange(int(seconds * RATE_HZ)) / 5) * 9000
    return samples.astype("<i2").tobytes()


def quiet(seconds: float) -> bytes:
    """Silence."""
    return bytes(2 * int(seconds * RATE_HZ))


@attrs.define
class Client:
    """A client at a session whose model writes down `w0 ` for the first second, `w1 ` for the next.

    A slow model waits for `write`; a failing one fails at the second of that number.
    """

    is_slow: bool = False
    fails_at: int = -1
    label: str = ""
    has_slot: bool = True
    behaviour: int = NEWEST
    recording: Literal["on", "off"] = "off"
    session: Session = attrs.field(init=False)
    now_ns: int = 0
    told: list[dict[str, Any]] = attrs.Factory(list)
    chunks: list[Chunk] = attrs.Factory(list)
    written: list[Chunk] = attrs.Factory(list)
    effects: list[ef.Effect] = attrs.Factory(list)
    detector: SpeechDetector = attrs.Factory(SpeechDetector)

    def __attrs_post_init__(self) -> None:
        opened = attrs.evolve(
            OPENED, label=self.label, behaviour=self.behaviour, recording=self.recording
        )
        self.session, effects = Session.open(opened)
        self._perform(effects)

    def say(self, kind: str, **body: Any) -> list[dict[str, Any]]:
        """Send a message, and return the answers."""
        before = len(self.told)
        self.post(ev.FrameReceived(at_ns=0, frame=json.dumps({"type": kind, **body})))
        return self.told[before:]

    def hear(self, sound: bytes, *, piece_s: float = 1.0) -> list[str]:
        """Send sound in pieces, and return the types of the answers."""
        before, size = len(self.told), 2 * int(piece_s * RATE_HZ)
        for at in range(0, len(sound), size):
            self.now_ns += NS_PER_S // 50
            audio = base64.b64encode(sound[at : at + size]).decode()
            self.say("input_audio_buffer.append", audio=audio)
        return [one["type"] for one in self.told[before:]]

    def update(self, **session: Any) -> list[dict[str, Any]]:
        """Change settings."""
        return self.say("session.update", session={"type": "transcription", **session})

    def commit(self) -> list[str]:
        """Commit the sound, and return the types of the answers."""
        return [one["type"] for one in self.say("input_audio_buffer.commit")]

    def texts(self, kind: str = "completed") -> list[tuple[str, str]]:
        """Return the items that were transcribed, each with its text."""
        field = {"completed": "transcript", "delta": "delta"}[kind]
        return [(it["item_id"], it[field]) for it in self.told if it["type"] == f"{NAME}.{kind}"]

    def write(self) -> None:
        """Have a slow model write the second down that it has."""
        if len(self.written) < len(self.chunks):
            self.written.append(self.chunks[-1])
            self.post(self._result(self.chunks[-1]))

    def fire(self, name: ev.TimerName) -> list[str]:
        """Let time pass until a timer fires, and return the types of what is told."""
        [*_, timer] = [it for it in self.effects if isinstance(it, ef.SetTimer) and it.name == name]
        before, self.now_ns = len(self.told), max(self.now_ns, timer.at_ns)
        self.post(ev.TimerFired(at_ns=0, name=name, generation=timer.generation))
        return [one["type"] for one in self.told[before:]]

    def post(self, event: ev.Event) -> None:
        """Have the session take an event now."""
        self._perform(self.session.step(attrs.evolve(event, at_ns=self.now_ns)))

    def _result(self, chunk: Chunk) -> ev.Event:
        number, index = chunk.utterance, chunk.index
        if index == self.fails_at:
            return ev.ChunkFailed(at_ns=0, utterance=number, index=index, context_full=False)
        text = "" if chunk.is_last else f"w{index} "
        return ev.ChunkDone(at_ns=0, result=result(chunk, text))

    def _perform(self, effects: tuple[ef.Effect, ...]) -> None:
        answers = list[ev.Event]()
        self.effects += effects
        for effect in effects:
            match effect:
                case ef.Send(frame=frame):
                    self.told.append(parse_frame(frame))
                case ef.EnterQueue() if self.has_slot:
                    answers.append(ev.SlotLeased(at_ns=0, lease=1, slot=0))
                case ef.DetectSpeech():
                    answers.extend(self.detector.detect(effect, self.now_ns))
                case ef.RunChunk(chunk=chunk):
                    self.chunks.append(chunk)
                    if not self.is_slow:
                        answers.append(self._result(chunk))
        for answer in answers:
            self.post(answer)


def manual(**settings: Any) -> Client:
    """A client that ends its utterances itself."""
    client = Client(**settings)
    client.update(audio=MANUAL)
    return client


def test_the_server_speaks_first() -> None:
    """A client waits for `session.created` before it says anything."""
    [created] = Client().told
    assert created["type"] == "session.created"
    session = created["session"]
    assert (session["type"], session["object"]) == (
        "transcription",
        "realtime.transcription_session",
    )
    heard = session["audio"]["input"]
    assert heard["transcription"] == {"model": "tiny"}
    assert heard["turn_detection"]["type"] == "server_vad"
    assert heard["format"] == {"type": "audio/pcm", "rate": 24_000}


def test_text_comes_while_the_client_speaks() -> None:
    """Captions would come a whole utterance late."""
    client = manual()
    assert client.hear(tone(2.5)) == [f"{NAME}.delta", f"{NAME}.delta"]
    assert client.commit() == [*COMMITTED_ITEM, f"{NAME}.delta", f"{NAME}.completed"]
    [(item_id, text)] = client.texts()
    assert text == "w0 w1 w2"
    assert {name for name, _ in client.texts("delta")} == {item_id}
    assert client.told[-1]["usage"] == {"type": "duration", "seconds": 2.5}


def test_an_utterance_is_a_stretch_of_speech() -> None:
    """The silence around it would be transcribed, and its words placed in it."""
    client = Client()
    told = client.hear(quiet(1.5) + tone(1.2) + quiet(2), piece_s=0.02)
    buffer = [kind for kind in told if kind.startswith("input_audio_buffer")]
    steps = ("speech_started", "speech_stopped", "committed")
    assert buffer == [f"input_audio_buffer.{step}" for step in steps]
    started, stopped = (
        client.told[1],
        next(it for it in client.told if it["type"] == "input_audio_buffer.speech_stopped"),
    )
    assert 1100 <= started["audio_start_ms"] <= 1300, "the padding before it is 300 ms"
    assert 3100 <= stopped["audio_end_ms"] <= 3300, "the silence of 500 ms ends it"
    assert started["item_id"] == stopped["item_id"] == client.texts()[0][0]
    whole = b"".join(chunk.pcm for chunk in client.chunks)
    spoken = np.flatnonzero(np.abs(np.frombuffer(whole, "<f4")) > 0.1)
    assert 0.25 <= spoken[0] / 16_000 <= 0.45, "speech begins after the padding"
    assert 1.1 <= (spoken[-1] - spoken[0]) / 16_000 <= 1.3, "and is there whole"


@pytest.mark.parametrize("piece_s", [0.02, 0.1, 1, 4])
def test_pieces_do_not_change_what_is_transcribed(piece_s: float) -> None:
    """Two clients that say the same would read different words."""
    sound = quiet(1) + tone(1.3) + quiet(1.7) + tone(2) + quiet(2)
    client, whole = Client(), Client()
    client.hear(sound, piece_s=piece_s)
    whole.hear(sound, piece_s=0.02)
    assert len(client.texts()) == 2
    assert [text for _, text in client.texts()] == [text for _, text in whole.texts()]


def test_the_next_utterance_has_its_own_start() -> None:
    """What was said in the piece that ends an utterance would be lost, or be part of both."""
    client = Client()
    client.hear(quiet(1) + tone(1) + quiet(0.9) + tone(1.1) + quiet(2), piece_s=4)
    first, second = client.texts()
    assert first[0] != second[0]
    sounds = [
        b"".join(chunk.pcm for chunk in client.chunks if chunk.utterance == number)
        for number in (0, 1)
    ]
    loud = [np.flatnonzero(np.abs(np.frombuffer(one, "<f4")) > 0.1) for one in sounds]
    lengths = [(it[-1] - it[0]) / 16_000 for it in loud]
    assert lengths == pytest.approx([1.0, 1.1], abs=0.05)


def test_an_empty_commit_is_an_error() -> None:
    """A client would wait for an item that does not come."""
    client = manual()
    assert client.commit() == ["error"]
    assert client.told[-1]["error"]["code"] == "input_audio_buffer_commit_empty"


def test_items_follow_one_another() -> None:
    """A client that orders items by the one before would show them in any order."""
    client = manual()
    for _ in range(3):
        client.hear(tone(0.5))
        client.commit()
    steps = [it for it in client.told if it["type"] == "input_audio_buffer.committed"]
    names = [it["item_id"] for it in steps]
    assert [it["previous_item_id"] for it in steps] == [None, *names[:2]]
    assert [name for name, _ in client.texts()] == names


def test_a_slow_model_answers_in_order() -> None:
    """Text would be that of another item."""
    client = manual(is_slow=True)
    for _ in range(2):
        client.hear(tone(0.5))
        client.commit()
    assert client.texts() == []
    for _ in range(4):  # a second of sound and one of silence for each
        client.write()
    assert [text for _, text in client.texts()] == ["w0", "w0"]
    names = [it["item_id"] for it in client.told if it["type"] == "input_audio_buffer.committed"]
    assert [name for name, _ in client.texts()] == names


def test_a_failure_is_of_its_item() -> None:
    """A client would wait for the text, or take the rest of the utterance for another one."""
    client = manual(fails_at=1)
    told = client.hear(tone(4))
    assert told == [f"{NAME}.delta", f"{NAME}.failed"]
    failed = client.told[-1]
    assert failed["error"]["code"] == "inference_error"
    assert client.commit() == COMMITTED_ITEM
    assert client.told[-1]["item"]["id"] == failed["item_id"]
    client.fails_at = -1
    client.hear(tone(0.5))
    assert client.commit() == [*COMMITTED_ITEM, f"{NAME}.delta", f"{NAME}.completed"]
    assert client.texts()[0][0] != failed["item_id"]


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_is_cleared_is_forgotten(is_slow: bool) -> None:
    """Words that were taken back would be told, or the next ones of them."""
    client = manual(is_slow=is_slow)
    client.hear(tone(1.5))
    [cleared] = client.say("input_audio_buffer.clear")
    assert cleared["type"] == "input_audio_buffer.cleared"
    if is_slow:
        client.write()
        assert client.texts("delta") == []
    client.is_slow = False
    client.hear(tone(0.5))
    assert client.commit()[-1] == f"{NAME}.completed"
    assert [text for _, text in client.texts()] == ["w0"]
    assert client.commit() == ["error"]


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("behaviour", [1, NEWEST])
def test_a_second_that_was_cleared_and_lost_is_not_transcribed_again(
    behaviour: int, is_early: bool
) -> None:
    """A new worker is asked for the second of an utterance whose first it never had."""
    client = manual(is_slow=True, behaviour=behaviour, recording="on")
    client.hear(tone(2.5))
    client.write()
    if is_early:
        client.say("input_audio_buffer.clear")
    client.post(ev.BackendLost(at_ns=0, lease=1))
    if not is_early:
        client.say("input_audio_buffer.clear")
    client.hear(tone(1.5))
    client.post(ev.BackendReleased(at_ns=0, lease=1))
    places = [(chunk.utterance, chunk.index) for chunk in client.chunks]
    again = [(1, 0)] if behaviour == NEWEST else [(0, 1)]
    assert places == [(0, 0), (0, 1), *again]
    client.is_slow = False
    client.write()
    assert client.commit()[-1] == f"{NAME}.completed"
    assert [text for _, text in client.texts()] == ["w0 w1"]


@pytest.mark.parametrize("coding", ["audio/pcmu", "audio/pcma"])
def test_sound_of_telephones(coding: str) -> None:
    """A telephone's sound would be read as noise, or be taken for three times as short."""
    client = Client()
    client.update(audio={"input": {"format": {"type": coding}, "turn_detection": None}})
    silence = bytes([0xFF if coding == "audio/pcmu" else 0xD5]) * 12_000
    client.say("input_audio_buffer.append", audio=base64.b64encode(silence).decode())
    client.commit()
    assert client.told[-1]["usage"]["seconds"] == 1.5
    assert max(np.abs(np.frombuffer(client.chunks[0].pcm, "<f4"))) < 0.001


def test_settings_and_sound_may_come_before_the_slot() -> None:
    """A client does not wait for `session.created`, and its first words would be lost."""
    client = Client(has_slot=False)
    assert client.update(audio=MANUAL) == []
    assert client.hear(tone(1.5)) == []
    assert client.commit() == ["error"]
    client.post(ev.SlotLeased(at_ns=0, lease=1, slot=0))
    kinds = [it["type"] for it in client.told[1:]]
    assert kinds == ["session.created", "session.updated", f"{NAME}.delta"]
    assert client.commit()[-1] == f"{NAME}.completed"
    assert [text for _, text in client.texts()] == ["w0 w1"]


def test_sound_that_waits_is_bounded() -> None:
    """A client could fill the server's memory before it has a slot, or faster than the model."""
    client = Client(has_slot=False)
    for _ in range(3):
        client.hear(tone(10), piece_s=10)
    assert [it["error"]["code"] for it in client.told] == ["buffer_full"]


def test_a_model_that_is_not_there_is_refused() -> None:
    """A client would believe that another model writes its words."""
    client = Client()
    [error] = client.update(audio={"input": {"transcription": {"model": "gpt-4o-transcribe"}}})
    assert error["error"]["code"] == "model_not_found"
    assert error["error"]["message"].startswith("$.session.audio.input.transcription.model: ")
    [updated] = client.update(audio={"input": {"transcription": {"model": "whisper-1"}}})
    assert updated["session"]["audio"]["input"]["transcription"] == {"model": "whisper-1"}
    assert Client(label="gpt-4o-transcribe").told[0]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("response.create", "unsupported"),
        ("conversation.item.create", "unsupported"),
        ("transcription_session.update", "unsupported"),
        ("nonsense", "unknown_event"),
    ],
)
def test_what_is_not_offered_is_named(kind: str, code: str) -> None:
    """A client would wait for an answer of a model that only writes."""
    client = Client()
    [error] = client.say(kind, event_id="mine")
    assert (error["error"]["code"], error["error"]["event_id"]) == (code, "mine")


def test_a_conversation_is_opened_elsewhere() -> None:
    """A client would wait for answers that do not come."""
    [error] = Client().say("session.update", session={"type": "realtime"})
    assert error["error"]["code"] == "unsupported"
    assert error["error"]["message"].startswith("$.session.type: ")


def test_detection_may_be_turned_on_and_off() -> None:
    """Sound would be in no utterance, or an utterance never end."""
    client = manual()
    client.hear(tone(1))
    client.update(audio={"input": {"turn_detection": {"type": "server_vad"}}})
    assert len(client.texts()) == 1, "what was said is committed"
    client.hear(quiet(1) + tone(1), piece_s=0.1)
    client.update(audio=MANUAL)
    client.hear(tone(1))
    client.commit()
    assert len(client.texts()) == 2


def test_what_is_kept_between_utterances_is_bounded() -> None:
    """An hour of silence would fill the server's memory."""
    client = Client()
    client.hear(quiet(30), piece_s=10)
    own = client.session.snapshot()["own"]
    assert isinstance(own, dict)
    assert own["openai"]["bytes"] <= 13 * SECOND_BYTES
    assert client.chunks == []


@pytest.mark.parametrize("behaviour", [0, NEWEST])
def test_a_session_without_a_word_ends(behaviour: int) -> None:
    """A client that is gone would keep its slot."""
    client = Client(behaviour=behaviour)
    if behaviour:
        assert not [it for it in client.effects if getattr(it, "name", "") == "idle"]
        client.hear(quiet(1))
    told = client.fire("idle")
    assert client.session.end_reason == "idle"
    assert told == ["error"] * bool(behaviour)
    assert not behaviour or client.told[-1]["error"]["code"] == "session_expired"
    assert ef.Close(code=1000, reason="idle") in client.effects
    assert isinstance(client.effects[-1], ef.Release)


def test_who_stops_sending_in_the_middle_of_speech_is_written_down() -> None:
    """Discord sends nothing while its user is quiet: the text never comes."""
    client = Client()
    client.hear(tone(2), piece_s=0.5)
    client.fire("silence")
    told = client.fire("silence")
    assert told[0] == "input_audio_buffer.speech_stopped"
    assert told[-1] == f"{NAME}.completed"
    assert not client.session.snapshot()["own"]["openai"]["speaking"]  # type: ignore[index]


@pytest.mark.parametrize("timer", ["idle", "session"])
def test_what_is_open_at_a_limit_is_written_down(timer: ev.TimerName) -> None:
    """The last words before the end are lost, though they were heard."""
    client = Client(is_slow=True)
    client.update(audio=MANUAL)
    client.hear(tone(1.5))
    client.write()
    if timer == "idle":
        client.fire("idle")
    told = client.fire(timer)
    assert told == COMMITTED_ITEM
    before = len(client.told)
    client.write()
    client.write()
    assert [it["type"] for it in client.told[before:]][-2:] == [f"{NAME}.completed", "error"]
    assert client.told[-1]["error"]["code"] == "session_expired"
    assert client.session.end_reason == {"session": "timeout"}.get(timer, timer)


def test_a_model_that_does_not_come_to_the_end_holds_up_no_end() -> None:
    """A session lasts as long as its model is slow."""
    client = Client(is_slow=True)
    client.update(audio=MANUAL)
    client.hear(tone(3))
    client.fire("session")
    told = client.fire("session")
    assert told == [f"{NAME}.failed", "error"]
    assert client.session.end_reason == "timeout"


STEPS: Final = st.one_of(
    st.tuples(st.sampled_from(["loud", "quiet"]), st.sampled_from([0.02, 0.3, 1.1, 2.5])),
    st.sampled_from([("commit", 0), ("clear", 0), ("detect", 0), ("manual", 0), ("write", 0)]),
    st.tuples(st.just("fails"), st.sampled_from([-1, 0, 1])),
)
EVENT: Final[TypeAdapter[Any]] = TypeAdapter(RealtimeServerEvent)


def play(client: Client, steps: list[tuple[str, float]]) -> None:
    """Take steps in order, and end all utterances."""
    for kind, value in steps:
        match kind:
            case "loud":
                client.hear(tone(value), piece_s=0.5)
            case "quiet":
                client.hear(quiet(value), piece_s=0.5)
            case "commit":
                client.commit()
            case "clear":
                client.say("input_audio_buffer.clear")
            case "detect":
                client.update(audio={"input": {"turn_detection": {"type": "semantic_vad"}}})
            case "manual":
                client.update(audio=MANUAL)
            case "fails":
                client.fails_at = int(value)
            case "write" if client.is_slow:
                client.write()
    client.commit()
    while client.is_slow and len(client.written) < len(client.chunks):
        client.write()


@given(steps=st.lists(STEPS, max_size=12), is_slow=st.booleans())
@settings(max_examples=sample(60, 25), deadline=None)
def test_each_item_has_one_text(steps: list[tuple[str, float]], is_slow: bool) -> None:
    """A client would wait for a text for ever, or read it twice, or as another item's."""
    client, again = Client(is_slow=is_slow), Client(is_slow=is_slow)
    play(client, steps)
    play(again, steps)
    assert client.told == again.told
    for body in client.told:
        EVENT.validate_json(json.dumps(body), strict=True)
    items = [it["item_id"] for it in client.told if it["type"] == "input_audio_buffer.committed"]
    ends = [it for it in client.told if it["type"] in {f"{NAME}.completed", f"{NAME}.failed"}]
    assert [it["item_id"] for it in ends if it["item_id"] in items] == items
    assert {it["type"] for it in ends if it["item_id"] not in items} <= {f"{NAME}.failed"}
    for end in ends:
        if end["type"].endswith("completed"):
            deltas = [text for name, text in client.texts("delta") if name == end["item_id"]]
            assert "".join(deltas).strip() == end["transcript"]
    own = client.session.snapshot()["own"]
    assert isinstance(own, dict)
    assert own["waiting_bytes"] == 0
    assert (own["pending"], own["openai"]["unanswered"], own["openai"]["open"]) == ([], [], None)
