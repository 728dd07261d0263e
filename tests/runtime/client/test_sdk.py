"""`antiphon.connect` and a duplex session of it, on asyncio and on trio."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

import antiphon
from antiphon import Closed, ErrorReport, Listen, LocalProtocolError, QueuePlace, Speech
from protocol.wire.codec import Value
from runtime.client import resuming
from runtime.client.duplex import answer_call
from runtime.client.resuming import BACKOFF_S_MAX, backoff_s
from tests.live.servers import live_server
from tests.network.peers import (
    JPEG,
    create,
    end,
    hear,
    peer,
    place,
    raw_peer,
    refuse,
    report,
    reset,
    say,
)

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
SECOND = np.zeros(16_000, np.float32)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with one slot, whose model follows a script."""
    with live_server("--no-record", "--slots", "1") as server:
        yield server.url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a millisecond between attempts."""
    monkeypatch.setattr(resuming, "BACKOFF_S", 0.001)


def heard_all(websocket: ServerConnection) -> list[dict[str, Any]]:
    """Hear a client out, up to its goodbye."""
    events = []
    try:
        while True:
            events.append(hear(websocket))
            if events[-1]["type"] == "session.close":
                end(websocket, "client_closed")
    except ConnectionClosed:
        return events


# -- a session ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["realtime", "duplex-v1", "legacy-duplex", "live"])
async def test_a_session_from_beginning_to_end(url: str, dialect: Any) -> None:
    """The first example that anybody runs would not work."""
    heard = []
    connecting = antiphon.connect(
        url,
        mode="audio",
        dialect=dialect,
        instructions="Be brief.",
        model="scripted" if dialect == "live" else "",
    )
    async with connecting as session:
        assert session.created.prompt_length > 0 or dialect == "live", "which does not tell it"
        for _ in range(5 * 50 + 10):
            await session.append(np.zeros(320, np.float32))  # 20 ms, as a microphone has it
        assert session.held_samples == 3200
        await session.flush()
        async for event in session:
            heard.append(event)
            answered = sum(isinstance(event, Listen | Speech) for event in heard)
            if isinstance(event, Listen) and answered > 3:
                await session.close()
    assert isinstance(heard[-1], Closed)
    assert "this is second 3, " in [event.text for event in heard if isinstance(event, Speech)]


async def test_a_session_is_paused_and_interrupted(url: str) -> None:
    """A client of 002 could not hold its tongue, or the model's."""
    heard = []
    async with antiphon.connect(url, mode="video", dialect="legacy-duplex") as session:
        await session.append(SECOND, [JPEG])
        await session.interrupt()
        await session.pause(30)
        async for event in session:
            heard.append(type(event))
            match event:
                case antiphon.Paused():
                    with pytest.raises(LocalProtocolError, match="PAUSED"):
                        await session.append(SECOND)
                    await session.resume()
                case antiphon.Resumed():
                    await session.append(SECOND)
                case Listen() if antiphon.Resumed in heard:
                    await session.close()
    assert {antiphon.Interrupted, antiphon.Paused, antiphon.Resumed, Closed} < set(heard)


async def test_frames_and_interruptions_are_sent() -> None:
    """The model would be blind, or talk on."""
    heard: list[dict[str, Any]] = []

    def listen(websocket: ServerConnection) -> None:
        assert create(websocket)["payload"]["system_prompt"] == "look"
        heard.extend(heard_all(websocket))

    with peer(listen) as url:
        async with antiphon.connect(url, mode="video", instructions="look") as session:
            await session.append(SECOND, [JPEG])
            await session.append(SECOND[:100])
            await session.interrupt()
            await session.append(SECOND)
    first, cut, rest, goodbye = heard
    assert first["input"]["video_frames"]
    assert cut["input"]["force_listen"]
    sizes = [
        len(Value(path="", value=event["input"]["audio"]).binary()) // 4
        for event in (first, cut, rest)
    ]
    assert sizes == [16_000, 4_000, 12_000]
    assert goodbye["type"] == "session.close"


async def test_an_error_amid_a_session_is_an_event() -> None:
    """One unit that failed would end a conversation."""

    def stumble(websocket: ServerConnection) -> None:
        create(websocket)
        hear(websocket)
        report(websocket, "inference_error", "out of luck")
        heard_all(websocket)

    with peer(stumble) as url:
        async with antiphon.connect(url, mode="audio") as session:
            await session.append(SECOND)
            event = await anext(session)
            assert isinstance(event, ErrorReport)
            assert event.message == "out of luck"
            await session.append(SECOND)


async def test_a_session_that_the_server_ended_says_so() -> None:
    """The sender would be told that it misused us, for what the server did."""

    def leave(websocket: ServerConnection) -> None:
        create(websocket)
        end(websocket, "timeout")

    with peer(leave) as url:
        async with antiphon.connect(url, mode="audio") as session:
            assert [type(event) async for event in session] == [Closed]
            with pytest.raises(antiphon.SessionClosedError, match="timeout"):
                await session.append(SECOND)


async def test_a_session_that_was_closed_takes_nothing() -> None:
    """Sound would be thrown away in silence."""
    with peer(lambda websocket: (create(websocket), heard_all(websocket))) as url:
        async with antiphon.connect(url, mode="audio") as session:
            await session.append(SECOND[:100])
            await session.close("enough")
            with pytest.raises(LocalProtocolError, match="CLOSED"):
                await session.append(SECOND)
            with pytest.raises(LocalProtocolError):
                await session.close()
            assert session.held_samples == 100


async def test_pictures_in_an_audio_session_are_refused() -> None:
    """They would be ignored, and nobody know why the model sees nothing."""
    with peer(lambda websocket: (create(websocket), heard_all(websocket))) as url:
        async with antiphon.connect(url, mode="audio") as session:
            with pytest.raises(LocalProtocolError, match="mode=audio"):
                await session.append(SECOND, [JPEG])
            with pytest.raises(LocalProtocolError):
                await session.pause()  # this dialect knows none


async def test_an_error_in_the_block_says_no_goodbye() -> None:
    """A crashed client would look like one that had finished."""
    heard: list[dict[str, Any]] = []

    def listen(websocket: ServerConnection) -> None:
        create(websocket)
        heard.extend(heard_all(websocket))

    with peer(listen) as url, pytest.raises(KeyError, match="mine"):
        async with antiphon.connect(url, mode="audio"):
            raise KeyError("mine")
    assert heard == []


# -- opening ------------------------------------------------------------------------------------


async def test_the_queue_is_told(url: str) -> None:
    """Whoever waits would see nothing, and give up."""
    places: list[QueuePlace] = []
    waits = anyio.Event()

    def note(where: QueuePlace) -> None:
        places.append(where)
        waits.set()

    async def come_second() -> None:
        async with antiphon.connect(url, mode="audio", on_queue=note) as second:
            assert second.created.session_id

    async with anyio.create_task_group() as tasks, antiphon.connect(url, mode="audio"):
        tasks.start_soon(come_second)
        await waits.wait()
    assert places[0].position == 1


@pytest.mark.parametrize("code", ["queue_full", "worker_busy", "service_unavailable"])
async def test_a_refusal_is_tried_again(code: str) -> None:
    """A client would give up on a server that is full for a moment, or still loads."""
    refusals = iter([code, code])

    def answer(websocket: ServerConnection) -> None:
        if (refused := next(refusals, None)) is not None:
            refuse(websocket, refused)
        else:
            create(websocket)
            heard_all(websocket)

    with peer(answer) as url:
        async with antiphon.connect(url, mode="audio", retries=2) as session:
            assert session.created.session_id == "sess_1"


async def test_a_connection_lost_in_the_queue_is_tried_again() -> None:
    """A server that restarts would cost all who wait for it."""
    attempts: list[int] = []

    def answer(websocket: ServerConnection) -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            say(websocket, "session.queued", **place(2))
            reset(websocket.socket)
        elif len(attempts) == 2:
            websocket.close(1012, "server_shutdown")
        else:
            create(websocket)
            heard_all(websocket)

    with peer(answer) as url:
        async with antiphon.connect(url, mode="audio"):
            pass
    assert len(attempts) == 3


async def test_it_is_not_tried_for_ever() -> None:
    """A client of a server that is always full would never say so."""
    attempts: list[int] = []

    def answer(websocket: ServerConnection) -> None:
        attempts.append(1)
        refuse(websocket)

    with peer(answer) as url, pytest.raises(antiphon.SessionRefusedError, match="queue_full"):
        async with antiphon.connect(url, mode="audio", retries=3):
            pass
    assert len(attempts) == 4


@pytest.mark.parametrize("why", ["init", "stopped", "protocol", "page"])
async def test_what_will_not_pass_is_not_tried_again(why: str) -> None:
    """A mistake would be made five times, and told late."""
    attempts: list[int] = []

    def answer(websocket: ServerConnection) -> None:
        attempts.append(1)
        say(websocket, "session.queue_done")
        if why == "init":
            hear(websocket)
            report(websocket, "invalid_payload", "$.payload.config.top_k: 0")
            heard_all(websocket)
        elif why == "stopped":
            websocket.close(1000, "cancelled")
        else:
            websocket.send("[]")

    errors: dict[str, Any] = {
        "init": (antiphon.ReportedError, "top_k"),
        "stopped": (antiphon.SessionClosedError, "cancelled"),
        "protocol": (antiphon.RemoteProtocolError, "object"),
        "page": (antiphon.CannotConnectError, "does not speak WebSocket"),
    }
    kind, text = errors[why]
    served = (
        peer(answer)
        if why != "page"
        else raw_peer(lambda tcp: attempts.append(tcp.send(b"what?\r\n\r\n")), opens=False)
    )
    with served as url, pytest.raises(kind, match=text):
        async with antiphon.connect(url, mode="audio"):
            pass
    assert len(attempts) == 1


async def test_after_it_was_created_nothing_is_tried_again() -> None:
    """A conversation would begin anew by itself, and the model know nothing of it."""
    attempts: list[int] = []

    def answer(websocket: ServerConnection) -> None:
        attempts.append(1)
        create(websocket)
        websocket.close(1013, "worker_lost")

    with peer(answer) as url:
        async with antiphon.connect(url, mode="audio") as session:
            with pytest.raises(antiphon.SessionClosedError, match="1013, worker_lost"):
                await anext(session)
    assert len(attempts) == 1


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mode": "audio", "retries": -1}, "retries is -1"),
        ({"mode": "audio", "retries": 1000}, "retries is 1000"),
        ({"mode": "audio", "instructions": "a", "init": antiphon.Init(instructions="b")}, "twice"),
        ({"mode": "chat", "instructions": "a"}, "system message"),
    ],
)
async def test_settings_that_do_not_go_together(settings: Any, why: str) -> None:
    """One of two settings would win, and nobody know which."""
    with pytest.raises(LocalProtocolError, match=why):
        antiphon.connect("ws://127.0.0.1:1", **settings)


@pytest.mark.parametrize(
    ("dialect", "mode"), [("legacy-chat", "audio"), ("duplex-v1", "chat"), ("morse", "audio")]
)
async def test_a_dialect_without_this_mode(dialect: Any, mode: Any) -> None:
    """A client would connect first, and learn it from the server's close code."""
    with pytest.raises(LocalProtocolError):
        async with antiphon.connect("ws://127.0.0.1:1", mode=mode, dialect=dialect):
            pass


def test_waits_grow_and_differ() -> None:
    """All clients of a server that restarts would come back at once, again and again."""
    assert [backoff_s(n, 0) for n in range(4)] == [0.001, 0.002, 0.004, 0.008]
    assert backoff_s(3, 0.5) == 0.006
    assert backoff_s(100, 0) == BACKOFF_S_MAX


# -- the package --------------------------------------------------------------------------------


def test_the_client_loads_no_server() -> None:
    """A client would wait for torch, and need the server's event loop."""
    names = {"torch", "transformers", "trio", "trio_websocket", "h11"}
    code = f"import sys, antiphon; print(sorted({names!r} & sys.modules.keys()))"
    command = [sys.executable, "-W", "error", "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


@pytest.mark.parametrize("name", ["antiphon", "protocol", "runtime"])
def test_its_types_are_told(name: str) -> None:
    """A type checker would see nothing but `Any` in a client that uses it (PEP 561)."""
    assert (ROOT / name / "py.typed").is_file()
    assert sorted(antiphon.__all__) == antiphon.__all__
    assert all(hasattr(antiphon, public) for public in antiphon.__all__)


def test_speech_is_given_as_samples() -> None:
    """Every program would begin with the same line of numpy, and some with a wrong one."""
    at = np.array([0.5, -0.25], "<f4")
    metrics = antiphon.Metrics(kv_cache_length=1)
    names = {"session_id": "s", "response_id": "r", "input_id": "i", "text": "a"}
    said = antiphon.Speech(**names, pcm=at.tobytes(), end_of_turn=True, metrics=metrics)
    for message in (said, antiphon.Delta(**names, pcm=at.tobytes())):
        assert (message.samples.dtype, message.samples.tolist()) == (np.float32, [0.5, -0.25])
    assert antiphon.Delta(**names).samples.shape == (0,)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dialect": "realtime", "model": "tiny"},
        {"dialect": "live", "model": "tiny", "init": antiphon.Init(instructions="")},
    ],
)
async def test_a_model_is_asked_for_once_and_where_it_can_be(arguments: Any) -> None:
    """A client would believe that it talks to another model."""
    with pytest.raises(LocalProtocolError, match="model"):
        async with antiphon.connect("ws://127.0.0.1:1", mode="audio", **arguments):
            pass


async def test_live_has_no_interruption(url: str) -> None:
    """Its server would refuse the message, after the client's sound was lost."""
    async with antiphon.connect(url, mode="audio", dialect="live", model="scripted") as session:
        await session.append(np.zeros(1600, np.float32))
        with pytest.raises(LocalProtocolError, match="Interrupt"):
            await session.interrupt()
        assert session.held_samples == 1600


# -- tools --------------------------------------------------------------------------------------


async def test_functions_are_called_and_answer_by_themselves(url: str) -> None:
    """A program had to write the messages of calls and results itself."""
    asked: list[dict[str, Any]] = []

    async def clock(**arguments: Any) -> str:
        """Tell the time."""
        asked.append(arguments)
        await anyio.sleep(0.01)
        return "nine"

    said, calls = list[str](), list[str]()
    tools = {"clock": clock, antiphon.tool("lamp", "Lights a lamp."): lambda: 1 / 0}
    async with antiphon.connect(url, mode="audio", tools=tools) as session:
        assert session.created.tools == "called"
        await session.append(SECOND)
        async for event in session:
            match event:
                case antiphon.ToolCalled(call=call):
                    calls.append(call.name)
                case Listen() | Speech():
                    said.append(getattr(event, "text", ""))
                    if said[-1] == "it is nine.":
                        break
                    await session.append(SECOND)
    assert calls == ["clock"]
    assert asked == [{}]


@pytest.mark.parametrize(
    ("returns", "output"),
    [
        (lambda: "nine", "nine"),
        (lambda: {"hour": 9, "zone": "Z\u00fcrich"}, '{"hour": 9, "zone": "Z\u00fcrich"}'),
        (lambda: None, "null"),
        (lambda: 1 / 0, "error: division by zero"),
        (lambda other: other, "error: "),
        (lambda: "x" * 10_000, "x" * 4_096),
        (object, "error: Object of type object is not JSON serializable"),
    ],
)
async def test_whatever_a_function_returns_is_a_result(returns: Any, output: str) -> None:
    """The session ended with the exception of a tool, or its call stayed open."""
    said: list[Any] = []

    class Raw:
        async def send(self, message: Any) -> None:
            said.append(message)

    call = antiphon.ToolCall(id="call_1", name="clock", arguments="{}")
    raw: Any = Raw()
    await answer_call(raw, call, returns)
    (made,) = said
    assert made.call_id == "call_1"
    assert made.output.startswith(output)
    assert len(made.output) <= 4_096


def test_tools_are_refused_where_there_is_no_message_for_them() -> None:
    """They were left out in silence."""
    for how in ({"mode": "chat"}, {"mode": "audio", "dialect": "live"}):
        with pytest.raises(LocalProtocolError, match="no tools in mode"):
            antiphon.connect("ws://127.0.0.1:1", tools={"clock": print}, **how)  # type: ignore[call-overload]
