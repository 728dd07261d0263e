"""What a session does while the recorder is behind: it waits, and loses what is its own alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn, cast

import anyio
import anyio.to_thread
import attrs
import pytest

from protocol.machine.session import Session
from protocol.values.effects import Close, Effect, LeaveQueue, Send
from protocol.values.events import ConnectionOpened, FrameReceived, SessionLimits
from recorder.format.format import Fields, LogFailed, Record
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder, RecorderPolicy
from runtime.net.limits import LARGE_BYTES_MIN
from runtime.session import journal
from runtime.session.journal import RECORDER_STALL_S, WRITE_WAIT_S, Journal
from tests.recorder.test_samples import PATH, MemoryDisk
from tests.sessions.in_memory import on_virtual_time

OWN_BYTES_MAX = 4_000
ALL_BYTES_MAX = 12_000
POLICY = RecorderPolicy(
    session_backlog_bytes_max=OWN_BYTES_MAX, total_backlog_bytes_max=ALL_BYTES_MAX, tick_s=1000.0
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
            assert waits == [0, 0, 0]
            assert await large.hear(100) == RECORDER_STALL_S
            assert (small.failures, large.failures) == ([], [])
            disk.hold.set()
            await anyio.to_thread.run_sync(recorder.close)
        assert small.failures == []

    on_virtual_time(body)


def test_a_large_message_beyond_a_logs_bound_floods_it(disk: MemoryDisk) -> None:
    """A client could end its recording by what it sends, and talk on; a small one harms nobody."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            one = Recorded.begin(recorder, 0)
            message = bytes(LARGE_BYTES_MIN + 1)
            assert not one.journal.is_flooded_by(message)
            assert await one.hear(len(message)) == RECORDER_STALL_S
            one.log._shared.steps += 1
            assert await one.hear(100) == RECORDER_STALL_S, "the disk goes on, slowly"
            one.journal._is_hung = False
            assert not one.journal.is_flooded_by(message[:LARGE_BYTES_MIN])
            assert not one.journal.is_flooded_by(None)
            assert one.journal.is_flooded_by(message)
            assert one.failures == []
            disk.hold.set()
            await anyio.to_thread.run_sync(recorder.close)
        assert one.failures == []

    on_virtual_time(body)


def test_a_disk_that_hangs_is_no_clients_flood(disk: MemoryDisk) -> None:
    """Clients would be closed for what the disk does."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            one = Recorded.begin(recorder, 0)
            message = bytes(LARGE_BYTES_MIN + 1)
            assert await one.hear(len(message)) == RECORDER_STALL_S
            assert not one.journal.is_flooded_by(message)
            assert one.failures == [RECORDER_STALL_S]
            disk.hold.set()

    on_virtual_time(body)


def test_who_has_found_room_waits_again_another_time(disk: MemoryDisk) -> None:
    """A session that was held up once would never be slowed down again."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            small, large, larger = (Recorded.begin(recorder, number) for number in range(3))
            others = [Recorded.begin(recorder, number) for number in range(3, 9)]
            large.journal.append_event(FrameReceived(at_ns=0, frame=bytes(ALL_BYTES_MAX)))
            share = ALL_BYTES_MAX // (3 + len(others))
            assert await small.hear(share) == RECORDER_STALL_S
            assert [await small.hear(100) for _ in range(2)] == [0, 0]
            disk.hold.set()
            await small.log.room()
            disk.hold.clear()
            assert await small.hear(100) == 0
            larger.journal.append_event(FrameReceived(at_ns=0, frame=bytes(ALL_BYTES_MAX)))
            assert await small.hear(share) == RECORDER_STALL_S
            assert small.failures == []
            disk.hold.set()

    on_virtual_time(body)


def test_a_wait_behind_others_is_charged_to_nobody(disk: MemoryDisk) -> None:
    """Recordings would end for what other clients send, or a disk that hangs be waited for."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            one = Recorded.begin(recorder, 0)
            began_s = anyio.current_time()
            session, _ = Session.open(OPENED)
            effects = (Send(ordinal=0, frame="a"),)
            ready = one.journal.append_effects(session, OPENED, effects)

            async def others_are_written() -> None:
                for _ in range(60):
                    await anyio.sleep(1)
                    one.log._shared.steps += 1

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(others_are_written)
                tasks.start_soon(ready)
            assert one.failures == [began_s + 60 + WRITE_WAIT_S]
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
    monkeypatch.setattr(journal, "step_records", never)
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

        async def finish(self, fields: Fields, *, at_ns: int) -> None:
            pass

    kept = Journal(lambda _: cast("SessionLog", Kept()), on_failure=lambda: None)
    opened = FrameReceived(at_ns=0, frame="{}")
    kept.append_event(opened)
    effects = (Send(ordinal=0, frame="a"), LeaveQueue(), Send(ordinal=1, frame="b"))
    session, _ = Session.open(OPENED)
    kept.append_effects(session, opened, effects)
    kept.append_effects(session, opened, ())
    kept.append_event(opened)
    for each in (effects[:1], ()):
        kept.append_event(opened, is_step=True)
        kept.append_effects(session, opened, each)
    kept.append_event(opened, is_step=True)  # a step that breaks off
    on_virtual_time(lambda: kept.finish(0, {}))
    assert taken == [(1,), (2, 3, 4), (5,), (6, 7), (8,), (9,)]


@pytest.mark.parametrize(
    ("effect", "waits"),
    [
        (Send(ordinal=0, frame="a"), True),
        (Close(code=1000, reason="stopped"), True),
        (LeaveQueue(), False),
    ],
    ids=["a frame", "a close", "what no client sees"],
)
def test_what_a_client_sees_waits_for_the_log(
    disk: MemoryDisk, effect: Effect, *, waits: bool
) -> None:
    """A client would know of an end that its log does not, once the server is killed."""

    async def body() -> None:
        with Recorder(POLICY, disk=disk) as recorder:
            one = Recorded.begin(recorder, 0)
            opened = FrameReceived(at_ns=0, frame="{}")
            session, _ = Session.open(OPENED)
            one.journal.append_event(opened)
            ready = one.journal.append_effects(session, opened, (effect,))
            with anyio.move_on_after(1) as scope:
                await ready()
            assert scope.cancelled_caught is waits
            disk.hold.set()

    on_virtual_time(body)


def test_a_session_knows_that_its_log_failed_before_a_frame_goes_out() -> None:
    """A client that answers that frame is told that it is recorded, by a server whose disk is full.

    The recorder's thread wakes those that wait, and reports the failure a moment later.
    """
    failures: list[bool] = []

    class Fails:
        steps_of_all = 0
        failure: LogFailed | None = None

        def append(self, *_records: Record, urgent: bool) -> None:
            pass

        async def written(self, seq: int) -> None:
            self.failure = LogFailed(f"record {seq} found no room")
            raise self.failure

        def abandon(self, reason: str) -> None:
            pass

    async def body() -> None:
        one = Journal(lambda _: cast("SessionLog", Fails()), lambda: failures.append(True))
        session, _ = Session.open(OPENED)
        event = FrameReceived(at_ns=0, frame="{}")
        await one.append_effects(session, event, (Send(ordinal=0, frame="a"),))()
        assert failures == [True]

    on_virtual_time(body)


def test_a_log_that_nobody_wants_is_waited_for_once() -> None:
    """With a disk that hangs, each answer of a session that is not recorded would take 10 s."""

    class Hangs:
        def append(self, *_records: Record, urgent: bool) -> None:
            pass

        def discard(self) -> None:
            pass

        async def wait_removed(self) -> None:
            await anyio.sleep_forever()

    async def body() -> None:
        kept = Journal(lambda _: cast("SessionLog", Hangs()), on_failure=lambda: None)
        session, _ = Session.open(OPENED)
        event = FrameReceived(at_ns=0, frame="{}")
        kept.append_event(event)
        kept.forget()
        first, second = (kept.append_effects(session, event, ()) for _ in range(2))
        assert first is second
        began_s = anyio.current_time()
        await first()
        assert anyio.current_time() - began_s == WRITE_WAIT_S
        assert kept.append_effects(session, event, ()) is journal.ready_now

    on_virtual_time(body)
