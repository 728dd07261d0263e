"""WebP pictures in conversations, over a real socket, and what is told of one that is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from websockets.asyncio.client import connect

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from tests.live.servers import LiveServer, live_server
from tests.media.webps import ANIMATED, KINDS, LOSSLESS, LOSSY, chunk, chunks_of, container
from tests.sessions.in_memory import base64

Body = dict[str, Any]
WRONG: Final = {
    "animated": (ANIMATED, "an animated WebP, only still pictures are taken"),
    "truncated": (LOSSY[:-9], f"a WebP that says {len(LOSSY)} bytes and has {len(LOSSY) - 9}"),
    "lying": (
        LOSSY[:26] + b"\xff\xff" + LOSSY[28:],
        "a WebP of 16383 x 47 pixels, at most 50 to 1",
    ),
    "damaged": (
        container(chunk(b"VP8L", chunks_of(LOSSLESS)[b"VP8L"][:40])),
        "a content was refused: the image is a damaged WebP",
    ),
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(recordings: Path) -> Iterator[LiveServer]:
    with live_server("--record", str(recordings)) as server:
        yield server


def asked(data: bytes) -> list[Body]:
    """Write a conversation with a picture."""
    content = [{"type": "image", "data": base64(data)}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": content}]


async def talk(url: str, frames: list[Body], until: str) -> list[Body]:
    """Send frames one after the other, and hear what is said until something is."""
    heard: list[Body] = []
    async with connect(url, max_size=None) as socket:
        for frame in frames:
            await socket.send(json.dumps(frame))
        while not heard or heard[-1]["type"] != until:
            heard.append(json.loads(await asyncio.wait_for(socket.recv(), 60)))
    return heard


def chat(server: LiveServer, data: bytes, until: str) -> Body:
    frames: list[Body] = [
        {"type": "session.init", "payload": {}},
        {"type": "input.append", "input": {"messages": asked(data)}},
    ]
    return asyncio.run(talk(f"{server.url}?mode=chat", frames, until))[-1]


def ask(server: LiveServer, data: bytes, until: str) -> Body:
    url = server.url.replace("/v1/realtime", "/ws/chat")
    return asyncio.run(talk(url, [{"messages": asked(data)}], until))[-1]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_taken(server: LiveServer, name: str) -> None:
    """The source's pages, which take WebP, would be refused."""
    assert chat(server, KINDS[name], "response.done")["reason"] in ("turn_end", "length")
    assert ask(server, KINDS[name], "done")["type"] == "done"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_refused_by_its_path(server: LiveServer, name: str) -> None:
    """A client would not know which picture is wrong, or what is."""
    data, why = WRONG[name]
    path = "" if name == "damaged" else ".messages[0].content[0].data: "
    error = chat(server, data, "error")["error"]
    assert (error["code"], error["type"]) == ("invalid_payload", "client_error")
    assert error["message"].startswith(f"$.input{path}{why}" if path else why)
    told = ask(server, data, "error")
    assert told["code"] == "invalid_payload"
    assert told["error"].startswith(f"${path}{why}" if path else why)


def test_every_session_replays(server: LiveServer, recordings: Path) -> None:
    """What was decoded would be decoded anew by each replay, and might differ."""
    for name in KINDS:
        chat(server, KINDS[name], "response.done")
    for log in recordings.glob("*.session.zst"):
        with LogReader(log) as reader:
            report = replay(reader)
        assert report.divergence is None
        assert report.damage_count == 0
