"""Clients of the sources that must wait, at a real server with one slot.

Their browser classes send their opening message a moment after the socket is open, never again, and
give up on any `error`. So does the client here, in every dialect that has an opening message. What
the server recorded of it is replayed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from websockets.sync.client import ClientConnection, connect

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import base64, close_frame, init_frame, pcm

WAIT_S: Final = 60
SOUND: Final = base64(pcm(1.0))


@attrs.frozen(kw_only=True)
class Client:
    """What a client says and hears in its dialect.

    Attributes:
        path: where it connects.
        opening: its opening message.
        queued, done, ready: the types of what it hears of the queue, and once it is set up.
        sound: a second of sound.
        answers: the types of what a second may be answered by.
        goodbye: its last message.
    """

    path: str
    opening: Mapping[str, object]
    queued: str
    done: str
    ready: str
    sound: Mapping[str, object]
    answers: frozenset[str]
    goodbye: Mapping[str, object]


CLIENTS: Final[Mapping[str, Client]] = {
    "realtime": Client(
        path="/v1/realtime?mode=audio",
        opening=json.loads(init_frame()),
        queued="session.queued",
        done="session.queue_done",
        ready="session.created",
        sound={"type": "input.append", "input": {"audio": SOUND}},
        answers=frozenset({"response.output.delta"}),
        goodbye=json.loads(close_frame()),
    ),
    "duplex-v1": Client(
        path="/v1/realtime?mode=audio",
        opening={"type": "session.update", "session": {"instructions": "be brief"}},
        queued="session.queued",
        done="session.queue_done",
        ready="session.created",
        sound={"type": "input_audio_buffer.append", "audio": SOUND},
        answers=frozenset({"response.listen", "response.output_audio.delta"}),
        goodbye=json.loads(close_frame()),
    ),
    "legacy-duplex": Client(
        path="/ws/duplex/adx_1",
        opening={"type": "prepare", "system_prompt": "be brief"},
        queued="queued",
        done="queue_done",
        ready="prepared",
        sound={"type": "audio_chunk", "audio_base64": SOUND},
        answers=frozenset({"result"}),
        goodbye={"type": "stop"},
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with one slot; all that it served is replayed."""
    folder = tmp_path_factory.mktemp("recordings")
    with live_server("--slots", "1", "--record", str(folder)) as live:
        yield live
        assert live.stop() == 0
    assert_replays(folder)


def assert_replays(folder: Path) -> None:
    """Run what was recorded again."""
    logs = sorted(folder.iterdir())
    assert logs
    for path in logs:
        with LogReader(path) as log:
            report = replay(log)
        assert report.divergence is None
        assert report.finished


@contextmanager
def connected(server: LiveServer, client: Client) -> Iterator[ClientConnection]:
    """Connect, and send the opening message at once, before anything is heard."""
    host, port = server.address
    with connect(f"ws://{host}:{port}{client.path}") as socket:
        say(socket, client.opening)
        yield socket


def say(socket: ClientConnection, body: Mapping[str, object]) -> None:
    """Send an event."""
    socket.send(json.dumps(body))


def hear(socket: ClientConnection) -> Any:
    """Receive an event; an `error` is the end of a source's client."""
    body = json.loads(socket.recv(WAIT_S))
    assert body["type"] != "error", body
    return body


def hear_until(socket: ClientConnection, kind: str) -> list[str]:
    """Receive up to an event of a type; returns the types that came before it."""
    before: list[str] = []
    while (found := hear(socket)["type"]) != kind:
        before.append(found)
    return before


@pytest.mark.parametrize("holder", CLIENTS)
@pytest.mark.parametrize("name", CLIENTS)
def test_who_waits_is_set_up_without_sending_again(
    server: LiveServer, name: str, holder: str
) -> None:
    """With one slot taken the pages of the sources cannot connect at all."""
    first, client = CLIENTS[holder], CLIENTS[name]
    with connected(server, first) as served:
        hear_until(served, first.ready)
        with connected(server, client) as waiting:
            place = hear(waiting)
            assert (place["type"], place["position"]) == (client.queued, 1)
            say(served, first.sound)
            assert hear(served)["type"] in first.answers  # it is not disturbed by who waits
            say(served, first.goodbye)
            *updates, done = hear_until(waiting, client.ready)
            assert done == client.done
            assert set(updates) <= {client.queued.replace("queued", "queue_update")}
            say(waiting, client.sound)
            assert hear(waiting)["type"] in client.answers
            say(waiting, client.goodbye)


@pytest.mark.parametrize("name", CLIENTS)
def test_who_leaves_while_it_waits_leaves_nothing_behind(server: LiveServer, name: str) -> None:
    """Its opening message is taken for a client that is gone, and the slot is lost to it."""
    client = CLIENTS[name]
    with connected(server, client) as served:
        hear_until(served, client.ready)
        with connected(server, client) as gone:
            assert hear(gone)["type"] == client.queued
        with connected(server, client) as third:
            assert hear(third)["type"] == client.queued
            say(served, client.goodbye)
            hear_until(third, client.ready)
            say(third, client.goodbye)
