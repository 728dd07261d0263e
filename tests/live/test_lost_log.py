"""A log that is removed, or whose folder is moved, records nothing: the client is told, and we."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import append_frame, init_frame

Body = dict[str, Any]
UNITS_MAX: Final = 5
PATIENCE_S: Final = 60


def remove(folder: Path) -> None:
    """Remove the one log in a folder."""
    (log,) = folder.glob("*.session.zst")
    log.unlink()


def move(folder: Path) -> None:
    """Move the folder away."""
    folder.rename(folder.with_name("away"))


def replace(folder: Path) -> None:
    """Put another file in the log's place."""
    (log,) = folder.glob("*.session.zst")
    other = folder / "other"
    other.write_bytes(log.read_bytes())
    other.replace(log)


def listen(websocket: ClientConnection) -> Body:
    """Read on to a unit's outcome."""
    while (body := json.loads(websocket.recv(timeout=60)))["type"] != "response.output.delta":
        pass
    return dict(body)


def activate(websocket: ClientConnection) -> Body:
    """Set a session up."""
    websocket.send(init_frame())
    while (body := json.loads(websocket.recv(timeout=60)))["type"] != "session.created":
        pass
    return dict(body)


def recording_of(websocket: ClientConnection) -> str:
    """Send a second of sound; what is told of the recording then."""
    websocket.send(append_frame())
    return str(listen(websocket)["metrics"]["recording"])


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that comes with the recorder's next sync."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def metric(server: LiveServer, name: str) -> float:
    """Read one number of `/metrics`."""
    host, port = server.address
    with urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.costly
@pytest.mark.parametrize("lose", [remove, move, replace])
@pytest.mark.parametrize("durability", ["unit", "interval"])
def test_a_lost_log_is_told(lose: Callable[[Path], None], durability: str, tmp_path: Path) -> None:
    """A client is told that it is recorded, and what it says is nowhere."""
    folder = tmp_path / "recordings"
    with live_server("--record", str(folder), "--durability", durability) as server:
        url = f"{server.url}?mode=audio"
        with connect(url) as websocket:
            assert activate(websocket)["recording"] == "on"
            assert recording_of(websocket) == "on"
            lose(folder)
            recording_of(websocket)
            until(lambda: metric(server, "antiphon_recorder_failures_total") == 1)
            assert "failed" in {recording_of(websocket) for _ in range(2)}
            assert "no longer recorded" in server.errors.read_text()


def test_the_session_ends_where_it_must_be_recorded(tmp_path: Path) -> None:
    """An operator who lets nobody speak unrecorded would not be obeyed."""
    options = ("--durability", "unit", "--on-recording-failure", "close")
    with (
        live_server("--record", str(tmp_path), *options) as server,
        connect(f"{server.url}?mode=audio") as websocket,
    ):
        activate(websocket)
        remove(tmp_path)
        with suppress(ConnectionClosed):
            for _ in range(UNITS_MAX):
                recording_of(websocket)
        assert websocket.close_code == 1011
