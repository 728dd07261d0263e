"""Real servers on disks that are full or hang: what clients are told, and what the logs hold.

A tmpfs of a few megabytes, mounted in a namespace of the server's own, is filled and freed again;
a limit on the size of files (RLIMIT_FSIZE) stops one log and no other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from protocol.values.records import derive_id
from recorder.format.format import Record, Unreadable
from recorder.read.reader import LogReader
from recorder.repair import verify
from recorder.storage.store import Store
from replay.rerun.logic import replay
from runtime import RUN
from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import base64, init_frame

Body = dict[str, Any]

TMPFS: Final = "8m"
"""More than the logs of some units; to fill it takes no time."""
UNTIL_TOLD: Final = 2
"""Units: the one whose write failed, which was put into words before, and the next."""
FILE_BYTES_MAX: Final = 300_000
"""Some four seconds of noise."""
UNITS_MAX: Final = 20
TIMEOUT_S: Final = 60
NOISE: Final = base64(np.random.default_rng(0).normal(size=16_000).astype("<f4").tobytes())
SILENCE: Final = base64(bytes(64_000))

_NAMESPACE: Final = ("unshare", "--user", "--map-root-user", "--mount")
_MOUNT: Final = f'mount -t tmpfs -o size={TMPFS} tmpfs "$0" && exec "$@"'


def can_mount(folder: str = "/tmp") -> bool:
    """Whether a process may have a file system of its own here."""
    command = [*_NAMESPACE, "sh", "-c", _MOUNT, folder, "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_tmpfs: Final = pytest.mark.skipif(not can_mount(), reason="no namespaces here")


class Caller:
    """A client that talks to a server one unit at a time, and keeps what it is told.

    Attributes:
        heard: all frames, verbatim.
        created: what it was told of its session.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.heard: list[str] = []
        self._socket = socket
        self._units = 0
        self.hear_until("session.queue_done")
        self._socket.send(init_frame())
        self.created = self.hear_until("session.created")

    def hear(self) -> Body:
        """Receive a frame."""
        self.heard.append(str(self._socket.recv(TIMEOUT_S)))
        body: Body = json.loads(self.heard[-1])
        return body

    def hear_until(self, *kinds: str) -> Body:
        """Receive until a frame of a type or a kind."""
        while not {(body := self.hear())["type"], body.get("kind")} & set(kinds):
            pass
        return body

    def unit(self, audio: str = NOISE) -> str:
        """Say a second; gives what is said of the recording with the answer."""
        self._socket.send(
            f'{{"type": "input.append", "input_id": "s{self._units}", '
            f'"input": {{"audio": "{audio}"}}}}'
        )
        self._units += 1
        return str(self.hear_until("listen", "audio")["metrics"]["recording"])

    def until_told(self, units_max: int = UNTIL_TOLD) -> None:
        """Talk until the recording is said to have failed."""
        assert any(self.unit() == "failed" for _ in range(units_max)), "nobody said so"

    def end(self) -> Body:
        """Say goodbye; gives the server's."""
        self._socket.send('{"type": "session.close"}')
        closed = self.hear_until("session.closed")
        self._socket.close()
        return closed

    def last_words(self) -> tuple[Body, int | None]:
        """Talk until the server ends the session; gives its last words and its code."""
        with suppress(ConnectionClosed):  # Where it speaks, what came last may not be heard yet.
            while True:
                self.unit()
        try:
            while True:
                self.hear()
        except ConnectionClosed as closed:
            return json.loads(self.heard[-1]), closed.rcvd and closed.rcvd.code

    def log(self, folder: Path) -> Path:
        """Find its log."""
        name = self.created["session_id"]
        found = Store(folder).logs()
        (path,) = (one.path for one in found if derive_id(one.recording_id, "sess", 0) == name)
        return path


Call = Callable[[LiveServer], Caller]


@pytest.fixture
def call() -> Iterator[Call]:
    """Calls a server, as often as is wanted."""
    with ExitStack() as sockets:

        def dial(server: LiveServer) -> Caller:
            url = f"{server.url}?mode=audio"
            return Caller(sockets.enter_context(connect(url, max_size=None)))

        yield dial


def assert_recorded(caller: Caller, folder: Path) -> None:
    """Check that a client's whole session is in its log."""
    path = caller.log(folder)
    assert verify(path).state == "finished"
    with LogReader(path) as reader:
        assert replay(reader).identical
    assert frames_of(path) == caller.heard


def assert_cut_off(caller: Caller, folder: Path) -> None:
    """Check that a log holds what a client heard, but for what was said not to be recorded.

    One answer is spared: it was put into words before its write failed, and the next one says so.
    """
    path = caller.log(folder)
    assert verify(path).state == "open", "what is torn looks damaged, or whole"
    with LogReader(path) as reader:
        assert replay(reader).divergence is None
    logged = frames_of(path)
    assert logged == caller.heard[: len(logged)]
    lost = [json.loads(frame) for frame in caller.heard[len(logged) :]]
    unsaid = {body["input_id"] for body in lost if body.get("metrics", {}).get("recording") == "on"}
    assert len(unsaid) <= 1


def frames_of(path: Path) -> list[object]:
    """The frames that a log says were sent."""
    with LogReader(path) as reader:
        items = list(reader)
    assert all(isinstance(item, Record) for item in items)
    records = [item for item in items if isinstance(item, Record)]
    return [record.fields["frame"] for record in records if record.kind == "tx"]


def asked(server: LiveServer, path: str) -> str:
    """Ask the server over HTTP."""
    host, port = server.address
    headers = {"Accept": "application/json"} if path == "/status" else {}
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return bytes(answer.read()).decode()


def counted(server: LiveServer, name: str) -> float:
    """Add up a metric."""
    lines = asked(server, "/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again and again."""
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until_s


# -- a disk that is full, and then is not ----------------------------------------------------------


class Disk:
    """A small disk that only one server sees, reached through its process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = (*_NAMESPACE, "sh", "-c", _MOUNT, str(folder), *RUN)

    def seen(self, server: LiveServer) -> Path:
        """Its root, from here."""
        return Path(f"/proc/{server.process.pid}/root{self.folder}")

    def fill(self, server: LiveServer) -> Path:
        """Take all the room there is; gives the file to remove again."""
        ballast = self.seen(server) / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                return ballast

    def stop_and_copy(self, server: LiveServer, to: Path) -> Path:
        """Stop the server cleanly and give what it left; an open folder keeps the disk so long."""
        held = os.open(self.seen(server), os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert server.stop() == 0
            return Path(shutil.copytree(f"/proc/self/fd/{held}", to))
        finally:
            os.close(held)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk")


@needs_tmpfs
def test_a_full_disk_costs_recordings_and_no_calls(disk: Disk, call: Call, tmp_path: Path) -> None:
    """A full disk ends every call or nobody hears of it; or nothing is recorded ever after."""
    options = ("--record", str(disk.folder), "--slots", "4")
    with live_server(*options, run=disk.run) as server:
        before, idle, talking = call(server), call(server), call(server)
        assert [one.unit() for one in (before, talking)] == ["on"] * 2
        assert before.end()["reason"] == "client_closed"
        wait_until(lambda: counted(server, "antiphon_recorder_logs") == 2)  # its end is written
        ballast = disk.fill(server)
        talking.until_told()
        assert {talking.unit() for _ in range(UNTIL_TOLD)} == {"failed"}
        meanwhile = call(server)
        assert meanwhile.created["recording"] == "failed"
        assert meanwhile.unit() == "failed"
        assert meanwhile.end()
        assert json.loads(asked(server, "/api/recordings"))["recordings"]
        assert counted(server, "antiphon_recordings_failed_total") == 2
        assert counted(server, "antiphon_recorder_failures_total") == 2
        ballast.unlink()
        after = call(server)
        assert after.created["recording"] == "on"
        assert after.unit() == "on"
        assert (idle.unit(), talking.unit()) == ("on", "failed")
        for one in (after, idle, talking):
            assert one.end()
        left = disk.stop_and_copy(server, tmp_path / "left")
        assert "Traceback" not in server.errors.read_text()
    for one in (before, idle, after):
        assert_recorded(one, left)
    assert_cut_off(talking, left)
    with pytest.raises(Unreadable):
        LogReader(meanwhile.log(left))


@needs_tmpfs
def test_a_full_disk_ends_calls_where_that_is_asked_for(
    disk: Disk, call: Call, tmp_path: Path
) -> None:
    """Who must record everything has calls of which there is no record."""
    options = ("--record", str(disk.folder), "--slots", "4", "--on-recording-failure", "close")
    with live_server(*options, run=disk.run) as server:
        talking, idle = call(server), call(server)
        assert talking.unit() == "on"
        ballast = disk.fill(server)
        last_words, code = talking.last_words()
        assert (last_words["type"], last_words["reason"]) == ("session.closed", "backend_error")
        assert code == 1011
        with pytest.raises(ConnectionClosed):
            call(server)
        ballast.unlink()
        after = call(server)
        assert [one.unit() for one in (after, idle)] == ["on", "on"]
        for one in (after, idle):
            assert one.end()
        left = disk.stop_and_copy(server, tmp_path / "left")
    for one in (after, idle):
        assert_recorded(one, left)
    assert_cut_off(talking, left)


# -- a log that may not grow -----------------------------------------------------------------------


def with_limit(size: int) -> tuple[str, ...]:
    """Run `antiphon` so that no file of its grows above a size."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); "
    return (*RUN[:3], limit + RUN[3])


@pytest.mark.parametrize("policy", ["continue", "close"])
def test_one_log_that_may_not_grow_costs_no_other(policy: str, call: Call, tmp_path: Path) -> None:
    """One session that talks for too long takes the others' recordings with it."""
    options = ("--record", str(tmp_path), "--on-recording-failure", policy)
    with live_server(*options, run=with_limit(FILE_BYTES_MAX)) as server:
        loud, quiet = call(server), call(server)
        assert quiet.unit(SILENCE) == "on"
        if policy == "continue":
            loud.until_told(UNITS_MAX)
            assert loud.unit() == "failed"
        else:
            last_words, code = loud.last_words()
            assert (last_words["reason"], code) == ("backend_error", 1011)
        assert quiet.unit(SILENCE) == "on"
        after = call(server)
        assert after.unit() == "on"
        for one in (quiet, after, *((loud,) if policy == "continue" else ())):
            assert one.end()
        assert server.stop() == 0
        assert "Traceback" not in server.errors.read_text()
    for one in (quiet, after):
        assert_recorded(one, tmp_path)
    assert_cut_off(loud, tmp_path)
    assert loud.log(tmp_path).stat().st_size == FILE_BYTES_MAX


# -- a device that hangs ---------------------------------------------------------------------------

HANGS: Final = """
import threading
import recorder.write.files, runtime.session.journal, runtime.serve.serve_command
recorder.write.files.Disk.sync = lambda self, descriptor: threading.Event().wait()
runtime.session.journal.FIN_WAIT_S, runtime.serve.serve_command.EXIT_WAIT_S = 0.1, 0.5
from runtime.cli import main; main()"""


def test_a_device_that_hangs_silences_nobody_and_does_not_keep_the_server(
    call: Call, tmp_path: Path
) -> None:
    """A server whose device hangs cannot be stopped, or stops answering long before.

    What was handed to the operating system is in the logs all the same, their ends too.
    """
    run = (sys.executable, "-P", "-c", HANGS)
    with live_server("--record", str(tmp_path), "--drain-s", "0", run=run) as server:
        ended, talking = call(server), call(server)
        assert ended.unit() == "on"
        assert ended.end()
        assert talking.unit() == "on"
        coming = call(server)
        assert coming.unit() == "on"
        assert coming.end()
        server.process.send_signal(signal.SIGTERM)
        assert talking.hear_until("session.closed")["reason"] == "server_shutdown"
        assert server.process.wait(TIMEOUT_S) == 1, "it was cut off, and says otherwise"
    for one in (ended, talking, coming):
        assert_recorded(one, tmp_path)
