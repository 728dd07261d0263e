"""Hypothesis strategies: canonical messages of both ends, and wire frames gone wrong.

`client_messages` and `server_messages` make what a dialect promises to carry in a mode. Audio is
drawn as a length and a seed, so that examples stay small enough to shrink.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

from protocol.values.errors import LIVE_ERRORS, TRANSCRIPTION_ERRORS, ErrorCode
from protocol.values.limits import APPEND_SAMPLES_MIN, INPUT_ID_CHARS_MAX, REASON_CHARS_MAX, Mode
from protocol.values.messages import (
    Closed,
    Created,
    Delta,
    ErrorReport,
    GoingAway,
    Interrupted,
    Listen,
    Metrics,
    Paused,
    Prefilled,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
    Response,
    Resumed,
    ServerMessage,
    Speech,
    TranscriptDelta,
    TranscriptDone,
)
from protocol.values.model import ChatConfig, DuplexConfig
from protocol.values.requests import (
    Append,
    AppendSound,
    Ask,
    AudioPart,
    ChatMessage,
    ChooseModel,
    ClientMessage,
    CloseRequest,
    Commit,
    ImagePart,
    Init,
    Interrupt,
    Pause,
    ReferenceAudio,
    Report,
    Resume,
    See,
    SpeechRequest,
    TextPart,
    VideoPart,
    VoiceName,
)
from tests.strategies.live_messages import live_answers, live_requests
from tests.strategies.omni_messages import omni_answers, omni_requests
from tests.strategies.openai_messages import (
    dictation_answers,
    dictation_requests,
    openai_answers,
    openai_requests,
)
from tests.strategies.tools import calls, tool_exchanges, tools

SERVER_WORDS = (
    "client_closed",
    "timeout",
    "context_full",
    "backend_error",
    "server_shutdown",
    "cancelled",
    "invalid_frame",
    "refused",
)
"""Close reasons that a client's own cannot be told from in `realtime`."""

# -- media --------------------------------------------------------------------------------------


def noise(samples: int, seed: int = 0) -> bytes:
    """Make float32 LE samples in [-1, 1)."""
    return np.random.default_rng(seed).uniform(-1, 1, samples).astype("<f4").tobytes()


def jpeg_header(width: int, height: int, sof: int = 0xC0) -> bytes:
    """Make a JPEG of three components up to its frame header, with a JFIF segment before it."""
    jfif = b"\xff\xe0" + struct.pack(">H", 16) + b"JFIF\0\1\1\0\0\1\0\1\0\0"
    body = struct.pack(">BHHB", 8, height, width, 3) + bytes.fromhex("011100021101031101")
    return b"\xff\xd8" + jfif + bytes([0xFF, sof]) + struct.pack(">H", 2 + len(body)) + body


def wav(
    samples: int,
    rate_hz: int = 16_000,
    channels: int = 1,
    *,
    bits: int = 16,
    tag: int = 1,
    extensible: bool = False,
) -> bytes:
    """Make a WAV file of silence."""
    block = channels * bits // 8
    head = (channels, rate_hz, rate_hz * block, block, bits)
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else tag, *head)
    if extensible:
        guid = struct.pack("<H", tag) + bytes.fromhex("000000001000800000aa00389b71")
        form += struct.pack("<HHI", 22, bits, 0) + guid
    data = bytes(samples * block)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def png_header(width: int, height: int) -> bytes:
    """Make a PNG of 8-bit RGB up to its header."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(body)) + b"IHDR" + body


def mp4_head(extra: int = 0) -> bytes:
    """Make the head of an MP4 file."""
    return b"\0\0\0\x10ftypisom\0\0\0\0" + bytes(extra)


def pcm(samples_min: int, samples_max: int) -> st.SearchStrategy[bytes]:
    """Float32 LE samples, finite."""
    return st.builds(noise, st.integers(samples_min, samples_max), st.integers(0, 3))


jpegs = st.builds(
    jpeg_header, st.integers(80, 4000), st.integers(80, 4000), st.sampled_from([0xC0, 0xC1, 0xC2])
)
images = jpegs | st.builds(png_header, st.integers(80, 4000), st.integers(80, 4000))
reference_audios = st.one_of(
    st.builds(lambda data: ReferenceAudio(data=data, is_file=False), pcm(8000, 8003)),
    st.builds(
        lambda rate, channels: ReferenceAudio(data=wav(rate, rate, channels), is_file=True),
        st.sampled_from([8000, 16000, 48000]),
        st.integers(1, 2),
    ),
)

# -- from the client ----------------------------------------------------------------------------

configs = st.builds(
    DuplexConfig,
    generate_audio=st.booleans(),
    force_listen_count=st.integers(0, 100),
    max_new_speak_tokens_per_chunk=st.integers(2, 20),
    temperature=st.floats(0, 2),
    top_k=st.integers(1, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    listen_prob_scale=st.floats(0, 10),
    length_penalty=st.floats(0.1, 10),
    sliding_window=st.sampled_from(["off", "basic", "context"]),
)


voice_names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", fullmatch=True).map(
    lambda name: VoiceName(name=name)
)


def inits(
    config: st.SearchStrategy[DuplexConfig] = configs,
    ref_audio: st.SearchStrategy[Any] = reference_audios,
) -> st.SearchStrategy[Init]:
    """Inits."""
    return st.builds(
        Init,
        instructions=st.text(max_size=40),
        ref_audio=st.none() | ref_audio,
        tts_ref_audio=st.none() | reference_audios,
        max_slice_nums=st.integers(1, 9),
        config=config,
        notices=st.booleans(),
        record=st.booleans(),
    )


def _input_ids(own_ids: bool) -> st.SearchStrategy[str | None]:
    return st.none() | st.text(min_size=1, max_size=INPUT_ID_CHARS_MAX) if own_ids else st.none()


def appends(*, own_ids: bool = True) -> st.SearchStrategy[Append]:
    """Appends of mode=video; only `realtime` has `own_ids`."""
    return st.builds(
        Append,
        pcm=pcm(APPEND_SAMPLES_MIN, APPEND_SAMPLES_MIN + 40),
        frames=st.lists(jpegs, max_size=4).map(tuple),
        force_listen=st.booleans(),
        max_slice_nums=st.none() | st.integers(1, 9),
        input_id=_input_ids(own_ids),
    )


close_requests = st.builds(
    CloseRequest, reason=st.none() | st.text(min_size=1, max_size=REASON_CHARS_MAX)
)

# -- a turn of chat -----------------------------------------------------------------------------

_texts = st.builds(TextPart, text=st.text(max_size=20))
_images = st.builds(ImagePart, data=images)
_sounds = st.builds(
    lambda data, rate: AudioPart(data=data, is_file=False, rate_hz=rate),
    pcm(4800, 4802),
    st.sampled_from([8000, 16_000, 48_000]),
) | st.builds(lambda rate: AudioPart(data=wav(rate, rate), is_file=True), st.just(16_000))
_videos = st.builds(
    VideoPart, data=st.builds(mp4_head, st.integers(0, 8)), stack_frames=st.integers(1, 5)
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[ChatMessage, ...]:
    """Messages in any order that is allowed, with a video at most."""
    parts = st.lists(_texts | _images | _sounds, min_size=1, max_size=4)
    message = st.builds(
        ChatMessage, role=st.sampled_from(["user", "assistant"]), content=parts.map(tuple)
    )
    messages = draw(st.lists(message, max_size=3)) + draw(tool_exchanges())
    if draw(st.booleans()):
        messages.insert(0, ChatMessage(role="system", content=tuple(draw(parts))))
    last = draw(parts) + draw(st.lists(_videos, max_size=1))
    return (*messages, ChatMessage(role="user", content=tuple(last)))


chat_configs = st.builds(
    ChatConfig,
    max_new_tokens=st.integers(1, 8192),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(1, 1000),
    repetition_penalty=st.floats(1, 2),
    length_penalty=st.floats(0.1, 10),
    min_new_tokens=st.integers(0, 8192),
)
_languages = st.sampled_from(["en", "zh"])
speech_requests = st.builds(
    SpeechRequest,
    mode=st.sampled_from(["default", "audio_assistant", "omni", "audio_roleplay"]),
    language=_languages,
    voice=st.none() | reference_audios | voice_names,
    voice_ms_max=st.none() | st.integers(1000, 600_000),
) | st.builds(
    SpeechRequest,
    mode=st.just("voice_cloning"),
    language=_languages,
    voice=reference_audios | voice_names,
)


def asks(*, own_ids: bool = True) -> st.SearchStrategy[Ask]:
    """Turns; only `realtime` has `own_ids`."""
    return st.builds(
        Ask,
        messages=conversations(),
        streaming=st.booleans(),
        config=chat_configs,
        speech=st.none() | speech_requests,
        max_slice_nums=st.none() | st.integers(1, 9),
        use_image_id=st.booleans(),
        omni=st.booleans(),
        thinking=st.booleans(),
        tts_template=st.booleans(),
        record=st.just(True) if own_ids else st.booleans(),
        tools=tools,
        tool_choice=st.sampled_from(["auto", "none"]),
        input_id=_input_ids(own_ids),
    )


sounds16 = st.builds(
    lambda samples, seed: (
        np.random.default_rng(seed).integers(-(2**15), 2**15, samples).astype("<i2").tobytes()
    ),
    st.integers(1, 5000),
    st.integers(0, 3),
)
transcription_requests = st.one_of(
    st.builds(ChooseModel, model=st.text(max_size=80), record=st.booleans()),
    st.builds(AppendSound, pcm16=sounds16),
    st.builds(Commit, final=st.booleans()),
)


def client_messages(dialect_name: str, mode: Mode = "video") -> st.SearchStrategy[ClientMessage]:
    """Everything that a client can say in a dialect and a mode."""
    match dialect_name, mode:
        case "transcription", _:
            return transcription_requests
        case "transcription-responses", _:
            return transcription_requests | st.just(Commit(final=True, begins=False))
        case "legacy-chat", _:
            return asks(own_ids=False)
        case "live", _:
            return live_requests(voice_names, sounds16)
        case "openai", _:
            return openai_requests(sounds16, images)
        case "openai-transcription", _:
            return dictation_requests(sounds16)
        case "vllm-omni", _:
            return omni_requests(sounds16, images, jpegs, reference_audios, close_requests)
        case "realtime", "chat":
            init = st.builds(Init, instructions=st.text(max_size=40), notices=st.booleans())
            return st.one_of(init, asks(), close_requests)
        case "legacy-duplex", _:
            config = st.builds(
                lambda config, is_deferred: attrs.evolve(config, deferred_finalize=is_deferred),
                configs,
                st.booleans(),
            )
            return st.one_of(
                inits(config, reference_audios | voice_names),
                appends(own_ids=False),
                st.builds(See, jpeg=jpegs),
                st.builds(Pause, timeout_s=st.none() | st.floats(0, 86_400, exclude_min=True)),
                st.sampled_from([Resume(), Interrupt(), Report(), CloseRequest()]),
            )
        case "duplex-v1", _:
            return st.one_of(inits(), appends(own_ids=False), close_requests)
    return st.one_of(inits(), appends(), close_requests)


# -- from the server ----------------------------------------------------------------------------

_counts = st.integers(0, 100_000)
_times_ms = st.integers(0, 100_000_000).map(lambda us: us / 1000)
_ids = st.text("0123456789abcdef", min_size=12, max_size=12)
recording_states = st.sampled_from(["on", "off", "failed"])
metrics = st.builds(
    Metrics,
    kv_cache_length=_counts,
    prefill_ms=_times_ms,
    generate_ms=_times_ms,
    wall_clock_ms=_times_ms,
    cost_llm_ms=_times_ms,
    cost_tts_ms=_times_ms,
    cost_token2wav_ms=_times_ms,
    n_tokens=_counts,
    n_tts_tokens=_counts,
    vision_slices=_counts,
    vision_tokens=_counts,
    dropped_units=_counts,
    recording=recording_states,
    session_ms=_times_ms,
    wall_ms=st.integers(0, 2 * 10**15).map(lambda us: us / 1000),
)
queue_places = st.builds(
    QueuePlace,
    position=st.integers(1, 1000),
    estimated_wait_s=st.integers(0, 10_000),
    ticket_id=_ids.map("ticket_{}".format),
    queue_length=st.integers(1, 1000),
)
queue_events = st.one_of(
    st.builds(Queued, place=queue_places),
    st.builds(QueueUpdate, place=queue_places),
    st.just(QueueDone()),
)
error_reports = st.builds(
    ErrorReport,
    code=st.sampled_from(
        [code for code in ErrorCode if code not in TRANSCRIPTION_ERRORS | LIVE_ERRORS]
    ),
    message=st.text(),
)
transcription_errors = st.builds(
    ErrorReport,
    code=st.sampled_from([code for code in ErrorCode if code not in LIVE_ERRORS]),
    message=st.text(),
)
_session_ids = _ids.map("sess_{}".format)
_recording_ids = st.just("") | _ids.map("rec_{}".format)


def created(*, is_chat: bool = False) -> st.SearchStrategy[Created]:
    """Sessions that are set up."""
    return st.builds(
        Created,
        session_id=_session_ids,
        prompt_length=_counts,
        recording=recording_states,
        recording_id=_recording_ids,
        recording_notice=st.text(max_size=20),
        is_chat=st.just(is_chat),
    )


listens = st.builds(
    Listen, session_id=_session_ids, input_id=_ids.map("input_{}".format), metrics=metrics
)
speeches = st.builds(
    Speech,
    session_id=_session_ids,
    response_id=_ids.map("resp_{}".format),
    input_id=_ids.map("input_{}".format),
    text=st.text(max_size=20),
    pcm=pcm(0, 50),
    end_of_turn=st.booleans(),
    metrics=metrics,
)
_turn_ids: dict[str, Any] = {
    "session_id": _session_ids,
    "response_id": _ids.map("resp_{}".format),
    "input_id": _ids.map("input_{}".format),
}
deltas = st.builds(Delta, **_turn_ids, text=st.text(max_size=20), pcm=pcm(0, 50))
responses = st.builds(
    Response,
    **_turn_ids,
    text=st.text(max_size=20),
    pcm=pcm(0, 50),
    reason=st.sampled_from(["turn_end", "length", "interrupted", "tool_calls"]),
    streaming=st.booleans(),
    input_tokens=_counts,
    generated_tokens=_counts,
    recording_id=_recording_ids,
    metrics=metrics,
    tool_calls=calls(),
)
prefills = st.builds(Prefilled, input_tokens=_counts)


def closed(*reasons: str) -> st.SearchStrategy[Closed]:
    """Ends for one of these reasons, or by the client's wish."""
    return st.one_of(
        st.builds(Closed, session_id=_session_ids, reason=st.sampled_from(reasons)),
        st.builds(
            Closed,
            session_id=_session_ids,
            reason=st.just("client"),
            client_reason=st.none()
            | st.text(min_size=1, max_size=REASON_CHARS_MAX).filter(
                lambda text: text not in SERVER_WORDS
            ),
        ),
    )


_pauses = st.one_of(
    st.builds(Paused, timeout_s=st.floats(0, 86_400, exclude_min=True)),
    st.sampled_from([Resumed(), Interrupted()]),
)


_warnings = st.builds(GoingAway, seconds_left=st.integers(0, 86_400))


transcription_answers = st.one_of(
    st.builds(
        Created,
        session_id=_session_ids,
        prompt_length=st.just(0),
        recording=st.just("off"),
        created_s=st.integers(0, 2**40),
    ),
    st.builds(TranscriptDelta, text=st.text(min_size=1, max_size=20)),
    st.builds(
        TranscriptDone, text=st.text(max_size=40), prompt_tokens=_counts, completion_tokens=_counts
    ),
    transcription_errors,
    st.builds(
        Closed,
        session_id=st.just(""),
        reason=st.sampled_from(["timeout", "backend_error", "server_shutdown"]),
    ),
)


def server_messages(dialect_name: str, mode: Mode = "video") -> st.SearchStrategy[ServerMessage]:
    """Everything that a server can say in a dialect and a mode."""
    common = queue_events | error_reports
    ends = SERVER_WORDS[1:-1]
    match dialect_name, mode:
        case "transcription" | "transcription-responses", _:
            return transcription_answers
        case "legacy-chat", _:
            return st.one_of(common, prefills, deltas, responses)
        case "live", _:
            ends = st.sampled_from(["client", *SERVER_WORDS[1:-1]])
            return live_answers(queue_events | listens, speeches, _session_ids, ends)
        case "openai", _:
            return openai_answers(speeches, _session_ids)
        case "openai-transcription", _:
            return dictation_answers(_session_ids)
        case "vllm-omni", _:
            places = queue_events.filter(lambda it: not isinstance(it, QueueDone))
            ends = st.sampled_from(["client", *SERVER_WORDS[1:-1], "flooded"])
            return omni_answers(places, listens, speeches, _session_ids, ends)
        case "realtime", "chat":
            end = closed(*ends, "refused")
            return st.one_of(common, _warnings, created(is_chat=True), deltas, responses, end)
        case "legacy-duplex", _:
            end = closed(*ends, "pause_timeout")
            return st.one_of(common, _warnings, created(), listens, speeches, _pauses, end)
    return st.one_of(common, _warnings, created(), listens, speeches, closed(*ends))


# -- frames gone wrong --------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
WIRE_WORDS = (
    *("type", "session", "payload", "input", "audio", "video_frames", "force_listen", "reason"),
    *("max_slice_nums", "input_id", "instructions", "system_prompt", "voice", "config", "model"),
    *("session.init", "session.update", "input.append", "input_audio_buffer.append"),
    *("session.close", "session.created", "response.listen", "response.output.delta", "error"),
    *("temperature", "top_p", "sliding_window", "ref_audio", "ref_audio_base64"),
    *("prepare", "audio_chunk", "video_frame", "pause", "resume", "stop", "interrupt", "result"),
    *("client_diagnostic", "prepared", "stopped", "timeout", "code", "audio_data", "frame"),
    *("messages", "role", "content", "text", "image", "data", "sample_rate", "stack_frames"),
    *("streaming", "generation", "tts", "enabled", "mode", "language", "ref_audio_path"),
    *("user", "assistant", "system", "chunk", "done", "prefill_done", "response.done"),
    *("session.create", "input_audio_buffer.commit", "response.create", "final", "usage", "id"),
    *("session.start", "session.input_audio.append", "session.input_audio.mute", "event_id"),
    *("session.output_audio.delta", "session.started", "info", "format", "rate", "delegation"),
    *("conversation.item.create", "response.cancel", "turn_detection", "server_vad", "item_id"),
    *("input_audio_buffer.clear", "output_modalities", "response.done", "item", "content"),
    *("transcription.delta", "transcription.done", "response.text.delta", "delta", "created"),
)
_wire_words = st.sampled_from(WIRE_WORDS)
json_objects = st.dictionaries(
    _wire_words | st.text(max_size=6), json_values | _wire_words, max_size=6
)


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """List every (container, key) of a JSON value."""
    if isinstance(value, dict):
        own = [(value, key) for key in value]
    elif isinstance(value, list):
        own = [(value, index) for index in range(len(value))]
    else:
        return []
    return own + [spot for container, key in own for spot in _spots(container[key])]


@st.composite
def mutated_bodies(draw: st.DrawFn, frames: st.SearchStrategy[str]) -> dict[str, object]:
    """A frame's object with a few of its values replaced, removed or added."""
    body: dict[str, object] = json.loads(draw(frames))
    for _ in range(draw(st.integers(1, 3))):
        spots = _spots(body)
        if not spots:
            break
        container, key = spots[draw(st.integers(0, len(spots) - 1))]
        action = draw(st.sampled_from(["replace", "remove", "add", "cut"]))
        if action == "replace":
            container[key] = draw(json_values | json_objects)
        elif action == "cut" and isinstance(container[key], str):
            container[key] = container[key][: draw(st.integers(0, 40))]
        elif action == "add" and isinstance(container, dict):
            container[draw(_wire_words)] = draw(json_values)
        else:
            del container[key]
    return body


@st.composite
def mutated_texts(draw: st.DrawFn, frames: st.SearchStrategy[str]) -> str:
    """A frame's text with a piece cut out and another put in."""
    text = draw(frames)
    start = draw(st.integers(0, len(text)))
    stop = draw(st.integers(start, min(start + 8, len(text))))
    piece = draw(st.sampled_from(['"', "{", "}", "[", ":", ",", "\\ud800", "NaN", "0", ""]))
    return text[:start] + piece + text[stop:]
