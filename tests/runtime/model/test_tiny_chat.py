"""Chats with the embedded model over sockets: many at once, cut short, with a video, recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

import antiphon
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, ChatConfig
from replay.cli import replay_command
from tests.live.servers import LiveServer, live_server
from tests.media.videos import make_video, steady
from tests.project.sampling import sample
from tests.replay.test_cli import told

FIXTURES = Path(__file__).parents[3] / "fixtures"
CHATS = 20
GREEDY = ChatConfig(temperature=0.0)
"""The answer is the conversation's alone, whatever the session's seed."""


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What the model was taught to say."""
    taught = json.loads((FIXTURES / "tiny" / "training.json").read_text())["answers"]
    phrases = {key: answer["text"] for key, answer in taught.items() if ":" not in key}
    return dict(list(phrases.items())[:CHATS])


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server records."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(recordings: Path) -> Iterator[LiveServer]:
    """A server with the embedded model, and fewer slots than chats."""
    with live_server("--slots", "4", "--record", str(recordings), model="tiny") as live:
        yield live


async def _answer(url: str, question: str) -> antiphon.Response:
    async with antiphon.connect(url, mode="chat") as session:
        return await session.answer(question, config=GREEDY)


def test_twenty_chats_at_once_are_answered_each_as_if_alone(
    server: LiveServer, answers: dict[str, str]
) -> None:
    """One user's words would find their way into another's answer."""
    together: dict[str, str] = {}

    async def ask(question: str) -> None:
        together[question] = (await _answer(server.url, question)).text

    async def body() -> dict[str, str]:
        async with anyio.create_task_group() as tasks:
            for question in answers:
                tasks.start_soon(ask, question)
        return {question: (await _answer(server.url, question)).text for question in answers}

    alone = anyio.run(body)
    assert len(together) == CHATS
    assert together == alone
    right = sum(alone[question] == answer for question, answer in answers.items())
    assert right >= 0.9 * CHATS


def test_a_chat_that_is_closed_amid_its_answer_makes_room(server: LiveServer) -> None:
    """Four users who lost patience would keep all slots until their answers end."""

    async def give_up() -> str:
        async with antiphon.connect(server.url, mode="chat") as session:
            answer = await session.ask("read me the news", speech=True)
            async for piece in answer:
                if isinstance(piece, antiphon.Delta):
                    await session.close()
                    break
            return (await answer.finish()).reason

    async def body() -> list[str]:
        reasons: list[str] = []

        async def one() -> None:
            reasons.append(await give_up())

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(one)
        with anyio.fail_after(60):
            await _answer(server.url, "good night")
        return reasons

    assert anyio.run(body) == ["interrupted"] * 4


def test_a_video_of_three_seconds_is_seen(server: LiveServer) -> None:
    """A message with a video would be refused, or answered without it."""
    video = make_video(steady(30), size=(1280, 720), sound=[(0.0, 3.0)])
    contents = (antiphon.VideoPart(data=video), antiphon.TextPart(text="what do you see"))
    message = antiphon.ChatMessage(role="user", content=contents)

    async def body() -> tuple[antiphon.Response, antiphon.Response]:
        async with antiphon.connect(server.url, mode="chat") as session:
            seen = await session.answer([message], config=GREEDY)
            unseen = await session.answer("what do you see", config=GREEDY)
            return seen, unseen

    seen, unseen = anyio.run(body)
    assert seen.text
    sounds_and_pictures = 3 * (64 + 2 + 10 + 2)
    assert seen.input_tokens - unseen.input_tokens >= sounds_and_pictures


def test_a_recorded_chat_is_answered_again_byte_for_byte(
    server: LiveServer, recordings: Path
) -> None:
    """What the model said in a chat could not be explained from its recording."""
    before = set(recordings.iterdir())

    async def body() -> antiphon.Response:
        async with antiphon.connect(server.url, mode="chat") as session:
            await session.answer("tell me a joke")
            return await session.answer("good morning", speech=True)

    response = anyio.run(body)
    assert response.pcm
    (log,) = set(recordings.iterdir()) - before
    report = told(replay_command, log, "--full")
    assert (report["result"], report["turns"]) == ("identical", 2)


async def told_by_a_clock(url: str, time: str) -> tuple[antiphon.Response, antiphon.Response]:
    """Ask for the time, and return what the clock says; the answer is spoken."""
    clock = antiphon.tool("clock", "Tells the time.")
    question = antiphon.message("user", "What time is it?")
    async with antiphon.connect(url, mode="chat") as session:
        first = await session.answer([question], config=GREEDY, tools=[clock])
        (call,) = first.tool_calls
        messages = [question, antiphon.called(first), antiphon.returned(call, time)]
        last = await session.answer(messages, config=GREEDY, tools=[clock], speech=True)
        return first, last


def test_a_clock_is_called_and_its_result_told_and_replayed(
    server: LiveServer, recordings: Path
) -> None:
    """Tools would work only with a model that plays a script."""
    # `test_the_embedded_model_asks_for_the_time_and_tells_it` is told that it is three.
    for time in sample(("three o'clock", "twelve o'clock"), ("twelve o'clock",)):
        before = set(recordings.iterdir())
        first, last = anyio.run(told_by_a_clock, server.url, time)
        assert (first.text, first.reason) == ("", "tool_calls")
        assert [(call.name, call.arguments) for call in first.tool_calls] == [("clock", "{}")]
        assert (last.text, last.tool_calls) == (f"It is {time}.", ())
        assert 0.9 * OUTPUT_RATE_HZ <= len(last.pcm) / SAMPLE_BYTES <= 1.8 * OUTPUT_RATE_HZ
        (log,) = set(recordings.iterdir()) - before
        report = told(replay_command, log, "--full")
        assert (report["result"], report["turns"]) == ("identical", 2)
