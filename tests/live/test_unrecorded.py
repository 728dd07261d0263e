"""A client that asks not to be recorded is not, in any dialect, unless the operator insists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from websockets.sync.client import connect

import antiphon
from protocol.values.requests import Init
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.cli import main
from tests.live.servers import LiveServer, live_server

Body = dict[str, Any]
NOTICE: Final = "This call is recorded, and kept for a week."
QUESTION: Final = {"role": "user", "content": "hello"}
COMMIT: Final[Body] = {"type": "input_audio_buffer.commit", "final": True}
SPEECH: Final = str(Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav")
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "talk": ("talk", SPEECH, "--fast", "--wait-s", "0"),
    "chat": ("chat", "hello"),
    "chat, in 004": ("chat", "hello", "--dialect", "legacy-chat"),
    "transcribe": ("transcribe", SPEECH, "--model", "scripted"),
}
ENDS: Final = {"error", "session.created", "prepared", "done", "transcription.done"}
DIALECTS: Final[dict[str, tuple[str, Body, str]]] = {
    "realtime": ("/v1/realtime?mode=audio", {"type": "session.init", "payload": {}}, "payload"),
    "realtime-chat": ("/v1/realtime?mode=chat", {"type": "session.init", "payload": {}}, "payload"),
    "duplex-v1": (
        "/v1/realtime?mode=audio",
        {"type": "session.update", "session": {"instructions": "be brief"}},
        "session",
    ),
    "legacy-duplex": ("/ws/duplex/adx_1", {"type": "prepare", "system_prompt": "be brief"}, ""),
    "legacy-chat": ("/ws/chat", {"messages": [QUESTION]}, ""),
    "transcription": (
        "/v1/realtime?mode=transcription",
        {"type": "session.update", "model": "scripted"},
        "",
    ),
}
"""By dialect: the address, what sets a session up, and the object in it that holds `record`."""
IN_ALL: Final = pytest.mark.parametrize("dialect", DIALECTS)


def answer(url: str, dialect: str, *, record: bool | None, folder: Path) -> tuple[Body, int]:
    """Set a session up; what answers that, and how many logs there are when it does."""
    path, body, place = DIALECTS[dialect]
    said = {} if record is None else {"record": record}
    body = {**body, place: {**body[place], **said}} if place else {**body, **said}
    before = {log.name for log in folder.glob("*.session.zst")}
    with connect(url.removesuffix("/v1/realtime") + path) as websocket:
        if dialect == "transcription":  # which is greeted before it can ask for anything
            assert json.loads(websocket.recv(timeout=60))["type"] == "session.created"
        websocket.send(json.dumps(body))
        if dialect == "transcription":
            websocket.send(json.dumps(COMMIT))
        while (heard := json.loads(websocket.recv(timeout=60)))["type"] not in ENDS:
            pass
        return heard, len({log.name for log in folder.glob("*.session.zst")} - before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers record."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = ("--record", str(folder), "--recording-notice", NOTICE, "--slots", "8")
    with live_server(*options) as server:
        yield server


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[LiveServer]:
    """A server that records everybody."""
    with live_server("--record", str(folder), "--record-always", "--slots", "8") as server:
        yield server


@IN_ALL
def test_a_client_need_not_be_recorded(server: LiveServer, folder: Path, dialect: str) -> None:
    """What it said before it could ask would stay on the disk, or it would be told otherwise."""
    heard, logs = answer(server.url, dialect, record=False, folder=folder)
    assert heard["type"] != "error"
    assert logs == 0
    assert heard.get("recording", "off") == "off"
    assert not {"recording_id", "recording_session_id", "recording_notice"} & heard.keys()


@IN_ALL
@pytest.mark.parametrize("record", [True, None])
def test_others_are_recorded(
    server: LiveServer, folder: Path, dialect: str, record: bool | None
) -> None:
    """One who says nothing would have no recording, or one who is recorded would not know."""
    heard, logs = answer(server.url, dialect, record=record, folder=folder)
    assert (heard["type"] != "error", logs) == (True, 1)
    if heard["type"] in {"session.created", "prepared"}:
        assert heard["recording_notice"] == NOTICE
        assert heard.keys() & {"recording_id", "recording_session_id"}


@IN_ALL
def test_who_must_be_recorded_is_refused(strict: LiveServer, folder: Path, dialect: str) -> None:
    """A client would speak in the belief that nobody keeps it."""
    heard, logs = answer(strict.url, dialect, record=False, folder=folder)
    assert (heard["type"], logs) == ("error", 1)
    path = ".".join(["$", *filter(None, (DIALECTS[dialect][2],)), "record"])
    said = json.dumps(heard)
    assert "invalid_payload" in said
    assert f"{path}: false, but this server records" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_is_recorded_and_may_decline(
    server: LiveServer, folder: Path, command: str, tmp_path: Path
) -> None:
    """A user at a terminal would be recorded without a word, and without a way to decline."""
    words = [*COMMANDS[command], "--url", server.url]
    if words[0] == "talk":
        words += ["--reply", str(tmp_path / "reply.wav")]
    before = {log.name for log in folder.glob("*.session.zst")}
    declined = CliRunner().invoke(main, [*words, "--no-record"])
    assert declined.exit_code == 0, declined.output
    assert {log.name for log in folder.glob("*.session.zst")} == before
    assert NOTICE not in declined.output
    recorded = CliRunner().invoke(main, words)
    assert len({log.name for log in folder.glob("*.session.zst")} - before) == 1
    if "004" not in command:  # which says nothing before its answer
        assert "not recorded" in declined.output
        assert f"recorded: {NOTICE}" in recorded.output


def test_no_is_a_boolean(server: LiveServer, folder: Path) -> None:
    """A client that wrote a word for it would be recorded, and think that it is not."""
    path, body, _ = DIALECTS["realtime"]
    with connect(server.url.removesuffix("/v1/realtime") + path) as websocket:
        websocket.send(json.dumps({**body, "payload": {"record": "no"}}))
        while (heard := json.loads(websocket.recv(timeout=60)))["type"] != "error":
            assert heard["type"] != "session.created"
    assert heard["error"]["code"] == "invalid_payload"
    assert heard["error"]["message"].startswith("$.payload.record: a string")


def test_a_key_may_have_to_be_recorded(tmp_path: Path) -> None:
    """An operator could ask it of all clients or of none."""
    keys = (
        Key(name="anna", hash=hash_key("antiphon_anna"), record_always=True),
        Key(name="bert", hash=hash_key("antiphon_bert")),
    )
    change_key_file(tmp_path / "keys.toml", lambda _: keys, create=True)
    options = ("--keys", str(tmp_path / "keys.toml"), "--record", str(tmp_path / "logs"))
    told = {}
    with live_server(*options) as server:
        for name in ("anna", "bert"):
            headers = {"Authorization": f"Bearer antiphon_{name}"}
            with connect(f"{server.url}?mode=audio", additional_headers=headers) as websocket:
                frame = {"type": "session.init", "payload": {"record": False}}
                websocket.send(json.dumps(frame))
                while (heard := json.loads(websocket.recv(timeout=60)))["type"] not in ENDS:
                    pass
            told[name] = heard["type"]
    assert told == {"anna": "error", "bert": "session.created"}


@pytest.mark.anyio
async def test_the_client_asks_for_it(server: LiveServer) -> None:
    """A Python program would have to write frames by hand for it."""
    async with antiphon.connect(
        server.url, mode="audio", init=Init(instructions="", record=False)
    ) as (session):
        assert session.created is not None
        assert session.created.recording == "off"
    async with antiphon.connect(server.url, mode="audio") as session:
        assert session.created is not None
        assert session.created.recording_notice == NOTICE
