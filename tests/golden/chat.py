"""Scenes of chat that golden logs are made of: conversations (`realtime`) and single requests."""

from __future__ import annotations

import json
from typing import Any

import anyio

from protocol.values.model import Turn
from runtime.model.backends.scripted_chat import Answer
from tests.golden.stage import ONE_SLOT, Scene, picture
from tests.sessions.in_memory import World, base64, close_frame, init_frame, pcm


def ask(text: str, **fields: Any) -> str:
    """Write a question in words."""
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return json.dumps({"type": "input.append", "input": {"messages": messages, **fields}})


def request(text: str, **fields: Any) -> str:
    """Write the one request of `/ws/chat`."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields})


def failing(turn: Turn) -> Answer:
    """Fail in every other turn, after two tokens."""
    answer = Answer(tokens=("so ", "it ", "is ", "then"), token_s=0.1)
    return answer if turn.index % 2 else Answer(tokens=answer.tokens, fault="fail", fault_at=2)


def long(turn: Turn) -> Answer:
    """Answer for ten seconds."""
    return Answer(tokens=tuple(f"{number} " for number in range(20)), token_s=0.5, samples=600)


async def realtime_chat(server: World) -> None:
    """A chat: a turn that waits, a picture, speech at once, mistakes, a close amid a turn."""
    first = await server.activate("video")
    peer = await server.activate_chat()
    peer.send(ask("hello"))
    await peer.heard("session.queued")
    first.send(close_frame())
    await peer.heard("response.done")
    contents = [{"type": "image", "data": picture()}, {"type": "text", "text": "what is it?"}]
    asked = {"messages": [{"role": "user", "content": contents}], "streaming": False}
    asked["tts"] = {"enabled": True}
    peer.send(json.dumps({"type": "input.append", "input_id": "look", "input": asked}))
    await peer.heard("response.done", 2)
    peer.send(ask("too much", generation={"max_new_tokens": 0}))
    await peer.heard("error")
    peer.send(ask("one two three four five six"))
    await peer.heard("text", 7)
    peer.send(ask("out of place"), close_frame("enough"))
    await peer.over()


async def fails_and_goes_on(server: World) -> None:
    """A turn that fails costs that turn."""
    peer = await server.activate_chat()
    for number in range(2):
        peer.send(ask(f"question {number}"))
        await anyio.sleep(1)
    peer.send(close_frame())
    await peer.over()


async def one_question(server: World) -> None:
    """A question, whatever becomes of it, and a close."""
    peer = await server.activate_chat()
    peer.send(ask("well?"))
    await peer.until(lambda: bool(peer.all("response.done") or peer.all("error")))
    peer.send(close_frame())
    await peer.over()


async def is_left(server: World) -> None:
    """A chat in which nothing is asked until its time is over."""
    peer = await server.activate_chat()
    await peer.over()


async def vanishes_amid_an_answer(server: World) -> None:
    """The connection is lost while the model answers aloud."""
    peer = await server.activate_chat()
    peer.send(ask("tell me all", tts={"enabled": True}))
    await peer.heard("text", 3)
    peer.vanish()
    await server.quiet()


async def closes_amid_an_answer(server: World) -> None:
    """A goodbye amid an answer: what there is of it is told."""
    peer = await server.activate_chat()
    peer.send(ask("tell me all"))
    await peer.heard("text", 3)
    peer.send(close_frame())
    await peer.over()


async def cancels_answers(server: World) -> None:
    """Answers that are cancelled: while media is decoded, amid the answer, and too late."""
    peer = await server.activate_chat()
    cancel = '{"type": "response.cancel"}'
    peer.send(ask("tell me all"))
    await peer.heard("text", 3)
    peer.send(cancel, ask("and this?"))
    await peer.heard("text", 5)
    peer.send(cancel, cancel, close_frame())
    await peer.over()


async def sends_out_of_place(server: World) -> None:
    """A second question and an init while a turn is answered: both are refused."""
    peer = await server.activate_chat()
    peer.send(ask("tell me all"))
    await peer.heard("text", 3)
    peer.send(ask("and this?"), init_frame(), close_frame())
    await peer.over()


async def torn_picture(server: World) -> None:
    """A picture that cannot be decoded costs the question, whatever else is in it."""
    peer = await server.activate_chat()
    torn = picture()[:400]
    contents = [{"type": "image", "data": data} for data in (torn, picture())]
    peer.send(
        json.dumps(
            {"type": "input.append", "input": {"messages": [{"role": "user", "content": contents}]}}
        )
    )
    await peer.heard("error")
    peer.send(ask("and now?"))
    await peer.heard("response.done")
    peer.send(close_frame())
    await peer.over()


async def is_drained(server: World) -> None:
    """The server is shut down amid an answer, and its client asked to be warned."""
    peer = await server.activate_chat(notices=True)
    peer.send(ask("tell me all"))
    await peer.heard("text", 2)
    server.server.begin_drain(3)
    await anyio.sleep(1)
    server.server.drain()
    await peer.over()


async def waits_and_is_cut(server: World) -> None:
    """A question that waits for a slot is given up."""
    first = await server.activate("audio")
    peer = await server.activate_chat()
    peer.send(ask("hello"))
    await peer.heard("session.queued")
    await anyio.sleep(1)
    peer.vanish()
    await anyio.sleep(1)
    first.send(close_frame())
    await first.over()


async def legacy_chat(server: World) -> None:
    """A single request, spoken and streamed."""
    peer = server.connect("chat", endpoint="chat")
    audio = {"type": "audio", "data": base64(pcm(0.5)), "sample_rate": 16000}
    asked = {"messages": [{"role": "user", "content": [audio]}], "tts": {"enabled": True}}
    peer.send(json.dumps(asked))
    await peer.over()


async def legacy_question(server: World) -> None:
    """A single request in words, answered at once, whatever becomes of it."""
    peer = server.connect("chat", endpoint="chat")
    peer.send(request("what is it?", streaming=False))
    await peer.over()


async def legacy_nonsense(server: World) -> None:
    """A request that is none."""
    peer = server.connect("chat", endpoint="chat")
    peer.send(request("?", messages=[]), '{"messages": 5}', "no JSON")
    await peer.over()


async def legacy_vanishes(server: World) -> None:
    """The connection is lost amid the answer."""
    peer = server.connect("chat", endpoint="chat")
    peer.send(request("tell me all"))
    await peer.heard("chunk", 2)
    peer.vanish()
    await server.quiet()


async def legacy_stops(server: World) -> None:
    """A page that asks over HTTP for the end of its answer, and of one that has not begun."""
    peer = server.connect("chat", endpoint="chat")
    assert server.server.cancel_answers("another") == 0
    peer.send(request("tell me all"))
    await peer.heard("chunk", 2)
    assert server.server.cancel_answers("") == 1
    await peer.over()
    assert peer.closed == (1000, "answered")


async def legacy_waits(server: World) -> None:
    """A request that waits for the only slot."""
    first = await server.activate("audio")
    peer = server.connect("chat", endpoint="chat")
    peer.send(request("hello"))
    await anyio.sleep(4)
    first.send(close_frame())
    await peer.over()


CHAT_SCENES: dict[str, Scene] = {
    "realtime-chat": Scene(play=realtime_chat, backend=ONE_SLOT),
    "legacy-chat": Scene(play=legacy_chat),
    **{
        name: Scene(play=play, backend=backend, settings=settings)
        for name, play, backend, settings in (
            ("chat-fails", fails_and_goes_on, {"chat": failing}, {}),
            ("chat-vanishes", vanishes_amid_an_answer, {"chat": long}, {}),
            ("chat-cut", closes_amid_an_answer, {"chat": long}, {}),
            ("chat-cancelled", cancels_answers, {"chat": long}, {}),
            ("chat-out-of-place", sends_out_of_place, {"chat": long}, {}),
            ("chat-drained", is_drained, {"chat": long}, {}),
            ("chat-idle", is_left, {}, {"idle_s": 3}),
            ("chat-torn-picture", torn_picture, {}, {}),
            ("chat-context-full", one_question, {"context_limit": 8}, {}),
            ("chat-gone", one_question, {"chat": lambda _: Answer(fault="gone")}, {}),
            ("chat-hangs", one_question, {"chat": lambda _: Answer(fault="hang")}, {}),
            ("chat-queue-left", waits_and_is_cut, ONE_SLOT, {}),
            ("legacy-chat-at-once", legacy_question, {}, {}),
            ("legacy-chat-fails", legacy_question, {"chat": failing}, {}),
            ("legacy-chat-nonsense", legacy_nonsense, {}, {}),
            ("legacy-chat-vanishes", legacy_vanishes, {"chat": long}, {}),
            ("legacy-chat-stops", legacy_stops, {"chat": long}, {}),
            ("legacy-chat-queue", legacy_waits, ONE_SLOT, {}),
        )
    },
}
