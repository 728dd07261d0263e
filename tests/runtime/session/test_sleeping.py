"""Sessions that sleep without a slot; `python -m tests.soak.sleepers` has many more."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from random import Random

import anyio

from protocol.values.limits import REBUILD_WAIT_S
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.rerun.logic import replay
from runtime.model.backends.scripted import Call, ScriptedBackend
from tests.sessions.in_memory import Peer, World, append_frame, close_frame, on_virtual_time, world
from tests.sessions.resumed import heard_and_said

SESSIONS = 8
SLOTS = 2
SLEEPER_BYTES_MAX = 64 * 1024


async def fall_asleep(server: World, number: int) -> Peer:
    """Begin a session, speak for two seconds, and lose the connection."""
    words = f"you are number {number}"
    peer = await server.activate("audio", resumable=True, system_prompt=words)
    for _ in range(2):
        peer.send(append_frame())
        await anyio.sleep(1)
    peer.vanish()
    await anyio.sleep(40)
    return peer


async def wake(server: World, peer: Peer) -> list[str]:
    """Come back, speak for a second and leave; returns the frames of both connections."""
    again = server.come_back(*peer.way_back)
    again.send(append_frame())
    await again.heard("listen")
    again.send(close_frame())
    await again.over()
    assert again.events[0]["recording_id"] == peer.events[0]["recording_id"]
    return peer.frames[1:] + again.frames[1:]


def test_each_sleeper_comes_back_to_its_own_session(tmp_path: Path) -> None:
    """A slot is lost, or a client comes back to another one's conversation."""
    told = dict[int, list[str]]()
    names = dict[int, str]()

    async def body() -> None:
        async with world(ScriptedBackend(slots=SLOTS), record_to=tmp_path) as server:
            peers = [await fall_asleep(server, number) for number in range(SESSIONS)]
            assert (server.server.slots.free, server.server.sessions) == (SLOTS, SESSIONS)

            async def one(number: int) -> None:
                names[number] = peers[number].events[0]["recording_id"]
                told[number] = await wake(server, peers[number])

            async with anyio.create_task_group() as tasks:
                for number in Random(7).sample(range(SESSIONS), SESSIONS):
                    tasks.start_soon(one, number)
            await server.quiet()
            assert (server.server.slots.free, server.server.sessions) == (SLOTS, 0)

    on_virtual_time(body)
    assert len(set(names.values())) == SESSIONS
    for number, name in names.items():
        path = Store(tmp_path).path(name)
        heard, said = heard_and_said(path)
        assert f"you are number {number}" in heard[0]
        assert told[number] == said
        with LogReader(path) as log:
            assert replay(log).identical


def test_a_session_that_falls_asleep_amid_a_move_sleeps_on(tmp_path: Path) -> None:
    """Its wait for another slot went on, and ended it before its client came back."""

    async def body() -> None:
        slow = ScriptedBackend(release=Call(duration_s=2))
        async with world(slow, beside=ScriptedBackend, record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            peer.send(append_frame())
            await peer.heard("response.output.delta")
            peer.vanish()
            await anyio.sleep(29)
            server.server.workers.drain(0)
            await anyio.sleep(REBUILD_WAIT_S + 10)
            assert server.server.running(peer.events[0]["recording_id"]) is not None
            assert server.server.slots.leased == 0
            again = server.come_back(*peer.way_back)
            await again.greeted()
            await anyio.sleep(0.1)
            assert server.server.slots.leased == 1
            again.leave(1000)
            await server.quiet()

    on_virtual_time(body)


def test_a_sleeper_holds_no_sound(tmp_path: Path) -> None:
    """The last seconds of sound of each session are kept while it sleeps."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=SLOTS), record_to=tmp_path) as server:
            await fall_asleep(server, 0)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for number in range(SESSIONS):
                await fall_asleep(server, number)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
            assert taken / SESSIONS < SLEEPER_BYTES_MAX

    tracemalloc.start()
    try:
        on_virtual_time(body)
    finally:
        tracemalloc.stop()
