"""Logic replay: steps the same `Session` as the server's with the logged events; no model runs.

Rules:
- The effects and state hashes after each event are compared with the new ones, in order, a sent
  frame byte for byte.
- The first divergence ends the comparison: later ones could only be its consequences.
- Damage ends it too, also a mark for a lost record (`antiphon recordings recover --salvage`),
  unless `go_on` is set: then records after lost ones are skipped up to the next event.
- A log without `fin`, or one that was recovered, may end among the effects of its last event (a
  block ends where it fills). That is `truncated`, not a divergence.

A log is made again in the same way, as a server's journal makes it:

    head, events -> Session -> records -> a log by the real writer

The effects, state hashes and `fin` are this machine's, so the new log verifies and logic-replays,
whatever was changed in its events; those that could not happen are ignored by the machine.
`RegenerationError` names an event that it refuses. A session that has not ended is closed as broken
off. One block is in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST, SNAPSHOT
from protocol.values.records import record_name
from recorder.format import mapping
from recorder.format.format import Fields, Record, Value
from recorder.format.mapping import (
    SCHEMA,
    Hashes,
    LoggedStep,
    advance,
    event_record,
    fin_fields,
    step_records,
)
from recorder.read.scan import Damage
from recorder.repair import RECOVERED, is_lost
from recorder.write.files import Disk
from recorder.write.logfile import Compressor, LogFile

from ..shared.recordings import below, typed
from .difference import Difference, cause_of, describe, first_difference, name_of, show, show_effect
from .report import Divergence, Kind, ReplayReport, Version

# -- a log, regenerated ----------------------------------------------------------------------------


class RegenerationError(ValueError):
    """The machine refuses the events: no such session exists."""


@attrs.frozen(kw_only=True)
class RegeneratedStep:
    """An event that was stepped again; `records` also hold a state hash if one is due."""

    effects: tuple[ef.Effect, ...]
    records: tuple[Record, ...]


class LogRegenerator:
    """Steps one session again; `session` is None before its first event, `events` counts them."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.events = 0
        self._hashes: Final = Hashes()
        self._next_seq = 1
        self._at_ns = 0

    def step(self, event: ev.Event) -> RegeneratedStep:
        """Step an event; `RegenerationError` if the machine refuses it."""
        try:
            self.session, effects = advance(self.session, event)
        except Exception as error:  # also a bug of the machine: no log is made
            name = record_name(event)
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RegenerationError(f"event {self.events}, {name}: {why}") from error
        self.events += 1
        self._at_ns = event.at_ns
        after = step_records(self.session, event, effects, self._hashes)
        recorded = [event_record(event), *after]
        records = tuple(self._number(kind, fields) for kind, fields in recorded)
        return RegeneratedStep(effects=effects, records=records)

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


# -- logic replay ----------------------------------------------------------------------------------


DAMAGE_KEPT: Final = 100
"""Damages reported one by one; later ones are only counted."""
LOSSLESS: Final = frozenset({"chain", "head", "order", "fin", "seek"})
"""Damage that loses no record: the records after it can be compared."""
HERE: Final = Version(software=version("antiphon"), schema=mapping.MACHINE_SCHEMA, behaviour=NEWEST)
"""The software that replays."""
BROKEN_OFF: Final = "broken_off"
"""The reason in `fin` of a session cut off from outside, for which the machine has no reason."""


def replay(items: Iterable[Record | Damage], *, go_on: bool = False) -> ReplayReport:
    """Run a log's events again and compare the effects with the recorded ones.

    `items` are its records in order, and its damage, as from `LogReader`; `go_on` reads past
    damage.
    """
    replayer = Replayer(go_on=go_on)
    for _ in replayer.steps(items):
        pass
    return replayer.report()


class Replayer:
    """A logic replay in progress, until `is_stopped` by a divergence or damage."""

    def __init__(self, *, go_on: bool = False) -> None:
        self.session: Session | None = None
        self.is_stopped = False
        self._go_on: Final = go_on
        self._found: Final = ReplayReport(replayed_by=HERE)
        self._due: deque[ef.Effect] = deque()
        self._last: tuple[Record, ev.Event] | None = None
        self._next_seq: int | None = 0
        self._lost_track = False
        self._head: Record | None = None
        self._has_our_states = False

    def steps(self, items: Iterable[Record | Damage]) -> Iterator[LoggedStep]:
        """Take a log's records and damage in order, until it is stopped; give each step."""
        for item in items:
            step = self.feed(item)
            if step is not None:
                yield step
            if self.is_stopped:
                return

    def feed(self, item: Record | Damage, *, instead: ev.Event | None = None) -> LoggedStep | None:
        """Take the next record, or damage between records; step the event `instead` if it is given.

        Returns the step; None unless it is an event that the machine took.
        """
        if self.is_stopped:
            return None
        if isinstance(item, Damage):
            self._take_damage(item)
            return None
        if not self._is_next(item):
            return None
        self._found.records += 1
        self._found.span_ns = max(self._found.span_ns, item.at_ns)
        return self._take(item, instead)

    def report(self) -> ReplayReport:
        """Report the findings so far; effects due and not recorded yet count as truncated."""
        units = self.session.counts["units"] if self.session is not None else 0
        is_truncated = bool(self._due) and not self.is_stopped
        return attrs.evolve(self._found, units=units, truncated=is_truncated)

    @property
    def last_unit(self) -> int | None:
        """The last unit that was started; None before the first."""
        started = self.session.counts["units"] if self.session is not None else 0
        return started - 1 if started else None

    # -- records --------------------------------------------------------------------------------

    def _take(self, record: Record, instead: ev.Event | None) -> LoggedStep | None:
        if self._found.finished:
            self._diverge("left_over", record, "", show(record.fields), "nothing: fin came before")
        elif record.kind in mapping.EVENT_KINDS:
            return self._take_event(record, instead)
        elif record.kind in mapping.EFFECT_KINDS:
            self._take_effect(record)
        elif record.kind == "state":
            self._take_state(record)
        elif record.kind == "session":
            self._take_head(record)
        elif record.kind == "fin":
            self._take_fin(record)
        elif is_lost(record) and not self._lost_track:  # once for all in a row
            detail = "records were lost before the log was recovered"
            self._take_damage(Damage(0, 0, "gap", detail, record.seq, 1))
        return None  # heads and marks are not the machine's

    def _take_event(self, record: Record, instead: ev.Event | None) -> LoggedStep | None:
        if self._due and not self._lost_track:
            self._diverge("missing", record, "", describe(record), show_effect(self._due[0]))
            return None
        self._lost_track = False
        if self.session is None and self._is_newer(record):
            return None
        try:
            event = instead or mapping.event_of(record.fields, record.at_ns)
        except mapping.MappingError as error:
            self._diverge("unmapped", record, "", show(record.fields), str(error))
            return None
        return self._step(record, event)

    def _take_head(self, record: Record) -> None:
        self._head = record
        schema = below(record.fields, "schema")
        machine = typed(schema, "machine", int)
        self._found.recorded_by = Version(
            software=typed(below(record.fields, "software"), "antiphon", str) or "",
            schema=HERE.schema if machine is None else machine,
        )
        self._has_our_states = schema.get("snapshot") == SNAPSHOT

    def _is_newer(self, record: Record) -> bool:
        """Note the session's behaviour version; stop if this machine does not know it."""
        behaviour, found = record.fields.get("behaviour", 0), self._found
        if isinstance(behaviour, int):
            found.recorded_by = attrs.evolve(found.recorded_by, behaviour=behaviour)
        self.is_stopped = found.is_newer
        return found.is_newer

    def _step(self, record: Record, event: ev.Event) -> LoggedStep | None:
        self._last = (record, event)
        try:
            session, effects = advance(self.session, event)
        except Exception as error:  # the machine's bug is a result, too
            came_out = f"{type(error).__name__}: {error}"
            self._diverge("refused", record, "", describe(record), came_out)
            return None
        self.session, self._due = session, deque(effects)
        self._found.events += 1
        if isinstance(event, ev.ConnectionOpened) and self._head is not None:
            self._compare_head(self._head, event)
        return LoggedStep(record=record, event=event, effects=effects, session=session)

    def _compare_head(self, head: Record, opened: ev.ConnectionOpened) -> None:
        recorded = {**below(head.fields, "config"), **head.fields}
        came_out: dict[str, Value] = {
            "recording_id": opened.recording_id,
            "seed": opened.seed,
            "wall_ms": opened.created_ms,
            "mode": opened.mode,
        }
        found = _first_of(recorded, came_out, [name for name in came_out if name in recorded])
        if found is not None:
            self._diverge("head", head, found.path, found.recorded, found.came_out)

    def _take_effect(self, record: Record) -> None:
        if self._lost_track:
            return
        if not self._due:
            self._diverge("left_over", record, "", describe(record), "nothing more")
            return
        effect = self._due.popleft()
        kind, fields = mapping.effect_record(effect)
        found = first_difference(record.fields, fields)
        if found is None and kind != record.kind:
            found = Difference(path="kind", recorded=record.kind, came_out=kind)
        due_ns = record.at_ns if self._last is None else self._last[0].at_ns
        if found is None and record.at_ns != due_ns:
            found = Difference(path="at_ns", recorded=str(record.at_ns), came_out=str(due_ns))
        if found is not None and found.path.startswith("type"):
            found = Difference(path="", recorded=describe(record), came_out=show_effect(effect))
        if found is not None:
            self._diverge("changed", record, found.path, found.recorded, found.came_out)
            return
        self._found.effects += 1
        self._found.frames += kind == "tx"

    def _take_state(self, record: Record) -> None:
        if self._lost_track:
            return
        if not self._has_our_states:
            self._found.states_of_old += 1
            return
        came_out = None if self.session is None else self.session.digest()
        recorded = record.fields.get("digest")
        if recorded != came_out:
            self._diverge("state", record, "digest", show(recorded), show(came_out))
        else:
            self._found.states += 1

    def _take_fin(self, record: Record) -> None:
        self._found.finished = True
        if self._lost_track or record.fields.get("reason") == RECOVERED:
            return
        if self._due:
            self._diverge("missing", record, "", describe(record), show_effect(self._due[0]))
        elif self.session is not None:
            self._compare_end(record, self.session)

    def _compare_end(self, record: Record, session: Session) -> None:
        """Compare the session's fields in `fin`; `recorder.repair.verify` those of the log."""
        recorded = record.fields
        is_broken_off = recorded.get("reason") == BROKEN_OFF
        if not (session.is_finished or is_broken_off):
            self._diverge("fin", record, "", show(recorded), "a session that goes on")
            return
        ended = fin_fields(session, BROKEN_OFF if is_broken_off else session.end_reason)
        names = list(ended)
        if not self._has_our_states:
            names = [name for name in ended if name in recorded and name != "digest"]
        found = _first_of(recorded, ended, names)
        if found is not None:
            self._diverge("fin", record, found.path, found.recorded, found.came_out)
        else:
            self._found.states += "digest" in names

    # -- divergences ----------------------------------------------------------------------------

    def _is_next(self, record: Record) -> bool:
        expected = record.seq if self._next_seq is None else self._next_seq
        if record.seq != expected:
            lost = max(record.seq - expected, 0)
            detail = f"record {record.seq} stands where record {expected} should"
            self._take_damage(Damage(0, 0, "gap" if lost else "order", detail, expected, lost))
        if self.is_stopped or record.seq < expected:
            return False
        self._next_seq = record.seq + 1
        return True

    def _take_damage(self, damage: Damage) -> None:
        found = self._found
        found.damage_count += 1
        found.damage += (damage,) if len(found.damage) < DAMAGE_KEPT else ()
        self.is_stopped = not self._go_on
        if damage.reason not in LOSSLESS:
            self._next_seq = None
            self._lost_track = True
            self._due.clear()

    def _diverge(self, kind: Kind, record: Record, field: str, recorded: str, new: str) -> None:
        self.is_stopped = True
        cause = None if self._last is None else cause_of(*self._last)
        place = (record.seq, name_of(record), record.at_ns, self.last_unit)
        self._found.divergence = Divergence(kind, *place, field, recorded, new, cause)


def _first_of(recorded: Fields, came_out: Fields, names: Iterable[str]) -> Difference | None:
    names = sorted(names)
    return first_difference(
        {name: recorded.get(name) for name in names}, {name: came_out[name] for name in names}
    )
