"""The settings of the source's own request schema, which its pages send: honoured or refused."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from protocol.machine.chat import PendingTurn
from protocol.values.errors import FieldError
from protocol.values.model import (
    INPUT_RATE_HZ,
    SAMPLE_BYTES,
    ChatConfig,
    DuplexConfig,
    SpeechConfig,
)
from protocol.values.requests import Ask, ReferenceAudio, Request, SpeechRequest
from protocol.wire.codec import Context, encode_base64
from protocol.wire.dialects import DUPLEX_V1, LEGACY_CHAT, LEGACY_DUPLEX, REALTIME
from tests.strategies.messages import noise

VOICE = noise(2 * INPUT_RATE_HZ)
PAGE: dict[str, Any] = {
    "messages": [
        {
            "role": "system",
            "content": [
                {"type": "text", "text": "Speak like this."},
                {"type": "audio", "data": encode_base64(noise(8000))},
                {"type": "text", "text": "Help."},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "audio",
                    "data": encode_base64(noise(4800)),
                    "name": "audio",
                    "duration": 0.3,
                },
                {"type": "text", "text": "What is this?"},
            ],
        },
    ],
    "streaming": True,
    "generation": {"max_new_tokens": 256, "do_sample": True, "length_penalty": 1.1},
    "image": {"max_slice_nums": 1},
    "omni_mode": False,
    "tts": {"enabled": True, "mode": "audio_assistant", "ref_audio_data": encode_base64(VOICE)},
    "use_tts_template": True,
}
"""In the shape of a message of the source's chat page, spoken."""


def chat(**fields: object) -> Any:
    """Parse a request of 004."""
    body = {"messages": [{"role": "user", "content": "Hello!"}], **fields}
    return LEGACY_CHAT.parse(Request.INIT, body, Context(mode="chat"))


def duplex(config: dict[str, object]) -> list[Any]:
    """Parse a duplex session's settings in the three dialects that have them."""
    context = Context(mode="video")
    init = {"type": "session.init", "payload": {"config": config}}
    update = {"type": "session.update", "session": {"instructions": "", "voice_config": config}}
    prepare = {"type": "prepare", "system_prompt": "", "config": config}
    return [
        REALTIME.parse(Request.INIT, init, context),
        LEGACY_DUPLEX.parse(Request.INIT, prepare, context),
        DUPLEX_V1.parse(Request.INIT, update, context),
    ]


def test_the_message_of_the_sources_page_is_taken() -> None:
    """The page sends `do_sample` and `use_tts_template`: all of its messages were refused."""
    ask = chat(**PAGE)
    assert isinstance(ask, Ask)
    assert ask.config == ChatConfig(max_new_tokens=256, length_penalty=1.1)
    voice = ReferenceAudio(data=VOICE, is_file=False)
    assert ask.speech == SpeechRequest(mode="audio_assistant", voice=voice)
    assert ask.tts_template
    assert ask.ignored == ("$.messages[1].content[0].name", "$.messages[1].content[0].duration")


CHAT_DEFAULTS: list[dict[str, object]] = [
    {"generation": {"do_sample": True, "min_new_tokens": 0, "max_inp_length": 8192}},
    {"tts": {"ref_audio_max_ms": None, "output_path": None}},
    {"tts": {"output_path": "", "sampling": {}}},
    {
        "tts": {
            "sampling": {
                "top_p": 0.85,
                "min_p": 0.01,
                "top_k": 25,
                "repetition_penalty": 1.05,
                "temperature": 0.8,
                "win_size": 16,
                "tau_r": 0.1,
            }
        }
    },
    {"use_tts_template": False},
]


@pytest.mark.parametrize("fields", CHAT_DEFAULTS)
def test_a_value_that_means_the_default_is_taken(fields: dict[str, object]) -> None:
    """A client that writes its settings out is not refused for it."""
    assert chat(**fields) == chat()


CHAT_HONOURED: list[tuple[dict[str, object], dict[str, Any]]] = [
    ({"generation": {"do_sample": False}}, {"config": ChatConfig(temperature=0.0)}),
    (
        {"generation": {"do_sample": False, "temperature": 0.9}},
        {"config": ChatConfig(temperature=0.0)},
    ),
    ({"generation": {"min_new_tokens": 8}}, {"config": ChatConfig(min_new_tokens=8)}),
    (
        {"tts": {"enabled": True, "ref_audio_max_ms": 3000}},
        {"speech": SpeechRequest(voice_ms_max=3000)},
    ),
    ({"use_tts_template": True}, {"tts_template": True}),
]


@pytest.mark.parametrize(("fields", "changes"), CHAT_HONOURED)
def test_what_the_model_can_do_is_honoured(
    fields: dict[str, object], changes: dict[str, Any]
) -> None:
    """A setting changes what the model is asked for."""
    assert chat(**fields) == attrs.evolve(chat(), **changes)


CHAT_REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"generation": {"max_inp_length": 100}},
        "$.generation.max_inp_length: 100, allowed is 8192 to 8192: a conversation is never cut",
    ),
    ({"generation": {"do_sample": 0}}, "$.generation.do_sample: an integer, a boolean"),
    ({"generation": {"min_new_tokens": -1}}, "$.generation.min_new_tokens: -1, allowed is 0 to"),
    ({"tts": {"output_path": "/tmp/a.wav"}}, "$.tts.output_path: 10 characters, allowed is 0 to 0"),
    ({"tts": {"sampling": {"top_k": 3}}}, "$.tts.sampling.top_k: 3, allowed is 25 to 25: the samp"),
    ({"tts": {"sampling": {"beams": 3}}}, "$.tts.sampling.beams: unknown field, known are min_p"),
    ({"tts": {"ref_audio_max_ms": 999}}, "$.tts.ref_audio_max_ms: 999, allowed is 1000 to"),
    ({"use_tts_template": 1}, "$.use_tts_template: an integer, a boolean is needed"),
]


@pytest.mark.parametrize(("fields", "text"), CHAT_REFUSED)
def test_what_is_not_offered_is_refused_by_its_name(fields: dict[str, object], text: str) -> None:
    """A client learns which setting is not in force, and why."""
    with pytest.raises(FieldError) as caught:
        chat(**fields)
    assert caught.value.message.startswith(text)


def test_only_the_wanted_part_of_the_voice_is_used() -> None:
    """`ref_audio_max_ms` cuts the reference audio as the source does."""
    voice = ReferenceAudio(data=VOICE, is_file=False)
    ask = attrs.evolve(chat(), speech=SpeechRequest(voice=voice, voice_ms_max=1500))
    pending = PendingTurn.of(ask, pytest.fail)
    turn = pending.to_turn(0, 7)
    assert turn.speech == SpeechConfig(voice_pcm=VOICE[: 1500 * 16 * SAMPLE_BYTES])


DUPLEX_TAKEN: list[tuple[dict[str, object], DuplexConfig]] = [
    (
        {
            "decode_mode": "sampling",
            "text_repetition_penalty": 1.05,
            "text_repetition_window_size": 512,
            "listen_top_k": None,
            "tts_temperature": 0.8,
        },
        DuplexConfig(),
    ),
    ({"decode_mode": "greedy"}, DuplexConfig(temperature=0.0)),
    ({"length_penalty": 1.05}, DuplexConfig(length_penalty=1.05)),
    ({"listen_top_k": 0}, DuplexConfig()),
]


@pytest.mark.parametrize(("config", "expected"), DUPLEX_TAKEN)
def test_settings_of_a_duplex_session_are_honoured(
    config: dict[str, object], expected: DuplexConfig
) -> None:
    """All three dialects read the same settings; the pages' `voice_config` is one of them."""
    for init in duplex(config):
        assert init.config == expected
        assert init.ignored == ()


DUPLEX_REFUSED: list[tuple[dict[str, object], str]] = [
    ({"decode_mode": "beam"}, ".decode_mode: a string of 4 characters, allowed is sampling, gre"),
    ({"text_repetition_penalty": 1.2}, ".text_repetition_penalty: 1.2, allowed is 1.05 to 1.05: "),
    ({"text_repetition_window_size": 9}, ".text_repetition_window_size: 9, allowed is 512 to 512"),
    ({"listen_top_k": 5}, ".listen_top_k: 5, allowed is 0 to 0: listening is sampled as any"),
    ({"tts_temperature": 0.5}, ".tts_temperature: 0.5, allowed is 0.8 to 0.8: the sampling of"),
]


@pytest.mark.parametrize(("config", "text"), DUPLEX_REFUSED)
def test_settings_of_a_duplex_session_are_refused_by_name(
    config: dict[str, object], text: str
) -> None:
    """A client learns which setting is not in force, and why."""
    with pytest.raises(FieldError) as caught:
        duplex(config)
    assert text in caught.value.message


def test_settings_are_written_as_voice_config() -> None:
    """Our own client can say in `duplex-v1` what the server reads there."""
    init = duplex({"length_penalty": 1.5})[2]
    frame = DUPLEX_V1.encode_request(init)
    assert '"voice_config":{"length_penalty":1.5}' in frame
