"""What a session's model was fed and decided, from its log: what a rebuild feeds again.

The recorded events are stepped again, since an effect's bytes are in the log only by their hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Chunk, ChunkResult, Opening, PastUnit, Unit, UnitResult

from ..format.format import Record
from ..format.mapping import steps
from .scan import Damage


def voiced(units: Iterable[PastUnit]) -> Iterator[PastUnit]:
    """Mark the units of the turn that is open at the end of the past.

    Those of a turn are held back until it ends, for only then they need no speech decoder.
    """
    turn = list[PastUnit]()
    for unit in units:
        turn.append(unit)
        has_begun = len(turn) > 1 or not unit.result.is_listen
        if not has_begun or unit.result.end_of_turn or unit.interrupted:
            yield from turn
            turn.clear()
    yield from (attrs.evolve(unit, is_voiced=True) for unit in turn)


class PastUnits:
    """Puts the units of a session together from its steps: input, result and finalize.

    `last`: a unit whose finalize has begun, and is not known to be done.
    """

    def __init__(self) -> None:
        self.last: PastUnit | None = None
        self._unit: Unit | None = None
        self._result: UnitResult | None = None

    def take(self, fact: ev.Event | ef.Effect) -> PastUnit | None:
        """Take an event or effect; return a unit that is finalized, or was lost in that."""
        done = None
        match fact:
            case ef.StartUnit():
                done, self.last = self.last, None
                self._unit, self._result = fact.unit, None
            case ev.UnitDone():
                self._result = attrs.evolve(fact.result, pcm=b"")
            case ef.StartFinalize() if self._unit is not None and self._result is not None:
                self.last = PastUnit(
                    unit=self._unit, result=self._result, interrupted=fact.interrupted
                )
            case ev.FinalizeDone(finalized=finalized) if self.last is not None:
                done, self.last = attrs.evolve(self.last, silent=finalized.silent), None
        return done


class Past:
    """A session's past, read from its records in order while its units are taken.

    Attributes:
        opening: of the model that is open now; None before one was.
        chunks: of the utterance begun last, with their results.
        is_damaged: a record is missing, so that the rest is not there.
    """

    def __init__(self, items: Iterable[Record | Damage], *, until_seq: int) -> None:
        """`items` begin with the log's first record; those from `until_seq` on are not read."""
        self.opening: Opening | None = None
        self.chunks: list[tuple[Chunk, ChunkResult]] = []
        self.is_damaged = False
        self._items: Final = items
        self._until_seq: Final = until_seq
        self._asked: Opening | None = None
        self._chunk: Chunk | None = None

    def units(self) -> Iterator[PastUnit]:
        """Give the units that are finalized, or about to be, in order; read the log to its end."""
        return voiced(self._units())

    def _units(self) -> Iterator[PastUnit]:
        units = PastUnits()
        for _, step in steps(self._records()):
            for fact in () if step is None else (step.event, *step.effects):
                self._take(fact)
                unit = units.take(fact)
                if unit is not None:
                    yield unit
        if units.last is not None:
            yield units.last

    def _records(self) -> Iterator[Record]:
        for seq, item in enumerate(self._items):
            if isinstance(item, Damage) or item.seq != seq:
                break
            yield item
            if seq + 1 == self._until_seq:
                return
        self.is_damaged = True

    def _take(self, fact: ev.Event | ef.Effect) -> None:
        match fact:
            case ef.OpenBackend():
                self._asked = fact.opening
            case ev.BackendOpened():
                self.opening = self._asked
            case ef.RunChunk(chunk=chunk):
                if chunk.index == 0:
                    self.chunks.clear()
                self._chunk = chunk
            case ev.ChunkDone(result=result) if self._chunk is not None:
                self.chunks.append((self._chunk, result))
