"""A session message by message: against the server's gateway, and against peers that misbehave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import attrs
import pytest
import trio
import trio_websocket

from protocol.values.errors import ErrorCode, RemoteProtocolError
from protocol.values.messages import (
    Closed,
    Created,
    ErrorReport,
    Listen,
    QueueDone,
    ServerMessage,
    Speech,
)
from protocol.values.requests import Append, Init
from runtime.client.errors import (
    AddressError,
    CannotConnectError,
    HandshakeRejectedError,
    SessionClosedError,
    SessionRefusedError,
)
from runtime.client.session import ClientSession, connect, endpoint
from runtime.model.backends.scripted import ScriptedBackend
from runtime.net import listener
from runtime.net.http import make_app
from runtime.serve.gateway import Gateway
from runtime.session.server import Server
from runtime.settings.settings import Settings
from tests.sessions.identities import CountedIdentities
from tests.sessions.in_memory import decode_here, pcm

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Trio only: the server runs in the same loop, and trio-websocket knows no other."""
    return "trio"


@asynccontextmanager
async def served(
    *, loaded: bool = True, modes: tuple[str, ...] | None = None, **settings: object
) -> AsyncIterator[str]:
    """Run the gateway with the scripted model on a free port; yield its address."""
    configured = Settings(model="scripted", **settings)  # type: ignore[arg-type]
    gateway = Gateway(configured)
    backend = ScriptedBackend(slots=1)
    backend.info = attrs.evolve(backend.info, modes=modes or backend.info.modes)
    listeners = await listener.bind("127.0.0.1", 0)
    async with anyio.create_task_group() as tasks:
        serve = partial(
            listener.serve,
            listeners,
            on_websocket=gateway.on_websocket,
            app=make_app(gateway.readiness),
        )
        addresses = await tasks.start(serve)
        if loaded:
            gateway.server = Server(
                configured,
                backend,
                tasks=tasks,
                recorder=None,
                identities=CountedIdentities(),
                decode_media=decode_here,
            )
        yield f"ws://127.0.0.1:{addresses[0].port}"
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def peer(
    answer: Callable[[trio_websocket.WebSocketConnection], Awaitable[None]],
) -> AsyncIterator[str]:
    """Run a WebSocket server that does what a test says; yield its address."""

    async def handle(request: trio_websocket.WebSocketRequest) -> None:
        with suppress(trio_websocket.ConnectionClosed):
            await answer(await request.accept())

    async with trio.open_nursery() as nursery:
        serve = partial(trio_websocket.serve_websocket, handle, "127.0.0.1", 0, ssl_context=None)
        server = await nursery.start(serve)
        yield f"ws://127.0.0.1:{server.port}"
        nursery.cancel_scope.cancel()


async def converse(session: ClientSession, units: int) -> list[ServerMessage]:
    """Send a second whenever one was answered, close after the last, and return what was heard."""
    heard: list[ServerMessage] = []
    sent = 0
    async for message in session:
        heard.append(message)
        match message:
            case QueueDone():
                await session.init(Init(instructions="be brief"))
            case Created() | Listen() | Speech() if sent < units:
                # A speaking unit may come as two messages: the next second is early then, no more.
                await session.append(Append(pcm=pcm()))
                sent += 1
            case Listen() if sent == units:
                await session.close("enough")
                sent += 1
    return heard


@pytest.mark.parametrize("dialect", ["realtime", "duplex-v1"])
async def test_a_session_is_held_to_its_end(dialect: str) -> None:
    """No conversation would work in this dialect."""
    async with served() as url, connect(url, mode="audio", dialect=dialect) as session:
        heard = await converse(session, 7)
    assert [type(message) for message in heard[:3]] == [QueueDone, Created, Listen]
    assert "this is second 3, " in [getattr(message, "text", "") for message in heard]
    assert isinstance(heard[-1], Closed)
    assert session.connection.closed_with is not None
    assert session.connection.closed_with[0] == 1000


async def test_a_session_that_ended_stays_ended() -> None:
    """A loop that asks once more would hang, or get an error for a good session."""
    async with served() as url, connect(url, mode="audio") as session:
        await session.close()
        assert [message async for message in session][-1:] in ([], [QueueDone()])
        assert await session.receive() is None
        assert not session.can_append


async def test_a_refusal_bears_its_code() -> None:
    """A client could not tell a full server, to be tried again, from a broken one."""
    async with served(queue_max=0) as url, connect(url, mode="audio") as first:
        assert await first.receive() == QueueDone()
        async with connect(url, mode="audio") as second:
            with pytest.raises(SessionRefusedError, match="worker_busy") as refused:
                await converse(second, 1)
    assert refused.value.code is ErrorCode.WORKER_BUSY


async def test_a_server_that_loads_says_so() -> None:
    """Whoever starts server and client together would see a bare close code."""
    async with served(loaded=False) as url, connect(url, mode="audio") as session:
        report = await session.receive()
        assert isinstance(report, ErrorReport)
        with pytest.raises(SessionRefusedError, match="the model is being loaded"):
            await session.receive()


async def test_a_rejected_handshake_says_why() -> None:
    """A wrong path or mode would be a bare `404` or `400`."""
    async with served(modes=("video", "audio")) as url:
        with pytest.raises(HandshakeRejectedError, match="WebSocket endpoints are") as rejected:
            async with connect(f"{url}/nowhere", mode="audio"):
                pass
        assert rejected.value.status == 404
        with pytest.raises(HandshakeRejectedError, match="allowed is video, audio"):
            async with connect(url, mode="chat"):
                pass


async def test_nobody_there() -> None:
    """A server that was forgotten to be started would be a traceback of three exceptions."""
    port = (await listener.bind("127.0.0.1", 0))[0]
    address = port.socket.getsockname()
    await port.aclose()
    with pytest.raises(CannotConnectError, match=r"to ws://127\.0\.0\.1:\d+: connection refused$"):
        async with connect(f"ws://127.0.0.1:{address[1]}", mode="audio"):
            pass


async def test_a_close_without_a_word_is_an_error() -> None:
    """A crashed server would look like a conversation that came to its end."""

    async def crash(websocket: trio_websocket.WebSocketConnection) -> None:
        await websocket.send_message('{"type":"session.queue_done"}')
        await websocket.aclose(1011, "out of memory")

    async with peer(crash) as url, connect(url, mode="audio") as session:
        assert await session.receive() == QueueDone()
        with pytest.raises(SessionClosedError, match="code 1011, out of memory") as closed:
            await session.receive()
        assert closed.value.code == 1011


async def test_a_server_that_breaks_the_protocol_is_told_apart() -> None:
    """A server's bug would be taken for a lost connection."""

    async def talk_nonsense(websocket: trio_websocket.WebSocketConnection) -> None:
        await websocket.send_message('{"type":"session.created","session_id":"x"}')
        await websocket.get_message()

    async with peer(talk_nonsense) as url, connect(url, mode="audio") as session:
        with pytest.raises(RemoteProtocolError):
            await session.receive()


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    """Callers would have to unpack exception groups to catch their own errors."""
    async with served() as url:
        with pytest.raises(KeyError, match="mine"):
            async with connect(url, mode="audio"):
                raise KeyError("mine")


async def test_tls_with_a_server_that_has_none() -> None:
    """A `wss` too many would be waited for, or be a traceback of the TLS library."""
    async with served() as url:
        with pytest.raises(CannotConnectError, match="no TLS"):
            async with connect(url.replace("ws:", "wss:"), mode="audio"):
                pass


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("ws://h:1", "ws://h:1/v1/realtime?mode=audio"),
        ("ws://h:1/", "ws://h:1/v1/realtime?mode=audio"),
        ("wss://h/v1/realtime?mode=audio", "wss://h/v1/realtime?mode=audio"),
        ("ws://h/other?a=b", "ws://h/other?a=b&mode=audio"),
        ("ws://[::1]:8006", "ws://[::1]:8006/v1/realtime?mode=audio"),
        ("127.0.0.1:8006", "ws://127.0.0.1:8006/v1/realtime?mode=audio"),
        ("my-host:8006/", "ws://my-host:8006/v1/realtime?mode=audio"),
        ("[::1]:8006", "ws://[::1]:8006/v1/realtime?mode=audio"),
        ("http://h:1/#talk", "ws://h:1/v1/realtime?mode=audio"),
        ("https://h", "wss://h/v1/realtime?mode=audio"),
    ],
)
def test_an_address_is_completed(url: str, address: str) -> None:
    """What `serve` prints, or what one types, would not connect."""
    assert endpoint(url, "audio") == address


def test_an_address_of_another_mode_is_refused() -> None:
    """The mode in the address would be dropped without a word."""
    url = "http://h:1/v1/realtime?mode=chat"
    assert endpoint(url, "chat") == "ws://h:1/v1/realtime?mode=chat"
    with pytest.raises(AddressError, match="asks for mode chat, not audio: leave the mode out"):
        endpoint(url, "audio")


@pytest.mark.parametrize(
    "url", ["", "localhost", "ftp://h", "http://", "h:1:2", "h:99999", "ws://h:x", "ws://[::1"]
)
def test_no_address(url: str) -> None:
    """A typing error would be a traceback, or a connection to somewhere else."""
    with pytest.raises(AddressError, match="is not the address"):
        endpoint(url, "audio")
