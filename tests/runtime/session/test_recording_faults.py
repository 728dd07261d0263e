"""A disk that hangs under sessions: the event loop goes on, and so does everybody else.

What hangs is let go by the event loop itself, after many of its turns: were the loop held up, it
would never come to that, and the disk's own patience would end first. What hangs for good is tried
on virtual time: there the bounds are exact.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from recorder.repair import verify
from recorder.write.files import Disk
from recorder.write.writer import Recorder
from runtime.model.backends.scripted import ScriptedBackend
from runtime.session import journal
from runtime.session.journal import WRITE_WAIT_S
from tests.runtime.session.test_driver import logs, quick
from tests.sessions.in_memory import World, append_frame, close_frame, on_virtual_time, world

pytestmark = pytest.mark.anyio

TURNS: Final = 1000
"""Of the event loop, while the disk hangs; in a server that is more than a second's work."""
PATIENCE_S: Final = 10
"""Of the disk: it is used up only by a loop that stands still."""
TIMEOUT_S: Final = 30


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops."""
    return str(request.param)


class HangingDisk(Disk):
    """The operating system's files, of which the first hangs once, at one operation.

    Attributes:
        is_hung: it hangs now, or did.
        resume: set it, and it hangs no longer.
        was_resumed: that was set before the disk's patience was at its end; None: it hangs.
    """

    def __init__(self, hangs_at: str) -> None:
        self.is_hung = threading.Event()
        self.resume = threading.Event()
        self.was_resumed: bool | None = None
        self._hangs_at = hangs_at
        self._victim: int | None = None

    def create(self, path: Path) -> int:
        """Create a file."""
        if not self.is_hung.is_set() and self._hangs_at == "create":
            self._hang()
        descriptor = super().create(path)
        if self._victim is None:
            self._victim = descriptor
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data`."""
        self._hang_at("write", descriptor)
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Sync a file."""
        self._hang_at("sync", descriptor)
        super().sync(descriptor)

    def is_there(self, path: Path, descriptor: int, file_bytes: int = 0) -> bool:
        """Say that nobody removes files here."""
        return True

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Refuse what no test here asks for."""
        raise NotImplementedError

    def sync_directory(self, path: Path) -> None:
        """Sync a directory."""
        self._hang_at("sync_directory", self._victim)
        super().sync_directory(path)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        self._hang_at("close", descriptor)
        super().close(descriptor)

    def _hang_at(self, name: str, descriptor: int | None) -> None:
        if (name, descriptor) == (self._hangs_at, self._victim) and not self.is_hung.is_set():
            self._hang()

    def _hang(self) -> None:
        self.is_hung.set()
        self.was_resumed = self.resume.wait(PATIENCE_S)

    async def hang(self) -> None:
        """Wait until it hangs."""
        await anyio.to_thread.run_sync(self.is_hung.wait, PATIENCE_S)
        assert self.is_hung.is_set()


@pytest.mark.parametrize("hangs_at", ["create", "write", "sync", "sync_directory", "close"])
async def test_a_disk_that_hangs_never_holds_up_the_event_loop(
    hangs_at: str, tmp_path: Path
) -> None:
    """All calls stutter whenever the disk does."""
    disk = HangingDisk(hangs_at)

    async def let_go() -> None:
        await disk.hang()
        for _ in range(TURNS):
            await anyio.lowlevel.checkpoint()
        disk.resume.set()

    with anyio.fail_after(TIMEOUT_S):
        async with (
            world(ScriptedBackend(quick), record_to=tmp_path, disk=disk, threaded=True) as server,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(let_go)
            peer = await server.activate()
            peer.send(append_frame(2), close_frame())
            await peer.over()
            await server.quiet()
    assert disk.was_resumed
    assert peer.kinds[-1] == "session.closed"
    (path,) = logs(tmp_path)
    assert verify(path).state == "finished"


@pytest.fixture
def short_wait_for_fin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's end waits for its last sync, but here not for long."""
    monkeypatch.setattr(journal, "FIN_WAIT_S", 0.01)


@pytest.mark.usefixtures("short_wait_for_fin")
async def test_a_sync_that_hangs_holds_up_no_session_and_no_shutdown(tmp_path: Path) -> None:
    """A device that hangs for half a minute silences all calls, or keeps the server from ending."""
    disk = HangingDisk("sync")
    backend = ScriptedBackend(quick, slots=2)
    with anyio.fail_after(TIMEOUT_S):
        async with world(backend, record_to=tmp_path, disk=disk, threaded=True) as server:
            ending, talking = await server.activate(), await server.activate()
            ending.send(close_frame())
            await ending.over()
            await disk.hang()

            talking.send(append_frame(2))
            assert (await talking.heard("audio"))["metrics"]["recording"] == "on"
            coming = await server.activate()
            coming.send(append_frame(2), close_frame())
            await coming.over()
            assert coming.kinds[-1] == "session.closed"

            server.server.drain()
            await server.quiet()
            assert talking.events[-1]["reason"] == "server_shutdown"
            assert disk.was_resumed is None, "the end has waited for the device"
            disk.resume.set()
    assert disk.was_resumed
    assert [verify(path).state for path in logs(tmp_path)] == ["finished"] * 3


# -- for good --------------------------------------------------------------------------------------


def hang_for_good(server: World) -> Recorder:
    """Have nothing written any more, of any log."""
    recorder = server.server._logs.recorder
    assert recorder is not None
    recorder._shared.serve_here = lambda: None
    return recorder


@pytest.mark.parametrize("policy", ["continue", "close"])
def test_a_disk_that_hangs_for_good_is_given_up_in_time(policy: str, tmp_path: Path) -> None:
    """A caller hears nothing for minutes, until the session's time is up or memory is short."""

    async def body() -> None:
        backend = ScriptedBackend(quick)
        async with world(backend, record_to=tmp_path, on_recording_failure=policy) as server:
            peer = await server.activate("audio")
            recorder = hang_for_good(server)
            began_s = anyio.current_time()
            peer.send(append_frame())
            assert (await peer.heard("listen"))["metrics"]["recording"] == "on"
            assert anyio.current_time() - began_s == WRITE_WAIT_S
            assert recorder.statistics.failures == 1, "nobody is called for it"
            if policy == "close":
                await peer.over()
                assert peer.events[-1]["reason"] == "backend_error"
                assert peer.closed is not None
                assert peer.closed[0] == 1011
            else:
                peer.send(append_frame())
                assert (await peer.heard("audio"))["metrics"]["recording"] == "failed"
            assert anyio.current_time() - began_s <= WRITE_WAIT_S + 1

    on_virtual_time(body)


def test_a_disk_that_hangs_for_good_keeps_nobody_who_leaves(tmp_path: Path) -> None:
    """A slot is lost with the disk: the goodbye waits for the log, and the session for it."""

    async def body() -> None:
        async with world(ScriptedBackend(quick), record_to=tmp_path) as server:
            peer = await server.activate("audio")
            hang_for_good(server)
            began_s = anyio.current_time()
            peer.send(append_frame(), close_frame())
            await peer.over()
            await server.quiet()
            assert peer.kinds[-1] == "session.closed"
            assert anyio.current_time() - began_s <= WRITE_WAIT_S + 1

    on_virtual_time(body)
