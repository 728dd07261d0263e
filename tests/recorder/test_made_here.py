"""Blocks made by the thread that appends: the same log, and the recorder's thread only writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recorder.format.compression import Compressor
from recorder.format.errors import LogFailed
from recorder.format.records import Record
from recorder.read.reader import LogReader
from recorder.read.verify import verify
from recorder.write.backlog import HEARD_TICKS, MADE_HERE_BYTES_MAX, REST_TICKS
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder, RecorderPolicy
from tests.recorder.test_samples import PATH, SESSION, MemoryDisk, record

pytestmark = pytest.mark.anyio

TIMEOUT_S = 20
LONG_S = 1000.0
HERE, THERE = "here", "there"


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each block was made: in this thread, or in another."""
    here, makers, steps = threading.get_ident(), list[str](), Compressor.steps

    def noting(self: Compressor, *args: Any, **kwargs: Any) -> Any:
        makers.append(HERE if threading.get_ident() == here else THERE)
        return steps(self, *args, **kwargs)

    monkeypatch.setattr(Compressor, "steps", noting)
    return makers


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def recorder(disk: MemoryDisk) -> Iterator[Recorder]:
    with Recorder(RecorderPolicy(block_age_s=LONG_S), disk=disk) as made:
        yield made


async def begun(recorder: Recorder, failures: list[LogFailed] | None = None) -> SessionLog:
    told = None if failures is None else failures.append
    log = recorder.open(PATH, SESSION, at_ns=0, on_failure=told)
    await log.written(0)
    await until(lambda: not recorder.statistics.backlog_bytes)  # the thread has left the log
    return log


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(TIMEOUT_S * 1000):
        if is_so():
            return
        await anyio.sleep(0.001)
    raise TimeoutError


def seqs(disk: MemoryDisk) -> list[int]:
    with LogReader(disk.data()) as reader:
        return [item.seq for item in reader if isinstance(item, Record)]


async def test_what_a_client_waits_for_is_made_here(
    recorder: Recorder, disk: MemoryDisk, makers: list[str]
) -> None:
    """Two threads that compute hold each other up: five hundred sessions waited 0.3 s."""
    with anyio.fail_after(TIMEOUT_S):
        log = await begun(recorder)
        log.append(record("rx", 1, frame="a"))
        log.append(record("tx", 2, frame="b", ordinal=0), urgent=True)
        assert makers == [THERE, HERE]
        await log.written(2)
    assert makers == [THERE, HERE]
    assert seqs(disk) == [0, 1, 2]


async def test_much_is_made_by_the_recorder(
    recorder: Recorder, disk: MemoryDisk, makers: list[str]
) -> None:
    """All sessions would wait while ten seconds of sound are compressed."""
    with anyio.fail_after(TIMEOUT_S):
        log = await begun(recorder)
        log.append(record("tx", 1, frame="x" * MADE_HERE_BYTES_MAX, ordinal=0), urgent=True)
        await log.written(1)
        await log.finish({"reason": "closed"}, at_ns=9)
    assert set(makers) == {THERE}
    assert verify(disk.data()).state == "finished"


async def test_a_waiter_has_only_what_it_waits_for_made(
    recorder: Recorder, disk: MemoryDisk, makers: list[str]
) -> None:
    """A client's next pieces would be made a block each time an answer is sent."""
    with anyio.fail_after(TIMEOUT_S):
        log = await begun(recorder)
        disk.hold.clear()
        log.append(record("tx", 1, frame="b", ordinal=0), urgent=True)
        log.append(record("rx", 2, frame="a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.written, 1)
            await anyio.sleep(0.05)
            disk.hold.set()
        assert seqs(disk) == [0, 1]
        await log.written(2)
    assert seqs(disk) == [0, 1, 2]


async def test_what_a_client_sent_is_made_when_it_is_old(
    disk: MemoryDisk, makers: list[str]
) -> None:
    """A killed server would lose all that came since the last answer."""
    with (
        anyio.fail_after(TIMEOUT_S),
        Recorder(RecorderPolicy(block_age_s=60), disk=disk) as recorder,
    ):
        log = await begun(recorder)
        for seq, at_s in enumerate((0, 20, 59), 1):
            log.append(Record(kind="rx", seq=seq, at_ns=int(at_s * 1e9), fields={"frame": "a"}))
        assert makers == [THERE]
        log.append(Record(kind="rx", seq=4, at_ns=int(60e9), fields={"frame": "a"}))
        assert makers == [THERE, HERE]
        log.append(Record(kind="mark", seq=5, at_ns=int(60e9), fields={}))
        log.append(Record(kind="mark", seq=6, at_ns=int(900e9), fields={}))
        assert makers == [THERE, HERE]
    assert seqs(disk) == [*range(7)]


@pytest.mark.parametrize(("kind", "ticks"), [("rx", HEARD_TICKS), ("mark", REST_TICKS)])
async def test_the_rest_is_made_by_the_recorder(
    disk: MemoryDisk, makers: list[str], kind: str, ticks: int
) -> None:
    """A client that falls silent sends no append that would make it."""
    now_s = [0.0]
    policy = RecorderPolicy(block_age_s=0.001)
    with (
        anyio.fail_after(TIMEOUT_S),
        Recorder(policy, disk=disk, clock=lambda: now_s[0]) as recorder,
    ):
        log = await begun(recorder)
        log.append(Record(kind=kind, seq=1, at_ns=0, fields={"frame": "a"}))
        for _ in range(ticks):
            assert log.written_seq == 0
            now_s[0] += 1
            await anyio.sleep(0.03)
        await until(lambda: log.written_seq == 1)
    assert makers == [THERE, THERE]


async def test_a_record_that_cannot_be_stored_fails_only_its_log(
    recorder: Recorder, disk: MemoryDisk, makers: list[str]
) -> None:
    """It is raised in the task of a session, which must go on."""
    failures: list[LogFailed] = []
    with anyio.fail_after(TIMEOUT_S):
        log = await begun(recorder, failures)
        log.append(record("tx", 1, frame="b", ordinal=float("nan")), urgent=True)
        with pytest.raises(LogFailed, match="RecordInvalid"):
            await log.written(1)
        await until(lambda: bool(failures) and not log.backlog_bytes)
        log.append(record("tx", 2, frame="b", ordinal=1), urgent=True)
        other = recorder.open(PATH.with_name("other.session.zst"), SESSION, at_ns=0)
        await other.written(0)
    assert makers == [THERE, THERE]
    assert recorder.statistics.failures == 1


async def test_a_recorder_that_closes_waits_for_what_is_being_made(
    recorder: Recorder, disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records were taken: they must not be lost without a word."""
    begins, goes_on, steps = threading.Event(), threading.Event(), Compressor.steps

    def slow(self: Compressor, *args: Any, **kwargs: Any) -> Any:
        begins.set()
        goes_on.wait(TIMEOUT_S)
        return steps(self, *args, **kwargs)

    with anyio.fail_after(TIMEOUT_S):
        log = await begun(recorder)
        monkeypatch.setattr(Compressor, "steps", slow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                anyio.to_thread.run_sync, lambda: log.append(record("mark", 1), urgent=True)
            )
            await anyio.to_thread.run_sync(begins.wait)
            tasks.start_soon(recorder.aclose)
            await anyio.sleep(0.05)
            goes_on.set()
    assert seqs(disk) == [0, 1]


STEPS = st.lists(
    st.tuples(st.sampled_from([1, 1, 500, 90_000, MADE_HERE_BYTES_MAX]), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(STEPS, st.sets(st.integers(0, 11)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
async def test_whoever_makes_them_the_log_is_whole(
    steps: list[tuple[int, bool]], waits: set[int]
) -> None:
    """A block out of order, or a repeated blob's reference into the future, ends a log."""
    disk = MemoryDisk()
    frames = [f'{{"audio":"{"QUJD" * (size // 4 + 20)}"}}' for size, _ in steps]
    with (
        anyio.fail_after(TIMEOUT_S),
        Recorder(RecorderPolicy(block_age_s=0.002), disk=disk) as recorder,
    ):
        log = recorder.open(PATH, SESSION, at_ns=0)
        for number, (frame, (_, urgent)) in enumerate(zip(frames, steps, strict=True)):
            fields = {"type": "FrameReceived", "frame": frame}
            at_ns = number * 1_000_000
            log.append(Record(kind="rx", seq=number + 1, at_ns=at_ns, fields=fields), urgent=urgent)
            if number in waits:
                await log.written(number + 1)
        await log.finish({"reason": "closed"}, at_ns=10**9)
    assert verify(disk.data()).state == "finished"
    with LogReader(disk.data()) as reader:
        read = [
            item.fields["frame"]
            for item in reader
            if isinstance(item, Record) and item.kind == "rx"
        ]
    assert read == frames
