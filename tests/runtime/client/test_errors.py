"""All that the SDK raises is a `ClientError`, in one line, whoever was at fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from websockets.sync.server import ServerConnection

import antiphon
from tests.live.servers import live_server
from tests.network.peers import create, hear, peer, say

BROKEN: Final = "\udcff"
"""What a text holds that was no UTF-8."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server("--no-record") as server:
        yield server.url.removesuffix("/v1/realtime")


Do = Callable[[Any], Awaitable[object]]

ADDRESSES: Final = (
    *("", "h", "http://h", "ws://", "ws://h:99999", "ws://h:0", "ws://[::1", "ws://a..b"),
    *(f"ws://{'a' * 70}.example", f"ws://{BROKEN}", "ws://ä" * 60, "ws://127.0.0.1:1"),
)


@pytest.mark.anyio
@pytest.mark.parametrize("address", ADDRESSES)
async def test_an_address_that_is_none(address: str) -> None:
    """A typing error in a configuration would end a program in a traceback."""
    with pytest.raises(antiphon.ClientError) as raised:
        async with antiphon.connect(address, mode="chat", retries=0):
            pass
    assert "\n" not in str(raised.value)


WRONG: Final[dict[str, dict[str, Any]]] = {
    "dialect": {"mode": "chat", "dialect": "german"},
    "mode": {"mode": "letter"},
    "mode of the dialect": {"mode": "chat", "dialect": "duplex-v1"},
    "key": {"mode": "chat", "key": "two words"},
    "key that is no ASCII": {"mode": "chat", "key": BROKEN},
    "retries": {"mode": "chat", "retries": -1},
    "retries of another type": {"mode": "chat", "retries": "4"},
    "instructions of a chat": {"mode": "chat", "instructions": "be brief"},
    "instructions": {"mode": "audio", "instructions": BROKEN},
    "instructions of another type": {"mode": "audio", "instructions": b"be brief"},
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", WRONG)
async def test_settings_that_cannot_be(url: str, name: str) -> None:
    """A caller's mistake would pass every `except antiphon.ClientError`."""
    with pytest.raises(antiphon.ClientError) as raised:
        async with antiphon.connect(url, **WRONG[name]):
            pass
    assert "\n" not in str(raised.value)


async def ask_twice(chat: antiphon.ChatSession) -> None:
    await chat.ask("a")
    await chat.ask("b")


DUPLEX: Final[dict[str, Do]] = {
    "a number": lambda it: it.append(3),
    "half a sample": lambda it: it.append(b"123"),
    "integers": lambda it: it.append(np.zeros(16_000, int)),
    "two channels": lambda it: it.append(np.zeros((2, 16_000), np.float32)),
    "NaN": lambda it: it.append(np.full(16_000, np.nan, np.float32)),
    "frames": lambda it: it.append(bytes(64_000), frames=[b"jpeg"]),
    "pause": lambda it: it.pause(),
    "a reason": lambda it: it.close(BROKEN),
    "a question": lambda it: it.raw.ask(None),
}
CHAT: Final[dict[str, Do]] = {
    "a question amid an answer": ask_twice,
    "no text": lambda it: it.ask(BROKEN),
    "no question": lambda it: it.ask(None),
    "no picture": lambda it: it.ask(antiphon.message("user", antiphon.ImagePart(data=None))),
    "no role": lambda it: it.answer(antiphon.message("nobody", "a")),
    "sound": lambda it: it.raw.append(antiphon.Append(pcm=bytes(64_000))),
}
TRANSCRIPTION: Final[dict[str, Do]] = {
    "a number": lambda it: it.append(3),
    "half a sample": lambda it: it.append(b"123"),
    "a model": lambda it: it.raw.choose(BROKEN),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", DUPLEX)
async def test_what_a_duplex_session_does_not_take(url: str, name: str) -> None:
    """A caller's mistake would pass every `except antiphon.ClientError`."""
    async with antiphon.connect(url, mode="audio") as session:
        with pytest.raises(antiphon.ClientError):
            await DUPLEX[name](session)


@pytest.mark.anyio
@pytest.mark.parametrize("name", CHAT)
async def test_what_a_chat_does_not_take(url: str, name: str) -> None:
    """The same of a chat."""
    async with antiphon.connect(url, mode="chat") as session:
        with pytest.raises(antiphon.ClientError):
            await CHAT[name](session)


@pytest.mark.anyio
@pytest.mark.parametrize("name", TRANSCRIPTION)
async def test_what_a_transcription_does_not_take(url: str, name: str) -> None:
    """The same of a transcription."""
    async with antiphon.transcribe(url, model="scripted") as session:
        with pytest.raises(antiphon.ClientError):
            await TRANSCRIPTION[name](session)


@pytest.mark.anyio
async def test_a_session_that_was_left(url: str) -> None:
    """A task that outlives the block would fail with an error of a library below."""
    async with antiphon.connect(url, mode="audio") as session:
        pass
    with pytest.raises(antiphon.ClientError):
        await session.append(bytes(64_000))
    with pytest.raises(antiphon.ClientError):
        await session.raw.receive()


def nonsense(websocket: ServerConnection) -> None:
    websocket.send("{")


def unknown(websocket: ServerConnection) -> None:
    create(websocket, "turn_based")
    hear(websocket)
    say(websocket, "response.done", response_id=3)


@pytest.mark.anyio
@pytest.mark.parametrize("answer", [nonsense, unknown])
async def test_a_server_that_breaks_the_protocol(
    answer: Callable[[ServerConnection], None],
) -> None:
    """The one error that a caller can do nothing against would pass every `except` of theirs."""
    with peer(answer) as address, pytest.raises(antiphon.ClientError) as raised:
        async with antiphon.connect(address, mode="chat", retries=0) as chat:
            await chat.answer("a")
    assert isinstance(raised.value, antiphon.RemoteProtocolError)
