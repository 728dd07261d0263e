"""What the clients of OpenAI's Realtime API do that people have: each test is one of their ways."""

from __future__ import annotations

import base64
from typing import Any, Final

import pytest

from protocol.values import events as ev
from tests.protocol import test_dictation as dictation
from tests.protocol.test_openai_items import LOUD, QUIET, Client

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
    [told] = client.update(audio={"input": {"format": {"type": "audio/pcma"}}})
    assert told["error"]["param"] == "session.audio.input.format"


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
