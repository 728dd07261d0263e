"""What a session does while the recorder is behind: it waits, and loses what is its own alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn, cast

import anyio
import anyio.to_thread
import attrs
import pytest

from protocol.effects import LeaveQueue, Send
from protocol.events import ConnectionOpened, FrameReceived, SessionLimits
from protocol.session import Session
from recorder.errors import LogFailed
from recorder.log import SessionLog
from recorder.records import Record
from recorder.writer import Recorder, RecorderPolicy
from runtime import journal
from runtime.journal import RECORDER_STALL_S, Journal

from .helpers import on_virtual_time
from .test_recorder_samples import PATH, MemoryDisk

OWN_BYTES_MAX = 4_000
ALL_BYTES_MAX = 12_000
POLICY = RecorderPolicy(
    session_backlog_bytes_max=OWN_BYTES_MAX,
    total_backlog_bytes_max=ALL_BYTES_MAX,
    block_age_s=1000.0,
)


@attrs.define
class Recorded:
    """A recorded session, as far as its frames go."""

    journal: Journal = attrs.field(init=False)
    log: SessionLog = attrs.field(init=False)
    failures: list[float] = attrs.field(factory=list)

    @classmethod
    def begin(cls, recorder: Recorder, number: int) -> Recorded:
        """Open a log."""
        made = cls()
        path = PATH.with_name(f"{number}.session.zst")

        def open_log(told: Callable[[LogFailed], None]) -> SessionLog:
            made.log = recorder.open(path, {}, at_ns=0, on_failure=told)
            return made.log

        made.journal = Journal(
            open_log, on_failure=lambda: made.failures.append(anyio.current_time())
        )
        return made

    async def hear(self, size: int) -> float:
        """Take a frame; gives how many seconds reading paused."""
        began = anyio.current_time()
        self.journal.append_event(FrameReceived(at_ns=0, frame=bytes(size)))
        await self.journal.wait_for_room()
        return anyio.current_time() - began


@pytest.fixture
def disk() -> Iterator[MemoryDisk]:
    """A disk that takes nothing until it is told to."""
    made = MemoryDisk()
    made.hold.clear()
    yield made
    made.hold.set()


def test_a_backlog_of_others_costs_no_recording(disk: MemoryDisk) -> None:
    """One client that uploads videos would end the recordings of all others."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            small, large = (Recorded.begin(recorder, number) for number in range(2))
            assert await small.hear(100) == 0
            large.journal.append_event(FrameReceived(at_ns=0, frame=bytes(ALL_BYTES_MAX)))
            waits = [await small.hear(100) for _ in range(3)]
            assert waits == [RECORDER_STALL_S, 0, 0]
            assert await large.hear(100) == RECORDER_STALL_S
            assert (small.failures, len(large.failures)) == ([], 1)
            disk.hold.set()
            await anyio.to_thread.run_sync(recorder.close)
        assert small.failures == []

    on_virtual_time(body)


def test_a_session_that_goes_on_beside_others_keeps_to_its_own_bound(disk: MemoryDisk) -> None:
    """Sessions that are let through would eat the machine's memory together."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            large = Recorded.begin(recorder, 0)
            large.journal.append_event(FrameReceived(at_ns=0, frame=bytes(ALL_BYTES_MAX)))
            before = recorder.statistics.backlog_bytes
            small = Recorded.begin(recorder, 1)
            waits = list[float]()
            while not small.failures:
                waits.append(await small.hear(500))
            assert waits == [RECORDER_STALL_S, *[0] * (len(waits) - 2), RECORDER_STALL_S]
            held = recorder.statistics.backlog_bytes - before
            assert OWN_BYTES_MAX <= held < OWN_BYTES_MAX + 2_000
            assert await small.hear(500) == 0
            assert recorder.statistics.backlog_bytes - before == held
            disk.hold.set()

    on_virtual_time(body)


def test_who_has_found_room_waits_again_another_time(disk: MemoryDisk) -> None:
    """A session that was held up once would never be slowed down again."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            small, large, larger = (Recorded.begin(recorder, number) for number in range(3))
            large.journal.append_event(FrameReceived(at_ns=0, frame=bytes(ALL_BYTES_MAX)))
            assert [await small.hear(100) for _ in range(2)] == [RECORDER_STALL_S, 0]
            disk.hold.set()
            await small.log.room()
            disk.hold.clear()
            assert await small.hear(100) == 0
            larger.journal.append_event(FrameReceived(at_ns=0, frame=bytes(ALL_BYTES_MAX)))
            assert await small.hear(100) == RECORDER_STALL_S
            assert small.failures == []
            disk.hold.set()

    on_virtual_time(body)


OPENED = ConnectionOpened(
    recording_id="r" * 20,
    created_ms=1,
    mode="video",
    seed=1,
    limits=SessionLimits(session_s=60, init_wait_s=30, cleanup_wait_s=10, context_tokens=100),
    recording="off",
)


def test_without_a_log_no_record_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not record pays for recording, and its sessions wait for nobody."""

    def never(*_: object) -> NoReturn:
        raise AssertionError("a record was made")

    monkeypatch.setattr(journal, "event_record", never)
    monkeypatch.setattr(journal, "effect_record", never)
    kept = Journal(None, on_failure=never)
    kept.append_event(OPENED)
    session, effects = Session.open(OPENED)
    assert kept.append_effects(session, OPENED, effects) is journal.ready_now


def test_a_step_is_appended_in_one_go() -> None:
    """A frame is written before the record of what came with it, and costs a write of its own."""
    taken: list[tuple[int, ...]] = []

    class Kept:
        def append(self, *records: Record, urgent: bool) -> None:
            taken.append(tuple(record.seq for record in records))

    kept = Journal(lambda _: cast("SessionLog", Kept()), on_failure=lambda: None)
    opened = FrameReceived(at_ns=0, frame="{}")
    kept.append_event(opened)
    effects = (Send(ordinal=0, frame="a"), LeaveQueue(), Send(ordinal=1, frame="b"))
    session, _ = Session.open(OPENED)
    kept.append_effects(session, opened, effects)
    kept.append_effects(session, opened, ())
    kept.append_event(opened)
    assert taken == [(1,), (2, 3, 4), (5,)]
