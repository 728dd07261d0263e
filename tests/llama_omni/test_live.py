"""`antiphon serve --model llama_omni:URL` over real sockets: chats with a model elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
from websockets.asyncio.client import connect

import antiphon
from protocol.values.errors import ErrorCode
from protocol.values.messages import Delta
from protocol.values.model import ChatConfig
from protocol.values.requests import AudioPart, ImagePart, SpeechRequest
from recorder.read.reader import LogReader
from replay.cli import replay_command
from replay.rerun.logic import replay
from tests.live.servers import LiveServer, live_server
from tests.llama_omni.fake import (
    CLOSE,
    DROP,
    HANG,
    SECOND,
    WORD_SAMPLES,
    FakeServer,
    Item,
    audio,
    delta,
    sound,
)
from tests.network.peers import JPEG
from tests.project.example_packages import EXAMPLES, install, run_with
from tests.replay.test_cli import told

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
JOIN_S = 30


@contextmanager
def remote(port: int = 0) -> Iterator[FakeServer]:
    """Run the server elsewhere, in a thread of its own."""
    with anyio.from_thread.start_blocking_portal() as portal:
        fake = portal.call(FakeServer)
        with portal.wrap_async_context_manager(fake.running(port)):
            yield fake


@pytest.fixture(scope="module")
def far() -> Iterator[FakeServer]:
    """The server elsewhere."""
    with remote() as fake:
        yield fake


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server records."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """How `antiphon` runs where the package is installed."""
    folder = tmp_path_factory.mktemp("installed")
    install(folder, "llama_omni:load", EXAMPLES / "llama_omni")
    return run_with(folder)


@pytest.fixture(scope="module")
def server(far: FakeServer, recordings: Path, run: tuple[str, ...]) -> Iterator[LiveServer]:
    """A server that lends it out; at its end all of its recordings are replayed."""
    model = f"llama_omni:{far.url}"
    with live_server("--record", str(recordings), model=model, run=run) as live:
        yield live
    assert_all_identical(recordings)


@pytest.fixture
def fake(far: FakeServer) -> Iterator[FakeServer]:
    """The server elsewhere, as it should be; nobody said what its protocol does not have."""
    far.answer, far.greeting, far.close_status = far.play, None, None
    yield far
    assert far.violations == []


def saying(fake: FakeServer, *items: Item) -> None:
    """Have it answer so, whatever it is asked."""
    fake.answer = lambda *_: items


def logs(recordings: Path) -> set[Path]:
    return set(recordings.iterdir())


def assert_replays(recordings: Path, before: set[Path]) -> None:
    """What was recorded since comes out again; the last of it may be on its way to the disk."""
    new = logs(recordings) - before
    assert new
    for path in new:
        with LogReader(path) as reader:
            assert replay(reader).divergence is None


def assert_all_identical(recordings: Path) -> None:
    """Each session is whole in its log, and the same again; the server has stopped."""
    for path in logs(recordings):
        assert told(replay_command, path)["result"] == "identical"


async def is_answered(url: str) -> None:
    """The slot is free: the next question has its answer."""
    with anyio.fail_after(JOIN_S):
        async with antiphon.connect(url, mode="chat") as session:
            assert (await session.answer("and now?")).text == "and now? "


async def test_a_chat_over_the_sdk(server: LiveServer, fake: FakeServer, recordings: Path) -> None:
    """Chats were refused with HTTP 400 where the model is behind `llama_omni`."""
    before, asked = logs(recordings), len(fake.appends)
    async with antiphon.connect(server.url, mode="chat") as session:
        assert session.created is not None
        assert session.created.is_chat
        pieces = [piece async for piece in await session.ask("good morning", speech=True)]
        assert "".join(piece.text for piece in pieces[:-1]) == pieces[-1].text == "good morning "
        assert sum(len(piece.pcm) for piece in pieces) == 2 * 4 * WORD_SAMPLES
        heard = AudioPart(data=sound(1600), is_file=False, rate_hz=16_000)
        question = antiphon.message("user", "what is it?", ImagePart(data=JPEG), heard)
        whole = await session.answer(question, config=ChatConfig(max_new_tokens=7))
        assert (whole.text, whole.pcm, whole.reason) == ("what is it? ", b"", "turn_end")
        assert whole.metrics.kv_cache_length == 43
        spoken = await session.answer("at once", speech=True)
        assert spoken.pcm == sound(2 * WORD_SAMPLES)
    first, second, _ = fake.appends[asked:]
    assert first["tts"] == {"enabled": True}
    assert second["generation"]["max_new_tokens"] == 7
    kinds = [part["type"] for part in second["messages"][0]["content"]]
    assert kinds == ["text", "image", "audio"]
    assert_replays(recordings, before)


async def test_one_question_over_the_legacy_endpoint(
    server: LiveServer, fake: FakeServer, recordings: Path
) -> None:
    """`/ws/chat` was answered with HTTP 404."""
    before = logs(recordings)
    async with antiphon.connect(server.url, mode="chat", dialect="legacy-chat") as session:
        answer = await session.ask("hello there", speech=True)
        pieces = [piece async for piece in answer]
    assert [piece.text for piece in pieces] == ["hello ", "", "there ", "", "hello there "]
    assert answer.prefilled is not None
    assert_replays(recordings, before)


async def test_a_client_that_shares_no_code_with_us(
    server: LiveServer, fake: FakeServer, recordings: Path
) -> None:
    """Client and server share a library: a mistake of it would look like agreement."""
    before = logs(recordings)
    async with connect(f"{server.url.removesuffix('/v1/realtime')}/ws/chat") as socket:
        ask = {"messages": [{"role": "user", "content": "hello you"}], "tts": {"enabled": False}}
        await socket.send(json.dumps(ask))
        events = [json.loads(frame) async for frame in socket]
    assert [event["type"] for event in events] == ["prefill_done", "chunk", "chunk", "done"]
    assert "".join(event["text_delta"] for event in events[1:3]) == events[3]["text"]
    assert socket.close_code == 1000
    async with connect(f"{server.url}?mode=chat") as socket:
        assert json.loads(await socket.recv()) == {"type": "session.queue_done"}
        await socket.send(json.dumps({"type": "session.init", "payload": {}}))
        assert json.loads(await socket.recv())["mode"] == "turn_based"
        turn = {"messages": [{"role": "user", "content": "hello"}], "streaming": True}
        await socket.send(json.dumps({"type": "input.append", "input": turn}))
        said: list[dict[str, Any]] = []
        while not said or said[-1]["type"] != "response.done":
            said.append(json.loads(await socket.recv()))
        # The only slot may still be leaving the chat before.
        said = [body for body in said if not body["type"].startswith("session.queue")]
        assert [body["type"] for body in said] == ["response.output.delta", "response.done"]
        assert said[0]["text"] == said[1]["text"] == "hello "
        await socket.send(json.dumps({"type": "session.close", "reason": "user_stop"}))
        assert json.loads(await asyncio.wait_for(socket.recv(), JOIN_S))["reason"] == "user_stop"
    assert_replays(recordings, before)


async def test_seconds_of_sound_and_chats_take_turns(
    server: LiveServer, fake: FakeServer, recordings: Path
) -> None:
    """A chat would be answered by a session of the other kind."""
    before, began = logs(recordings), len(fake.inits)
    for _ in range(2):
        async with antiphon.connect(server.url, mode="audio") as duplex:
            await duplex.append(sound(16_000))
        await is_answered(server.url)
    modes = [init["mode"] for init in fake.inits[began:]]
    assert modes == ["full_duplex", "turn_based"] * 2
    assert_replays(recordings, before)


async def test_what_the_remote_cannot_do_is_refused_by_name(
    server: LiveServer, fake: FakeServer, recordings: Path
) -> None:
    """A client would believe a setting to be in force that is not."""
    before, asked = logs(recordings), len(fake.appends)
    async with antiphon.connect(server.url, mode="chat") as session:
        for config, name in (
            (ChatConfig(repetition_penalty=1.5), "generation.repetition_penalty"),
            (ChatConfig(min_new_tokens=4), "generation.min_new_tokens"),
        ):
            with pytest.raises(antiphon.ReportedError, match=f"{name}: this server's") as caught:
                await session.answer("hello", config=config)
            assert caught.value.code == ErrorCode.INVALID_PAYLOAD
        picture = ImagePart(data=JPEG)
        with pytest.raises(antiphon.ReportedError, match="more than one picture in a question"):
            await session.answer(antiphon.message("user", picture, picture))
        with pytest.raises(antiphon.ReportedError, match=r"tts\.mode: omni"):
            await session.answer("hello", speech=SpeechRequest(mode="omni"))
        assert fake.appends[asked:] == []
        assert (await session.answer("hello")).text == "hello "
    async with antiphon.connect(server.url, mode="chat", dialect="legacy-chat") as session:
        with pytest.raises(antiphon.ReportedError, match="enable_thinking: this server's"):
            await (await session.ask("hello", thinking=True)).finish()
    assert_replays(recordings, before)


async def test_a_close_amid_an_answer_cuts_it(
    server: LiveServer, fake: FakeServer, recordings: Path
) -> None:
    """A model that talks on could not be stopped, and would keep the only slot."""
    before = logs(recordings)
    saying(fake, delta("text", text="well, "), delta("text", text="you see, "), HANG)
    async with antiphon.connect(server.url, mode="chat") as session:
        answer = await session.ask("tell me all")
        assert isinstance(await anext(answer), Delta)
        name = f"remote_{len(fake.inits)}"
        await session.close("enough")
        response = await answer.finish()
    assert (response.reason, response.text[:6]) == ("interrupted", "well, ")
    fake.answer = fake.play
    await is_answered(server.url)
    assert name in fake.closes
    assert_replays(recordings, before)


@pytest.mark.parametrize("dialect", ["realtime", "legacy-chat"])
@pytest.mark.parametrize("items", [[HANG], [delta("text", text="well, "), HANG]])
async def test_a_client_that_leaves_frees_the_remote(
    server: LiveServer, fake: FakeServer, recordings: Path, dialect: Any, items: Sequence[Item]
) -> None:
    """A remote that hangs, or talks on, would keep the only slot for a client that has left."""
    before = logs(recordings)
    saying(fake, *items)
    asked = len(fake.appends)
    async with antiphon.connect(server.url, mode="chat", dialect=dialect) as session:
        answer = await session.ask("tell me all", speech=True)
        with anyio.fail_after(JOIN_S):
            if len(items) > 1:
                assert isinstance(await anext(answer), Delta)
            while len(fake.appends) == asked:
                await anyio.lowlevel.checkpoint()
    fake.answer = fake.play
    await is_answered(server.url)
    assert_replays(recordings, before)


STRAYS: dict[str, list[Item]] = {
    "an error": [{"type": "error", "error": {"message": "SECRET"}}],
    "garbage": ["{SECRET"],
    "garbage amid an answer": [delta("text", text="well, "), b"SECRET"],
    "an end amid an answer": [delta("text", text="well, "), DROP],
    "a close": [CLOSE],
    "its end, and why": [{"type": "session.closed", "reason": "prefill_failed"}, CLOSE],
    "sound that is none": [audio(SECOND) | {"audio": "a*b"}],
}


@pytest.mark.parametrize("name", STRAYS)
async def test_a_remote_that_strays_costs_one_turn(
    server: LiveServer, fake: FakeServer, recordings: Path, name: str
) -> None:
    """A client would wait for ever, be told what is none of its business, or lose its chat."""
    before = logs(recordings)
    async with antiphon.connect(server.url, mode="chat") as session:
        saying(fake, *STRAYS[name])
        with anyio.fail_after(JOIN_S):
            with pytest.raises(antiphon.ReportedError, match="turn 0 failed ") as caught:
                await session.answer("hello", speech=True)
            assert caught.value.code == ErrorCode.INFERENCE_ERROR
            fake.answer = fake.play
            assert (await session.answer("hello")).text == "hello "
    saying(fake, *STRAYS[name])
    async with antiphon.connect(server.url, mode="chat", dialect="legacy-chat") as session:
        with anyio.fail_after(JOIN_S), pytest.raises(antiphon.ReportedError, match="turn failed"):
            await (await session.ask("hello", speech=True)).finish()
    fake.answer = fake.play
    await is_answered(server.url)
    assert_replays(recordings, before)
    assert "SECRET" not in server.errors.read_text()


async def test_a_remote_that_goes_away_is_waited_for(tmp_path: Path, run: tuple[str, ...]) -> None:
    """The server would have to be started again, or a client would wait without a word."""
    with ExitStack() as stack:
        with remote() as fake:
            arguments = ("--record", str(tmp_path))
            live = live_server(*arguments, model=f"llama_omni:{fake.url}", run=run)
            server = stack.enter_context(live)
            await is_answered(server.url)
        async with antiphon.connect(server.url, mode="chat") as session:
            with anyio.fail_after(JOIN_S), pytest.raises(antiphon.ReportedError, match="failed"):
                await session.answer("hello")
        assert "connection refused" in server.errors.read_text()
        with remote(int(fake.url.rsplit(":", 1)[1])):
            await is_answered(server.url)
        assert server.stop() == 0
    assert_all_identical(tmp_path)
