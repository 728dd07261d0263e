"""A worker or a gateway that dies, hangs, lies or reads nothing costs only what hangs on it."""

from __future__ import annotations

import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import attrs
import orjson
import pytest
import trustme
from anyio.abc import ByteStream

from protocol.values.model import UNIT_BYTES, Cut, DuplexConfig, Opening, Unit, UnitResult, Voice
from runtime.link import link, messages
from runtime.link import messages as ms
from runtime.link.backend import WorkerBackend, connect
from runtime.link.link import (
    TcpAddress,
    UnixAddress,
    Wire,
    WorkerAddress,
    greet_gateway,
    greet_worker,
    read_address,
)
from runtime.link.messages import LinkError, LinkRefused
from runtime.model.backends.base import BackendError, BackendGone, BackendRefused
from runtime.model.backends.scripted import Call, ScriptedBackend, ScriptedSession, Step
from runtime.worker import worker as worker_
from tests.network.linked import Pair, dial, listen, quick, until, worker_of

pytestmark = pytest.mark.anyio

OPENING = Opening(instructions="", voice=Voice(), config=DuplexConfig(), seed=7)
UNIT = Unit(index=0, pcm=bytes(UNIT_BYTES))
TOKEN = "a token of thirty-two characters"
ENDLESS = Step(generate_s=600.0, steps=60_000)
HEARTBEAT_S = 0.01


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats a hundred times as fast."""
    monkeypatch.setattr(link, "HEARTBEAT_S", HEARTBEAT_S)


async def never(*_: object) -> None:
    await anyio.sleep_forever()


@asynccontextmanager
async def fake_worker(
    after: Callable[[ByteStream, Wire], Awaitable[None]],
) -> AsyncIterator[WorkerBackend]:
    """A gateway's backend whose worker greets, and then does `after`."""
    async with worker_of(ScriptedBackend()) as pair:

        async def serve(stream: ByteStream) -> None:
            async with stream:
                wire = Wire(stream)
                await greet_gateway(wire, "", ScriptedBackend().info)
                await after(stream, wire)

        listener, address = await listen(pair.folder, "fake")
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            yield await connect(address, tasks=pair.tasks)
            tasks.cancel_scope.cancel()


async def calls_are_gone(backend: WorkerBackend, *reasons: str) -> None:
    """A call in flight and a later one: both are told that the worker is gone."""
    for _ in range(2):
        with pytest.raises(BackendGone) as caught:
            await backend.open(OPENING, slot=0)
        assert any(reason in str(caught.value) for reason in reasons), caught.value
    await backend.wait_gone()
    with pytest.raises(BackendGone):
        await backend.check()


@asynccontextmanager
async def standing_in(
    pair: Pair, serve: Callable[[ByteStream], Awaitable[None]]
) -> AsyncIterator[WorkerAddress]:
    """Listen in a worker's place, for one connection that ends by itself."""
    over = anyio.Event()

    async def serve_one(stream: ByteStream) -> None:
        async with stream:
            await serve(stream)
        over.set()

    listener, address = await listen(pair.folder, "fake")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve_one)
        yield address
        await over.wait()
        tasks.cancel_scope.cancel()


# -- a worker that is lost ------------------------------------------------------------------------


async def test_a_worker_that_leaves_takes_its_calls() -> None:
    """They would wait for ever."""

    async def leave(stream: ByteStream, _: Wire) -> None:
        await stream.receive()

    async with fake_worker(leave) as backend:
        await calls_are_gone(backend, "it closed the connection")


async def test_a_worker_is_lost_while_nothing_is_asked() -> None:
    """The next client would be the first to know."""

    async def leave(*_: object) -> None:
        return

    async with fake_worker(leave) as backend:
        await backend.wait_gone()
        await calls_are_gone(backend, "it closed the connection")


async def test_all_calls_in_flight_are_gone_at_once() -> None:
    """One session would know it, and the others wait."""
    told = []
    async with worker_of(ScriptedBackend(script=lambda *_: ENDLESS)) as pair:
        backend = await pair.connect()
        sessions = [await backend.open(OPENING, slot=slot) for slot in range(4)]

        async def run(slot: int) -> None:
            with pytest.raises(BackendGone):
                await sessions[slot].run(UNIT)
            told.append(slot)

        async with anyio.create_task_group() as tasks:
            for slot in range(4):
                tasks.start_soon(run, slot)
            await until(lambda: all(session._running for session in sessions))
            pair.worker.tasks.cancel_scope.cancel()
        assert sorted(told) == [0, 1, 2, 3]
        for session in sessions:
            session.interrupt(0)
            await session.release()


@pytest.mark.usefixtures("fast_beats")
async def test_a_worker_that_hangs_is_lost() -> None:
    """A process that was stopped keeps its sockets open."""
    async with fake_worker(never) as backend:
        await calls_are_gone(backend, "it was silent for")


@pytest.mark.usefixtures("fast_beats")
async def test_a_worker_that_reads_nothing_is_lost() -> None:
    """What it does not take would be kept."""

    async def talk(stream: ByteStream, _: Wire) -> None:
        outbox = messages.Outbox()
        while True:
            outbox.put(messages.URGENT, ms.Sender().encode(ms.Heartbeat()))
            await stream.send(b"".join(outbox.take()))
            await anyio.sleep(HEARTBEAT_S)

    async with fake_worker(talk) as backend:
        large = Opening(
            instructions="", voice=Voice(llm_pcm=bytes(8_000_000)), config=DuplexConfig(), seed=1
        )
        with pytest.raises(BackendGone, match="it took nothing for"):
            await backend.open(large, slot=0)
        await calls_are_gone(backend, "it took nothing for")


async def test_what_waits_for_a_worker_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is given up, it could take all memory."""
    async with fake_worker(never) as backend:
        backend._link._outbox._bytes_max = 1_000_000
        large = Opening(
            instructions="", voice=Voice(llm_pcm=bytes(900_000)), config=DuplexConfig(), seed=1
        )
        monkeypatch.setattr(ms, "SHARED_BYTES_MAX", 0)
        async with anyio.create_task_group() as tasks:

            async def ask(slot: int) -> None:
                with pytest.raises(BackendGone, match="it does not receive: "):
                    await backend.open(large, slot=slot)

            for slot in range(4):
                tasks.start_soon(ask, slot)
        assert backend._link.waiting_bytes < 2_000_000


def piece(stream: int, frame: bytes) -> bytes:
    return struct.pack("<II", stream, len(frame) | 1 << 31) + frame


GARBAGE = {
    "no frame": b"\xff" * 64,
    "an unknown message": piece(0, b"?{}"),
    "no JSON": piece(0, b"F{"),
    "a gateway's message": piece(2, b"".join(ms.Sender().encode(ms.Cancel(call=1, session=1)))),
    "no record": piece(2, b"E" + bytes(20)),
    "another answer": piece(
        2,
        b"".join(
            ms.Sender().encode(
                ms.Answer(call=1, session=1, event=ms.ev.BackendReleased(at_ns=0, lease=1))
            )
        ),
    ),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_worker_that_lies_is_lost(garbage: bytes) -> None:
    """A session would take what is no answer."""

    async def lie(stream: ByteStream, _: Wire) -> None:
        await stream.receive()
        await stream.send(garbage)
        await anyio.sleep_forever()

    async with fake_worker(lie) as backend:
        await calls_are_gone(backend, "it broke the protocol")


async def test_an_answer_about_another_unit_is_a_lie() -> None:
    """A session would send one unit's answer as another's."""

    class Mixed(ScriptedSession):
        async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
            return attrs.evolve(await super().run(unit, cut), index=unit.index + 1)

    class MixedBackend(ScriptedBackend):
        async def open(self, opening: Opening, *, slot: int) -> Mixed:
            session = await super().open(opening, slot=slot)
            return Mixed(self, opening, slot, session.opened)

    async with worker_of(MixedBackend(script=quick)) as pair:
        session = await (await pair.connect()).open(OPENING, slot=0)
        with pytest.raises(BackendGone, match="a UnitDone is not an answer here"):
            await session.run(UNIT)


async def test_a_backend_that_is_gone_ends_its_worker() -> None:
    """Its gateways would open sessions on a device that is lost."""
    async with worker_of(ScriptedBackend(opening=lambda _: Call(fault="gone"))) as pair:
        backend = await pair.connect()
        with pytest.raises(BackendGone):
            await backend.open(OPENING, slot=0)
        await backend.wait_gone()
        assert pair.worker.lost_because == "the script says so (open: gone)"


# -- a gateway that is lost -----------------------------------------------------------------------


async def test_sessions_of_a_lost_gateway_are_cut_and_released() -> None:
    """A worker would compute for a gateway that is not there, and run out of slots."""
    served = ScriptedBackend(script=lambda *_: ENDLESS)
    async with worker_of(served) as pair:
        backend, other = await pair.connect(), await pair.connect()
        sessions = [await backend.open(OPENING, slot=slot) for slot in range(2)]
        kept = await other.open(OPENING, slot=2)

        async def run(slot: int) -> None:
            with pytest.raises(BackendGone):
                await sessions[slot].run(UNIT)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, 0)
            await until(lambda: sessions[0]._running is not None)
            await anyio.sleep(0.1)
            await backend.aclose()
        await until(lambda: served.held_slots == {2})
        assert pair.worker.leased == 1
        await kept.release()
        assert not served.violations


async def test_a_call_that_hangs_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot would be lost for good, and one by one all of them."""
    monkeypatch.setattr(worker_, "CALL_WAIT_S", 0.05)
    served = ScriptedBackend(script=lambda *_: Step(fault="hang"))
    async with worker_of(served) as pair:
        backend, other = await pair.connect(), await pair.connect()
        session, kept = await backend.open(OPENING, slot=0), await other.open(OPENING, slot=1)

        async def run() -> None:
            with pytest.raises(BackendGone):
                await session.run(UNIT)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.sleep(0.02)
            await backend.aclose()
        await anyio.sleep(0.1)
        with pytest.raises(BackendGone, match="a call hangs in the worker"):
            await other.open(OPENING, slot=3)
        assert not pair.worker.lost_because
        await kept.release()
        await other.wait_gone()
        assert pair.worker.lost_because == "a call hangs in the model"


BAD = {name: data for name, data in GARBAGE.items() if name != "a gateway's message"} | {
    "another's session": piece(
        9,
        b"".join(
            ms.Sender().encode(
                ms.Ask(call=1, session=8, effect=ms.ef.StartFinalize(index=0, interrupted=False))
            )
        ),
    ),
    "no call of a model": piece(
        9,
        b"".join(
            ms.Sender().encode(ms.Ask(call=1, session=8, effect=ms.ef.Close(code=1, reason="")))
        ),
    ),
}


@pytest.mark.parametrize("garbage", BAD.values(), ids=BAD)
@pytest.mark.parametrize("greets", [True, False], ids=["greeted", "at once"])
async def test_a_worker_outlives_bad_gateways(garbage: bytes, greets: bool) -> None:
    """One would end the sessions of all others."""
    served = ScriptedBackend(script=quick)
    async with worker_of(served) as pair:
        good = await pair.connect()
        session = await good.open(OPENING, slot=0)
        stream = await dial(pair.address)
        if greets:
            await greet_worker(Wire(stream), "")
        with anyio.move_on_after(5):
            await stream.send(garbage)
            while True:
                try:
                    await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    break
        await stream.aclose()
        assert (await session.run(UNIT)).index == 0
        await session.release()
        assert not served.held_slots


@pytest.mark.usefixtures("fast_beats")
async def test_a_gateway_that_hangs_is_lost() -> None:
    """Its sessions would hold their slots for ever."""
    served = ScriptedBackend()
    async with worker_of(served) as pair:
        stream = await dial(pair.address)
        await greet_worker(Wire(stream), "")
        effect = ms.ef.OpenBackend(lease=1, opening=OPENING)
        frame = b"".join(ms.Sender().encode(ms.Ask(call=1, session=1, effect=effect)))
        await stream.send(piece(1, frame))
        await until(lambda: bool(served.held_slots))
        await until(lambda: not served.held_slots)
        await stream.aclose()


async def test_gateways_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take every descriptor of the worker."""
    monkeypatch.setattr("runtime.worker.worker.LINKS_MAX", 2)
    async with worker_of(ScriptedBackend()) as pair:
        gateways = [await pair.connect() for _ in range(2)]
        await (await pair.connect()).wait_gone()
        for gateway in gateways:
            await gateway.check()


async def test_connections_that_do_not_greet_keep_no_gateway_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest of them lose their places, and all lose them in time."""
    monkeypatch.setattr("runtime.worker.worker.GREETINGS_MAX", 4)
    async with worker_of(ScriptedBackend()) as pair:
        silent = [await dial(pair.address) for _ in range(8)]
        await (await pair.connect()).check()
        for stream in silent[:4]:
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        monkeypatch.setattr("runtime.worker.worker.HELLO_WAIT_S", 0.1)
        silent.append(await dial(pair.address))
        with pytest.raises(anyio.EndOfStream):
            await silent[-1].receive()
        for stream in silent:
            await stream.aclose()


async def test_a_health_check_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Every worker would log one every few seconds, and real ones would not be seen."""
    async with worker_of(ScriptedBackend()) as pair:
        await (await dial(pair.address)).aclose()
        stream = await dial(pair.address)
        await stream.send(bytes([255]) * 64)
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
        await stream.aclose()
    warnings = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("a connection is dropped: ")


# -- greetings ------------------------------------------------------------------------------------


async def test_a_token_lets_in() -> None:
    """Nothing could connect."""
    async with worker_of(ScriptedBackend(), token=TOKEN) as pair:
        await (await pair.connect(TOKEN)).check()


@pytest.mark.parametrize(("worker", "gateway_"), [(TOKEN, ""), (TOKEN, TOKEN + "x"), ("", TOKEN)])
async def test_another_token_is_refused(worker: str, gateway_: str) -> None:
    """Any process that reaches the address could use the model."""
    async with worker_of(ScriptedBackend(), token=worker) as pair:
        with pytest.raises(BackendRefused, match="it refuses: 'the token is wrong'"):
            await pair.connect(gateway_)


async def test_a_worker_must_know_the_token_too() -> None:
    """A process that took the worker's address would get the clients' voices."""

    async def pretend(stream: ByteStream) -> None:
        wire = Wire(stream)
        theirs = await wire.receive(link._Greeting)
        await wire.send(theirs)
        proof = await wire.receive(link._Proof)
        await wire.send(proof)
        with pytest.raises(LinkRefused):
            await wire.receive(link._Info)

    async with worker_of(ScriptedBackend()) as pair, standing_in(pair, pretend) as address:
        with pytest.raises(BackendRefused, match="the token is wrong"):
            await connect(address, token=TOKEN, tasks=pair.tasks)


async def test_the_token_never_crosses() -> None:
    """A network would have it after one greeting."""
    async with worker_of(ScriptedBackend(), token=TOKEN) as pair:
        stream = Tapped(await dial(pair.address))
        await greet_worker(Wire(stream), TOKEN)
        await stream.aclose()
        assert len(stream.seen) > 500
        assert TOKEN.encode() not in stream.seen


class Tapped(ByteStream):
    """A stream that keeps what crosses."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.seen = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._stream.receive(max_bytes)
        self.seen += data
        return data

    async def send(self, item: bytes) -> None:
        self.seen += item
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


@pytest.mark.parametrize(
    ("gateway_", "worker", "is_taken"),
    [
        ((1, 1), (1, 1), True),
        ((1, 1), (1, 0), True),
        ((1, 2), (1, 0), False),
        ((1, 0), (1, 1), False),
        ((2, 0), (1, 0), False),
        ((1, 0), (2, 0), False),
    ],
)
async def test_versions(gateway_: tuple[int, int], worker: tuple[int, int], is_taken: bool) -> None:
    """An end would be asked what it does not know, or an update stop the service."""

    async def serve(stream: ByteStream) -> None:
        wire = Wire(stream)
        theirs = await wire.receive(link._Greeting)
        await wire.send(link._Greeting(link=worker, software="x", nonce="n"))
        with suppress(LinkError):
            await link._check_version(wire, gateway=theirs.link, worker=worker)
            await wire.receive(link._Proof)

    async with (
        worker_of(ScriptedBackend()) as pair,
        standing_in(pair, serve) as address,
        await dial(address) as stream,
    ):
        wire = Wire(stream)
        await wire.send(link._Greeting(link=gateway_, software="x", nonce="n"))
        theirs = await wire.receive(link._Greeting)
        if is_taken:
            await link._check_version(wire, gateway=gateway_, worker=theirs.link)
        else:
            with pytest.raises(LinkRefused, match="a gateway of link version"):
                await link._check_version(wire, gateway=gateway_, worker=theirs.link)


async def test_a_newer_greeting_can_be_read() -> None:
    """A worker could not say that it is too old."""
    async with worker_of(ScriptedBackend()) as pair:
        stream = await dial(pair.address)
        greeting = {"link": [9, 0], "software": "later", "nonce": "n", "new": 1}
        await stream.send(piece(0, orjson.dumps(greeting)))
        wire = Wire(stream)
        await wire.receive(link._Greeting)
        with pytest.raises(LinkRefused, match="cannot use a worker of 1"):
            await wire.receive(link._Proof)
        await stream.aclose()


async def test_nothing_listens() -> None:
    """An operator would not learn which worker is missing."""
    async with worker_of(ScriptedBackend()) as pair:
        path = pair.folder / "none"
        with pytest.raises(BackendGone, match=f"worker unix:{path}: "):
            await connect(UnixAddress(path), tasks=pair.tasks)


# -- TLS ------------------------------------------------------------------------------------------


@asynccontextmanager
async def over_tls(authority: trustme.CA) -> AsyncIterator[tuple[Pair, TcpAddress]]:
    """A worker on a port of this machine, with a certificate of `authority`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    async with worker_of(ScriptedBackend(script=quick), token=TOKEN, tls=lambda: context) as pair:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(pair.worker.serve, listener)
            yield pair, TcpAddress("127.0.0.1", port)
            tasks.cancel_scope.cancel()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_a_session_over_tls() -> None:
    """A worker on another machine could not be used."""
    authority = trustme.CA()
    async with over_tls(authority) as (pair, address):
        backend = await connect(address, token=TOKEN, tls=trusting(authority), tasks=pair.tasks)
        session = await backend.open(OPENING, slot=0)
        assert (await session.run(UNIT)).index == 0
        await session.release()
        await backend.aclose()


async def test_another_certificate_is_refused() -> None:
    """Clients' voices would go to whatever answers there."""
    async with over_tls(trustme.CA()) as (pair, address):
        with pytest.raises(BackendError, match="CERTIFICATE_VERIFY_FAILED"):
            await connect(address, token=TOKEN, tls=trusting(trustme.CA()), tasks=pair.tasks)


async def test_plain_words_to_a_tls_worker_are_dropped() -> None:
    """A gateway would wait for a greeting that cannot come."""
    async with over_tls(trustme.CA()) as (pair, address):
        with pytest.raises(BackendGone):
            await connect(address, token=TOKEN, tasks=pair.tasks)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["unix:/run/a", "tcp:127.0.0.1:70", "tcp:[::1]:70", "tcp:worker-1.svc:70"]
)
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    """Errors would name another worker."""
    assert str(read_address(text)) == text


@pytest.mark.parametrize("text", ["", "unix:", "/run/a", "tcp:host", "tcp::7", "udp:a:7", "x" * 99])
def test_what_is_no_address_is_refused(text: str) -> None:
    """A server would start, and wait for a worker that cannot be."""
    with pytest.raises(ValueError, match="is not an address: unix:PATH or tcp:HOST:PORT"):
        read_address(text)
