"""A session whose server was killed goes on in the next one, from its log."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import anyio

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_RESTART
from protocol.values.model import Opened
from recorder.read.reader import LogReader, read
from recorder.repair import verify
from recorder.storage.store import Store
from recorder.write.writer import Recorder
from replay.story.inspect import inspect
from runtime.model.backends.scripted import ScriptedBackend
from runtime.session.crash_recovery import RecoveredSession, recover_sessions
from tests.golden.forking import APPEND, begin, log_of
from tests.golden.openai import LOUD, say, speak
from tests.sessions.in_memory import (
    Peer,
    append_frame,
    close_frame,
    init_frame,
    on_virtual_time,
    world,
)

UNITS = 6
CUTS = 16


def said(log: Path) -> list[str]:
    """The frames of a log."""
    return [str(it.fields["frame"]) for it in read(log) if it.kind == "tx"]


async def whole_life(folder: Path, mode: Any = "audio") -> tuple[Peer, Path]:
    """Have a conversation of `UNITS` seconds that nothing disturbs."""
    async with world(record_to=folder) as server:
        peer = await server.activate(mode, resumable=True)
        for _ in range(UNITS):
            peer.send(append_frame())
            await anyio.sleep(1)
        peer.send(close_frame())
        await peer.over()
    return peer, Store(folder).path(peer.way_back[0])


def cut(path: Path, folder: Path, size: int) -> Path:
    """The log as it was when its server was killed: its first bytes."""
    folder.mkdir()
    target = folder / path.name
    target.write_bytes(path.read_bytes()[:size])
    return target


async def taken_up(log: Path) -> int:
    """How many sessions of a log's folder another server goes on with."""
    async with world(record_to=log.parent, resumable=True) as server:
        found = await server.server.recover()
        await anyio.sleep(0.1)
    return found


def test_a_log_is_left_alone_that_cannot_be_gone_on_with(tmp_path: Path) -> None:
    """A session would go on with a past that is not its own."""

    async def body() -> None:
        _, path = await whole_life(tmp_path / "whole")
        whole = path.read_bytes()

        def log(name: str) -> Path:
            return cut(path, tmp_path / name, len(whole) // 2)

        assert await taken_up(log("good")) == 1
        changed = log("changed")
        data = bytearray(changed.read_bytes())
        data[len(data) // 2] ^= 1
        changed.write_bytes(data)
        assert await taken_up(changed) == 0
        assert changed.read_bytes() == data
        old = log("old")
        then = time.time() - 3600
        os.utime(old, (then, then))
        assert await taken_up(old) == 0
        with Recorder(inline=True) as recorder:
            other = {"fingerprint": {"model": "another"}, "resume_s": 600, "sessions_max": 9}
            assert recover_sessions(log("other").parent, recorder, **other) == []  # type: ignore[arg-type]

    (tmp_path / "whole").mkdir()
    on_virtual_time(body)


def test_two_servers_do_not_go_on_with_one_session(tmp_path: Path) -> None:
    """Both would write into one log, and answer one client each with half of it."""

    async def body() -> None:
        _, path = await whole_life(tmp_path / "whole")
        log = cut(path, tmp_path / "log", path.stat().st_size // 2)
        async with world(record_to=log.parent, resumable=True) as first:
            assert await first.server.recover() == 1
            assert await taken_up(log) == 0
            await anyio.sleep(0.1)
        assert verify(log).state == "open"
        assert await taken_up(log) == 1  # the first server left it

    (tmp_path / "whole").mkdir()
    on_virtual_time(body)


def test_a_server_that_is_stopped_leaves_its_sessions_to_the_next(tmp_path: Path) -> None:
    """An upgrade would end all conversations."""

    async def body() -> None:
        async with world(record_to=tmp_path, resumable=True) as server:
            peer = await server.activate("audio", resumable=True)
            other = await server.activate("audio")
            peer.send(append_frame())
            await anyio.sleep(1)
            server.server.begin_drain(5)
            await peer.over()
            assert peer.closed == (CLOSE_RESTART, "")
            assert other.closed is None
            other.send(close_frame())
            await other.over()
        log = Store(tmp_path).path(peer.way_back[0])
        async with world(record_to=tmp_path, resumable=True) as server:
            assert await server.server.recover() == 1
            again = server.come_back(*peer.way_back)
            again.send(append_frame(), close_frame())
            await again.over()
        assert peer.numbers + again.numbers == list(range(len(said(log))))
        with LogReader(log) as reader:
            assert [move.why for move in inspect(reader.head.fields, reader).moves] == ["restarted"]
        assert verify(log).state == "finished"

    on_virtual_time(body)


def test_a_conversation_gets_its_slot_before_those_who_waited(tmp_path: Path) -> None:
    """They would take it, and the conversation would end for want of one."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()

    async def body() -> None:
        async with world(ScriptedBackend(slots=1), record_to=before, resumable=True) as server:
            peer = await server.activate("audio", resumable=True)
            waiting = [server.connect("audio", resumable=True) for _ in range(4)]
            for each in waiting:
                await each.heard("session.queued")
            peer.send(append_frame())
            await anyio.sleep(1)
            shutil.copytree(before, after)  # as a server leaves it that is killed now
            server.server.begin_drain(5)
            for each in (peer, *waiting):
                await each.over()
        async with world(ScriptedBackend(slots=1), record_to=after, resumable=True) as server:
            assert await server.server.recover() == 5
            again = server.come_back(*peer.way_back)
            again.send(append_frame())
            await again.heard("response.output.delta")
            again.send(close_frame())
            await again.over()
            assert again.closed == (1000, "stopped")
            server.server.begin_drain(5)
            await anyio.sleep(1)
        assert verify(Store(after).path(peer.way_back[0])).state == "finished"

    on_virtual_time(body)


def test_the_client_of_a_fork_hears_nothing_of_its_parent(tmp_path: Path) -> None:
    """Who came back to a fork on another server got what the model had said to somebody else."""

    async def body() -> None:
        async with world(record_to=tmp_path, resumable=True) as server:
            parent = await begin(server, model="scripted")
            await speak(parent, APPEND, LOUD, LOUD)
            await anyio.sleep(1)
            fork = await begin(server, log_of(server, parent))
            await speak(fork, APPEND, LOUD)
            await anyio.sleep(1)
            server.server.begin_drain(5)
            await fork.over()
        for is_over in (False, True):
            async with world(record_to=tmp_path, resumable=True) as server:
                await server.server.recover()
                recording_id, token, _, mode = fork.way_back
                again = server.come_back(recording_id, token, -1, mode)
                await again.until(lambda: len(again.numbers) >= len(fork.numbers))  # noqa: B023
                assert again.numbers[: len(fork.numbers)] == fork.numbers
                assert fork.numbers[0] > 0
                if not is_over:
                    say(again, "session.close")
                    await again.over()
                    fork = again

    on_virtual_time(body)


def test_a_slot_that_was_on_its_way_back_is_released_and_not_lost() -> None:
    """A session that slept as its server died had a slot for ever, or moved from one it had not."""
    limits = ev.SessionLimits(
        session_s=600,
        init_wait_s=30,
        cleanup_wait_s=10,
        context_tokens=8192,
        rebuild_wait_s=10,
        detach_s=30,
        resume_s=600,
    )
    opened = ev.ConnectionOpened(
        recording_id="rec-1",
        created_ms=1,
        mode="audio",
        seed=1,
        recording="on",
        resume_hash="0" * 64,
        limits=limits,
    )
    session, effects = Session.open(opened)
    found = RecoveredSession(path=Path(), opened=opened, session=session, owner="", away_ns=0)
    found.stepped(opened, effects)

    def step(event: ev.Event) -> None:
        found.stepped(event, session.step(event))

    def left() -> list[type[Any]]:
        return [type(effect) for effect in found.outstanding.effects()]

    step(ev.SlotLeased(at_ns=1, lease=7, slot=0))
    step(ev.FrameReceived(at_ns=1, frame=init_frame()))
    step(ev.BackendOpened(at_ns=1, lease=7, opened=Opened(prompt_length=9)))
    assert [type(event) for event in found.losses(2)] == [ev.PeerGone, ev.LeaseRevoked]
    step(ev.PeerGone(at_ns=2, code=1006))
    assert [type(event) for event in found.losses(3)] == [ev.LeaseRevoked]
    detach = session.kind.timers.pending["detach"]
    step(ev.TimerFired(at_ns=3, name="detach", generation=detach))
    assert ef.Release in left()
    assert found.outstanding.lease == 7
    assert list(found.losses(4)) == []
    step(ev.BackendReleased(at_ns=4, lease=7))
    assert ef.Release not in left()
    assert found.outstanding.lease is None
    assert list(found.losses(5)) == []
