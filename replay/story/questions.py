"""Which event answers which effect: a session's questions to the model, and the answers.

Both are named by a call and its number: a unit's or a turn's index, a chunk's in its utterance, or
the lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, Final, Literal, TypeVar

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev

CallName = Literal["open", "unit", "finalize", "rollback", "turn", "chunk", "rebuild", "release"]
Call = tuple[CallName, int]
Told = TypeVar("Told", bound=ev.Event)

QUESTIONS: Final[Mapping[type, tuple[CallName, str]]] = {
    ef.OpenBackend: ("open", "lease"),
    ef.StartUnit: ("unit", "unit.index"),
    ef.StartFinalize: ("finalize", "index"),
    ef.Rollback: ("rollback", "index"),
    ef.StartTurn: ("turn", "turn.index"),
    ef.RunChunk: ("chunk", "chunk.index"),
    ef.Rebuild: ("rebuild", "lease"),
    ef.Release: ("release", "lease"),
}
"""By the effect: the call, and the field of its number."""
ANSWERS: Final[Mapping[type, tuple[CallName, str]]] = {
    ev.BackendOpened: ("open", "lease"),
    ev.BackendOpenFailed: ("open", "lease"),
    ev.UnitDone: ("unit", "result.index"),
    ev.UnitFailed: ("unit", "index"),
    ev.FinalizeDone: ("finalize", "finalized.index"),
    ev.FinalizeFailed: ("finalize", "index"),
    ev.RollbackDone: ("rollback", "index"),
    ev.RollbackFailed: ("rollback", "index"),
    ev.TurnPrefilled: ("turn", "prefill.index"),
    ev.TurnProgress: ("turn", "chunk.index"),
    ev.TurnDone: ("turn", "result.index"),
    ev.TurnFailed: ("turn", "index"),
    ev.ChunkDone: ("chunk", "result.index"),
    ev.ChunkFailed: ("chunk", "index"),
    ev.Rebuilt: ("rebuild", "lease"),
    ev.RebuildFailed: ("rebuild", "lease"),
    ev.BackendReleased: ("release", "lease"),
}
"""By the event: the call, and the field of its number. A turn is answered in pieces."""


def asked(effect: ef.Effect) -> Call | None:
    """Name the call that an effect asks for; None if it asks the model for nothing."""
    return _named(effect, QUESTIONS)


def answered(event: ev.Event) -> Call | None:
    """Name the model's call that an event answers, if any."""
    return _named(event, ANSWERS)


def renumbered(event: Told, number: int, **also: int) -> Told:
    """Make an answer that of question `number`; `also` sets fields next to the number."""
    where, _, inner = ANSWERS[type(event)][1].rpartition(".")
    changes: dict[str, Any] = {inner: number, **also}
    if where:
        changes = {where: attrs.evolve(getattr(event, where), **changes)}
    return attrs.evolve(event, **changes)


def _named(fact: object, table: Mapping[type, tuple[CallName, str]]) -> Call | None:
    if type(fact) not in table:
        return None
    name, path = table[type(fact)]
    number: Any = reduce(getattr, path.split("."), fact)
    return name, int(number)
