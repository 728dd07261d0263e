"""Scenes of golden logs with tools: calls, results, and what is refused."""

from __future__ import annotations

import json
from typing import Any, Final

import anyio
import attrs

from protocol.values.model import Span, Turn, Unit
from runtime.model.backends.scripted import Speaks, Step
from runtime.model.backends.scripted_chat import Answer, call, default_answer, tone
from tests.golden.openai import QUIET, say, speak
from tests.golden.stage import Scene, brief, only, part, talk
from tests.sessions.in_memory import World, append_frame, close_frame, init_frame

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


def tell(kind: str, content: str, call: str = "") -> str:
    """Write a result, or an event without a call."""
    named = {"tool_call_id": call} if call else {}
    return json.dumps({"type": f"input.{kind}", **named, "content": content})


def clocking(step: Step, unit: Unit, tools: Any) -> Step:
    """Call the clock twice, think, call what is not there, and say what comes."""
    told = [it.text for it in unit.inputs if it.kind == "result"]
    if told:
        speech = Speaks(text=f"{told[0]}. ", pcm=tone(unit.index, 0, samples=2_400))
        return attrs.evolve(step, speech=speech)
    body = '{"name": "clock", "arguments": {"zone": "%s"}}'
    match unit.index:
        case 1:
            spans = (("call", body % "UTC"), ("call", body % "CET"))
        case 5:
            spans = (("think", "It is late."), ("call", "clock"), ("text", "Hm."))
        case 8:
            spans = (("call", body % ("far away " * 20)),)
        case _:
            return step
    return attrs.evolve(step, silent=tuple(Span(kind=kind, text=text) for kind, text in spans))


async def duplex(server: World) -> None:
    """Two calls and their results in another order, events, a long call, one without an answer."""
    peer = server.connect("audio")
    await peer.heard("session.queue_done")
    peer.send(init_frame(tools=TOOLS))
    await peer.heard("session.created")
    await talk(peer, 3)
    first, second = [it["tool_call_id"] for it in peer.all("response.tool_call.done")]
    peer.send(tell("tool_result", "half past nine", second))
    await talk(peer, 1, force_listen=True)
    peer.send(tell("standalone", "It begins to rain."), tell("tool_result", "ten", first))
    await talk(peer, 3)
    peer.send(tell("tool_result", "again", first), *[tell("standalone", "rain")] * 5)
    peer.send(append_frame(), append_frame(), append_frame(), append_frame())
    await talk(peer, 8)
    await anyio.sleep(60)
    await talk(peer, 3)
    await part(peer)


async def items(server: World) -> None:
    """`openai`: calls as items, while the model speaks and listens, their results, and errors."""
    peer = server.connect("audio", endpoint="openai", label="scripted")
    await peer.heard("session.created")
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    say(peer, "session.update", session={"type": "realtime", "tools": functions})
    await speak(peer, "input_audio_buffer.append", *[QUIET] * 4)
    await peer.heard("response.function_call_arguments.done", 2)
    first, second = peer.all("response.function_call_arguments.done")
    for made, output in ((second, "half past nine"), (first, "ten"), (first, "again")):
        item = {"type": "function_call_output", "call_id": made["call_id"], "output": output}
        say(peer, "conversation.item.create", item=item)
    say(peer, "response.create", response={"metadata": {"for": "a test"}})
    await speak(peer, "input_audio_buffer.append", *[QUIET] * 3)
    serial = {"tools": functions[:1], "parallel_tool_calls": False}
    say(peer, "session.update", session={"type": "realtime", **serial})
    await speak(peer, "input_audio_buffer.append", *[QUIET] * 8)
    say(peer, "session.update", session={"type": "realtime", "tool_choice": "none"})
    await anyio.sleep(70)
    peer.leave(1000)
    await server.quiet()


async def delegates(server: World) -> None:
    """`live`: calls as delegated responses, their results, other tools, and errors."""
    peer = server.connect("audio", endpoint="live")
    await peer.heard("info")
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    delegation = {"type": "responses", "responses": {"model": "x", "tools": functions}}
    say(peer, "session.start", session={"model": "scripted", "delegation": delegation})
    await peer.heard("session.started")
    await speak(peer, "session.input_audio.append", *[QUIET] * 4)
    await peer.heard("session.delegation.created", 2)
    calls = [it["event"].get("item") for it in peer.all("response.event")]
    done = [it["call_id"] for it in calls if it and it["status"] == "completed"]
    for name, output in ((done[1], "half past nine"), (done[0], "ten"), (done[0], "again")):
        item = {"type": "function_call_output", "call_id": name, "output": output}
        say(peer, "response.item.create", event_id="evt_1", item=item)
    say(peer, "response.create")
    await speak(peer, "session.input_audio.append", *[QUIET] * 3)
    fewer = {"type": "responses", "responses": {"tools": functions[1:]}}
    say(peer, "session.update", session={"delegation": fewer})
    await speak(peer, "session.input_audio.append", *[QUIET] * 6)
    say(peer, "session.close")
    await peer.over()


TOOL_SCENES: Final[dict[str, Scene]] = {
    "chat-tools": Scene(play=tools, backend={"chat": calling}),
    "chat-tools-lacking": Scene(play=lacking, backend={"tools": False}),
    "duplex-tools": Scene(
        play=duplex,
        backend={"script": only(12, fault="fail"), "calls": clocking, "duplex_tools": True},
    ),
    "openai-tools": Scene(
        play=items, backend={"script": brief, "calls": clocking, "duplex_tools": True}
    ),
    "live-tools": Scene(
        play=delegates, backend={"script": brief, "calls": clocking, "duplex_tools": True}
    ),
}
