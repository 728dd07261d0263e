"""Makes a log again: steps a new machine with events, and records its effects.

    head, events -> Session -> records, as a server's journal makes them -> a log by the real writer

The effects, state hashes and `fin` are this machine's, so the new log verifies and logic-replays,
whatever was changed in its events; those that could not happen are ignored by the machine.
`RemakeError` names an event that it refuses. A session that has not ended is closed as broken off.
It keeps one block in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.records import record_name
from recorder.format.format import Fields, Record
from recorder.format.mapping import SCHEMA, Hashes, advance, event_record, fin_fields, step_records
from recorder.write.files import Disk
from recorder.write.logfile import Compressor, LogFile

from .logic import BROKEN_OFF


class RemakeError(ValueError):
    """The machine refuses the events: no such session exists."""


@attrs.frozen(kw_only=True)
class Remade:
    """An event that was stepped again; `records` also hold a state hash if one is due."""

    effects: tuple[ef.Effect, ...]
    records: tuple[Record, ...]


class Remaker:
    """Steps one session again; `session` is None before its first event, `events` counts them."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.events = 0
        self._hashes: Final = Hashes()
        self._next_seq = 1
        self._at_ns = 0

    def step(self, event: ev.Event) -> Remade:
        """Step an event; `RemakeError` if the machine refuses it."""
        try:
            self.session, effects = advance(self.session, event)
        except Exception as error:  # also a bug of the machine: no log is made
            name = record_name(event)
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RemakeError(f"event {self.events}, {name}: {why}") from error
        self.events += 1
        self._at_ns = event.at_ns
        after = step_records(self.session, event, effects, self._hashes)
        recorded = [event_record(event), *after]
        records = tuple(self._number(kind, fields) for kind, fields in recorded)
        return Remade(effects=effects, records=records)

    def mark(self, at_ns: int, fields: Fields) -> Record:
        """Make the record of a mark, which the machine does not see."""
        self._at_ns = at_ns
        return self._number("mark", fields)

    def end(self) -> Record:
        """Make the record of the session's end."""
        session = self.session
        is_over = session is not None and session.is_finished
        reason = session.end_reason if session is not None and is_over else BROKEN_OFF
        return self._number("fin", fin_fields(session, reason))

    def _number(self, kind: str, fields: Fields) -> Record:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return Record(kind=kind, seq=seq, at_ns=self._at_ns, fields=fields)


def head_record(fields: Fields) -> Record:
    """Make the `session` record of a log whose other records are made here."""
    return Record(kind="session", seq=0, at_ns=0, fields={**fields, "schema": SCHEMA})


class _Pieces(Disk):
    """A file of which only what was written last is held."""

    def __init__(self) -> None:
        self.data = bytearray()

    def create(self, _path: Path) -> int:
        """Give a descriptor of no file."""
        return -1

    def write(self, _descriptor: int, data: memoryview) -> int:
        """Hold some more."""
        self.data += data
        return len(data)


def pieces_of(records: Iterable[Record]) -> Iterator[bytes]:
    """Write records as `write` does, but yield the new log's bytes, block by block."""
    disk = _Pieces()
    file = LogFile(Path(), disk=disk, compressor=Compressor())
    file.create()
    for _ in file.write(records):
        yield bytes(disk.data)
        disk.data.clear()


def write(path: Path, records: Iterable[Record], *, is_durable: bool = True) -> None:
    """Write records, `session` first and `fin`, if any, last, as a new log, block by block.

    If `is_durable`, it returns only once the log is on the device. `RecordInvalid`: a value cannot
    be stored; `OSError`: the disk refused, or the file exists.
    """
    file = LogFile(path, disk=Disk(), compressor=Compressor())
    file.create()
    try:
        for _ in file.write(records):
            pass
        if is_durable:
            file.sync()
    finally:
        file.close()
