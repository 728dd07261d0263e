"""A turn of chat: every field of 004, its default, its bounds, its refusals, in both dialects."""

from __future__ import annotations

from typing import Any, cast

import attrs
import pytest

from protocol.values.errors import FieldError
from protocol.values.model import ChatConfig
from protocol.values.requests import (
    Ask,
    AudioPart,
    ChatMessage,
    ImagePart,
    ReferenceAudio,
    Request,
    SpeechRequest,
    TextPart,
    VideoPart,
    VoiceName,
)
from protocol.wire.codec import Context, encode_base64, parse_frame
from protocol.wire.dialects import LEGACY_CHAT, REALTIME
from tests.strategies.messages import jpeg_header, mp4_head, noise, png_header, wav

CHAT = Context(mode="chat")
OLD = Context(mode="chat", behaviour=0)
VOICE = noise(8000)
VOICE_TEXT = encode_base64(VOICE)
SOUND = noise(4800)
SOUND_TEXT = encode_base64(SOUND)
JPEG = jpeg_header(640, 480)
JPEG_TEXT = encode_base64(JPEG)
VIDEO_TEXT = encode_base64(mp4_head())
HELLO: list[dict[str, object]] = [{"role": "user", "content": "Hello!"}]


def ask(context: Context = CHAT, **fields: object) -> Any:
    """Parse a turn as 004 has it, with a greeting where it has no messages."""
    return LEGACY_CHAT.parse(Request.INIT, {"messages": HELLO, **fields}, context)


def ask_of_001(**fields: object) -> Any:
    """Parse the same turn as 001 has it."""
    body = {"type": "input.append", "input": {"messages": HELLO, **fields}}
    return REALTIME.parse(Request.APPEND, body, CHAT)


def explained_in_both(fields: dict[str, object], code: str, text: str) -> None:
    """Ask with bad fields in both dialects, and find each error's code, and its text's start."""
    for parse, root in ((ask, "$."), (ask_of_001, "$.input.")):
        with pytest.raises(FieldError) as caught:
            parse(**fields)
        assert caught.value.code == code
        assert caught.value.message.startswith(root + text)


def message(*content: object, role: str = "user") -> dict[str, object]:
    """A message with a list of contents."""
    return {"role": role, "content": list(content)}


SPOKEN = SpeechRequest(mode="default", language="en", voice=None)
GREETING = (ChatMessage(role="user", content=(TextPart(text="Hello!"),)),)

# -- what is read -------------------------------------------------------------------------------


def test_the_defaults_are_the_sources() -> None:
    """Else an unmodified client of 004 gets another answer than it was written for."""
    assert ask() == Ask(
        messages=GREETING,
        streaming=True,
        config=ChatConfig(max_new_tokens=512, temperature=0.7, top_p=0.8, length_penalty=1.0),
        speech=None,
        max_slice_nums=None,
        use_image_id=True,
        omni=False,
        thinking=False,
    )


def test_a_turn_of_001_is_silent_unless_it_says_tts() -> None:
    """Else a client that wants text pays for speech, or one that wants speech gets none."""
    assert ask_of_001() == ask()
    assert ask_of_001(tts={}) == attrs.evolve(ask(), speech=SPOKEN)


@pytest.mark.parametrize("tts", [None, {}, {"enabled": None}, {"enabled": False}, {"mode": "omni"}])
def test_a_request_of_004_is_silent_unless_it_is_enabled(tts: object) -> None:
    """A page of the source that wants text is answered in speech."""
    assert ask(tts=tts).speech is None
    assert ask(tts={"enabled": True}).speech == SPOKEN


def test_a_recorded_request_is_spoken_as_it_was() -> None:
    """A recording of the drafts is answered in text when it is replayed."""
    for tts in (None, {}, {"enabled": None}, {"enabled": True}):
        assert ask(OLD, tts=tts).speech == SPOKEN
    assert ask(OLD).speech == SPOKEN
    assert ask(OLD, tts={"enabled": False}).speech is None


SETTINGS: list[tuple[dict[str, object], dict[str, Any]]] = [
    ({"streaming": False}, {"streaming": False}),
    ({"streaming": None}, {}),
    ({"omni_mode": True}, {"omni": True}),
    ({"enable_thinking": True}, {"thinking": True}),
    ({"generation": None}, {}),
    ({"generation": {}}, {}),
    ({"generation": {"max_new_tokens": 1}}, {"config": ChatConfig(max_new_tokens=1)}),
    ({"generation": {"max_new_tokens": 8192}}, {"config": ChatConfig(max_new_tokens=8192)}),
    ({"generation": {"temperature": 0}}, {"config": ChatConfig(temperature=0.0)}),
    ({"generation": {"temperature": 2}}, {"config": ChatConfig(temperature=2.0)}),
    ({"generation": {"top_p": 1}}, {"config": ChatConfig(top_p=1.0)}),
    ({"generation": {"top_k": 1}}, {"config": ChatConfig(top_k=1)}),
    ({"generation": {"top_k": 1000}}, {"config": ChatConfig(top_k=1000)}),
    ({"generation": {"repetition_penalty": 1}}, {"config": ChatConfig(repetition_penalty=1.0)}),
    ({"generation": {"repetition_penalty": 2}}, {"config": ChatConfig(repetition_penalty=2.0)}),
    ({"generation": {"length_penalty": 0.1}}, {"config": ChatConfig(length_penalty=0.1)}),
    ({"generation": {"length_penalty": 10}}, {"config": ChatConfig(length_penalty=10.0)}),
    ({"generation": {"length_penalty": None}}, {}),
    ({"image": {}}, {}),
    ({"image": {"max_slice_nums": None}}, {}),
    ({"image": {"max_slice_nums": 9}}, {"max_slice_nums": 9}),
    ({"image": {"use_image_id": False}}, {"use_image_id": False}),
    ({"tts": {"enabled": False}}, {"speech": None}),
    ({"tts": {"enabled": False, "mode": "voice_cloning"}}, {"speech": None}),
    ({"tts": {"language": "zh"}}, {"speech": SpeechRequest(language="zh")}),
    *(
        ({"tts": {"mode": mode}}, {"speech": SpeechRequest(mode=mode)})
        for mode in ("default", "audio_assistant", "omni", "audio_roleplay")
    ),
    (
        {"tts": {"mode": "voice_cloning", "ref_audio_data": VOICE_TEXT}},
        {
            "speech": SpeechRequest(
                mode="voice_cloning", voice=ReferenceAudio(data=VOICE, is_file=False)
            )
        },
    ),
    (
        {"tts": {"ref_audio_data": encode_base64(wav(16_000))}},
        {"speech": SpeechRequest(voice=ReferenceAudio(data=wav(16_000), is_file=True))},
    ),
    (
        {"tts": {"mode": "voice_cloning", "ref_audio_path": "calm_voice-2.1"}},
        {"speech": SpeechRequest(mode="voice_cloning", voice=VoiceName(name="calm_voice-2.1"))},
    ),
]


@pytest.mark.parametrize(("fields", "changes"), SETTINGS)
def test_every_setting_is_honoured_in_both_dialects(
    fields: dict[str, object], changes: dict[str, Any]
) -> None:
    """Else a client believes in a setting that is not in force."""
    expected = attrs.evolve(ask(), **changes)
    if "tts" in fields:
        assert ask_of_001(**fields) == expected
        fields = {"tts": {"enabled": True, **cast("dict[str, object]", fields["tts"])}}
    assert ask(**fields) == expected


def test_reference_audio_comes_before_the_name_of_a_voice() -> None:
    """Else a client that sends both, as 004's do, is answered in another voice (TTSConfig)."""
    names = {"ref_audio_data": VOICE_TEXT, "ref_audio_path": "/srv/voices/any path.wav"}
    turn = ask(tts={"enabled": True, **names})
    assert turn.speech == SpeechRequest(voice=ReferenceAudio(data=VOICE, is_file=False))
    assert turn.ignored == ("$.tts.ref_audio_path",)


def test_every_kind_of_content_is_read() -> None:
    """Else a picture, a sound or a video that 004 allows does not reach the model."""
    turn = ask(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": ""},
            message({"type": "text", "text": "Yes"}, role="assistant"),
            message(
                {"type": "text", "text": "Describe this image"},
                {"type": "image", "data": JPEG_TEXT},
                {"type": "image", "data": encode_base64(png_header(64, 48))},
                {"type": "audio", "data": SOUND_TEXT},
                {"type": "audio", "data": SOUND_TEXT, "sample_rate": 48_000},
                {"type": "audio", "data": encode_base64(wav(8000)), "sample_rate": 16_000},
                {"type": "video", "data": VIDEO_TEXT, "stack_frames": 5},
            ),
        ]
    )
    assert turn.messages == (
        ChatMessage(role="system", content=(TextPart(text="Be brief."),)),
        ChatMessage(role="user", content=(TextPart(text=""),)),
        ChatMessage(role="assistant", content=(TextPart(text="Yes"),)),
        ChatMessage(
            role="user",
            content=(
                TextPart(text="Describe this image"),
                ImagePart(data=JPEG),
                ImagePart(data=png_header(64, 48)),
                AudioPart(data=SOUND, is_file=False),
                AudioPart(data=SOUND, is_file=False, rate_hz=48_000),
                AudioPart(data=wav(8000), is_file=True),
                VideoPart(data=mp4_head(), stack_frames=5),
            ),
        ),
    )


def test_a_video_has_one_picture_a_second_unless_it_says_more() -> None:
    """Else a video fills the context with pictures that nobody asked for."""
    turn = ask(messages=[message({"type": "video", "data": VIDEO_TEXT})])
    assert turn.messages[0].content == (VideoPart(data=mp4_head(), stack_frames=1),)


def test_what_is_not_known_is_counted() -> None:
    """Else a client believes in a field that does not exist."""
    part = {"type": "text", "text": "Hello!", "colour": 1}
    messages = [{"role": "user", "content": [part], "name": "x"}]
    assert ask(messages=messages, session_id="s").ignored == (
        "$.session_id",
        "$.messages[0].name",
        "$.messages[0].content[0].colour",
    )
    assert ask_of_001(session_id="s").ignored == ("$.input.session_id",)


# -- what is refused ----------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "x"}
LONG = "x" * 131_072
LARGE_TEXT = encode_base64(png_header(5_000, 4_000))
LARGE_JPEG_TEXT = encode_base64(jpeg_header(5_000, 4_000))
MINUTES_TEXT = encode_base64(wav(8_000 * 300, 8_000, bits=8))
BAD: list[tuple[dict[str, object], str, str]] = [
    ({"messages": None}, "missing_field", "messages: required field is missing"),
    ({"messages": "Hello!"}, "invalid_payload", "messages: a string of 6 characters, an array"),
    ({"messages": []}, "invalid_payload", "messages: 0 items, allowed is 1 to 256"),
    ({"messages": HELLO * 257}, "invalid_payload", "messages: 257 items, allowed is 1 to 256"),
    ({"messages": ["x"]}, "invalid_payload", "messages[0]: a string of 1 characters, an object"),
    ({"messages": [{"content": "x"}]}, "missing_field", "messages[0].role: required field is"),
    (
        {"messages": [{"role": "fool", "content": "x"}]},
        "invalid_payload",
        "messages[0].role: a string of 4 characters, allowed is user, system, assistant, tool",
    ),
    ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content: required field"),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "invalid_payload",
        "messages[0].content: an integer, a string",
    ),
    (
        {"messages": [message()]},
        "invalid_payload",
        "messages[0].content: 0 items, allowed is 1 to 64",
    ),
    (
        {"messages": [message(*[{"type": "text", "text": ""}] * 65)]},
        "invalid_payload",
        "messages[0].content: 65 items, allowed is 1 to 64",
    ),
    ({"messages": [message("x")]}, "invalid_payload", "messages[0].content[0]: a string of 1"),
    ({"messages": [message({})]}, "missing_field", "messages[0].content[0].type: required field"),
    (
        {"messages": [message({"type": "file", "data": ""})]},
        "invalid_payload",
        "messages[0].content[0].type: a string of 4 characters, allowed is text, image, audio, vid",
    ),
    (
        {"messages": [message({"type": "text"})]},
        "missing_field",
        "messages[0].content[0].text: required field is missing",
    ),
    (
        {"messages": [message({"type": "image", "data": encode_base64(b"GIF89a")})]},
        "invalid_payload",
        "messages[0].content[0].data: 6 bytes that are no JPEG, PNG or WebP",
    ),
    (
        {"messages": [message({"type": "image", "data": encode_base64(png_header(9999, 9999))})]},
        "invalid_payload",
        "messages[0].content[0].data: a PNG of 9999 x 9999 pixels, at most 20000000",
    ),
    (
        {"messages": [message({"type": "audio", "data": encode_base64(noise(1599))})]},
        "invalid_payload",
        "messages[0].content[0].data: 1599 samples, at least 1600 are needed",
    ),
    (
        {"messages": [message({"type": "audio", "data": SOUND_TEXT, "sample_rate": 7999})]},
        "invalid_payload",
        "messages[0].content[0].sample_rate: 7999, allowed is 8000 to 192000",
    ),
    (
        {"messages": [message({"type": "video", "data": encode_base64(b"x" * 12)})]},
        "invalid_payload",
        "messages[0].content[0].data: 12 bytes that are no video",
    ),
    (
        {"messages": [message({"type": "video", "data": VIDEO_TEXT, "stack_frames": 6})]},
        "invalid_payload",
        "messages[0].content[0].stack_frames: 6, allowed is 1 to 5",
    ),
    ({"messages": [SYSTEM]}, "invalid_payload", "messages[0].role: system, the last message is"),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "x"}]},
        "invalid_payload",
        "messages[1].role: assistant, the last message is a user's",
    ),
    (
        {"messages": [SYSTEM, SYSTEM, *HELLO]},
        "invalid_payload",
        "messages[1].role: system, allowed is that in the first message",
    ),
    (
        {"messages": [{"role": "user", "content": LONG + "x"}]},
        "invalid_payload",
        "messages[0].content: 131073 characters, allowed is 0 to 131072",
    ),
    (
        {"messages": [{"role": "user", "content": LONG}, *HELLO]},
        "invalid_payload",
        "messages: 131078 characters of text in all, at most 131072 are allowed",
    ),
    (
        {"messages": [message(*[{"type": "image", "data": JPEG_TEXT}] * 33)] * 2},
        "invalid_payload",
        "messages: 66 images in all, at most 64 are allowed",
    ),
    (
        {"messages": [message(*[{"type": "video", "data": VIDEO_TEXT}] * 2)]},
        "invalid_payload",
        "messages: 2 videos in all, at most 1 are allowed",
    ),
    (
        {
            "messages": [
                message(*[{"type": "image", "data": LARGE_TEXT}] * 3),
                message(*[{"type": "image", "data": LARGE_JPEG_TEXT}] * 2),
                message({"type": "image", "data": JPEG_TEXT}),
            ]
        },
        "invalid_payload",
        "messages: 100307200 pixels of images in all, at most 100000000 are allowed",
    ),
    (
        {
            "messages": [
                message(*[{"type": "audio", "data": MINUTES_TEXT}] * 2),
                message({"type": "audio", "data": SOUND_TEXT}),
            ]
        },
        "invalid_payload",
        "messages: 601 seconds of sound in all, at most 600 are allowed",
    ),
    (
        {
            "messages": [
                message(*[{"type": "audio", "data": MINUTES_TEXT}] * 2),
                message({"type": "audio", "data": SOUND_TEXT, "sample_rate": 48_000}),
            ]
        },
        "invalid_payload",
        "messages: 601 seconds of sound in all, at most 600 are allowed",
    ),
    ({"streaming": 1}, "invalid_payload", "streaming: an integer, a boolean is needed"),
    ({"omni_mode": "yes"}, "invalid_payload", "omni_mode: a string of 3 characters, a boolean"),
    ({"enable_thinking": 0}, "invalid_payload", "enable_thinking: an integer, a boolean"),
    ({"generation": []}, "invalid_payload", "generation: an array of 0 items, an object"),
    (
        {"generation": {"num_beams": 3}},
        "invalid_payload",
        "generation.num_beams: unknown field, known are do_sample, length_penalty",
    ),
    ({"generation": {"max_new_tokens": 0}}, "invalid_payload", "generation.max_new_tokens: 0, al"),
    (
        {"generation": {"max_new_tokens": 8193}},
        "invalid_payload",
        "generation.max_new_tokens: 8193",
    ),
    ({"generation": {"max_new_tokens": 9.0}}, "invalid_payload", "generation.max_new_tokens: a nu"),
    ({"generation": {"temperature": 2.1}}, "invalid_payload", "generation.temperature: 2.1, allo"),
    ({"generation": {"top_p": 0}}, "invalid_payload", "generation.top_p: 0, allowed is above 0"),
    ({"generation": {"top_k": 1001}}, "invalid_payload", "generation.top_k: 1001, allowed is 1 t"),
    (
        {"generation": {"repetition_penalty": 0.9}},
        "invalid_payload",
        "generation.repetition_penalty: 0.9, allowed is 1 to 2",
    ),
    ({"generation": {"length_penalty": 11}}, "invalid_payload", "generation.length_penalty: 11, a"),
    ({"tts": True}, "invalid_payload", "tts: a boolean, an object is needed"),
    ({"tts": {"speed": 1}}, "invalid_payload", "tts.speed: unknown field, known are enabled, lan"),
    ({"tts": {"enabled": "true"}}, "invalid_payload", "tts.enabled: a string of 4 characters, a"),
    ({"tts": {"mode": "opera"}}, "invalid_payload", "tts.mode: a string of 5 characters, allowed"),
    (
        {"tts": {"enabled": True, "mode": "voice_cloning"}},
        "invalid_payload",
        "tts.mode: voice_cloning, which needs ref_audio_data or ref_audio_path",
    ),
    ({"tts": {"language": "fr"}}, "invalid_payload", "tts.language: a string of 2 characters, al"),
    (
        {"tts": {"ref_audio_data": encode_base64(noise(7999))}},
        "invalid_payload",
        "tts.ref_audio_data: 7999 samples, at least 8000 are needed",
    ),
    (
        {"tts": {"ref_audio_path": "/etc/passwd"}},
        "invalid_payload",
        "tts.ref_audio_path: 11 characters that are no name of a voice",
    ),
    ({"tts": {"ref_audio_path": ".."}}, "invalid_payload", "tts.ref_audio_path: 2 characters that"),
    ({"tts": {"ref_audio_path": "a\n"}}, "invalid_payload", "tts.ref_audio_path: 2 characters tha"),
    (
        {"tts": {"ref_audio_path": "x" * 65}},
        "invalid_payload",
        "tts.ref_audio_path: 65 characters, allowed is 1 to 64",
    ),
    ({"image": {"max_slice_nums": 10}}, "invalid_payload", "image.max_slice_nums: 10, allowed is"),
    ({"image": {"use_image_id": 1}}, "invalid_payload", "image.use_image_id: an integer, a boolea"),
    ({"image": {"size": 1}}, "invalid_payload", "image.size: unknown field, known are max_slice"),
]


@pytest.mark.parametrize(("fields", "code", "text"), BAD)
def test_a_bad_turn_is_explained_in_both_dialects(
    fields: dict[str, object], code: str, text: str
) -> None:
    """Else a client author has to guess which of thirty fields is wrong."""
    explained_in_both(fields, code, text)


def test_as_much_as_is_allowed_is_taken() -> None:
    """Else a conversation that is within the bounds is refused."""
    sights = [{"type": "image", "data": LARGE_TEXT}] * 5
    sounds = [{"type": "audio", "data": MINUTES_TEXT}] * 2
    assert len(ask(messages=[message(*sights, *sounds)]).messages[0].content) == 7


# -- what is written ----------------------------------------------------------------------------


def test_a_plain_turn_is_written_plainly() -> None:
    """Else our own client's frames are not the ones that 004 shows."""
    assert parse_frame(LEGACY_CHAT.encode_request(Ask(messages=GREETING))) == {
        "messages": HELLO,
        "streaming": True,
        "tts": {"enabled": False},
    }
