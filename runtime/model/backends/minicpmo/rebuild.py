"""Past units in long prefills: their rows are collected by a unit's own rules, and fed together.

A `ToldUnit` is a unit whose decisions are known: it encodes its pictures and sound, applies the
rules of `unit.py`, and feeds nothing. Its rows wait in `WaitingRows` for those of later units. The
same units give the same splits, but other splits than those recorded, so keys and values may differ
from the recorded session's by rounding.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .prompt import BLOCK, feed_blocks
from .token_logits import TokenLogits
from .unit import UnitRun
from .work import Fed, Steps

_NOT_FED: Final = Fed(
    hidden=torch.zeros(0), logits=TokenLogits(torch.zeros(0, device="cpu"), is_finite=True)
)
"""In place of the language model's output, which a told unit does not have."""


@attrs.define(kw_only=True)
class ToldUnit(UnitRun):
    """A unit whose decided ids are `recorded`; `rows` are what it feeds, (T, width) each."""

    recorded: tuple[int, ...]
    rows: list[Tensor] = attrs.field(factory=list)

    def tell(self) -> Steps[None]:
        """Collect the unit's rows; `IndexError` if a decision is missing, or the model lacks it."""
        yield from self._prefill()
        self._close((yield from self._answer(_NOT_FED)))

    def _feed(self, rows: Tensor) -> Steps[Fed]:
        self.rows.append(rows)
        self.state = self.state.but(length=self.state.length + len(rows))
        return _NOT_FED
        yield  # A generator, as in `UnitRun`.

    def _choose(self, step: int, fed: Fed, numbers: NDArray[np.float64]) -> int:  # noqa: ARG002
        return self.recorded[step]


@attrs.define(kw_only=True)
class WaitingRows:
    """Rows of finalized units that are not yet in the language model's slot."""

    slot: int
    rows: list[Tensor] = attrs.field(factory=list)

    def feed(self, end: int, *, is_last: bool) -> Steps[None]:
        """Feed whole blocks, or all if `is_last`; `end` is the session's length with all rows."""
        if not self.rows:
            return
        rows = torch.cat(self.rows)
        count = len(rows) if is_last else len(rows) // BLOCK * BLOCK
        self.rows = [rows[count:]] if count < len(rows) else []
        if count:
            yield from feed_blocks(self.slot, end - len(rows), rows[:count])
