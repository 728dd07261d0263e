"""The next speech code's logits, and the choice of a unit's next code for many sessions at once.

On the host a choice takes a twentieth of what a code takes on a GPU, for each session. So
`CodeChooser` makes those of a batch on the device by the rule of `decide_code`, and brings the
codes. Exponentials and sums are rounded otherwise there: a draw within `DOUBT` of its code's start
or end is not chosen, and the host chooses from the whole row. (That covers logits of up to a
million; with larger ones the shares themselves differ by more.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .candidates import DOUBT
from .decide import CODE_PENALTY, CODE_TEMPERATURE, CODE_WINDOW, decide_code
from .device import fetch, send
from .token_logits import numbers_of

CHOSEN_MIN: Final = 4
"""Fewer codes are chosen sooner on the host."""


@attrs.frozen
class CodeChoice:
    """How a unit's next code is chosen; see `decide_code`.

    `chunk`: the unit's codes, at most the last `CODE_WINDOW`; `draw`: in [0, 1).
    """

    chunk: tuple[int, ...]
    draw: float
    may_end: bool


@attrs.define(eq=False)
class CodeLogits:
    """The logits of one row: float32, (codes,), on any device; `chosen` there, or None."""

    _row: Tensor
    _chosen: int | None = None

    def whole(self) -> Tensor:
        """All logits on the host, (codes,); fetched once."""
        self._row = fetch(self._row)
        return self._row

    def numbers(self) -> NDArray[np.float64]:
        """All logits as new float64; `ValueError` unless all are finite."""
        return numbers_of(self.whole())

    def choose(self, choice: CodeChoice, eos: int) -> int:
        """The code that the request's `choice` gives; `ValueError` unless all logits are finite."""
        if self._chosen is not None:
            return self._chosen
        may_end = choice.may_end
        return decide_code(self.numbers(), choice.chunk, choice.draw, eos, may_end=may_end)


class CodeChooser:
    """Chooses codes on the logits' device, or leaves them to the host, if that `is_near`.

    Args:
        eos: the code that ends speech.
        is_near: logits are on the host, or nearly.
    """

    def __init__(self, eos: int, *, is_near: bool) -> None:
        self._eos, self._is_near = eos, is_near
        self.settled = self.unsettled = 0

    def rows(self, logits: Tensor, choices: Sequence[CodeChoice | None]) -> list[CodeLogits]:
        """Make each row's answer from logits, (B, codes), float32; None: no code is chosen.

        Rows stay on the device if their codes are chosen there.
        """
        asked = {at: choice for at, choice in enumerate(choices) if choice is not None}
        if self._is_near or len(asked) < CHOSEN_MIN:
            return _unchosen(logits)
        if len(asked) == len(choices):
            return self._chosen(logits, [*asked.values()])
        others = [at for at in range(len(choices)) if at not in asked]
        chosen = self._chosen(logits[[*asked]], [*asked.values()])
        made = dict(zip((*asked, *others), (*chosen, *_unchosen(logits[others])), strict=True))
        return [made[at] for at in range(len(choices))]

    def _chosen(self, logits: Tensor, asked: Sequence[CodeChoice]) -> list[CodeLogits]:
        wide = logits.new_empty(0, dtype=torch.float64)
        (told,) = send([_packed(asked, logits.shape[1])], wide)
        codes, settled = fetch(self._choose(logits, told)).T.tolist()
        self.settled += int(sum(settled))
        self.unsettled += len(asked) - int(sum(settled))
        return [
            CodeLogits(row, int(code) if is_settled else None)
            for row, code, is_settled in zip(logits, codes, settled, strict=True)
        ]

    def _choose(self, logits: Tensor, told: Tensor) -> Tensor:
        """The code of each row, and whether it is beyond doubt, (B, 2), from `_packed` rows."""
        recent, draw, may_end = told.split_with_sizes((CODE_WINDOW, 1, 1), dim=1)
        size = logits.shape[1]
        counts = told.new_zeros(len(told), size + 1)
        counts = counts.scatter_add_(1, recent.long(), torch.ones_like(recent))[:, :size]
        values = logits.double() / CODE_TEMPERATURE
        values *= CODE_PENALTY ** torch.where(values < 0, counts, -counts)
        values[:, self._eos].masked_fill_(may_end[:, 0] == 0, -torch.inf)
        total = (values - values.amax(1, keepdim=True)).exp_().cumsum(1)
        mass = total[:, -1:]
        place = draw * mass
        code = torch.searchsorted(total, place, right=True).clamp_(max=size - 1)
        start = torch.where(code > 0, total.gather(1, (code - 1).clamp_(min=0)), 0)
        room = torch.minimum(place - start, total.gather(1, code) - place) / mass
        is_settled = (room > DOUBT) & torch.isfinite(logits).all(1, keepdim=True)
        return torch.cat((code.double(), is_settled.double()), 1)


def _unchosen(logits: Tensor) -> list[CodeLogits]:
    """Rows from which the host chooses, brought to it in one transfer."""
    return [CodeLogits(row) for row in fetch(logits)]


def _packed(choices: Sequence[CodeChoice], size: int) -> Tensor:
    """Each choice as a row: its codes, filled up with `size`, its draw, and `may_end`."""
    rows = [
        [*one.chunk, *[size] * (CODE_WINDOW - len(one.chunk)), one.draw, one.may_end]
        for one in choices
    ]
    return torch.tensor(rows, dtype=torch.float64)
