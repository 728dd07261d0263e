"""Counts the results that chunks of sound are owed in the dialect of 002: one at least for each.

Its clients send the next chunk after the last one was answered. A chunk that completes units has a
result of each; one that completes none, or whose units were all dropped (B7), has a pending result.
Results keep the order of chunks: a pending one waits behind the units before it.
"""

from __future__ import annotations

from collections import deque

import attrs


@attrs.define
class Owed:
    """A unit whose result is owed, the chunk that completed it, and its pending results."""

    ordinal: int
    chunk: int
    pending: int = 0


@attrs.define
class Lockstep:
    """The owed results, in order, bounded by the waiting units and the one in flight.

    `chunk` is the last one answered; `kv_length` tokens in the model's cache, as last reported.
    """

    kv_length: int
    units: deque[Owed] = attrs.Factory(deque)
    chunk: int = -1

    def owe(self, ordinal: int, chunk: int) -> None:
        """Note a unit that a chunk completed."""
        self.units.append(Owed(ordinal=ordinal, chunk=chunk))

    def wait(self) -> int:
        """Note a chunk that completed none; returns how many pending results are due now."""
        return self._pend(len(self.units) - 1, 1)

    def answer(self) -> int:
        """Note the result of the unit in flight; returns how many pending ones are due now."""
        told = self.units.popleft()
        self.chunk = told.chunk
        return told.pending

    def drop(self, ordinal: int) -> int:
        """Note a dropped unit; returns how many pending results are due now."""
        numbers = [owed.ordinal for owed in self.units]
        index = numbers.index(ordinal)
        dropped = self.units[index]
        del self.units[index]
        others = any(owed.chunk == dropped.chunk for owed in self.units)
        is_answered = others or self.chunk == dropped.chunk
        return self._pend(index - 1, dropped.pending + (not is_answered))

    def _pend(self, index: int, count: int) -> int:
        """Owe pending results after the unit at an index; without one they are due now."""
        if index < 0:
            return count
        self.units[index].pending += count
        return 0
