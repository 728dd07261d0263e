"""The recorder: one thread that writes the logs of all sessions, and one that syncs them.

    driver --append--> backlog of the log --thread: encode, compress, write(2)--> file
           <--written, room, on_failure----- bell of the driver's event loop

Rules:
- `append` never blocks, and costs the caller next to nothing; all the work is the thread's.
- Records of a log that are ready together share one block. An urgent record, or somebody who waits
  in `written`, has its log served at once; other records at most `block_age_s` later.
- Logs are served in turn, by bytes (deficit round robin): in a turn a log has `QUANTUM_BYTES` of
  work done. One that has just come in line has its first turn before those that have had theirs.
  So a log with little to write waits for a step of the work at hand, and a turn of each log that
  came in line before it, however much others hold back.
- `written` returns after write(2) took the block, under durability `unit` after fdatasync too.
- A sync at an interval or at `fin` runs in the syncer's thread, so that a slow device holds up no
  other session. Under durability `unit` each waits in turn: that is what was asked for.
- A failed create, write or sync fails that log for good: it is never retried, its backlog is
  dropped and counted, its opener is told. Other logs go on.
- The backlog is bounded in bytes, a log and in all. The recorder says when it is full; what a
  session does then is the driver's decision. While all logs together are full, a log that holds
  less than its share of that bound (the bound by the number of logs) is not. Where drivers go on
  all the same, each log's own bound holds: that many bytes a log, and one record.

It does not read logs, and decides nothing about a session.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import attrs
from anyio import to_thread

from .compression import Compressor
from .disk import Directories, Disk, LocalDisk
from .errors import LogFailed, LogMisuse
from .format import MIB, recording_id_of
from .log import OnFailure, SessionLog, Shared
from .logfile import LogFile
from .records import Fields, Record
from .syncer import Syncer

_LOG: Final = logging.getLogger("antiphon.recorder")
QUANTUM_BYTES: Final = MIB
"""Of a log's work in one turn, some 10 ms: more than a second of a session is."""

Durability = Literal["none", "interval", "unit"]
"""When fdatasync runs, but at `fin`: never, once an interval, or also after a block with a unit."""


@attrs.frozen(kw_only=True)
class RecorderPolicy:
    """How logs are kept.

    Attributes:
        durability: when fdatasync runs.
        sync_interval_s: but under `none`, what a power cut may cost, and a `block_age_s` more.
        block_age_s: how long a record that nobody waits for may wait for others.
        session_backlog_bytes_max: a log is full at this many bytes; some 40 seconds of speech.
        total_backlog_bytes_max: at this many bytes in all, each log is full that holds its share.
    """

    durability: Durability = "interval"
    sync_interval_s: float = 1.0
    block_age_s: float = 0.25
    session_backlog_bytes_max: int = 8 * MIB
    total_backlog_bytes_max: int = 256 * MIB


@attrs.frozen(kw_only=True)
class RecorderStatistics:
    """What a recorder did so far, and holds now.

    Attributes:
        logs: open now.
        backlog_bytes: appended and not yet written, in all logs.
        blocks: blocks written.
        file_bytes: bytes written.
        failures: logs that failed, or were given up.
    """

    logs: int
    backlog_bytes: int
    blocks: int
    file_bytes: int
    failures: int


@attrs.define(eq=False)
class _Work:
    """A log's work under way.

    Attributes:
        credit_bytes: that may be done in this turn; below zero, later turns pay for it.
        steps: of the records that were taken; None where the next are to be taken.
        size_bytes: of those records.
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
            disk: where to; the operating system's files by default.
            clock: seconds; decides when a block and a sync are due, never what is in a log.
            inline: work in the caller's thread instead of one of its own, so that a test under a
                virtual clock waits for nothing. Records nobody waits for stay until somebody does.
        """
        self._policy: Final = policy if policy is not None else RecorderPolicy()
        self._disk: Final = disk if disk is not None else LocalDisk()
        self._directories: Final = Directories(self._disk)
        self._clock: Final = clock
        self._compressor: Final = Compressor()
        self._logs: dict[SessionLog, float] = {}  # to when it was last synced
        self._syncer: Final = Syncer(inline=inline)
        self._syncing: Final[set[SessionLog]] = set()
        self._under_way: Final[dict[SessionLog, _Work]] = {}
        self._had_a_turn: Final[deque[SessionLog]] = deque()
        self._blocks = self._file_bytes = 0
        self._shared: Final = Shared(
            session_bytes_max=self._policy.session_backlog_bytes_max,
            total_bytes_max=self._policy.total_backlog_bytes_max,
            serve_here=self._serve_called_up if inline else _serve_elsewhere,
        )
        self._thread: Final = None if inline else self._start()

    def open(
        self, path: Path, fields: Fields, *, at_ns: int, on_failure: OnFailure | None = None
    ) -> SessionLog:
        """Start a log; the thread creates the file, `written(0)` waits for it.

        Args:
            path: the new file, from `Store.path`.
            fields: of the `session` record.
            at_ns: monotonic nanoseconds.
            on_failure: told once if the log fails; in the event loop that runs now, or in the
                recorder's thread where none runs.

        Raises:
            LogMisuse: the recorder is closed, or the name is not one of a recording.
        """
        recording_id_of(path)
        file = LogFile(
            path, disk=self._disk, compressor=self._compressor, directories=self._directories
        )
        log = SessionLog(self._shared, file, on_failure)
        with self._shared.changed:
            if self._shared.is_closing:
                raise LogMisuse(f"the recorder is closed, {path.name} cannot be opened")
            self._logs[log] = self._clock()
            self._shared.logs = len(self._logs)
        log.put(Record(kind="session", seq=0, at_ns=at_ns, fields=fields), urgent=True)
        return log

    @property
    def statistics(self) -> RecorderStatistics:
        """What it did so far."""
        return RecorderStatistics(
            logs=len(self._logs),
            backlog_bytes=self._shared.backlog_bytes,
            blocks=self._blocks,
            file_bytes=self._file_bytes,
            failures=self._shared.failures,
        )

    def close(self) -> None:
        """Write what was appended, close all files, end the thread. Blocks; safe to call twice.

        Logs without a `fin` stay as they are: open, and readable.
        """
        with self._shared.changed:
            self._shared.is_closing = True
            self._shared.changed.notify()
        if self._thread is None:
            self._close_logs()
        else:
            self._thread.join()

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        await to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> threading.Thread:
        # A daemon: a process that forgot to close must still be able to exit. What is lost then is
        # what no client saw.
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
                    tick = self._clock() + self._policy.block_age_s
        except BaseException as error:
            # An error nobody thought of: it is raised for all to see, but no session may wait for
            # a dead thread or believe that it is recorded.
            for log in tuple(self._logs):
                self._fail(log, error)
            raise
        finally:
            self._close_logs()

    def _wait_until(self, tick: float) -> None:
        shared = self._shared
        with shared.changed:
            while not (shared.called_up or self._had_a_turn or shared.is_closing):
                wait_s = tick - self._clock() if self._logs else None
                if wait_s is not None and wait_s <= 0:
                    return
                shared.changed.wait(wait_s)

    def _serve_aged(self) -> None:
        for log in tuple(self._logs):
            log.call_up_if_queued()
        self._serve_a_round()
        self._shared.serve_here()
        if self._policy.durability != "none":  # chats, and the words after a unit, have no other
            self._sync_due()

    def _serve_called_up(self) -> None:
        """Serve logs until none is called up."""
        while self._shared.called_up or self._had_a_turn:
            self._serve_a_round()

    def _serve_a_round(self) -> None:
        """Give each log a turn that has come in line, and one that has had a turn another."""
        called_up = self._shared.called_up
        for _ in range(len(called_up)):
            self._serve(called_up.popleft())
        if self._had_a_turn:
            self._serve(self._had_a_turn.popleft())

    def _serve(self, log: SessionLog) -> None:
        """Give a log its turn; it stays in line while there is more to be done for it."""
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
                return
        self._had_a_turn.append(log)

    def _write(self, log: SessionLog, records: list[Record]) -> Iterator[int]:
        """Write records of a log step by step; yields what each step took, in bytes.

        A block that is begun is written to its end, also of a log that is given up meanwhile.
        """
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
        if log.failure is not None:  # in the syncer's turn: it may be syncing just this file
            self._syncer.ask(partial(self._drop_failed, log))

    def _sync_fin(self, log: SessionLog, last_seq: int) -> None:
        """Sync and close a log that is finished; in the syncer's thread."""
        try:
            log.file.sync()
            self._drop(log)
            log.advance(last_seq)
        except Exception as error:  # whatever it is, it must not reach other logs
            self._fail(log, error)

    def _sync_due(self) -> None:
        now = self._clock()
        for log, synced_at in tuple(self._logs.items()):
            is_due = now - synced_at >= self._policy.sync_interval_s
            if is_due and log.file.is_dirty and log.failure is None and log not in self._syncing:
                with self._shared.changed:
                    if log not in self._logs:
                        continue  # it was finished meanwhile
                    self._logs[log] = now
                self._syncing.add(log)
                self._syncer.ask(partial(self._sync, log))

    def _sync(self, log: SessionLog) -> None:
        """Sync a log that goes on; in the syncer's thread."""
        try:
            log.file.sync()
        except Exception as error:  # as above
            self._fail(log, error)
        finally:
            self._syncing.discard(log)

    def _fail(self, log: SessionLog, error: BaseException) -> None:
        failure = LogFailed(f"{log.path.name} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        log.fail(failure, tell=True)

    def _drop_failed(self, log: SessionLog) -> None:
        if log.is_unwanted:
            try:
                log.file.remove()
            except OSError as error:
                _LOG.error("%s is not wanted, and could not be removed: %s", log.path, error)
        with contextlib.suppress(OSError):  # it has failed already
            self._drop(log)
        if log.is_unwanted:
            log.leave()

    def _drop(self, log: SessionLog) -> None:
        with self._shared.changed:
            self._logs.pop(log, None)
            self._shared.logs = len(self._logs)
        log.file.close()

    def _close_logs(self) -> None:
        """Write what is queued and close every file; on the thread, or after it is told to end."""
        with self._shared.changed:
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


def _serve_elsewhere() -> None:
    """Leave the work to the thread."""
