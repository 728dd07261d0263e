"""The API key on the client's side: it goes with the handshake, and nowhere else."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

import antiphon
from protocol.values.errors import LocalProtocolError
from runtime.client.websocket import open_socket
from tests.network.peers import peer

KEY = "abc-DEF_123.~+/=="


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_key_goes_with_the_handshake(backend: str) -> None:
    """A server with keys would refuse everybody."""
    asked: list[str | None] = []

    def answer(websocket: object) -> None:
        asked.append(websocket.request.headers.get("Authorization"))  # type: ignore[attr-defined]

    async def connect(url: str, key: str | None) -> None:
        async with open_socket(url, frame_bytes_max=1000, key=key):
            pass

    with peer(answer) as url:
        anyio.run(partial(connect, url, KEY), backend=backend)
        anyio.run(partial(connect, url, None), backend=backend)
    assert asked == [f"Bearer {KEY}", None]


@pytest.mark.parametrize("key", ["", "a b", "a\r\nX: y", "ä", "x" * 600])
def test_what_is_no_key_is_refused_without_being_shown(key: str) -> None:
    """A line break in a variable would write headers of its own; a secret would be in a log."""

    async def connect() -> None:
        async with antiphon.connect("ws://127.0.0.1:9", mode="audio", key=key):
            pass

    with pytest.raises(LocalProtocolError) as raised:
        anyio.run(connect)
    assert not key or key not in str(raised.value)
