"""The remote backend where its server strays from wire.md: one clear error for each way."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import anyio
import numpy as np
import pybase64
import pytest
import trio
from llama_omni import (
    HEALTH_WAIT_S,
    OPEN_WAIT_S,
    QUIET_S,
    SECOND_BYTES,
    UNIT_WAIT_S,
    VOICE_BYTES_MAX,
    LlamaOmniBackend,
)
from llama_omni_link import CLOSE_WAIT_S, CONNECT_WAIT_S, MESSAGE_CHARS_MAX
from llama_omni_wire import EVENT_SAMPLES_MAX, TEXT_CHARS_MAX
from trio.testing import MockClock, wait_all_tasks_blocked

from runtime.model.backends.base import BackendError, BackendGone
from tests.llama_omni.fake import (
    CLOSE,
    DROP,
    HANG,
    LISTENS,
    SECOND,
    SECRET,
    FakeServer,
    Item,
    audio,
    delta,
    done,
    failing,
    on_moved_clock,
    opening,
    pass_time,
    said,
    saying,
    session_on,
    unit,
)

# -- in time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param([], LISTENS, id="nothing"),
        pytest.param([delta("text", text="hi ")], (False, "hi ", 0, False), id="text"),
        pytest.param([audio(SECOND)], (False, "", SECOND, False), id="sound"),
    ],
)
def test_an_answer_without_an_end_ends_with_the_pong(
    answer: Sequence[Item], expected: tuple[bool, str, int, bool]
) -> None:
    """The session would die whenever the model has nothing to say, or on an older server."""

    async def body(clock: MockClock) -> None:
        fake = saying(answer)
        async with session_on(fake) as session, trio.open_nursery() as nursery:
            nursery.start_soon(pass_time, clock, QUIET_S)
            assert said(await session.run(unit(0))) == expected
            assert said(await session.run(unit(1))) == LISTENS

    on_moved_clock(body)


def test_a_late_pong_ends_no_other_unit() -> None:
    """A unit that took long would have the next one cut off before its answer."""

    async def body(clock: MockClock) -> None:
        fake = saying([delta("listen")], [delta("text", text="hi"), done("hi")])
        async with session_on(fake) as session, trio.open_nursery() as nursery:

            async def wait() -> None:
                await fake.until(lambda: bool(fake.appends))
                await pass_time(clock, QUIET_S)
                await wait_all_tasks_blocked()  # it is pinged, and does not read yet
                fake.hold.set()

            fake.hold = anyio.Event()
            nursery.start_soon(wait)
            assert said(await session.run(unit(0))) == LISTENS
            assert said(await session.run(unit(1))) == (False, "hi", 0, False)

    on_moved_clock(body)


@pytest.mark.parametrize("answer", [[HANG], [delta("text", text=SECRET), HANG]])
def test_a_unit_without_an_answer_fails(answer: Sequence[Item]) -> None:
    """A server that hangs would hold its session, and the only slot, for ever."""

    async def body(clock: MockClock) -> None:
        fake = saying(answer)
        async with session_on(fake) as session, trio.open_nursery() as nursery:

            async def wait() -> None:
                await fake.until(lambda: bool(fake.appends))
                await pass_time(clock, QUIET_S)
                await pass_time(clock, UNIT_WAIT_S)

            nursery.start_soon(wait)
            expected = "^remote 127.*: expected an answer in 8 s, got none that ends$"
            await failing(session.run(unit(0)), BackendGone, expected)

    on_moved_clock(body)


def test_an_opening_without_an_answer_fails() -> None:
    """A client would wait for ever for a model that does not come."""

    async def body(clock: MockClock) -> None:
        fake = FakeServer(greeting=[HANG])
        async with fake.running(), trio.open_nursery() as nursery:

            async def wait() -> None:
                await fake.until(lambda: bool(fake.inits))
                await pass_time(clock, OPEN_WAIT_S)
                await pass_time(clock, 10)  # the server does not answer the close either

            nursery.start_soon(wait)
            call = LlamaOmniBackend(fake.url).open(opening(), slot=0)
            await failing(call, BackendGone, "expected session.created in 6 s, got none$")

    on_moved_clock(body)


def test_a_close_without_an_answer_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """A slot would be condemned because a server is slow to let go."""

    async def body(clock: MockClock) -> None:
        fake = FakeServer()
        async with fake.running(), trio.open_nursery() as nursery:
            session = await LlamaOmniBackend(fake.url).open(opening(), slot=0)
            fake.close_status = 0
            nursery.start_soon(pass_time, clock, CLOSE_WAIT_S)
            await session.release()
            await fake.until(lambda: fake.active is None)

    on_moved_clock(body)
    assert "expected an answer in 6 s, got none" in caplog.text


def test_a_silent_port_is_given_up() -> None:
    """A session would wait for ever for what is no server at all."""

    async def body(clock: MockClock) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_time, clock, CONNECT_WAIT_S)
            call = LlamaOmniBackend(f"ws://127.0.0.1:{port}").open(opening(), slot=0)
            await failing(call, BackendGone, "no WebSocket in 2 s$")
        await listeners[0].aclose()

    on_moved_clock(body)


def test_a_health_check_without_an_answer_fails() -> None:
    """A server would never start, nor say why."""

    async def body(clock: MockClock) -> None:
        async with FakeServer(health=None).running() as fake, trio.open_nursery() as nursery:
            nursery.start_soon(pass_time, clock, HEALTH_WAIT_S)
            call = LlamaOmniBackend(fake.url).check()
            await failing(call, BackendGone, "expected an answer in 5 s, got none$")

    on_moved_clock(body)


# -- as it strays ---------------------------------------------------------------------------------

EVENTS = "expected one of session.created, response.output.delta, response.done, session.closed"
DELTA = "expected response.output.delta as the protocol has it, got "
NOT_FINITE = pybase64.b64encode(np.full(9, np.nan, dtype="<f4").tobytes()).decode()

DRIFTS: dict[str, tuple[Item, str]] = {
    "unknown event": ({"type": "response.text"}, f"{EVENTS}, got the event response.text$"),
    "an event that is a payload": ({"type": SECRET}, f"{EVENTS}, got the event a text of 20 char"),
    "no event": ({"kind": "text"}, r"got a message that is none: \$.type: required field is miss"),
    "event of another type": ({"type": 7}, r"\$.type: an integer, a string is needed$"),
    "no JSON": (f"{{{SECRET}", "got a message that is none: frame is not JSON$"),
    "a list": (json.dumps([SECRET]), "got a message that is none: frame is not a JSON object$"),
    "a number that is none": ('{"type": NaN}', "frame is not JSON$"),
    "a binary frame": (SECRET.encode(), "binary frame, text frames only$"),
    "unknown kind": (delta("video"), "expected a delta of kind listen, text, audio, got one of k"),
    "no kind": ({"type": "response.output.delta"}, DELTA + r"\$.kind: required field is missing$"),
    "no text": (delta("text"), DELTA + r"\$.text: required field is missing$"),
    "text of another type": (delta("text", text=[SECRET]), r"\$.text: an array of 1 items, a str"),
    "old text of another type": (delta("text", delta={"x": SECRET}), r"\$.delta: an object, a st"),
    "text too long": (delta("text", text="x" * 4097), rf"allowed is 0 to {TEXT_CHARS_MAX}$"),
    "no audio": (delta("audio"), DELTA + r"\$.audio: required field is missing$"),
    "audio of another type": (delta("audio", audio=1.5), r"\$.audio: a number, a string is need"),
    "bad base64": (delta("audio", audio="a*bc"), r"\$.audio: .* that is not base64$"),
    "odd byte count": (delta("audio", audio="AAAA"), r"\$.audio: 3 bytes, a multiple of 4 is"),
    "not finite": (delta("audio", audio=NOT_FINITE), r"\$.audio: sample 0 is not finite$"),
    "too much sound": (audio(EVENT_SAMPLES_MAX + 1), f"at most {EVENT_SAMPLES_MAX} are allowed$"),
    "metrics of another type": (delta("listen", metrics=3), r"\$.metrics: an integer, an object"),
    "a length of another type": (
        done(metrics={"kv_cache_length": SECRET}),
        r"\$.metrics.kv_cache_length: a string of 20 characters, an integer is needed$",
    ),
    "done of another type": (done(SECRET) | {"text": {}}, r"\$.text: an object, a string is need"),
    "created twice": ({"type": "session.created", "session_id": "x"}, "got session.created once"),
    "a message too long": ('"' + "x" * MESSAGE_CHARS_MAX, "messages of at most 4194304 character"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", DRIFTS)
async def test_a_server_that_strays_is_told_apart(name: str) -> None:
    """Whoever runs another version of the server could not tell what is wrong with it."""
    item, expected = DRIFTS[name]
    fake = saying([item])
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        session = await backend.open(opening(), slot=0)
        with pytest.raises(BackendError, match=expected) as caught:
            await session.run(unit(0))
        assert re.match(r"remote 127.0.0.1:\d+: expected ", str(caught.value))
        assert SECRET not in str(caught.value)
        with pytest.raises(BackendError, match=r"the session is over"):
            await session.run(unit(1))
        await session.release()
        assert fake.closes == ["remote_1"]
        fake.answer = fake.listen_and_speak
        session = await backend.open(opening(), slot=0)
        assert said(await session.run(unit(0))) == LISTENS
        await session.release()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (delta("text", text=SECRET), "expected nothing between units, got a delta of kind text"),
        (delta("listen"), "expected nothing between units, got a delta of kind listen"),
        (done(), "expected nothing between units, got response.done"),
        ({"type": "session.created", "session_id": "x"}, "expected nothing between units, got"),
    ],
)
async def test_an_answer_for_nothing_is_an_error(extra: Item, expected: str) -> None:
    """Every answer after it would be taken for the one before."""
    async with session_on(saying([delta("listen"), extra])) as session:
        await session.run(unit(0))
        await failing(session.run(unit(1)), BackendError, f"^remote 127.*: {expected}")


@pytest.mark.anyio
async def test_a_second_listen_is_an_error() -> None:
    """As above, where it comes with the next unit."""
    listen = delta("listen", response_id="a")
    async with session_on(saying([listen], [listen])) as session:
        await session.run(unit(0))
        await failing(session.run(unit(1)), BackendError, "got a second listen for the unit")


@pytest.mark.anyio
async def test_what_waits_to_be_played_is_bounded() -> None:
    """A server gone wild would fill the memory."""
    thirty = audio(30 * SECOND)
    assert VOICE_BYTES_MAX == 60 * SECOND_BYTES
    async with session_on(saying([thirty, thirty, audio(1)])) as session:
        await failing(session.run(unit(0)), BackendError, "at most 60 s of sound to wait")


@pytest.mark.anyio
async def test_a_units_text_is_bounded() -> None:
    """As above, in pieces."""
    piece = delta("text", text="x" * TEXT_CHARS_MAX)
    async with session_on(saying([piece, piece])) as session:
        await failing(session.run(unit(0)), BackendError, "at most 4096 characters a unit")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([CLOSE], "the remote closed the connection with code 1000"),
        ([DROP], "the connection to the remote was lost"),
        ([delta("text", text="a"), DROP], "the connection to the remote was lost"),
        (
            [{"type": "session.closed", "reason": "prefill_failed"}, CLOSE],
            "the remote ended the session, reason prefill_failed",
        ),
        ([{"type": "session.closed", "reason": SECRET}], "the remote ended the session, reason a"),
        ([{"type": "session.closed"}], "the remote ended the session$"),
    ],
)
async def test_an_end_amid_a_unit_is_told(answer: Sequence[Item], expected: str) -> None:
    """A session would wait for a server that is gone, or nobody could tell why it is."""
    async with session_on(saying(answer)) as session:
        await failing(session.run(unit(0)), BackendGone, f"^remote 127.*: {expected}")


@pytest.mark.anyio
async def test_an_end_between_units_is_told() -> None:
    """As above, where it comes while nothing is asked."""
    closed = {"type": "session.closed", "reason": "timeout"}
    async with session_on(saying([delta("listen"), closed])) as session:
        await session.run(unit(0))
        expected = "^remote 127.*: the remote ended the session, reason timeout$"
        await failing(session.run(unit(1)), BackendGone, expected)


# -- in opening, and its health --------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("greeting", "kind", "expected"),
    [
        ([CLOSE], BackendGone, "with code 1000 before session.created: it may be busy$"),
        ([DROP], BackendGone, "was lost before session.created: it may be busy$"),
        ([delta("listen")], BackendError, "expected session.created, got an answer$"),
        (
            [{"type": "session.closed", "reason": "omni_init_failed"}],
            BackendGone,
            "expected session.created, got session.closed omni_init_failed$",
        ),
        ([{"type": "session.created"}], BackendError, r"\$.session_id: required field is missing"),
        (
            [{"type": "session.created", "session_id": "x", "mode": "turn_based"}],
            BackendError,
            "expected a session of mode full_duplex, got one of turn_based$",
        ),
        (["{}"], BackendError, r"\$.type: required field is missing$"),
    ],
)
async def test_an_opening_that_strays_is_told(
    greeting: Sequence[Item], kind: type[BackendError], expected: str
) -> None:
    """A client would be told that the server is full, and its operator nothing."""
    fake = FakeServer(greeting=greeting)
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        with pytest.raises(kind, match=f"^remote 127.0.0.1:.*{expected}"):
            await backend.open(opening(SECRET), slot=0)
        fake.greeting = None
        await fake.until(lambda: fake.active is None)
        await (await backend.open(opening(), slot=0)).release()


@pytest.mark.anyio
async def test_a_server_that_is_busy_says_so() -> None:
    """Two Antiphons on one server: the second could not tell what is wrong."""
    fake = FakeServer()
    async with session_on(fake):
        call = LlamaOmniBackend(fake.url).open(opening(), slot=0)
        await failing(call, BackendGone, "before session.created: it may be busy")
        assert fake.active == "remote_1"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "at /backend, got HTTP 404$"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "expected a WebSocket, got something else$"),
        (b"", "the connection to the remote was lost$"),
    ],
)
async def test_a_port_of_something_else_is_told(answer: bytes, expected: str) -> None:
    """A mistyped port would look like a broken model."""

    async def handle(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer)

    listeners = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listeners.extra(anyio.abc.SocketAttribute.local_port)
    async with listeners, anyio.create_task_group() as tasks:
        tasks.start_soon(listeners.serve, handle)
        with pytest.raises(BackendError, match=expected):
            await LlamaOmniBackend(f"ws://127.0.0.1:{port}").open(opening(), slot=0)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_port_of_nobody_is_told() -> None:
    """As above, where nothing listens."""
    async with FakeServer().running() as fake:
        pass
    backend = LlamaOmniBackend(fake.url)
    await failing(backend.check(), BackendGone, "cannot connect to .*: connection refused$")
    call = backend.open(opening(), slot=0)
    await failing(call, BackendGone, "cannot connect to .*: connection refused$")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ((200, '{"status": "ok", "more": 1}'), None),
        ((200, "fine"), None),
        ((200, '{"status": "loading"}'), "expected a server that is ready, got one that is loadi"),
        ((503, '{"error": {"message": "Loading model"}}'), "expected HTTP 200, got HTTP 503$"),
        ((0, ""), "expected HTTP to GET /health, got something else$"),
        ((200, "x" * 70_000), "expected at most 65536 bytes, got more$"),
    ],
)
async def test_health_is_checked(health: tuple[int, str], expected: str | None) -> None:
    """A server would say that it is ready, and refuse every session."""
    async with FakeServer(health=health).running() as fake:
        backend = LlamaOmniBackend(fake.url)
        if expected is None:
            await backend.check()
        else:
            await failing(backend.check(), BackendError, f"^remote 127.*: {expected}")
        assert fake.violations == []
