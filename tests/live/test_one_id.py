"""A session has one id, and is found by it wherever it is spoken of, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from websockets.sync.client import ClientConnection, connect

import antiphon
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from runtime.cli import main
from tests.live.servers import LiveServer, live_server

Body = dict[str, Any]
ASKED_MAX: Final = 1_000
NONSENSE: Final[Body] = {"type": "no.such.event"}
DIALECTS: Final[dict[str, tuple[str, list[Body], str]]] = {
    "realtime": (
        "/v1/realtime?mode=audio",
        [{"type": "session.init", "payload": {}}, NONSENSE],
        "session.created",
    ),
    "realtime-chat": (
        "/v1/realtime?mode=chat",
        [{"type": "session.init", "payload": {}}, NONSENSE],
        "session.created",
    ),
    "duplex-v1": (
        "/v1/realtime?mode=audio",
        [{"type": "session.update", "session": {"instructions": "be brief"}}, NONSENSE],
        "session.created",
    ),
    "legacy-duplex": (
        "/ws/duplex/adx_mine",
        [{"type": "prepare", "system_prompt": "be brief"}, NONSENSE],
        "prepared",
    ),
    "legacy-chat": ("/ws/chat", [{"messages": 7}], ""),
    "transcription": ("/v1/realtime?mode=transcription", [NONSENSE], "session.created"),
    "transcription-responses": (
        "/v1/realtime?mode=transcription",
        [{"type": "session.create", "model": "nobody"}],
        "session.created",
    ),
}
"""By dialect: the address, what its client says, a mistake last, and what tells the recording."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server records."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = (
        "--record",
        str(folder),
        "--log-format",
        "json",
        "--log-level",
        "info",
        "--slots",
        "8",
    )
    with live_server(*options) as server:
        yield server


def hear(websocket: ClientConnection, kind: str) -> Body:
    """Read on to a message of a type."""
    while (body := json.loads(websocket.recv(timeout=60)))["type"] != kind:
        assert body["type"] != "error", body
    return dict(body)


def got(server: LiveServer, path: str) -> Any:
    """GET a path of the server's."""
    host, port = server.address
    with urlopen(f"http://{host}:{port}{path}", timeout=60) as answer:
        return json.load(answer)


def found(folder: Path, session: str) -> list[str]:
    """Name the recordings that `antiphon recordings list --find` finds."""
    run = CliRunner().invoke(main, ["recordings", "list", str(folder), "--find", session, "--json"])
    assert run.exit_code == 0, run.output
    return [log["recording_id"] for log in json.loads(run.output)["logs"]]


def logged(server: LiveServer, session_id: str) -> list[Body]:
    """Read the lines of the server's log that name a session."""
    lines = map(json.loads, server.errors.read_text().splitlines())
    return [line for line in lines if line.get("session_id") == session_id]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_id_finds_a_session_everywhere(server: LiveServer, folder: Path, dialect: str) -> None:
    """What a client reports is an id that nobody can find: not in logs, lists or on the disk."""
    path, says, created = DIALECTS[dialect]
    url = server.url.removesuffix("/v1/realtime") + path
    with connect(url) as websocket:
        for body in says[:-1]:
            websocket.send(json.dumps(body))
        began = hear(websocket, created) if created else {}
        websocket.send(json.dumps(says[-1]))
        error = json.loads(websocket.recv(timeout=60))
        assert error["type"] == "error"
        session_id = error["session_id"]
        assert session_id.startswith("sess_")
        if created:
            listed = got(server, "/api/sessions")["sessions"]
            (running,) = [it for it in listed if it["session_id"] == session_id]
            assert got(server, f"/api/sessions/{session_id}")["session_id"] == session_id
            told = began.get("recording_id") or began.get("recording_session_id")
            assert told == running["recording_id"]
            if dialect.startswith(("realtime", "transcription")):
                assert session_id in {began.get("session_id"), began.get("id")}
    (recording_id,) = found(folder, session_id)
    assert found(folder, recording_id) == [recording_id]
    if dialect == "duplex-v1":
        assert found(folder, began["session_id"]) == [recording_id]
    for _ in range(ASKED_MAX):  # a list is not made anew for each who asks
        page = got(server, f"/api/recordings?session={session_id}")["recordings"]
        if page:
            break
    assert [(it["recording_id"], it["session_id"]) for it in page] == [(recording_id, session_id)]
    log = Store(folder).path(recording_id)
    with LogReader(log) as reader:
        assert reader.head.fields["session_id"] == session_id
    told = CliRunner().invoke(main, ["recordings", "inspect", str(log), "--json"])
    assert json.loads(told.output)["session_id"] == session_id
    assert session_id in CliRunner().invoke(main, ["recordings", "inspect", str(log)]).output
    assert logged(server, session_id)
    assert {line["session"] for line in logged(server, session_id)} == {recording_id}


def test_nobody_else_is_found(server: LiveServer, folder: Path) -> None:
    """A search that takes any name would show one client's session to another."""
    assert found(folder, "sess_000000000000") == []
    assert got(server, "/api/recordings?session=sess_000000000000")["recordings"] == []


@pytest.mark.anyio
async def test_the_client_knows_its_recording_and_whose_error_it_is(server: LiveServer) -> None:
    """A program would have to read frames to say which session went wrong."""
    async with antiphon.connect(server.url, mode="chat") as session:
        assert session.created is not None
        assert session.created.recording_id
        with pytest.raises(antiphon.ReportedError) as caught:
            await session.answer("?", config=antiphon.ChatConfig(top_p=7))
        assert caught.value.session_id == session.created.session_id
