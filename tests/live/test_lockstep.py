"""Clients of 002 in lockstep, over a real socket, with pieces of any length and a page's rules.

The sources' page begins to play with the first speaking result of a turn, and stops with
`end_of_turn` or a listen; its sound comes in pieces of 100 ms here. Where a slot is free, the
sources' gateway connects to a worker's own address.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from tests.live.servers import LiveServer, live_server

PIECE_SAMPLES = 1_600
SECONDS = 14


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server of this module records."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(recordings: Path) -> Iterator[LiveServer]:
    """A server with a slot that is free while the last one is cleaned."""
    with live_server("--slots", "2", "--record", str(recordings)) as server:
        yield server


@attrs.define
class Page:
    """What the sources' page makes of results: turns that begin and end, and the sound of each."""

    turns: list[list[str]] = attrs.Factory(list)
    playing: bool = False
    cut_short: int = 0

    def take(self, result: dict[str, Any]) -> None:
        """Play what came."""
        if result["is_listen"]:
            self.cut_short += self.playing
            self.playing = False
            return
        if not self.playing:
            self.turns.append([])
            self.playing = True
        if result["text"]:
            self.turns[-1].append(result["text"])
        self.playing = not result["end_of_turn"]


def piece(samples: int = PIECE_SAMPLES) -> str:
    """A chunk of sound."""
    sound = base64.b64encode(np.zeros(samples, "<f4").tobytes()).decode()
    return json.dumps({"type": "audio_chunk", "audio": sound})


async def receive(socket: ClientConnection) -> dict[str, Any]:
    """Receive a message; a minute's silence is a failure."""
    body: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 60))
    return body


async def converse(url: str, samples: int, seconds: int) -> Page:
    """Talk in lockstep; the first message of a worker's own address is `prepared`."""
    page = Page()
    async with connect(url, max_size=None) as socket:
        config = {"force_listen_count": 0}
        await socket.send(json.dumps({"type": "prepare", "system_prompt": "hi", "config": config}))
        while (first := await receive(socket))["type"] != "prepared":
            assert first["type"] == "queue_done"
            assert "session_id" not in url
        for _ in range(seconds * 16_000 // samples):
            await socket.send(piece(samples))
            result = await receive(socket)
            assert result["type"] == "result"
            page.take(result)
        await socket.send('{"type": "stop"}')
        assert (await receive(socket))["type"] == "stopped"
    return page


@pytest.mark.parametrize(
    "path",
    ["/ws/duplex/adx_1", pytest.param("/ws/duplex?session_id=adx_1", marks=pytest.mark.soak)],
)
def test_pieces_of_100_ms_hear_the_turns_of_whole_seconds(
    server: LiveServer, recordings: Path, path: str
) -> None:
    """A turn is torn apart between two seconds, or the client waits for ever."""
    url = server.url.replace("/v1/realtime", path)
    whole = asyncio.run(converse(url, 16_000, SECONDS))
    pieces = asyncio.run(converse(url, PIECE_SAMPLES, SECONDS))
    assert whole.turns
    assert pieces.turns == whole.turns
    assert pieces.cut_short == whole.cut_short
    for log in recordings.iterdir():
        with LogReader(log) as reader:
            assert replay(reader).identical


def test_pieces_that_fit_no_second(server: LiveServer) -> None:
    """A piece that crosses a second's end has one answer too many, and the client one behind."""
    url = server.url.replace("/v1/realtime", "/ws/duplex/adx_2")
    page = asyncio.run(converse(url, 7_001, 6))
    assert page.turns
