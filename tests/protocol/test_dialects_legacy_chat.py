"""The dialect of 004: its examples word for word, and what its server says."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from protocol.values.messages import (
    Delta,
    ErrorReport,
    Metrics,
    Prefilled,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
    Response,
)
from protocol.values.model import ChatConfig
from protocol.values.requests import (
    Ask,
    AudioPart,
    ChatMessage,
    ReferenceAudio,
    Request,
    SpeechRequest,
    TextPart,
)
from protocol.wire.codec import Context, encode_base64, parse_frame
from protocol.wire.dialects import LEGACY_CHAT
from tests.strategies.messages import noise

CHAT = Context(mode="chat")
VOICE = noise(16_000)
VOICE_TEXT = encode_base64(VOICE)
REFERENCE = ReferenceAudio(data=VOICE, is_file=False)
GREETING = ChatMessage(role="user", content=(TextPart(text="Hello!"),))
PLACE = QueuePlace(position=2, estimated_wait_s=20, ticket_id="ticket_xxx", queue_length=3)


def parse(body: dict[str, object]) -> Any:
    """Parse a request."""
    assert LEGACY_CHAT.classify(body) is Request.INIT
    return LEGACY_CHAT.parse(Request.INIT, body, CHAT)


def wire(message: Any) -> dict[str, Any]:
    """The one frame of a server's message, parsed."""
    (frame,) = LEGACY_CHAT.encode(message)
    return dict(parse_frame(frame))


# -- from the client ----------------------------------------------------------------------------


def test_the_sources_request_is_read() -> None:
    """Else the documented request is refused (004, Client to Server)."""
    request = parse(
        {
            "messages": [{"role": "user", "content": "Hello!"}],
            "streaming": True,
            "generation": {"max_new_tokens": 256, "length_penalty": 1.1},
            "tts": {"enabled": True, "ref_audio_data": VOICE_TEXT},
            "image": {"max_slice_nums": None},
            "omni_mode": False,
            "enable_thinking": False,
        }
    )
    assert request == Ask(
        messages=(GREETING,),
        config=ChatConfig(max_new_tokens=256, length_penalty=1.1),
        speech=SpeechRequest(voice=REFERENCE),
    )


def test_the_request_of_the_sources_clients_is_read() -> None:
    """Else the JavaScript and Python clients of 004 are refused."""
    request = parse(
        {
            "messages": [
                {
                    "role": "system",
                    "content": [
                        {"type": "text", "text": "Mimic the voice from the audio sample."},
                        {"type": "audio", "data": VOICE_TEXT},
                        {"type": "text", "text": "You are a helpful assistant. Reply naturally."},
                    ],
                },
                {"role": "user", "content": "Hello!"},
            ],
            "streaming": True,
            "generation": {"max_new_tokens": 256, "temperature": 0.7},
            "tts": {"enabled": True, "mode": "audio_assistant", "ref_audio_data": VOICE_TEXT},
        }
    )
    system = (
        TextPart(text="Mimic the voice from the audio sample."),
        AudioPart(data=VOICE, is_file=False),
        TextPart(text="You are a helpful assistant. Reply naturally."),
    )
    assert request == Ask(
        messages=(ChatMessage(role="system", content=system), GREETING),
        config=ChatConfig(max_new_tokens=256),
        speech=SpeechRequest(mode="audio_assistant", voice=REFERENCE),
    )


def test_a_type_is_a_field_like_any_other() -> None:
    """Else a client that adds one, as of another protocol, is refused."""
    body = {"type": "chat", "messages": [{"role": "user", "content": "Hello!"}]}
    assert parse(body).ignored == ("$.type",)


def test_an_id_is_not_lost_in_silence() -> None:
    """Else our own client believes that its id comes back."""
    with pytest.raises(LocalProtocolError, match="input_id has no field in legacy-chat"):
        LEGACY_CHAT.encode_request(Ask(messages=(GREETING,), input_id="mine"))


# -- from the server ----------------------------------------------------------------------------


def test_the_queue_is_told_without_a_prefix() -> None:
    """Else a client of 004 does not see that it waits."""
    place = {"position": 2, "estimated_wait_s": 20, "ticket_id": "ticket_xxx", "queue_length": 3}
    assert wire(Queued(place=PLACE)) == {"type": "queued", **place}
    assert wire(QueueUpdate(place=PLACE)) == {"type": "queue_update", **place}
    assert wire(QueueDone()) == {"type": "queue_done"}


def test_prefill_is_told_with_its_tokens() -> None:
    """Else a documented client does not see that generation starts."""
    assert wire(Prefilled(input_tokens=42)) == {"type": "prefill_done", "input_tokens": 42}


def test_a_chunk_is_the_sources() -> None:
    """Else a documented client shows no words or plays no sound."""

    def delta(**fields: Any) -> Delta:
        return Delta(session_id="s", response_id="r", input_id="i", **fields)

    pcm = noise(10)
    assert wire(delta(text="Hello", pcm=pcm)) == {
        "type": "chunk",
        "text_delta": "Hello",
        "audio_data": encode_base64(pcm),
    }
    assert wire(delta(text="Hello")) == {"type": "chunk", "text_delta": "Hello", "audio_data": None}
    assert wire(delta(pcm=pcm))["text_delta"] is None


def done(**changes: Any) -> Response:
    """The end of the source's example."""
    fields: dict[str, Any] = {
        "session_id": "s",
        "response_id": "r",
        "input_id": "i",
        "text": "Hello! How can I help you?",
        "pcm": b"",
        "reason": "length",
        "streaming": False,
        "input_tokens": 42,
        "generated_tokens": 15,
        "recording_id": "",
        "metrics": Metrics(kv_cache_length=57),
    }
    return Response(**fields | changes)


def test_done_is_the_sources() -> None:
    """Else a documented client loses the answer, or takes a null for a recording's name."""
    pcm = noise(10)
    body = {
        "type": "done",
        "text": "Hello! How can I help you?",
        "generated_tokens": 15,
        "input_tokens": 42,
        "audio_data": encode_base64(pcm),
    }
    assert wire(done(pcm=pcm, recording_id="rec_1")) == body | {"recording_session_id": "rec_1"}
    assert wire(done()) == body | {"audio_data": None}


def test_an_error_stands_at_the_top() -> None:
    """Else a documented client shows an object where a text should be."""
    report = ErrorReport(code=ErrorCode.INFERENCE_ERROR, message="the turn failed")
    assert wire(report) == {"type": "error", "error": "the turn failed", "code": "inference_error"}


def test_the_sources_server_is_understood() -> None:
    """Else our client cannot speak to the server that 004 describes."""
    (error,) = LEGACY_CHAT.decode({"type": "error", "error": "out of memory"})
    assert error == ErrorReport(code=ErrorCode.INFERENCE_ERROR, message="out of memory")
    (delta,) = LEGACY_CHAT.decode({"type": "chunk", "text_delta": "Hello"})
    assert delta == Delta(session_id="", response_id="", input_id="", text="Hello")
    (end,) = LEGACY_CHAT.decode(
        {
            "type": "done",
            "text": "Hello! How can I help you?",
            "generated_tokens": 15,
            "input_tokens": 42,
            "recording_session_id": "chat_abc123",
        }
    )
    assert isinstance(end, Response)
    assert (end.generated_tokens, end.input_tokens, end.pcm) == (15, 42, b"")
    assert end.recording_id == "chat_abc123"


@pytest.mark.parametrize(
    "body",
    [
        {"type": "prefill_done"},
        {"type": "chunk", "text_delta": 5},
        {"type": "done"},
        {"type": "error", "error": {"code": "queue_full", "message": ""}},
        {"type": "error", "error": "x", "code": "no_such_code"},
        {"type": "queued", "position": 0},
        {"type": "stopped"},
    ],
)
def test_a_servers_mistake_is_its_own(body: dict[str, object]) -> None:
    """Else a client believes an answer that makes no sense."""
    with pytest.raises(RemoteProtocolError):
        LEGACY_CHAT.decode(body)
