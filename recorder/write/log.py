"""One session's log as its driver uses it: the backlog, the progress of writing, and waiting tasks.

Rules: one thread appends; the recorder's thread takes, advances, releases and fails. No work, IO or
waiting happens under the lock. Cancelled waits lose nothing: appended records are still written.
When all logs together exceed their bound, only drivers over their share wait; a record is refused
only beyond its own log's bound. Calls into an event loop, asyncio's or trio's, never block and
never fail, also when the loop has ended; calls made before it has run the last ones share its
wake-up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import attrs
from anyio.lowlevel import current_token

from ..format.format import (
    MIB,
    RECORD_BYTES_MAX,
    RECORD_OVERHEAD_BYTES,
    Fields,
    LogFailed,
    LogFull,
    LogMisuse,
    Record,
    size_bytes,
)
from .logfile import FIN_FIELDS, LogFile

# -- waking an event loop --------------------------------------------------------------------------


Call = Callable[[], object]


class Loop:
    """Runs calls in one event loop, from any thread."""

    def __init__(self, native_token: object) -> None:
        """`native_token` is a `TrioToken` or an asyncio loop, from AnyIO's `current_token`."""
        is_trio = hasattr(native_token, "run_sync_soon")
        name = "run_sync_soon" if is_trio else "call_soon_threadsafe"
        self._schedule: Callable[[Call], object] = getattr(native_token, name)
        self._lock = threading.Lock()
        self._calls: list[Call] = []

    def call_soon(self, call: Call) -> None:
        """Have the loop run a call soon, in the order in which they come; it must not raise."""
        with self._lock:
            self._calls.append(call)
            if len(self._calls) > 1:
                return
        try:
            self._schedule(self._run)
        except RuntimeError:  # the loop has ended, on either backend
            with self._lock:
                self._calls.clear()

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()


# -- the log ---------------------------------------------------------------------------------------


_NOT_APPENDED: Final = frozenset({"session", "fin"})
CALL_UP_BYTES: Final = MIB
"""A backlog of this size is served before any task waits for it: several blocks of work."""

OnFailure = Callable[[LogFailed], None]


@attrs.define(eq=False, kw_only=True)
class _Waiter:
    is_done: Callable[[], bool]
    event: anyio.Event
    loop: Loop


@attrs.define(eq=False, kw_only=True)
class Shared:
    """State shared by all logs of a recorder, guarded by `lock`.

    Attributes:
        session_bytes_max: backlog at which one log is full.
        total_bytes_max: backlog of all logs at which each log over its share is full.
        loops: the event loops that were seen: one in a server, one per test elsewhere.
        serve_here: serves logs in the calling thread, for a recorder without its own.
        clock: in seconds.
        wakeup_lock: a lock that the recorder's thread takes to sleep, and that wakes it when it is
            freed; Python's `Condition` needs ten calls more.
        ready_logs: logs to serve now, in order.
        steps: steps of work done for any log since the start; constant while the disk hangs.
        is_closing: nothing more is accepted.
    """

    session_bytes_max: int
    total_bytes_max: int
    serve_here: Callable[[], None]
    clock: Callable[[], float]
    loops: dict[object, Loop] = attrs.field(factory=dict)
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    wakeup_lock: threading.Lock = attrs.field(factory=threading.Lock)
    ready_logs: deque[SessionLog] = attrs.field(factory=deque)
    backlog_bytes: int = 0
    logs: int = 0
    steps: int = 0
    failures: int = 0
    is_closing: bool = False
    room_waiters: list[_Waiter] = attrs.field(factory=list)
    _done: deque[_Waiter] = attrs.field(factory=deque)

    def loop(self) -> Loop | None:
        """Return the running loop, or None outside of one."""
        try:
            token = current_token().native_token
        except RuntimeError:  # AnyIO's error is a subclass
            return None
        if token not in self.loops:
            self.loops[token] = Loop(token)
        return self.loops[token]

    def wake_thread(self) -> None:
        """Wake the recorder's thread, or keep it from sleeping once; the lock is held."""
        if self.wakeup_lock.locked():
            self.wakeup_lock.release()

    def collect(self, waiters: list[_Waiter]) -> None:
        """Move the waiters that are done to those that `wake` wakes; the lock is held."""
        for waiter in [it for it in waiters if it.is_done()]:
            waiters.remove(waiter)
            self._done.append(waiter)

    def wake(self) -> None:
        """Wake those collected; without the lock and last, or they would wait for this thread."""
        while self._done:
            with suppress(IndexError):  # another thread may have taken it
                waiter = self._done.popleft()
                waiter.loop.call_soon(waiter.event.set)


class SessionLog:
    """A log being written. `Recorder.open` makes it; `finish` or the recorder's close ends it.

    Attributes:
        next_seq: `seq` that the next record must have.
        written_seq: `seq` of the last record that write(2) took, -1 before the first.
        backlog_bytes: appended and not yet written.
        queued_at: when the first record of the backlog came.
        awaited_at: when the last urgent record came.
        unsynced_at: when the first record came that is not on the device, if the file is dirty.
        failure: why the log failed, or None.
    """

    def __init__(
        self, shared: Shared, file: LogFile, on_failure: OnFailure | None, next_seq: int = 0
    ) -> None:
        self.path: Final[Path] = file.path
        self.file: Final = file
        self.written_seq = next_seq - 1
        self.failure: LogFailed | None = None
        self._shared: Final = shared
        self._on_failure: Final = on_failure
        self._home: Final = shared.loop()
        self._queue: deque[tuple[Record, int]] = deque()
        self.backlog_bytes = 0
        self.queued_at = self.awaited_at = self.unsynced_at = 0.0
        self.next_seq = next_seq
        self._due_seq = -1
        self._is_due = False
        self._is_in_line = False
        self._is_ended = False
        self._waiters: list[_Waiter] = []
        self.is_unwanted = False
        self._is_gone = False
        self._leavers: list[_Waiter] = []

    @property
    def is_full(self) -> bool:
        """Whether the driver should wait in `room` before it appends more."""
        shared = self._shared
        if shared.backlog_bytes < shared.total_bytes_max:
            return self.is_over_its_bound
        return self.backlog_bytes > shared.total_bytes_max // max(1, shared.logs)

    @property
    def is_over_its_bound(self) -> bool:
        """Whether this log's own backlog is at its bound, whatever other logs hold."""
        return self.backlog_bytes >= self._shared.session_bytes_max

    @property
    def steps_of_all(self) -> int:
        """Steps of work the recorder has done for any log; constant while the disk hangs."""
        return self._shared.steps

    def append(self, *records: Record, urgent: bool = False, is_own: bool = False) -> None:
        """Take the next records without blocking; a failed log counts them as lost.

        `records`: their fields must not be changed afterwards.
        `urgent`: a Send or Close waits for them: write them and everything queued now.
        `is_own`: they are the recorder's, and only it writes `session` and `fin`.

        `LogMisuse`: a record is out of order, or the log or the recorder has ended. `LogFull`: the
        backlog would be a maximal record past its bound. The rest is not taken.
        """
        for record in records:
            if record.kind in _NOT_APPENDED and not is_own:
                raise LogMisuse(f"{record.kind!r} is written by opening and finishing the log")
        shared = self._shared
        bytes_max = shared.session_bytes_max + RECORD_BYTES_MAX
        with shared.lock:
            now = shared.clock()
            self.queued_at = self.queued_at if self._queue else now
            self.awaited_at = now if urgent else self.awaited_at
            for record in records:
                kind, seq = record.kind, record.seq
                size = size_bytes(record.fields) + RECORD_OVERHEAD_BYTES
                if self._is_ended or (shared.is_closing and self.failure is None):
                    raise LogMisuse(f"{self.path.name} has ended, {kind} {seq} is too late")
                if seq != self.next_seq:
                    raise LogMisuse(f"{kind} has seq {seq}, the next is {self.next_seq}")
                if self.backlog_bytes + size > bytes_max:
                    raise LogFull(f"{self.path.name} holds {self.backlog_bytes} bytes back already")
                self.next_seq += 1
                self._is_ended = kind == "fin"
                if self.failure is not None:
                    continue  # lost; counted by its seq
                self._queue.append((record, size))
                self.backlog_bytes += size
                shared.backlog_bytes += size
            if not self._queue or not (urgent or self.backlog_bytes >= CALL_UP_BYTES):
                return
            self._call_up()
        shared.serve_here()

    async def written(self, seq: int) -> None:
        """Wait until write(2) took record `seq`, and have it written now.

        `LogMisuse`: no record `seq` was appended; `LogFailed`: the log failed before it was
        written.
        """
        if seq >= self.next_seq:
            raise LogMisuse(f"record {seq} was never appended, the next is {self.next_seq}")
        if self.written_seq >= seq:
            return  # usually another frame of the same step has waited
        await self._wait(
            self._waiters, lambda: self.written_seq >= seq or self.failure is not None, seq
        )
        if self.written_seq < seq:
            self._raise_if_failed()

    async def room(self) -> None:
        """Wait until the log is not full; `LogFailed` if it failed."""
        await self._wait(
            self._shared.room_waiters, lambda: self.failure is not None or not self.is_full
        )
        self._raise_if_failed()

    async def finish(self, fields: Fields, *, at_ns: int) -> None:
        """Append `fin`, and wait until the file is synced to the device and closed.

        The recorder adds to `fields`; `at_ns` is monotonic. When cancelled, `fin` is still written.
        `LogMisuse`: the log has already ended, or `fields` holds an added field; `LogFailed`: the
        log failed.
        """
        if FIN_FIELDS & fields.keys():
            raise LogMisuse(f"fin takes {sorted(FIN_FIELDS & fields.keys())} from the recorder")
        record = Record(kind="fin", seq=self.next_seq, at_ns=at_ns, fields=fields)
        self.append(record, urgent=True, is_own=True)
        await self.written(record.seq)

    def abandon(self, reason: str) -> None:
        """Fail the log by the driver's decision; its backlog is dropped and counted."""
        self.fail(LogFailed(reason), notify=False)
        self._shared.serve_here()

    def discard(self) -> None:
        """Have the file removed entirely; this is not counted as a failure."""
        with self._shared.lock:
            self.is_unwanted = True
            if self.failure is None:
                self._give_up(LogFailed(f"{self.path.name} is not wanted"))
            else:
                self._call_up()
        self._shared.wake()
        self._shared.serve_here()

    async def wait_removed(self) -> None:
        """Wait until the file of a discarded log is removed."""
        await self._wait(self._leavers, lambda: self._is_gone)

    def mark_removed(self) -> None:
        """Note that the file of a discarded log is removed; called by the recorder."""
        with self._shared.lock:
            self._is_gone = True
            self._shared.collect(self._leavers)
        self._shared.wake()

    def take(self, bytes_max: int) -> tuple[list[Record], int]:
        """Take queued records up to `bytes_max` (at least one; all if failed), and their size."""
        with self._shared.lock:
            records, size, queue = list[Record](), 0, self._queue
            if not self.file.is_dirty:
                self.unsynced_at = self.queued_at
            while queue and (
                not records or size + queue[0][1] <= bytes_max or self.failure is not None
            ):
                record, record_bytes = queue.popleft()
                records.append(record)
                size += record_bytes
            self._is_due = bool(queue) and queue[0][0].seq <= self._due_seq
            return records, size

    def advance(self, seq: int) -> None:
        """Note that write(2) took everything up to `seq`; the recorder calls `wake` then."""
        with self._shared.lock:
            self.written_seq = seq
            if self._waiters:
                self._shared.collect(self._waiters)

    def release(self, size: int) -> bool:
        """Note that `size` bytes were freed; return whether the log must be served again now."""
        with self._shared.lock:
            self.backlog_bytes -= size
            self._shared.backlog_bytes -= size
            self._is_in_line = self._is_due
            if self._shared.room_waiters:
                self._shared.collect(self._shared.room_waiters)
            return self._is_due

    def call_up_if_queued(self, since: float = inf) -> None:
        """Serve the log in this round if it holds records; called by the recorder's thread.

        Only if they came before `since`, or since then none was urgent, as the next might be.
        """
        with self._shared.lock:
            if self._queue and min(self.queued_at, self.awaited_at) <= since:
                self._call_up()

    def fail(self, failure: LogFailed, *, notify: bool) -> None:
        """Fail the log for good, from any thread; the recorder's thread closes the file."""
        with self._shared.lock:
            if self.failure is not None:
                return
            self._shared.failures += 1
            self._give_up(failure)
        self._shared.wake()
        if notify and self._on_failure is not None:
            call = partial(self._on_failure, failure)
            call() if self._home is None else self._home.call_soon(call)

    def _give_up(self, failure: LogFailed) -> None:
        self.failure = failure
        self._call_up()
        self._shared.collect(self._waiters)
        self._shared.collect(self._shared.room_waiters)

    def _call_up(self) -> None:
        self._due_seq, self._is_due = self.next_seq - 1, True
        if not self._is_in_line:
            self._is_in_line = True
            self._shared.ready_logs.append(self)
            self._shared.wake_thread()

    async def _wait(
        self, waiters: list[_Waiter], is_done: Callable[[], bool], seq: float = inf
    ) -> None:
        """Wait until `is_done`; the log is served if it holds back records up to `seq`."""
        loop = self._home or self._shared.loop()
        assert loop is not None, "only a task can wait"
        waiter = _Waiter(is_done=is_done, event=anyio.Event(), loop=loop)
        with self._shared.lock:
            is_over = is_done()
            if not is_over:
                waiters.append(waiter)
                if self._queue and self._queue[0][0].seq <= seq:
                    self._call_up()
        self._shared.serve_here()
        try:
            await (anyio.lowlevel.checkpoint() if is_over else waiter.event.wait())
        except BaseException:
            with self._shared.lock:
                if waiter in waiters:
                    waiters.remove(waiter)
            raise

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise LogFailed(str(self.failure)) from self.failure
