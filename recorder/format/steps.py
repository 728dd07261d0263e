"""The records that a stepped session adds to its log: a step's effects, a state hash, the end.

A server writes them while a session runs; a replay, a redaction and a shrunk log make them again.
"""

from __future__ import annotations

from protocol.machine.session import Session
from protocol.values.effects import Effect
from protocol.values.events import Event

from .mapping import Hashes, effect_record
from .records import Fields, Value


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
