"""The conversation of a session of `openai`: what the model gets, and what is kept."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import attrs
import numpy as np
import pytest

from protocol.machine.openai import OpenAI
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST
from protocol.values.limits import (
    INSTRUCTIONS_CHARS_MAX,
    ITEM_CHARS_MAX,
    ITEMS_CHARS_MAX,
    ITEMS_MAX,
    NS_PER_S,
)
from protocol.values.model import Finalized, Opened, UnitResult
from protocol.wire.codec import parse_frame
from protocol.wire.dialects.openai_shared import (
    METADATA_CHARS_MAX,
    METADATA_MAX,
    METADATA_NAME_CHARS_MAX,
)
from runtime.media.decoder import MediaDecoder, MediaError
from runtime.media.speech_detector import SpeechDetector
from tests.protocol.test_early import LIMITS
from tests.transcripts.media import make_media

RATE_HZ: Final = 24_000
OPENED: Final = ev.ConnectionOpened(
    recording_id="rec-1",
    created_ms=1,
    mode="audio",
    seed=1,
    limits=attrs.evolve(
        LIMITS, session_s=3600, context_tokens=1 << 20, models=("m",), detach_s=30, resume_s=600
    ),
    recording="on",
    behaviour=NEWEST,
    resume_hash="0" * 64,
    endpoint="openai",
    label="m",
)
LOUD: Final = (np.sin(np.arange(RATE_HZ) / 5) * 9000).astype("<i2").tobytes()
QUIET: Final = bytes(2 * RATE_HZ)
SERVER_VAD: Final = {"type": "server_vad"}


@attrs.define
class Client:
    """A client at a session whose model says what it is told to."""

    speaks: bool = False
    has_slot: bool = True
    tokens: int = 0
    sound: bytes = b""
    is_slow: bool = False
    session: Session = attrs.field(init=False)
    now_ns: int = 0
    told: list[dict[str, Any]] = attrs.Factory(list)
    prompts: list[str] = attrs.Factory(list)
    units: list[bool] = attrs.Factory(list)
    done: ev.UnitDone = attrs.field(init=False)
    timers: dict[str, ef.SetTimer] = attrs.Factory(dict)
    detector: SpeechDetector = attrs.Factory(SpeechDetector)
    sees: bool = True
    transcriber: str = ""
    backchannel_ms: int = 0
    behaviour: int = NEWEST
    seen: list[int] = attrs.Factory(list)
    frames: tuple[bytes, ...] = ()
    undecoded: list[ef.DecodeMedia] = attrs.Factory(list)

    def __attrs_post_init__(self) -> None:
        limits = attrs.evolve(
            OPENED.limits,
            can_see=self.sees,
            transcriber=self.transcriber,
            backchannel_ms=self.backchannel_ms,
        )
        opened = attrs.evolve(OPENED, limits=limits, behaviour=self.behaviour)
        self.session, effects = Session.open(opened)
        self._perform(effects)

    def say(self, kind: str, **body: Any) -> list[dict[str, Any]]:
        """Send a message, and return the answers."""
        before = len(self.told)
        self.post(ev.FrameReceived(at_ns=0, frame=json.dumps({"type": kind, **body})))
        return self.told[before:]

    def hear(self, sound: bytes) -> list[str]:
        """Send sound, a second in a second, and return the types of the answers."""
        before = len(self.told)
        for at in range(0, len(sound), 2 * RATE_HZ):
            self.wait(1)
            piece = sound[at : at + 2 * RATE_HZ]
            self.say("input_audio_buffer.append", audio=base64.b64encode(piece).decode())
        return [one["type"] for one in self.told[before:]]

    def wait(self, seconds: float) -> list[str]:
        """Let time pass, with its timers, and return the types of what is told."""
        before, end_ns = len(self.told), self.now_ns + int(seconds * NS_PER_S)
        while due := [one for one in self.timers.values() if one.at_ns <= end_ns]:
            first = min(due, key=lambda one: one.at_ns)
            del self.timers[first.name]
            self.now_ns = max(self.now_ns, first.at_ns)
            self.post(ev.TimerFired(at_ns=0, name=first.name, generation=first.generation))
        self.now_ns = end_ns
        return [one["type"] for one in self.told[before:]]

    def item(self, text: str, **fields: Any) -> list[dict[str, Any]]:
        """Add an item of the user's."""
        content = [{"type": "input_text", "text": text}]
        made = {"type": "message", "role": "user", "content": content, **fields}
        return self.say("conversation.item.create", item=made)

    def knows(self, item_id: str) -> bool:
        """Whether an item can be retrieved."""
        [found] = self.say("conversation.item.retrieve", item_id=item_id)
        return bool(found["type"] == "conversation.item.retrieved")

    def update(self, **session: Any) -> list[dict[str, Any]]:
        """Change settings."""
        return self.say("session.update", session={"type": "realtime", **session})

    def answer(self) -> list[str]:
        """Have the model finish its unit, and return the types of what is told."""
        before = len(self.told)
        self.post(self.done)
        return [one["type"] for one in self.told[before:]]

    def write_down(self, text: str, start_ms: int) -> list[dict[str, Any]]:
        """Have a transcriber write words down, and return what is told."""
        before, end_ms = len(self.told), start_ms + 1000
        words = {"text": text, "start_ms": start_ms, "end_ms": end_ms, "is_last": True}
        self.post(ev.UserTranscribed(at_ns=0, **words))
        return self.told[before:]

    def decode(self) -> None:
        """Have the pictures decoded that are not JPEG, the newest first."""
        while self.undecoded:
            effect = self.undecoded.pop()
            try:
                made = MediaDecoder().decode_here(effect)
            except MediaError as error:
                reason = error.reason
                self.post(ev.MediaRejected(at_ns=0, media=effect.media, reason=reason))
            else:
                pictures = made.pictures
                self.post(ev.MediaDecoded(at_ns=0, media=effect.media, pictures=pictures))

    def lose(self) -> None:
        """Lose the connection."""
        self.post(ev.PeerGone(at_ns=0))

    def come_back(self) -> None:
        """Come back on another one."""
        self.post(ev.PeerAttached(at_ns=0, after=len(self.told) - 1, resume_hash="1" * 64))

    def post(self, event: ev.Event) -> None:
        """Have the session take an event now."""
        self._perform(self.session.step(attrs.evolve(event, at_ns=self.now_ns)))

    def _perform(self, effects: Any) -> None:
        answers = list[ev.Event]()
        for effect in effects:
            match effect:
                case ef.Send(frame=frame):
                    self.told.append(parse_frame(frame))
                case ef.EnterQueue() if self.has_slot:
                    answers.append(ev.SlotLeased(at_ns=0, lease=1, slot=0))
                case ef.OpenBackend(lease=lease, opening=opening):
                    self.prompts.append(opening.instructions)
                    opened = Opened(prompt_length=12)
                    answers.append(ev.BackendOpened(at_ns=0, lease=lease, opened=opened))
                case ef.DecodeMedia(kind="image"):
                    self.undecoded.append(effect)
                case ef.DecodeMedia(media=number):
                    answers.append(ev.MediaDecoded(at_ns=0, media=number, pcm=bytes(64_000)))
                case ef.DetectSpeech():
                    answers.extend(self.detector.detect(effect, 0))
                case ef.StartUnit(unit=unit):
                    self.units.append(unit.force_listen)
                    self.seen.append(len(unit.frames))
                    self.frames = unit.frames
                    listens = unit.force_listen or not self.speaks
                    text = "" if listens else "word "
                    made: dict[str, Any] = {} if listens else {"pcm": self.sound}
                    made |= {
                        "decided_ids": (1,) * self.tokens,
                        "kv_length": 100 * self.tokens // 10,
                    }
                    result = UnitResult(index=unit.index, is_listen=listens, text=text, **made)
                    self.done = ev.UnitDone(at_ns=0, result=result)
                    if not self.is_slow:
                        answers.append(self.done)
                case ef.Interrupt():
                    cut = attrs.evolve(self.done.result, is_listen=True, text="", cut=0)
                    self.done = attrs.evolve(self.done, result=cut)
                case ef.StartFinalize(index=index):
                    done = Finalized(index=index, kv_length=20)
                    answers.append(ev.FinalizeDone(at_ns=0, finalized=done))
                case ef.SetTimer(name=name):
                    self.timers[name] = effect
                case ef.CancelTimer(name=name):
                    self.timers.pop(name, None)
        for answer in answers:
            self.post(answer)


def test_the_prompt_has_the_items_that_are_there() -> None:
    """A client that sets its instructions after its history would lose the history."""
    client = Client()
    client.item("good morning")
    client.item("forget this", id="item_1")
    client.update(instructions="Be brief.")
    client.say("conversation.item.delete", item_id="item_1")
    assert client.told[-2]["session"]["instructions"] == "Be brief."
    client.hear(QUIET)
    client.item("too late")
    client.update(instructions="Be long.")
    assert client.told[-1]["session"]["instructions"] == "Be brief."
    client.hear(QUIET)
    assert client.prompts == ["Be brief.\nuser: good morning"]


@pytest.mark.parametrize("is_instructions", [True, False])
def test_a_prompt_of_items_is_bounded(is_instructions: bool) -> None:
    """A client could make a prompt of any length."""
    client = Client()
    for _ in range(INSTRUCTIONS_CHARS_MAX // ITEM_CHARS_MAX - 1):
        assert client.item("x" * ITEM_CHARS_MAX)[-1]["type"] == "conversation.item.done"
    long = "x" * ITEM_CHARS_MAX
    [error] = client.update(instructions=long) if is_instructions else client.item(long)
    assert error["error"]["code"] == "invalid_payload"
    client.hear(QUIET)
    assert len(client.prompts[0]) <= INSTRUCTIONS_CHARS_MAX


def test_what_is_kept_of_items_is_bounded() -> None:
    """A client could fill the server's memory with items, long or many."""
    client = Client()
    client.hear(QUIET)
    parts = [{"type": "input_text", "text": "x" * ITEM_CHARS_MAX}] * 5
    fives = [client.item("", content=parts)[-1]["item"]["id"] for _ in range(8)]
    assert [client.knows(item_id) for item_id in fives] == [False] * 5 + [True] * 3
    assert 3 * 5 * ITEM_CHARS_MAX <= ITEMS_CHARS_MAX < 4 * 5 * ITEM_CHARS_MAX
    small = [client.item("x")[-1]["item"]["id"] for _ in range(ITEMS_MAX + 2)]
    assert [client.knows(item_id) for item_id in small] == [False] * 2 + [True] * ITEMS_MAX


@pytest.mark.parametrize(
    ("behaviour", "detection"), [(0, None), (0, SERVER_VAD), (NEWEST, SERVER_VAD)]
)
def test_silence_ends_a_turn_that_its_client_ended(behaviour: int, detection: object) -> None:
    """A client that sends no sound after its question would wait for ever."""
    client = Client(behaviour=behaviour)
    client.update(audio={"input": {"turn_detection": detection}})
    client.hear(QUIET)
    client.say("input_audio_buffer.commit")
    assert len(client.units) == 1
    client.wait(60)
    assert len(client.units) == 7, "silence is heard while an answer is due, and no longer"


def test_an_answer_that_does_not_come_has_failed() -> None:
    """A client that asked would wait for ever; or the model would be fed for ever."""
    client = Client()
    client.hear(QUIET)
    client.say("response.create")
    assert client.wait(60) == ["response.created", "response.done"]
    assert client.told[-1]["response"]["status"] == "failed"
    assert client.told[-1]["response"]["status_details"]["error"]["code"] == "no_speech"


@pytest.mark.parametrize(
    ("metadata", "is_taken"),
    [
        ({f"{number}": "x" * METADATA_CHARS_MAX for number in range(METADATA_MAX)}, True),
        ({"n" * METADATA_NAME_CHARS_MAX: ""}, True),
        ({f"{number}": "" for number in range(METADATA_MAX + 1)}, False),
        ({"n" * (METADATA_NAME_CHARS_MAX + 1): ""}, False),
        ({"a": "x" * (METADATA_CHARS_MAX + 1)}, False),
        ({"a": 7}, False),
    ],
    ids=["most", "a name", "too many", "a name too long", "too long", "a number"],
)
def test_metadata_of_a_response_is_bounded(metadata: dict[str, Any], is_taken: bool) -> None:
    """A client could have the server keep, and send back, as much as it liked."""
    client = Client()
    client.hear(QUIET)
    client.speaks = True
    told = client.say("response.create", response={"metadata": metadata})
    assert (told[0]["type"] == "response.created") is is_taken
    if is_taken:
        assert told[0]["response"]["metadata"] == metadata
    else:
        assert told[0]["error"]["message"].startswith("$.response.metadata")


def test_an_answer_ends_before_another_begins() -> None:
    """A client would put one answer's words into another."""
    client = Client(speaks=True)
    client.hear(QUIET * 3)
    client.say("response.create")
    [name] = {one["response"]["id"] for one in client.told if one["type"] == "response.created"}
    *_, done = client.say("response.cancel", response_id=name)
    assert (done["type"], done["response"]["id"]) == ("response.done", name)
    client.hear(QUIET * 2)
    states = [
        (one["type"], one["response"]["id"] == name)
        for one in client.told
        if one["type"] in {"response.created", "response.done"}
    ]
    assert states == [
        ("response.created", True),
        ("response.done", True),
        ("response.created", False),
    ]


def test_who_interrupts_is_listened_to_until_the_end_of_the_speech() -> None:
    """The model would talk over its user."""
    client = Client(speaks=True)
    client.hear(QUIET * 2)
    kinds = client.hear(LOUD * 2)
    assert kinds.index("input_audio_buffer.speech_started") < kinds.index("response.done")
    assert client.told[-1]["response"]["status_details"]["reason"] == "turn_detected"
    assert client.units[2:4] == [True, True]
    kinds = client.hear(QUIET)
    assert kinds.index("input_audio_buffer.committed") < kinds.index("response.created")


def test_who_speaks_first_is_not_spoken_over() -> None:
    """The model would begin amid its user's words, in a second that it had already begun."""
    client = Client(speaks=True, is_slow=True)
    client.hear(QUIET)
    assert client.hear(LOUD) == ["input_audio_buffer.speech_started"]
    assert "response.created" not in client.answer()


@pytest.mark.parametrize("is_spoken", [True, False])
def test_an_answer_that_is_not_wanted_any_more_is_cancelled(is_spoken: bool) -> None:
    """A client that asked, and then spoke or cancelled, would wait for its answer for ever."""
    client = Client()
    client.hear(QUIET)
    client.say("response.create")
    [error] = client.say("response.cancel", response_id="resp_9")
    assert error["error"]["code"] == "response_cancel_not_active"
    before = len(client.told)
    client.hear(LOUD) if is_spoken else client.say("response.cancel")
    made, done = [one for one in client.told[before:] if one["type"].startswith("response.")]
    assert (made["type"], done["type"]) == ("response.created", "response.done")
    assert done["response"]["status"] == "cancelled"
    assert not [kind for kind in client.wait(60) if kind.startswith("response.")]


@pytest.mark.parametrize(("behaviour", "listened"), [(0, 4), (NEWEST, 3)])
def test_seconds_that_were_held_back_are_no_answer(behaviour: int, listened: int) -> None:
    """A client that speaks fast and asks would be told that the model does not speak."""
    client = Client(is_slow=True, behaviour=behaviour)
    detection = {"type": "server_vad", "create_response": False}
    client.update(audio={"input": {"turn_detection": detection}})
    sound = base64.b64encode(QUIET * 4).decode()
    client.say("input_audio_buffer.append", audio=sound)
    client.say("response.create")
    client.is_slow, client.speaks = False, True
    told = client.answer()
    assert client.units == [True] * listened + [False] * (4 - listened)
    assert [*told, *client.wait(3)][0] == "response.created"


def test_an_answer_goes_on_when_its_client_is_back() -> None:
    """A client that lost its connection amid an answer would never hear the answer's end."""
    client = Client(speaks=True)
    client.hear(QUIET * 2)
    client.lose()
    client.wait(5)
    client.come_back()
    client.speaks = False
    assert "response.done" in client.wait(5)


def test_speech_that_was_committed_has_an_id_when_it_ends() -> None:
    """Its second half could not be named."""
    client = Client()
    client.hear(QUIET + LOUD)
    client.say("input_audio_buffer.commit")
    client.hear(QUIET)
    items = [one["item"]["id"] for one in client.told if one["type"] == "conversation.item.done"]
    stopped = [one for one in client.told if one["type"] == "input_audio_buffer.speech_stopped"]
    assert len(items) == len(set(items)) == 2
    assert [one["item_id"] for one in stopped] == items[1:]


def test_speech_is_where_it_is_in_the_client_s_sound() -> None:
    """A client that counts its own samples would look for speech elsewhere."""
    client = Client()
    client.update(audio={"input": {"turn_detection": None}})
    client.hear(LOUD + QUIET * 4)
    client.update(audio={"input": {"turn_detection": {"type": "server_vad"}}})
    client.hear(QUIET + LOUD)
    [began] = [one for one in client.told if one["type"] == "input_audio_buffer.speech_started"]
    assert began["audio_start_ms"] == 6000 - 300


def test_an_item_is_where_its_client_wants_it() -> None:
    """A conversation would be told in another order than it was held."""
    client = Client()
    client.item("third", id="item_3")
    client.say("conversation.item.create", previous_item_id="root", item=_user("first", "item_1"))
    told = client.say(
        "conversation.item.create", previous_item_id="item_1", item=_user("second", "item_2")
    )
    assert [one["previous_item_id"] for one in told] == ["item_1"] * 2
    [again] = client.item("twice", id="item_3")
    assert again["error"]["param"] == "item.id"
    client.hear(QUIET)
    assert client.prompts == ["user: first\nuser: second\nuser: third"]


def _shown(client: Client, count: int = 1) -> str:
    """Show pictures; returns what is told first."""
    jpeg = make_media({"$jpeg": "64x48", "$before": "data:image/jpeg;base64,"})
    content = [{"type": "input_image", "image_url": jpeg}] * count
    told = client.say(
        "conversation.item.create", item={"type": "message", "role": "user", "content": content}
    )
    return str(told[0].get("error", {}).get("code", told[0]["type"]))


def test_a_picture_goes_with_the_next_second() -> None:
    """The model would see it later, twice, or never; or the session keep all that was shown."""
    client = Client()
    client.hear(QUIET)
    assert _shown(client) == _shown(client, 2) == "conversation.item.added"
    client.hear(QUIET * 2)
    assert _shown(client, 4) == "conversation.item.added"
    assert _shown(client) == "invalid_payload"
    client.hear(QUIET * 2)
    assert client.seen == [0, 3, 0, 4, 0]
    assert _shown(client) == "conversation.item.added"
    kind = client.session.kind
    assert isinstance(kind, OpenAI)
    kept = kind.conversation.items.values()
    assert [part for item in kept for part in item.parts if part.picture] == []


def test_only_a_picture_is_shown() -> None:
    """A client would show by an item of text what its role may not show."""
    client = Client()
    client.hear(QUIET)
    jpeg = make_media({"$jpeg": "64x48", "$before": "data:image/jpeg;base64,"})
    part = {"type": "input_text", "text": "look", "image_url": jpeg}
    for role in ("user", "system"):
        item = {"type": "message", "role": role, "content": [part]}
        client.say("conversation.item.create", item=item)
    client.hear(QUIET)
    assert client.seen == [0, 0]


def test_words_stand_with_the_sound_that_the_model_got() -> None:
    """What was said last would be told of an item before, once a client has cleared its sound."""
    client = Client(transcriber="scribe")
    client.update(audio={"input": {"turn_detection": None, "transcription": {}}})
    half = base64.b64encode(QUIET[: len(QUIET) // 2]).decode()
    for _ in range(4):
        client.say("input_audio_buffer.append", audio=half)
        client.say("input_audio_buffer.clear")
    found = list[tuple[str, str]]()
    for second, text in enumerate(["one", "two"]):
        client.hear(QUIET)
        (made,) = [it for it in client.say("input_audio_buffer.commit") if "item_id" in it][:1]
        told = client.write_down(text, second * 1000)
        found += [(made["item_id"], text)] * (told[-1].get("item_id") == made["item_id"])
    assert [text for _, text in found] == ["one", "two"]


def test_a_model_that_sees_nothing_is_shown_nothing() -> None:
    """A client would wait for an answer to a picture that the model did not see."""
    client = Client(sees=False)
    client.hear(QUIET)
    assert _shown(client) == "unsupported"
    client.hear(QUIET)
    assert client.seen == [0, 0]


def _user(text: str, item_id: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"id": item_id, "type": "message", "role": "user", "content": content}
