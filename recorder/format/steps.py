"""The steps of a session, and the records that a step adds to its log.

A server steps a log again to go on with it, to rebuild a model or to fork it, and so does a replay.
The records of a step are written while a session runs; a replay, a redaction and a shrunk log make
them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import attrs

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.effects import Effect
from protocol.values.errors import LocalProtocolError
from protocol.values.events import Event

from .mapping import EVENT_KINDS, Hashes, effect_record, event_of
from .records import Fields, Record, Value


@attrs.frozen(kw_only=True)
class LoggedStep:
    """A recorded event that was stepped, its effects, and the session, which goes on changing."""

    record: Record
    event: Event
    effects: tuple[Effect, ...]
    session: Session


def advance(session: Session | None, event: Event) -> tuple[Session, tuple[Effect, ...]]:
    """Step an event; the first one makes the session. `LocalProtocolError`: it cannot come next."""
    if session is not None:
        return session, session.step(event)
    if not isinstance(event, ev.ConnectionOpened):
        raise LocalProtocolError("a session begins with ConnectionOpened")
    return Session.open(event)


def steps(
    records: Iterable[Record],
    *,
    session: Session | None = None,
    edit: Callable[[Event], Event] = lambda event: event,
) -> Iterator[tuple[Record, LoggedStep | None]]:
    """Step a log's events in order: give each record, and its step if it is an event.

    What a log has of a step's effects are the records up to the next event. `session` is one that
    took the events before these; `edit` may change an event before it is stepped.

    Raises:
        MappingError: a record holds no event that this version knows.
        LocalProtocolError: the session refuses an event.
    """
    for record in records:
        step = None
        if record.kind in EVENT_KINDS:
            event = edit(event_of(record.fields, record.at_ns))
            session, effects = advance(session, event)
            step = LoggedStep(record=record, event=event, effects=effects, session=session)
        yield record, step


def step_records(
    session: Session, event: Event, effects: tuple[Effect, ...], hashes: Hashes
) -> list[tuple[str, Fields]]:
    """The records after an event's, by the stepped session: a state hash if due, and effects."""
    recorded: list[tuple[str, Fields]] = [effect_record(effect, hashes) for effect in effects]
    if session.is_hash_due(event):
        recorded.insert(0, ("state", {"digest": session.digest()}))
    return recorded


def fin_fields(session: Session | None, reason: str | None) -> dict[str, Value]:
    """The fields of `fin`, with the state of a finished session; a session of None never began."""
    if session is None:
        return {"reason": reason}
    state = {"digest": session.digest()} if session.is_finished else {}
    return {"reason": reason, "dialect": session.dialect_name, **session.counts, **state}
