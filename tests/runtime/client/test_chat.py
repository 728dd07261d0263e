"""A chat of the SDK, on asyncio and on trio: against a peer that says what a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

import antiphon
from antiphon import AudioPart, Delta, ImagePart, QueuePlace, Response, SpeechRequest, message
from protocol.wire.codec import encode_base64
from tests.live.servers import live_server
from tests.network.peers import (
    JPEG,
    create,
    delta,
    done,
    end,
    hear,
    peer,
    place,
    refuse,
    report,
    say,
)
from tests.network.requesting import request

pytestmark = pytest.mark.anyio

PCM = np.linspace(-1, 1, 24_000, dtype="<f4").tobytes()


def chat(*turns: Any) -> Any:
    """Make a server of turns: each is called with the connection and the question."""

    def answer(websocket: ServerConnection) -> None:
        assert create(websocket, "turn_based")["payload"] == {"notices": True}
        try:
            for turn in turns:
                turn(websocket, hear(websocket)["input"])
            if hear(websocket)["type"] == "session.close":
                end(websocket, "client_closed")
        except ConnectionClosed:
            pass

    return answer


def stream(websocket: ServerConnection, _question: dict[str, Any]) -> None:
    """Answer in pieces."""
    delta(websocket, "text", text="Good ")
    delta(websocket, "text", text="morning.")
    delta(websocket, "audio", audio=encode_base64(PCM))
    done(websocket, "Good morning.")


async def test_an_answer_comes_as_it_is_made() -> None:
    """Whoever waits would read nothing until all is said."""
    with peer(chat(stream, stream)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            pieces = [piece async for piece in await session.ask("Good morning!")]
            response = await (await session.ask("Again!")).finish()
    assert [type(piece) for piece in pieces] == [Delta, Delta, Delta, Response]
    assert "".join(piece.text for piece in pieces[:-1]) == pieces[-1].text == "Good morning."
    assert isinstance(pieces[2], Delta)
    assert pieces[2].pcm == PCM
    assert response.text == "Good morning."


async def test_a_question_carries_what_was_asked_for() -> None:
    """A setting would be lost on its way."""
    asked: list[dict[str, Any]] = []

    def note(websocket: ServerConnection, question: dict[str, Any]) -> None:
        asked.append(question)
        done(websocket, "ok", audio=encode_base64(PCM))

    conversation = [
        message("system", "Be brief."),
        message("user", "What is it?", ImagePart(data=JPEG)),
    ]
    with peer(chat(note, note)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            response = await session.answer(
                conversation,
                speech=SpeechRequest(mode="omni"),
                config=antiphon.ChatConfig(max_new_tokens=5),
            )
            await session.answer("plain")
    assert response.pcm == PCM
    spoken, plain = asked
    assert not spoken["streaming"]
    assert spoken["generation"]["max_new_tokens"] == 5
    assert spoken["tts"]["enabled"]
    assert spoken["tts"]["mode"] == "omni"
    assert [part["type"] for part in spoken["messages"][1]["content"]] == ["text", "image"]
    assert not plain.get("tts", {}).get("enabled", False)


@pytest.mark.parametrize("code", ["invalid_payload", "inference_error"])
async def test_a_question_that_failed_leaves_the_chat(code: str) -> None:
    """One bad picture would end a chat."""

    def fail(websocket: ServerConnection, _question: dict[str, Any]) -> None:
        report(websocket, code, "what is that?")

    with peer(chat(fail, stream)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            answer = await session.ask("?")
            with pytest.raises(antiphon.ReportedError, match="what is that"):
                await answer.finish()
            with pytest.raises(antiphon.LocalProtocolError, match="has failed"):
                await answer.finish()
            assert (await session.answer("again")).text == "Good morning."


async def test_questions_do_not_overlap() -> None:
    """The answer to one question would be taken for that to another."""
    with peer(chat(stream, stream)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            answer = await session.ask("one")
            assert isinstance(await anext(answer), Delta)
            with pytest.raises(antiphon.LocalProtocolError, match="during the answer"):
                await session.ask("two")
            await answer.finish()
            await session.answer("two")


async def test_a_turn_that_waits_tells_its_place() -> None:
    """Whoever asks a busy server would see nothing, and give up."""

    def wait(websocket: ServerConnection, question: dict[str, Any]) -> None:
        say(websocket, "session.queued", **place(2))
        say(websocket, "session.queue_update", **place(1))
        stream(websocket, question)

    places: list[QueuePlace] = []
    with peer(chat(wait)) as url:
        async with antiphon.connect(url, mode="chat", on_queue=places.append) as session:
            await session.answer("?")
    assert [where.position for where in places] == [2, 1]


async def test_closing_cuts_an_answer() -> None:
    """Nobody could stop a model that talks on."""

    def talk_on(websocket: ServerConnection, _question: dict[str, Any]) -> None:
        delta(websocket, "text", text="well, ")
        assert hear(websocket)["type"] == "session.close"
        done(websocket, "well, ", "interrupted")
        end(websocket, "enough")

    with peer(chat(talk_on)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            answer = await session.ask("?")
            await anext(answer)
            await session.close("enough")
            assert (await answer.finish()).reason == "interrupted"
            with pytest.raises(antiphon.LocalProtocolError):
                await session.ask("more")


async def test_an_answer_is_cancelled_and_the_chat_goes_on() -> None:
    """To stop an answer, a program would have to close the chat."""

    def talk_on(websocket: ServerConnection, question: dict[str, Any]) -> None:
        if "?" in str(question["messages"]):
            delta(websocket, "text", text="well, ")
            assert hear(websocket) == {"type": "response.cancel"}
            done(websocket, "well, ", "interrupted")
        else:
            done(websocket, "more", "turn_end")

    with peer(chat(talk_on, talk_on)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            answer = await session.ask("?")
            await anext(answer)
            await session.cancel()
            assert (await answer.finish()).reason == "interrupted"
            await session.cancel()  # there is nothing to be cancelled
            assert (await session.answer("more")).text == "more"


@pytest.mark.parametrize(
    ("leave", "error", "text"),
    [
        (refuse, antiphon.SessionRefusedError, "queue_full"),
        (lambda websocket: end(websocket, "timeout"), antiphon.SessionClosedError, "timeout"),
        (lambda websocket: websocket.close(1011), antiphon.SessionClosedError, "1011"),
    ],
)
async def test_the_end_amid_an_answer_is_an_error(leave: Any, error: Any, text: str) -> None:
    """Half an answer would be taken for a whole one."""

    def answer_half(websocket: ServerConnection, _question: dict[str, Any]) -> None:
        delta(websocket, "text", text="half")
        leave(websocket)

    with peer(chat(answer_half)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            answer = await session.ask("?")
            with pytest.raises(error, match=text):
                await answer.finish()


async def test_a_chat_that_ended_between_turns_says_why() -> None:
    """A question after a long pause would fail without a reason."""

    def leave(websocket: ServerConnection, question: dict[str, Any]) -> None:
        stream(websocket, question)
        end(websocket, "timeout")

    with peer(chat(leave)) as url:
        async with antiphon.connect(url, mode="chat") as session:
            await session.answer("?")
            with pytest.raises(antiphon.SessionClosedError, match="1000, timeout"):
                await (await session.ask("still there?")).finish()


async def test_legacy_chat_is_one_question() -> None:
    """A client could not use the servers of 004."""
    paths: list[str] = []

    def answer_once(websocket: ServerConnection) -> None:
        assert websocket.request is not None
        paths.append(websocket.request.path)
        assert hear(websocket)["messages"] == [{"role": "user", "content": "Hello!"}]
        say(websocket, "prefill_done", input_tokens=7)
        say(websocket, "chunk", text_delta="Hi", audio_data=None)
        counts = {"input_tokens": 7, "generated_tokens": 1}
        say(websocket, "done", text="Hi", audio_data=None, **counts)

    with peer(answer_once) as url:
        async with antiphon.connect(url, mode="chat", dialect="legacy-chat") as session:
            assert session.created is None
            answer = await session.ask("Hello!")
            pieces = [piece async for piece in answer]
            with pytest.raises(antiphon.LocalProtocolError):
                await session.ask("more")
    assert [piece.text for piece in pieces] == ["Hi", "Hi"]
    assert answer.prefilled is not None
    assert answer.prefilled.input_tokens == 7
    assert paths == ["/ws/chat?resumable=1"]


# -- against a real server ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose model says what it was told, and how many pictures and sounds it was shown."""
    with live_server("--no-record") as server:
        yield server.url


async def test_turns_of_a_real_chat(url: str) -> None:
    """The second example that anybody runs would not work."""
    async with antiphon.connect(url, mode="chat") as session:
        assert session.created is not None
        assert session.created.is_chat
        pieces = [piece async for piece in await session.ask("Hello", speech=True)]
        assert "".join(piece.text for piece in pieces[:-1]) == pieces[-1].text
        assert sum(len(piece.pcm) for piece in pieces) > 0
        assert [piece.streaming for piece in pieces if isinstance(piece, Response)] == [True]
        assert not (await session.answer("Hello")).streaming
        with pytest.raises(antiphon.ReportedError, match=r"top_p.*allowed"):
            await session.answer("?", config=antiphon.ChatConfig(top_p=7))
        sound = AudioPart(data=PCM, is_file=False, rate_hz=24_000)
        question = message("user", ImagePart(data=JPEG), sound, "What is it?")
        seen = await session.answer(question, speech=True)
        assert seen.text == "turn 2: What is it? (1 pictures, 1 sounds)"
        assert seen.pcm


@pytest.mark.parametrize("stream", [True, False])
async def test_a_real_legacy_chat(url: str, stream: bool) -> None:
    """The server and the client would mean two things by 004."""
    async with antiphon.connect(url, mode="chat", dialect="legacy-chat") as session:
        answer = await session.ask("Hello", stream=stream)
        response = await answer.finish()
    assert response.text == "turn 0: Hello (0 pictures, 0 sounds)"
    assert response.streaming is stream
    assert answer.prefilled is not None


@pytest.mark.parametrize("dialect", ["realtime", "legacy-chat"])
async def test_a_tool_is_called_and_its_result_answered(url: str, dialect: Any) -> None:
    """A program could offer no tools, or not say what they returned."""
    clock = antiphon.tool("clock", "Tells the time.", {"type": "object"})
    question = message("user", "Read the clock please")

    async def answer(*messages: antiphon.ChatMessage, **how: Any) -> Response:
        async with antiphon.connect(url, mode="chat", dialect=dialect) as session:
            return await (await session.ask(messages, tools=[clock], **how)).finish()

    first = await answer(question)
    (call,) = first.tool_calls
    assert (call.name, call.arguments) == ("clock", "{}")
    results = [antiphon.returned(call, "10:30")]
    last = await answer(question, antiphon.called(first), *results)
    assert (last.text, last.tool_calls) == ("turn 0: it is 10:30.", ())
    assert not (await answer(question, tool_choice="none")).tool_calls
    async with antiphon.connect(url, mode="chat") as session:
        with pytest.raises(antiphon.ReportedError, match="no name"):
            await session.answer("Hi", tools=[antiphon.tool("a clock")])


def test_the_sources_page_asks_for_the_end_of_its_answer(url: str) -> None:
    """The page's button stops nothing, and the model talks on."""
    host, _, port = url.removeprefix("ws://").split("/")[0].partition(":")
    answer = request((host, int(port)), "/api/streaming/stop", method="POST", headers={})
    assert (answer.status, answer.said["success"]) == (200, False)
