"""What the clients of OpenAI's Realtime API do that people have: each test is one of their ways."""

from __future__ import annotations

import base64
from typing import Any, Final

import pytest

from protocol.machine.openai import OpenAI
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST, TAKES_TOOLS
from protocol.values.limits import (
    ANSWER_UNITS,
    APPEND_BYTES_MAX,
    BACKLOG_S_MAX,
    NS_PER_S,
    UNITS_PENDING_MAX,
)
from protocol.values.messages import QueuePlace
from tests.protocol import test_dictation as dictation
from tests.protocol.test_openai_items import LOUD, QUIET, Client

SESSION_S: Final = 3600
PLACE: Final = QueuePlace(
    position=1, estimated_wait_s=9, ticket_id="ticket_000000000000", queue_length=1
)
PHONE: Final = {"type": "audio/pcmu"}
PHONE_PIECE: Final = base64.b64encode(b"\xff" * 160).decode()
"""Twenty milliseconds of silence on a telephone, as Twilio sends them."""


def formats(told: list[dict[str, Any]]) -> list[str]:
    """The forms of the client's sound that are told."""
    return [it["session"]["audio"]["input"]["format"]["type"] for it in told]


# -- the form of the sound -------------------------------------------------------------------------


def test_sound_before_the_settings_does_not_fix_its_form() -> None:
    """Twilio's sample sends media before `session.update`; the call is noise to its end."""
    client = Client()
    client.say("input_audio_buffer.append", audio=PHONE_PIECE)
    told = client.update(audio={"input": {"format": PHONE}, "output": {"format": PHONE}})
    assert formats(told) == ["audio/pcmu"]
    for _ in range(50):
        client.say("input_audio_buffer.append", audio=PHONE_PIECE)
    assert client.units == [False]  # a second of the telephone's


@pytest.mark.parametrize("way", ["input", "output"])
def test_a_form_that_comes_too_late_is_refused_by_name(way: str) -> None:
    """A client waits for a form that never comes, and is not told."""
    client = Client()
    client.hear(QUIET)
    [told] = client.update(audio={way: {"format": PHONE}})
    assert told["error"]["param"] == f"session.audio.{way}.format"
    [told] = client.update(audio={way: {"format": {"type": "audio/pcm"}}})
    assert told["type"] == "session.updated"


def test_a_new_form_forgets_what_was_found_in_the_old_one() -> None:
    """Times of speech count sound that was read as something else."""
    client = Client()
    client.say("input_audio_buffer.append", audio=base64.b64encode(LOUD[:24_000]).decode())
    client.update(audio={"input": {"format": PHONE}})
    [told] = client.say("input_audio_buffer.commit")
    assert told["error"]["code"] == "input_audio_buffer_commit_empty"


@pytest.mark.parametrize("detection", [None, {"type": "server_vad"}])
def test_a_transcription_takes_a_late_form_too(detection: object) -> None:
    """The same of what is only written down."""
    client = dictation.Client()
    client.update(audio={"input": {"turn_detection": detection}})
    client.say("input_audio_buffer.append", audio=PHONE_PIECE)
    told = client.update(audio={"input": {"format": PHONE}})
    assert formats(told) == ["audio/pcmu"]
    client.say("input_audio_buffer.append", audio=base64.b64encode(bytes(8_000)).decode())
    [refused] = client.update(audio={"input": {"format": {"type": "audio/pcma"}}})
    assert refused["error"]["param"] == "session.audio.input.format"


# -- settings that change nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        {"max_output_tokens": 4096},
        {"audio": {"output": {"speed": 1.2}}},
        {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}}}},
        {"audio": {"input": {"format": {"type": "audio/pcmu", "rate": 8000}}}},
        {"audio": {"output": {"voice": {"id": "marin"}}}},
    ],
    ids=str,
)
def test_a_setting_that_changes_nothing_costs_no_other(setting: dict[str, Any]) -> None:
    """Instructions are lost for the sake of a bound that its client never comes near."""
    client = Client()
    [told] = client.update(instructions="Be brief.", **setting)
    assert told["session"]["instructions"] == "Be brief."
    assert told["session"]["max_output_tokens"] == "inf"


@pytest.mark.parametrize(
    "setting",
    [
        {"max_output_tokens": "many"},
        {"max_output_tokens": 0},
        {"audio": {"output": {"speed": 3}}},
        {"audio": {"output": {"voice": {"name": "marin"}}}},
        {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "eager"}}}},
        {"audio": {"input": {"format": {"type": "audio/pcmu", "rate": 24000}}}},
        {"audio": {"input": {"format": {"type": "audio/opus"}}}},
    ],
    ids=str,
)
def test_a_value_that_the_api_does_not_have_is_refused(setting: dict[str, Any]) -> None:
    """A client that misspells a setting is not told."""
    [told] = Client().update(**setting)
    assert told["type"] == "error"


def test_a_developer_speaks_as_the_system() -> None:
    """The role that newer clients send is refused."""
    client = Client()
    told, _ = client.item("Be brief.", role="developer")
    assert told["item"]["role"] == "system"
    client.hear(QUIET)
    assert client.prompts == ["system: Be brief."]


@pytest.mark.parametrize("frame", [b"\x00", "{", '{"type": NaN}', "[]"], ids=str)
def test_an_unreadable_frame_is_answered(frame: str | bytes) -> None:
    """A client that sends one wrong byte loses its call."""
    client = Client()
    client.post(ev.FrameReceived(at_ns=0, frame=frame))
    is_binary = isinstance(frame, bytes)
    assert client.told[-1]["error"]["code"] == ("invalid_frame" if is_binary else "invalid_json")
    assert client.update()[0]["type"] == "session.updated"


# -- asked, or by itself ---------------------------------------------------------------------------

MANUAL: Final = {"input": {"turn_detection": None}}


def append(client: Client, sound: bytes) -> list[dict[str, Any]]:
    """Send sound in one piece."""
    return client.say("input_audio_buffer.append", audio=base64.b64encode(sound).decode())


@pytest.mark.parametrize(
    "detection", [None, {"type": "server_vad", "create_response": False}], ids=["null", "false"]
)
def test_a_model_that_is_to_be_asked_speaks_once_for_each_request(detection: object) -> None:
    """A client of push to talk is answered before it has spoken, and again when it was answered."""
    client = Client(speaks=True)
    client.update(audio={"input": {"turn_detection": detection}})
    assert "response.created" not in client.hear(QUIET * 3)
    client.say("input_audio_buffer.commit")
    before = len(client.told)
    client.say("response.create")
    client.speaks = False
    client.wait(2)
    client.speaks = True
    client.hear(QUIET * 3)
    told = [it["type"] for it in client.told[before:]]
    assert told.count("response.created") == told.count("response.done") == 1


def test_a_response_answers_the_last_committed_sound() -> None:
    """Question and silence in one append: the model answers the question's first second."""
    client = Client(is_slow=True)
    client.update(audio=MANUAL)
    append(client, QUIET * 3 + QUIET[:24_000])
    client.say("input_audio_buffer.commit")
    client.say("response.create")
    client.is_slow, client.speaks = False, True
    told = client.answer()
    assert client.units == [True, True, True, False]
    assert told[0] == "response.created"


def test_a_response_is_not_waited_for() -> None:
    """Push to talk: the rest of a second comes after a second and a half, as silence."""
    client = Client()
    client.update(audio=MANUAL)
    append(client, QUIET[:24_000])
    assert client.units == []
    client.say("input_audio_buffer.commit")
    assert client.units == [True]
    client.speaks = True
    assert client.say("response.create")[0]["type"] == "response.created"
    assert client.wait(1.0), "the next second of the answer comes in a second"


def test_silence_is_heard_while_an_answer_is_due_or_goes_on_and_no_longer() -> None:
    """An answer was cut short for want of sound, or the model was fed silence for ever."""
    client = Client()
    client.update(audio=MANUAL)
    client.hear(QUIET)
    client.say("input_audio_buffer.commit")
    client.say("response.create")
    assert len(client.units) == 2  # the question, and the first second of silence
    client.wait(ANSWER_UNITS - 1)
    assert len(client.units) == 1 + ANSWER_UNITS
    client.speaks = True  # in the last second in which it may
    client.wait(20)
    assert len(client.units) == 21 + ANSWER_UNITS
    client.speaks = False
    told = client.wait(60)
    assert len(client.units) == 23 + ANSWER_UNITS
    assert told.count("response.done") == 1
    assert client.told[-1]["response"]["status"] == "completed"


def test_an_answer_is_due_for_as_long_after_sound_that_waits() -> None:
    """Who asked behind a long question was told that there is no answer, before it was heard."""
    client = Client(is_slow=True)
    client.update(audio=MANUAL)
    append(client, QUIET * 10)
    client.say("input_audio_buffer.commit")
    client.say("response.create")
    client.is_slow = False
    client.answer()
    assert len(client.units) == 10
    client.wait(60)
    assert len(client.units) == 10 + ANSWER_UNITS
    assert client.told[-1]["response"]["status"] == "failed"


def test_the_model_speaks_first_at_once() -> None:
    """A greeting that is asked for comes after a second and a half."""
    client = Client(speaks=True)
    assert client.say("response.create")[0]["type"] == "response.created"


# -- sound that comes faster than it was spoken ----------------------------------------------------


def test_no_sound_that_was_taken_is_dropped() -> None:
    """A file in one append, or a stall of the network: the answer is to half of a question."""
    client = Client(is_slow=True)
    append(client, QUIET * 20)
    client.is_slow = False
    client.answer()
    assert len(client.units) == 20


def test_an_answer_is_due_after_all_that_waits() -> None:
    """A question of half a minute at once is committed, and never answered."""
    client = Client(is_slow=True)
    append(client, LOUD * 30 + QUIET)
    client.is_slow = False
    client.answer()
    assert len(client.units) == 31
    client.speaks = True
    assert "response.created" in client.wait(3)


def test_sound_that_waits_is_bounded() -> None:
    """A client fills the memory of its server; or its sound is dropped, and it is not told."""
    client = Client(is_slow=True)
    half = QUIET * (BACKLOG_S_MAX // 2)
    assert not append(client, half)
    assert not append(client, half)
    assert not append(client, QUIET * UNITS_PENDING_MAX)
    [told] = append(client, QUIET * 2)
    assert told["error"]["code"] == "buffer_full"
    assert told["error"]["param"] == "audio"
    [told] = append(client, bytes(APPEND_BYTES_MAX + 2))
    assert told["error"]["code"] == "invalid_payload"


def test_only_sound_in_no_item_is_cleared() -> None:
    """What was committed while the model was busy is not heard."""
    client = Client(is_slow=True)
    client.update(audio=MANUAL)
    append(client, QUIET * 8)
    client.say("input_audio_buffer.commit")
    append(client, QUIET * 2)
    client.say("input_audio_buffer.clear")
    client.is_slow = False
    client.answer()
    assert len(client.units) == 8


@pytest.mark.parametrize(("behaviour", "units"), [(0, 0), (NEWEST, 1)])
def test_an_old_session_clears_what_is_committed(behaviour: int, units: int) -> None:
    """Its recording no longer replays."""
    client = Client(behaviour=behaviour)
    append(client, QUIET[:24_000])
    client.say("input_audio_buffer.commit")
    client.say("input_audio_buffer.clear")
    append(client, QUIET[24_000:])
    assert len(client.units) == units


# -- who stops sending -----------------------------------------------------------------------------


def test_who_stops_sending_in_the_middle_of_speech_is_answered() -> None:
    """Discord sends nothing while its user is quiet: the end of speech is never found."""
    client = Client()
    client.hear(LOUD * 2)
    assert "input_audio_buffer.speech_stopped" not in [it["type"] for it in client.told]
    client.speaks = True
    told = client.wait(5)
    assert "input_audio_buffer.speech_stopped" in told
    assert "response.created" in told


def test_what_is_heard_at_the_limit_becomes_an_item() -> None:
    """The last words of an hour are in no item."""
    client = Client()
    client.hear(LOUD * 2)
    client.now_ns = SESSION_S * NS_PER_S
    told = client.hear(LOUD)
    assert "input_audio_buffer.committed" in told
    assert client.told[-1]["error"]["code"] == "session_expired"
    assert client.session.end_reason == "timeout"


def expired(**how: Any) -> tuple[Client, list[str]]:
    """A client of a transcriber who speaks at the limit; and what it is told then."""
    client = Client(transcriber="tiny", **how)
    client.update(audio={"input": {"transcription": {"model": "tiny"}}})
    client.wait(SESSION_S - 2.5)
    client.hear(LOUD * 2)
    return client, client.wait(1)


def test_the_last_words_are_waited_for() -> None:
    """The last words of an hour are in an item that is never completed."""
    client, told = expired()
    assert "input_audio_buffer.committed" in told
    assert client.session.end_reason is None
    assert not client.hear(LOUD)
    told = [it["type"] for it in client.write_down("good night", 1000)]
    assert told[-2:] == ["conversation.item.input_audio_transcription.completed", "error"]
    assert client.session.end_reason == "timeout"
    assert client.told[-1]["error"]["code"] == "session_expired"


def test_last_words_that_say_nothing_are_written_down_as_that() -> None:
    """A cough keeps a session for ten seconds."""
    client, _ = expired()
    completed, error = client.write_down("", 1000)
    assert (completed["transcript"], error["error"]["code"]) == ("", "session_expired")


def test_last_words_that_never_come_are_told() -> None:
    """A client waits for words for ever."""
    client, _ = expired()
    [refused] = client.say("response.create")
    assert refused["error"]["code"] == "session_expired"
    assert client.wait(11)[-2:] == ["conversation.item.input_audio_transcription.failed", "error"]
    assert client.session.end_reason == "timeout"


@pytest.mark.parametrize("how", [{"behaviour": 1}, {"speaks": True}], ids=str)
def test_a_session_ends_at_once_that_waits_for_no_words(how: dict[str, Any]) -> None:
    """An hour has ten seconds more; or a recording no longer replays."""
    client, _ = expired(**how)
    if "speaks" in how:
        client = Client()
        client.wait(SESSION_S)
    assert client.session.end_reason == "timeout"


# -- the time of a session -------------------------------------------------------------------------


def test_a_client_may_be_silent_at_first() -> None:
    """A page that waits for push to talk is dead after half a minute."""
    client = Client()
    assert not client.wait(SESSION_S - 10)
    client.speaks = True
    assert "response.created" in [it["type"] for it in client.say("response.create")]
    assert "error" in client.wait(20)
    [error] = [it["error"] for it in client.told if it["type"] == "error"]
    assert (error["code"], error["type"]) == ("session_expired", "invalid_request_error")
    assert client.session.end_reason == "timeout"


def test_a_wait_in_the_queue_does_not_count() -> None:
    """A session that waited is over before the time that it was told."""
    client = Client(has_slot=False)
    client.wait(2 * SESSION_S)
    client.post(ev.TicketMoved(at_ns=0, place=PLACE))
    [told] = client.told
    assert told["type"] == "rate_limits.updated"
    assert told["rate_limits"][0]["reset_seconds"] == PLACE.estimated_wait_s
    client.post(ev.SlotLeased(at_ns=0, lease=1, slot=0))
    assert client.told[-2]["session"]["expires_at"] == 3 * SESSION_S
    assert not client.wait(SESSION_S - 1)
    assert client.wait(2) == ["error"]


# -- options of one response -----------------------------------------------------------------------


def done(client: Client) -> dict[str, Any]:
    """The last response that is over."""
    [*_, last] = [it["response"] for it in client.told if it["type"] == "response.done"]
    found: dict[str, Any] = last
    return found


def test_one_response_may_be_text() -> None:
    """A client that asks for text gets sound, and no word of it."""
    client = Client(speaks=True)
    client.update(audio=MANUAL)
    told = client.say("response.create", response={"output_modalities": ["text"]})
    assert "response.output_text.delta" in [it["type"] for it in told]
    client.speaks = False
    client.wait(3)
    assert done(client)["output_modalities"] == ["text"]
    client.speaks = True
    told = client.say("response.create")
    assert told[0]["response"]["output_modalities"] == ["audio"]


def test_the_first_response_may_have_instructions() -> None:
    """A greeting is spoken by other instructions than its own; later ones are ignored."""
    client = Client(speaks=True)
    client.update(instructions="Be brief.", audio=MANUAL)
    client.say("response.create", response={"instructions": "Greet the user."})
    assert client.prompts == ["Greet the user."]
    client.say("response.cancel")
    assert done(client)["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}


@pytest.mark.parametrize("behaviour", [1, NEWEST])
def test_instructions_that_come_too_late_cost_no_response(behaviour: int) -> None:
    """LiveKit's `generate_reply(instructions=...)` waits ten seconds for a response, and fails."""
    client = Client(speaks=True, behaviour=behaviour)
    client.update(audio=MANUAL)
    client.say("response.create")
    client.say("response.cancel")
    told = client.say("response.create", response={"instructions": "Say goodbye."})
    if behaviour < NEWEST:
        found = told[0]["error"]["code"], told[0]["error"]["param"]
        assert found == ("unsupported", "response.instructions")
        return
    assert "response.created" in client.wait(3)
    client.speaks = False
    client.wait(3)
    assert done(client)["status"] == "completed"
    details = done(client)["status_details"]
    assert (details["type"], details["error"]["code"]) == ("completed", "unsupported")
    assert details["error"]["message"].startswith("$.response.instructions: ")
    client.speaks = True
    client.say("response.create")
    client.speaks = False
    client.wait(3)
    assert done(client)["status_details"] is None


def test_a_response_ends_at_its_bound() -> None:
    """A client pays for tokens that it did not want."""
    client = Client(speaks=True, tokens=10)
    client.update(audio=MANUAL)
    client.say("response.create", response={"max_output_tokens": 15})
    client.wait(10)
    response = done(client)
    assert response["status"] == "incomplete"
    assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert response["max_output_tokens"] == 15
    assert response["usage"]["output_tokens"] == 20


def test_the_tokens_of_the_input_are_counted() -> None:
    """A client that counts what it uses counts half."""
    client = Client(speaks=True, tokens=10)
    client.update(audio=MANUAL)
    client.say("response.create")
    client.say("response.cancel")
    assert done(client)["usage"] == {"total_tokens": 100, "input_tokens": 90, "output_tokens": 10}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}], ids=str)
def test_a_choice_of_tools_is_refused_by_name(choice: object) -> None:
    """A client waits for a call that no model makes."""
    client = Client(speaks=True)
    [told] = client.say("response.create", response={"tool_choice": choice})
    assert told["error"]["param"] == "response.tool_choice"
    assert client.say("response.create", response={"tool_choice": "none"})


# -- what was played of a response -----------------------------------------------------------------


def spoken() -> tuple[Client, str]:
    """A client that was answered for three seconds; and the item of the answer."""
    client = Client(speaks=True, sound=bytes(4 * 24_000))
    client.update(audio=MANUAL)
    client.say("response.create")
    client.wait(2.5)
    client.say("response.cancel")
    return client, done(client)["output"][0]["id"]


def transcript(client: Client, item_id: str) -> str:
    """The words of an item's sound."""
    [told] = client.say("conversation.item.retrieve", item_id=item_id)
    found: str = told["item"]["content"][0]["transcript"]
    return found


def test_words_that_were_not_played_are_forgotten() -> None:
    """A client shows its user words that nobody has heard."""
    client, item_id = spoken()
    assert transcript(client, item_id) == "word word word "
    [told] = client.say("conversation.item.truncate", item_id=item_id, audio_end_ms=2500)
    assert told["type"] == "conversation.item.truncated"
    assert transcript(client, item_id) == "word word "
    [told] = client.say("conversation.item.truncate", item_id=item_id, audio_end_ms=2600)
    assert told["error"]["param"] == "audio_end_ms"
    client.say("conversation.item.truncate", item_id=item_id, audio_end_ms=0)
    assert transcript(client, item_id) == ""


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"audio_end_ms": 3001}, "audio_end_ms"),
        ({"audio_end_ms": 1, "content_index": 1}, "content_index"),
        ({"audio_end_ms": 1, "item_id": "item_user"}, "item_id"),
        ({"audio_end_ms": 1, "item_id": "item_text"}, "content_index"),
    ],
    ids=str,
)
def test_what_cannot_be_truncated_is_an_error(wrong: dict[str, Any], param: str) -> None:
    """A client that counts wrong is told that all is well."""
    client, item_id = spoken()
    client.item("hello", id="item_user")
    content = [{"type": "output_text", "text": "hello"}]
    client.item("", id="item_text", role="assistant", content=content)
    [told] = client.say("conversation.item.truncate", **{"item_id": item_id, **wrong})
    assert (told["error"]["code"], told["error"]["param"]) == ("invalid_payload", param)


def test_a_response_in_progress_is_cancelled_before_it_is_truncated() -> None:
    """Its words go on after the cut."""
    client = Client(speaks=True)
    client.update(audio=MANUAL)
    told = client.say("response.create")
    [item_id] = [it["item"]["id"] for it in told if it["type"] == "response.output_item.added"]
    [error] = client.say("conversation.item.truncate", item_id=item_id, audio_end_ms=0)
    assert error["error"]["param"] == "item_id"


# -- tools ---------------------------------------------------------------------------------------

CLOCK: Final = {
    "type": "function",
    "name": "clock",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {}},
}


def test_tools_cost_no_other_setting() -> None:
    """Pipecat is mute, for its first update has a tool, and all of it is refused."""
    client = Client()
    [told] = client.update(instructions="Be brief.", tools=[{**CLOCK, "strict": True}])
    assert told["session"]["instructions"] == "Be brief."
    assert told["session"]["tools"] == [CLOCK]
    assert told["session"]["tool_choice"] == "none", "it says that no tool is called"
    [told] = client.update(tools=[])
    assert (told["session"]["tools"], told["session"]["tool_choice"]) == ([], "auto")


@pytest.mark.parametrize("behaviour", [TAKES_TOOLS - 1, TAKES_TOOLS])
def test_only_sessions_that_take_tools_have_calls(behaviour: int) -> None:
    """A bound on calls would need a number of its own: older recordings would have reached it."""
    client = Client(behaviour=behaviour)
    assert isinstance(client.session.kind, OpenAI)
    [told] = client.update(tools=[CLOCK])
    takes_tools = behaviour == TAKES_TOOLS
    assert told["type"] == ("session.updated" if takes_tools else "error")
    assert [it.name for it in client.session.kind.settings.tools] == ["clock"] * takes_tools


def test_a_tool_that_a_server_would_call_is_left_out() -> None:
    """The secret of a client's own server comes back in every update, or costs the update."""
    client = Client()
    server = {"type": "mcp", "server_label": "mine", "authorization": "secret"}
    [told] = client.update(tools=[server, CLOCK])
    assert told["session"]["tools"] == [CLOCK]


@pytest.mark.parametrize(
    "tools",
    [[{"type": "function"}], [{**CLOCK, "name": "a b"}], ["clock"], [CLOCK] * 65, {}],
    ids=["no name", "no such name", "no object", "too many", "no list"],
)
def test_what_is_no_tool_is_refused(tools: object) -> None:
    """A client that misspells its tool waits for a call of it."""
    [told] = Client().update(tools=tools)
    assert told["error"]["param"].startswith("session.tools")


def test_a_response_may_have_tools_too() -> None:
    """LiveKit's agent offers its tools with each response."""
    client = Client(speaks=True)
    told = client.say("response.create", response={"tools": [CLOCK], "tool_choice": "auto"})
    assert told[0]["type"] == "response.created"


# -- events that clients wait for ------------------------------------------------------------------


def test_a_conversation_is_created() -> None:
    """A client that sends its first item when it is there never sends one."""
    client = Client(speaks=True)
    created, conversation = client.told
    assert created["type"] == "session.created"
    assert conversation["conversation"]["object"] == "realtime.conversation"
    [response] = [
        it["response"] for it in client.say("response.create") if it["type"] == "response.created"
    ]
    assert response["conversation_id"] == conversation["conversation"]["id"]


def test_a_response_begins_with_what_is_left() -> None:
    """A client that plans by its limits waits for them."""
    client = Client(speaks=True, tokens=10)
    client.wait(100)
    told = {it["type"]: it for it in client.say("response.create")}
    assert [*told][:2] == ["response.created", "rate_limits.updated"]
    [left] = told["rate_limits.updated"]["rate_limits"]
    assert left == {
        "name": "tokens",
        "limit": 1 << 20,
        "remaining": (1 << 20) - 100,
        "reset_seconds": SESSION_S - 100,
    }


IDLE: Final = {"type": "server_vad", "idle_timeout_ms": 5000}


def answered(**detection: Any) -> Client:
    """A client that was answered for two seconds, and waits no more than five for its user."""
    client = Client(speaks=True, sound=bytes(4 * 24_000))
    [told] = client.update(audio={"input": {"turn_detection": {**IDLE, **detection}}})
    assert told["type"] == "session.updated"
    client.say("response.create")
    client.wait(1.5)
    client.speaks = False
    client.hear(QUIET)
    assert done(client)["status"] == "completed"
    return client


def test_a_user_who_says_nothing_is_spoken_to() -> None:
    """A caller who is silent hears silence until the call is over."""
    client = answered()
    assert not client.hear(QUIET * 3)
    told = client.hear(QUIET * 3)
    client.speaks = True
    told += client.wait(3)
    first = told.index("input_audio_buffer.timeout_triggered")
    assert told[first + 1] == "input_audio_buffer.committed"
    assert "response.created" in told[first:]
    [event] = [it for it in client.told if it["type"] == "input_audio_buffer.timeout_triggered"]
    assert event["audio_end_ms"] - event["audio_start_ms"] == 5000
    assert client.knows(event["item_id"])


@pytest.mark.parametrize(
    "detection",
    [{"idle_timeout_ms": None}, {"create_response": False}, {"type": "semantic_vad"}],
    ids=str,
)
def test_a_user_may_think(detection: dict[str, Any]) -> None:
    """A model speaks that is not to."""
    client = answered(**detection)
    assert not client.wait(60)


def test_a_user_who_speaks_is_not_silent() -> None:
    """A user who speaks is asked whether there is anybody."""
    client = answered()
    told = client.hear(LOUD * 7 + QUIET)
    assert "input_audio_buffer.timeout_triggered" not in told


# -- sounds of attention ---------------------------------------------------------------------------

MHM: Final = LOUD[: 2 * 24_000 // 4] + QUIET[: 2 * 24_000 * 3 // 4]
"""A quarter of a second, and silence."""


@pytest.mark.parametrize(
    ("how", "detection", "is_heard"),
    [
        ({"backchannel_ms": 350}, {}, False),
        ({"backchannel_ms": 200}, {}, True),
        ({"backchannel_ms": 0}, {}, True),
        ({"backchannel_ms": 350}, {"backchannel_ms": 0}, True),
        ({"backchannel_ms": 0}, {"backchannel_ms": 350}, False),
        ({"backchannel_ms": 350}, {"interrupt_response": False}, True),
    ],
    ids=str,
)
def test_a_sound_of_attention_does_not_interrupt(
    how: dict[str, Any], detection: dict[str, Any], is_heard: bool
) -> None:
    """The model falls silent at each mm-hm of its user."""
    client = Client(speaks=True, **how)
    client.update(audio={"input": {"turn_detection": {"type": "server_vad", **detection}}})
    assert "response.created" in client.hear(QUIET)
    told = client.hear(MHM + QUIET)
    assert ("input_audio_buffer.speech_started" in told) == is_heard
    assert ("input_audio_buffer.committed" in told) == is_heard
    is_cut = is_heard and detection.get("interrupt_response", True)
    assert ("response.done" in told) == is_cut


def test_longer_speech_interrupts() -> None:
    """A user who says more is not heard either."""
    client = Client(speaks=True, backchannel_ms=350)
    client.hear(QUIET)
    told = client.hear(LOUD)
    assert told.index("input_audio_buffer.speech_started") < told.index("response.done")


def test_a_short_word_is_heard_where_the_model_is_silent() -> None:
    """A user who answers by yes is not answered."""
    client = Client(backchannel_ms=350)
    told = client.hear(MHM + QUIET)
    assert "input_audio_buffer.speech_stopped" in told
