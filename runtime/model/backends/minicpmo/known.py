"""The rows of a unit that is run again: its tokens and codes are known, and are fed at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from .work import Feed, InTurn, Speak, Steps


@attrs.define
class Known:
    """The ids that a unit is known to feed one by one, and the answers to them.

    Attributes:
        ids: in their order.
        work: the request for the id at an index.
        most: ids that a unit can feed.
    """

    ids: Sequence[int]
    work: Callable[[int], Feed | Speak]
    most: int
    _answers: deque[Any] = attrs.field(factory=deque, init=False)
    _count: int = attrs.field(default=0, init=False)

    def ask(self, index: int) -> Steps[Any]:
        """The answer to the next id; `ValueError` if it is another one, or they are too many."""
        at = self._count
        if not at < len(self.ids) <= self.most or self.ids[at] != index:
            raise ValueError("it feeds other ids than recorded")
        if not at:
            self._answers.extend((yield InTurn(works=[*map(self.work, range(len(self.ids)))])))
        self._count += 1
        return self._answers.popleft()
