"""Tools in full duplex by a model with weights: a server, a client over a socket, the replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from recorder.format.records import Record
from recorder.read.reader import LogReader
from tests.live.servers import live_server
from tests.live.test_deterministic import antiphon
from tests.models.makers import TOOLS
from tests.models.random_model import IN_SLOTS, sound, write_checkpoint
from tests.sessions.in_memory import base64, close_frame

UNITS = 24
WAIT_S = 30
OFFERED = [
    {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(tool.parameters or "{}"),
        },
    }
    for tool in (TOOLS["clock"], TOOLS["tide"])
]
Body = dict[str, Any]


def talk(connection: ClientConnection) -> list[Body]:
    """Send sound second by second, and the result of each call; returns what was received."""
    received: list[Body] = []
    answered = set[str]()

    def wait_for(kind: str) -> Body:
        while True:
            body = json.loads(connection.recv(timeout=WAIT_S))
            received.append(body)
            if body["type"] == "response.tool_call.done":
                result = {"type": "input.tool_result", "tool_call_id": body["tool_call_id"]}
                connection.send(json.dumps({**result, "content": "nine"}))
            if body["type"] == kind and body.get("input_id") not in answered:
                answered.add(body.get("input_id", ""))
                return body

    wait_for("session.queue_done")
    payload = {"system_prompt": "Hi.", "tools": OFFERED, "config": {"force_listen_count": 0}}
    connection.send(json.dumps({"type": "session.init", "payload": payload}))
    assert wait_for("session.created")["tools"] == "called"
    for number in range(UNITS):
        body = {"type": "input.append", "input": {"audio": base64(sound(number))}}
        connection.send(json.dumps(body))
        wait_for("response.output.delta")
    connection.send(close_frame())
    wait_for("session.closed")
    return received


def test_a_session_with_calls_and_results_is_replayed(tmp_path: Path) -> None:
    """What the model decided in silence is decided again, and fed at the same places."""
    model, recordings = tmp_path / "model", tmp_path / "recordings"
    model.mkdir()
    write_checkpoint(model, IN_SLOTS)
    with live_server("--record", str(recordings), model=str(model)) as server:
        with connect(f"{server.url}?mode=audio", compression=None) as connection:
            received = talk(connection)
        assert server.stop() == 0
    kinds = [body["type"] for body in received]
    assert "response.tool_call.done" in kinds
    (log,) = recordings.glob("*.session.zst")
    with LogReader(log) as reader:
        fields = [str(item.fields) for item in reader if isinstance(item, Record)]
    assert any("'result'" in each and "nine" in each for each in fields)
    for options in (["--full", "--model", model], []):
        replayed = antiphon("replay", *options, log, "--json")
        assert json.loads(replayed.stdout)["result"] == "identical", replayed.stdout
