"""The dialect of 001 in mode=chat: its examples, its bare init, and how an answer is told."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values.errors import FieldError, RemoteProtocolError
from protocol.values.messages import Closed, Created, Delta, Metrics, Prefilled, Response
from protocol.values.model import ChatConfig
from protocol.values.requests import Ask, ChatMessage, Init, Request, TextPart
from protocol.wire.codec import Context, encode_base64, parse_frame
from protocol.wire.dialects import REALTIME
from tests.strategies.messages import noise

CHAT = Context(mode="chat")
IDS: Any = {"session_id": "sess_xxx", "response_id": "resp_xxx", "input_id": "input_xxx"}
METRICS = Metrics(kv_cache_length=42, prefill_ms=1.5, recording="on")


def init(payload: object) -> Any:
    """Parse a `session.init`."""
    return REALTIME.parse(Request.INIT, {"type": "session.init", "payload": payload}, CHAT)


def append(fields: object, **more: object) -> Any:
    """Parse an `input.append`."""
    body = {"type": "input.append", "input": fields, **more}
    return REALTIME.parse(Request.APPEND, body, CHAT)


def wire(message: Any) -> list[dict[str, Any]]:
    """The frames of a server's message, parsed."""
    return [dict(parse_frame(frame)) for frame in REALTIME.encode(message)]


# -- from the client ----------------------------------------------------------------------------

EMPTY: list[tuple[object, tuple[str, ...]]] = [
    ({}, ()),
    ({"system_prompt": ""}, ()),
    ({"instructions": None, "voice": {}, "config": {}}, ()),
    ({"voice": {"ref_audio_base64": None}}, ()),
    ({"use_tts": True}, ("$.payload.use_tts",)),
]


@pytest.mark.parametrize(("payload", "ignored"), EMPTY)
def test_an_init_is_empty(payload: object, ignored: tuple[str, ...]) -> None:
    """Else the documented first message of a chat is refused."""
    assert init(payload) == Init(instructions="", ignored=ignored)


BAD_INITS: list[tuple[object, str, str]] = [
    (None, "missing_field", "$.payload: required field is missing"),
    ("x", "invalid_payload", "$.payload: a string of 1 characters, an object is needed"),
    ({"system_prompt": 5}, "invalid_payload", "$.payload.system_prompt: an integer, a string is"),
    ({"instructions": "x" * 100_000}, "invalid_payload", "$.payload.instructions: 100000 charact"),
    (
        {"config": {"length_penalty": 1.1}},
        "invalid_payload",
        "$.payload.config.length_penalty: not allowed: in chat each turn brings its own",
    ),
    ({"config": []}, "invalid_payload", "$.payload.config: an array of 0 items, an object"),
    (
        {"voice": {"tts_ref_audio_base64": encode_base64(noise(8000))}},
        "invalid_payload",
        "$.payload.voice.tts_ref_audio_base64: 42668 characters, allowed is 0 to 0: in chat",
    ),
]


@pytest.mark.parametrize(("payload", "code", "text"), BAD_INITS)
def test_what_a_turn_would_need_is_refused_in_an_init(
    payload: object, code: str, text: str
) -> None:
    """Else a client believes in a prompt or a voice that no turn is given."""
    with pytest.raises(FieldError) as caught:
        init(payload)
    assert caught.value.code == code
    assert caught.value.message.startswith(text)


def test_the_sources_turn_is_read() -> None:
    """Else the documented turn is refused."""
    turn = append(
        {
            "messages": [{"role": "user", "content": "Reply with exactly: test"}],
            "streaming": True,
            "generation": {"max_new_tokens": 64, "length_penalty": 1.1},
            "tts": {"enabled": False},
        }
    )
    content = (TextPart(text="Reply with exactly: test"),)
    assert turn == Ask(
        messages=(ChatMessage(role="user", content=content),),
        config=ChatConfig(max_new_tokens=64, length_penalty=1.1),
    )


@pytest.mark.parametrize("input_id", ["", "x" * 65, 5])
def test_a_bad_input_id_is_refused(input_id: object) -> None:
    """Else a megabyte of id comes back in every delta."""
    messages = [{"role": "user", "content": "x"}]
    assert append({"messages": messages}, input_id="mine").input_id == "mine"
    with pytest.raises(FieldError, match=r"^\$\.input_id: "):
        append({"messages": messages}, input_id=input_id)


def test_audio_and_turns_are_not_mixed() -> None:
    """Else a client of the wrong mode waits for an answer that cannot come."""
    with pytest.raises(FieldError, match=r"^\$\.input\.messages: required field is missing"):
        append({"audio": encode_base64(noise(4000))})
    fields = {"messages": [{"role": "user", "content": "x"}]}
    body = {"type": "input.append", "input": fields}
    with pytest.raises(FieldError, match=r"^\$\.input\.audio: required field is missing"):
        REALTIME.parse(Request.APPEND, body, Context(mode="video"))


# -- from the server ----------------------------------------------------------------------------


def test_created_is_turn_based() -> None:
    """Else a client cannot see that it must ask (001, session.created)."""
    created = Created(session_id="sess_xxx", prompt_length=0, recording="on", is_chat=True)
    (body,) = wire(created)
    assert body["mode"] == "turn_based"
    assert REALTIME.decode(body, "chat") == (created,)


def test_a_delta_is_the_sources() -> None:
    """Else a documented client reads no word."""
    head = {"type": "response.output.delta", **IDS, "metrics": {}}
    pcm = noise(10)
    assert wire(Delta(**IDS, text="Hello")) == [head | {"kind": "text", "text": "Hello"}]
    assert wire(Delta(**IDS, text="Hello", pcm=pcm)) == [
        head | {"kind": "text", "text": "Hello"},
        head | {"kind": "audio", "audio": encode_base64(pcm)},
    ]


def test_the_end_of_prefill_is_not_told() -> None:
    """Else a documented client meets an event that 001 does not have."""
    assert wire(Prefilled(input_tokens=42)) == []


def response(*, streaming: bool, pcm: bytes) -> Response:
    """The end of a turn."""
    return Response(
        **IDS,
        text="test",
        pcm=pcm,
        reason="turn_end",
        streaming=streaming,
        input_tokens=42,
        generated_tokens=2,
        recording_id="rec_1",
        metrics=METRICS,
    )


def test_done_is_the_sources_with_the_counts_among_its_metrics() -> None:
    """Else a documented client does not see the end of a turn."""
    (body,) = wire(response(streaming=True, pcm=b""))
    metrics = body.pop("metrics")
    assert body == {"type": "response.done", **IDS, "text": "test", "reason": "turn_end"}
    assert (metrics["input_tokens"], metrics["generated_tokens"]) == (42, 2)
    assert (metrics["kv_cache_length"], metrics["prefill_ms"]) == (42, 1.5)


@pytest.mark.parametrize(
    ("streaming", "types", "in_done"),
    [(True, ["response.output.delta", "response.done"], False), (False, ["response.done"], True)],
)
def test_speech_comes_with_the_end_only_where_nothing_is_streamed(
    streaming: bool, types: list[str], in_done: bool
) -> None:
    """Else the last words are played twice, or never."""
    pcm = noise(10)
    frames = wire(response(streaming=streaming, pcm=pcm))
    assert [frame["type"] for frame in frames] == types
    assert (frames[-1].get("audio") == encode_base64(pcm)) is in_done


def test_the_sources_end_of_a_turn_is_understood() -> None:
    """Else our client cannot speak to the server that 001 describes."""
    body = {
        "type": "response.done",
        "session_id": "sess_xxx",
        "response_id": "resp_xxx",
        "text": "test",
        "reason": "turn_end",
        "metrics": {},
    }
    (done,) = REALTIME.decode(body, "chat")
    assert isinstance(done, Response)
    assert (done.text, done.pcm, done.reason, done.streaming) == ("test", b"", "turn_end", None)


def test_a_chat_that_is_refused_in_its_middle_says_so() -> None:
    """Else a client does not learn why its conversation is over."""
    (body,) = wire(Closed(session_id="sess_xxx", reason="refused"))
    assert body["reason"] == "refused"
    assert REALTIME.decode(body, "chat") == (Closed(session_id="sess_xxx", reason="refused"),)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "response.output.delta", "kind": "listen", "session_id": "s"},
        {"type": "response.output.delta", "kind": "text", "session_id": "s", "response_id": "r"},
        {"type": "response.done", "session_id": "s", "response_id": "r"},
        {"type": "response.done", "session_id": "s", "response_id": "r", "text": "", "reason": "x"},
    ],
)
def test_a_servers_mistake_is_its_own(body: dict[str, object]) -> None:
    """Else a client believes an answer that makes no sense."""
    with pytest.raises(RemoteProtocolError):
        REALTIME.decode(body, "chat")
