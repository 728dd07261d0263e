"""Tools in the protocols of OpenAI and vLLM-Omni: calls, results, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import pytest
from click.testing import CliRunner

from protocol.values.events import Endpoint
from protocol.values.limits import (
    CALL_RESULT_S,
    CALLS_OPEN_MAX,
    INPUT_CHARS_MAX,
    INPUTS_MAX,
    REFUSALS_FED_MAX,
)
from protocol.values.model import Opening, Span, Unit
from recorder.format.format import SUFFIX
from recorder.read.reader import read
from replay.redact.redaction import LEFT_OUT, redact_command
from runtime.model.backends.base import BackendRefused
from runtime.model.backends.scripted import Call, Speaks, Step, calling
from runtime.model.backends.scripted_chat import tone
from runtime.session.setup import Parent
from tests.golden.openai import QUIET, say, speak
from tests.runtime.session.test_duplex_tools import fed, result, run, started
from tests.sessions.in_memory import Body, Peer, World

CLOCK: Final = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
LAMP: Final = {"type": "function", "name": "lamp"}


async def arrive(server: World, **session: Any) -> Peer:
    """Set up a session with a tool."""
    peer = server.connect("audio", endpoint="openai", label="scripted")
    await peer.heard("session.created")
    say(peer, "session.update", session={"type": "realtime", "tools": [CLOCK], **session})
    await peer.heard("session.updated")
    return peer


async def append(peer: Peer, seconds: int) -> None:
    """Send silence, as it comes."""
    await speak(peer, "input_audio_buffer.append", *[QUIET] * seconds)


def answer(peer: Peer, call: Body | str, output: str = "nine", **item: Any) -> None:
    """Return a result."""
    name = call if isinstance(call, str) else call["call_id"]
    told = {"type": "function_call_output", "call_id": name, "output": output, **item}
    say(peer, "conversation.item.create", item=told)


async def leave(server: World, peer: Peer) -> None:
    """Close the connection."""
    peer.leave(1000)
    await server.quiet()


def of_response(peer: Peer, number: int) -> list[str]:
    """The types of what was sent from the beginning of a response to its end."""
    kinds = [it["type"] for it in peer.events]
    begins = [at for at, kind in enumerate(kinds) if kind == "response.created"]
    ends = [at for at, kind in enumerate(kinds) if kind == "response.done"]
    return kinds[begins[number] : ends[number] + 1]


OF_CALL: Final = [
    "response.output_item.added",
    "conversation.item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "conversation.item.done",
]


def test_a_call_is_a_response_and_its_result_is_spoken(tmp_path: Path) -> None:
    """Tools were accepted, and never called."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        await append(peer, 4)
        call = await peer.heard("response.function_call_arguments.done")
        assert of_response(peer, 0) == ["response.created", *OF_CALL, "response.done"]
        begun, ended = [it["item"] for it in peer.events if it["type"].startswith("conversation.i")]
        assert (begun["status"], begun["arguments"]) == ("in_progress", "")
        assert (ended["status"], ended["arguments"], ended["name"]) == ("completed", "{}", "clock")
        response = peer.all("response.done")[0]["response"]
        assert (response["status"], response["output"]) == ("completed", [ended])
        answer(peer, call, id="mine")
        added = await peer.heard("conversation.item.added", 2)
        assert added["previous_item_id"] == ended["id"]
        assert added["item"]["output"] == "nine"
        say(peer, "conversation.item.retrieve", item_id="mine")
        assert (await peer.heard("conversation.item.retrieved"))["item"] == added["item"]
        say(peer, "response.create")
        await append(peer, 2)
        said = await peer.heard("response.output_audio_transcript.done")
        assert said["transcript"] == "it is nine."
        assert peer.all("response.done")[-1]["response"]["status"] == "completed"
        assert not peer.all("error")
        await leave(server, peer)

    records = run(play, tmp_path)
    assert list(fed(records).values()) == [(started("t1"),), (result("t1", "nine"),)]


def chatting(step: Step, unit: Unit, tools: Any) -> Step:
    """Speak in all units but the first; call while speaking."""
    speech = Speaks(text=f"word {unit.index} ", pcm=tone(unit.index, 0, samples=2_400))
    step = attrs.evolve(step, speech=speech if unit.index else None)
    return calling(at=2, says="it is {} ")(step, unit, tools)


@pytest.mark.parametrize("detection", [{"type": "server_vad"}, None], ids=["calls", "push to talk"])
def test_a_call_ends_the_response_in_which_it_is_made(
    detection: Body | None, tmp_path: Path
) -> None:
    """A client that waits for that end ran no function until the model was silent.

    Where the model speaks only when asked, it was cut there in mid-sentence.
    """

    async def play(server: World) -> None:
        peer = await arrive(server, audio={"input": {"turn_detection": detection}})
        await append(peer, 1)
        if detection is None:
            say(peer, "response.create")
        await append(peer, 5)
        told = of_response(peer, 0)
        assert told[-len(OF_CALL) - 1 :] == [*OF_CALL, "response.done"]
        first, second = [it["response"] for it in peer.all("response.created")]
        speech, call = peer.all("response.done")[0]["response"]["output"]
        assert (speech["status"], call["type"]) == ("completed", "function_call")
        places = {it["output_index"] for it in peer.events if it.get("item_id") == call["id"]}
        assert places == {1}
        deltas = peer.all("response.output_audio.delta")
        assert {it["response_id"] for it in deltas} == {first["id"], second["id"]}
        answer(peer, call)
        await append(peer, 2)
        assert "it is nine " in [it.get("delta") for it in peer.events]
        await leave(server, peer)

    run(play, tmp_path, backend={"calls": chatting})


def test_a_client_that_sends_no_sound_hears_what_its_tool_returned(tmp_path: Path) -> None:
    """Push to talk: the result waited for sound that did not come."""

    async def play(server: World) -> None:
        peer = await arrive(server, audio={"input": {"turn_detection": None}})
        await append(peer, 2)
        say(peer, "input_audio_buffer.commit")
        say(peer, "response.create")
        call = await peer.heard("response.function_call_arguments.done")
        await anyio.sleep(20)
        answer(peer, call)
        say(peer, "response.create")
        said = await peer.heard("response.output_audio_transcript.done", 2)
        assert said["transcript"] == "it is nine."
        await leave(server, peer)

    run(play, tmp_path, is_full=False)


def test_an_interrupt_loses_no_call_and_no_result(tmp_path: Path) -> None:
    """A cancelled response took its call back, or the result of it was refused."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        await append(peer, 3)
        call = await peer.heard("response.function_call_arguments.done")
        say(peer, "response.create")
        say(peer, "response.cancel")
        answer(peer, call)
        await append(peer, 2)
        assert not peer.all("error")
        await leave(server, peer)

    records = run(play, tmp_path)
    assert result("t1", "nine") in [it for each in fed(records).values() for it in each]


def twice(step: Step, unit: Unit, tools: Any) -> Step:
    """Call twice in a unit."""
    body = Span(kind="call", text='{"name": "clock", "arguments": {}}')
    return attrs.evolve(step, silent=(body, body)) if unit.index == 1 else step


@pytest.mark.parametrize(("is_parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_calls_of_a_unit_are_one_response(
    is_parallel: bool | None, count: int, tmp_path: Path
) -> None:
    """A client that takes one call at a time got two; or the second was lost."""

    async def play(server: World) -> None:
        peer = await arrive(server, parallel_tool_calls=is_parallel)
        await append(peer, 3)
        [response] = [it["response"] for it in peer.all("response.done")]
        assert [it["type"] for it in response["output"]] == ["function_call"] * count
        assert peer.all("session.updated")[0]["session"].get("parallel_tool_calls", True) is (
            is_parallel is not False
        )
        await leave(server, peer)

    inputs = fed(run(play, tmp_path, backend={"calls": twice}))
    texts = [it.text for each in inputs.values() for it in each if it.kind == "result"]
    assert texts == ["error: too many calls wait for a result"] * (2 - count)


@pytest.mark.parametrize(
    ("session", "choice", "tools"),
    [
        ({"tool_choice": "none"}, "none", ["clock"]),
        ({"tools": []}, "auto", []),
        ({"tools": [LAMP]}, "auto", []),
    ],
    ids=["none", "no tools", "others"],
)
def test_a_client_that_takes_no_calls_gets_none(
    session: dict[str, Any], choice: str, tools: list[str], tmp_path: Path
) -> None:
    """It got calls of functions that it had taken back; and it can offer them again."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        await append(peer, 1)
        say(peer, "session.update", session={"type": "realtime", **session})
        told = (await peer.heard("session.updated", 2))["session"]
        assert (told["tool_choice"], [it["name"] for it in told["tools"]]) == (choice, tools)
        await append(peer, 4)
        assert not peer.all("response.function_call_arguments.done")
        say(peer, "session.update", session={"type": "realtime", "tools": [LAMP, CLOCK]})
        say(peer, "session.update", session={"type": "realtime", "tool_choice": "required"})
        told = (await peer.heard("session.updated", 4))["session"]
        assert (told["tool_choice"], [it["name"] for it in told["tools"]]) == ("auto", ["clock"])
        await append(peer, 9)
        await peer.heard("response.function_call_arguments.done")
        await leave(server, peer)

    inputs = fed(run(play, tmp_path))
    assert inputs[3] == (started("t1"), result("t1", "error: there is no tool of this name"))


def test_a_call_without_a_result_ends(tmp_path: Path) -> None:
    """A client that went quiet kept the model waiting; its late result is refused."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        await append(peer, 3)
        call = await peer.heard("response.function_call_arguments.done")
        await anyio.sleep(CALL_RESULT_S + 2)
        answer(peer, call)
        error = (await peer.heard("error"))["error"]
        assert error["param"] == "item.call_id"
        await leave(server, peer)

    inputs = fed(run(play, tmp_path, is_full=False))
    assert inputs == {3: (started("t1"), result("t1", "error: no answer in time"))}


def test_a_result_counts_once_and_only_for_its_own_session(tmp_path: Path) -> None:
    """A result of another's call, or a second one, changed what is fed."""

    async def play(server: World) -> None:
        other, peer = await arrive(server), await arrive(server)
        await append(other, 3)
        await append(peer, 3)
        others, own = [
            await it.heard("response.function_call_arguments.done") for it in (other, peer)
        ]
        assert others["call_id"] != own["call_id"]
        answer(peer, others)
        answer(peer, own, id="one")
        answer(peer, own, "ten", id="two")
        await append(peer, 2)
        told = [it["error"] for it in peer.all("error")]
        assert [it["param"] for it in told] == ["item.call_id"] * 2
        assert {it["item"]["id"] for it in peer.all("conversation.item.done")} >= {"one"}
        await leave(server, other)
        await leave(server, peer)

    inputs = fed(run(play, tmp_path))
    assert [it for each in inputs.values() for it in each if it.kind == "result"] == [
        result("t1", "nine")
    ]


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        ({"call_id": "call_ffffffffffff"}, "invalid_payload", "item.call_id"),
        ({"call_id": "x" * 65}, "invalid_payload", "item.call_id"),
        ({"call_id": None}, "missing_field", "item.call_id"),
        ({"output": "x" * (INPUT_CHARS_MAX + 1)}, "invalid_payload", "item.output"),
        ({"output": {"time": "nine"}}, "invalid_payload", "item.output"),
        ({"type": "function_call", "name": "clock"}, "unsupported", "item.type"),
        ({"type": "mcp_call"}, "invalid_payload", "item.type"),
    ],
    ids=str,
)
def test_a_wrong_result_is_refused_by_name(
    item: dict[str, Any], code: str, param: str, tmp_path: Path
) -> None:
    """The session ended, or nothing was said."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        await append(peer, 3)
        call = await peer.heard("response.function_call_arguments.done")
        answer(peer, call, **item)
        error = (await peer.heard("error"))["error"]
        assert (error["code"], error["param"]) == (code, param)
        answer(peer, call)
        await peer.heard("conversation.item.added", 2)
        await leave(server, peer)

    run(play, tmp_path, is_full=False)


def test_a_model_without_tools_refuses_results(tmp_path: Path) -> None:
    """It is as before: tools are returned, and none is called."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        assert peer.all("session.updated")[0]["session"]["tool_choice"] == "none"
        await append(peer, 4)
        answer(peer, "call_000000000000")
        error = (await peer.heard("error"))["error"]
        assert (error["code"], error["message"]) == ("unsupported", "$.item.type: no tools")
        await leave(server, peer)

    assert fed(run(play, tmp_path, backend={"duplex_tools": False})) == {}


def babbling(step: Step, unit: Unit, tools: Any) -> Step:
    """Call all the time, as many as go into a unit."""
    call = Span(kind="call", text='{"name": "clock", "arguments": {}}')
    return attrs.evolve(step, silent=(call, call))


def test_results_without_end_are_bounded(tmp_path: Path) -> None:
    """A client that returns all at once grew the session, or a unit of the model."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        await append(peer, 20)
        calls = peer.all("response.function_call_arguments.done")
        assert len(calls) == CALLS_OPEN_MAX
        for call in calls:
            answer(peer, call, "x" * INPUT_CHARS_MAX)
        for call in calls * 20:
            answer(peer, call)
        await peer.until(lambda: len(peer.all("error")) >= len(calls) * 20)
        await append(peer, 20)
        await leave(server, peer)

    inputs = fed(run(play, tmp_path, is_full=False, backend={"calls": babbling}))
    for each in inputs.values():
        assert sum(len(it.text) for it in each) <= INPUT_CHARS_MAX
        assert len(each) <= INPUTS_MAX


# -- the Live API ----------------------------------------------------------------------------------


async def start(server: World, *tools: Any, **how: Any) -> Peer:
    """Set up a session of the Live API, whose backend has tools."""
    peer = server.connect("audio", endpoint="live", **how)
    await peer.heard("info")
    backend = {"model": "x", "tools": list(tools)}
    delegation = {"type": "responses", "responses": backend}
    settings = {} if "parent" in how else {"model": "scripted"}
    say(peer, "session.start", session={**settings, "delegation": delegation})
    await peer.heard("session.started")
    return peer


async def stream(peer: Peer, seconds: int) -> None:
    """Send silence, as it comes."""
    await speak(peer, "session.input_audio.append", *[QUIET] * seconds)


def give(peer: Peer, call: str, output: str = "nine", **item: Any) -> None:
    """Return a result."""
    told = {"type": "function_call_output", "call_id": call, "output": output, **item}
    say(peer, "response.item.create", item=told, event_id="evt_1")


def delegated(peer: Peer) -> list[Body]:
    """The calls so far."""
    events = [it["event"] for it in peer.all("response.event")]
    return [it["item"] for it in events if it["type"] == "response.output_item.done"]


def test_a_call_is_a_delegated_response(tmp_path: Path) -> None:
    """The Live API's tools were accepted, and never called."""

    async def play(server: World) -> None:
        peer = await start(server, CLOCK)
        await stream(peer, 4)
        created = await peer.heard("session.delegation.created")
        nested = peer.all("response.event")
        assert {it["delegation_id"] for it in nested} == {created["delegation"]["id"]}
        assert [it["event"]["type"] for it in nested] == [
            "response.created",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert created["offset_ms"] == 3000
        [call] = delegated(peer)
        assert (call["name"], call["arguments"]) == ("clock", "{}")
        give(peer, call["call_id"])
        say(peer, "response.create")
        await stream(peer, 2)
        assert "it is nine." in [it["delta"] for it in peer.all("session.output_transcript.delta")]
        assert not peer.all("error")
        assert [it["code"] for it in peer.all("info")] == ["slot_assigned"]
        say(peer, "session.close")
        await peer.over()

    records = run(play, tmp_path)
    assert list(fed(records).values()) == [(started("t1"),), (result("t1", "nine"),)]


def test_results_of_the_live_api_are_refused_by_name(tmp_path: Path) -> None:
    """A result that was not due ended the session, or was fed."""

    async def play(server: World) -> None:
        other, peer = await start(server, CLOCK), await start(server, CLOCK)
        await stream(other, 4)
        await stream(peer, 4)
        [others], [own] = delegated(other), delegated(peer)
        give(peer, others["call_id"])
        give(peer, own["call_id"], "x" * (INPUT_CHARS_MAX + 1))
        give(peer, own["call_id"])
        give(peer, own["call_id"], "ten")
        await stream(peer, 2)
        told = [(it["error"]["param"], it["error"]["client_event_id"]) for it in peer.all("error")]
        assert told == [(f"item.{it}", "evt_1") for it in ("call_id", "output", "call_id")]
        await anyio.sleep(CALL_RESULT_S)
        say(other, "response.item.create", item={"call_id": others["call_id"]})
        give(other, others["call_id"])
        await other.heard("error", 2)
        for each in (other, peer):
            say(each, "session.close")
            await each.over()

    inputs = fed(run(play, tmp_path))
    assert [it for each in inputs.values() for it in each if it.kind == "result"] == [
        result("t1", "nine")
    ]


def test_tools_of_the_live_api_can_be_taken_back(tmp_path: Path) -> None:
    """A client that has no such function any more got calls of it."""

    async def play(server: World) -> None:
        peer = await start(server, CLOCK)
        await stream(peer, 1)
        fewer = {"type": "responses", "responses": {"tools": [LAMP]}}
        say(peer, "session.update", session={"delegation": fewer})
        told = (await peer.heard("session.updated"))["session"]["delegation"]
        assert "tools" not in told["responses"]
        await stream(peer, 4)
        assert not delegated(peer)
        say(peer, "session.close")
        await peer.over()

    inputs = fed(run(play, tmp_path))
    assert inputs[3] == (started("t1"), result("t1", "error: there is no tool of this name"))


def test_a_fork_of_the_live_api_closes_the_calls_of_its_past(tmp_path: Path) -> None:
    """The model waited for the result of a call that its client never got."""

    async def play(server: World) -> None:
        parent = await start(server, CLOCK, resumable=True)
        await stream(parent, 5)
        assert delegated(parent)
        info = server.log_of(parent.way_back[0])
        say(parent, "session.close")
        await parent.over()
        fork = await start(server, CLOCK, LAMP, parent=Parent(info=info, at=4))
        told = fork.all("session.started")[0]["session"]["delegation"]["responses"]
        assert [it["name"] for it in told["tools"]] == ["clock"]
        await stream(fork, 10)
        [call] = delegated(fork)
        give(fork, call["call_id"])
        await stream(fork, 2)
        assert not fork.all("error")
        say(fork, "session.close")
        await fork.over()

    inputs = fed(run(play, tmp_path))
    assert inputs[4] == (result("t1", "error: the call was lost"),)
    assert result("t2", "nine") in [it for each in inputs.values() for it in each]


# -- vLLM-Omni -------------------------------------------------------------------------------------


async def come(server: World, **session: Any) -> Peer:
    """Set up a session of vLLM-Omni's wire, with a tool."""
    peer = server.connect("audio", endpoint="omni")
    say(peer, "session.update", session={"model": "scripted", "tools": [CLOCK], **session})
    await peer.heard("session.created")
    return peer


async def pour(peer: Peer, seconds: int) -> None:
    """Send silence to it, as it comes."""
    await speak(peer, "input_audio_buffer.append", *[bytes(32_000)] * seconds)


def test_a_client_of_vllm_omni_gets_calls_and_is_answered(tmp_path: Path) -> None:
    """Its tools were ignored."""

    async def play(server: World) -> None:
        peer = await come(server)
        await pour(peer, 4)
        call = await peer.heard("response.function_call_arguments.done")
        assert peer.all("response.done")[0]["response"]["output"][0]["call_id"] == call["call_id"]
        await anyio.sleep(10)
        answer(peer, call)
        answer(peer, call)
        said = await peer.heard("response.output_audio_transcript.done")
        assert said["transcript"] == "it is nine."
        assert [it["error"]["param"] for it in peer.all("error")] == ["item.call_id"]
        say(peer, "session.update", session={"tools": [LAMP]})
        error = await peer.heard("error", 2)
        assert error["error"]["code"] == "unsupported"
        await pour(peer, 10)
        await peer.heard("response.function_call_arguments.done", 2)
        await anyio.sleep(CALL_RESULT_S + 2)
        say(peer, "session.close")
        await peer.over()

    inputs = fed(run(play, tmp_path, is_full=False))
    texts = [it.text for each in inputs.values() for it in each if it.kind == "result"]
    assert texts == ["nine", "error: no answer in time"]


def test_a_call_is_not_the_last_thing_that_was_played(tmp_path: Path) -> None:
    """What was played was noted of the call, and a response named that never was."""

    def ends(step: Step, unit: Unit, tools: Any) -> Step:
        return chatting(step, unit, tools) if unit.index < 3 else step

    async def play(server: World) -> None:
        peer = await come(server)
        await pour(peer, 4)
        response = peer.all("response.done")[0]["response"]
        speech, call = response["output"]
        say(peer, "playback.ack", played_ms=50)
        assert (await peer.heard("playback.acknowledged"))["event"]["item_id"] == speech["id"]
        say(peer, "playback.ack", played_ms=50, item_id=call["id"])
        assert (await peer.heard("error"))["error"]["code"] == "item_not_found"
        say(peer, "output_audio_buffer.clear")
        cleared = await peer.heard("output_audio_buffer.cleared")
        assert cleared["response_id"] == response["id"]
        say(peer, "session.close")
        await peer.over()

    run(play, tmp_path, backend={"calls": ends})


def stops(step: Step, unit: Unit, tools: Any) -> Step:
    """Speak in three units and call in the second, then be silent for one, and speak again."""
    step = chatting(step, unit, tools)
    return attrs.evolve(step, speech=None) if unit.index == 4 else step


@pytest.mark.parametrize("stop", ["", "barge_in"])
def test_a_call_cuts_no_sentence_of_a_model_that_is_asked(stop: str, tmp_path: Path) -> None:
    """What it said after the call was lost; it stops where its turn ends, or its user speaks."""

    async def play(server: World) -> None:
        peer = await come(server, extra_body={"auto_response": False})
        await pour(peer, 1)
        say(peer, "response.create")
        await pour(peer, 2)
        await peer.heard("response.done")
        if stop:
            say(peer, stop)
        await pour(peer, 4)
        words = [it["delta"] for it in peer.all("response.output_audio_transcript.delta")]
        assert words == ["word 1 ", "word 2 ", *([] if stop else ["word 3 "])]
        say(peer, "session.close")
        await peer.over()

    run(play, tmp_path, is_full=False, backend={"calls": stops})


@pytest.mark.parametrize("setting_up", [(arrive, append), (come, pour)], ids=["openai", "omni"])
def test_a_model_is_told_of_a_refused_call_while_its_client_is_silent(
    setting_up: tuple[Any, Any], tmp_path: Path
) -> None:
    """It waited for the client's next sound, and its user for an answer."""
    begin, send = setting_up

    async def play(server: World) -> None:
        peer = await begin(server)
        await send(peer, 3)
        said = await peer.heard("response.output_audio_transcript.done")
        assert said["transcript"].startswith("it is error: there is no")
        assert not peer.all("response.function_call_arguments.done")
        await leave(server, peer)

    inputs = fed(run(play, tmp_path, is_full=False, backend={"calls": calling("door")}))
    assert inputs == {3: (started("t1"), result("t1", "error: there is no tool of this name"))}


@pytest.mark.parametrize("setting_up", [(arrive, append), (come, pour)], ids=["openai", "omni"])
def test_refused_calls_keep_no_silent_session_busy(
    setting_up: tuple[Any, Any], tmp_path: Path
) -> None:
    """A model that calls what is not there, second by second, ran for as long as it was open."""
    begin, send = setting_up

    async def play(server: World) -> None:
        peer = await begin(server)
        await send(peer, 3)
        await anyio.sleep(60)
        silence.append(len(peer.events))
        await anyio.sleep(60)
        silence.append(len(peer.events))
        await send(peer, 1)
        await anyio.sleep(5)
        await leave(server, peer)

    silence = list[int]()
    calls = calling("door", at=0, every=1)
    inputs = fed(run(play, tmp_path, is_full=False, backend={"calls": calls}))
    assert silence[0] == silence[1]
    assert REFUSALS_FED_MAX + 3 < len(inputs) < 60


# -- tools that the model refuses -----------------------------------------------------------------


REASON: Final = "tools: clock: parameters.zone has no type"


def choosy(opening: Opening) -> Call:
    """Refuse an opening with tools."""
    if opening.tools:
        raise BackendRefused(REASON)
    return Call()


def test_tools_that_the_model_refuses_are_named_and_taken_back(tmp_path: Path) -> None:
    """The session ended as if the server had failed, and nothing named the schema."""

    async def play(server: World) -> None:
        peer = await arrive(server)
        await append(peer, 2)
        error = await peer.heard("error")
        assert error["error"]["message"] == REASON
        updated = await peer.heard("session.updated", 2)
        assert updated["session"]["tools"] == []
        say(peer, "response.create")
        await append(peer, 2)
        await peer.heard("response.done")
        await leave(server, peer)

    run(play, tmp_path, is_full=False, backend={"opening": choosy})
    log, clean = max(tmp_path.glob("*" + SUFFIX)), tmp_path / f"clean{SUFFIX}"
    done = CliRunner().invoke(redact_command, [str(log), "--output", str(clean)])
    assert done.exit_code == 0, done.output
    (failed,) = [it for it in read(clean) if it.fields.get("type") == "BackendOpenFailed"]
    assert failed.fields["refused"] == f"tools: {LEFT_OUT}"


@pytest.mark.parametrize("endpoint", ["live", "omni"])
def test_the_client_may_come_again_without_tools(tmp_path: Path, endpoint: Endpoint) -> None:
    """It could not know that the tools were the reason."""
    backend = {"model": "x", "tools": [CLOCK]}
    first: Any = {"model": "scripted", "tools": [CLOCK]}
    kind, came = "session.update", "session.created"
    if endpoint == "live":
        first = {"model": "scripted", "delegation": {"type": "responses", "responses": backend}}
        kind, came = "session.start", "session.started"

    async def play(server: World) -> None:
        peer = server.connect("audio", endpoint=endpoint)
        await anyio.sleep(1)
        say(peer, kind, session=first)
        error = await peer.heard("error")
        assert error["error"]["message"] == REASON
        say(peer, kind, session={"model": "scripted"})
        await peer.heard(came)
        say(peer, "session.close")
        await peer.over()

    run(play, tmp_path, is_full=False, backend={"opening": choosy})
