"""Transcription over a real socket: the client of the source as it is, and every row of the table.

The clients are written with the `websockets` library and share no code with the server. What a
session was comes back from its log: each is replayed, the model's part too.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from recorder.read.reader import LogReader
from replay.rerun.full import Loading, replay_fully
from replay.rerun.logic import replay
from runtime.serve.routing import NotServedError, route
from tests.live.servers import LiveServer, live_server

Body = dict[str, Any]
RATE_HZ: Final = 16_000
NAME: Final = "mistralai/Voxtral-Mini-4B-Realtime-2602"
"""The model that the example of 003 was written for."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server of this module records."""
    return tmp_path_factory.mktemp("recordings")


@contextmanager
def replayed_server(recordings: Path, model: str) -> Iterator[LiveServer]:
    """A server as an operator starts it for clients of 003; all that it served is replayed."""
    options = ("--default-mode", "transcription", "--served-model-name", NAME)
    with live_server("--record", str(recordings), *options, model=model) as server:
        yield server
        assert server.stop() == 0
    logs = sorted(recordings.iterdir())
    assert logs
    for path in logs:
        assert_replays(path)


@pytest.fixture(scope="module")
def server(recordings: Path) -> Iterator[LiveServer]:
    with replayed_server(recordings, "scripted") as server:
        yield server


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server that keeps little and waits briefly, with one slot."""
    options = ("--transcription-buffer-mb", "1", "--chat-idle-s", "1", "--slots", "1")
    with live_server("--no-record", *options) as server:
        yield server


def assert_replays(path: Path) -> None:
    """Run a log again, without and with the model."""
    with LogReader(path) as log:
        report = replay(log)
    assert report.divergence is None
    assert report.finished
    with LogReader(path) as log:
        fully = anyio.run(replay_fully, log.head.fields, log, Loading.load)
    assert fully.identical
    assert fully.chunks_changed == 0


def tone(seconds: float, pitch_hz: int = 300) -> bytes:
    """PCM16 that is loud enough."""
    at = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    return (np.sin(2 * np.pi * pitch_hz * at) * 0.5 * 32_767).astype(np.int16).tobytes()


async def receive(socket: ClientConnection) -> Body:
    """Receive an event; half a minute's silence is a failure."""
    body: Body = json.loads(await asyncio.wait_for(socket.recv(), 30))
    return body


async def send(socket: ClientConnection, kind: str, **fields: object) -> None:
    """Send an event."""
    await socket.send(json.dumps({"type": kind, **fields}))


async def append(socket: ClientConnection, pcm16: bytes) -> None:
    """Append sound."""
    audio = base64.b64encode(pcm16).decode()
    await send(socket, "input_audio_buffer.append", audio=audio)


async def greeted(socket: ClientConnection, *, model: str | None = "scripted") -> Body:
    """Wait for the greeting, and choose a model."""
    created = await receive(socket)
    assert created["type"] == "session.created"
    if model is not None:
        await send(socket, "session.update", model=model)
    return created


async def done(socket: ClientConnection) -> tuple[str, Body]:
    """Read an utterance out; returns its deltas, joined, and its end."""
    said = ""
    while True:
        body = await receive(socket)
        if body["type"] == "transcription.done":
            return said, body
        assert body["type"] == "transcription.delta", body
        assert set(body) == {"type", "delta"}
        said += body["delta"]


async def refused(socket: ClientConnection, code: str) -> Body:
    """Receive an error of that code."""
    body = await receive(socket)
    assert (body["type"], body.get("code")) == ("error", code), body
    assert isinstance(body["error"], str)
    return body


async def still_serves(socket: ClientConnection) -> None:
    """The connection stayed, and works."""
    await append(socket, tone(1))
    await send(socket, "input_audio_buffer.commit", final=True)
    said, end = await done(socket)
    assert said == end["text"]
    assert said


# -- the client of the source ---------------------------------------------------------------------


def load_audio_as_pcm16(audio: np.ndarray[Any, np.dtype[np.float64]]) -> bytes:
    """As the example has it, but for the file that librosa would load."""
    return (audio * 32_767).astype(np.int16).tobytes()


async def stream_audio_file(
    server_url: str, model: str, pcm_audio: bytes, printed: list[str]
) -> Body:
    """The example's client, but that it collects what it would print."""
    async with connect(server_url) as ws:
        response = json.loads(await ws.recv())
        assert response["type"] == "session.created"
        await ws.send(json.dumps({"type": "session.update", "model": model}))
        await ws.send(json.dumps({"type": "input_audio_buffer.commit"}))
        for i in range(0, len(pcm_audio), 4096):
            chunk = pcm_audio[i : i + 4096]
            await ws.send(
                json.dumps(
                    {"type": "input_audio_buffer.append", "audio": base64.b64encode(chunk).decode()}
                )
            )
        await ws.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
        async for message in ws:
            data: Body = json.loads(message)
            if data["type"] == "transcription.delta":
                printed.append(data["delta"])
            elif data["type"] == "transcription.done":
                return data
    raise AssertionError("it was not done")


def test_the_example_client_of_003_works_as_it_is(server: LiveServer) -> None:
    """A client of the server of 003 does not get along with us."""
    at = np.arange(RATE_HZ * 7) / RATE_HZ
    loud = np.repeat([0.5, 0.0, 0.4, 0.3, 0.0, 0.2, 0.5], RATE_HZ)
    pcm_audio = load_audio_as_pcm16(np.sin(2 * np.pi * 300 * at) * loud)
    printed: list[str] = []
    data = asyncio.run(stream_audio_file(server.url, NAME, pcm_audio, printed))
    assert "".join(printed) == data["text"]
    assert [word.rpartition("-")[2] for word in data["text"].split()] == [
        "0.0",
        "0.2",
        "0.3",
        "0.5",
        "0.6",
    ]
    usage = data["usage"]
    assert usage["prompt_tokens"] == 12 + 8 * 10  # seven seconds, and the silence after them
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


# -- every row of the table -----------------------------------------------------------------------


async def commit_before_update(socket: ClientConnection) -> None:
    created = await greeted(socket, model=None)
    assert set(created) == {"type", "id", "created", "recording_id"}
    await append(socket, tone(1))
    await send(socket, "input_audio_buffer.commit", final=True)
    said, end = await done(socket)
    assert said == end["text"] != ""  # what was appended before was kept
    await send(socket, "session.update", model="scripted", language="de", prompt="Ada")
    await still_serves(socket)


async def update_without_a_model(socket: ClientConnection) -> None:
    await greeted(socket, model=None)
    await send(socket, "session.update", session={"model": "scripted"})
    await refused(socket, "invalid_event")
    await still_serves(socket)


async def unknown_model(socket: ClientConnection) -> None:
    await greeted(socket)
    await send(socket, "session.update", model="whisper-9")
    assert "whisper-9" in (await refused(socket, "model_not_found"))["error"]
    await still_serves(socket)  # the earlier choice stayed


async def append_before_commit(socket: ClientConnection) -> None:
    await greeted(socket)
    for _ in range(3):
        await append(socket, tone(0.5))
    await send(socket, "input_audio_buffer.commit", final=True)
    _, end = await done(socket)
    assert len(end["text"].split()) == 2


async def text_comes_while_sound_does(socket: ClientConnection) -> None:
    await greeted(socket)
    await send(socket, "input_audio_buffer.commit")
    await append(socket, tone(1))
    first = await receive(socket)
    assert first["type"] == "transcription.delta"
    await append(socket, tone(1, 400))
    await send(socket, "input_audio_buffer.commit", final=True)
    said, end = await done(socket)
    assert first["delta"] + said == end["text"]
    assert len(end["text"].split()) == 2


async def no_sound(socket: ClientConnection) -> None:
    await greeted(socket)
    await send(socket, "input_audio_buffer.commit")
    await send(socket, "input_audio_buffer.commit", final=True)
    said, end = await done(socket)
    empty = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert (said, end["text"], end["usage"]) == ("", "", empty)


async def bad_sound(socket: ClientConnection) -> None:
    await greeted(socket)
    for audio in ("%%%", base64.b64encode(b"odd").decode(), "", None):
        await send(socket, "input_audio_buffer.append", audio=audio)
        await refused(socket, "invalid_audio")
    await still_serves(socket)


async def sound_with_line_breaks(socket: ClientConnection) -> None:
    await greeted(socket)
    audio = base64.encodebytes(tone(1)).decode()
    assert audio.count("\n") > 100
    await send(socket, "input_audio_buffer.append", audio=audio)
    await send(socket, "input_audio_buffer.commit", final=True)
    said, end = await done(socket)
    assert said == end["text"] != ""


async def language_and_prompt(socket: ClientConnection) -> None:
    await greeted(socket, model=None)
    for said in ("de", "", None):
        await send(socket, "session.update", model=NAME, language=said, prompt=said)
        await still_serves(socket)


async def frames_beyond_reading(socket: ClientConnection) -> None:
    await greeted(socket)
    await socket.send("{not json")
    await refused(socket, "invalid_json")
    await send(socket, "session.reset")
    await refused(socket, "unknown_event")
    await socket.send(b"\x00\x01")
    await refused(socket, "invalid_frame")
    await still_serves(socket)


async def pipelined(socket: ClientConnection) -> None:
    await greeted(socket)
    for number in range(3):
        await send(socket, "input_audio_buffer.commit")
        await append(socket, tone(2, 200 + number))
        await send(socket, "input_audio_buffer.commit", final=True)
    for number in range(3):
        said, end = await done(socket)
        assert said == end["text"]
        assert {word.partition("-")[2].partition(".")[0] for word in said.split()} == {str(number)}


async def the_other_names(socket: ClientConnection) -> None:
    await greeted(socket, model=None)
    await send(socket, "session.create", model=NAME)
    await send(socket, "response.create")
    await append(socket, tone(1))
    delta = await receive(socket)
    assert delta["type"] == "response.text.delta"
    await send(socket, "input_audio_buffer.commit", final=True)
    end = await receive(socket)
    assert (end["type"], end["text"]) == ("response.done", delta["delta"])


ROWS: Final = (
    commit_before_update,
    update_without_a_model,
    unknown_model,
    append_before_commit,
    text_comes_while_sound_does,
    no_sound,
    bad_sound,
    sound_with_line_breaks,
    language_and_prompt,
    frames_beyond_reading,
    pipelined,
    the_other_names,
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_a_row_of_the_table(server: LiveServer, row: Any) -> None:
    """A decision of the wire holds in the machine, and not over a socket."""

    async def client() -> None:
        async with connect(f"{server.url}?mode=transcription") as socket:
            await row(socket)

    asyncio.run(client())


def test_sound_past_the_limit_is_refused_and_the_connection_stays(small: LiveServer) -> None:
    """A client fills the server's memory."""

    async def client() -> None:
        async with connect(f"{small.url}?mode=transcription") as socket:
            await greeted(socket)
            for _ in range(3):
                await append(socket, bytes(320_000))
            await append(socket, bytes(320_000))
            await refused(socket, "buffer_full")
            await send(socket, "input_audio_buffer.commit", final=True)
            _, end = await done(socket)
            assert end["usage"]["prompt_tokens"] == 12 + 31 * 10  # of what was kept

    asyncio.run(client())


@pytest.mark.parametrize("model", ["scripted", None])
def test_a_silent_client_is_let_go(small: LiveServer, model: str | None) -> None:
    """A slot is held by a client that is gone without a word."""

    async def client() -> None:
        async with connect(f"{small.url}?mode=transcription") as socket:
            await greeted(socket, model=model)
            with pytest.raises(ConnectionClosed) as caught:
                await receive(socket)
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1000, "idle")

    asyncio.run(client())


def test_a_client_that_must_wait_is_greeted_when_a_slot_is_free(small: LiveServer) -> None:
    """A client of 003 takes a place in the queue for its greeting."""

    async def client() -> None:
        url = f"{small.url}?mode=transcription"
        async with connect(url) as first:
            await greeted(first)
            async with connect(url) as second:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(second.recv(), 0.2)
                await still_serves(first)
                await first.close()
                await greeted(second)
                await still_serves(second)

    asyncio.run(client())


def test_the_limit_of_a_session_is_told() -> None:
    """A client is cut off and does not know why."""
    with live_server("--no-record", "--limit-transcription-s", "1") as short:

        async def client() -> None:
            async with connect(f"{short.url}?mode=transcription") as socket:
                await greeted(socket)
                await refused(socket, "timeout")
                with pytest.raises(ConnectionClosed) as caught:
                    await receive(socket)
                assert caught.value.rcvd is not None
                assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1000, "timeout")

        asyncio.run(client())


def test_who_chooses_no_model_is_told_so() -> None:
    """A client is told that it lasted too long, half a minute after it connected."""
    with live_server("--no-record", "--init-wait-s", "1") as short:

        async def client() -> None:
            async with connect(f"{short.url}?mode=transcription") as socket:
                await greeted(socket, model=None)
                body = await refused(socket, "timeout")
                assert body["error"] == "the session is over: no model was chosen within 1 s"
                with pytest.raises(ConnectionClosed):
                    await receive(socket)

        asyncio.run(client())


def test_a_shutdown_is_told(tmp_path: Path) -> None:
    """A restart looks to a client like the end of what it said."""
    with live_server("--record", str(tmp_path), "--drain-s", "1") as leaving:

        async def client() -> None:
            async with connect(f"{leaving.url}?mode=transcription") as socket:
                await greeted(socket)
                await send(socket, "input_audio_buffer.commit")
                await append(socket, tone(1.5))
                assert (await receive(socket))["type"] == "transcription.delta"
                leaving.process.terminate()
                await refused(socket, "server_shutdown")
                with pytest.raises(ConnectionClosed) as caught:
                    await receive(socket)
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 1012

        asyncio.run(client())
        leaving.process.wait(30)
    (log,) = tmp_path.iterdir()
    assert_replays(log)


def test_a_model_without_the_mode_refuses_the_connection() -> None:
    """A client of 003 is let in and waits for text that never comes."""
    for query in ({"mode": ("transcription",)}, {}):
        with pytest.raises(NotServedError) as caught:
            route("/v1/realtime", query, ("video", "audio"), default="transcription")
        assert caught.value.status == 400
        assert caught.value.details == {"allowed": ["video", "audio"]}
