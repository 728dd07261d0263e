"""Shutting down on virtual time: who is told what, who may go on, and for how long."""

from __future__ import annotations

import json
from pathlib import Path

import anyio

from protocol.values.model import Turn, Unit
from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_chat import Answer, tone
from tests.sessions.in_memory import append_frame, close_frame, on_virtual_time, world

WARNED_S = 30
ASK = json.dumps(
    {"type": "input.append", "input": {"messages": [{"role": "user", "content": "?"}]}}
)


def speaks(unit: Unit, seed: int) -> Step:
    """Speak in every unit."""
    speech = Speaks(text=f"word {unit.index} ", pcm=tone(unit.index, seed, samples=24_000))
    return Step(speech=speech, prefill_s=0.05, generate_s=0.2)


def slowly(turn: Turn) -> Answer:
    """Answer each turn in ten seconds."""
    return Answer(tokens=("so", " it", " is"), token_s=3.0)


def test_a_session_that_runs_is_warned_and_goes_on_until_it_is_done() -> None:
    """Each new version of a server would cut every conversation off."""

    async def body() -> None:
        async with world(ScriptedBackend(script=speaks)) as server:
            peer = await server.activate(notices=True)
            peer.send(append_frame())
            await peer.heard("audio", 1)
            server.server.begin_drain(WARNED_S)
            warning = await peer.heard("session.going_away")
            assert warning == {"type": "session.going_away", "seconds_left": WARNED_S}
            assert server.server.readiness == "draining"
            peer.send(append_frame())
            await peer.heard("audio", 2)
            peer.send(close_frame("done"))
            await peer.over()
            await server.quiet()
            assert peer.closed == (1000, "stopped")

    on_virtual_time(body)


def test_at_the_end_of_its_time_it_is_ended_with_its_log_whole(tmp_path: Path) -> None:
    """A client that ignores the warning would hold the server up, or lose its recording."""

    async def body() -> None:
        async with world(ScriptedBackend(script=speaks), record_to=tmp_path) as server:
            peer = await server.activate()
            peer.send(append_frame())
            await peer.heard("audio")
            server.server.begin_drain(WARNED_S)
            await anyio.sleep(WARNED_S)
            assert not peer.is_over
            server.server.drain()
            await peer.over()
            assert peer.kinds[-1] == "session.closed"
            assert peer.closed == (1012, "server_shutdown")

    on_virtual_time(body)
    (log,) = tmp_path.rglob("*.zst")
    with LogReader(log) as reader:
        items = list(reader)
    assert items[-1].kind == "fin"
    assert replay(items).identical


def test_who_waits_or_has_not_begun_is_sent_away_at_once() -> None:
    """A client would wait half a minute for a slot that it can never get."""

    async def body() -> None:
        async with world(ScriptedBackend(script=speaks, slots=2)) as server:
            running = await server.activate()
            begun = server.connect()
            await begun.heard("session.queue_done")
            waiting = server.connect()
            await waiting.heard("session.queued")
            began_s = anyio.current_time()
            server.server.begin_drain(WARNED_S)
            await begun.over()
            await waiting.over()
            assert begun.closed == waiting.closed == (1012, "server_shutdown")
            late = server.connect()
            await late.over()
            assert late.closed == (1013, "service_unavailable")
            assert anyio.current_time() - began_s < 1
            assert not running.is_over

    on_virtual_time(body)


def test_an_answer_is_finished_and_no_other_begins() -> None:
    """A chat would lose an answer that was nearly there, or hold the server up for its next."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=slowly)) as server:
            asked = await server.activate_chat()
            asked.send(ASK)
            await asked.heard("text")
            idle = await server.activate_chat()
            server.server.begin_drain(WARNED_S)
            await idle.over()
            assert idle.closed == (1012, "server_shutdown")
            await asked.over()
            assert asked.kinds[-3:] == ["text", "response.done", "session.closed"]
            assert asked.all("response.done")[0]["reason"] == "turn_end"
            assert asked.events[-1]["reason"] == "server_shutdown"
            await server.quiet()

    on_virtual_time(body)
