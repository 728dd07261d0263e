"""Candidates for the next token: the logits of all ids, or of a shortlist.

A shortlist (`token_logits.py`) has a row's highest logits and the ids that rules name. From it the
rules (`decide.py`) choose bit for bit the same as from all ids, or raise `TooShortError`:
- the best k need k listed ids above `bound`: unlisted ids of equal logit may have lower ids;
- changes keep the order of logits, so the bound changes along with the unlisted ids;
- whether the untempered sample hits an id follows from masses summed elsewhere in another order, so
  a draw within `DOUBT` of that id's start or end is undecided.
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
"""An elementwise, order-preserving map from logits to logits."""

DOUBT: Final = 1e-9
"""In units of the whole mass: a float64 sum of 152,000 numbers is off by 2e-11 at most."""


class TooShortError(Exception):
    """A shortlist does not settle a choice: all logits are needed."""


@attrs.frozen(kw_only=True)
class Mass:
    """An id's interval in the cumulative untempered softmax, `start` to `stop` in [0, 1]."""

    index: int
    start: float
    stop: float


@attrs.define(kw_only=True, eq=False)
class Candidates:
    """Ids with their logits, which rules change in place before they choose.

    Attributes:
        values: logits, (N,).
        ids: ascending, (N,); None: all ids.
        bound: upper limit of the logits of unlisted ids.
        mass: of the one id that an untempered sample can be asked for; None if all are listed.
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
        """Never choose an id of `size` or above."""
        self.mass = None
        start = size if self.ids is None else int(np.searchsorted(self.ids, size))
        self.values[start:] = -np.inf

    def change(self, ids: Sequence[int], change: Change) -> None:
        """Change the logits of some ids, each once, by an order-preserving map."""
        self.mass = None
        places = self._places(ids)
        self.values[places] = change(self.values[places])
        if len(places) < len(ids):
            self.bound = max(self.bound, float(change(np.array([self.bound]))[0]))

    def is_best(self, index: int) -> bool:
        """Whether `index` is the lowest id of the highest logit; `TooShortError` if undecided."""
        self._require(1)
        return self._id(int(self.values.argmax())) == index

    def is_drawn(self, index: int, draw: float) -> bool:
        """Whether the untempered sample, before any change, with `draw` in [0, 1) is `index`.

        `TooShortError` if undecided, or the id's mass is unknown.
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
        """Sample as `sampling.choose`; `TooShortError` if the best k may not all be listed."""
        self._require(top_k if temperature else 1)
        return self._id(choose(self.values, draw, temperature, top_k, top_p))

    def sample(self, draw: float, temperature: float) -> int:
        """Sample from all ids, with a draw in [0, 1); `TooShortError` if not all are listed."""
        if self.ids is not None:
            raise TooShortError
        return untempered(self.values / temperature, draw)

    def _require(self, count: int) -> None:
        if self.ids is not None and np.count_nonzero(self.values > self.bound) < count:
            raise TooShortError

    def _id(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def _places(self, ids: Sequence[int]) -> NDArray[np.int64]:
        wanted = np.asarray(ids, dtype=np.int64)
        if self.ids is None:
            return wanted
        places = np.searchsorted(self.ids, wanted)
        places = np.minimum(places, len(self.ids) - 1)
        listed: NDArray[np.int64] = places[self.ids[places] == wanted]
        return listed
