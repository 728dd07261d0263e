"""What clients say in the dialect of 001: its examples, its settings, each refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from protocol.values.errors import FieldError, LocalProtocolError
from protocol.values.model import DuplexConfig
from protocol.values.requests import Append, BadPicture, CloseRequest, Init, ReferenceAudio, Request
from protocol.wire.codec import Context, encode_base64, parse_frame
from protocol.wire.dialects.realtime import REALTIME
from tests.strategies.messages import jpeg_header, noise, png_header, wav

VIDEO = Context(mode="video", sliding_windows=("off", "basic"))
AUDIO = Context(mode="audio")
OLD = Context(mode="video", behaviour=0)
SECOND = noise(16_000)
AUDIO_TEXT = encode_base64(SECOND)
JPEG = jpeg_header(640, 480)


def init(payload: object, context: Context = VIDEO) -> Any:
    """Parse a `session.init`."""
    body = {"type": "session.init", "payload": payload}
    return REALTIME.parse(Request.INIT, body, context)


def append(fields: object, context: Context = VIDEO, **more: object) -> Any:
    """Parse an `input.append`."""
    body = {"type": "input.append", "input": fields, **more}
    return REALTIME.parse(Request.APPEND, body, context)


def test_the_sources_init_is_read() -> None:
    """Else the documented first message is refused."""
    assert init({"system_prompt": "You are a helpful assistant."}) == Init(
        instructions="You are a helpful assistant."
    )


def test_the_sources_append_is_read() -> None:
    """Else the documented input is refused."""
    fields = {
        "audio": AUDIO_TEXT,
        "video_frames": [encode_base64(JPEG)],
        "force_listen": False,
        "max_slice_nums": 1,
    }
    assert append(fields) == Append(pcm=SECOND, frames=(JPEG,), max_slice_nums=1)


def test_the_client_writes_the_sources_messages() -> None:
    """Else our own client speaks another dialect than the one it names."""
    message = Append(pcm=SECOND, frames=(JPEG,), max_slice_nums=1)
    assert parse_frame(REALTIME.encode_request(message)) == {
        "type": "input.append",
        "input": {
            "audio": AUDIO_TEXT,
            "video_frames": [encode_base64(JPEG)],
            "force_listen": False,
            "max_slice_nums": 1,
        },
    }
    closing = REALTIME.encode_request(CloseRequest(reason="user_stop"))
    assert closing == '{"type":"session.close","reason":"user_stop"}'


@pytest.mark.parametrize(
    ("payload", "prompt", "ignored"),
    [
        ({}, "", ()),
        ({"instructions": "alias"}, "alias", ()),
        ({"system_prompt": "a", "instructions": "b"}, "a", ("$.payload.instructions",)),
        ({"system_prompt": "", "instructions": "b"}, "", ("$.payload.instructions",)),
        ({"system_prompt": None, "instructions": "b"}, "b", ()),
        (
            {"use_tts": True, "voice": {"name": "x"}},
            "",
            ("$.payload.use_tts", "$.payload.voice.name"),
        ),
    ],
)
def test_a_prompt_goes_by_two_names(payload: object, prompt: str, ignored: tuple[str, ...]) -> None:
    """Else a client that uses the alias gets a model without a prompt."""
    assert init(payload) == Init(instructions=prompt, ignored=ignored)


def test_voices_may_be_raw_or_wav() -> None:
    """Else a client of one of the sources cannot bring a voice."""
    voice = {
        "ref_audio_base64": encode_base64(noise(8000)),
        "tts_ref_audio_base64": encode_base64(wav(24_000, 48_000)),
    }
    assert init({"voice": voice}) == Init(
        instructions="",
        ref_audio=ReferenceAudio(data=noise(8000), is_file=False),
        tts_ref_audio=ReferenceAudio(data=wav(24_000, 48_000), is_file=True),
    )


def test_every_setting_is_honoured() -> None:
    """Else a client believes in a setting that is not in force."""
    config = {
        "generate_audio": False,
        "ls_mode": "explicit",
        "force_listen_count": 0,
        "max_new_speak_tokens_per_chunk": 10,
        "temperature": 0,
        "top_k": 1,
        "top_p": 1,
        "listen_prob_scale": 0.5,
        "length_penalty": 1.25,
        "chunk_ms": 1000,
        "sample_rate": 16_000,
        "max_slice_nums": 4,
        "sliding_window": "basic",
    }
    expected = DuplexConfig(
        generate_audio=False,
        force_listen_count=0,
        max_new_speak_tokens_per_chunk=10,
        temperature=0.0,
        top_k=1,
        top_p=1.0,
        listen_prob_scale=0.5,
        length_penalty=1.25,
        sliding_window="basic",
    )
    assert init({"config": config}) == Init(instructions="", config=expected, max_slice_nums=4)


@pytest.mark.parametrize(
    ("payload", "slices"),
    [
        ({}, 1),
        ({"max_slice_nums": 9}, 9),
        ({"config": {"max_slice_nums": 3}}, 3),
        ({"max_slice_nums": 3, "config": {"max_slice_nums": 3}}, 3),
    ],
)
def test_slices_may_stand_beside_the_settings(payload: object, slices: int) -> None:
    """Else frames are cut otherwise than the client asked."""
    assert init(payload).max_slice_nums == slices


CONFIG = "$.payload.config"
BAD_INITS: list[tuple[object, str, str]] = [
    (None, "missing_field", "$.payload: required field is missing"),
    ("hi", "invalid_payload", "$.payload: a string of 2 characters, an object is needed"),
    ([], "invalid_payload", "$.payload: an array of 0 items, an object is needed"),
    ({"system_prompt": 1}, "invalid_payload", "$.payload.system_prompt: an integer, a string"),
    ({"instructions": 1}, "invalid_payload", "$.payload.instructions: an int"),
    (
        {"system_prompt": "x" * 32_769},
        "invalid_payload",
        "$.payload.system_prompt: 32769 characters, allowed is 0 to 32768",
    ),
    ({"voice": "x"}, "invalid_payload", "$.payload.voice: a string of 1 characters, an object"),
    (
        {"voice": {"ref_audio_base64": "?"}},
        "invalid_payload",
        "$.payload.voice.ref_audio_base64: a string of 1 characters that is not base64",
    ),
    (
        {"voice": {"tts_ref_audio_base64": encode_base64(noise(7999))}},
        "invalid_payload",
        "$.payload.voice.tts_ref_audio_base64: 7999 samples, at least 8000 are needed",
    ),
    (
        {"voice": {"ref_audio_base64": encode_base64(wav(31 * 8000, 8000))}},
        "invalid_payload",
        "$.payload.voice.ref_audio_base64: 31.000 s of audio, allowed is 0.5 to 30 s",
    ),
    ({"max_slice_nums": 10}, "invalid_payload", "$.payload.max_slice_nums: 10, allowed is 1 to 9"),
    ({"config": []}, "invalid_payload", f"{CONFIG}: an array of 0 items, an object is needed"),
    ({"config": {"topk": 1}}, "invalid_payload", f"{CONFIG}.topk: unknown field, known are chunk"),
    ({"config": {"a b": None}}, "invalid_payload", f"{CONFIG}.?: unknown field"),
    (
        {"config": {"deferred_finalize": True}},
        "invalid_payload",
        f"{CONFIG}.deferred_finalize: unk",
    ),
    ({"config": {"ls_mode": "auto"}}, "invalid_payload", f"{CONFIG}.ls_mode: a string of 4 char"),
    (
        {"config": {"chunk_ms": 500}},
        "invalid_payload",
        f"{CONFIG}.chunk_ms: 500, allowed is 1000 t",
    ),
    (
        {"config": {"sample_rate": 24000}},
        "invalid_payload",
        f"{CONFIG}.sample_rate: 24000, allowed",
    ),
    ({"config": {"top_k": 20.0}}, "invalid_payload", f"{CONFIG}.top_k: a number, an integer is"),
    ({"config": {"top_k": 0}}, "invalid_payload", f"{CONFIG}.top_k: 0, allowed is 1 to 1000"),
    ({"config": {"top_p": 0}}, "invalid_payload", f"{CONFIG}.top_p: 0, allowed is above 0 to 1"),
    ({"config": {"temperature": 2.5}}, "invalid_payload", f"{CONFIG}.temperature: 2.5, allowed is"),
    ({"config": {"temperature": True}}, "invalid_payload", f"{CONFIG}.temperature: a boolean, a n"),
    ({"config": {"temperature": 1e300}}, "invalid_payload", f"{CONFIG}.temperature: 1e+300, allow"),
    (
        {"config": {"length_penalty": 0.0}},
        "invalid_payload",
        f"{CONFIG}.length_penalty: 0.0, allow",
    ),
    ({"config": {"generate_audio": 1}}, "invalid_payload", f"{CONFIG}.generate_audio: an integer,"),
    (
        {"config": {"sliding_window": "context"}},
        "invalid_payload",
        f"{CONFIG}.sliding_window: a string of 7 characters, allowed is off, basic",
    ),
    (
        {"max_slice_nums": 1, "config": {"max_slice_nums": 2}},
        "invalid_payload",
        "$.payload.max_slice_nums: 1, while config says 2",
    ),
]


@pytest.mark.parametrize(("payload", "code", "text"), BAD_INITS)
def test_a_bad_init_is_explained(payload: object, code: str, text: str) -> None:
    """Else a client author has to guess which of thirty fields is wrong."""
    with pytest.raises(FieldError) as caught:
        init(payload)
    assert caught.value.code == code
    assert caught.value.message.startswith(text)


def spoilt(value: float) -> str:
    """A second of silence with one bad sample."""
    samples = np.zeros(16_000, dtype="<f4")
    samples[7] = value
    return encode_base64(samples.tobytes())


GOOD: dict[str, object] = {"audio": AUDIO_TEXT}
FRAME = encode_base64(JPEG)
BAD_APPENDS: list[tuple[object, str, str]] = [
    (None, "missing_field", "$.input: required field is missing"),
    (AUDIO_TEXT, "invalid_payload", "$.input: a string of 85336 characters, an object is needed"),
    ({}, "missing_field", "$.input.audio: required field is missing"),
    ({"audio": None}, "missing_field", "$.input.audio: required field is missing"),
    ({"audio": [0.5]}, "invalid_payload", "$.input.audio: an array of 1 items, a string is needed"),
    ({"audio": "\u266a"}, "invalid_payload", "$.input.audio: a string of 1 characters that is not"),
    ({"audio": AUDIO_TEXT[:-1]}, "invalid_payload", "$.input.audio: a string of 85335 characters"),
    ({"audio": ""}, "invalid_payload", "$.input.audio: 0 samples, at least 1 is needed"),
    (
        {"audio": encode_base64(bytes(16_001))},
        "invalid_payload",
        "$.input.audio: 16001 bytes, a multiple of 4 is needed",
    ),
    (
        {"audio": encode_base64(noise(0))},
        "invalid_payload",
        "$.input.audio: 0 samples, at least 1 is needed",
    ),
    (
        {"audio": encode_base64(noise(176_000))},
        "invalid_payload",
        "$.input.audio: 176000 samples, at most 160000 are allowed",
    ),
    ({"audio": spoilt(math.nan)}, "invalid_payload", "$.input.audio: sample 7 is not finite"),
    ({"audio": spoilt(-math.inf)}, "invalid_payload", "$.input.audio: sample 7 is not finite"),
    (
        GOOD | {"video_frames": FRAME},
        "invalid_payload",
        f"$.input.video_frames: a string of {len(FRAME)} characters, an array is needed",
    ),
    (
        GOOD | {"video_frames": [FRAME] * 5},
        "invalid_payload",
        "$.input.video_frames: 5 items, allowed is 0 to 4",
    ),
    (GOOD | {"force_listen": "no"}, "invalid_payload", "$.input.force_listen: a string of 2 char"),
    (GOOD | {"max_slice_nums": 0}, "invalid_payload", "$.input.max_slice_nums: 0, allowed is 1 to"),
    (GOOD | {"max_slice_nums": 1.0}, "invalid_payload", "$.input.max_slice_nums: a number, an int"),
    (GOOD | {"max_slice_nums": 1e30}, "invalid_payload", "$.input.max_slice_nums: a number, an in"),
    (GOOD | {"max_slice_nums": True}, "invalid_payload", "$.input.max_slice_nums: a boolean, an i"),
]


TOO_LARGE = "a JPEG of 65500 x 65500 pixels, at most 20000000 are allowed"
BAD_PICTURES: list[tuple[object, str, str]] = [
    (None, "null, a string is needed", "null, a string is needed"),
    (
        encode_base64(b"GIF89a"),
        "6 bytes that are not a JPEG",
        "6 bytes that are no JPEG, PNG or WebP",
    ),
    (encode_base64(jpeg_header(65_500, 65_500)), *[TOO_LARGE] * 2),
]


@pytest.mark.parametrize(("picture", "before", "now"), BAD_PICTURES)
def test_a_bad_picture_costs_only_itself(picture: object, before: str, now: str) -> None:
    """A second of sound is lost for a camera's torn frame."""
    fields: dict[str, object] = GOOD | {"video_frames": [FRAME, picture]}
    reason = f"$.input.video_frames[1]: {now}"
    assert append(fields).frames == (JPEG, BadPicture(reason=reason))
    with pytest.raises(FieldError) as caught:
        REALTIME.parse(Request.APPEND, {"type": "input.append", "input": fields}, OLD)
    assert caught.value.message == f"$.input.video_frames[1]: {before}"


@pytest.mark.parametrize("head", ["", "data:image/png;base64,", "data:;base64,"])
def test_a_picture_of_any_kind_is_a_frame(head: str) -> None:
    """A page that captures PNG files shows the model nothing."""
    png = png_header(640, 480)
    assert append(GOOD | {"video_frames": [head + encode_base64(png)]}).frames == (png,)


@pytest.mark.parametrize(("fields", "code", "text"), BAD_APPENDS)
def test_a_bad_append_is_explained(fields: object, code: str, text: str) -> None:
    """Else bad audio or a bad frame reaches the model, or its sender never learns of it."""
    with pytest.raises(FieldError) as caught:
        append(fields)
    assert caught.value.code == code
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize("input_id", ["", "x" * 65, 5])
def test_a_bad_input_id_is_refused(input_id: object) -> None:
    """Else a megabyte of id comes back in every delta."""
    with pytest.raises(FieldError, match=r"^\$\.input_id: "):
        append(GOOD, input_id=input_id)


def test_the_clients_input_id_is_kept() -> None:
    """Else a client cannot match an answer to what it asked."""
    assert append(GOOD, input_id="mine").input_id == "mine"


def test_frames_in_audio_mode_are_ignored_unseen_and_counted() -> None:
    """Else a client with a camera left on is refused, or its frames vanish without a trace."""
    fields = GOOD | {"video_frames": ["no jpeg", 5], "extra": 1}
    paths = ("$.input.video_frames", "$.input.extra")
    assert append(fields, AUDIO) == Append(pcm=SECOND, ignored=paths)
    assert append(GOOD | {"video_frames": None}, AUDIO).ignored == ()


def test_video_without_frames_is_audio() -> None:
    """Else a client whose camera is off cannot speak (the wire decisions)."""
    assert append(GOOD | {"video_frames": []}) == append(GOOD) == Append(pcm=SECOND)


def test_a_setting_without_a_field_is_not_lost_in_silence() -> None:
    """Else our own client believes in a setting that it never sent."""
    message = Init(instructions="", config=DuplexConfig(deferred_finalize=False))
    with pytest.raises(LocalProtocolError, match="deferred_finalize"):
        REALTIME.encode_request(message)
