"""The dialect of 002: every client message and field, every answer, and how its ends are told."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from protocol.values.errors import ErrorCode, FieldError, LocalProtocolError, RemoteProtocolError
from protocol.values.messages import (
    Closed,
    Created,
    ErrorReport,
    Interrupted,
    Listen,
    Metrics,
    Paused,
    Resumed,
    Speech,
)
from protocol.values.model import DuplexConfig
from protocol.values.requests import (
    Append,
    CloseRequest,
    Init,
    Interrupt,
    Pause,
    Played,
    ReferenceAudio,
    Report,
    Request,
    Resume,
    See,
    VoiceName,
)
from protocol.wire.codec import Context, encode_base64, parse_frame
from protocol.wire.dialects import LEGACY_DUPLEX
from tests.strategies.messages import jpeg_header, noise, wav

VIDEO = Context(mode="video", sliding_windows=("off", "basic"))
AUDIO = Context(mode="audio")
SECOND = noise(16_000)
AUDIO_TEXT = encode_base64(SECOND)
VOICE = noise(8000)
VOICE_TEXT = encode_base64(VOICE)
REFERENCE = ReferenceAudio(data=VOICE, is_file=False)
JPEG = jpeg_header(640, 480)
FRAME = encode_base64(JPEG)


def parse(kind: str, context: Context = VIDEO, **fields: object) -> Any:
    """Classify and parse a client's message."""
    body = {"type": kind, **fields}
    return LEGACY_DUPLEX.parse(LEGACY_DUPLEX.classify(body), body, context)


def wire(message: Any) -> list[dict[str, Any]]:
    """The frames of a server's message, parsed."""
    return [dict(parse_frame(frame)) for frame in LEGACY_DUPLEX.encode(message)]


# -- from the client ----------------------------------------------------------------------------

KINDS = [
    ("prepare", Request.INIT),
    ("audio_chunk", Request.APPEND),
    ("video_frame", Request.SEE),
    ("pause", Request.PAUSE),
    ("resume", Request.RESUME),
    ("stop", Request.CLOSE),
    ("interrupt", Request.INTERRUPT),
    ("client_diagnostic", Request.REPORT),
    ("playback.ack", Request.PLAYED),
    ("session.init", Request.UNKNOWN),
    ("session.close", Request.UNKNOWN),
    (None, Request.UNKNOWN),
    (["stop"], Request.UNKNOWN),
]


@pytest.mark.parametrize(("kind", "request_kind"), KINDS)
def test_every_event_of_the_source_is_known(kind: object, request_kind: Request) -> None:
    """Else a client of 002 is told that it speaks nonsense."""
    assert LEGACY_DUPLEX.classify({"type": kind}) is request_kind


def config(**settings: Any) -> dict[str, Any]:
    """What settings change in an init."""
    return {"config": DuplexConfig(**settings)}


PREPARES: list[tuple[dict[str, object], dict[str, Any]]] = [
    ({}, {}),
    ({"system_prompt": "a"}, {"instructions": "a"}),
    ({"prefix_system_prompt": "a"}, {"instructions": "a"}),
    (
        {"system_prompt": "a", "prefix_system_prompt": 5},
        {"instructions": "a", "ignored": ("$.prefix_system_prompt",)},
    ),
    ({"ref_audio_base64": VOICE_TEXT}, {"ref_audio": REFERENCE}),
    (
        {"ref_audio_base64": encode_base64(wav(16_000))},
        {"ref_audio": ReferenceAudio(data=wav(16_000), is_file=True)},
    ),
    ({"ref_audio_path": "calm-voice_1.0"}, {"ref_audio": VoiceName(name="calm-voice_1.0")}),
    (
        {"ref_audio_base64": VOICE_TEXT, "ref_audio_path": "/no/name"},
        {"ref_audio": REFERENCE, "ignored": ("$.ref_audio_path",)},
    ),
    ({"tts_ref_audio_base64": VOICE_TEXT}, {"tts_ref_audio": REFERENCE}),
    ({"max_slice_nums": 9}, {"max_slice_nums": 9}),
    ({"config": {"max_slice_nums": 9}}, {"max_slice_nums": 9}),
    ({"deferred_finalize": True}, {}),
    ({"deferred_finalize": False}, config(deferred_finalize=False)),
    ({"config": None, "deferred_finalize": None}, {}),
    ({"config": {"generate_audio": False}}, config(generate_audio=False)),
    ({"config": {"ls_mode": "explicit", "chunk_ms": 1000, "sample_rate": 16_000}}, {}),
    ({"config": {"force_listen_count": 0}}, config(force_listen_count=0)),
    ({"config": {"max_new_speak_tokens_per_chunk": 2}}, config(max_new_speak_tokens_per_chunk=2)),
    ({"config": {"temperature": 0}}, config(temperature=0.0)),
    ({"config": {"top_k": 1}}, config(top_k=1)),
    ({"config": {"top_p": 1}}, config(top_p=1.0)),
    ({"config": {"listen_prob_scale": 0}}, config(listen_prob_scale=0.0)),
    ({"config": {"length_penalty": 1.5}}, config(length_penalty=1.5)),
    (
        {"config": {"sliding_window": "basic"}, "deferred_finalize": False},
        config(sliding_window="basic", deferred_finalize=False),
    ),
    ({"mode": "x"}, {"ignored": ("$.mode",)}),
]


@pytest.mark.parametrize(("fields", "changes"), PREPARES)
def test_every_field_of_prepare_is_honoured(
    fields: dict[str, object], changes: dict[str, Any]
) -> None:
    """Else a client believes in a setting that is not in force."""
    assert parse("prepare", **fields) == attrs.evolve(Init(instructions=""), **changes)


def test_the_defaults_are_the_sources() -> None:
    """Else an unmodified client of 002 gets another model than it was written for."""
    settings = parse("prepare").config
    assert (settings.force_listen_count, settings.max_new_speak_tokens_per_chunk) == (3, 20)
    assert (settings.temperature, settings.top_k, settings.top_p) == (0.7, 20, 0.8)
    assert (settings.listen_prob_scale, settings.sliding_window) == (1.0, "off")
    assert settings.deferred_finalize


APPEND = Append(pcm=SECOND)
CHUNKS: list[tuple[Context, dict[str, object], dict[str, Any]]] = [
    (VIDEO, {"audio": AUDIO_TEXT}, {}),
    (VIDEO, {"audio_base64": AUDIO_TEXT}, {}),
    (VIDEO, {"audio": AUDIO_TEXT, "audio_base64": 5}, {"ignored": ("$.audio_base64",)}),
    (VIDEO, {"audio": AUDIO_TEXT, "frame_base64_list": [FRAME] * 4}, {"frames": (JPEG,) * 4}),
    (VIDEO, {"audio": AUDIO_TEXT, "frame_base64_list": None}, {}),
    (VIDEO, {"audio": AUDIO_TEXT, "video_frames": [5]}, {"ignored": ("$.video_frames",)}),
    (VIDEO, {"audio": AUDIO_TEXT, "force_listen": True}, {"force_listen": True}),
    (VIDEO, {"audio": AUDIO_TEXT, "max_slice_nums": 9}, {"max_slice_nums": 9}),
    (
        AUDIO,
        {"audio": AUDIO_TEXT, "frame_base64_list": ["no jpeg"]},
        {"ignored": ("$.frame_base64_list",)},
    ),
]


@pytest.mark.parametrize(("context", "fields", "changes"), CHUNKS)
def test_every_field_of_audio_chunk_is_read(
    context: Context, fields: dict[str, object], changes: dict[str, Any]
) -> None:
    """Else sound or frames of a client of 002 do not reach the model."""
    assert parse("audio_chunk", context, **fields) == attrs.evolve(APPEND, **changes)


def test_a_frame_goes_by_two_names() -> None:
    """Else the camera of some clients of 002 is black."""
    assert parse("video_frame", frame=FRAME) == See(jpeg=JPEG)
    assert parse("video_frame", frame_base64=FRAME, x=1) == See(jpeg=JPEG, ignored=("$.x",))


def test_a_frame_in_audio_mode_is_set_aside_unseen() -> None:
    """Else a client with a camera left on is refused, or its frames vanish without a trace."""
    assert parse("video_frame", AUDIO, frame="no jpeg") == See(jpeg=b"", ignored=("$.frame",))


REST: list[tuple[str, dict[str, object], Any]] = [
    ("pause", {}, Pause()),
    ("pause", {"timeout": None}, Pause()),
    ("pause", {"timeout": 5}, Pause(timeout_s=5.0)),
    ("pause", {"timeout": 0.5}, Pause(timeout_s=0.5)),
    ("resume", {}, Resume()),
    ("interrupt", {}, Interrupt()),
    ("stop", {"reason": 5, "session_id": []}, CloseRequest()),
    ("client_diagnostic", {"metrics": {"a": [1]}}, Report()),
    ("client_diagnostic", {}, Report()),
    ("playback.ack", {"played_ms": 2**53}, Played(played_ms=2**53)),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REST)
def test_the_other_events_are_read(kind: str, fields: dict[str, object], message: Any) -> None:
    """Else a client cannot pause, interrupt or leave."""
    assert parse(kind, **fields) == message


BAD: list[tuple[str, dict[str, object], str, str]] = [
    ("prepare", {"system_prompt": 5}, "invalid_payload", "$.system_prompt: an integer, a string"),
    ("prepare", {"system_prompt": "x" * 32_769}, "invalid_payload", "$.system_prompt: 32769 char"),
    ("prepare", {"ref_audio_base64": "?"}, "invalid_payload", "$.ref_audio_base64: a string of 1"),
    (
        "prepare",
        {"tts_ref_audio_base64": encode_base64(noise(10))},
        "invalid_payload",
        "$.tts_ref_audio_base64: 10 samples, at least 8000 are needed",
    ),
    (
        "prepare",
        {"ref_audio_path": "../voice.wav"},
        "invalid_payload",
        "$.ref_audio_path: 12 characters that are no name of a voice",
    ),
    ("prepare", {"ref_audio_path": ""}, "invalid_payload", "$.ref_audio_path: 0 characters, allo"),
    ("prepare", {"deferred_finalize": 0}, "invalid_payload", "$.deferred_finalize: an integer, a"),
    ("prepare", {"max_slice_nums": 0}, "invalid_payload", "$.max_slice_nums: 0, allowed is 1 to"),
    ("prepare", {"config": {"topk": 1}}, "invalid_payload", "$.config.topk: unknown field, known"),
    ("prepare", {"config": {"chunk_ms": 500}}, "invalid_payload", "$.config.chunk_ms: 500, allow"),
    (
        "prepare",
        {"config": {"sliding_window": "context"}},
        "invalid_payload",
        "$.config.sliding_window: a string of 7 characters, allowed is off, basic",
    ),
    ("audio_chunk", {}, "missing_field", "$.audio: required field is missing"),
    ("audio_chunk", {"audio": None}, "missing_field", "$.audio: required field is missing"),
    ("audio_chunk", {"audio_base64": 5}, "invalid_payload", "$.audio_base64: an integer, a string"),
    (
        "audio_chunk",
        {"audio": encode_base64(noise(0))},
        "invalid_payload",
        "$.audio: 0 samples, at least 1 is needed",
    ),
    (
        "audio_chunk",
        {"audio": AUDIO_TEXT, "frame_base64_list": [FRAME] * 5},
        "invalid_payload",
        "$.frame_base64_list: 5 items, allowed is 0 to 4",
    ),
    (
        "audio_chunk",
        {"audio": AUDIO_TEXT, "force_listen": 1},
        "invalid_payload",
        "$.force_listen: an integer, a boolean is needed",
    ),
    ("video_frame", {}, "missing_field", "$.frame: required field is missing"),
    (
        "video_frame",
        {"frame": "AAAA"},
        "invalid_payload",
        "$.frame: 3 bytes that are no JPEG, PNG or WebP",
    ),
    ("pause", {"timeout": 0}, "invalid_payload", "$.timeout: 0, allowed is above 0 to 86400"),
    ("pause", {"timeout": 86_401}, "invalid_payload", "$.timeout: 86401, allowed is above 0 to"),
    ("pause", {"timeout": "5"}, "invalid_payload", "$.timeout: a string of 1 characters, a number"),
    ("client_diagnostic", {"metrics": 5}, "invalid_payload", "$.metrics: an integer, an object is"),
]


@pytest.mark.parametrize(("kind", "fields", "code", "text"), BAD)
def test_a_bad_message_is_explained(
    kind: str, fields: dict[str, object], code: str, text: str
) -> None:
    """Else a client author has to guess what is wrong."""
    with pytest.raises(FieldError) as caught:
        parse(kind, **fields)
    assert caught.value.code == code
    assert caught.value.message.startswith(text)


def test_the_client_writes_the_sources_messages() -> None:
    """Else our own client speaks another dialect than the one it names."""
    append = Append(pcm=SECOND, frames=(JPEG,), force_listen=True, max_slice_nums=2)
    assert parse_frame(LEGACY_DUPLEX.encode_request(append)) == {
        "type": "audio_chunk",
        "audio": AUDIO_TEXT,
        "frame_base64_list": [FRAME],
        "force_listen": True,
        "max_slice_nums": 2,
    }
    init = Init(instructions="a", ref_audio=VoiceName(name="calm"), tts_ref_audio=REFERENCE)
    assert parse_frame(LEGACY_DUPLEX.encode_request(init)) == {
        "type": "prepare",
        "system_prompt": "a",
        "ref_audio_path": "calm",
        "tts_ref_audio_base64": VOICE_TEXT,
        "deferred_finalize": True,
        "max_slice_nums": 1,
    }
    assert LEGACY_DUPLEX.encode_request(CloseRequest(reason="bye")) == '{"type":"stop"}'


@pytest.mark.parametrize(
    "message",
    [
        Append(pcm=SECOND, input_id="mine"),
        Init(instructions="", tts_ref_audio=VoiceName(name="calm")),
    ],
)
def test_what_the_source_cannot_say_is_not_lost_in_silence(message: Any) -> None:
    """Else our own client believes that an id or a voice was sent."""
    with pytest.raises(LocalProtocolError, match="no field"):
        LEGACY_DUPLEX.encode_request(message)


# -- from the server ----------------------------------------------------------------------------

METRICS = Metrics(
    kv_cache_length=1024,
    prefill_ms=9.0,
    generate_ms=100.125,
    wall_clock_ms=412.125,
    cost_llm_ms=1.0,
    cost_tts_ms=2.0,
    cost_token2wav_ms=3.0,
    n_tokens=10,
    n_tts_tokens=25,
    vision_slices=2,
    vision_tokens=128,
    dropped_units=1,
    session_ms=5000.25,
    wall_ms=1_700_000_000_123.456,
)
MEASURED = {
    "current_time": 5000.25,
    "cost_llm_ms": 1.0,
    "cost_tts_prep_ms": 0.0,
    "cost_tts_ms": 2.0,
    "cost_token2wav_ms": 3.0,
    "cost_all_ms": 100.125,
    "n_tokens": 10,
    "n_tts_tokens": 25,
    "server_send_ts": 1_700_000_000.123456,
    "wall_clock_ms": 412.125,
    "kv_cache_length": 1024,
    "vision_slices": 2,
    "vision_tokens": 128,
}


def speech(pcm: bytes) -> Speech:
    """A unit that speaks."""
    return Speech(
        session_id="s",
        response_id="r",
        input_id="i",
        text="Hello",
        pcm=pcm,
        end_of_turn=True,
        metrics=METRICS,
    )


def test_a_result_has_every_field_of_the_source() -> None:
    """Else a documented client plays nothing, or shows no figures."""
    pcm = noise(10)
    listen = Listen(session_id="s", input_id="i", metrics=METRICS)
    head = {"type": "result", "is_listen": False, "text": "Hello", "end_of_turn": True}
    assert wire(speech(pcm)) == [head | {"audio_data": encode_base64(pcm)} | MEASURED]
    assert wire(speech(b"")) == [head | {"audio_data": None} | MEASURED]
    nothing = {"is_listen": True, "text": "", "audio_data": None, "end_of_turn": False}
    assert wire(listen) == [{"type": "result", **nothing, **MEASURED}]


def test_prepared_names_the_recording_where_there_is_one() -> None:
    """Else a documented client takes an empty text for a recording's name."""
    created = Created(session_id="s", prompt_length=256, recording="off")
    assert wire(created) == [{"type": "prepared", "prompt_length": 256}]
    recorded = attrs.evolve(created, recording_id="rec_1")
    assert wire(recorded)[0]["recording_session_id"] == "rec_1"


def test_pauses_are_told() -> None:
    """Else a client does not see that the model no longer hears it, or hears it again."""
    assert wire(Paused(timeout_s=60.0)) == [{"type": "paused", "timeout": 60.0}]
    assert wire(Resumed()) == [{"type": "resumed"}]
    assert wire(Interrupted()) == [{"type": "interrupted"}]


def test_an_error_stands_at_the_top() -> None:
    """Else a documented client shows an object where a text should be."""
    report = ErrorReport(code=ErrorCode.NOT_READY, message="append event in state QUEUED")
    assert wire(report) == [
        {"type": "error", "error": "append event in state QUEUED", "code": "not_ready"}
    ]


STOPPED = {"type": "stopped", "session_id": "s"}
ENDS: list[tuple[Any, list[dict[str, object]], Any]] = [
    ("client", [STOPPED], "client"),
    ("cancelled", [STOPPED], "client"),
    ("timeout", [{"type": "timeout", "reason": "the session's time is over"}], "timeout"),
    ("pause_timeout", [{"type": "timeout", "reason": "the pause was too long"}], "pause_timeout"),
    *(
        (code, [{"type": "error", "error": text, "code": code}, STOPPED], code)
        for code, text in (
            ("context_full", "the model's context is full"),
            ("backend_error", "the model failed"),
            ("server_shutdown", "the server shuts down"),
            ("invalid_frame", "a frame is not JSON, or too long"),
        )
    ),
]


@pytest.mark.parametrize(("reason", "frames", "read"), ENDS)
def test_every_end_is_told_and_read(reason: Any, frames: list[Any], read: Any) -> None:
    """Else a client waits for ever, or does not learn why its session ended."""
    assert wire(Closed(session_id="s", reason=reason)) == frames
    (closed,) = LEGACY_DUPLEX.decode(frames[0])
    assert isinstance(closed, Closed)
    assert closed.reason == read


def test_the_sources_server_is_understood() -> None:
    """Else our client cannot speak to the server that 002 describes."""
    (listen,) = LEGACY_DUPLEX.decode({"type": "result", "is_listen": True, "text": ""})
    assert listen == Listen(
        session_id="", input_id="", metrics=Metrics(kv_cache_length=0, recording="off")
    )
    (report,) = LEGACY_DUPLEX.decode({"type": "error", "error": "out of memory"})
    assert report == ErrorReport(code=ErrorCode.INFERENCE_ERROR, message="out of memory")
    (prepared,) = LEGACY_DUPLEX.decode({"type": "prepared", "prompt_length": 9})
    assert prepared == Created(session_id="", prompt_length=9, recording="off")
    (timeout,) = LEGACY_DUPLEX.decode({"type": "timeout"})
    assert timeout == Closed(session_id="", reason="timeout")
    (stopped,) = LEGACY_DUPLEX.decode({"type": "stopped"})
    assert stopped == Closed(session_id="", reason="client")


@pytest.mark.parametrize(
    "body",
    [
        {"type": "result"},
        {"type": "result", "is_listen": False, "audio_data": "AAA="},
        {"type": "paused", "timeout": -1},
        {"type": "error", "error": {"code": "queue_full", "message": ""}},
        {"type": "error", "error": "x", "code": "peer_gone"},
        {"type": "session.created", "session_id": "s"},
    ],
)
def test_a_servers_mistake_is_its_own(body: dict[str, object]) -> None:
    """Else a client believes an answer that makes no sense."""
    with pytest.raises(RemoteProtocolError):
        LEGACY_DUPLEX.decode(body)
