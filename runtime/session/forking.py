"""A session that begins from the past of a recorded one: its log is written, then it goes on.

The recording's events up to a unit are stepped again under a new name, and `Forked` after them, so
the new log is whole by itself: it replays, is redacted and deleted like any other, and does not
need its parent. The copy costs disk and time, which `ForkQueue` shares among parties (a key, or an
address): they have turns, and each may copy so many bytes.

What follows is what follows a restart (`crash_recovery`): a driver goes on with the log, and the
model is rebuilt from it. So a fork may be refused only before its log is there.

A fork is written in a thread, from a log of any content.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import REFUSALS, ErrorCode, LocalProtocolError
from protocol.values.records import RECORD_NAMES
from protocol.values.state import State
from recorder.format import mapping
from recorder.format.format import Fields, Record, RecorderError
from recorder.format.mapping import LoggedStep, steps
from recorder.read.reader import LogReader
from recorder.repair import is_lost
from recorder.write.logfile import LogFile

from ..model.backends.base import BackendInfo
from .crash_recovery import ForkStart, RecoveredSession
from .peer import NO_TOKEN
from .setup import Parent

_logger = logging.getLogger("antiphon.session")
AT_ONCE: Final = 2
"""Forks being written: each takes a thread, and as long as its recording is to be read twice."""
WAITING_MAX: Final = 16
"""Forks that wait to be written; more are refused: each is written though its client has left."""
SPENT_S: Final = 15 * 60
"""After so long a party may copy as much again. With the default that is what one session records
in this time: a client that forks costs no more disk than one that talks."""
EDITED: Final = {"redacted": "it is redacted", "shrunk": "it was cut down to an error"}
"""Fields of a head whose session never was as its log says."""


class ForkRefused(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """There will be no fork; the text is for the client."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@attrs.define(eq=False)
class _QueuedFork:
    """A fork that waits to be written, or to hear that it is refused."""

    party: str
    decided: anyio.Event = attrs.Factory(anyio.Event)
    is_refused: bool = False


class ForkQueue:
    """Forks to be written: of the parties in turn, each one's oldest first.

    A full queue refuses the newest of the party that has most. `bytes_max`: what the forks of a
    party may copy at once; one more may begin while it has any left.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting: list[_QueuedFork] = []
        self._writing = Counter[str]()
        self._served: dict[str, int] = {}
        self._spent: dict[str, tuple[float, float]] = {}

    @asynccontextmanager
    async def turn(self, party: str) -> AsyncIterator[None]:
        """Wait until a fork may be written; `ForkRefused`: it may not."""
        turn = _QueuedFork(party)
        self._enter(turn)
        self._go_on()
        try:
            await turn.decided.wait()
        except BaseException:
            self._leave(turn)
            raise
        if turn.is_refused:
            raise ForkRefused(ErrorCode.QUEUE_FULL, REFUSALS[ErrorCode.QUEUE_FULL])
        try:
            self._check(party)
            yield
        finally:
            self._leave(turn)

    def copied(self, party: str, size_bytes: int) -> None:
        """Count what a fork takes on the disk."""
        self._spent[party] = (self._left_to_pay(party) + size_bytes, anyio.current_time())

    def _left_to_pay(self, party: str) -> float:
        spent, at_s = self._spent.get(party, (0.0, 0.0))
        return max(0.0, spent - (anyio.current_time() - at_s) * self._bytes_max / SPENT_S)

    def _check(self, party: str) -> None:
        self._spent = {it: at for it, at in self._spent.items() if self._left_to_pay(it)}
        spent = self._left_to_pay(party)
        if spent >= self._bytes_max:
            wait_s = math.ceil((spent - self._bytes_max) * SPENT_S / self._bytes_max) or 1
            text = f"the forks of this client have copied as much as they may; again in {wait_s} s"
            raise ForkRefused(ErrorCode.QUEUE_FULL, text)

    def _enter(self, turn: _QueuedFork) -> None:
        self._check(turn.party)
        if len(self._waiting) >= WAITING_MAX:
            count = Counter(it.party for it in self._waiting)
            ((heaviest, most),) = count.most_common(1)
            if most < count[turn.party] + 2:
                raise ForkRefused(ErrorCode.QUEUE_FULL, REFUSALS[ErrorCode.QUEUE_FULL])
            last = next(it for it in reversed(self._waiting) if it.party == heaviest)
            self._waiting.remove(last)
            last.is_refused = True
            last.decided.set()
        self._waiting.append(turn)

    def _go_on(self) -> None:
        """Let those write whose turn it is."""
        while self._waiting and self._writing.total() < AT_ONCE:
            turn = min(self._waiting, key=self._order)
            self._waiting.remove(turn)
            self._writing[turn.party] += 1
            self._served[turn.party] = max(self._served.values(), default=0) + 1
            turn.decided.set()
        if not self._waiting and not self._writing.total():
            self._served.clear()

    def _order(self, turn: _QueuedFork) -> tuple[int, int]:
        """The party that writes fewest goes first, then the one that was served longest ago."""
        return self._writing[turn.party], self._served.get(turn.party, 0)

    def _leave(self, turn: _QueuedFork) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif not turn.is_refused:
            self._writing[turn.party] -= 1
        self._go_on()


def unsupported(why: str) -> ForkRefused:
    """Make the refusal of a recording from which no session can go on."""
    return ForkRefused(ErrorCode.UNSUPPORTED, f"this recording cannot be forked: {why}")


@attrs.frozen(kw_only=True)
class _Cut:
    """Where the past of a fork ends: behind the step of its event `seq`, before unit `unit`."""

    unit: int
    seq: int
    kv_length: int


def write_fork(
    parent: Parent, opened: ev.ConnectionOpened, head: Fields, info: BackendInfo, file: LogFile
) -> RecoveredSession:
    """Write a fork's log up to its beginning.

    Args:
        opened: what would be the first event of a new session of its client.
        head: of the new log, as of such a session.
        file: the log, not created yet; it is removed again if this fails.

    Raises:
        ForkRefused: the recording, or its unit, cannot be forked here.
        OSError: the disk refused.
    """
    try:
        with LogReader(parent.info.open()) as reader:
            _check_head(reader.head.fields, info.fingerprint)
            cut = _find_cut(reader, parent.at)
        if cut.kv_length >= opened.limits.context_tokens:
            raise ForkRefused(ErrorCode.UNSUPPORTED, "the model's context is full at this unit")
        file.create()
        try:
            with LogReader(parent.info.open()) as reader:
                return _ForkCopy(cut, opened, head, file).write(reader)
        except BaseException:
            file.remove()
            raise
    except (RecorderError, mapping.MappingError, LocalProtocolError) as error:
        _logger.info("recording %s cannot be forked: %s", parent.info.recording_id, error)
        raise unsupported("it cannot be read, or does not replay here") from error


def _check_head(head: Fields, fingerprint: Mapping[str, object]) -> None:
    config = head.get("config")
    forked = config.get("fork") if isinstance(config, dict) else None
    for name, why in EDITED.items():
        if head.get(name) is not None:
            raise unsupported(why)
    if isinstance(forked, dict) and forked.get("is_held"):
        raise unsupported("it is a fork that was held to its parent")
    if head.get("schema") != mapping.SCHEMA:
        raise unsupported("another version of the server made it")
    if head.get("fingerprint") != dict(fingerprint):
        raise unsupported("it was recorded with another model or environment")


def _records(reader: LogReader) -> Iterator[Record]:
    """Give the records behind the head; a recording with damage is refused."""
    for item in reader:
        if not isinstance(item, Record) or is_lost(item):
            raise unsupported("it is damaged")
        if item.kind != "session":
            yield item


def _find_cut(reader: LogReader, at: int | None) -> _Cut:
    """Find the end of a unit, or of the last one: a unit counts once it is to be finalized."""
    found, event_seq, kv_length = None, 0, 0
    for record in _records(reader):
        if record.kind == "effect":
            index, name = record.fields.get("index"), record.fields.get("type")
            if name == RECORD_NAMES[ef.StartFinalize] and isinstance(index, int):
                found = _Cut(unit=index + 1, seq=event_seq, kv_length=kv_length)
        elif record.kind in mapping.EVENT_KINDS:
            event_seq = record.seq
            result = record.fields.get("result")
            if isinstance(result, dict) and isinstance(length := result.get("kv_length", 0), int):
                kv_length = length
            if record.kind == "prepare" and found is None:
                found = _Cut(unit=0, seq=event_seq, kv_length=0)
        if found is not None and found.unit == at:
            return found
    if found is None:
        raise unsupported("its session was never set up")
    if at is not None:
        text = f"at: no unit ends before unit {at}, the last one that does is before {found.unit}"
        raise ForkRefused(ErrorCode.INVALID_PAYLOAD, text)
    return found


class _ForkCopy:
    """One fork being written."""

    def __init__(self, cut: _Cut, opened: ev.ConnectionOpened, head: Fields, file: LogFile) -> None:
        self._cut, self._opened = cut, opened
        self._head, self._file = head, file
        self._fork: RecoveredSession | None = None

    def write(self, reader: LogReader) -> RecoveredSession:
        """Write the log; return the session that goes on with it."""
        for _ in self._file.write(self._all(reader)):
            pass
        assert self._fork is not None
        self._fork.opened = self._fork.session.opened
        self._fork.rest.clear()
        return self._fork

    def _all(self, reader: LogReader) -> Iterator[Record]:
        for record, step in steps(_records(reader), edit=self._own):
            if step is not None:
                if isinstance(step.event, ev.ConnectionOpened):
                    yield self._first(record, step)
                yield from self._take(step.event, step.effects)
                if record.seq >= self._cut.seq:
                    break
            elif record.kind != "mark":
                rest = self._fork.rest if self._fork is not None else None
                kind, fields = rest.popleft() if rest else ("", {})
                if (kind, fields.get("type")) != (record.kind, record.fields.get("type")):
                    raise unsupported(f"it does not replay, from record {record.seq} on")
        fork = self._fork
        if (
            fork is None
            or fork.session.state is not State.ACTIVE
            or fork.session.counts["units"] != self._cut.unit
        ):
            raise unsupported("its session was not set up at this unit")
        forked = ev.Forked(
            at_ns=fork.at_ns,
            limits=self._opened.limits,
            resume_hash=self._opened.resume_hash,
            recording_notice=self._opened.recording_notice,
        )
        yield from self._take(forked, fork.session.step(forked))

    def _first(self, record: Record, step: LoggedStep) -> Record:
        """Begin the fork; make its head, with the seed of the recording."""
        cut, parent_id = self._cut, record.fields["recording_id"]
        self._fork = RecoveredSession(
            path=self._file.path,
            opened=self._opened,
            session=step.session,
            owner="",
            away_ns=0,
            next_seq=1,
            file=self._file,
        )
        parent: Fields = {"recording": parent_id, "seq": cut.seq, "unit": cut.unit}
        fields = {**self._head, "seed": step.session.opened.seed, "parent": parent}
        return Record(kind="session", seq=0, at_ns=0, fields=fields)

    def _own(self, event: ev.Event) -> ev.Event:
        """Give an event the names of the fork, and none of the parent's tokens."""
        if isinstance(event, ev.ConnectionOpened):
            opened = self._opened
            if (event.mode, event.endpoint) != (opened.mode, opened.endpoint):
                text = f"its session was one of {event.endpoint}, with mode {event.mode}"
                raise unsupported(text)
            event = attrs.evolve(
                event, recording_id=opened.recording_id, created_ms=opened.created_ms
            )
        if isinstance(event, ev.ConnectionOpened | ev.PeerAttached | ev.Forked):
            event = attrs.evolve(event, resume_hash=NO_TOKEN if event.resume_hash else "")
        return event

    def _take(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> Iterator[Record]:
        """Give the records of a step."""
        fork = self._fork
        assert fork is not None
        if isinstance(event, ev.Forked):
            fork.fork = ForkStart(event, effects)
        fork.at_ns = event.at_ns
        fork.rest.clear()
        fork.stepped(event, effects)
        for kind, fields in (mapping.event_record(event), *fork.rest):
            if kind == "tx":
                fork.frame_index.note(fields, fork.next_seq)
            yield Record(kind=kind, seq=fork.next_seq, at_ns=fork.at_ns, fields=fields)
            fork.next_seq += 1
