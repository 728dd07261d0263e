"""Turns of chat on the remote backend where its server is busy, gone, hangs or strays."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
import trio
from llama_omni import (
    ANSWER_S_MAX,
    PIECE_WAIT_S,
    PREFILL_WAIT_S,
    SPEECH_BYTES_MAX,
    LlamaOmniBackend,
)
from llama_omni_wire import ANSWER_CHARS_MAX, EVENT_SAMPLES_MAX
from trio.testing import MockClock

from protocol.values.model import SpeechConfig, Text
from runtime.model.backends.base import OPEN_PAUSE_S, OPEN_TRIES, BackendError, BackendGone
from tests.llama_omni.fake import (
    CLOSE,
    DROP,
    HANG,
    SECOND,
    SECRET,
    FakeServer,
    Item,
    answer,
    ask,
    audio,
    delta,
    failing,
    on_moved_clock,
    pass_time,
    saying,
    still_chats,
    text,
)

SPOKEN = SpeechConfig()
JPEG = b"\xff\xd8 a picture"

# -- a server that is busy, gone, or hangs --------------------------------------------------------


def test_a_server_that_still_frees_the_last_session_is_asked_again() -> None:
    """The turn after one that was cut would fail."""

    async def body(clock: MockClock) -> None:
        fake = FakeServer()
        async with fake.running(), trio.open_nursery() as nursery:

            async def free() -> None:
                await fake.until(lambda: fake.refused == 1)
                await pass_time(clock, OPEN_PAUSE_S)
                await fake.until(lambda: fake.refused == 2)
                fake.active = None
                await pass_time(clock, 2 * OPEN_PAUSE_S)

            fake.active = "another"
            nursery.start_soon(free)
            _, result = await answer(LlamaOmniBackend(fake.url), ask(Text(text="hi")))
            assert result.text == "hi "

    on_moved_clock(body)


def test_a_server_that_stays_busy_says_so() -> None:
    """Two Antiphons on one server: the second could not tell what is wrong."""

    async def body(clock: MockClock) -> None:
        fake = FakeServer()
        fake.active = "another"
        async with fake.running(), trio.open_nursery() as nursery:

            async def wait() -> None:
                for tries in range(1, OPEN_TRIES):
                    await fake.until(lambda tries=tries: fake.refused == tries)  # type: ignore[misc]
                    await pass_time(clock, OPEN_PAUSE_S * 2 ** (tries - 1))

            nursery.start_soon(wait)
            call = answer(LlamaOmniBackend(fake.url), ask())
            await failing(call, BackendError, "before session.created: it may be busy$")
            assert fake.refused == OPEN_TRIES

    on_moved_clock(body)


@pytest.mark.parametrize(
    ("greeting", "items", "wait_s", "expected"),
    [
        ([HANG], [], PREFILL_WAIT_S, "expected session.created in 100 s, got none$"),
        (None, [HANG], PREFILL_WAIT_S, "expected an answer in 100 s, got none$"),
        (None, [text("a"), HANG], PIECE_WAIT_S, "expected more of an answer in 60 s, got none$"),
        (
            None,
            [delta("listen"), delta("listen"), text(""), audio(9), HANG],
            PIECE_WAIT_S,
            "expected more of an answer in 60 s, got none$",
        ),
    ],
)
def test_a_server_that_hangs_is_given_up(
    greeting: Sequence[Item] | None, items: Sequence[Item], wait_s: float, expected: str
) -> None:
    """One turn would hold the only slot for ever."""

    async def body(clock: MockClock) -> None:
        fake = saying(items)
        fake.greeting = greeting
        async with fake.running(), trio.open_nursery() as nursery:

            async def wait() -> None:
                await fake.until(lambda: bool(fake.inits if greeting else fake.appends))
                await pass_time(clock, wait_s)
                await pass_time(clock, 10)  # nor does a server that hangs in its opening close

            nursery.start_soon(wait)
            backend = LlamaOmniBackend(fake.url)
            held = await backend.chat(slot=0)
            await failing(held.run(ask()), BackendError, f"^remote 127.*: {expected}")
            await held.release()
            nursery.cancel_scope.cancel()

    on_moved_clock(body)


def test_an_answer_that_never_ends_is_given_up() -> None:
    """A server that says a word a minute would hold the only slot for hours."""

    async def body(clock: MockClock) -> None:
        fake = saying([text("a"), HANG])
        async with fake.running(), trio.open_nursery() as nursery:
            held = await LlamaOmniBackend(fake.url).chat(slot=0)

            async def drip() -> None:
                await fake.until(lambda: bool(fake.appends))
                socket = fake.socket
                assert socket is not None
                for _ in range(int(ANSWER_S_MAX / 50)):
                    await pass_time(clock, 50.0)
                    await socket.say(delta("text", text="b"))

            nursery.start_soon(drip)
            expected = "expected an answer that ends in 1800 s, got none$"
            await failing(held.run(ask()), BackendError, expected)
            await held.release()
            nursery.cancel_scope.cancel()

    on_moved_clock(body)


@pytest.mark.anyio
async def test_a_server_that_is_gone_is_told() -> None:
    """A client would wait for a server that nobody runs."""
    async with FakeServer().running() as fake:
        pass
    backend = LlamaOmniBackend(fake.url)
    held = await backend.chat(slot=0)
    await failing(held.run(ask()), BackendGone, "cannot connect to .*: connection refused$")
    await held.release()


# -- a server that strays -------------------------------------------------------------------------

SOUNDS = -(-SPEECH_BYTES_MAX // (4 * EVENT_SAMPLES_MAX))
STRAYS: dict[str, tuple[Sequence[Item], str]] = {
    "unknown event": ([{"type": "response.text"}], "got the event response.text$"),
    "an error": ([{"type": "error", "error": SECRET}], "got the event error$"),
    "no JSON": ([f"{{{SECRET}"], "frame is not JSON$"),
    "a binary frame": ([SECRET.encode()], "binary frame, text frames only$"),
    "text of another type": ([delta("text", text=[SECRET])], r"\$.text: an array"),
    "bad base64": ([delta("audio", audio="a*bc")], r"\$.audio: .* not base64$"),
    "garbage amid an answer": ([text("a"), "{}"], r"\$.type: required field is"),
    "created again": (
        [{"type": "session.created", "session_id": "x"}],
        "got session.created once more$",
    ),
    "too much text": (
        [text("x" * 4096)] * (ANSWER_CHARS_MAX // 4096 + 1),
        f"at most {ANSWER_CHARS_MAX} characters of answer, got more$",
    ),
    "an end": ([CLOSE], "closed the connection with code 1000$"),
    "an end amid an answer": ([text("a"), DROP], "connection to the remote was lost$"),
    "an end that says why": (
        [text("a"), {"type": "session.closed", "reason": "prefill_failed"}, CLOSE],
        "the remote ended the session, reason prefill_failed$",
    ),
    "an end that says too much": (
        [{"type": "session.closed", "reason": SECRET}],
        "the remote ended the session, reason a text of 20 characters$",
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", STRAYS)
async def test_a_server_that_strays_costs_one_turn(name: str) -> None:
    """Nobody could tell what is wrong, or every turn after it would fail too."""
    items, expected = STRAYS[name]
    async with saying(items).running() as fake:
        backend = LlamaOmniBackend(fake.url)
        with pytest.raises(BackendError, match=f"^remote 127.*{expected}") as caught:
            await answer(backend, ask(speech=SPOKEN))
        assert type(caught.value) is BackendError  # the server is there, and is asked again
        assert SECRET not in str(caught.value)
        await still_chats(fake, backend)


@pytest.mark.anyio
async def test_the_sound_of_an_answer_is_bounded() -> None:
    """A server gone wild would fill the memory."""
    async with saying([audio(SECOND), audio(SECOND), audio(SECOND)]).running() as fake:
        backend = LlamaOmniBackend(fake.url)
        held: Any = await backend.chat(slot=0)
        held._speech_bytes = SPEECH_BYTES_MAX - 4 * SECOND
        await failing(held.run(ask(speech=SPOKEN)), BackendError, "at most 1800 s of speech")
        await held.release()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("greeting", "expected"),
    [
        ([delta("listen")], "expected session.created, got an answer$"),
        (["{}"], r"\$.type: required field is missing$"),
        (
            [{"type": "session.created", "session_id": "x", "mode": "full_duplex"}],
            "expected a session of mode turn_based, got one of full_duplex$",
        ),
    ],
)
async def test_an_opening_that_strays_is_told(greeting: Sequence[Item], expected: str) -> None:
    """A server without the mode would be asked what it cannot understand."""
    async with FakeServer(greeting=greeting).running() as fake:
        backend = LlamaOmniBackend(fake.url)
        await failing(answer(backend, ask()), BackendError, f"^remote 127.*: .*{expected}")
        assert fake.appends == []
        await still_chats(fake, backend)


@pytest.mark.anyio
async def test_a_close_that_fails_frees_the_turn(caplog: pytest.LogCaptureFixture) -> None:
    """The only slot would be lost because a server cannot close."""
    caplog.set_level(logging.WARNING)
    async with FakeServer(close_status=500).running() as fake:
        backend = LlamaOmniBackend(fake.url)
        for _ in range(2):
            call: Awaitable[object] = answer(backend, ask())
            await call
            await fake.until(lambda: fake.active is None)
    assert "expected HTTP 200 or 404, got HTTP 500" in caplog.text
