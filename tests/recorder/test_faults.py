"""Disks that are full, that break, that take a part or hang: what was told as written is there.

`Scripted` is a disk in memory on which each call has its own fate; `CHILD` writes to a real file
that the kernel lets grow so far and no further.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, get_args

import anyio
import anyio.to_thread
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format.format import LogFailed, Record, Unreadable
from recorder.read.reader import LogReader
from recorder.repair import verify
from recorder.write.files import Disk
from recorder.write.log import SessionLog
from recorder.write.logfile import Compressor, LogFile
from recorder.write.writer import Durability, Recorder, RecorderPolicy
from tests.recorder.test_samples import PATH, SESSION, MemoryDisk, pcm, record

ROOT: Final = Path(__file__).parents[2]
TIMEOUT_S: Final = 20
DURABILITIES: Final[tuple[Durability, ...]] = get_args(Durability)
ROUNDS: Final = 4


def records_of(log: bytes) -> tuple[list[Record], int]:
    """What can be read, and how much is damaged; nothing where there is no head yet."""
    try:
        with LogReader(log) as reader:
            items = list(reader)
    except Unreadable:
        return [], 0
    records = [item for item in items if isinstance(item, Record)]
    return records, len(items) - len(records)


def round_of(number: int) -> list[Record]:
    """What a unit leaves in a log."""
    first = 3 * number + 1
    return [
        record("rx", first, frame=bytes([number]) * 300),
        record("unit", first + 1, index=number, pcm=pcm(200, number)),
        record("tx", first + 2, frame=f"unit {number}", ordinal=number),
    ]


# -- each call with its own fate -------------------------------------------------------------------

Fate = float | str
"""The share of a write that is taken, or the error that comes instead; a sync fails or does not."""


class Scripted(MemoryDisk):
    """A disk whose calls fare as is written; those beyond the script succeed."""

    def __init__(self, writes: list[Fate], syncs: list[Fate]) -> None:
        super().__init__()
        self._fates = {"write": iter(writes), "sync": iter(syncs)}
        self.failed_at: int | None = None

    def _fate(self, name: str) -> Fate:
        fate = next(self._fates[name], 1.0)
        if isinstance(fate, str):
            self.calls.append(name)
            if self.failed_at is None:
                self.failed_at = len(self.calls)
            raise OSError(getattr(errno, fate), fate)
        return fate

    def write(self, descriptor: int, data: memoryview) -> int:
        """Take what the script says, a byte at least."""
        share = self._fate("write")
        assert isinstance(share, float)
        return super().write(descriptor, data[: max(1, int(share * len(data)))])

    def sync(self, descriptor: int) -> None:
        """Sync, or fail."""
        self._fate("sync")
        super().sync(descriptor)


TAKEN: Final = st.floats(0.0, 1.0)
WRITES: Final = st.lists(TAKEN | st.sampled_from(["ENOSPC", "EIO", "EDQUOT", "EFBIG"]), max_size=30)
SYNCS: Final = st.lists(st.just(1.0) | st.sampled_from(["EIO", "ENOSPC"]), max_size=4)


async def write_all(disk: MemoryDisk, durability: Durability) -> tuple[int, SessionLog, int]:
    """Record a session; gives what was told as written, its log, and how often a failure was."""
    told, failures = -1, list[LogFailed]()
    with Recorder(RecorderPolicy(durability=durability), disk=disk, inline=True) as recorder:
        log = recorder.open(PATH, SESSION, at_ns=0, on_failure=failures.append)
        try:
            for number in range(ROUNDS):
                log.append(*round_of(number), urgent=True)
                await log.written(log.next_seq - 1)
                told = log.next_seq - 1
            await log.finish({"reason": "closed"}, at_ns=99)
            told = log.next_seq - 1
        except LogFailed:
            pass
        await anyio.lowlevel.checkpoint()  # for the failure to be told
    return told, log, len(failures)


@given(writes=WRITES, syncs=SYNCS, durability=st.sampled_from(DURABILITIES))
@example(writes=[1.0, 0.5, "ENOSPC"], syncs=[], durability="interval")
@example(writes=[0.0] * 30, syncs=[], durability="none")
@example(writes=["ENOSPC"], syncs=[], durability="none")
@example(writes=[1.0, 0.3, "EIO", 1.0, 1.0], syncs=[], durability="unit")
@example(writes=[], syncs=["EIO", 1.0], durability="unit")
def test_whatever_a_disk_does_what_was_told_is_there(
    writes: list[Fate], syncs: list[Fate], durability: Durability
) -> None:
    """A client was told of what no log has; or a log goes on behind a hole, and says another thing.

    A write that fails after a part of it was taken is not tried again, although the next one might
    succeed: behind a torn block nothing would be found.
    """
    disk = Scripted(writes, syncs)
    told, log, failures = anyio.run(write_all, disk, durability, backend="trio")
    wrote = [Record(kind="session", seq=0, at_ns=0, fields=SESSION)]
    wrote += [item for number in range(ROUNDS) for item in round_of(number)]
    data = bytes(disk.files.get(PATH, b""))
    records, damage = records_of(data)

    assert damage == 0
    assert [item for item in records if item.kind != "fin"] == wrote[: len(records)]
    assert len(records) > told
    assert disk.open_files == 0
    assert (log.failure is not None, failures) == (disk.failed_at is not None, failures)
    assert failures == (disk.failed_at is not None)
    if disk.failed_at is not None:
        assert set(disk.calls[disk.failed_at :]) <= {"close"}, "a failed log was touched again"
    else:
        assert verify(data).state == "finished"


# -- a real file that may not grow -----------------------------------------------------------------

CHILD: Final = """
import json, resource, sys
from pathlib import Path
import anyio
from recorder.format.format import LogFailed
from recorder.write.logfile import Compressor
from recorder.write.writer import Recorder
from tests.recorder.test_faults import ROUNDS, round_of
from tests.recorder.test_samples import SESSION

async def record(path):
    told, why = -1, ""
    with Recorder() as recorder:
        log = recorder.open(path, SESSION, at_ns=0)
        try:
            for number in range(ROUNDS):
                log.append(*round_of(number), urgent=True)
                await log.written(log.next_seq - 1)
                told = log.next_seq - 1
            await log.finish({"reason": "closed"}, at_ns=99)
            told = log.next_seq - 1
        except LogFailed as failed:
            why = str(failed)
    return told, why

found = []
for limit in range(0, int(sys.argv[2]), int(sys.argv[3])):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    path = Path(sys.argv[1]) / f"at-{limit}.session.zst"
    found.append((path.name, limit, *anyio.run(record, path)))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps(found))
"""


def test_a_file_that_may_not_grow_holds_what_was_told(tmp_path: Path) -> None:
    """On a full disk a log ends anywhere, and the last that a client heard may be gone with it.

    The kernel takes a part of the block that crosses the limit, and then nothing (EFBIG).
    """
    command = [sys.executable, "-c", CHILD, str(tmp_path), "6000", "101"]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    ends = list[str]()
    for name, limit, told, why in json.loads(done.stdout):
        path = tmp_path / name
        records, damage = records_of(path.read_bytes())
        assert damage == 0
        assert len(records) > told
        report = verify(path)
        assert report.exit_code == (0 if records else 2)
        ends.append(report.state)
        if why:
            assert "File too large" in why
            assert path.stat().st_size == limit
    assert {"unreadable", "open", "finished"} == set(ends)


class DevFull(Disk):
    """The kernel's own full device."""

    def create(self, path: Path) -> int:
        """Open it, whatever the name."""
        return os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)


@pytest.mark.anyio
async def test_a_full_device_is_an_error_and_no_crash() -> None:
    """A server goes down with its disk."""
    with Recorder(disk=DevFull()) as recorder, anyio.fail_after(TIMEOUT_S):
        log = recorder.open(PATH, SESSION, at_ns=0)
        with pytest.raises(LogFailed, match="No space left"):
            await log.written(0)


@pytest.mark.parametrize("harm", ["removed", "moved", "cut"])
def test_a_log_that_another_process_harms_fails_at_its_sync(tmp_path: Path, harm: str) -> None:
    """A session said that it was recorded, and its log had lost its end."""
    path = tmp_path / PATH.name
    file = LogFile(path, disk=Disk(), compressor=Compressor())
    file.create()
    list(file.write([Record(kind="session", seq=0, at_ns=0, fields=SESSION), record("unit", 1)]))
    file.sync()
    if harm == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif harm == "moved":
        path.rename(tmp_path / "other")
    else:
        path.unlink()
    with pytest.raises(FileNotFoundError, match="removed, moved or cut"):
        file.sync()
    file.close()


# -- syncs -----------------------------------------------------------------------------------------


class Clocked:
    """A recorder whose time is moved by hand, and its one log."""

    def __init__(self, disk: MemoryDisk, durability: Durability) -> None:
        self.now_s = 0.0
        policy = RecorderPolicy(durability=durability, age_s_max=1.0)
        self.disk = disk
        self.failures: list[LogFailed] = []
        self.recorder = Recorder(policy, disk=disk, clock=lambda: self.now_s, inline=True)
        self.log = self.recorder.open(PATH, SESSION, at_ns=0, on_failure=self.failures.append)

    def append(self, *records: Record) -> None:
        """Take records, and write them."""
        self.log.append(*records, urgent=True)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and the recorder do what is due."""
        self.now_s += seconds
        self.recorder._serve_aged()

    @property
    def syncs(self) -> int:
        """How often the device was asked."""
        return self.disk.calls.count("sync")


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.mark.parametrize(
    ("durability", "expected"),
    [
        ("none", {"unit": 0, "soon": 0, "due": 0, "idle": 0, "words": 0, "fin": 1}),
        ("interval", {"unit": 0, "soon": 0, "due": 1, "idle": 1, "words": 2, "fin": 3}),
        ("unit", {"unit": 1, "soon": 1, "due": 1, "idle": 1, "words": 2, "fin": 3}),
    ],
)
@pytest.mark.anyio
async def test_each_policy_syncs_when_it_says(
    durability: Durability, expected: dict[str, int], disk: MemoryDisk
) -> None:
    """A power cut costs more than the operator chose to lose, or each sync is paid for twice."""
    made, counted = Clocked(disk, durability), dict[str, int]()
    made.append(*round_of(0))
    counted["unit"] = made.syncs
    made.pass_time(0.5)
    counted["soon"] = made.syncs
    made.pass_time(0.5)
    counted["due"] = made.syncs
    made.pass_time(5.0)  # nothing was written meanwhile
    counted["idle"] = made.syncs
    made.append(record("tx", 4, frame="no unit", ordinal=1))
    made.pass_time(1.0)
    counted["words"] = made.syncs
    await made.log.finish({"reason": "closed"}, at_ns=9)
    counted["fin"] = made.syncs
    assert counted == expected
    assert disk.calls.count("sync_directory") == 1
    assert disk.calls[-1] == "close"


@pytest.mark.parametrize("failing", ["sync", "sync_directory"])
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.anyio
async def test_a_sync_that_failed_is_never_tried_again(
    durability: Durability, failing: str, disk: MemoryDisk
) -> None:
    """The kernel forgets what it could not write: a second fsync that succeeds says nothing."""
    made = Clocked(disk, durability)
    disk.failing.add(failing)
    made.append(*round_of(0))
    made.pass_time(1.0)
    if durability == "none":
        with pytest.raises(LogFailed, match=f"no {failing}"):
            await made.log.finish({"reason": "closed"}, at_ns=9)
    disk.failing.clear()
    wrote = disk.calls.count("write")
    if durability != "none":
        made.append(*round_of(1))
        with pytest.raises(LogFailed, match=f"no {failing}"):
            await made.log.finish({"reason": "closed"}, at_ns=9)
    made.pass_time(5.0)
    made.recorder.close()
    await anyio.lowlevel.checkpoint()
    assert disk.calls.count(failing) == 1
    assert disk.calls.count("write") == wrote, "a log went on behind what may be lost"
    assert disk.open_files == 0
    assert len(made.failures) == 1
    assert made.recorder.statistics.failures == 1


@pytest.mark.anyio
async def test_a_log_that_fails_twice_is_one_that_failed(disk: MemoryDisk) -> None:
    """A disk that breaks amid a sync is counted as two, and an operator looks for another log."""
    syncing, resume = threading.Event(), threading.Event()

    def break_down() -> None:
        syncing.set()
        assert resume.wait(TIMEOUT_S)
        raise OSError(errno.EIO, "the device is gone")

    policy = RecorderPolicy(age_s_max=0.001, tick_s=0.001)
    disk.synced = break_down
    with Recorder(policy, disk=disk) as recorder, anyio.fail_after(TIMEOUT_S):
        log = recorder.open(PATH, SESSION, at_ns=0)
        await anyio.to_thread.run_sync(syncing.wait, TIMEOUT_S)
        disk.failing.add("write")
        log.append(*round_of(0), urgent=True)
        with pytest.raises(LogFailed, match="no write"):
            await log.written(3)
        resume.set()
    assert recorder.statistics.failures == 1
    assert disk.open_files == 0
