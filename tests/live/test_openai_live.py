"""The official client of OpenAI's Live API at a real server: it is answered in its own types."""

from __future__ import annotations

import base64
import wave
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from openai import NotFoundError, OpenAI
from openai.resources.live.live import LiveConnection
from openai.resources.live.sideband import SidebandConnection
from websockets.exceptions import InvalidStatus

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from tests.live.exported import loud_s
from tests.live.servers import LiveServer, live_server

RATES_HZ: Final = (24_000, 16_000)
SECONDS: Final = 3
AT_ONCE_S: Final = 40
"""More than may wait for the model."""
PIECES_A_SECOND: Final = 50
DONE: Final = "response.output_item.done"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server that records."""
    folder = tmp_path_factory.mktemp("recordings")
    with live_server("--record", str(folder)) as live:
        yield live, folder


def received(connection: LiveConnection | SidebandConnection) -> Any:
    """Receive an event; it is one of the client's types, with their fields and no others."""
    event: Any = connection.recv()
    checked = type(event).model_validate(event.to_dict(), strict=True)
    assert not checked.model_extra
    return checked


def until(connection: LiveConnection | SidebandConnection, name: str) -> Any:
    """Receive until an event comes."""
    while (event := received(connection)).type != name:
        assert event.type != "error", event.error
    return event


def sound(rate_hz: int) -> bytes:
    """A second of a tone: signed 16-bit LE."""
    wave = np.sin(np.arange(rate_hz) * 2 * np.pi * 440 / rate_hz)
    return (wave * 9_000).astype("<i2").tobytes()


def say(connection: LiveConnection, pcm16: bytes) -> None:
    """Say seconds in pieces."""
    size = len(pcm16) // PIECES_A_SECOND
    for at in range(0, len(pcm16), size):
        piece = base64.b64encode(pcm16[at : at + size]).decode()
        connection.send({"type": "session.input_audio.append", "audio": piece})


def check_download(client: OpenAI, session_id: str) -> None:
    """Both voices of a session can be downloaded by the id that its client was told."""
    content = client.live.sessions.download_recording(session_id).read()
    with wave.open(BytesIO(content)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (2, 2)
        assert file.getnframes() / file.getframerate() >= SECONDS + AT_ONCE_S
    with pytest.raises(NotFoundError):
        client.live.sessions.download_recording(f"sess_{0:012x}")


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_it_talks(server: tuple[LiveServer, Path], tmp_path: Path, rate_hz: int) -> None:
    """This client cannot use the server, or its recordings cannot be run again."""
    live, folder = server
    host, port = live.address
    client = OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1")
    before = set(folder.rglob("*.session.zst"))
    with client.live.connect() as connection:
        audio: Any = {"format": {"type": "audio/pcm", "rate": rate_hz}}
        connection.send({"type": "session.start", "session": {"model": "scripted", "audio": audio}})
        started = until(connection, "session.started").session
        assert started.audio.format.rate == rate_hz
        for _ in range(SECONDS):
            say(connection, sound(rate_hz))
            heard = until(connection, "session.output_audio.delta").delta
            assert len(base64.b64decode(heard)) == 2 * rate_hz
        say(connection, AT_ONCE_S * sound(rate_hz))
        for _ in range(AT_ONCE_S):
            until(connection, "session.output_audio.delta")
        connection.send({"type": "session.input_audio.mute", "event_id": "quiet"})
        assert until(connection, "session.input_audio.muted").client_event_id == "quiet"
        connection.send({"type": "session.close"})
        closed = until(connection, "session.closed")
        assert (closed.reason, closed.usage.seconds) == ("close_requested", SECONDS + AT_ONCE_S)
        assert closed.session.id == started.id
    assert "broke" not in live.errors.read_text()
    check_download(client, started.id)
    (log,) = set(folder.rglob("*.session.zst")) - before
    with LogReader(log) as items:
        assert replay(items).identical
    assert abs(loud_s(log, tmp_path)[0] - SECONDS - AT_ONCE_S) < 1


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_it_runs_a_function(server: tuple[LiveServer, Path]) -> None:
    """Calls come in types that the client does not have, or its results are refused."""
    host, port = server[0].address
    client = OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1")
    backend: Any = {"model": "x", "tools": [{"type": "function", "name": "clock"}]}
    delegation: Any = {"type": "responses", "responses": backend}
    with client.live.connect() as connection:
        session: Any = {"model": "scripted", "delegation": delegation}
        connection.send({"type": "session.start", "session": session})
        until(connection, "session.started")
        for _ in range(SECONDS):
            say(connection, bytes(48_000))
            until(connection, "session.output_audio.delta")
        delegated = until(connection, "session.delegation.created").delegation
        while (event := until(connection, "response.event").event)["type"] != DONE:
            pass
        call: Any = event["item"]
        assert (call["name"], delegated.target) == ("clock", "responses")
        item: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        connection.send({"type": "response.item.create", "item": item})
        connection.send({"type": "response.create"})
        say(connection, bytes(2 * 48_000))
        assert until(connection, "session.output_transcript.delta").delta == "it is noon."


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_it_attaches(server: tuple[LiveServer, Path], rate_hz: int) -> None:
    """This client cannot listen to a session that runs, or changes it by that."""
    live, _ = server
    host, port = live.address
    client = OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1")
    with client.live.connect() as connection:
        audio: Any = {"format": {"type": "audio/pcm", "rate": rate_hz}}
        connection.send({"type": "session.start", "session": {"model": "scripted", "audio": audio}})
        name = until(connection, "session.started").session.id
        with client.live.sideband.connect(session_id=name) as sideband:
            assert until(sideband, "session.started").session.id == name
            for second in range(6):
                say(connection, sound(rate_hz))
                until(connection, "session.output_audio.delta")
                heard = until(sideband, "session.output_audio.delta")
                assert (heard.start_ms, heard.end_ms) == (1000 * second, 1000 * second + 1000)
                assert len(base64.b64decode(heard.delta)) == 48_000
            sideband.session.close(event_id="stop")
            refused = received(sideband)
            while refused.type != "error":
                refused = received(sideband)
            assert (refused.error.code, refused.error.client_event_id) == ("unsupported", "stop")
            connection.send({"type": "session.close"})
            assert until(connection, "session.closed").reason == "close_requested"
            assert until(sideband, "session.closed").reason == "close_requested"
            assert list(sideband) == []
    with pytest.raises(InvalidStatus), client.live.sideband.connect(session_id="sess_000000000000"):
        pass
    assert "Traceback" not in live.errors.read_text()
