"""A worker is exchanged for another under a session that talks: real processes, a real log."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from protocol.values import events as ev
from recorder.format.format import Record
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import read
from tests.live.servers import LiveServer, live_server
from tests.live.test_clients import replay_log
from tests.live.test_placement import antiphon, replayed
from tests.live.test_worker import live_worker

SECOND = base64.b64encode(np.full(16_000, 0.1, "<f4").tobytes()).decode()
WAIT_S = 60


def hear(socket: ClientConnection) -> dict[str, Any]:
    """Wait for the next event."""
    event: dict[str, Any] = json.loads(socket.recv(timeout=WAIT_S))
    return event


def talk(socket: ClientConnection, units: int) -> None:
    """Send seconds of sound, each after the answer to the one before."""
    for _ in range(units):
        socket.send(json.dumps({"type": "input.append", "input": {"audio": SECOND}}))
        while (event := hear(socket)).get("kind") not in {"listen", "audio"}:
            assert event["type"].startswith("response."), event


def workers(server: LiveServer, *words: object) -> list[dict[str, Any]]:
    """Run `antiphon workers`, and return the objects that it prints."""
    url = server.url.removesuffix("/v1/realtime")
    done = antiphon("workers", *words, "--url", url, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def events_of(log: Path) -> list[ev.Event]:
    records = (each for each in read(log) if isinstance(each, Record))
    return [event_of(each.fields, each.at_ns) for each in records if each.kind in EVENT_KINDS]


def test_a_session_goes_on_while_its_worker_is_exchanged(tmp_path: Path) -> None:
    """An upgrade of the workers would end every session."""
    logs = tmp_path / "logs"
    one, two, three = (f"unix:{tmp_path}/{name}" for name in ("one", "two", "three"))
    with (
        live_worker(model="scripted", listen=one) as first,
        live_worker(model="scripted", listen=two),
        live_worker(model="scripted", listen=three),
        live_server(
            *("--worker-address", one, "--worker-address", two), "--record", str(logs)
        ) as server,
        connect(f"{server.url}?mode=audio", compression=None) as socket,
    ):
        assert hear(socket)["type"] == "session.queue_done"
        socket.send(json.dumps({"type": "session.init", "payload": {"system_prompt": "hello"}}))
        assert hear(socket)["type"] == "session.created"
        talk(socket, 4)
        assert [worker["leased"] for worker in workers(server, "list")] == [1, 0]
        assert workers(server, "add", three)[0]["number"] == 2
        told = workers(server, "drain", 0, "--wait")
        assert (told[0]["state"], told[-1]["state"]) == ("draining", "gone")
        first.process.terminate()
        assert first.process.wait(WAIT_S) == 0
        talk(socket, 4)
        left = {each["number"]: each["leased"] for each in workers(server, "list")}
        assert (sorted(left), sum(left.values())) == ([1, 2], 1)
        socket.send(json.dumps({"type": "session.close"}))
        while (event := hear(socket))["type"] != "session.closed":
            assert event["type"].startswith("response."), event
        assert server.stop() == 0
        assert "Traceback" not in server.errors.read_text()
    (log,) = logs.glob("*.session.zst")
    events = events_of(log)
    moved = [type(event) for event in events if isinstance(event, ev.LeaseRevoked | ev.Rebuilt)]
    assert moved == [ev.LeaseRevoked, ev.Rebuilt]
    units = [event.result.index for event in events if isinstance(event, ev.UnitDone)]
    assert units == list(range(8))
    assert replay_log(log).divergence is None
    (body,) = replayed(logs)
    assert (body["result"], body["units"]) == ("identical", 8)
