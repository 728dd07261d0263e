"""Golden logs of what comes late, made of the events of others: no server in memory is so slow.

A completion, a lease or a timer may be on its way when it is waited for no more. The machine takes
note of it, and does nothing but give back a slot that nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Opened
from recorder.format.format import Record
from recorder.format.mapping import EVENT_KINDS, advance, event_of
from recorder.read.reader import LogReader
from tests.sessions.answering import regenerate

Change = Callable[[Iterable[ev.Event]], Iterator[ev.Event]]
OTHER: int = 1000
"""Leases of other sessions are counted on from here."""


def with_late_words(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """After each event, have all come that was meant for another lease, or for an older timer."""
    session: Session | None = None
    older: dict[str, int] = {}
    for event in events:
        session, effects = advance(session, event)
        yield event
        at_ns = event.at_ns
        late: list[ev.Event] = [
            ev.BackendReleased(at_ns=at_ns, lease=OTHER),
            ev.BackendOpened(at_ns=at_ns, lease=OTHER, opened=Opened(prompt_length=7)),
        ]
        for timer in effects:
            if isinstance(timer, ef.SetTimer):
                if timer.name in older:
                    generation = older[timer.name]
                    late.append(ev.TimerFired(at_ns=at_ns, name=timer.name, generation=generation))
                older[timer.name] = timer.generation
        for one in late:
            session, _ = advance(session, one)
            yield one


def leased_as_it_leaves(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """The slot comes in the moment in which the client leaves the queue."""
    for event in events:
        if isinstance(event, ev.TicketLeft):
            yield ev.SlotLeased(at_ns=event.at_ns, lease=OTHER, slot=0)
            yield ev.BackendReleased(at_ns=event.at_ns, lease=OTHER)
        else:
            yield event


def refused_before_the_next(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """A picture is refused while the next one is being decoded, which then comes too late."""
    late: ev.MediaDecoded | None = None
    has_refused = False
    for event in events:
        if isinstance(event, ev.MediaDecoded) and late is None and not has_refused:
            late = event
            continue
        yield event
        if isinstance(event, ev.MediaRejected) and not has_refused:
            has_refused = True
            if late is not None:
                yield attrs.evolve(late, at_ns=event.at_ns)


CHANGES: dict[str, tuple[str, Change]] = {
    "realtime-late": ("realtime-states", with_late_words),
    "chat-late": ("chat-states", with_late_words),
    "transcription-late": ("transcription-states", with_late_words),
    "chat-picture-late": ("chat-torn-picture", refused_before_the_next),
    "realtime-leased-late": ("realtime-queue-left", leased_as_it_leaves),
}
"""Each such log: of which other it is made, and how."""


def changed(log: Path, change: Change) -> bytes:
    """Make the log of a session to which something else came."""
    with LogReader(log) as reader:
        head, *rest = [item for item in reader if isinstance(item, Record)]
    events = (event_of(item.fields, item.at_ns) for item in rest if item.kind in EVENT_KINDS)
    with TemporaryDirectory() as folder:
        path = Path(folder) / log.name
        regenerate(path, head.fields, change(events))
        return path.read_bytes()
