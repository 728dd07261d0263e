"""The remote backend against a server written from wire.md: as it should be, and as it strays."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import attrs
import pybase64
import pytest
from llama_omni import LlamaOmniBackend
from llama_omni_link import Address
from websockets.asyncio.server import ServerConnection, serve

from protocol.values.errors import LocalProtocolError
from protocol.values.messages import Closed, Created, Listen, QueueDone, ServerMessage, Speech
from protocol.values.model import UNIT_BYTES, Cut, DuplexConfig, Voice
from protocol.values.requests import Append, Init
from runtime.client.session import connect
from runtime.model.backends.base import Backend, BackendError, BackendSession
from runtime.net import listener
from runtime.net.http import make_app
from runtime.serve.gateway import Gateway
from runtime.session.server import Server
from runtime.settings.settings import Settings
from tests.llama_omni.fake import (
    HANG,
    LISTENS,
    SECOND,
    Body,
    FakeServer,
    Item,
    answers_of,
    audio,
    delta,
    done,
    opening,
    said,
    saying,
    session_on,
    sound,
    unit,
)
from tests.sessions.identities import CountedIdentities
from tests.sessions.in_memory import decode_here, pcm

# -- as it should be ------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_session_goes_as_the_protocol_says() -> None:
    """Nobody could talk to a model behind a llama.cpp-omni server."""
    fake = FakeServer()
    async with fake.running():
        backend: Backend = LlamaOmniBackend(fake.url)
        session: BackendSession = await backend.open(opening(), slot=0)
        assert session.opened.prompt_length == 68
        results = [await session.run(unit(index)) for index in range(4)]
        finalized = await session.finalize(3, interrupted=False)
        await session.release()
    assert list(map(said, results)) == [
        LISTENS,
        LISTENS,
        (False, "be brief 2, ", SECOND, False),
        (False, "be brief 3, ", SECOND // 2, True),
    ]
    assert results[2].pcm == sound(SECOND)
    assert [result.kv_length for result in results] == [100, 101, 102, 103]
    assert finalized.kv_length == 103
    assert fake.closes == ["remote_1"]
    assert fake.violations == []


@pytest.mark.anyio
async def test_all_of_an_opening_is_sent() -> None:
    """A client's voice, instructions or settings would be ignored."""
    fake = FakeServer()
    config = DuplexConfig(generate_audio=False, temperature=0.0, force_listen_count=0, top_k=7)
    voice = Voice(llm_pcm=sound(8000, 0.1), tts_pcm=sound(8000, 0.2))
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        session = await backend.open(opening("", voice=voice, config=config), slot=0)
        await session.release()
    assert fake.inits == [
        {
            "mode": "full_duplex",
            "use_tts": False,
            "voice": {
                "ref_audio": pybase64.b64encode(voice.llm_pcm).decode(),
                "tts_ref_audio": pybase64.b64encode(voice.tts_pcm).decode(),
            },
            "config": {
                "force_listen_count": 0,
                "max_new_speak_tokens_per_chunk": 20,
                "temperature": 0.0,
                "top_k": 7,
                "top_p": 0.8,
                "listen_prob_scale": 1.0,
                "length_penalty": 1.1,
            },
        }
    ]


@pytest.mark.anyio
async def test_all_of_a_unit_is_sent() -> None:
    """The model would not hear, see or obey what the client sent."""
    fake = FakeServer()
    async with session_on(fake) as session:
        seen = unit(0, frames=(b"first", b"second"), max_slice_nums=4)
        await session.run(seen)
        await session.run(unit(1, force_listen=True))
    sent = pybase64.b64encode(seen.pcm).decode()
    assert len(pybase64.b64decode(sent)) == UNIT_BYTES
    assert fake.appends == [
        {
            "audio": sent,
            "video_frames": [pybase64.b64encode(b"first").decode()],
            "max_slice_nums": 4,
            "force_listen": False,
        },
        {"audio": sent, "force_listen": True},
    ]


@pytest.mark.anyio
async def test_older_spellings_and_unknown_fields_are_taken() -> None:
    """An older or newer server would be refused for what does not matter."""
    old = pybase64.b64encode(sound(SECOND)).decode()
    metrics = {"kv_cache_length": 7, "prefill_ms": 1.5, "vision_tokens": 64, "new": {"a": [1]}}
    answer = [
        delta("text", delta="hel", input_id=None, server_send_ts=17.5),
        delta("text", text="lo", delta=None),
        delta("audio", delta=old, sample_rate=24_000),
        done("hello", full_text="hello", metrics=metrics),
    ]
    async with session_on(saying(answer)) as session:
        result = await session.run(unit(0))
    assert said(result) == (False, "hello", SECOND, False)
    assert (result.kv_length, result.costs.prefill_us, result.vision_tokens) == (7, 1500, 64)


@pytest.mark.anyio
async def test_a_done_may_bear_all_the_text() -> None:
    """What a server said at once, and not in pieces, would be lost."""
    async with session_on(saying([done("hello")])) as session:
        assert said(await session.run(unit(0))) == (False, "hello", 0, False)


@pytest.mark.anyio
async def test_the_servers_pings_are_answered() -> None:
    """A server that checks on its clients would drop a session that is well."""
    fake = FakeServer()
    async with session_on(fake) as session:
        assert fake.socket is not None
        await fake.socket.ping()
        await session.run(unit(0))
        await session.run(unit(1))
        assert fake.socket.pongs == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_another_implementation_of_websockets_is_understood() -> None:
    """Client and fake share a library: a mistake of it would look like agreement."""
    replies: list[list[Body]] = [
        [{"type": "session.created", "session_id": "a/b"}],
        [delta("text", text="hi"), audio(SECOND), done("hi")],
    ]
    heard: list[Body] = []

    async def talk(socket: ServerConnection) -> None:
        for reply in replies:
            heard.append(json.loads(await socket.recv()))
            for message in reply:
                await socket.send(json.dumps(message))
        await socket.ping()
        await socket.wait_closed()

    async with serve(talk, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        session = await LlamaOmniBackend(f"ws://127.0.0.1:{port}").open(opening(), slot=0)
        assert said(await session.run(unit(0))) == (False, "hi", SECOND, False)
        await session.release()
    assert [message["type"] for message in heard] == ["session.init", "input.append"]


# -- where an answer ends -------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_trails_a_listen_is_passed_over() -> None:
    """Each turn's last mark would answer a second that the model has not heard yet."""
    late = [delta("text", text="?", response_id="b"), done("?", response_id="b")]
    answers = (
        [delta("listen", response_id="a"), done(response_id="a")],
        [delta("listen", response_id="b")],
        [*late, delta("text", text="hi", response_id="c"), done("hi", response_id="c")],
    )
    async with session_on(saying(*answers)) as session:
        results = await answers_of(session, 3)
    assert list(map(said, results)) == [LISTENS, LISTENS, (False, "hi", 0, False)]


@pytest.mark.anyio
async def test_sound_is_played_out_a_second_a_unit() -> None:
    """A client would get more sound than time, or a turn cut off before its end."""
    answers = (
        [delta("text", text="one "), audio(SECOND // 2, 0.1), done()],
        [delta("text", text="two "), audio(SECOND // 4, 0.2), done()],
        [delta("text", text="three "), audio(3 * SECOND, 0.3), done()],
        [delta("listen")],
        [delta("listen")],
        [delta("listen")],
        [delta("listen")],
    )
    async with session_on(saying(*answers)) as session:
        results = await answers_of(session, 7)
    assert list(map(said, results)) == [
        (False, "one ", SECOND // 2, False),  # the first of a turn may be shorter
        (False, "two ", 0, False),  # amid it nothing is: kept for the next
        (False, "three ", SECOND, False),
        (False, "", SECOND, False),
        (False, "", SECOND, False),
        (False, "", SECOND // 4, True),
        LISTENS,
    ]
    joined = b"".join(result.pcm for result in results)
    parts = (sound(SECOND // 2, 0.1), sound(SECOND // 4, 0.2), sound(3 * SECOND, 0.3))
    assert joined == b"".join(parts)


@pytest.mark.anyio
async def test_late_sound_belongs_to_the_next_unit() -> None:
    """The end of each turn would be lost: the server's voice comes after its text."""
    answers = (
        [delta("text", text="hi"), done(), audio(100)],
        [delta("listen"), audio(50)],
        [delta("listen")],
    )
    async with session_on(saying(*answers)) as session:
        results = await answers_of(session, 3)
    spoken = [(False, "hi", 0, False), (False, "", 100, True), (False, "", 50, True)]
    assert list(map(said, results)) == spoken


@pytest.mark.anyio
async def test_a_forced_unit_listens_and_silences_the_voice() -> None:
    """A client that interrupts would go on hearing the voice."""
    answers = (
        [delta("text", text="long "), audio(5 * SECOND), done()],
        [delta("listen"), audio(SECOND)],
        [audio(SECOND), delta("listen")],
        [delta("text", text="new"), audio(10), done()],
    )
    async with session_on(saying(*answers)) as session:
        results = [await session.run(unit(0))]
        results.append(await session.run(unit(1, force_listen=True)))
        results += [await session.run(unit(index)) for index in (2, 3)]
    assert list(map(said, results)) == [
        (False, "long ", SECOND, False),
        LISTENS,
        LISTENS,
        (False, "new", 10, False),
    ]


@pytest.mark.anyio
async def test_a_forced_unit_listens_whatever_the_server_says() -> None:
    """A client that asked for silence would be talked to."""
    answer = [delta("text", text="but"), audio(10), done()]
    async with session_on(saying(answer)) as session:
        result = await session.run(unit(0, force_listen=True))
        assert said(result) == LISTENS
        assert said(await session.run(unit(1))) == LISTENS


@pytest.mark.anyio
async def test_nothing_follows_an_interrupted_unit() -> None:
    """What was interrupted would be heard a second later."""
    answers = ([delta("text", text="long "), audio(3 * SECOND), done()], [audio(9), done()])
    async with session_on(saying(*answers)) as session:
        session.interrupt(0)
        cut = await session.run(unit(0))
        await session.finalize(0, interrupted=True)
        assert said(cut) == (False, "long ", SECOND, False)  # for the log; the session withholds it
        assert said(await session.run(unit(1))) == LISTENS


# -- release and B8 -------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "told"), [(500, "expected HTTP 200 or 404, got HTTP 500"), (404, "")]
)
async def test_a_session_is_freed_where_its_close_fails(
    status: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's one slot would be lost for good."""
    caplog.set_level(logging.WARNING)
    fake = FakeServer(close_status=status)
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        for name in ("remote_1", "remote_2"):
            session = await backend.open(opening(), slot=0)
            await session.run(unit(0))
            await session.release()
            await fake.until(lambda: fake.active is None)
            assert fake.closes[-1] == name
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


@pytest.mark.anyio
async def test_a_session_is_released_once() -> None:
    """The next session on the slot could be closed in its place."""
    fake = FakeServer()
    async with session_on(fake) as session:
        await session.release()
        await session.release()
        with pytest.raises(BackendError, match=r"the session is over, it was released$"):
            await session.run(unit(0))
    assert fake.closes == ["remote_1"]


@pytest.mark.anyio
async def test_a_sessions_name_stays_in_its_place() -> None:
    """A server could have us post to any of its paths."""
    created = {"type": "session.created", "session_id": "a/../b?c"}
    fake = FakeServer(greeting=[created])
    async with session_on(fake):
        pass
    assert fake.closes == ["a%2F..%2Fb%3Fc"]


@pytest.mark.anyio
async def test_a_cancelled_unit_ends_its_session_and_frees_the_server() -> None:
    """The next unit would get the answer of the one that was given up."""
    fake = saying([HANG])
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        session = await backend.open(opening(), slot=0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run, unit(0))
            await fake.until(lambda: bool(fake.appends))
            tasks.cancel_scope.cancel()
        with pytest.raises(BackendError, match=r"the session is over, unit 0 did not end$"):
            await session.run(unit(1))
        await session.release()
        fake.answer = fake.listen_and_speak
        session = await backend.open(opening(), slot=0)
        await session.run(unit(0))
        await session.release()
    assert fake.closes == ["remote_1", "remote_2"]


@pytest.mark.anyio
async def test_a_cancelled_opening_frees_the_server() -> None:
    """A client that leaves early would leave the server busy."""
    fake = FakeServer(greeting=[])
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(backend.open, opening(), slot=0))
            await fake.until(lambda: bool(fake.inits))
            tasks.cancel_scope.cancel()
        fake.greeting = None
        await fake.until(lambda: fake.active is None)
        await (await backend.open(opening(), slot=0)).release()


@pytest.mark.anyio
async def test_nothing_of_a_session_reaches_the_next() -> None:
    """A caller would hear another (B8)."""
    answers: dict[str, list[list[Item]]] = {
        "ann": [[delta("text", text="for ann"), audio(9 * SECOND), done()]],
        "bob": [[delta("listen")], [delta("text", text="for bob"), audio(5), delta("listen")]],
    }
    fake = FakeServer(lambda index, init, body: answers[init["system_prompt"]][index])
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        first = await backend.open(opening("ann"), slot=0)
        first.interrupt(1)
        assert said(await first.run(unit(0))) == (False, "for ann", SECOND, False)
        with pytest.raises(LocalProtocolError, match="not released"):
            await backend.open(opening("bob"), slot=0)
        await first.release()
        second = await backend.open(opening("bob"), slot=0)
        results = await answers_of(second, 2)
        await second.release()
    assert list(map(said, results)) == [LISTENS, (False, "for bob", 5, True)]
    assert fake.inits[1]["system_prompt"] == "bob"


@pytest.mark.anyio
async def test_what_the_protocol_cannot_do_is_refused() -> None:
    """The session machine would go on with a state that it takes to be another."""
    async with session_on(FakeServer()) as session:
        with pytest.raises(BackendError, match="cannot be undone"):
            await session.rollback(0)
        with pytest.raises(BackendError, match="cannot be stopped at a given step"):
            await session.run(unit(0), Cut(stage="llm", step=3))
        assert said(await session.run(unit(0))) == LISTENS


def test_it_says_what_it_is() -> None:
    """The session machine would trust it with what it cannot do."""
    info = LlamaOmniBackend("wss://gpu.example").info
    assert (info.slots, info.can_rollback, info.deterministic) == (1, False, False)
    assert info.sliding_windows == ("off",)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ws://127.0.0.1:22500", ("127.0.0.1:22500", "", False)),
        ("wss://gpu.example/", ("gpu.example:443", "", True)),
        ("ws://[::1]:9/omni/", ("[::1]:9", "/omni", False)),
        ("ws://host", ("host:80", "", False)),
    ],
)
def test_addresses(url: str, expected: tuple[str, str, bool]) -> None:
    """A server could not be named."""
    address = Address.parse(url)
    assert (address.netloc, address.base, address.is_tls) == expected
    assert attrs.evolve(address) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:1",
        "http://a:1",
        "ws://",
        "ws://a:0",
        "ws://a:99999",
        "ws://u:p@a",
        "ws://a?b",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """A typing error would be found with the first session, and a password be kept in logs."""
    with pytest.raises(ValueError, match=r"^the remote's address is not like ws://"):
        LlamaOmniBackend(url)


# -- through the whole server ---------------------------------------------------------------------


@asynccontextmanager
async def served(backend: Backend) -> AsyncIterator[str]:
    """Run the gateway with a backend on a free port; yield its address."""
    settings = Settings(model="llama_omni")
    gateway = Gateway(settings)
    listeners = await listener.bind("127.0.0.1", 0)
    async with anyio.create_task_group() as tasks:
        app = make_app(gateway.readiness)
        serving = partial(listener.serve, listeners, on_websocket=gateway.on_websocket, app=app)
        addresses = await tasks.start(serving)
        gateway.server = Server(
            settings,
            backend,
            tasks=tasks,
            recorder=None,
            identities=CountedIdentities(),
            decode_media=decode_here,
        )
        yield f"ws://127.0.0.1:{addresses[0].port}"
        await gateway.server.wait_until_empty()
        tasks.cancel_scope.cancel()


async def converse(url: str, units: int) -> list[ServerMessage]:
    """Send a second whenever one was answered, close after the last; return what was heard."""
    heard: list[ServerMessage] = []
    async with connect(url, mode="audio") as session:
        async for message in session:
            heard.append(message)
            match message:
                case QueueDone():
                    await session.init(Init(instructions="be brief"))
                case Created() | Listen() | Speech(end_of_turn=True) | Speech(text="") if units:
                    await session.append(Append(pcm=pcm()))
                    units -= 1
                case Listen() if not units:
                    await session.close("enough")
    return heard


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.anyio
async def test_a_client_talks_to_the_remote_model() -> None:
    """The backend would fit its protocol, and not the server."""
    fake = FakeServer()
    async with fake.running(), served(LlamaOmniBackend(fake.url)) as url:
        for _ in range(2):
            heard = await converse(url, 5)
            assert isinstance(heard[-1], Closed)
            assert (heard[-1].reason, heard[-1].client_reason) == ("client", "enough")
            speech = [message for message in heard if isinstance(message, Speech)]
            assert "".join(message.text for message in speech) == "be brief 2, be brief 3, "
            assert sum(len(message.pcm) for message in speech) == 4 * SECOND * 3 // 2
    assert fake.closes == ["remote_1", "remote_2"]
    assert fake.violations == []


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.anyio
async def test_a_client_is_told_where_the_remote_strays() -> None:
    """A client would wait for an answer, and the next one for a slot."""
    fake = saying([{"type": "new.event"}])
    async with fake.running(), served(LlamaOmniBackend(fake.url)) as url:
        heard = await converse(url, 1)
        assert isinstance(heard[-1], Closed)
        assert heard[-1].reason == "backend_error"
        fake.answer = fake.listen_and_speak
        heard = await converse(url, 1)
        assert isinstance(heard[-1], Closed)
        assert heard[-1].client_reason == "enough"
