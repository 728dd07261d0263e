"""TLS on the port, over real loopback sockets: clients that speak it, and what else comes there."""

from __future__ import annotations

import logging
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio_websocket
import trustme
from trio.testing import MockClock, wait_all_tasks_blocked

from runtime.net.connection import WebSocketClosed
from runtime.net.limits import Counters
from runtime.net.listener import Address, WebSocketRequest
from runtime.net.tls import RELOAD_S, Certificate, CertificateError
from runtime.settings.settings import HANDSHAKE_S
from tests.network.transport import (
    SETTLE_S,
    UPGRADE,
    body_of,
    echo,
    exchange,
    limits,
    nothing_is_logged,  # noqa: F401
    on_pushed_clock,  # noqa: F401
    pass_time,
    pushed_clock,  # noqa: F401
    read_to_end,
    request_head,
    serving,
    tcp,
)

pytestmark = pytest.mark.anyio


class Files:
    """An operator's certificate and key, and who signed them."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.cert = folder / "cert.pem"
        self.key = folder / "key.pem"
        self.renew()

    def renew(self, *, cert: bool = True, key: bool = True) -> None:
        """Write a new pair, or one half of it."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        if cert:
            self.cert.write_bytes(b"".join(it.bytes() for it in issued.cert_chain_pems))
        if key:
            self.key.write_bytes(issued.private_key_pem.bytes())

    def client(self, *alpn: str) -> ssl.SSLContext:
        """Trust the authority."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@asynccontextmanager
async def connected(
    address: Address, context: ssl.SSLContext
) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    """Connect as a client of HTTPS does."""
    stream = trio.SSLStream(
        await tcp(address), context, server_hostname="localhost", https_compatible=True
    )
    try:
        await stream.do_handshake()
        yield stream
    finally:
        await trio.aclose_forcefully(stream.transport_stream)


async def served_number(address: Address, files: Files) -> int:
    """Say which certificate a new client is shown."""
    async with connected(address, files.client()) as stream:
        return int(stream.getpeercert()["serialNumber"], 16)


def url(address: Address) -> str:
    return f"wss://127.0.0.1:{address.port}/v1/realtime"


async def get(address: Address, files: Files, path: str) -> bytes:
    async with connected(address, files.client()) as stream:
        await stream.send_all(request_head(path, Connection="close"))
        answer = b""
        while data := await stream.receive_some(65536):
            answer += data
        return answer


# -- clients ------------------------------------------------------------------------------------


async def test_websockets_and_http_are_served_over_tls(files: Files) -> None:
    """Nobody could use the server from outside without a proxy in front of it."""
    seen: list[WebSocketRequest] = []

    async def look(request: WebSocketRequest) -> None:
        seen.append(request)
        await echo(request)

    async with serving(look, certificate=Certificate(files.cert, files.key)) as address:
        context = files.client()
        async with trio_websocket.open_websocket_url(
            url(address), context, max_message_size=1 << 23
        ) as ours:
            for text in ("hello", "你好", "x" * 3_000_000):
                await ours.send_message(text)
                assert await ours.get_message() == text
        assert body_of(await get(address, files, "/health")) == {"status": "alive"}
    assert [request.is_tls for request in seen] == [True]


async def test_what_is_rejected_over_tls_is_told_in_full(files: Files) -> None:
    """A client with a wrong path would see a broken connection, but only over TLS."""
    async with serving(certificate=Certificate(files.cert, files.key)) as address:
        async with connected(address, files.client()) as stream:
            await stream.send_all(request_head("/nowhere", **UPGRADE))
            answer = b""
            while data := await stream.receive_some(65536):
                answer += data
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert body_of(answer)["error"] == "not_found"


async def test_only_what_is_spoken_is_offered(files: Files) -> None:
    """A client would be brought to HTTP/2, or to a TLS that is broken, and then get nothing."""
    async with serving(certificate=Certificate(files.cert, files.key)) as address:
        async with connected(address, files.client("h2", "http/1.1")) as stream:
            assert stream.selected_alpn_protocol() == "http/1.1"
            assert stream.version() in ("TLSv1.2", "TLSv1.3")
        old = files.client()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError)):
            async with connected(address, old):
                pass


# -- no clients ---------------------------------------------------------------------------------


async def test_plain_http_is_told_that_tls_is_spoken(files: Files) -> None:
    """Whoever types http for https would see an empty reply, and look for the fault elsewhere."""
    async with serving(certificate=Certificate(files.cert, files.key)) as address:
        answer = await exchange(address, request_head("/health"))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert f"content-length: {len(body)}".encode() in head.lower()
        assert b"https://" in body
        assert body_of(await get(address, files, "/health")) == {"status": "alive"}


@pytest.mark.parametrize(
    "data",
    [b"\x00" * 300, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600), b"\x16" * 5000],
)
async def test_garbage_is_cut_off(files: Files, data: bytes) -> None:
    """A scanner would hold a socket, or bring a task down."""
    counters = Counters()
    certificate = Certificate(files.cert, files.key)
    async with serving(certificate=certificate, counters=counters) as address:
        await exchange(address, data)
        assert counters.refused == {"tls": 1}
        assert body_of(await get(address, files, "/health")) == {"status": "alive"}


@pytest.mark.parametrize(
    ("data", "cause"), [(b"", "silent"), (b"\x16\x03\x01\x02\x00", "tls")], ids=["silent", "half"]
)
async def test_a_handshake_that_is_never_finished_is_cut_off(
    files: Files, clock: MockClock, data: bytes, cause: str
) -> None:
    """A handful of clients that say half a hello would hold all the server's sockets."""
    counters = Counters()
    certificate = Certificate(files.cert, files.key)
    async with serving(certificate=certificate, counters=counters) as address:
        async with await tcp(address) as stream:
            await stream.send_all(data)
            await wait_all_tasks_blocked(SETTLE_S)
            clock.jump(HANDSHAKE_S)
            assert await read_to_end(stream) == b""
        await wait_all_tasks_blocked(SETTLE_S)
        assert (counters.refused, counters.connections) == ({cause: 1}, 0)


async def test_handshake_and_head_share_their_time(files: Files, clock: MockClock) -> None:
    """A client that is slow at both could hold a socket for twice as long."""
    async with (
        serving(certificate=Certificate(files.cert, files.key)) as address,
        await tcp(address) as raw,
    ):
        await wait_all_tasks_blocked(SETTLE_S)
        clock.jump(HANDSHAKE_S - 3)
        stream = trio.SSLStream(raw, files.client(), server_hostname="localhost")
        await stream.do_handshake()
        await stream.send_all(b"GET / HT")
        await wait_all_tasks_blocked(SETTLE_S)
        clock.jump(3)
        assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 408 ")


async def test_a_client_over_tls_that_takes_nothing_is_dropped(
    files: Files, clock: MockClock
) -> None:
    """The limit for those who stop reading would hold without TLS alone."""
    counters, told = Counters(), trio.Event()

    async def talk(request: WebSocketRequest) -> None:
        websocket = await request.accept()
        try:
            while True:
                await websocket.send("x" * 100_000)
        finally:
            told.set()

    certificate = Certificate(files.cert, files.key)
    async with (
        serving(talk, certificate=certificate, counters=counters) as address,
        connected(address, files.client()) as stream,
    ):
        await stream.send_all(request_head("/v1/realtime", **UPGRADE))
        while not told.is_set():
            await pass_time(clock, 1)
    assert counters.dropped == {"stalled": 1}


async def test_a_ping_never_falls_into_a_frame_over_tls(files: Files, clock: MockClock) -> None:
    """Two that send at once over one TLS stream raise, or garble it."""
    size = 6_000_000

    async def talk(request: WebSocketRequest) -> None:
        websocket = await request.accept()
        await websocket.send("x" * size)
        with suppress(WebSocketClosed):
            await websocket.receive()

    certificate = Certificate(files.cert, files.key)
    allowed = limits(ping_s=1, stall_s=1000)
    async with (
        serving(talk, certificate=certificate, allowed=allowed) as address,
        connected(address, files.client()) as stream,
    ):
        await stream.send_all(request_head("/v1/realtime", **UPGRADE))
        await wait_all_tasks_blocked(SETTLE_S)
        await pass_time(clock, 5)
        data = bytearray()
        while not data.endswith(b"\x89\x00"):
            data += await stream.receive_some(65536)
            if data.endswith(b"x"):
                clock.jump(0.1)
        frames = bytes(data).partition(b"\r\n\r\n")[2]
        assert frames == struct.pack("!BBQ", 0x81, 127, size) + b"x" * size + b"\x89\x00"


# -- certificates ---------------------------------------------------------------------------------


async def test_a_renewed_certificate_is_shown_to_new_clients(
    files: Files, clock: MockClock
) -> None:
    """A certificate that was renewed in time would still run out in the server's memory."""
    async with (
        serving(certificate=Certificate(files.cert, files.key)) as address,
        trio_websocket.open_websocket_url(url(address), files.client()) as ours,
    ):
        before = await served_number(address, files)
        files.renew()
        for _ in range(3):
            clock.jump(RELOAD_S)
            await trio.sleep(SETTLE_S)
            await wait_all_tasks_blocked(SETTLE_S)
        assert await served_number(address, files) != before
        await ours.send_message("still here")
        assert await ours.get_message() == "still here"


async def test_what_breaks_at_a_look_is_looked_at_again(
    files: Files,
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A machine that is short of threads for a moment would end every session."""
    certificate = Certificate(files.cert, files.key)
    async with serving(certificate=certificate) as address:
        before = await served_number(address, files)
        files.renew()

        def fail() -> None:
            raise RuntimeError("can't start new thread")

        for name in ("_state", "_load"):
            with monkeypatch.context() as short:
                short.setattr(certificate, name, fail)
                for _ in range(3):
                    clock.jump(RELOAD_S)
                    await trio.sleep(SETTLE_S)
                    await wait_all_tasks_blocked(SETTLE_S)
            assert await served_number(address, files) == before
        for _ in range(3):
            clock.jump(RELOAD_S)
            await trio.sleep(SETTLE_S)
            await wait_all_tasks_blocked(SETTLE_S)
        assert await served_number(address, files) != before
    told = [it for it in caplog.records if it.levelno >= logging.ERROR]
    assert {it.getMessage() for it in told} == {
        "the certificate cannot be looked at, the old one stays"
    }
    caplog.clear()


@pytest.mark.parametrize("half", ["cert", "key", "nonsense", "gone"])
async def test_a_broken_new_pair_leaves_the_old_one(
    files: Files, clock: MockClock, half: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A slip at renewal would take the server off the air, and say nothing."""
    async with serving(certificate=Certificate(files.cert, files.key)) as address:
        before = await served_number(address, files)
        if half == "nonsense":
            files.cert.write_text("nonsense")
        elif half == "gone":
            files.key.unlink()
        else:
            files.renew(cert=half == "cert", key=half == "key")
        for _ in range(4):
            clock.jump(RELOAD_S)
            await trio.sleep(SETTLE_S)
            await wait_all_tasks_blocked(SETTLE_S)
        assert await served_number(address, files) == before
    (record,) = [it for it in caplog.records if it.levelno >= logging.ERROR]
    assert record.name == "antiphon.tls"
    assert str(files.cert) in record.getMessage()
    caplog.clear()


@pytest.mark.parametrize(
    ("text", "why"), [("", "SSL"), ("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n", "SSL")]
)
def test_a_pair_that_cannot_be_used_is_told_in_one_line(files: Files, text: str, why: str) -> None:
    """An operator would see a stack of OpenSSL's, or be asked for a password by a daemon."""
    files.key.write_text(text)
    with pytest.raises(CertificateError) as told:
        Certificate(files.cert, files.key)
    assert str(files.key) in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_named(files: Files) -> None:
    """An operator would not know which of the two paths is wrong."""
    files.cert.unlink()
    with pytest.raises(CertificateError, match=r"cert\.pem.*No such file"):
        Certificate(files.cert, files.key)
