"""What a bad client does to a server, and that it does it to itself alone.

A real port, real sessions on a scripted model with one slot, and limits small enough to be reached.
Each attack is followed by a good client: it gets the slot and is answered.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.values.limits import FRAME_BYTES_MAX
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step
from runtime.net.http import HEADERS_MAX
from runtime.net.limits import Counters
from runtime.net.listener import Address, WebSocketRequest
from runtime.session.setup import SessionSpec
from runtime.settings.settings import HANDSHAKE_S, Settings
from tests.network.transport import (
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    SETTLE_S,
    TEXT,
    UPGRADE,
    RawClient,
    body_of,
    exchange,
    limits,
    nothing_is_logged,  # noqa: F401
    on_pushed_clock,  # noqa: F401
    pass_time,
    pushed_clock,  # noqa: F401
    raw_client,
    raw_frame,
    read_to_end,
    request_head,
    serving,
    still_serves,
    tcp,
)
from tests.sessions.in_memory import World, append_frame, init_frame, pcm, world

pytestmark = pytest.mark.anyio


@attrs.frozen(kw_only=True)
class Target:
    """A server under attack."""

    address: Address
    world: World
    counters: Counters

    async def slot_is_free(self) -> None:
        """Wait until no session is left, and nobody holds the slot."""
        await self.world.quiet()
        assert self.world.backend.held_slots == set()

    async def serves(self) -> None:
        """Be a good client, and be answered."""
        async with raw_client(self.address) as good:
            await begin(good)
            await good.send(TEXT, append_frame().encode())
            assert (await event(good))["type"] == "response.output.delta"


@asynccontextmanager
async def attacked(
    allowed: Settings | None = None, *, says: int = 0, mode: Any = "audio"
) -> AsyncIterator[Target]:
    """Run a server; `says` bytes of speech each second, or none."""
    speech = Speaks(text="words", pcm=pcm(says / 64_000)) if says else None
    backend = ScriptedBackend(lambda unit, seed: Step(speech=speech), slots=1)
    counters = Counters()
    allowed = allowed or limits(ping_s=0)
    async with world(backend, queue_max=8) as made:

        async def handle(request: WebSocketRequest) -> None:
            websocket = await request.accept()
            await made.server.handle(websocket, SessionSpec(mode=mode))

        async with serving(handle, allowed=allowed, counters=counters) as address:
            yield Target(address=address, world=made, counters=counters)
            await made.quiet()


async def event(raw: RawClient) -> dict[str, Any]:
    """Read the next event; pings are not answered."""
    while True:
        opcode, payload = await raw.frame()
        if opcode == TEXT:
            return dict(json.loads(payload))
        assert opcode in (PING, PONG), f"closed: {payload!r}"


async def begin(raw: RawClient) -> None:
    """Get the slot, which is free, and set the session up."""
    assert (await event(raw))["type"] == "session.queue_done"
    await raw.send(TEXT, init_frame().encode())
    assert (await event(raw))["type"] == "session.created"


# -- before there is a request --------------------------------------------------------------------


async def test_slow_handshakes(clock: MockClock) -> None:
    """Slow-loris: a hundred clients that never finish their first line would hold all places."""
    async with attacked(limits(connections_max=20, ping_s=0)) as target:
        slow = [await tcp(target.address) for _ in range(20)]
        for at in range(9):
            for stream in slow:
                await stream.send_all(b"GET /v1/realtime"[at : at + 1])
            clock.jump(1.0)
            await wait_all_tasks_blocked(SETTLE_S / 10)
        assert target.counters.connections == 20
        clock.jump(2.0)
        for stream in slow:
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 408 ")
            await stream.aclose()
        await target.serves()


@pytest.mark.parametrize(
    "headers",
    [b"x: y\r\n" * (HEADERS_MAX + 1), b"x: y\r\n" * 10_000, b"x: " + b"y" * 60_000],
    ids=["many", "endless", "long"],
)
async def test_header_floods(headers: bytes) -> None:
    """A request that is all headers would take memory and time before anybody knows who asks."""
    async with attacked() as target:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n"
        assert (await exchange(target.address, head)).startswith(b"HTTP/1.1 431 ")
        assert target.counters.refused == {"head": 1}
        await still_serves(target.address)


async def test_a_request_of_two_lengths_is_one_request() -> None:
    """Behind a proxy the second request in its body would be answered to somebody else."""
    async with attacked() as target:
        smuggled = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
        head = (
            b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        answer = await exchange(target.address, head + smuggled)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        await still_serves(target.address)


@pytest.mark.parametrize("which", ["full", "address"])
async def test_idle_connections_are_refused_by_the_bound(which: str) -> None:
    """Ten thousand sockets that say nothing would take the descriptors of those that talk."""
    bound = "connections_max" if which == "full" else "connections_per_address_max"
    status = b"503" if which == "full" else b"429"
    async with attacked(limits(**{bound: 5, "ping_s": 0})) as target:
        idle = [await tcp(target.address) for _ in range(5)]
        await wait_all_tasks_blocked(SETTLE_S)
        for _ in range(3):
            answer = await exchange(target.address, b"")
            assert answer.startswith(b"HTTP/1.1 " + status + b" ")
            assert b"retry-after: 5\r\n" in answer.lower()
            assert body_of(answer)["error"] == "too_many_connections"
        assert (target.counters.connections, target.counters.refused) == (5, {which: 3})
        await idle.pop().aclose()
        await wait_all_tasks_blocked(SETTLE_S)
        await still_serves(target.address)
        for stream in idle:
            await stream.aclose()


async def test_who_connects_too_often_is_told_to_wait(clock: MockClock) -> None:
    """One address could keep the server busy with handshakes, and never have two at once."""
    often = {"connections_per_address_max": 3, "connections_per_address_per_s_max": 0.5}
    async with attacked(limits(**often, ping_s=0)) as target:
        head = request_head(Connection="close")
        answers = [await exchange(target.address, head) for _ in range(5)]
        assert [answer[9:12] for answer in answers] == [b"200"] * 3 + [b"429"] * 2
        assert b"retry-after: 5\r\n" in answers[4].lower()
        assert body_of(answers[4])["error"] == "too_many_connections"
        assert target.counters.refused == {"rate": 2}
        clock.jump(2.0)
        await target.serves()


async def test_connections_that_say_nothing_are_counted(clock: MockClock) -> None:
    """An operator would not see who takes the places; nor may who just leaves be counted."""
    async with attacked() as target:
        async with await tcp(target.address):
            await wait_all_tasks_blocked(SETTLE_S)
        silent = [await tcp(target.address) for _ in range(3)]
        await wait_all_tasks_blocked(SETTLE_S)
        clock.jump(HANDSHAKE_S + 1)
        for stream in silent:
            assert await read_to_end(stream) == b""
            await stream.aclose()
        assert target.counters.refused == {"silent": 3}
        await still_serves(target.address)


async def test_a_flood_beyond_the_bound_is_cut_off_unheard(clock: MockClock) -> None:
    """The refusals would be the attack: each holds a socket for as long as its client likes."""
    async with attacked(limits(connections_max=1, ping_s=0)) as target:
        clock.rate = 0.0  # on a busy machine, the first refusals would be over before the last
        streams = [await tcp(target.address) for _ in range(200)]
        await wait_all_tasks_blocked(SETTLE_S)
        clock.rate = 1.0
        ends = [await read_now(stream) for stream in streams]
        assert sum(end.startswith(b"HTTP/1.1 503 ") for end in ends) == 64
        assert sum(end == b"cut off" for end in ends) == 200 - 64 - 1
        for stream in streams:
            await stream.aclose()


async def read_now(stream: trio.SocketStream) -> bytes:
    """Read what is there."""
    try:
        with trio.move_on_after(SETTLE_S):
            return bytes(await stream.receive_some(65536)) or b"cut off"
    except trio.BrokenResourceError:
        return b"cut off"
    return b""


async def test_garbage_behind_the_handshake() -> None:
    """What is pipelined behind an upgrade would be taken for the next request, or be kept."""
    async with attacked() as target:
        head = request_head("/v1/realtime", **UPGRADE)
        for garbage in (head * 50, b"\xff" * 300_000, b"GET / HTTP/1.1\r\n" * 5_000):
            async with await tcp(target.address) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(head + garbage)
                assert (await read_to_end(stream)).count(b"HTTP/1.1 ") <= 1
            await target.slot_is_free()
        await target.serves()


async def test_compression_is_never_agreed_on() -> None:
    """A bomb of a few kilobytes would be unpacked to gigabytes; and honest use costs ten times."""
    async with attacked() as target, await tcp(target.address) as stream:
        offer = {"Sec_WebSocket_Extensions": "permessage-deflate; client_max_window_bits, x-y"}
        await stream.send_all(request_head("/v1/realtime", **UPGRADE, **offer))
        answer = (await stream.receive_some(4096)).partition(b"\r\n\r\n")[0].lower()
        assert answer.startswith(b"http/1.1 101 ")
        assert b"extensions" not in answer
        await stream.send_all(b"\xc1" + raw_frame(TEXT, b"compressed")[1:])
        await read_to_end(stream)
        await target.slot_is_free()


# -- once it is open ------------------------------------------------------------------------------


async def test_a_frame_of_100_mb() -> None:
    """One client could take the server's memory; an honest one would not learn what is wrong."""
    async with attacked() as target:
        async with raw_client(target.address) as raw:
            await begin(raw)
            await raw.stream.send_all(struct.pack("!BBQ", 0x81, 0xFF, 100_000_000) + bytes(500_000))
            closed = await event(raw)
            assert closed["type"] == "session.closed", closed
            opcode, payload = await raw.frame()
            assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1009))
        await target.slot_is_free()
        await target.serves()


async def test_a_message_of_one_byte_fragments() -> None:
    """Headers of seven bytes for one of payload: the limit in bytes would be reached in an hour."""
    async with attacked() as target:
        async with raw_client(target.address) as raw:
            await begin(raw)
            await raw.send(TEXT, b"x", fin=False)
            for _ in range(20):
                await raw.stream.send_all(raw_frame(CONTINUATION, b"x", fin=False) * 100)
            head = struct.pack("!BBQ", CONTINUATION, 0xFF, FRAME_BYTES_MAX) + b"mask"
            await raw.stream.send_all(head)
            assert (await event(raw))["type"] == "session.closed"
            assert (await raw.frame())[1][:2] == struct.pack("!H", 1009)
        await target.slot_is_free()
        await target.serves()


async def test_a_flood_of_pings(clock: MockClock) -> None:
    """Each ping is answered: a client could make the server do nothing else."""
    async with attacked(limits(messages_per_s_max=10, ping_s=0)) as target:
        async with raw_client(target.address) as raw:
            await begin(raw)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(raw.stream.send_all, raw_frame(PING, b"?") * 2_000)
                pongs = 0
                for _ in range(20):
                    await wait_all_tasks_blocked(SETTLE_S / 10)
                    clock.jump(0.5)
                with trio.move_on_after(SETTLE_S):
                    while True:
                        assert await raw.frame() == (PONG, b"?")
                        pongs += 1
                nursery.cancel_scope.cancel()
            assert 60 <= pongs <= 150
            assert target.counters.pauses > 0
        await target.slot_is_free()


async def test_a_client_that_never_reads(clock: MockClock) -> None:
    """It would hold its slot for ever, and all that it does not read in the server's memory."""
    async with attacked(limits(stall_s=5, ping_s=0), says=64_000) as target:
        async with raw_client(target.address) as raw:
            await begin(raw)
            sound = raw_frame(TEXT, append_frame().encode())
            for _ in range(200):
                with suppress(trio.BrokenResourceError):
                    await raw.stream.send_all(sound)
                await pass_time(clock, 1)
                if target.counters.dropped:
                    break
        await target.slot_is_free()
        assert target.counters.dropped == {"stalled": 1}
        await target.serves()


async def test_a_client_that_never_answers_a_ping(clock: MockClock) -> None:
    """A client that hangs, or whose cable is pulled, would hold its slot for minutes."""
    async with attacked(limits(ping_s=2, pong_wait_s=6, stall_s=1000)) as target:
        async with raw_client(target.address) as raw:
            await begin(raw)
            await pass_time(clock, 7)
            await target.slot_is_free()
        assert target.counters.dropped == {"silent": 1}
        await target.serves()


async def test_half_open_connections(clock: MockClock) -> None:
    """Where a network drops all in silence, who is gone looks like one that thinks."""
    async with attacked(limits(ping_s=2, pong_wait_s=6, stall_s=1000)) as target:
        async with relayed(target.address) as (near, cut), raw_client(near) as raw:
            await begin(raw)
            cut.set()
            await pass_time(clock, 8)
            await target.slot_is_free()
        assert target.counters.dropped == {"silent": 1}
        await target.serves()


@asynccontextmanager
async def relayed(address: Address) -> AsyncIterator[tuple[Address, trio.Event]]:
    """Put a network between client and server, which loses everything once the event is set."""
    cut = trio.Event()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def pipe(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                if not cut.is_set():
                    await sink.send_all(data)
            if not cut.is_set():
                await sink.send_eof()

    async def relay(near: trio.SocketStream) -> None:
        async with await tcp(address) as far, trio.open_nursery() as nursery:
            nursery.start_soon(pipe, near, far)
            nursery.start_soon(pipe, far, near)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, relay, [listener])
        yield Address(*listener.socket.getsockname()), cut
        nursery.cancel_scope.cancel()
