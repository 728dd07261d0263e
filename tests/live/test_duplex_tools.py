"""Tools in full duplex over sockets: a model with weights and its replays, and hostile clients."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Final

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from protocol.values.model import UNIT_SAMPLES
from recorder.format.format import Record
from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from tests.bench.tiny.staging import Pcm, read_manifest, read_speech, room, stage_phrase
from tests.live.servers import LiveServer, live_server
from tests.live.test_deterministic import antiphon
from tests.models.makers import TOOLS
from tests.models.random_model import IN_SLOTS, sound, write_checkpoint
from tests.sessions.in_memory import append_frame, base64, close_frame

FIXTURES = Path(__file__).parents[2] / "fixtures"
HELDOUT = FIXTURES / "speech" / "heldout"
ITEMS = {item.phrase: item for item in reversed(read_manifest(HELDOUT))}
PATIENCE_SAMPLES = 3_000
"""Of quiet after a phrase, at least, before it is answered."""
ASKED = ("set a timer", "what time is it")
RECORDED = FIXTURES / "tiny" / "clock.session.zst"
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


def talk(
    connection: ClientConnection, seconds: Iterable[bytes], content: str = "nine", **config: object
) -> list[Body]:
    """Send sound second by second, and the result of each call; returns what was received."""
    received: list[Body] = []
    answered = set[str]()

    def wait_for(kind: str) -> Body:
        while True:
            body = json.loads(connection.recv(timeout=WAIT_S))
            received.append(body)
            if body["type"] == "response.tool_call.done":
                result = {"type": "input.tool_result", "tool_call_id": body["tool_call_id"]}
                connection.send(json.dumps({**result, "content": content}))
            if body["type"] == kind and body.get("input_id") not in answered:
                answered.add(body.get("input_id", ""))
                return body

    wait_for("session.queue_done")
    settings = {"force_listen_count": 0, **config}
    payload = {"system_prompt": "Hi.", "tools": OFFERED, "config": settings}
    connection.send(json.dumps({"type": "session.init", "payload": payload}))
    assert wait_for("session.created")["tools"] == "called"
    for second in seconds:
        body = {"type": "input.append", "input": {"audio": base64(second)}}
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
            received = talk(connection, map(sound, range(UNITS)))
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


def seconds_of(pcm: Pcm) -> Pcm:
    """Sound by seconds."""
    return pcm.reshape(-1, UNIT_SAMPLES)


def in_turn() -> list[bytes]:
    """A timer is set, and then the time is asked, second by second."""
    spoken = [
        stage_phrase(HELDOUT, ITEMS[phrase], at, lead_s=1.0) for at, phrase in enumerate(ASKED)
    ]
    return [second.astype("<f4").tobytes() for pcm, _ in spoken for second in seconds_of(pcm)]


def amid_an_answer() -> list[bytes]:
    """The time is asked while the question for its name is answered, second by second."""
    pcm, end = stage_phrase(HELDOUT, ITEMS["what is your name"], 0, lead_s=1.0)
    question, said = read_speech(HELDOUT, ITEMS["what time is it"]), end + PATIENCE_SAMPLES
    begin = -(-said // UNIT_SAMPLES) * UNIT_SAMPLES + 4 * UNIT_SAMPLES // 5
    sound = np.concatenate([pcm, room(9 * UNIT_SAMPLES, 1)])
    sound[begin : begin + len(question)] += question
    return [second.astype("<f4").tobytes() for second in seconds_of(sound)]


def test_the_embedded_model_asks_for_the_time_and_tells_it(tmp_path: Path) -> None:
    """It calls its clock while it speaks and while it listens, and says what came of it."""
    recordings = tmp_path / "recordings"
    with live_server("--record", str(recordings), model="tiny") as server:
        for seconds, calls, said in (
            (in_turn(), 2, "Timer set for one minute.It is three o'clock.It is three o'clock."),
            (amid_an_answer(), 1, "My name is Antiphon.It is three o'clock."),
        ):
            with connect(f"{server.url}?mode=audio", compression=None) as connection:
                received = talk(connection, seconds, "three o'clock", top_k=1)
            made = [body for body in received if body["type"] == "response.tool_call.done"]
            assert [body["call"]["name"] for body in made] == ["clock"] * calls
            assert "".join(body.get("text", "") for body in received) == said
        assert server.stop() == 0
    replayed = antiphon("replay", "--full", "--model", "tiny", recordings, "--json")
    assert [it["result"] for it in json.loads(replayed.stdout)] == ["identical"] * 2, (
        replayed.stdout
    )


def test_the_recording_of_a_clock_is_replayed() -> None:
    """It was made by the test above, of sound of 8 bits, and outlives the weights that made it."""
    with LogReader(RECORDED) as reader:
        items = list(reader)
    assert replay(items).identical
    fields = [str(item.fields) for item in items if isinstance(item, Record)]
    assert sum("'result'" in each and "three o'clock" in each for each in fields) >= 2


# -- hostile clients -------------------------------------------------------------------------------


FLOOD_S: Final = 8
RESULTS_MAX: Final = 10_000
"""Of a flood, in this time: the server reads slowly what it refuses, so a million takes hours."""
GROWTH_KB_MAX: Final = 32 * 1024
"""Of the server's memory: less than the flood has."""


def begin(connection: ClientConnection, **payload: Any) -> Body:
    """Set a session up; returns the answer to the init."""
    wait_for(connection, "session.queue_done")
    connection.send(json.dumps({"type": "session.init", "payload": payload}))
    return wait_for(connection, "session.created", "error")


def wait_for(connection: ClientConnection, *kinds: str) -> Body:
    """Read up to a message of these types."""
    while True:
        body: Body = json.loads(connection.recv(timeout=WAIT_S))
        if body["type"] in kinds:
            return body


def result_of(call: str, content: str) -> str:
    """Write a result."""
    return json.dumps({"type": "input.tool_result", "tool_call_id": call, "content": content})


def second(connection: ClientConnection) -> float:
    """Send a second of sound; returns how long its answer took."""
    began = time.monotonic()
    connection.send(append_frame())
    wait_for(connection, "response.output.delta")
    return time.monotonic() - began


def memory_kb(server: LiveServer) -> int:
    """The server's resident memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def flood(connection: ClientConnection, sent: list[int]) -> None:
    """Send results of calls that there are not, as fast as the server reads them."""
    frame = result_of("call_ffffffffffff", "x" * 4_000)
    with suppress(ConnectionClosed, OSError):
        while True:
            connection.send(frame)
            sent[0] += 1


def drain(connection: ClientConnection) -> None:
    """Read until the connection is closed."""
    with suppress(ConnectionClosed, OSError):
        while True:
            connection.recv(timeout=WAIT_S)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no memory is told here")
def test_a_flood_of_results_costs_only_its_sender(tmp_path: Path) -> None:
    """Honest sessions would be late, or the server keep what it refuses."""
    with (
        live_server("--record", str(tmp_path), "--slots", "2") as server,
        connect(f"{server.url}?mode=audio", compression=None) as honest,
        connect(
            f"{server.url}?mode=audio", compression=None, ping_interval=None, close_timeout=1
        ) as hostile,
    ):
        assert begin(honest)["type"] == begin(hostile, tools=OFFERED)["type"] == "session.created"
        before, quiet = memory_kb(server), [second(honest) for _ in range(5)]
        sent, took, until = [0], list[float](), time.monotonic() + FLOOD_S
        Thread(target=drain, args=(hostile,), daemon=True).start()
        Thread(target=flood, args=(hostile, sent), daemon=True).start()
        while time.monotonic() < until:
            took.append(second(honest))
            time.sleep(0.2)
        assert 100 < sent[0] < RESULTS_MAX
        assert sorted(took)[len(took) // 2] < 1 + max(quiet)
        assert memory_kb(server) - before < GROWTH_KB_MAX
        hostile.socket.close()


def test_results_and_tools_beyond_every_measure_are_refused_by_name(tmp_path: Path) -> None:
    """A session would end without a reason, or a hundred megabytes be read."""
    with live_server("--record", str(tmp_path)) as server:
        with connect(f"{server.url}?mode=audio", compression=None, max_size=None) as many:
            refused = begin(many, tools=OFFERED * 5_000)
            assert refused["error"]["message"].startswith("$.payload.tools: 10000 items")
            assert begin_again(many)["tools"] == "called"
            for call, content, words in (
                ("call_ffffffffffff", "nine", "$.tool_call_id: no call of this session"),
                ("call_ffffffffffff", "x" * 1_000_000, "$.content: 1000000 characters"),
                ("x" * 1_000, "nine", "$.tool_call_id: 1000 characters"),
            ):
                many.send(result_of(call, content))
                assert wait_for(many, "error")["error"]["message"].startswith(words)
            assert second(many) < WAIT_S
        with connect(f"{server.url}?mode=audio", compression=None, max_size=None) as large:
            begin(large, tools=OFFERED)
            with suppress(ConnectionClosed):
                large.send(result_of("call_ffffffffffff", "x" * 100_000_000))
            drain(large)
            assert large.close_code in (1006, 1009)  # it may be lost behind what is being sent
        with connect(f"{server.url}?mode=audio", compression=None) as honest:
            assert begin(honest, tools=OFFERED)["tools"] == "called"
            assert second(honest) < WAIT_S


def begin_again(connection: ClientConnection) -> Body:
    """Set a session up, after a refusal."""
    connection.send(json.dumps({"type": "session.init", "payload": {"tools": OFFERED}}))
    return wait_for(connection, "session.created")
