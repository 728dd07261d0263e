"""What the next token is chosen from: the logits of all ids, or of a shortlist of them.

A shortlist (`token_logits.py`) has the highest logits of a row, and those that rules change by
name. The rules (`decide.py`) are written once, for both. Of a shortlist they choose what they would
choose of all ids, bit for bit, or raise `TooShortError`:

- an id that is not listed has `bound` at most. The best k are taken only where k listed ids are
  above the bound; at the bound itself there may be others, with lower ids;
- changes keep the order of logits, so the bound moves along with those that are not listed;
- whether the untempered sample falls on an id is told by masses that were added up elsewhere, in
  another order. A draw within `DOUBT` of where that id begins or ends is not decided by them.

Pure: numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from .sampling import choose, untempered

Numbers = NDArray[np.float64]
Change = Callable[[Numbers], Numbers]
"""Logits to logits, each by itself. A higher one must not end up lower than a lower one."""

DOUBT: Final = 1e-9
"""Of the whole mass: a sum of 152,000 numbers in float64 is off by 2e-11 at most, in any order."""


class TooShortError(Exception):
    """A shortlist does not settle a choice: all logits are needed."""


@attrs.frozen(kw_only=True)
class Mass:
    """Where an id lies in the untempered softmax, whose ids are in their order.

    Attributes:
        index: the id.
        start: the mass of the ids before it, in [0, 1].
        stop: the same with its own.
    """

    index: int
    start: float
    stop: float


@attrs.define(kw_only=True, eq=False)
class Candidates:
    """Ids with their logits, which rules change in place before they choose.

    Attributes:
        values: logits, (N,).
        ids: whose they are, ascending, (N,); None: those of all ids, in their order.
        bound: no id that is not listed has more.
        mass: of the one id that an untempered sample can be asked for; None where all are listed.
    """

    values: Numbers
    ids: NDArray[np.int64] | None = None
    bound: float = -math.inf
    mass: Mass | None = None

    def forbid(self, ids: Sequence[int]) -> None:
        """Never choose these ids."""
        self.mass = None
        self.values[self._places(ids)] = -np.inf

    def forbid_from(self, size: int) -> None:
        """Never choose an id that is not below `size`."""
        self.mass = None
        start = size if self.ids is None else int(np.searchsorted(self.ids, size))
        self.values[start:] = -np.inf

    def change(self, ids: Sequence[int], change: Change) -> None:
        """Change the logits of some ids.

        Args:
            ids: no id twice.
            change: keeps the order of logits.
        """
        self.mass = None
        places = self._places(ids)
        self.values[places] = change(self.values[places])
        if len(places) < len(ids):
            self.bound = max(self.bound, float(change(np.array([self.bound]))[0]))

    def is_best(self, index: int) -> bool:
        """Whether an id has the highest logit; of equal ones the lowest id has it.

        Raises:
            TooShortError: an id that is not listed may have it.
        """
        self._require(1)
        return self._id(int(self.values.argmax())) == index

    def is_drawn(self, index: int, draw: float) -> bool:
        """Whether a sample of the untempered softmax, before any change, falls on an id.

        Args:
            index: the id.
            draw: in [0, 1).

        Raises:
            TooShortError: it may or may not, or nothing is known of this id's mass.
        """
        if self.ids is None:
            return untempered(self.values, draw) == index
        mass = self.mass
        if mass is None or mass.index != index:
            raise TooShortError
        if min(abs(draw - mass.start), abs(draw - mass.stop)) <= DOUBT:
            raise TooShortError
        return mass.start < draw < mass.stop

    def choose(self, draw: float, temperature: float, top_k: int, top_p: float) -> int:
        """Sample an id; the arguments are those of `sampling.choose`.

        Raises:
            TooShortError: not all of the best k are listed for sure.
        """
        self._require(top_k if temperature else 1)
        return self._id(choose(self.values, draw, temperature, top_k, top_p))

    def sample(self, draw: float, temperature: float) -> int:
        """Sample from all ids.

        Args:
            draw: in [0, 1).
            temperature: above 0.

        Raises:
            TooShortError: not all are listed.
        """
        if self.ids is not None:
            raise TooShortError
        return untempered(self.values / temperature, draw)

    def _require(self, count: int) -> None:
        """Hold that the best `count` are listed."""
        if self.ids is not None and np.count_nonzero(self.values > self.bound) < count:
            raise TooShortError

    def _id(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def _places(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Where those of some ids stand that are listed."""
        wanted = np.asarray(ids, dtype=np.int64)
        if self.ids is None:
            return wanted
        places = np.searchsorted(self.ids, wanted)
        places = np.minimum(places, len(self.ids) - 1)
        listed: NDArray[np.int64] = places[self.ids[places] == wanted]
        return listed
