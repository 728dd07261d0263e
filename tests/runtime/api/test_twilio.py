"""What a call's door writes of Twilio's messages, and of its session's."""

from __future__ import annotations

import base64
import json
from typing import Any, Final, NoReturn

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.frames import Received
from runtime.api.adapters import TranslatedWebSocket
from runtime.api.twilio import MARK_BYTES, PIECE_BYTES, Call, is_signed, signature_of
from runtime.net.connection import OnMessages, WebSocketClosed

pytestmark = pytest.mark.anyio

START: Final = {
    "event": "start",
    "streamSid": "MZ1",
    "start": {"callSid": "CA1", "customParameters": {}},
}
SECOND: Final = 8_000


@attrs.define
class Socket:
    """Twilio's end: messages that it sends, and those that it gets."""

    messages: list[Received] = attrs.Factory(list)
    sent: list[dict[str, Any]] = attrs.Factory(list)

    async def receive(self) -> Received:
        if not self.messages:
            raise WebSocketClosed(1000, "")
        return self.messages.pop(0)

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        while True:
            on_messages(await self.receive())

    async def send(self, *frames: str) -> None:
        self.sent += map(json.loads, frames)

    async def close(self, code: int, reason: str) -> None: ...
    async def abort(self) -> None: ...


async def heard(call: TranslatedWebSocket, socket: Socket, *messages: Any) -> list[Any]:
    """What the session gets of messages."""
    socket.messages = [it if isinstance(it, str) else json.dumps(it) for it in messages]
    found: list[Any] = []
    with pytest.raises(WebSocketClosed):
        await call.deliver(lambda *them: found.extend(them))
    return [json.loads(it) for it in found]


def media(payload: str = "") -> dict[str, Any]:
    return {"event": "media", "media": {"track": "inbound", "payload": payload}}


def mark(name: str) -> dict[str, Any]:
    return {"event": "mark", "mark": {"name": name}}


def told(kind: str, **body: Any) -> str:
    return json.dumps({"type": kind, **body})


def delta(item: str, count: int = SECOND) -> str:
    sound = base64.b64encode(bytes(count)).decode()
    return told("response.output_audio.delta", item_id=item, delta=sound)


async def test_sound_goes_in_pieces_with_marks() -> None:
    """Twilio buffers a second that cannot be cut, or nobody knows how much was played."""
    socket = Socket()
    call = TranslatedWebSocket(socket, Call())
    await heard(call, socket, START)
    await call.send(delta("item_1"))
    pieces = [it for it in socket.sent if it["event"] == "media"]
    assert {len(base64.b64decode(it["media"]["payload"])) for it in pieces} == {PIECE_BYTES}
    assert {it["streamSid"] for it in socket.sent} == {"MZ1"}
    names = [it["mark"]["name"] for it in socket.sent if it["event"] == "mark"]
    assert names == [f"item_1:{at}" for at in range(MARK_BYTES, SECOND + 1, MARK_BYTES)]


async def test_what_was_not_played_is_forgotten_once_the_response_is_over() -> None:
    """A session refuses it before; and marks that were cleared are taken for sound."""
    socket = Socket()
    call = TranslatedWebSocket(socket, Call())
    await heard(call, socket, START)
    await call.send(told("response.created"), delta("item_1"))
    await heard(call, socket, mark("item_1:1600"), mark("item_1:3200"))
    await call.send(told("input_audio_buffer.speech_started"))
    assert socket.sent[-1] == {"event": "clear", "streamSid": "MZ1"}
    before = len(socket.sent)
    assert await heard(call, socket, mark("item_1:8000"), media()) == [
        {"type": "input_audio_buffer.append", "audio": ""}
    ]
    await call.send(delta("item_1", 160))  # of the unit that was cut
    assert len(socket.sent) == before
    await call.send(told("response.done"))
    (_, cut) = await heard(call, socket, media())
    assert cut == {
        "type": "conversation.item.truncate",
        "item_id": "item_1",
        "content_index": 0,
        "audio_end_ms": 400,
    }
    await call.send(told("input_audio_buffer.speech_started"))  # nothing is left to be cleared
    assert len(socket.sent) == before


async def test_nothing_is_cleared_where_all_was_played() -> None:
    """Each word of the caller cuts an answer that it has heard."""
    socket = Socket()
    call = TranslatedWebSocket(socket, Call())
    await heard(call, socket, START)
    await call.send(delta("item_1"), told("response.done"))
    await heard(call, socket, mark("item_1:8000"), mark("item_0:1"), mark("item_1:99999999"))
    await call.send(told("input_audio_buffer.speech_started"))
    assert "clear" not in {it["event"] for it in socket.sent}


@pytest.mark.parametrize("is_early", [False, True])
async def test_the_model_greets_once_both_are_there(is_early: bool) -> None:
    """A greeting is refused because there is no session yet, or is none."""
    socket = Socket()
    call = TranslatedWebSocket(socket, Call())
    if is_early:
        await call.send(told("session.created"))
    start = json.loads(json.dumps(START))
    start["start"]["customParameters"] = {"greet": "1", "instructions": "Sing.", "voice": "anna"}
    found = await heard(call, socket, {"event": "connected"}, start, media())
    assert found[0]["session"]["instructions"] == "Sing."
    assert found[0]["session"]["audio"]["output"]["voice"] == "anna"
    if not is_early:
        await call.send(told("session.created"))
        found += await heard(call, socket, media())
    assert [it["type"] for it in found].count("response.create") == 1


JSON: Final[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=5,
)
EVENTS: Final = ("media", "start", "mark", "dtmf", "stop", "connected")
MESSAGE: Final = st.fixed_dictionaries(
    {"event": st.sampled_from(EVENTS) | JSON},
    optional={
        "streamSid": st.just("MZ1") | JSON,
        "media": st.fixed_dictionaries({"payload": JSON, "track": st.just("inbound")}) | JSON,
        "start": st.fixed_dictionaries({}, optional={"customParameters": JSON, "callSid": JSON}),
        "mark": st.fixed_dictionaries({"name": st.just("item_1:9") | JSON}) | JSON,
        "dtmf": st.fixed_dictionaries({"digit": JSON}) | JSON,
    },
)


@given(st.lists(MESSAGE | JSON, max_size=5))
async def test_any_message_is_written_or_passed_on(messages: list[Any]) -> None:
    """A message ends the connection's task."""
    socket = Socket()
    call = TranslatedWebSocket(socket, Call())
    await call.send(delta("item_1", 160))
    await heard(call, socket, *map(json.dumps, messages))


def test_a_signature_is_of_the_address_and_the_form() -> None:
    """The example of Twilio's documentation is refused."""
    url = "https://example.com/myapp.php?foo=1&bar=2"
    form = {
        **{"CallSid": "CA1234567890ABCDE", "Caller": "+14158675310", "Digits": "1234"},
        **{"From": "+14158675310", "To": "+18005551212"},
    }
    good = signature_of("12345", url, [*form.items()])
    assert good == "L/OH5YylLD5NRKLltdqwSvS0BnU="
    target = "/myapp.php?foo=1&bar=2"
    for host in ("example.com", "example.com:443"):
        headers = [("host", host), ("x-twilio-signature", good)]
        assert is_signed("12345", headers, target, [*form.items()])
    for headers in (
        [("host", "example.com")],
        [("host", "example.org"), ("x-twilio-signature", good)],
        [("host", "example.com"), *[("x-twilio-signature", good)] * 2],
        [("host", "example.com"), ("x-twilio-signature", "é" + good)],
    ):
        assert not is_signed("12345", headers, target, [*form.items()])
