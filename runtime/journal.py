"""The log of one session as its driver sees it: numbered records, and what must wait for them.

- The event is appended before the machine steps, its effects before they are performed.
- Log order is the order: `seq` counts the records of a session, 0 being the log's own head.
- A state hash follows every so many units or chunks (`Session.is_hash_due`), to find where a replay
  went another way.
- While the recorder is behind, reading pauses, `RECORDER_STALL_S` at most. Then a log that is over
  its own bound is given up. One that only shares a full backlog with others is not: it goes on, to
  its own bound, and waits no more until there was room again. So all logs together never hold more
  than the shared bound, or each its own and one record.
- What a client waits for is waited for by `WRITE_WAIT_S` at most; then the log is given up as well.
- A log that failed takes no more; nothing waits for it from then on. What the session does about it
  is the session's decision (`RecordingFailed`).
- A mark is what somebody says of the session, and no part of it: the machine does not see it, and a
  replay passes it by. No recording is given up for one.

Without a log (`--no-record`) the numbers are the same, nothing waits and nothing is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal

import anyio

from protocol.effects import Close, Effect, Send
from protocol.events import Event
from protocol.session import Session
from recorder.errors import LogFailed, LogFull, RecorderError
from recorder.log import SessionLog
from recorder.mapping import Hashes, effect_record, event_record
from recorder.records import Fields, Record, Value

from .connection import Ready

RECORDER_STALL_S: Final = 2.0
"""How long reading pauses while the recorder is behind; then the recording of a session that is
itself behind is given up (B6)."""

WRITE_WAIT_S: Final = 10.0
"""A disk that takes longer to write hangs, and a caller does not wait in silence for longer. The
recording is given up, and its session does what the operator decided for one that failed."""

FIN_WAIT_S: Final = 10.0
"""A disk that takes longer to sync a log hangs; the session's end is not held up for it."""

MARKS_MAX: Final = 100
"""Of a session: whoever looks on marks what is worth looking at again, and fills no disk."""

MARK_WAIT_S: Final = 10.0
"""A disk that takes longer hangs; whoever marks is told that it is not known."""

_AWAITED: Final = (Send, Close)
"""What a peer sees: the log has it first."""

OpenLog = Callable[[Callable[[LogFailed], None]], SessionLog]
"""Opens a session's log, given whom to tell when it fails."""


MarkRefusal = Literal["over", "not_recorded", "too_many", "behind"]
"""`over`: the session is, or has not begun; `behind`: the recorder is, or its disk hangs."""


class MarkRefused(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """A mark is not in the log, as far as is known.

    Args:
        reason: why not.
    """

    def __init__(self, reason: MarkRefusal) -> None:
        super().__init__(reason)
        self.reason: Final = reason


async def ready_now() -> None:
    """Wait for nothing: there is no log."""


def step_records(
    session: Session, event: Event, effects: tuple[Effect, ...], hashes: Hashes
) -> list[tuple[str, Fields]]:
    """Say which records follow that of an event: a state hash where one is due, and the effects.

    Args:
        session: the machine after the step.
        event: what was stepped.
        effects: what came of it.
        hashes: of the session.

    Returns:
        The kind and the fields of each.
    """
    recorded: list[tuple[str, Fields]] = [effect_record(effect, hashes) for effect in effects]
    if session.is_hash_due(event):
        recorded.insert(0, ("state", {"digest": session.digest()}))
    return recorded


def fin_fields(session: Session | None, reason: str | None) -> dict[str, Value]:
    """Say what `fin` tells of a session; None: it has not begun."""
    if session is None:
        return {"reason": reason}
    return {"reason": reason, "dialect": session.dialect_name, **session.counts}


class Journal:
    """Numbers one session's records and hands them to its log.

    Args:
        open_log: opens the log; None where the session is not recorded.
        on_failure: told once when the log takes no more.
    """

    def __init__(self, open_log: OpenLog | None, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._seq = 1
        self._has_waited = False
        self._marks = 0
        self._hashes = Hashes()
        self._log: SessionLog | None = None
        if open_log is not None:
            try:
                self._log = open_log(lambda _failure: self._lose())
            except RecorderError:
                on_failure()

    def append_event(self, event: Event) -> None:
        """Append a fact, before it is stepped."""
        if self._log is None:
            self._seq += 1
        else:
            self._append(event.at_ns, [event_record(event)], urgent=False)

    def append_effects(self, session: Session, event: Event, effects: tuple[Effect, ...]) -> Ready:
        """Append what a step asks for, before any of it is performed.

        Args:
            session: the machine after the step.
            event: what was stepped.
            effects: what came of it.

        Returns:
            What a `Send` or `Close` among them has to wait for.
        """
        if self._log is None:
            self._seq += len(effects) + session.is_hash_due(event)
            return ready_now
        urgent = any(isinstance(effect, _AWAITED) for effect in effects)
        recorded = step_records(session, event, effects, self._hashes)
        self._append(event.at_ns, recorded, urgent=urgent)
        if self._log is None or not urgent:
            return ready_now
        return partial(self._written, self._log, self._seq - 1)

    async def append_mark(self, at_ns: int, fields: Fields) -> int:
        """Append a mark at once, between two steps, and wait until write(2) took it.

        Args:
            at_ns: the session's clock.
            fields: what it says.

        Returns:
            Its `seq`.

        Raises:
            MarkRefused: there is no log, it takes no more marks, or the recorder is behind.
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
        """Append records in one go, so that they share a block."""
        first, self._seq = self._seq, self._seq + len(recorded)
        if self._log is not None and recorded:
            records = [
                Record(kind=kind, seq=seq, at_ns=at_ns, fields=fields)
                for seq, (kind, fields) in enumerate(recorded, first)
            ]
            try:
                self._log.append(*records, urgent=urgent)
            except LogFull as full:
                self._give_up(str(full))

    async def wait_for_room(self) -> None:
        """Wait while the recorder is behind, `RECORDER_STALL_S` at most.

        Then the recording is given up, if the session's own backlog is full; while that of others
        alone is, the session has waited its share, and is held up no more before there was room.
        """
        log = self._log
        if log is None or not log.is_full:
            self._has_waited = False
            return
        if self._has_waited and not log.is_over_its_bound:
            return
        with anyio.move_on_after(RECORDER_STALL_S) as scope, suppress(LogFailed):
            await log.room()
        self._has_waited = scope.cancelled_caught
        if scope.cancelled_caught and log.is_over_its_bound:
            self._give_up(f"the recorder was behind for {RECORDER_STALL_S} s")

    async def _written(self, log: SessionLog, seq: int) -> None:
        """Wait for write(2); a log that failed is waited for no more, its session has been told."""
        with anyio.move_on_after(WRITE_WAIT_S) as scope, suppress(LogFailed):
            await log.written(seq)
        if scope.cancelled_caught:  # also where the session is over, and says goodbye
            log.abandon(f"the disk took nothing for {WRITE_WAIT_S} s")
            self._lose()

    def _give_up(self, reason: str) -> None:
        if self._log is not None:
            self._log.abandon(reason)
            self._lose()

    def _lose(self) -> None:
        """The log takes no more: tell the session, once."""
        if self._log is not None:
            self._log = None
            self._on_failure()

    async def finish(self, at_ns: int, fields: Fields) -> None:
        """Write `fin` and wait for the device: the session is over and its slot is back.

        Args:
            at_ns: the session's clock.
            fields: `reason` and what was counted.
        """
        log, self._log = self._log, None
        if log is None:
            return
        with anyio.move_on_after(FIN_WAIT_S, shield=True), suppress(RecorderError):
            await log.finish(fields, at_ns=at_ns)
