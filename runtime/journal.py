"""The log of one session as its driver sees it: numbered records, and what must wait for them.

- The event is appended before the machine steps, its effects before they are performed.
- Log order is the order: `seq` counts the records of a session, 0 being the log's own head.
- A state hash follows every so many units or chunks (`Session.is_hash_due`), to find where a replay
  went another way.
- While the recorder is behind, reading pauses after each message, `RECORDER_STALL_S` at most. A
  session whose log is over its own bound is read on, but for large messages: with one of these it
  is flooded, and ends (`Flooded`). So no client ends its recording and talks on; and what is held
  back is the bound of a log, and one large message. A log that only shares a full backlog with
  others waits once, and no more until there was room again.
- What others send costs no recording. A log is given up where the disk hangs: where for
  `WRITE_WAIT_S` nothing was written of any log while a client waited for this one.
- A log that its client does not want is removed (`forget`), and nothing is said before it is.
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
from protocol.utf8 import Frame
from recorder.errors import LogFailed, LogFull, RecorderError
from recorder.log import SessionLog
from recorder.mapping import Hashes, effect_record, event_record
from recorder.records import Fields, Record, Value

from .connection import Ready
from .lane import LARGE_BYTES_MIN

RECORDER_STALL_S: Final = 2.0
"""How long reading pauses while the recorder is behind: a close must be seen (B6)."""

WRITE_WAIT_S: Final = 10.0
"""A disk that takes nothing for so long hangs, and a caller does not wait in silence for longer.
The recording is given up, and its session does what the operator decided for one that failed."""

LOOK_S: Final = 1.0
"""How often a wait looks whether the disk hangs."""

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
    """Say what `fin` tells of a session, with its state where it is finished; None: not begun."""
    if session is None:
        return {"reason": reason}
    state = {"digest": session.digest()} if session.is_finished else {}
    return {"reason": reason, "dialect": session.dialect_name, **session.counts, **state}


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
        self._is_hung = False
        self._marks = 0
        self._hashes = Hashes()
        self._log: SessionLog | None = None
        self._begun: SessionLog | None = None
        self._removed: Ready = ready_now
        if open_log is not None:
            try:
                self._log = self._begun = open_log(lambda _failure: self._lose())
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
            return self._removed
        urgent = any(isinstance(effect, _AWAITED) for effect in effects)
        recorded = step_records(session, event, effects, self._hashes)
        self._append(event.at_ns, recorded, urgent=urgent)
        if self._log is None or not urgent:
            return ready_now
        return partial(self._written, self._log, self._seq - 1)

    def forget(self) -> None:
        """Record no more, and have removed what was recorded."""
        self._log = None
        if self._begun is not None:
            self._begun.discard()
            self._removed = partial(self._gone, self._begun)

    async def _gone(self, log: SessionLog) -> None:
        """Wait until the log is removed, once; a disk that hangs is not waited for."""
        with anyio.move_on_after(WRITE_WAIT_S):
            await log.gone()
        self._removed = ready_now

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

        Where only the backlog of all logs together is full, the session has then waited its share,
        and is held up no more before there was room.
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
        """Whether a message is large, and comes while the log is over its own bound.

        Where the disk hangs that is no client's doing: then the recording is given up.
        """
        log = self._log
        is_large = frame is not None and len(frame) > LARGE_BYTES_MIN
        if log is None or not is_large or not log.is_over_its_bound:
            return False
        if self._is_hung:
            self._give_up(f"the disk took nothing for {RECORDER_STALL_S} s")
        return not self._is_hung

    async def _written(self, log: SessionLog, seq: int) -> None:
        """Wait for write(2); a log that failed is waited for no more, its session has been told."""
        steps, hung_s = log.steps_of_all, 0.0
        while hung_s < WRITE_WAIT_S:
            with anyio.move_on_after(LOOK_S) as scope, suppress(LogFailed):
                await log.written(seq)
            if not scope.cancelled_caught:
                return
            hung_s = hung_s + LOOK_S if log.steps_of_all == steps else 0.0
            steps = log.steps_of_all
        # Also where the session is over, and says goodbye.
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
