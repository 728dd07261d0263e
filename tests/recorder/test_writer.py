"""The recorder's thread: what is awaited is written, what fails is told, nothing is silent."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

from recorder.format.format import (
    MIB,
    RECORD_BYTES_MAX,
    RECORD_OVERHEAD_BYTES,
    SUFFIX,
    LogFailed,
    LogFull,
    LogMisuse,
    Record,
    recording_id_of,
    size_bytes,
)
from recorder.read.reader import LogReader
from recorder.repair import verify
from recorder.storage.store import Store
from recorder.write.log import Loop, SessionLog
from recorder.write.writer import Recorder, RecorderPolicy
from tests.recorder.test_samples import PATH, SESSION, MemoryDisk, block_offsets, record

pytestmark = pytest.mark.anyio

LONG_S = 1000.0
"""A time that never comes in a test."""
TIMEOUT_S = 20
"""A test that hangs fails instead."""


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def recorder(disk: MemoryDisk) -> Iterator[Recorder]:
    with Recorder(RecorderPolicy(tick_s=LONG_S), disk=disk) as made:
        yield made


def records_of(disk: MemoryDisk) -> list[Record]:
    with LogReader(disk.data()) as reader:
        found = list(reader)
    records = [item for item in found if isinstance(item, Record)]
    assert len(records) == len(found)
    return records


def start(recorder: Recorder, failures: list[LogFailed] | None = None) -> SessionLog:
    told = failures.append if failures is not None else None
    return recorder.open(PATH, SESSION, at_ns=0, on_failure=told)


async def test_written_means_in_the_file(recorder: Recorder, disk: MemoryDisk) -> None:
    """A client must never see what a killed server then does not know of."""
    with anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        log.append(record("rx", 1, frame="a"))
        log.append(record("tx", 2, frame="b", ordinal=0), urgent=True)
        await log.written(2)
        assert [item.seq for item in records_of(disk)] == [0, 1, 2]
        assert log.written_seq == 2
        await log.written(1)


async def test_written_hurries_what_nobody_called_urgent(
    recorder: Recorder, disk: MemoryDisk
) -> None:
    """A waiter must not sit out the age of the block."""
    with anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        log.append(record("mark", 1))
        await log.written(1)
        assert len(records_of(disk)) == 2


async def test_waiting_for_a_record_never_appended_is_misuse(recorder: Recorder) -> None:
    """It would wait for ever."""
    with pytest.raises(LogMisuse):
        await start(recorder).written(1)


async def test_finish_writes_fin_syncs_and_closes(recorder: Recorder, disk: MemoryDisk) -> None:
    """A finished session must be on the device, whatever the policy."""
    with anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        log.append(record("unit", 1, index=0))
        await log.finish({"reason": "closed"}, at_ns=9)
    assert verify(disk.data()).state == "finished"
    assert records_of(disk)[-1].fields["counts"] == {"session": 1, "unit": 1}
    assert disk.calls[-3:] == ["sync", "sync_directory", "close"]
    assert recorder.statistics.logs == 0
    with pytest.raises(LogMisuse):
        log.append(record("mark", 3))


async def test_names_of_many_files_take_one_sync(recorder: Recorder, disk: MemoryDisk) -> None:
    """Thousands of connections at once would each have the directory synced, for all to wait."""
    with anyio.fail_after(TIMEOUT_S):
        logs = [
            recorder.open(PATH.with_name(f"{number}{SUFFIX}"), SESSION, at_ns=0)
            for number in range(10)
        ]
        for log in logs:
            await log.written(0)
        for log in logs:
            await log.finish({"reason": "closed"}, at_ns=1)
        assert disk.calls.count("sync_directory") == 1
        late = start(recorder)
        await late.finish({"reason": "closed"}, at_ns=1)
    assert disk.calls.count("sync") == 11
    assert disk.calls[-3:] == ["sync", "sync_directory", "close"]


async def test_fin_fields_of_the_recorder_are_its_own(recorder: Recorder) -> None:
    """A caller's `chain` in `fin` would make an intact log look damaged."""
    with pytest.raises(LogMisuse):
        await start(recorder).finish({"reason": "closed", "chain": "x"}, at_ns=1)


async def test_cancelled_finish_is_still_written(recorder: Recorder, disk: MemoryDisk) -> None:
    """A server that shuts down cancels its tasks; its logs must end all the same."""
    disk.hold.clear()
    log = start(recorder)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await log.finish({"reason": "cancelled"}, at_ns=1)
    disk.hold.set()
    with anyio.fail_after(TIMEOUT_S):
        await recorder.aclose()
    assert verify(disk.data()).state == "finished"


async def test_records_that_are_ready_together_share_a_block(
    recorder: Recorder, disk: MemoryDisk
) -> None:
    """A block of its own for each record would cost a write and 68 bytes every time."""
    with anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        await log.written(0)
        disk.hold.clear()
        log.append(record("mark", 1), urgent=True)
        for seq in range(2, 10):
            log.append(record("mark", seq), urgent=True)
        disk.hold.set()
        await log.written(9)
    assert len(block_offsets(disk.data())) - 1 <= 3


async def test_records_that_are_appended_together_share_a_block(
    recorder: Recorder, disk: MemoryDisk
) -> None:
    """The first record of a step is written by itself, and a client waits for a second write."""
    with anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        await log.written(0)
        log.append(record("tx", 1, frame="a", ordinal=0), record("mark", 2), urgent=True)
        await log.written(2)
        assert log.next_seq == 3
    assert [one.kind for one in records_of(disk)] == ["session", "tx", "mark"]
    assert len(block_offsets(disk.data())) - 1 == 2


async def test_of_records_together_those_before_a_mistake_are_kept(recorder: Recorder) -> None:
    """A log misses a record that its driver believes to be in it, or holds one twice."""
    log = start(recorder)
    with pytest.raises(LogMisuse, match="the next is 2"):
        log.append(record("mark", 1), record("mark", 3))
    assert log.next_seq == 2
    with pytest.raises(LogMisuse, match="finishing"):
        log.append(record("mark", 2), record("fin", 3))
    assert log.next_seq == 2
    with anyio.fail_after(TIMEOUT_S):
        await log.written(1)


@pytest.mark.parametrize("failing", ["create", "write"])
async def test_failed_disk_fails_the_log_and_tells(failing: str, disk: MemoryDisk) -> None:
    """A recording that stops in silence is found out when it is needed."""
    disk.failing.add(failing)
    failures: list[LogFailed] = []
    with Recorder(RecorderPolicy(tick_s=LONG_S), disk=disk) as recorder:
        with anyio.fail_after(TIMEOUT_S):
            log = start(recorder, failures)
            log.append(record("mark", 1))
            with pytest.raises(LogFailed, match=f"no {failing}"):
                await log.written(1)
            while not failures:
                await anyio.lowlevel.checkpoint()
        disk.failing.clear()
        log.append(record("mark", 2), urgent=True)
        for wait in (log.written(2), log.room(), log.finish({}, at_ns=4)):
            with pytest.raises(LogFailed):
                await wait
        assert log.next_seq - 1 - log.written_seq == 4
        assert (len(failures), log.failure) == (1, failures[0])
        assert recorder.statistics.failures == 1
    assert disk.calls.count(failing) == 1, "a failed operation was tried again"
    assert disk.open_files == 0


async def test_one_failed_log_leaves_others_alone(recorder: Recorder, disk: MemoryDisk) -> None:
    """One session's trouble must not cost another its recording."""
    with anyio.fail_after(TIMEOUT_S):
        disk.files[PATH.with_name("b.session.zst")] = bytearray()
        bad = recorder.open(PATH.with_name("b.session.zst"), SESSION, at_ns=0)
        log = start(recorder)
        unkeepable = recorder.open(PATH.with_name("c.session.zst"), SESSION, at_ns=0)
        unkeepable.append(record("event", 1, value=object()))
        with pytest.raises(LogFailed, match="exists"):
            await bad.written(0)
        with pytest.raises(LogFailed, match="object"):
            await unkeepable.written(1)
        log.append(record("mark", 1))
        await log.finish({"reason": "closed"}, at_ns=2)
    assert verify(disk.data()).state == "finished"


async def test_failed_sync_fails_the_log(disk: MemoryDisk) -> None:
    """After a failed fsync the kernel may have dropped the pages: going on would be a lie."""
    disk.failing.add("sync")
    with Recorder(RecorderPolicy(durability="unit"), disk=disk) as recorder:
        log = start(recorder)
        with anyio.fail_after(TIMEOUT_S):
            await log.written(0)
            log.append(record("unit", 1))
            with pytest.raises(LogFailed, match="no sync"):
                await log.written(1)
    assert disk.calls.count("sync") == 1


@pytest.mark.parametrize(("durability", "syncs"), [("none", 0), ("interval", 0), ("unit", 1)])
async def test_unit_durability_syncs_blocks_with_units(
    durability: str, syncs: int, disk: MemoryDisk
) -> None:
    """Who asked for a sync per unit must have it before the client hears of the unit."""
    policy = RecorderPolicy(durability=durability, tick_s=LONG_S)  # type: ignore[arg-type]
    with Recorder(policy, disk=disk) as recorder, anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        log.append(record("mark", 1))
        await log.written(1)
        assert disk.calls.count("sync") == 0
        log.append(record("unit", 2))
        await log.written(2)
        assert disk.calls.count("sync") == syncs


async def test_interval_durability_syncs_in_time(disk: MemoryDisk) -> None:
    """A power cut must cost a second, not the session."""
    synced = threading.Event()
    disk.synced = synced.set
    policy = RecorderPolicy(age_s_max=0.001, tick_s=0.001)
    with Recorder(policy, disk=disk) as recorder:
        start(recorder).append(record("mark", 1))
        assert synced.wait(TIMEOUT_S)


async def test_a_slow_device_holds_up_nobody_else(disk: MemoryDisk) -> None:
    """One caller's hang-up makes all other callers stutter."""
    syncing, resume = threading.Event(), threading.Event()

    def be_slow() -> None:
        syncing.set()
        assert resume.wait(TIMEOUT_S)

    with Recorder(RecorderPolicy(durability="none"), disk=disk) as recorder:
        ending = start(recorder)
        other = recorder.open(PATH.with_name(f"other{SUFFIX}"), SESSION, at_ns=0)
        await other.written(0)
        disk.synced = be_slow
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(ending.finish, {"reason": "client"}, at_ns=1))
            await anyio.to_thread.run_sync(syncing.wait, TIMEOUT_S)
            other.append(record("tx", 1), urgent=True)
            with anyio.fail_after(TIMEOUT_S):
                await other.written(1)
            assert ending.written_seq < ending.next_seq - 1
            resume.set()
        assert ending.written_seq == ending.next_seq - 1


async def test_aged_records_are_written_unasked(disk: MemoryDisk) -> None:
    """What no client waits for must still survive a kill, a moment later."""
    with Recorder(RecorderPolicy(age_s_max=0.001, tick_s=0.001), disk=disk) as recorder:
        log = start(recorder)
        with anyio.fail_after(TIMEOUT_S):
            await log.written(0)
        disk.wrote.clear()
        log.append(record("mark", 1))
        assert disk.wrote.wait(TIMEOUT_S)
    assert len(records_of(disk)) == 2


async def test_full_backlog_is_seen_and_room_is_awaited(disk: MemoryDisk) -> None:
    """A disk that stalls must slow one session down, not eat the machine's memory."""
    policy = RecorderPolicy(session_backlog_bytes_max=1000, tick_s=LONG_S)
    disk.hold.clear()
    with Recorder(policy, disk=disk) as recorder, anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        assert not log.is_full
        log.append(record("rx", 1, frame=b"x" * 2000))
        assert log.is_full
        assert log.backlog_bytes > 2000
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.room)
            await anyio.lowlevel.checkpoint()
            disk.hold.set()
        assert not log.is_full
        log.append(record("rx", 2, frame=b"x" * 100))
        await log.written(2)
        assert log.backlog_bytes >= 0


async def test_all_logs_together_are_bounded(disk: MemoryDisk) -> None:
    """A hundred sessions within their own bounds must not exhaust the machine together.

    Who holds no more than its share does not wait for what others hold.
    """
    policy = RecorderPolicy(total_backlog_bytes_max=3000, tick_s=LONG_S)
    disk.hold.clear()
    with Recorder(policy, disk=disk) as recorder, anyio.fail_after(TIMEOUT_S):
        logs = [recorder.open(PATH.with_name(f"{n}.session.zst"), {}, at_ns=0) for n in range(3)]
        for log in logs[:2]:
            log.append(record("rx", 1, frame=b"x" * 1500))
        assert [log.is_full for log in logs] == [True, True, False]
        logs[2].append(record("rx", 1, frame=b"x" * 900))
        assert logs[2].is_full
        disk.hold.set()
        for log in logs:
            await log.room()
        assert recorder.statistics.backlog_bytes < 3000


async def test_who_waits_for_room_hears_that_the_log_is_given_up(disk: MemoryDisk) -> None:
    """A client was not read until the disk that hung went on."""
    policy = RecorderPolicy(session_backlog_bytes_max=1000, tick_s=LONG_S)
    disk.hold.clear()
    with Recorder(policy, disk=disk) as recorder:
        log = start(recorder)
        log.append(record("rx", 1, frame=b"x" * 1500))
        with anyio.fail_after(TIMEOUT_S), pytest.RaisesGroup(LogFailed):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(log.room)
                await anyio.wait_all_tasks_blocked()
                log.abandon("the disk hangs")
        disk.hold.set()


async def test_hard_bound_refuses_without_losing_count(disk: MemoryDisk) -> None:
    """A driver that ignores the bound must hear of it, and its next record still fits."""
    policy = RecorderPolicy(session_backlog_bytes_max=0, tick_s=LONG_S)
    frame = bytes(50 * MIB)
    disk.hold.clear()
    with Recorder(policy, disk=disk) as recorder:
        log = start(recorder)
        log.append(record("rx", 1, frame=frame))
        log.append(record("rx", 2, frame=frame))
        own_bytes = size_bytes(record("rx", 3, frame=b"").fields) + RECORD_OVERHEAD_BYTES
        room_bytes = RECORD_BYTES_MAX - log.backlog_bytes - own_bytes
        with pytest.raises(LogFull):
            log.append(record("rx", 3, frame=bytes(room_bytes + 1)))
        log.append(record("rx", 3, frame=bytes(room_bytes)))
        log.abandon("the test has seen enough")
        disk.hold.set()
    assert log.next_seq == 4


def recorder_threads() -> int:
    """Threads of recorders; others, such as a model's, come and go by themselves."""
    names = ("antiphon-recorder", "antiphon-syncer")
    return sum(thread.name in names for thread in threading.enumerate())


async def test_abandoned_log_is_closed_and_readable(recorder: Recorder, disk: MemoryDisk) -> None:
    """A driver that goes on without its log must leave what was recorded."""
    failures: list[LogFailed] = []
    with anyio.fail_after(TIMEOUT_S):
        log = start(recorder, failures)
        await log.written(0)
        log.append(record("mark", 1))
        log.abandon("the disk was too slow")
        with pytest.raises(LogFailed, match="too slow"):
            await log.written(1)
        await recorder.aclose()
    assert (failures, log.next_seq - 1 - log.written_seq, disk.open_files) == ([], 1, 0)
    assert verify(disk.data()).state == "open"


async def test_close_writes_everything_and_ends_the_thread(disk: MemoryDisk) -> None:
    """A server that stops must not lose what it has accepted."""
    threads = recorder_threads()
    recorder = Recorder(RecorderPolicy(tick_s=LONG_S), disk=disk)
    log = start(recorder)
    for seq in range(1, 50):
        log.append(record("mark", seq))
    recorder.close()
    recorder.close()
    assert recorder_threads() == threads
    assert len(records_of(disk)) == 50
    assert (verify(disk.data()).state, disk.open_files) == ("open", 0)
    with pytest.raises(LogMisuse):
        log.append(record("mark", 50))
    with pytest.raises(LogMisuse):
        start(recorder)


@pytest.mark.parametrize("kind_and_seq", [("mark", 0), ("mark", 2), ("session", 1), ("fin", 1)])
async def test_append_takes_the_next_record_only(
    kind_and_seq: tuple[str, int], recorder: Recorder
) -> None:
    """A gap in a log is damage: the caller must hear at once that it made one."""
    log = start(recorder)
    with pytest.raises(LogMisuse):
        log.append(record(*kind_and_seq))
    assert log.next_seq == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_dead_thread_fails_all_logs(disk: MemoryDisk) -> None:
    """A bug of ours in the recorder must not leave sessions that wait, or think they record."""
    is_broken = threading.Event()

    def clock() -> float:
        in_test = threading.current_thread() is threading.main_thread()
        assert in_test or not is_broken.is_set(), "the clock broke"
        return 0.0

    with Recorder(disk=disk, clock=clock) as recorder, anyio.fail_after(TIMEOUT_S):
        log = start(recorder)
        await log.written(0)
        is_broken.set()
        log.append(record("mark", 1), urgent=True)
        while log.failure is None:
            await anyio.lowlevel.checkpoint()
        log.append(record("mark", 2), urgent=True)
        with pytest.raises(LogFailed, match="the clock broke"):
            await log.written(2)
    assert disk.open_files == 0


async def test_inline_recorder_needs_no_thread(disk: MemoryDisk) -> None:
    """Under a virtual clock a thread would let time run ahead; the same logs must come out."""
    threads = recorder_threads()
    with Recorder(disk=disk, inline=True) as recorder:
        log = start(recorder)
        log.append(record("mark", 1))
        log.append(record("tx", 2, frame="x", ordinal=0), urgent=True)
        assert log.written_seq == 2
        log.append(record("mark", 3))
        await log.written(3)
        await log.room()
        await log.finish({"reason": "closed"}, at_ns=5)
        assert recorder_threads() == threads
    assert verify(disk.data()).state == "finished"


async def test_inline_recorder_tells_of_failures(disk: MemoryDisk) -> None:
    """The tests of the driver must meet the same failures as the server."""
    failures: list[LogFailed] = []
    with Recorder(disk=disk, inline=True) as recorder:
        log = start(recorder, failures)
        disk.failing.add("write")
        log.append(record("mark", 1), urgent=True)
        with pytest.raises(LogFailed):
            await log.written(1)
        await anyio.lowlevel.checkpoint()
        assert len(failures) == 1


def test_wake_ups_are_shared() -> None:
    """A wake-up for each record would keep the event loop busy with being woken."""
    scheduled: list[Callable[[], object]] = []
    ran: list[int] = []
    loop = Loop(SimpleNamespace(run_sync_soon=scheduled.append))
    for number in range(3):
        loop.call_soon(partial(ran.append, number))
    assert len(scheduled) == 1
    scheduled[0]()
    assert ran == [0, 1, 2]
    loop.call_soon(partial(ran.append, 3))
    assert len(scheduled) == 2


def test_nobody_is_there_to_wake() -> None:
    """A loop that is over must not take the recorder down with it."""

    def run_sync_soon(_call: Callable[[], object]) -> None:
        raise RuntimeError("the loop is over")

    loop = Loop(SimpleNamespace(run_sync_soon=run_sync_soon))
    loop.call_soon(int)
    loop.call_soon(int)


async def test_many_sessions_at_once(tmp_path: Path) -> None:
    """A wake-up that is lost under load is a session that hangs."""
    store = Store(tmp_path)

    async def session(recorder: Recorder, name: str) -> None:
        log = recorder.open(store.path(name), {"name": name}, at_ns=0)
        for seq in range(1, 60):
            log.append(record("tx", seq, frame=f"{name} {seq}", ordinal=seq), urgent=seq % 3 == 0)
            if seq % 3 == 0:
                await log.written(seq)
        await log.finish({"reason": "closed"}, at_ns=60)

    with anyio.fail_after(TIMEOUT_S):
        async with anyio.create_task_group() as tasks:
            with Recorder(RecorderPolicy(durability="none")) as recorder:
                async with anyio.create_task_group() as sessions:
                    for index in range(20):
                        sessions.start_soon(session, recorder, f"s{index}")
            tasks.cancel_scope.cancel()
    logs = store.logs()
    assert len(logs) == 20
    assert all(verify(info.path).records == 61 for info in logs)
    assert all(info.path.stat().st_mode & 0o077 == 0 for info in logs)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a.b", "a\n", "é", "a" * 65, "a\0", " "]
)
def test_recording_ids_are_names(name: str, tmp_path: Path) -> None:
    """An id that is a path writes anywhere the server can."""
    with pytest.raises(LogMisuse):
        Store(tmp_path).path(name)


@pytest.mark.parametrize("name", ["a.zst", ".session.zst", "a.b.session.zst", "a.session.zst\n"])
def test_only_a_log_has_the_name_of_one(name: str, tmp_path: Path) -> None:
    """A file that no listing shows again is a recording that is lost."""
    with pytest.raises(LogMisuse):
        recording_id_of(tmp_path / name)
    with Recorder(inline=True) as recorder, pytest.raises(LogMisuse):
        recorder.open(tmp_path / name, {}, at_ns=0)


def test_store_lists_logs_only(tmp_path: Path) -> None:
    """A listing that trips over other files shows nobody their recordings."""
    store = Store(tmp_path)
    for name in ("a.session.zst", "b-1_Z.session.zst", "c.d.session.zst", "notes.txt", "x.zst"):
        (tmp_path / name).write_bytes(b"12")
    assert sorted(info.recording_id for info in store.logs()) == ["a", "b-1_Z"]
    assert {info.file_bytes for info in store.logs()} == {2}
    assert Store(tmp_path / "missing").logs() == ()


WRITES_FOR_EVER = """
import sys
from pathlib import Path

import anyio

from recorder.format.format import Record
from recorder.write.writer import Recorder

async def main():
    log = Recorder().open(Path(sys.argv[1]), {}, at_ns=0)
    for seq in range(1, 1 << 30):
        log.append(Record(kind="mark", seq=seq, at_ns=seq, fields={"by": "x" * 999}), urgent=True)
        await log.written(seq)
        print(seq, flush=True)

anyio.run(main)
"""


def test_a_killed_process_has_lost_nothing_it_told_of(tmp_path: Path) -> None:
    """What a client saw must be in the log, even of a server that is killed outright."""
    path = tmp_path / "a.session.zst"
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(20)]
        writer.kill()
        lines += writer.stdout.readlines()
    told = int([line for line in lines if line.endswith("\n")][-1])
    report = verify(path)
    assert report.state == "open"
    assert report.last_seq is not None
    assert report.last_seq >= told


def test_recorder_needs_neither_torch_nor_trio() -> None:
    """`antiphon recordings verify` on a small machine must not need a model's libraries."""
    code = (
        "import sys; sys.modules.update(torch=None, trio=None, transformers=None);"
        "import recorder.write.writer, recorder.read.reader;"
        "import recorder.repair, recorder.storage.store"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
