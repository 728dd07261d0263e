"""A candidate: a log with fewer or simpler events than another, made by the real machine.

    the events of a log -> some left out, some made simpler -> fitted to what was asked -> remade

Each is a whole log that verifies and logic-replays; otherwise `RemakeError`. It keeps the times of
its events, and the `fin` if there is one; marks are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import attrs

from protocol.values import events as ev
from recorder.format.mapping import EVENT_KINDS, MappingError, event_of
from recorder.format.records import Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage

from ..rerun.remake import RemakeError, Remaker, head_record, write
from .asked import OUTSIDE, Asked

Change = Callable[[int, ev.Event], ev.Event | None]
"""Makes an event simpler, or leaves it out (None), by its place among the events."""
SHRUNK: Final = "shrunk"
"""The head's field for a shrunk log's origin."""


@attrs.frozen(kw_only=True)
class Shape:
    """The size of a log, and the start of each group: an event from outside, and its answers."""

    events: int
    groups: tuple[int, ...]


def shape_of(path: Path) -> Shape:
    """Count a log's events."""
    groups, events = [], 0
    with LogReader(path) as reader:
        for record in _sound(reader):
            if record.kind in EVENT_KINDS:
                if isinstance(_event(record), OUTSIDE):
                    groups.append(events)
                events += 1
    return Shape(events=events, groups=tuple(groups))


def origin_of(path: Path) -> Fields:
    """The head's field for the origin of a log made from this one."""
    with LogReader(path) as reader:
        head = reader.head.fields
    return {SHRUNK: {"recording": head.get("recording_id"), "events": shape_of(path).events}}


def build(source: Path, target: Path, change: Change, origin: Fields) -> None:
    """Write a candidate; the source's fields of the head win over `origin`'s.

    Raises:
        RemakeError: there is no such session.
        RecorderError: the source cannot be read.
        OSError: the disk refused.
    """
    with LogReader(source) as reader:
        head = {**origin, **reader.head.fields}
        write(target, _records(head, _sound(reader), change), is_durable=False)


def _records(head: Fields, records: Iterable[Record], change: Change) -> Iterator[Record]:
    yield head_record(head)
    remaker, asked = Remaker(), Asked()
    media: deque[int] = deque()
    place = 0
    for record in records:
        if record.kind in EVENT_KINDS:
            media.clear()
            event = change(place, _event(record))
            place += 1
            is_over = remaker.session is not None and remaker.session.is_finished
            fitted = None if event is None or is_over else asked.fit(event)
            if fitted is not None:
                remade = remaker.step(fitted)
                media.extend(asked.note(remade.effects))
                yield from remade.records
        elif record.fields.get("type") == "DecodeMedia" and media:
            number = record.fields["media"]
            assert isinstance(number, int)
            asked.media[number] = media.popleft()
        elif record.kind == "fin":
            yield remaker.end()


def _sound(items: Iterable[Record | Damage]) -> Iterator[Record]:
    for item in items:
        if isinstance(item, Damage):
            raise RemakeError(f"the log is damaged at byte {item.offset}: {item.detail}")
        yield item


def _event(record: Record) -> ev.Event:
    try:
        return event_of(record.fields, record.at_ns)
    except MappingError as error:
        raise RemakeError(f"record {record.seq}: {error}") from error
