"""Scenes of golden logs with tools: calls, results, and what is refused."""

from __future__ import annotations

import json
from typing import Any, Final

from protocol.values.model import Turn
from runtime.model.backends.scripted_chat import Answer, call, default_answer
from tests.golden.stage import Scene
from tests.sessions.in_memory import World, close_frame

SCHEMA: Final = {"type": "object", "properties": {"zone": {"type": "string"}}}
TOOLS: Final = [
    {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "lamp", "description": "Lights a lamp."}},
]
QUESTION: Final = {"role": "user", "content": "What time is it?"}


def ask(*messages: object, **fields: Any) -> str:
    """Write a question with tools."""
    body = {"messages": [QUESTION, *messages], "tools": TOOLS, **fields}
    return json.dumps({"type": "input.append", "input": body})


def calling(turn: Turn) -> Answer:
    """Call both tools, with plain text between the calls; then tell their results."""
    if turn.messages[-1].role == "tool" or not turn.tools:
        return default_answer(turn)
    clock = call("clock", '{"zone": "UTC"}')
    return Answer(tokens=("Well. ", *clock, " <tool", "s> ", *call("door"), *call("lamp")))


async def tools(server: World) -> None:
    """Two calls streamed, their results, a call that is cut short, no tools, a mistake, speech."""
    peer = await server.activate_chat()
    peer.send(ask())
    await peer.heard("response.done")
    made = peer.events[-1]["tool_calls"]
    said = {"role": "assistant", "content": "Well.", "tool_calls": made}
    results = [
        {"role": "tool", "tool_call_id": each["id"], "content": f"10:3{place}"}
        for place, each in enumerate(made)
    ]
    peer.send(ask(said, *results, streaming=False))
    await peer.heard("response.done", 2)
    peer.send(ask(generation={"max_new_tokens": 6}))
    await peer.heard("response.done", 3)
    peer.send(ask(tool_choice="none"))
    await peer.heard("response.done", 4)
    peer.send(ask(said))
    await peer.heard("error")
    peer.send(ask(tts={"enabled": True}))
    await peer.heard("response.done", 5)
    peer.send(close_frame())
    await peer.over()


async def lacking(server: World) -> None:
    """A model without tools refuses a turn with them, and the chat goes on."""
    peer = await server.activate_chat()
    peer.send(ask())
    await peer.heard("error")
    peer.send(ask(tools=[]))
    await peer.heard("response.done")
    peer.send(close_frame())
    await peer.over()


TOOL_SCENES: Final[dict[str, Scene]] = {
    "chat-tools": Scene(play=tools, backend={"chat": calling}),
    "chat-tools-lacking": Scene(play=lacking, backend={"tools": False}),
}
