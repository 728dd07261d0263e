"""The driver on both event loops: what it does when the world around a session breaks."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import anyio
import pytest

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.model import Unit
from recorder.format.format import Record
from recorder.read.reader import LogReader, read
from recorder.repair import verify
from recorder.write.files import Disk
from recorder.write.log import SessionLog
from replay.rerun.logic import replay
from runtime.model.backends.scripted import Call, ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_chat import tone
from runtime.net.limits import LARGE_BYTES_MIN
from runtime.session import driver
from tests.golden.stage import picture
from tests.runtime.session.test_crash_recovery import taken_up
from tests.sessions.in_memory import (
    append_frame,
    base64,
    close_frame,
    init_frame,
    on_virtual_time,
    world,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops."""
    return str(request.param)


def logs(folder: Path) -> list[Path]:
    """The logs in a folder, oldest first."""
    return sorted(folder.iterdir())


def quick(unit: Unit, seed: int) -> Step:
    """Listen and speak in turn, in no time."""
    done = Call()
    if unit.index % 2 == 0:
        return Step(prefill_s=0, generate_s=0, finalize=done)
    pcm = tone(unit.index, seed, samples=6_000)
    speech = Speaks(text="word", pcm=pcm, end_of_turn=True)
    return Step(speech=speech, prefill_s=0, generate_s=0, finalize=done)


class FullDisk(Disk):
    """A disk that is full after a number of bytes."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write what there is room for; then say that there is none."""
        if self.room_bytes <= 0:
            raise OSError(errno.ENOSPC, "no space left on device")
        written = super().write(descriptor, data[: self.room_bytes])
        self.room_bytes -= written
        return written


async def test_a_session_runs_whole(tmp_path: Path) -> None:
    """The server works on one event loop and not on the other."""
    async with world(ScriptedBackend(quick), record_to=tmp_path, threaded=True) as server:
        peer = await server.activate()
        peer.send(append_frame(4))
        await peer.heard("listen", 2)
        await peer.heard("audio", 2)
        peer.send(close_frame())
        await peer.over()
        await server.quiet()
    assert peer.kinds[2:] == ["listen", "text", "audio"] * 2 + ["session.closed"]
    (path,) = logs(tmp_path)
    assert verify(path).state == "finished"
    with LogReader(path) as reader:
        assert replay(reader).identical


async def test_who_sends_more_than_is_recorded_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client ends its own recording by what it sends, and talks on."""
    large = append_frame(padding="x" * LARGE_BYTES_MIN)
    async with world(ScriptedBackend(quick), record_to=tmp_path) as server:
        peer = await server.activate()
        peer.send(large)
        await peer.heard("listen")
        monkeypatch.setattr(SessionLog, "is_over_its_bound", True)
        peer.send(append_frame())
        await peer.heard("audio")
        peer.send(large, append_frame())
        await peer.over()
        await server.quiet()
    assert peer.events[-1]["reason"] == "flooded"
    assert peer.closed == (1008, "more was sent than can be recorded")
    (path,) = logs(tmp_path)
    assert verify(path).state == "finished"
    with LogReader(path) as reader:
        assert replay(reader).identical
    names = [record.fields.get("type") for record in read(path) if isinstance(record, Record)]
    assert names.count("FrameReceived") == 3
    assert names.count("Flooded") == 1


async def test_pieces_that_come_together_are_recorded_one_by_one(tmp_path: Path) -> None:
    """What a busy core takes in one go would be another session in its recording."""
    pieces = [append_frame(audio=base64(tone(at, 1, samples=320))) for at in range(20)]
    odd = json.dumps(json.loads(pieces[0]) | {"note": "hello, " * 700})
    sent = [*pieces[:7], odd, *pieces[7:], '{"type":"x"}', *pieces, append_frame(), *pieces]
    async with world(ScriptedBackend(quick), record_to=tmp_path, threaded=True) as server:
        peer = await server.activate()
        for at in range(0, len(sent), 9):
            peer.send(*sent[at : at + 9])
            await anyio.sleep(0.01)
        await peer.heard("listen")
        peer.send(*pieces[:3], close_frame(), *pieces[3:])
        await peer.over()
        await server.quiet()
    (path,) = logs(tmp_path)
    assert verify(path).state == "finished"
    records = [it for it in read(path) if isinstance(it, Record) and it.kind == "rx"]
    assert [it.fields["frame"] for it in records][1 : len(sent) + 1] == sent
    with LogReader(path) as reader:
        assert replay(reader).identical


async def test_a_bug_amid_pieces_that_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What led to it would not be in the log."""

    def fail(*_: object) -> None:
        raise ValueError("a bug")

    piece = append_frame(audio=base64(tone(0, 1, samples=320)))
    async with world(ScriptedBackend(quick), record_to=tmp_path) as server:
        peer = await server.activate()
        peer.send(piece, piece)
        await anyio.sleep(0.01)
        monkeypatch.setattr(Session, "keep", fail)
        peer.send(piece, piece, piece)
        await peer.over()
        await server.quiet()
    (path,) = logs(tmp_path)
    frames = [it.fields["frame"] for it in read(path) if isinstance(it, Record) and it.kind == "rx"]
    assert frames[1:] == [piece] * 5


async def test_a_full_disk_is_said_and_the_session_goes_on(tmp_path: Path) -> None:
    """A full disk ends every call, or nobody hears of it."""
    disk = FullDisk(6_000)
    backend = ScriptedBackend(quick)
    async with world(backend, record_to=tmp_path, disk=disk, threaded=True) as server:
        peer = await server.activate()
        assert peer.events[1]["recording"] == "on"
        for count in range(1, 5):
            peer.send(append_frame(2))
            await peer.heard("audio", count)
        assert peer.events[-1]["metrics"]["recording"] == "failed"
        peer.send(close_frame())
        await peer.over()
        assert peer.closed == (1000, "stopped")
    (path,) = logs(tmp_path)
    assert verify(path).state == "open"
    with LogReader(path) as reader:
        assert replay(reader).divergence is None


async def test_a_session_whose_log_failed_does_not_come_back(tmp_path: Path) -> None:
    """It would take a slot, and have "restarted" written behind its end, for a client long gone."""
    disk, backend = FullDisk(12_000), ScriptedBackend(quick)
    async with world(backend, record_to=tmp_path, disk=disk, threaded=True) as server:
        peer = await server.activate(resumable=True)
        for count in range(1, 5):
            peer.send(append_frame(2))
            await peer.heard("audio", count)
        assert peer.events[-1]["metrics"]["recording"] == "failed"
        peer.vanish()
        await server.quiet()
    (path,) = logs(tmp_path)
    before = path.read_bytes()
    assert await taken_up(path) == 0
    assert path.read_bytes() == before
    path.chmod(0o600)
    assert await taken_up(path) == 1, "but for the mark it would"


async def test_a_full_disk_ends_the_session_where_that_is_asked_for(tmp_path: Path) -> None:
    """An operator who must record everything serves sessions that are not recorded."""
    disk = FullDisk(6_000)
    settings = {"record_to": tmp_path, "disk": disk, "threaded": True}
    backend = ScriptedBackend(quick)
    async with world(backend, on_recording_failure="close", **settings) as server:
        peer = await server.activate()
        peer.send(append_frame(2))
        peer.send(append_frame(2))
        await peer.over()
        assert peer.events[-1]["reason"] == "backend_error"
        assert peer.closed == (1011, "backend_error")


async def test_a_bug_in_a_session_costs_that_session_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One bad message brings the server down, or leaks a slot (B5)."""
    step = Session.step

    def broken(self: Session, event: ev.Event) -> tuple[object, ...]:
        if isinstance(event, ev.FrameReceived) and event.frame == "boom":
            raise RuntimeError("a bug")
        return step(self, event)

    monkeypatch.setattr(Session, "step", broken)
    backend = ScriptedBackend(quick, slots=2)
    async with world(backend, record_to=tmp_path, threaded=True) as server:
        healthy, sick = await server.activate(), await server.activate()
        sick.send("boom")
        await sick.over()
        assert sick.aborted
        healthy.send(append_frame(2))
        await healthy.heard("audio")
        await server.activate()
    ends = [list(read(path))[-1] for path in logs(tmp_path)]
    assert [end.kind for end in ends] == ["fin"] * 3
    assert [end.fields["reason"] for end in ends].count("broken_off") == 1


def test_a_connection_that_breaks_while_the_model_opens_lends_no_unclean_slot() -> None:
    """The next client gets a slot on which the last one's model is still being opened (B4)."""

    async def body() -> None:
        backend = ScriptedBackend(slots=1, opening=lambda _: Call(duration_s=5))
        async with world(backend) as server:
            broken = server.connect()
            await broken.heard("session.queue_done")
            broken.send(init_frame())
            await anyio.sleep(1)
            broken.break_down()
            await broken.over()
            peer = await server.activate()
            assert anyio.current_time() >= 10
            peer.send(close_frame())
            await peer.over()
        assert not backend.violations

    on_virtual_time(body)


def test_a_release_that_hangs_condemns_its_slot_and_tells_who_waits() -> None:
    """A client waits for a slot that never comes, and the server says that it is ready."""

    async def body() -> None:
        backend = ScriptedBackend(slots=1, release=Call(fault="hang"))
        async with world(backend) as server:
            peer = await server.activate()
            waiting = server.connect()
            await waiting.heard("session.queued")
            peer.vanish()
            await waiting.over()
            assert anyio.current_time() < 12
            assert waiting.closed == (1013, "service_unavailable")
            assert server.server.readiness == "condemned"

    on_virtual_time(body)


def test_a_flood_is_bounded() -> None:
    """A client fills the server's memory with frames faster than they can be decoded."""

    async def body() -> None:
        async with world() as server:
            peer = await server.activate()
            for _ in range(200):
                peer.send(append_frame(10))
            await anyio.sleep(60)
            assert peer.events[-1]["metrics"]["dropped_units"] > 1900
            assert not peer.all("error")

    on_virtual_time(body)


def test_a_client_is_read_no_further_than_its_pictures_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client fills the server's memory with pictures, of which few are a lot to decode."""
    monkeypatch.setattr(driver, "DECODE_BYTES_MAX", 0)
    monkeypatch.setattr(driver, "decode_at_once", lambda _: None)

    async def body() -> None:
        async with world(decode_s=10) as server:
            peer = await server.activate("video")
            peer.send(*[append_frame(video_frames=[picture()])] * 3)
            left = []
            for _ in range(4):
                await anyio.sleep(8)
                left.append(len(peer._to_server))
            assert left == [2, 1, 0, 0]

    on_virtual_time(body)
