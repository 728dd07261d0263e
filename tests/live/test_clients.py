"""Clients that are not ours, over a real socket, following the sources to the letter.

They are written with the `websockets` library on asyncio, and share no code with the server.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from replay.rerun.report import ReplayReport
from tests.live.servers import LiveServer, live_server

Body = dict[str, Any]
SILENCE = base64.b64encode(np.zeros(16_000, "<f4").tobytes()).decode()
JPEG = base64.b64encode(simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8))).decode()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server of this module records."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(recordings: Path) -> Iterator[LiveServer]:
    """A server for the clients of this module."""
    with live_server("--record", str(recordings)) as server:
        yield server


async def receive(socket: ClientConnection) -> Body:
    """Receive an event; a minute's silence is a failure."""
    body: Body = json.loads(await asyncio.wait_for(socket.recv(), 60))
    return body


async def closed(socket: ClientConnection) -> tuple[int, str, list[Body]]:
    """Receive until the server closes; returns its code and reason, and what came before."""
    events: list[Body] = []

    async def listen() -> None:
        while True:
            events.append(await receive(socket))

    with pytest.raises(ConnectionClosed) as caught:
        await listen()
    farewell = caught.value.rcvd
    assert farewell is not None
    return farewell.code, farewell.reason, events


def replay_log(path: Path) -> ReplayReport:
    """Run a log again."""
    with LogReader(path) as reader:
        return replay(reader)


def only_log(recordings: Path, before: set[Path]) -> Path:
    """The log that has come since."""
    (path,) = set(recordings.iterdir()) - before
    return path


def test_the_timeline_of_000(server: LiveServer, recordings: Path) -> None:
    """A client of the video protocol does not get along with us."""
    before = set(recordings.iterdir())

    async def client() -> None:
        async with connect(f"{server.url}?mode=video", max_size=None) as socket:
            # Phase 1: connect and queue; a free worker is said at once
            assert await receive(socket) == {"type": "session.queue_done"}
            # Phase 2: session init
            update = {
                "type": "session.update",
                "session": {
                    "instructions": "You are a helpful English assistant.",
                    "max_slice_nums": 1,
                },
            }
            await socket.send(json.dumps(update))
            created = await receive(socket)
            assert created["type"] == "session.created"
            assert created["session_id"].startswith("rt_")
            assert created["session_id"][3:].isdigit()
            assert created["prompt_length"] > 0
            # Phase 3: a second of audio and a frame, again and again
            kinds = []
            for _ in range(5):
                append = {
                    "type": "input_audio_buffer.append",
                    "audio": SILENCE,
                    "video_frames": [JPEG],
                    "force_listen": False,
                    "max_slice_nums": 1,
                }
                await socket.send(json.dumps(append))
                event = await receive(socket)
                kinds.append(event["type"])
                assert 0 < event["kv_cache_length"] <= 8192
                if event["type"] == "response.output_audio.delta":
                    assert set(event) >= {"text", "audio", "end_of_turn", "kv_cache_length"}
                    samples = len(base64.b64decode(event["audio"])) // 4
                    assert samples == 24_000 or event["end_of_turn"]
            assert kinds == ["response.listen"] * 3 + ["response.output_audio.delta"] * 2
            assert event["end_of_turn"]
            # Phase 4: close
            await socket.send(json.dumps({"type": "session.close", "reason": "user_stop"}))
            code, _, events = await closed(socket)
            assert events == [{"type": "session.closed", "reason": "stopped"}]
            assert code == 1000

    asyncio.run(client())
    assert replay_log(only_log(recordings, before)).divergence is None


def test_the_lifecycle_of_001(server: LiveServer, recordings: Path) -> None:
    """A client of the current protocol does not get along with us."""
    before = set(recordings.iterdir())

    async def client() -> None:
        async with connect(f"{server.url}?mode=audio", max_size=None) as socket:
            assert await receive(socket) == {"type": "session.queue_done"}
            payload = {"system_prompt": "You are a helpful assistant.", "config": {"top_k": 20}}
            await socket.send(json.dumps({"type": "session.init", "payload": payload}))
            created = await receive(socket)
            assert created["type"] == "session.created"
            assert created["mode"] == "full_duplex"
            assert created["metrics"] == {}
            responses = set()
            for number in range(5):
                item = {"audio": SILENCE, "force_listen": False}
                append = {"type": "input.append", "input": item, "input_id": f"mine-{number}"}
                await socket.send(json.dumps(append))
                delta = await receive(socket)
                assert delta["type"] == "response.output.delta"
                assert delta["session_id"] == created["session_id"]
                assert delta["input_id"] == f"mine-{number}"
                assert delta["kind"] == ("listen" if number < 3 else "text")
                if delta["kind"] == "text":
                    audio = await receive(socket)
                    assert audio["kind"] == "audio"
                    assert audio.get("end_of_turn", False) is (number == 4)
                    responses |= {delta["response_id"], audio["response_id"]}
                assert delta["metrics"]["dropped_units"] == 0
            assert len(responses) == 1
            await socket.send(json.dumps({"type": "session.close", "reason": "user_stop"}))
            code, _, events = await closed(socket)
            assert code == 1000
            assert events == [
                {
                    "type": "session.closed",
                    "session_id": created["session_id"],
                    "reason": "user_stop",
                }
            ]

    asyncio.run(client())
    assert replay_log(only_log(recordings, before)).divergence is None


def test_a_bad_mode_is_refused_in_the_handshake(server: LiveServer) -> None:
    """A typing error in a URL gives a session of another kind, or a riddle."""

    async def client(query: str) -> InvalidStatus:
        with pytest.raises(InvalidStatus) as caught:
            async with connect(f"{server.url}?{query}"):
                pass
        return caught.value

    for query in ("mode=speech", "mode=", "mode=video&mode=audio", "mode=%00"):
        refusal = asyncio.run(client(query))
        assert refusal.response.status_code == 400
        assert refusal.response.body is not None
        assert json.loads(refusal.response.body)["allowed"] == [
            *("video", "audio", "chat", "transcription")
        ]


AUDIO = "$.input.audio"


def item(**fields: object) -> str:
    """An append of the `realtime` dialect."""
    return json.dumps({"type": "input.append", "input": {"audio": SILENCE, **fields}})


def audio(data: bytes) -> str:
    """An append with these bytes as its audio."""
    return item(audio=base64.b64encode(data).decode())


BOMB = (
    b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01\xff\xd9"
)
BAD: dict[str, tuple[str, str, str]] = {
    "bad base64": (item(audio="@@@@"), "invalid_payload", AUDIO),
    "odd byte count": (audio(b"\0" * 16_001), "invalid_payload", AUDIO),
    "NaN": (audio(np.full(4000, np.nan, "<f4").tobytes()), "invalid_payload", AUDIO),
    "no samples": (audio(b""), "invalid_payload", AUDIO),
    "11 s": (audio(b"\0" * 4 * 176_000), "invalid_payload", AUDIO),
    "not a JPEG": (item(video_frames=["AAAA"]), "invalid_payload", "$.input.video_frames[0]"),
    "a JPEG bomb": (
        item(video_frames=[base64.b64encode(BOMB).decode()]),
        "invalid_payload",
        "$.input.video_frames[0]",
    ),
    "unknown type": (json.dumps({"type": "input.appendix"}), "unknown_event", "$.type"),
    "no type": (json.dumps({"audio": SILENCE}), "missing_field", "$.type"),
    "missing field": (json.dumps({"type": "input.append", "input": {}}), "missing_field", AUDIO),
    "wrong type": (item(force_listen="yes"), "invalid_payload", "$.input.force_listen"),
    "wrong type of audio": (item(audio=5), "invalid_payload", AUDIO),
    "slices out of range": (item(max_slice_nums=10), "invalid_payload", "$.input.max_slice_nums"),
    "a second init": (json.dumps({"type": "session.init", "payload": {}}), "invalid_event", ""),
    "the other dialect": (
        json.dumps({"type": "input_audio_buffer.append", "audio": SILENCE}),
        "invalid_event",
        "",
    ),
}


def test_bad_input_is_named_and_costs_nothing(server: LiveServer) -> None:
    """A mistake in one message ends a call, or loses what came before it."""

    async def client() -> None:
        async with connect(f"{server.url}?mode=video", max_size=None) as socket:
            await receive(socket)
            await socket.send(json.dumps({"type": "session.init", "payload": {}}))
            await receive(socket)
            half = base64.b64encode(np.zeros(8_000, "<f4").tobytes()).decode()
            for name, (frame, code, path) in BAD.items():
                await socket.send(item(audio=half))
                await socket.send(frame)
                error = await receive(socket)
                assert error["type"] == "error", name
                assert error["error"]["code"] == code, (name, error)
                assert path in error["error"]["message"], (name, error)
                assert error["error"]["type"] == "client_error"
                await socket.send(item(audio=half))
                outcome = await receive(socket)
                assert outcome["type"] == "response.output.delta", (name, outcome)
                if outcome["kind"] == "text":
                    assert (await receive(socket))["kind"] == "audio"

    asyncio.run(client())


FATAL: dict[str, tuple[str | bytes, int]] = {
    "invalid JSON": ("{type: 1}", 1003),
    "an array": ("[]", 1003),
    "a number": ("5", 1003),
    "duplicate keys": ('{"type": "session.close", "type": "session.close"}', 1003),
    "NaN literal": ('{"type": NaN}', 1003),
    "a lone surrogate": ('{"type": "\\ud800"}', 1003),
    "a binary frame": (b'{"type": "session.close"}', 1003),
    "25 MiB": ('{"a": "' + "x" * (25 << 20) + '"}', 1009),
    "a 100 MB frame": ('{"a": "' + "x" * 100_000_000 + '"}', 1009),
}


@pytest.mark.parametrize("name", FATAL)
def test_what_is_no_message_closes_the_connection(server: LiveServer, name: str) -> None:
    """Garbage is taken for a message, or brings the server down."""
    frame, code = FATAL[name]

    async def client() -> None:
        async with connect(f"{server.url}?mode=audio", max_size=None) as socket:
            await receive(socket)
            await socket.send(json.dumps({"type": "session.init", "payload": {}}))
            await receive(socket)
            with suppress(ConnectionClosed):  # it may be closed before all of it was sent
                await socket.send(frame)
            got, reason, events = await closed(socket)
            assert got == code, (got, reason)
            if len(frame) < 1000:
                assert reason
                assert [event["type"] for event in events] == ["session.closed"]

    asyncio.run(client())
    assert server.process.poll() is None


def test_data_while_queued_is_not_ready(recordings: Path) -> None:
    """A client that does not wait its turn is served out of turn, or thrown out."""
    with live_server("--no-record", "--slots", "1") as small:

        async def client() -> None:
            async with connect(small.url) as first, connect(small.url) as second:
                assert (await receive(first))["type"] == "session.queue_done"
                queued = await receive(second)
                assert (queued["type"], queued["position"]) == ("session.queued", 1)
                await second.send(item())
                assert (await receive(second))["error"]["code"] == "not_ready"
                await first.close()
                while (event := await receive(second))["type"] == "session.queue_update":
                    pass
                assert event["type"] == "session.queue_done"

        asyncio.run(client())


def test_sigterm_ends_every_session_with_a_word(tmp_path: Path) -> None:
    """A restart looks like a crash to clients, or leaves half a log."""
    with live_server("--record", str(tmp_path), "--drain-s", "0") as restarted:

        async def client() -> None:
            async with connect(restarted.url) as active, connect(restarted.url) as waiting:
                await receive(active)
                await receive(waiting)
                await active.send(json.dumps({"type": "session.init", "payload": {}}))
                await receive(active)
                await active.send(item())
                assert (await receive(active))["kind"] == "listen"
                restarted.process.terminate()
                code, _, events = await closed(active)
                assert code == 1012
                assert events[-1]["reason"] == "server_shutdown"
                code, reason, events = await closed(waiting)
                assert (code, reason, events) == (1012, "server_shutdown", [])

        asyncio.run(client())
        assert restarted.process.wait(30) == 0
        assert not restarted.errors.read_text()
    reports = [replay_log(path) for path in tmp_path.iterdir()]
    assert len(reports) == 2
    assert all(report.finished and report.divergence is None for report in reports)
