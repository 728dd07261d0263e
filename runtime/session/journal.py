"""The log of one session, as its driver sees it: numbered records, and waits for them.

- An event is appended before the machine steps, its effects before they are performed. `seq` counts
  records in log order; 0 is the log's own head. Without a log (`--no-record`) the numbers are the
  same, and nothing waits.
- A state hash follows every so many units or chunks (`Session.is_hash_due`), to find where a replay
  diverges. A mark is a remark from outside, for which no recording is given up.
- While the recorder is behind, reading pauses after each message (or small ones that came
  together) for at most `RECORDER_STALL_S`. A session whose log is over its own bound is still read,
  except for large messages: one of these ends it (`Flooded`). So no client loses its recording and
  talks on, and the backlog is bounded by a log's bound and one large message. A log that only
  shares a full backlog waits once.
- A log is given up where the disk hangs: for `WRITE_WAIT_S` no log was written while a client
  waited for this one. A failed log takes no more: the session decides (`RecordingFailed`).
- A log that its client does not want is removed (`forget`) before the next frame is sent.
- The log is also read while it is written: the frames that a client does not have (`again`), and
  the session's past (`past`). Reading and stepping a log is done in a thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import anyio
import anyio.to_thread

from protocol.machine.session import Session
from protocol.values.effects import Attach, Close, Effect, Send
from protocol.values.events import Event
from protocol.values.frames import Frame
from recorder.format.format import Fields, LogDamaged, LogFailed, LogFull, Record, RecorderError
from recorder.format.mapping import KINDS, Hashes, event_record, step_records
from recorder.read.past import Past
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.write.log import SessionLog

from ..net.connection import Ready
from ..net.limits import LARGE_BYTES_MIN

RECORDER_STALL_S: Final = 2.0
"""The longest pause of reading while the recorder is behind: a close must be seen (B6)."""

WRITE_WAIT_S: Final = 10.0
"""A disk that takes nothing for so long hangs, and a caller cannot wait longer in silence. The
recording is given up; the operator's setting says what its session does."""

LOOK_S: Final = 1.0
"""How often a wait checks whether the disk hangs."""

FIN_WAIT_S: Final = 10.0
"""A longer sync means that the disk hangs; the session's end does not wait for it."""

MARKS_MAX: Final = 100
"""Per session: enough for a person, too few to fill a disk."""

MARK_WAIT_S: Final = 10.0
"""A longer write means that the disk hangs; the client is told so."""

BATCH_CHARS: Final = 64 * 1024
"""Frames that are read at once, those of a second: each client that comes back holds so many."""

EVERY: Final = 16
"""One frame of so many is found at once; those between are read over."""

_logger = logging.getLogger("antiphon.session")
_AWAITED: Final = frozenset({Send, Attach, Close})
"""The effects that a peer sees: the log has them first."""

T = TypeVar("T")
OnFailed = Callable[[LogFailed], None]
OpenLog = Callable[[OnFailed], SessionLog]
"""Opens a session's log; the callback is called when it fails."""
MarkRefusal = Literal["over", "not_recorded", "too_many", "behind"]
"""`over`: the session has ended or not begun; `behind`: the recorder is, or its disk hangs."""

open_log = LogReader
"""Opens a log for reading; a simulated disk has its own."""


class MarkRefused(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """A mark is not in the log, as far as is known; `reason` says why."""

    def __init__(self, reason: MarkRefusal) -> None:
        super().__init__(reason)
        self.reason: Final = reason


async def ready_now() -> None:
    """Return at once: there is no log."""


async def in_thread(work: Callable[[], T]) -> T:
    """Read or step a log off the event loop."""
    return await anyio.to_thread.run_sync(work)


class Journal:
    """Numbers a session's records for its log or none; `on_failure` is called once at most."""

    def __init__(
        self,
        open_log: OpenLog | None,
        on_failure: Callable[[], None],
        *,
        next_seq: int = 1,
        marks: int = 0,
        frame_index: FrameIndex | None = None,
    ) -> None:
        """`next_seq`, `marks` and `frame_index` are those of a log that goes on."""
        self._on_failure = on_failure
        self._seq = next_seq
        self._has_waited = False
        self._is_hung = False
        self._marks = marks
        self._hashes = Hashes()
        self.frame_index = frame_index or FrameIndex()
        self._log: SessionLog | None = None
        self._begun: SessionLog | None = None
        self._removed: Ready = ready_now
        self._noted: list[Record] = []
        if open_log is not None:
            try:
                self._log = self._begun = open_log(self._failed)
            except RecorderError as error:
                _logger.error("there is no recording: %s", error)
                on_failure()

    def append_event(self, *events: Event, is_step: bool = False) -> None:
        """Append an event before it is stepped; or several of one time, without effects.

        `is_step`: `append_effects` follows, and hands both over together; if not, `finish` does.
        """
        if self._log is None:
            self._seq += len(events)
            return
        self._note(events[0].at_ns, map(event_record, events))
        if not is_step:
            self._hand_over(urgent=False)

    def append_effects(self, session: Session, event: Event, effects: tuple[Effect, ...]) -> Ready:
        """Append a step's effects before they are performed; the wait of `Send` and `Close`."""
        if self._log is None:
            self._seq += len(effects) + session.is_hash_due(event)
            return self._removed
        if session.peer.is_asleep:
            self._hashes.forget()
        if not effects and not session.is_hash_due(event):
            self._hand_over(urgent=False)
            return ready_now
        urgent = not _AWAITED.isdisjoint(map(type, effects))
        recorded = step_records(session, event, effects, self._hashes)
        if urgent and session.is_resumable:
            self._note_frames(recorded)
        self._note(event.at_ns, recorded)
        self._hand_over(urgent=urgent)
        if self._log is None or not urgent:
            return ready_now
        return partial(self._written, self._log, self._seq - 1)

    def _note_frames(self, recorded: Sequence[tuple[str, Fields]]) -> None:
        for seq, (kind, fields) in enumerate(recorded, self._seq):
            if kind == KINDS[Send]:
                self.frame_index.note(fields, seq)

    def go_on(
        self, step_ns: int, rest: Sequence[tuple[str, Fields]], at_ns: int, mark: Fields
    ) -> None:
        """Append what the log lacks of its last step, and a mark, where another server goes on."""
        self._note_frames(rest)
        self._append(step_ns, rest, urgent=True)
        self._append(at_ns, [("mark", mark)], urgent=True)

    def leave(self) -> None:
        """Append nothing more: another server will go on with the log."""
        self._hand_over(urgent=False)
        self._log = None

    def forget(self) -> None:
        """Stop recording, and remove the log."""
        self._log, self._noted = None, []
        if self._begun is not None:
            self._begun.discard()
            self._removed = partial(self._wait_removed, self._begun)

    async def _wait_removed(self, log: SessionLog) -> None:
        """Wait until the log is removed, once; a hung disk is given up."""
        with anyio.move_on_after(WRITE_WAIT_S):
            await log.wait_removed()
        self._removed = ready_now

    async def append_mark(self, at_ns: int, fields: Fields) -> int:
        """Append a mark between two steps, wait until write(2) took it, and return its `seq`.

        `MarkRefused`: there is no log, it takes no more marks, or the recorder is behind.
        """
        log, seq = self._log, self._seq
        if log is None:
            raise MarkRefused("not_recorded")
        if self._marks >= MARKS_MAX:
            raise MarkRefused("too_many")
        if log.is_full:
            raise MarkRefused("behind")
        self._marks += 1
        self._append(at_ns, [("mark", fields)], urgent=True)
        with anyio.move_on_after(MARK_WAIT_S):
            try:
                await log.written(seq)
            except LogFailed:
                raise MarkRefused("not_recorded") from None
            return seq
        raise MarkRefused("behind")

    def _append(self, at_ns: int, recorded: Sequence[tuple[str, Fields]], *, urgent: bool) -> None:
        """Append records at once, so that they share a block."""
        self._note(at_ns, recorded)
        self._hand_over(urgent=urgent)

    def _note(self, at_ns: int, recorded: Iterable[tuple[str, Fields]]) -> None:
        for kind, fields in recorded:
            self._noted.append(Record(kind=kind, seq=self._seq, at_ns=at_ns, fields=fields))
            self._seq += 1

    def _hand_over(self, *, urgent: bool) -> None:
        records, self._noted = self._noted, []
        if self._log is not None and records:
            try:
                self._log.append(*records, urgent=urgent)
            except LogFull as full:
                self._give_up(str(full))

    async def written(self) -> tuple[Path, int]:
        """Wait until write(2) took all so far; the log's path, and the `seq` of the next record.

        `LogFailed`: there is no log, or it failed.
        """
        log, seq = self._log, self._seq
        if log is None:
            raise LogFailed("there is no log")
        await self._written(log, seq - 1)
        if log.failure is not None:
            raise log.failure
        return log.path, seq

    @asynccontextmanager
    async def past(self) -> AsyncIterator[Past]:
        """The session's past; `LogFailed` or `Unreadable` without a sound log."""
        path, next_seq = await self.written()
        with await in_thread(lambda: open_log(path)) as reader:
            yield Past(reader, until_seq=next_seq)

    async def again(self, first: int, until: int) -> AsyncGenerator[str]:
        """Give the frames from one ordinal up to another, as they were sent; errors: `frames_of`.

        `LogFailed`: there is no log, or it failed.
        """
        path, _ = await self.written()
        from_seq = self.frame_index.before(first)
        async with aclosing(frames_of(path, from_seq=from_seq, first=first, until=until)) as frames:
            async for frame in frames:
                yield frame

    @property
    def is_behind(self) -> bool:
        """Whether `wait_for_room` has something to do."""
        return self._has_waited or (self._log is not None and self._log.is_full)

    async def wait_for_room(self) -> None:
        """Wait while the recorder is behind, `RECORDER_STALL_S` at most.

        If only the shared backlog is full, the session does not wait again before there was room.
        """
        log = self._log
        if log is None or not log.is_full:
            self._has_waited = False
            return
        if self._has_waited and not log.is_over_its_bound:
            return
        steps = log.steps_of_all
        with anyio.move_on_after(RECORDER_STALL_S) as scope, suppress(LogFailed):
            await log.room()
        self._has_waited = scope.cancelled_caught
        self._is_hung = scope.cancelled_caught and log.steps_of_all == steps

    def is_flooded_by(self, frame: Frame) -> bool:
        """Whether a large message comes while the log is over its own bound.

        If the disk hangs, that is not the client's fault: the recording is given up.
        """
        log = self._log
        is_large = frame is not None and len(frame) > LARGE_BYTES_MIN
        if log is None or not is_large or not log.is_over_its_bound:
            return False
        if self._is_hung:
            self._give_up(f"the disk took nothing for {RECORDER_STALL_S} s")
        return not self._is_hung

    async def _written(self, log: SessionLog, seq: int) -> None:
        """Wait for write(2), or until the log failed, of which its session has an event by then.

        The recorder may wake its tasks before it calls `_failed`: a frame would go out first.
        """
        steps, hung_s = log.steps_of_all, 0.0
        while hung_s < WRITE_WAIT_S and log.failure is None:
            with anyio.move_on_after(LOOK_S), suppress(LogFailed):
                await log.written(seq)
                return
            hung_s = hung_s + LOOK_S if log.steps_of_all == steps else 0.0
            steps = log.steps_of_all
        # A session that is over sends its last frames through here too.
        log.abandon(f"the disk took nothing for {WRITE_WAIT_S} s")  # nothing, if it failed
        self._lose()

    def _failed(self, failure: LogFailed) -> None:
        _logger.error("the recording failed: %s", failure)
        self._lose()

    def _give_up(self, reason: str) -> None:
        if self._log is not None:
            _logger.error("the recording is given up: %s", reason)
            self._log.abandon(reason)
            self._lose()

    def _lose(self) -> None:
        """The log takes no more: tell the session, once."""
        if self._log is not None:
            self._log = None
            self._on_failure()

    async def finish(self, at_ns: int, fields: Fields) -> None:
        """Write `fin` with `reason` and counts, after the session's slot is back, and sync."""
        self._hand_over(urgent=False)
        log, self._log = self._log, None
        if log is None:
            return
        with anyio.move_on_after(FIN_WAIT_S, shield=True), suppress(RecorderError):
            await log.finish(fields, at_ns=at_ns)


class FrameIndex:
    """Where frames stand in the log: the `seq` of every sixteenth."""

    def __init__(self) -> None:
        self._seqs: list[int] = []

    def note(self, fields: Fields, seq: int) -> None:
        """Take the place of a frame's record; they come in order."""
        ordinal = fields["ordinal"]
        assert isinstance(ordinal, int)
        if ordinal % EVERY == 0:
            self._seqs.append(seq)

    def before(self, ordinal: int) -> int:
        """A place at or before that of a frame."""
        return self._seqs[ordinal // EVERY] if self._seqs else 0


async def frames_of(path: Path, *, from_seq: int, first: int, until: int) -> AsyncGenerator[str]:
    """Give the frames of these ordinals, `until` excluded, in order.

    `LogDamaged` if one is missing; `Unreadable` and `OSError` if there is no log.
    """
    while first < until:
        frames, from_seq = await in_thread(partial(_read_frames, path, from_seq, first, until))
        first += len(frames)
        while frames:
            yield frames.popleft()


def _read_frames(path: Path, from_seq: int, first: int, until: int) -> tuple[deque[str], int]:
    """Read the next frames, about `BATCH_CHARS` and one at least; where the next one may stand.

    The log is closed meanwhile: a client that reads slowly costs only the frames of one batch.
    """
    batch, size = deque[str](), 0
    with open_log(path) as reader:
        for item in reader.at(from_seq):
            if isinstance(item, Damage):
                break
            ordinal = item.fields.get("ordinal") if item.kind == KINDS[Send] else None
            if not isinstance(ordinal, int) or ordinal < first:
                continue
            if ordinal != first + len(batch):
                break
            frame = str(item.fields["frame"])
            batch.append(frame)
            size += len(frame)
            if size >= BATCH_CHARS or first + len(batch) == until:
                return batch, item.seq + 1
    raise LogDamaged(f"frame {first + len(batch)} is not in the log")
