"""Tools in full duplex: calls, results at every moment, and the same again in a replay."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import pytest

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST
from protocol.values.limits import (
    CALL_RESULT_S,
    CALLS_A_MINUTE,
    CALLS_OPEN_MAX,
    INPUT_CHARS_MAX,
    INPUTS_MAX,
    TEXTS_A_SECOND,
    TOOLS_MAX,
)
from protocol.values.model import Opened, Span, Unit, UnitInput
from recorder.format.format import SUFFIX, Record
from recorder.format.mapping import steps
from recorder.read.reader import LogReader
from replay.rerun.full import replay_fully
from replay.rerun.logic import replay
from runtime.model.backends.base import SILENT_STEPS_MIN
from runtime.model.backends.scripted import (
    Call,
    ScriptedBackend,
    ScriptedSession,
    Speaks,
    Step,
    calling,
)
from runtime.session.setup import Parent
from tests.sessions.in_memory import (
    Body,
    Peer,
    World,
    append_frame,
    close_frame,
    init_frame,
    on_virtual_time,
    world,
)

CLOCK: Final = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
Play = Callable[[World], Awaitable[None]]


def listening(_unit: Unit, _seed: int) -> Step:
    """Listen, whatever comes."""
    return Step()


def result_frame(call: Body | str, content: str = "nine") -> str:
    """Write the result of a call."""
    name = call if isinstance(call, str) else call["tool_call_id"]
    return json.dumps({"type": "input.tool_result", "tool_call_id": name, "content": content})


async def talk(peer: Peer, seconds: int) -> None:
    """Send silence, second by second."""
    for _ in range(seconds):
        peer.send(append_frame())
        await anyio.sleep(1)


def run(
    play: Play,
    folder: Path,
    *,
    is_full: bool = True,
    backend: dict[str, Any] | None = None,
    **how: Any,
) -> list[Record]:
    """Play in a server, and hold its last log to both replays; returns its records."""
    made = {"script": listening, "duplex_tools": True, **(backend or {})}

    async def body() -> None:
        async with world(ScriptedBackend(**made), record_to=folder, **how) as server:
            await play(server)

    on_virtual_time(body)
    with LogReader(max(folder.glob("*" + SUFFIX))) as reader:
        head, items = reader.head.fields, list(reader)
    logic = replay(items)
    assert logic.identical, logic.divergence

    async def again() -> None:
        lossless = {**made, "script": how.get("again", made["script"])}
        full = await replay_fully(head, items, lambda _: ScriptedBackend(**lossless), anyway=True)
        assert full.identical, full.first_divergence

    if is_full:
        on_virtual_time(again)
    return [item for item in items if isinstance(item, Record)]


def fed(records: list[Record]) -> dict[int, tuple[UnitInput, ...]]:
    """The events that each unit fed."""
    found = {}
    for _, step in steps(records):
        for effect in () if step is None else step.effects:
            if isinstance(effect, ef.StartUnit) and effect.unit.inputs:
                found[effect.unit.index] = effect.unit.inputs
    return found


def started(name: str) -> UnitInput:
    return UnitInput(kind="started", call=name)


def result(name: str, text: str) -> UnitInput:
    return UnitInput(kind="result", call=name, text=text)


def test_a_call_is_sent_and_its_result_is_spoken(tmp_path: Path) -> None:
    """The model did not hear what its call came to."""
    heard: list[Body] = []

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 4)
        call = await peer.heard("response.tool_call.done")
        peer.send(result_frame(call))
        await talk(peer, 2)
        heard.extend([peer.all("session.created")[0], call, *peer.all("text")])
        peer.send(close_frame())
        await peer.over()

    records = run(play, tmp_path)
    created, call, said = heard
    assert created["tools"] == "called"
    assert (call["call"], call["unit_index"]) == ({"name": "clock", "arguments": "{}"}, 2)
    assert said["text"] == "it is nine."
    assert fed(records) == {3: (started("t1"),), 4: (result("t1", "nine"),)}


def test_a_model_without_tools_takes_them_and_says_so(tmp_path: Path) -> None:
    """The whole first message of a client with tools was lost."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        assert peer.all("session.created")[0]["tools"] == "not_called"
        await talk(peer, 4)
        peer.send(result_frame("call_000000000000"))
        await peer.heard("error")
        peer.send(close_frame())
        await peer.over()

    records = run(play, tmp_path, backend={"duplex_tools": False})
    assert fed(records) == {}
    assert not any("silent" in str(record.fields) for record in records)


LONG: Final = f'{{"zone": "{"far away " * 30}"}}'
"""Arguments that take several units to write."""


def test_a_long_call_is_written_over_units(tmp_path: Path) -> None:
    """A call that did not fit one unit was lost, or sent in half."""
    sent: list[Body] = []

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 8)
        sent.extend(peer.all("response.tool_call.done"))
        peer.send(close_frame())
        await peer.over()

    run(play, tmp_path, backend={"calls": calling(arguments=LONG)})
    (call,) = sent
    assert call["unit_index"] > 3
    assert json.loads(call["call"]["arguments"]) == json.loads(LONG)


def test_seconds_that_wait_cut_the_silent_part(tmp_path: Path) -> None:
    """A client that sends faster than in life waited for what the model does in silence."""

    def slow(unit: Unit, _seed: int) -> Step:
        return Step(silent_s=0.5)

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 2)
        peer.send(*[append_frame()] * 5)
        await anyio.sleep(40)
        await talk(peer, 8)
        await peer.heard("response.tool_call.done")
        peer.send(close_frame())
        await peer.over()

    records = run(play, tmp_path, backend={"script": slow, "calls": calling(arguments=LONG)})
    ends = [
        record.fields["finalized"]["silent"]["end"]
        for record in records
        if record.kind == "finalize"
    ]
    assert ends[:6] == ["no_action", "no_action", "cut", "cut", "cut", "budget"]
    assert "InterruptUnit" in {
        record.fields["type"] for record in records if "type" in record.fields
    }


def test_an_interrupt_loses_no_call(tmp_path: Path) -> None:
    """Barge-in took back what the model had asked for."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 3)
        call = await peer.heard("response.tool_call.done")
        peer.send(append_frame(force_listen=True))
        await anyio.sleep(1)
        peer.send(result_frame(call), append_frame(force_listen=True))
        await talk(peer, 1)
        assert not peer.all("error")
        peer.send(close_frame())
        await peer.over()

    records = run(play, tmp_path)
    assert list(fed(records).values()) == [(started("t1"),), (result("t1", "nine"),)]


def test_an_interrupt_of_the_speech_cuts_the_silent_part(tmp_path: Path) -> None:
    """A user who interrupts would wait for what the model writes, in some backends."""

    def speaks(unit: Unit, _seed: int) -> Step:
        speech = Speaks(text="one moment", pcm=bytes(96_000))
        return Step(speech=speech, generate_s=0.8, steps=8) if unit.index == 2 else Step()

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 2)
        peer.send(append_frame())
        await anyio.sleep(0.5)
        peer.send(append_frame(force_listen=True))
        await talk(peer, 8)
        assert len(peer.all("response.tool_call.done")) == 1
        peer.send(close_frame())
        await peer.over()

    records = run(play, tmp_path, backend={"script": speaks, "calls": calling(arguments=LONG)})
    silent = [it.fields["finalized"]["silent"] for it in records if it.kind == "finalize"]
    assert (silent[2]["end"], len(silent[2]["decided_ids"])) == ("cut", SILENT_STEPS_MIN)
    assert silent[3]["end"] == "budget"


def test_the_silent_part_of_a_session_without_tools_is_cut_too(tmp_path: Path) -> None:
    """A checkpoint in slots decides it all the same: a user who interrupts waited for its end."""

    async def play(server: World) -> None:
        peer = await server.activate("audio")
        peer.send(append_frame())
        await anyio.sleep(0.2)
        peer.send(append_frame(force_listen=True))
        await talk(peer, 3)
        peer.send(close_frame())
        await peer.over()

    def slow(_unit: Unit, _seed: int) -> Step:
        return Step(finalize=Call(duration_s=0.5))

    records = run(play, tmp_path, backend={"script": slow})
    cut = [it.fields["index"] for it in records if it.fields.get("type") == "InterruptUnit"]
    assert cut == [0]


def test_a_failed_unit_feeds_its_events_with_the_next(tmp_path: Path) -> None:
    """A result was lost with the unit that was undone."""

    def fails(unit: Unit, _seed: int) -> Step:
        return Step(fault="fail") if unit.index in (5, 7) else Step()

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 5)
        peer.send(result_frame(await peer.heard("response.tool_call.done")))
        await talk(peer, 2)
        peer.send(json.dumps({"type": "input.standalone", "content": "rain"}))
        await talk(peer, 3)
        peer.send(close_frame())
        await peer.over()

    inputs = fed(run(play, tmp_path, backend={"script": fails, "calls": calling(at=4)}))
    rain = UnitInput(kind="text", text="rain")
    assert inputs == {
        5: (started("t1"), result("t1", "nine")),
        6: (started("t1"), result("t1", "nine")),
        7: (rain,),
        8: (rain,),
    }


def test_a_silent_part_that_fails_costs_no_answer(tmp_path: Path) -> None:
    """The session ended, though all that was said had been sent; three in a row end it."""

    def fails(unit: Unit, _seed: int) -> Step:
        return Step(silent_fails=unit.index == 1 or unit.index >= 4)

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 8)
        await peer.over()
        assert len(peer.all("listen")) == 7
        assert peer.all("session.closed")[0]["reason"] == "backend_error"

    run(play, tmp_path, backend={"script": fails})


def test_a_call_without_an_answer_ends(tmp_path: Path) -> None:
    """The model waited for ever; and a late result is refused."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 4)
        call = await peer.heard("response.tool_call.done")
        await anyio.sleep(CALL_RESULT_S)
        peer.send(result_frame(call))
        error = await peer.heard("error")
        assert error["error"]["message"].startswith("$.tool_call_id: no call")
        await talk(peer, 1)
        peer.send(close_frame())
        await peer.over()

    assert fed(run(play, tmp_path))[4] == (result("t1", "error: no answer in time"),)


def test_a_result_counts_once(tmp_path: Path) -> None:
    """A client that sends a result twice, or one of another session's call, changed what is fed."""

    async def play(server: World) -> None:
        other = await server.activate("audio", tools=[CLOCK])
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(other, 3)
        await talk(peer, 3)
        own, others = [await each.heard("response.tool_call.done") for each in (peer, other)]
        assert own["tool_call_id"] != others["tool_call_id"]
        peer.send(result_frame(others), result_frame(own), result_frame(own, "ten"))
        await talk(peer, 2)
        assert len(peer.all("error")) == 2
        for each in (other, peer):
            each.send(close_frame())
            await each.over()

    inputs = fed(run(play, tmp_path))
    assert [it for each in inputs.values() for it in each if it.kind == "result"] == [
        result("t1", "nine")
    ]


def test_a_lost_worker_loses_no_call_and_no_result(tmp_path: Path) -> None:
    """The model that took its place did not know of the call, or heard its result twice."""

    def script(dies: bool) -> Callable[[Unit, int], Step]:
        def decide(unit: Unit, _seed: int) -> Step:
            lost = Call(fault="gone") if dies and unit.index == 4 else Call()
            return Step(finalize=lost)

        return decide

    async def load(_place: int) -> ScriptedBackend:
        await anyio.sleep(1.5)
        return ScriptedBackend(script(dies=False), duplex_tools=True)

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 3)
        call = await peer.heard("response.tool_call.done")
        await talk(peer, 2)
        peer.send(result_frame(call))
        await talk(peer, 6)
        assert len(peer.all("response.tool_call.done")) == 1
        peer.send(close_frame())
        await peer.over()

    backend = {"script": script(dies=True)}
    records = run(play, tmp_path, backend=backend, is_full=False, load=load)
    assert list(fed(records).values()) == [(started("t1"),), (result("t1", "nine"),)]
    assert any(record.fields.get("type") == "Rebuilt" for record in records)


def test_the_time_of_calls_stands_still_while_the_model_is_rebuilt(tmp_path: Path) -> None:
    """A call would be over before its result could be given to a model."""

    def dies(unit: Unit, _seed: int) -> Step:
        return Step(finalize=Call(fault="gone") if unit.index == 4 else Call())

    async def load(_place: int) -> ScriptedBackend:
        await anyio.sleep(20)
        return ScriptedBackend(listening, duplex_tools=True)

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 3)
        call = await peer.heard("response.tool_call.done")
        await talk(peer, CALL_RESULT_S + 10)
        peer.send(result_frame(call))
        await talk(peer, 2)
        assert not [it for it in peer.all("error") if it["error"]["type"] == "client_error"]
        await talk(peer, CALL_RESULT_S)
        peer.send(close_frame())
        await peer.over()

    records = run(play, tmp_path, backend={"script": dies}, is_full=False, load=load)
    told = [it for each in fed(records).values() for it in each if it.kind == "result"]
    assert told[0] == result("t1", "nine")
    assert result("t2", "error: no answer in time") in told  # of the second call, made at 12 s


def test_a_client_that_is_back_gets_its_call_and_answers(tmp_path: Path) -> None:
    """A call that was sent to a lost connection was lost with it."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK], resumable=True)
        await talk(peer, 2)
        peer.send(append_frame())
        peer.vanish()
        await anyio.sleep(2)
        again = server.come_back(*peer.way_back)
        call = await again.heard("response.tool_call.done")
        again.send(result_frame(call))
        await talk(again, 2)
        again.send(close_frame())
        await again.over()

    inputs = fed(run(play, tmp_path))
    assert result("t1", "nine") in [it for each in inputs.values() for it in each]


@pytest.mark.parametrize(
    ("after_s", "fed_by"), [(0.0, 4), (0.1, 5), (0.3, 5), (0.5, 5), (0.7, 5), (0.9, 5)]
)
def test_a_result_is_fed_by_the_next_unit_that_begins(
    after_s: float, fed_by: int, tmp_path: Path
) -> None:
    """One that came before a unit, amid its prefill, speech or silent part, or after it, was lost.

    `after_s`: after the unit's sound; at 0 the result comes before it.
    """

    def slow(unit: Unit, _seed: int) -> Step:
        speech = Speaks(text="one moment ", pcm=bytes(96_000))
        slowly = Step(speech=speech, prefill_s=0.2, generate_s=0.2, silent_s=0.2)
        return attrs.evolve(slowly, finalize=Call(duration_s=0.2)) if unit.index == 4 else Step()

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 4)
        told = result_frame(await peer.heard("response.tool_call.done"))
        peer.send(*[told, append_frame()] if after_s == 0 else [append_frame()])
        await anyio.sleep(after_s)
        peer.send(*[told] if after_s else [])
        await anyio.sleep(1 - after_s)
        await talk(peer, 2)
        assert not peer.all("error")
        peer.send(close_frame())
        await peer.over()

    inputs = fed(run(play, tmp_path, backend={"script": slow}))
    assert inputs == {3: (started("t1"),), fed_by: (result("t1", "nine"),)}


def test_a_result_after_the_end_is_of_no_session(tmp_path: Path) -> None:
    """A session that was being closed fed it to a unit, or told its client of an error."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 3)
        call = await peer.heard("response.tool_call.done")
        peer.send(append_frame(), close_frame(), result_frame(call))
        await peer.over()
        assert peer.kinds[-1] == "session.closed"
        assert not peer.all("error")

    assert fed(run(play, tmp_path)) == {3: (started("t1"),)}


def test_a_fork_closes_the_calls_of_its_past(tmp_path: Path) -> None:
    """Its client never saw them, and the model waited for their results."""

    async def play(server: World) -> None:
        parent = await server.activate("audio", tools=[CLOCK], resumable=True)
        await talk(parent, 4)
        await parent.heard("response.tool_call.done")
        info = server.log_of(parent.way_back[0])
        parent.send(close_frame())
        await parent.over()
        fork = server.connect("audio", parent=Parent(info=info, at=4))
        await fork.heard("session.queue_done")
        fork.send(json.dumps({"type": "session.init", "payload": {"tools": [CLOCK, CLOCK]}}))
        await fork.heard("error")
        fork.send(json.dumps({"type": "session.init", "payload": {"tools": [CLOCK]}}))
        created = await fork.heard("session.created")
        assert created["tools"] == "called"
        await talk(fork, 10)
        call = await fork.heard("response.tool_call.done")
        fork.send(result_frame(call))
        await talk(fork, 2)
        fork.send(close_frame())
        await fork.over()

    inputs = fed(run(play, tmp_path))
    assert inputs[4] == (result("t1", "error: the call was lost"),)
    assert result("t2", "nine") in [it for each in inputs.values() for it in each]


# -- clients and models that go too far ------------------------------------------------------------


def babbling(step: Step, unit: Unit, tools: Any) -> Step:
    """Call all the time, as many as go into a unit."""
    return Step(
        silent=tuple(Span(kind="call", text='{"name": "clock", "arguments": {}}') for _ in "12")
    )


def test_a_model_that_calls_in_circles_is_answered_by_errors(tmp_path: Path) -> None:
    """A client was asked for a thousand calls."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 30)
        calls = peer.all("response.tool_call.done")
        assert len(calls) == CALLS_OPEN_MAX
        for call in calls:
            peer.send(result_frame(call))
        await talk(peer, 30)
        assert len(peer.all("response.tool_call.done")) <= 2 * CALLS_A_MINUTE
        peer.send(close_frame())
        await peer.over()

    inputs = fed(run(play, tmp_path, backend={"calls": babbling}))
    texts = {it.text for each in inputs.values() for it in each if it.kind == "result"}
    assert texts == {"nine", "error: too many calls wait for a result"} | (
        texts & {"error: too many calls"}
    )
    starts = [it.call for each in inputs.values() for it in each if it.kind == "started"]
    assert starts == [f"t{number + 1}" for number in range(len(starts))]


def test_what_is_no_call_is_answered_to_the_model(tmp_path: Path) -> None:
    """A client was asked to run what it does not have."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        await talk(peer, 5)
        assert not peer.all("response.tool_call.done")
        peer.send(close_frame())
        await peer.over()

    (inputs,) = fed(run(play, tmp_path, backend={"calls": calling("door")})).values()
    assert inputs == (started("t1"), result("t1", "error: there is no tool of this name"))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (result_frame("call_ffffffffffff"), "$.tool_call_id: no call of this session"),
        (result_frame("x" * 65), "$.tool_call_id: 65 characters"),
        (result_frame("c", "x" * (INPUT_CHARS_MAX + 1)), "$.content: 4097 characters"),
        ('{"type": "input.tool_result", "content": "a"}', "$.tool_call_id: required"),
        ('{"type": "input.tool_result", "tool_call_id": "c", "content": {}}', "$.content: an obj"),
        ('{"type": "input.standalone", "content": ""}', "$.content: 0 characters"),
    ],
)
def test_a_wrong_result_is_refused_by_name(frame: str, words: str, tmp_path: Path) -> None:
    """The session ended, or nothing was said."""

    async def play(server: World) -> None:
        peer = await server.activate("audio", tools=[CLOCK])
        peer.send(frame)
        error = await peer.heard("error")
        assert error["error"]["message"].startswith(words)
        peer.send(append_frame())
        await peer.heard("listen")
        peer.send(close_frame())
        await peer.over()

    assert fed(run(play, tmp_path, is_full=False)) == {}


@pytest.mark.parametrize("results", [500, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_results_of_calls_that_were_not_made_leave_nothing_behind(results: int) -> None:
    """A million of them grew the session, or made each later one slower."""
    limits = ev.SessionLimits(
        session_s=60, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192, duplex_tools=True
    )
    session, _ = Session.open(
        ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1,
            mode="audio",
            seed=1,
            limits=limits,
            recording="off",
            behaviour=NEWEST,
        )
    )
    session.step(ev.SlotLeased(at_ns=1, lease=1, slot=0))
    session.step(ev.FrameReceived(at_ns=2, frame=init_frame(tools=[CLOCK])))
    session.step(ev.BackendOpened(at_ns=3, lease=1, opened=Opened(prompt_length=12)))

    def left() -> dict[str, Any]:
        keys: dict[str, Any] = session.snapshot()
        del keys["now_ns"], keys["alive_ns"], keys["frames_sent"], keys["peer"]["received"]
        return keys

    before, frame = left(), result_frame("call_ffffffffffff", "x" * 1_000)
    for place in range(results):
        (sent,) = session.step(ev.FrameReceived(at_ns=4 + place, frame=frame))
        assert isinstance(sent, ef.Send)
        assert "no call of this session" in str(sent.frame)
    assert left() == before


def test_a_session_without_a_place_for_events_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model would never be fed what the client was told is kept."""
    begin = ScriptedSession.__init__

    def begin_without(self: ScriptedSession, *made: Any) -> None:
        begin(self, *made[:-1], attrs.evolve(made[-1], takes_events=False))

    monkeypatch.setattr(ScriptedSession, "__init__", begin_without)

    async def play(server: World) -> None:
        peer = server.connect("audio")
        await peer.heard("session.queue_done")
        peer.send(init_frame())
        await peer.heard("session.created")
        peer.send(json.dumps({"type": "input.standalone", "content": "rain"}))
        error = await peer.heard("error")
        assert error["error"]["message"] == "this server's model takes no events"
        peer.send(close_frame())
        await peer.over()

    run(play, tmp_path)


def test_many_tools_are_refused_and_the_client_may_ask_again(tmp_path: Path) -> None:
    """Ten thousand tools filled the prompt."""

    async def play(server: World) -> None:
        peer = server.connect("audio")
        await peer.heard("session.queue_done")
        peer.send(json.dumps({"type": "session.init", "payload": {"tools": [CLOCK] * 10_000}}))
        error = await peer.heard("error")
        assert (
            error["error"]["message"]
            == f"$.payload.tools: 10000 items, allowed is 0 to {TOOLS_MAX}"
        )
        peer.send(json.dumps({"type": "session.init", "payload": {}}))
        await peer.heard("session.created")
        peer.send(close_frame())
        await peer.over()

    run(play, tmp_path, is_full=False)


def test_events_are_bounded(tmp_path: Path) -> None:
    """A client that sends events without end grew the session, and the model's next second."""

    def text(content: str) -> str:
        return json.dumps({"type": "input.standalone", "content": content})

    async def play(server: World) -> None:
        peer = await server.activate("audio")
        peer.send(*[text("a")] * (TEXTS_A_SECOND + 2))
        await peer.heard("error", 2)
        for _ in range(INPUTS_MAX):
            await anyio.sleep(0.5)
            peer.send(text("b" * INPUT_CHARS_MAX))
        await anyio.sleep(1)
        assert len(peer.all("error")) > 2 + INPUTS_MAX // 2 - 2
        await talk(peer, 20)
        peer.send(close_frame())
        await peer.over()

    inputs = fed(run(play, tmp_path, is_full=False))
    assert all(sum(len(it.text) for it in each) <= INPUT_CHARS_MAX for each in inputs.values())
    assert len(inputs[0]) == TEXTS_A_SECOND
    assert sum(map(len, inputs.values())) <= INPUTS_MAX
