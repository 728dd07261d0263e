"""The dialect of 000: its examples word for word, what it adds, and every refusal with its path."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values.errors import ErrorCode, FieldError, LocalProtocolError, RemoteProtocolError
from protocol.values.messages import Closed, Created, ErrorReport, Listen, Metrics, Speech
from protocol.values.model import DuplexConfig
from protocol.values.requests import Append, CloseRequest, Init, ReferenceAudio, Request
from protocol.wire.codec import Context, encode_base64, parse_frame
from protocol.wire.dialects.realtime import DUPLEX_V1
from tests.strategies.messages import jpeg_header, noise, wav

VIDEO = Context(mode="video")
AUDIO = Context(mode="audio")
SECOND = noise(16_000)
AUDIO_TEXT = encode_base64(SECOND)
JPEG = jpeg_header(1280, 720)
VOICE = wav(16_000)
METRICS = Metrics(kv_cache_length=1024, dropped_units=1)


def update(session: object, **more: object) -> Any:
    """Parse a `session.update`."""
    body = {"type": "session.update", "session": session, **more}
    return DUPLEX_V1.parse(Request.INIT, body, VIDEO)


def append(context: Context = VIDEO, **fields: object) -> Any:
    """Parse an `input_audio_buffer.append`."""
    body = {"type": "input_audio_buffer.append", **fields}
    return DUPLEX_V1.parse(Request.APPEND, body, context)


# -- from the client ----------------------------------------------------------------------------

SESSION = {
    "instructions": "You are a helpful English assistant.",
    "max_slice_nums": 1,
    "ref_audio": encode_base64(VOICE),
    "tts_ref_audio": encode_base64(noise(8000)),
}
INIT = Init(
    instructions="You are a helpful English assistant.",
    ref_audio=ReferenceAudio(data=VOICE, is_file=True),
    tts_ref_audio=ReferenceAudio(data=noise(8000), is_file=False),
)


def test_the_sources_update_is_read_and_written() -> None:
    """Else the documented first message is refused, or our client sends another one."""
    assert update(SESSION) == INIT
    frame = parse_frame(DUPLEX_V1.encode_request(INIT))
    assert frame == {"type": "session.update", "session": SESSION}


def test_the_sources_append_is_read_and_written() -> None:
    """Else the documented input is refused, or our client sends another one."""
    fields = {
        "audio": AUDIO_TEXT,
        "video_frames": [encode_base64(JPEG)],
        "force_listen": False,
        "max_slice_nums": 1,
    }
    message = Append(pcm=SECOND, frames=(JPEG,), max_slice_nums=1)
    assert append(**fields) == message
    frame = parse_frame(DUPLEX_V1.encode_request(message))
    assert frame == {"type": "input_audio_buffer.append", **fields}


def test_the_sources_close_is_written() -> None:
    """Else our client's goodbye is not understood."""
    closing = DUPLEX_V1.encode_request(CloseRequest(reason="user_stop"))
    assert closing == '{"type":"session.close","reason":"user_stop"}'


BAD_UPDATES: list[tuple[object, str, str]] = [
    (None, "missing_field", "$.session: required field is missing"),
    ("x", "invalid_payload", "$.session: a string of 1 characters, an object is needed"),
    ({}, "missing_field", "$.session.instructions: required field is missing"),
    ({"instructions": None}, "missing_field", "$.session.instructions: required field is missing"),
    ({"instructions": 5}, "invalid_payload", "$.session.instructions: an integer, a string is"),
    (
        SESSION | {"max_slice_nums": "1"},
        "invalid_payload",
        "$.session.max_slice_nums: a string of 1 characters, an integer is needed",
    ),
    (
        SESSION | {"ref_audio": encode_base64(VOICE[:-2])},
        "invalid_payload",
        "$.session.ref_audio: a WAV that says 32044 bytes and has 32042",
    ),
    (
        SESSION | {"tts_ref_audio": encode_base64(noise(10))},
        "invalid_payload",
        "$.session.tts_ref_audio: 10 samples, at least 8000 are needed",
    ),
]


@pytest.mark.parametrize(("session", "code", "text"), BAD_UPDATES)
def test_a_bad_update_is_explained(session: object, code: str, text: str) -> None:
    """Else a client author has to guess what is wrong with the first message."""
    with pytest.raises(FieldError) as caught:
        update(session)
    assert caught.value.code == code
    assert caught.value.message.startswith(text)


BAD_APPENDS: list[tuple[dict[str, object], str, str]] = [
    ({}, "missing_field", "$.audio: required field is missing"),
    ({"audio": 1}, "invalid_payload", "$.audio: an integer, a string is needed"),
    (
        {"audio": encode_base64(noise(3999))},
        "invalid_payload",
        "$.audio: 3999 samples, at least 4000 are needed",
    ),
    (
        {"audio": AUDIO_TEXT, "max_slice_nums": 10},
        "invalid_payload",
        "$.max_slice_nums: 10, allowed is 1 to 9",
    ),
]


@pytest.mark.parametrize(("fields", "code", "text"), BAD_APPENDS)
def test_a_bad_append_is_explained(fields: dict[str, object], code: str, text: str) -> None:
    """Else bad input reaches the model, or its sender never learns of it."""
    with pytest.raises(FieldError) as caught:
        append(**fields)
    assert caught.value.code == code
    assert caught.value.message.startswith(text)


def test_what_the_source_does_not_have_is_counted() -> None:
    """Else a client believes in a setting of another dialect."""
    session = SESSION | {"config": {"top_k": 1}}
    assert update(session, model="m").ignored == ("$.model", "$.session.config")
    assert append(audio=AUDIO_TEXT, input_id="mine").ignored == ("$.input_id",)
    assert append(AUDIO, audio=AUDIO_TEXT, video_frames=[5]).ignored == ("$.video_frames",)


@pytest.mark.parametrize(
    "message",
    [
        Init(instructions="", config=DuplexConfig(deferred_finalize=False)),
        Append(pcm=SECOND, input_id="mine"),
    ],
)
def test_what_the_source_cannot_say_is_not_lost_in_silence(message: Any) -> None:
    """Else our own client believes that a setting or an id was sent."""
    with pytest.raises(LocalProtocolError, match=r"no field in (duplex-v1|this dialect)"):
        DUPLEX_V1.encode_request(message)


# -- from the server ----------------------------------------------------------------------------


def test_created_is_the_sources_with_one_addition() -> None:
    """Else a documented client does not see that it may stream."""
    created = Created(session_id="rt_1714200000000", prompt_length=256, recording="off")
    assert DUPLEX_V1.encode(created) == (
        '{"type":"session.created","session_id":"rt_1714200000000",'
        '"prompt_length":256,"recording":"off"}',
    )


def frame_of(message: Any) -> dict[str, Any]:
    """The one frame of a server's message, without the metrics."""
    (frame,) = DUPLEX_V1.encode(message)
    body = dict(parse_frame(frame))
    assert body.pop("metrics")["dropped_units"] == 1
    return body


def test_speech_is_one_delta() -> None:
    """Else a documented client hears nothing, or does not see the end of the turn."""
    pcm = noise(24_000)
    speech = Speech(
        session_id="rt_1",
        response_id="resp_1",
        input_id="input_1",
        text="The weather is nice today",
        pcm=pcm,
        end_of_turn=False,
        metrics=METRICS,
    )
    assert frame_of(speech) == {
        "type": "response.output_audio.delta",
        "text": "The weather is nice today",
        "audio": encode_base64(pcm),
        "end_of_turn": False,
        "kv_cache_length": 1024,
    }


def test_a_listen_tells_the_context() -> None:
    """Else a client cannot see its context fill."""
    listen = Listen(session_id="rt_1", input_id="input_1", metrics=METRICS)
    assert frame_of(listen) == {"type": "response.listen", "kv_cache_length": 1024}


def test_the_error_is_the_sources() -> None:
    """Else a documented client cannot read what is wrong."""
    report = ErrorReport(code=ErrorCode.MISSING_FIELD, message="audio field is required")
    assert DUPLEX_V1.encode(report) == (
        '{"type":"error","error":{"code":"missing_field",'
        '"message":"audio field is required","type":"client_error"}}',
    )


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("client", "stopped"),
        ("timeout", "timeout"),
        ("context_full", "context_full"),
        ("server_shutdown", "server_shutdown"),
        ("backend_error", "error"),
        ("invalid_frame", "error"),
        ("cancelled", "stopped"),
    ],
)
def test_the_end_has_the_sources_words(reason: Any, word: str) -> None:
    """Else a documented client meets a reason that is not in its list."""
    closed = Closed(session_id="rt_1", reason=reason, client_reason="user_stop")
    assert DUPLEX_V1.encode(closed) == ('{"type":"session.closed","reason":"' + word + '"}',)


def test_the_sources_server_is_understood() -> None:
    """Else our client cannot speak to the server that 000 describes."""
    bare = Metrics(kv_cache_length=1024, recording="off")
    listen = {"type": "response.listen", "kv_cache_length": 1024}
    assert DUPLEX_V1.decode(listen) == (Listen(session_id="", input_id="", metrics=bare),)
    created = {"type": "session.created", "session_id": "rt_1", "prompt_length": 256}
    assert DUPLEX_V1.decode(created) == (
        Created(session_id="rt_1", prompt_length=256, recording="off"),
    )


@pytest.mark.parametrize(
    "body",
    [
        {"type": "session.closed", "reason": "user_stop"},
        {"type": "session.created", "session_id": "rt_1"},
        {"type": "response.listen", "kv_cache_length": -1},
        {"type": "response.output_audio.delta", "text": "", "audio": "AAA=", "end_of_turn": True},
        {"type": "response.output.delta", "kind": "listen", "session_id": "s"},
    ],
)
def test_a_servers_mistake_is_its_own(body: dict[str, object]) -> None:
    """Else a client believes an answer that makes no sense."""
    with pytest.raises(RemoteProtocolError):
        DUPLEX_V1.decode(body)
