"""The recorder: one thread that writes the logs of all sessions, and one that syncs them.

    driver --append--> backlog of the log --thread: encode, compress, write(2)--> file
           <--written, room, on_failure----- calls into the driver's event loop

Rules:
- `append` never blocks. Records that are ready together share a block. An urgent record, or a task
  in `written`, has its log served at once. Others wait for the next such record, up to `age_s_max`,
  while there are any: so a unit of a session is one block. Without them they wait for a tick.
- Logs are served in turn by bytes (deficit round robin), `QUANTUM_BYTES` of work per turn; a log
  new in line comes first. So a log with little to write waits for one step of the current work and
  one turn of each log before it, whatever the others' backlog.
- `written` returns after write(2), under durability `unit` after fdatasync too. Other syncs run in
  the syncer's thread, in order, so a slow device delays no other session.
- A failed create, write or sync fails its log for good: no retry, the backlog is dropped and
  counted, and the opener is told. Other logs continue.
- The driver decides what a session does when its backlog is full. At the total bound, a log under
  its share (the bound by the number of logs) is not full. Each log's own bound holds in any case:
  that many bytes, plus one record.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal, Self

import attrs
from anyio import to_thread

from ..format.format import MIB, Fields, LogFailed, LogMisuse, Record, recording_id_of
from .files import Directories, Disk
from .log import OnFailure, SessionLog, Shared
from .logfile import Compressor, LogFile

# -- syncing ---------------------------------------------------------------------------------------


Job = Callable[[], None]


class Syncer:
    """Runs jobs in its own thread, which starts with the first job."""

    def __init__(self, *, inline: bool) -> None:
        self._inline = inline
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, job: Job) -> None:
        """Queue a job; called from one thread only."""
        if self._inline:
            job()
            return
        if self._thread is None:
            # A daemon, like the recorder's thread: a hanging device must not keep the process.
            self._thread = threading.Thread(target=self._run, name="antiphon-syncer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Wait until all jobs are done; no job may be queued afterwards."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


# -- the recorder ----------------------------------------------------------------------------------


_LOG: Final = logging.getLogger("antiphon.recorder")
QUANTUM_BYTES: Final = MIB
"""Bytes of a log's work per turn, some 10 ms: more than a second of a session."""

_FOR_EVER: Final = -1.0

Durability = Literal["none", "interval", "unit"]
"""When fdatasync runs besides at `fin`: never, at intervals, or also after a block with a unit."""


@attrs.frozen(kw_only=True)
class RecorderPolicy:
    """How logs are kept.

    Attributes:
        durability: when fdatasync runs.
        age_s_max: how long a record waits for an urgent one, to share its block, and for a sync:
            more than the second in which the next unit comes.
        tick_s: how often the recorder looks at what waits; both together are what a power cut may
            cost, except under `none`.
        session_backlog_bytes_max: bytes at which a log is full; some 40 seconds of speech.
        total_backlog_bytes_max: total bytes at which each log over its share is full.
    """

    durability: Durability = "interval"
    age_s_max: float = 1.25
    tick_s: float = 0.25
    session_backlog_bytes_max: int = 8 * MIB
    total_backlog_bytes_max: int = 256 * MIB


@attrs.frozen(kw_only=True)
class RecorderStatistics:
    """Counts since the start, and current state.

    `logs`: open now; `backlog_bytes`: appended and not yet written, in all logs; `failures`: logs
    that failed or were abandoned.
    """

    logs: int
    backlog_bytes: int
    blocks: int
    file_bytes: int
    failures: int


@attrs.define(eq=False)
class _Work:
    """A log's work in progress.

    Attributes:
        credit_bytes: allowed in this turn; negative credit is paid back in later turns.
        steps: of the records taken, of `size_bytes`; None when the next are to be taken.
    """

    credit_bytes: int = 0
    steps: Iterator[int] | None = None
    size_bytes: int = 0


class Recorder:
    """Writes any number of logs from one thread; use it as a context manager, or call `close`."""

    def __init__(
        self,
        policy: RecorderPolicy | None = None,
        *,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        inline: bool = False,
    ) -> None:
        """Start the recorder.

        Args:
            policy: how logs are kept.
            disk: the file operations; the operating system's by default.
            clock: in seconds; decides when a block and a sync are due, never a log's content.
            inline: work in the caller's thread, and only on records that a task awaits.
        """
        self._policy: Final = policy if policy is not None else RecorderPolicy()
        self._disk: Final = disk if disk is not None else Disk()
        self._directories: Final = Directories(self._disk)
        self._clock: Final = clock
        self._compressor: Final = Compressor()
        self._logs: dict[SessionLog, None] = {}  # in order, as a set is not
        self._syncer: Final = Syncer(inline=inline)
        self._syncing: Final[set[SessionLog]] = set()
        self._under_way: Final[dict[SessionLog, _Work]] = {}
        self._had_a_turn: Final[deque[SessionLog]] = deque()
        self._blocks = self._file_bytes = 0
        self._shared: Final = Shared(
            session_bytes_max=self._policy.session_backlog_bytes_max,
            total_bytes_max=self._policy.total_backlog_bytes_max,
            serve_here=self._serve_called_up if inline else lambda: None,
            clock=clock,
        )
        self._thread: Final = None if inline else self._start()

    def open(
        self, path: Path, fields: Fields, *, at_ns: int, on_failure: OnFailure | None = None
    ) -> SessionLog:
        """Start a log; the thread creates the file, `written(0)` waits for it.

        `path` is from `Store.path`; `at_ns` is monotonic. `on_failure` is called once if the log
        fails, in the current event loop, else in the recorder's thread. `LogMisuse`: the recorder
        is closed, or the name is not that of a recording.
        """
        file = self._file(path, self._compressor)
        log = self._keep(SessionLog(self._shared, file, on_failure))
        head = Record(kind="session", seq=0, at_ns=at_ns, fields=fields)
        log.append(head, urgent=True, is_own=True)
        return log

    def reopen(self, path: Path) -> LogFile:
        """Open a log that lost its writer, and hold its lock; close it, or `go_on`.

        `BlockingIOError`: it has a writer; `OSError`: it cannot be opened; `LogMisuse`: the name is
        not that of a recording.
        """
        file = self.file(path)
        file.reopen()
        return file

    def go_on(
        self, file: LogFile, next_seq: int, on_failure: OnFailure | None = None
    ) -> SessionLog:
        """Go on with a reopened log, cut off at its end; `LogMisuse`, `on_failure` as in `open`."""
        file.hand_over(self._compressor)
        return self._keep(SessionLog(self._shared, file, on_failure, next_seq=next_seq))

    def file(self, path: Path) -> LogFile:
        """Make a log's file, for a caller that creates it and begins it before it is to `go_on`.

        It may be written in any one thread until then, while the recorder's writes others.
        """
        return self._file(path, Compressor())

    def _file(self, path: Path, compressor: Compressor) -> LogFile:
        recording_id_of(path)
        return LogFile(path, disk=self._disk, compressor=compressor, directories=self._directories)

    def _keep(self, log: SessionLog) -> SessionLog:
        with self._shared.lock:
            if self._shared.is_closing:
                raise LogMisuse(f"the recorder is closed, {log.path.name} cannot be opened")
            self._logs[log] = None
            self._shared.logs = len(self._logs)
        return log

    @property
    def statistics(self) -> RecorderStatistics:
        """Counts since the start, and current state."""
        return RecorderStatistics(
            logs=len(self._logs),
            backlog_bytes=self._shared.backlog_bytes,
            blocks=self._blocks,
            file_bytes=self._file_bytes,
            failures=self._shared.failures,
        )

    def close(self) -> None:
        """Write everything appended, close all files, end the thread; blocks, is idempotent."""
        with self._shared.lock:
            self._shared.is_closing = True
            self._shared.wake_thread()
        if self._thread is None:
            self._close_logs()
        else:
            self._thread.join()

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        await to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> threading.Thread:
        # A daemon: a process that forgot to close must still exit. That loses only
        # data that no client saw.
        thread = threading.Thread(target=self._run, name="antiphon-recorder", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            tick = self._clock()
            while not self._shared.is_closing:
                self._wait_until(tick)
                self._serve_a_round()
                if self._clock() >= tick:
                    self._serve_aged()
                    tick = self._clock() + self._policy.tick_s
        except BaseException as error:
            # An unexpected error is raised visibly, but no session may wait for
            # a dead thread or believe that it is recorded.
            for log in tuple(self._logs):
                self._fail(log, error)
            raise
        finally:
            self._close_logs()

    def _wait_until(self, tick: float) -> None:
        shared = self._shared
        while not (shared.ready_logs or self._had_a_turn or shared.is_closing):
            wait_s = tick - self._clock() if self._logs else _FOR_EVER
            if self._logs and wait_s <= 0:
                return
            shared.wakeup_lock.acquire(timeout=wait_s)

    def _serve_aged(self) -> None:
        due_at = self._clock() - self._policy.age_s_max
        for log in tuple(self._logs):
            log.call_up_if_queued(due_at)
        self._serve_a_round()
        self._shared.serve_here()
        due = list[SessionLog]()
        is_synced = self._policy.durability != "none"  # else only at the end
        for log in tuple(self._logs) if is_synced else ():
            is_due = log.file.is_dirty and log.unsynced_at <= due_at
            if is_due and log not in self._syncing and log.failure is None:
                due.append(log)
        if due:
            self._syncing.update(due)
            self._syncer.ask(partial(self._sync, due))

    def _serve_called_up(self) -> None:
        while self._shared.ready_logs or self._had_a_turn:
            self._serve_a_round()

    def _serve_a_round(self) -> None:
        """Give a turn to each log new in line, and another to one that had a turn."""
        ready_logs = self._shared.ready_logs
        for _ in range(len(ready_logs)):
            self._serve(ready_logs.popleft())
        if self._had_a_turn:
            self._serve(self._had_a_turn.popleft())

    def _serve(self, log: SessionLog) -> None:
        """Give a log its turn; it stays in line while it has more work."""
        work = self._under_way.setdefault(log, _Work())
        work.credit_bytes += QUANTUM_BYTES
        while work.credit_bytes > 0:
            if work.steps is None:
                records, work.size_bytes = log.take(QUANTUM_BYTES)
                work.steps = self._write(log, records)
            try:
                step_bytes = next(work.steps, None)
            except Exception as error:  # whatever it is, it must not reach other logs
                self._fail(log, error)
                step_bytes = None
            self._shared.steps += 1
            if step_bytes is not None:
                work.credit_bytes -= step_bytes
                continue
            work.steps = None
            if not log.release(work.size_bytes):
                del self._under_way[log]
                break
        else:
            self._had_a_turn.append(log)
        self._shared.wake()

    def _write(self, log: SessionLog, records: list[Record]) -> Iterator[int]:
        """Write records step by step, yielding each step's bytes; a begun block is completed."""
        file = log.file
        if records and records[0].kind == "session" and log.failure is None:
            file.create()
        for step in file.steps(records) if log.failure is None else ():
            if isinstance(step, int):
                yield step
                continue
            self._blocks += 1
            self._file_bytes += step.file_bytes
            if log.failure is not None:
                break
            if "fin" in step.kinds:
                self._syncer.ask(partial(self._sync_fin, log, step.last_seq))
                return
            if self._policy.durability == "unit" and "unit" in step.kinds:
                file.sync()
            log.advance(step.last_seq)
            yield step.file_bytes
        if log.failure is not None:  # by the syncer: it may be syncing this file
            self._syncer.ask(partial(self._drop_failed, log))

    def _sync_fin(self, log: SessionLog, last_seq: int) -> None:
        """Sync and close a finished log; runs in the syncer's thread."""
        try:
            log.file.sync()
            self._drop(log)
            log.advance(last_seq)
            self._shared.wake()
        except Exception as error:  # whatever it is, it must not reach other logs
            self._fail(log, error)

    def _sync(self, logs: list[SessionLog]) -> None:
        """Sync logs that go on; runs in the syncer's thread."""
        for log in logs:
            try:
                log.file.sync()
            except Exception as error:  # as above
                self._fail(log, error)
            finally:
                self._syncing.discard(log)

    def _fail(self, log: SessionLog, error: BaseException) -> None:
        failure = LogFailed(f"{log.path.name} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        log.fail(failure, notify=True)

    def _drop_failed(self, log: SessionLog) -> None:
        if log.is_unwanted:
            try:
                log.file.remove()
            except OSError as error:
                _LOG.error("%s is not wanted, and could not be removed: %s", log.path, error)
        with contextlib.suppress(OSError):  # it has failed already
            log.file.mark_failed()
        with contextlib.suppress(OSError):
            self._drop(log)
        if log.is_unwanted:
            log.mark_removed()

    def _drop(self, log: SessionLog) -> None:
        with self._shared.lock:
            self._logs.pop(log, None)
            self._shared.logs = len(self._logs)
        log.file.close()

    def _close_logs(self) -> None:
        """Write what is queued and close every file; on the thread, or after it was told to end."""
        with self._shared.lock:
            self._shared.is_closing = True
        for log in tuple(self._logs):
            log.call_up_if_queued()
        self._serve_called_up()
        self._syncer.close()
        for log in tuple(self._logs):
            try:
                self._drop(log)
            except OSError as error:
                self._fail(log, error)
