"""What the server says in the dialect of 001, its examples word for word, and how it is read."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values.errors import ErrorCode, RemoteProtocolError
from protocol.values.messages import (
    Closed,
    Created,
    ErrorReport,
    Listen,
    Metrics,
    Queued,
    QueueDone,
    QueuePlace,
    Speech,
)
from protocol.wire.codec import encode_base64, parse_frame
from protocol.wire.dialects.realtime import REALTIME
from tests.strategies.messages import noise

METRICS = Metrics(kv_cache_length=1024, wall_clock_ms=412.125, dropped_units=2)
METRICS_WIRE = {
    "kv_cache_length": 1024,
    "prefill_ms": 0.0,
    "generate_ms": 0.0,
    "wall_clock_ms": 412.125,
    "cost_llm_ms": 0.0,
    "cost_tts_ms": 0.0,
    "cost_token2wav_ms": 0.0,
    "n_tokens": 0,
    "n_tts_tokens": 0,
    "vision_slices": 0,
    "vision_tokens": 0,
    "dropped_units": 2,
    "recording": "on",
}


def speech(text: str, pcm: bytes, *, end_of_turn: bool = False) -> Speech:
    """A unit that speaks."""
    return Speech(
        session_id="sess_xxx",
        response_id="resp_xxx",
        input_id="input_xxx",
        text=text,
        pcm=pcm,
        end_of_turn=end_of_turn,
        metrics=METRICS,
    )


def wire(message: Any) -> list[dict[str, Any]]:
    """The frames of a server's message, parsed; a copy, keys in their order."""
    return [dict(parse_frame(frame)) for frame in REALTIME.encode(message)]


def test_queue_events_and_errors_are_the_sources() -> None:
    """Else a documented client cannot read its place or its error."""
    place = QueuePlace(position=2, estimated_wait_s=20, ticket_id="ticket_xxx", queue_length=3)
    assert REALTIME.encode(Queued(place=place)) == (
        '{"type":"session.queued","position":2,"estimated_wait_s":20,'
        '"ticket_id":"ticket_xxx","queue_length":3}',
    )
    assert REALTIME.encode(QueueDone()) == ('{"type":"session.queue_done"}',)
    report = ErrorReport(code=ErrorCode.QUEUE_FULL, message="Queue full")
    assert REALTIME.encode(report) == (
        '{"type":"error","error":{"code":"queue_full","message":"Queue full",'
        '"type":"server_error"}}',
    )


def test_created_is_the_sources_with_two_additions() -> None:
    """Else a documented client does not see that it may stream."""
    created = Created(session_id="sess_xxx", prompt_length=256, recording="on")
    assert REALTIME.encode(created) == (
        '{"type":"session.created","session_id":"sess_xxx","mode":"full_duplex",'
        '"prompt_length":256,"recording":"on","metrics":{}}',
    )


def test_a_listen_has_no_response() -> None:
    """Else a client takes a listen for a part of a turn."""
    listen = Listen(session_id="sess_xxx", input_id="input_xxx", metrics=METRICS)
    assert wire(listen) == [
        {
            "type": "response.output.delta",
            "kind": "listen",
            "session_id": "sess_xxx",
            "input_id": "input_xxx",
            "metrics": METRICS_WIRE,
        }
    ]


def test_speech_is_text_then_audio() -> None:
    """Else captions come after the words, or a branch has no metrics."""
    pcm = noise(10)
    head = {
        "type": "response.output.delta",
        "session_id": "sess_xxx",
        "response_id": "resp_xxx",
        "input_id": "input_xxx",
        "metrics": METRICS_WIRE,
    }
    assert wire(speech("Hello", pcm)) == [
        head | {"kind": "text", "text": "Hello"},
        head | {"kind": "audio", "audio": encode_base64(pcm)},
    ]


@pytest.mark.parametrize(
    ("text", "pcm", "kinds"),
    [
        ("Hello", noise(10), ["text", "audio"]),
        ("Hello", b"", ["text"]),
        ("", noise(10), ["audio"]),
        ("", b"", ["text"]),
    ],
)
def test_the_last_delta_of_a_turn_says_so(text: str, pcm: bytes, kinds: list[str]) -> None:
    """Else a client never learns that the model has finished speaking."""
    frames = wire(speech(text, pcm, end_of_turn=True))
    assert [frame["kind"] for frame in frames] == kinds
    assert [frame.get("end_of_turn") for frame in frames] == [None] * (len(frames) - 1) + [True]
    assert not any("end_of_turn" in frame for frame in wire(speech(text, pcm)))


@pytest.mark.parametrize(
    ("reason", "client_reason", "word"),
    [
        ("client", "user_stop", "user_stop"),
        ("client", None, "client_closed"),
        ("timeout", None, "timeout"),
        ("context_full", None, "context_full"),
        ("backend_error", None, "backend_error"),
        ("server_shutdown", None, "server_shutdown"),
        ("cancelled", None, "cancelled"),
        ("timeout", "user_stop", "timeout"),
    ],
)
def test_the_end_has_the_sources_words(reason: Any, client_reason: str | None, word: str) -> None:
    """Else a client cannot tell a timeout from its own goodbye."""
    message = Closed(session_id="sess_xxx", reason=reason, client_reason=client_reason)
    assert wire(message) == [{"type": "session.closed", "session_id": "sess_xxx", "reason": word}]


def test_the_sources_server_is_understood() -> None:
    """Else our client cannot speak to the server that 001 describes."""
    created = {
        "type": "session.created",
        "session_id": "sess_xxx",
        "mode": "full_duplex",
        "metrics": {},
    }
    delta = {
        "type": "response.output.delta",
        "kind": "text",
        "session_id": "sess_xxx",
        "response_id": "resp_xxx",
        "input_id": "input_xxx",
        "text": "Hello",
        "metrics": {},
    }
    assert REALTIME.decode(created) == (
        Created(session_id="sess_xxx", prompt_length=0, recording="off"),
    )
    assert REALTIME.decode(delta) == (
        Speech(
            session_id="sess_xxx",
            response_id="resp_xxx",
            input_id="input_xxx",
            text="Hello",
            pcm=b"",
            end_of_turn=False,
            metrics=Metrics(kv_cache_length=0, recording="off"),
        ),
    )


@pytest.mark.parametrize(
    "body",
    [
        {"type": "session.created", "session_id": "s", "mode": "video"},
        {"type": "response.output.delta", "kind": "video", "session_id": "s"},
        {"type": "response.output.delta", "kind": "text", "session_id": "s", "response_id": "r"},
        {"type": "session.queued", "position": 0},
        {"type": "error", "error": {"code": "no_such_code", "message": ""}},
        {"type": "response.listen", "kv_cache_length": 1},
    ],
)
def test_a_servers_mistake_is_its_own(body: dict[str, object]) -> None:
    """Else a client believes an answer that makes no sense."""
    with pytest.raises(RemoteProtocolError):
        REALTIME.decode(body)
