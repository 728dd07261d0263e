"""Hypothesis strategies: canonical messages of both ends, and wire frames gone wrong.

`inits`, `appends`, `server_messages` and the like make what the dialects promise to carry both
ways. Audio is drawn as a length and a seed, so that examples stay small enough to shrink.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st

from protocol.errors import ErrorCode
from protocol.limits import APPEND_SAMPLES_MIN, INPUT_ID_CHARS_MAX, REASON_CHARS_MAX
from protocol.messages import (
    Append,
    ClientMessage,
    Closed,
    CloseRequest,
    Created,
    ErrorReport,
    Init,
    Listen,
    Metrics,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
    ReferenceAudio,
    ServerMessage,
    Speech,
)
from protocol.model import DuplexConfig

SERVER_WORDS = (
    "client_closed",
    "timeout",
    "context_full",
    "backend_error",
    "server_shutdown",
    "cancelled",
    "invalid_frame",
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


def pcm(samples_min: int, samples_max: int) -> st.SearchStrategy[bytes]:
    """Float32 LE samples, finite."""
    return st.builds(noise, st.integers(samples_min, samples_max), st.integers(0, 3))


jpegs = st.builds(
    jpeg_header, st.integers(80, 4000), st.integers(80, 4000), st.sampled_from([0xC0, 0xC1, 0xC2])
)
reference_audios = st.one_of(
    st.builds(lambda data: ReferenceAudio(data=data, is_wav=False), pcm(8000, 8003)),
    st.builds(
        lambda rate, channels: ReferenceAudio(data=wav(rate, rate, channels), is_wav=True),
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


def inits(config: st.SearchStrategy[DuplexConfig] = configs) -> st.SearchStrategy[Init]:
    """Inits; `duplex-v1` has no settings: give it `st.just(DuplexConfig())`."""
    return st.builds(
        Init,
        instructions=st.text(max_size=40),
        ref_audio=st.none() | reference_audios,
        tts_ref_audio=st.none() | reference_audios,
        max_slice_nums=st.integers(1, 9),
        config=config,
    )


def appends(*, own_ids: bool = True) -> st.SearchStrategy[Append]:
    """Appends of mode=video; `duplex-v1` has no `own_ids`."""
    return st.builds(
        Append,
        pcm=pcm(APPEND_SAMPLES_MIN, APPEND_SAMPLES_MIN + 40),
        frames=st.lists(jpegs, max_size=4).map(tuple),
        force_listen=st.booleans(),
        max_slice_nums=st.none() | st.integers(1, 9),
        input_id=st.none() | st.text(min_size=1, max_size=INPUT_ID_CHARS_MAX)
        if own_ids
        else st.none(),
    )


close_requests = st.builds(
    CloseRequest, reason=st.none() | st.text(min_size=1, max_size=REASON_CHARS_MAX)
)


def client_messages(dialect_name: str) -> st.SearchStrategy[ClientMessage]:
    """Everything that a client can say in a dialect, in mode=video."""
    plain = dialect_name == "duplex-v1"
    return st.one_of(
        inits(st.just(DuplexConfig()) if plain else configs),
        appends(own_ids=not plain),
        close_requests,
    )


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
error_reports = st.builds(ErrorReport, code=st.sampled_from(ErrorCode), message=st.text())
_session_ids = _ids.map("sess_{}".format)
created = st.builds(
    Created, session_id=_session_ids, prompt_length=_counts, recording=recording_states
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
closed = st.one_of(
    st.builds(Closed, session_id=_session_ids, reason=st.sampled_from(SERVER_WORDS[1:])),
    st.builds(
        Closed,
        session_id=_session_ids,
        reason=st.just("client"),
        client_reason=st.none()
        | st.text(min_size=1, max_size=REASON_CHARS_MAX).filter(lambda t: t not in SERVER_WORDS),
    ),
)
server_messages: st.SearchStrategy[ServerMessage] = st.one_of(
    queue_events, error_reports, created, listens, speeches, closed
)

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
