"""The JavaScript client through cut connections; `test_cut_connections` has the Python client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from recorder.read.reader import LogReader
from tests.live.servers import LiveServer, live_server
from tests.network.cutting import cutting
from tests.sessions.resumed import heard_and_said
from tests.test_javascript import NODE, run

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node to run JavaScript with")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server that records."""
    folder = tmp_path_factory.mktemp("logs")
    with live_server("--record", str(folder), "--slots", "8") as made:
        yield made, folder


def told(frame: str) -> tuple[str, str] | None:
    """What the client's user hears of a frame."""
    event: dict[str, Any] = json.loads(frame)
    match event["type"]:
        case "response.output.delta":
            is_listen = event.get("kind") == "listen"
            return ("listen", "") if is_listen else ("speech", event.get("text", ""))
        case "session.output_transcript.delta":
            return "speech", event["delta"]
        case "session.output_audio.delta":
            return "speech" if any(base64.b64decode(event["delta"])) else "listen", ""
        case "response.done":
            return "response", event["text"]
        case "transcription.delta":
            return "delta", event["delta"]
        case "transcription.done":
            return "done", event["text"]
        case "session.closed":
            return "closed", event["reason"]
    return None


def log_of(folder: Path, session_id: str) -> Path:
    """The log of a session."""
    for path in folder.iterdir():
        with LogReader(path) as reader:
            if reader.head.fields["session_id"] == session_id:
                return path
    raise AssertionError(session_id)


@pytest.mark.costly
@pytest.mark.parametrize("mode", ["audio", "live", "chat", "transcription"])
@pytest.mark.parametrize("cuts", [[2_000], [90_000, 60_000], [3_000, 2_500, 9_000]])
def test_each_message_and_each_event_counts_once(
    server: tuple[LiveServer, Path], mode: str, cuts: Sequence[int]
) -> None:
    """A page lost or repeated something where its connection was cut."""
    made, folder = server
    if mode == "chat":
        cuts = [min(cut, 3_000) for cut in cuts]
    with cutting(made.address, cuts=list(cuts)) as cutter:
        said = json.loads(run("resuming.mjs", f"ws://127.0.0.1:{cutter.port}", mode))
        assert cutter.connections > 1
    received, frames = heard_and_said(log_of(folder, said["sessionId"]))
    assert said["sent"] == received
    expected = [event for event in map(told, frames) if event is not None]
    if mode == "chat":
        expected = [("delta" if kind == "speech" else kind, text) for kind, text in expected[:-1]]
    assert [tuple(event) for event in said["heard"]] == expected
