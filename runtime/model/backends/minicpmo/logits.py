"""The logits of the next token and of the next code: on the host, or on the device.

A GPU would send 151,748 numbers per token and session. So `Shortlists` finds the highest on the
device, and brings those of a whole batch in one transfer, 4 KB a session instead of 607 KB; the
full row is fetched only on request, or when a shortlist does not settle a choice. A row on the
device keeps its whole batch's memory, so a long-lived one is moved to the host at once by `whole`.

`CodeChooser` makes the choices of a batch of codes on the device by the rule of `decide_code`, and
brings the codes: the host's part of a code is 12 µs instead of 74. Exponentials and sums are
rounded otherwise there: a draw within `DOUBT` of its code's start or end is not chosen, and the
host chooses from the whole row. (That covers logits of up to a million; with larger ones the shares
themselves differ by more.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import sampling
from .device import fetch, send
from .tokens import Tokens

# -- tokens -------------------------------------------------------------------------------------

SHORTLIST: Final = 256
"""Ids of a row sent to the host: enough for the best 100 if half of them are forbidden."""
INLINE_MAX: Final = 16_384
"""Logits that are hashed sooner than a thread is woken."""
NOT_FINITE: Final = "the model's logits are not all finite"

Rule = Callable[[sampling.Candidates], int]
"""Chooses an id, and may change its argument."""


def numbers_of(logits: Tensor) -> NDArray[np.float64]:
    """Convert to float64; `ValueError` unless all are finite (half precision overflowed)."""
    numbers = logits.numpy().astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(NOT_FINITE)
    return numbers


_tracing: Final = ThreadPoolExecutor(1, "antiphon-trace")


@attrs.frozen
class Trace:
    """A result's first logits: blake2b-128 hex of all, and the best's margin over the second."""

    digest: str
    margin: float


class TokenLogits:
    """The logits of one row.

    Args:
        row: float32, (vocabulary,), on any device.
        settle: chooses from a shortlist, or raises `TooShortError`; None: the row is on the host.
        is_finite: all are finite; None: not checked yet.
    """

    def __init__(
        self,
        row: Tensor,
        settle: Callable[[Rule], int] | None = None,
        *,
        is_finite: bool | None = None,
    ) -> None:
        self._row, self._settle, self._is_finite = row, settle, is_finite

    def whole(self) -> Tensor:
        """All logits, float32 on the host, (vocabulary,); fetched once."""
        self._row = fetch(self._row)
        return self._row

    def trace(self) -> Future[Trace]:
        """The digest and margin of a result: of many logits, in a thread that does no more."""
        logits = self.whole().numpy()
        if len(logits) > INLINE_MAX:
            with suppress(RuntimeError):  # The process ends.
                return _tracing.submit(_trace, logits)
        traced: Future[Trace] = Future()
        traced.set_result(_trace(logits))
        return traced

    def require_finite(self) -> None:
        """Require that all are finite, else `ValueError`."""
        if self._is_finite is None:
            self._is_finite = bool(np.isfinite(self._row.numpy()).all())
        if not self._is_finite:
            raise ValueError(NOT_FINITE)

    def settle(self, rule: Rule) -> int:
        """Choose an id, with all logits if a shortlist is too short; `ValueError` if not finite."""
        if self._settle is not None:
            self.require_finite()
            try:
                return self._settle(rule)
            except sampling.TooShortError:
                pass
        return rule(sampling.Candidates(values=numbers_of(self.whole())))


def _trace(logits: NDArray[np.float32]) -> Trace:
    second, best = np.sort(np.partition(logits, -2)[-2:])
    digest = hashlib.blake2b(np.ascontiguousarray(logits).data, digest_size=16).hexdigest()
    return Trace(digest, float(best - second))


def rows_on_host(logits: Tensor) -> list[TokenLogits]:
    """Bring all logits of a batch, (B, V), to the host."""
    return [TokenLogits(row) for row in fetch(logits)]


class Shortlists:
    """Makes shortlists of batches of logits on the logits' device.

    Args:
        named: ids that rules change by name; always listed.
        ends: the id that an untempered sample is asked for.
        count: the highest logits that are listed.
        apart: ids that have no part of an untempered sample.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        named: Sequence[int],
        ends: int,
        count: int = SHORTLIST,
        apart: Sequence[int] = (),
    ) -> None:
        self._apart = torch.tensor(apart, dtype=torch.int64, device=device)
        ids = sorted(set(named))
        self._index = torch.tensor(ids, dtype=torch.int64, device=device)  # (C,)
        self._ends, self._count, self._listed = ends, count, count + len(ids)
        self.settled = self.unsettled = 0

    @classmethod
    def of(cls, tokens: Tokens, device: torch.device | str) -> Shortlists:
        """Shortlists for the rules of `sampling.py`."""
        ids = tokens.ids
        named = (ids.listen, ids.turn_eos, ids.chunk_eos, *tokens.endings)
        return cls(device, named=named, ends=ids.chunk_eos, apart=tokens.unchatted)

    def rows(self, logits: Tensor) -> list[TokenLogits]:
        """Make the shortlist of each row of (B, V), float32; the rows stay on the device.

        If V is at most the shortlist's length, all logits are brought to the host.
        """
        if logits.shape[1] <= self._listed:
            return rows_on_host(logits)
        packed = fetch(self._pack(logits)).numpy()  # (B, 2 (K + C) + 5)
        return [
            TokenLogits(row, partial(self._settle, numbers), is_finite=bool(numbers[-1]))
            for row, numbers in zip(logits, packed, strict=True)
        ]

    def _pack(self, logits: Tensor) -> Tensor:
        """Pack a shortlist as float64, which holds float32 and ids exactly."""
        others = logits.index_fill(1, self._index, -torch.inf)  # (B, V)
        best, ids = others.topk(self._count, sorted=False)  # (B, K) each
        ids = torch.cat((ids, self._index.expand(len(logits), -1)), 1)  # (B, K + C)
        ids = ids.sort(1)[0]
        shares = logits.double()  # (B, V)
        shares -= shares.amax(1, keepdim=True)
        shares.exp_()
        shares.index_fill_(1, self._apart, 0)
        sums = (
            shares.sum(1),
            shares[:, : self._ends].sum(1),
            shares[:, self._ends],
            torch.isfinite(logits).all(1).double(),
        )
        facts = torch.stack((best.amin(1).double(), *sums), 1)  # (B, 5)
        return torch.cat((logits.gather(1, ids).double(), ids.double(), facts), 1)

    def _settle(self, numbers: NDArray[np.float64], rule: Rule) -> int:
        try:
            index = rule(self._candidates(numbers))
        except sampling.TooShortError:
            self.unsettled += 1
            raise
        self.settled += 1
        return index

    def _candidates(self, numbers: NDArray[np.float64]) -> sampling.Candidates:
        """Unpack one row, (2 (K + C) + 5,), as candidates."""
        bound, total, before, own = numbers[-5:-1].tolist()
        start, stop = before / total, (before + own) / total
        return sampling.Candidates(
            values=numbers[: self._listed].copy(),
            ids=numbers[self._listed : 2 * self._listed].astype(np.int64),
            bound=bound,
            interval=sampling.CdfInterval(index=self._ends, start=start, stop=stop),
        )


def shortlists_on(device: torch.device | str, tokens: Tokens) -> Shortlists | None:
    """Shortlists for a device; None on a CPU, which has all logits."""
    return None if torch.device(device).type == "cpu" else Shortlists.of(tokens, device)


# -- codes --------------------------------------------------------------------------------------

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
        return sampling.decide_code(self.numbers(), choice.chunk, choice.draw, eos, may_end=may_end)


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
        (packed,) = send([_packed(asked, logits.shape[1])], wide)
        codes, settled = fetch(self._choose(logits, packed)).T.tolist()
        self.settled += int(sum(settled))
        self.unsettled += len(asked) - int(sum(settled))
        return [
            CodeLogits(row, int(code) if is_settled else None)
            for row, code, is_settled in zip(logits, codes, settled, strict=True)
        ]

    def _choose(self, logits: Tensor, packed: Tensor) -> Tensor:
        """The code of each row, and whether it is beyond doubt, (B, 2), from `_packed` rows."""
        recent, draw, may_end = packed.split_with_sizes((sampling.CODE_WINDOW, 1, 1), dim=1)
        size = logits.shape[1]
        counts = packed.new_zeros(len(packed), size + 1)
        counts = counts.scatter_add_(1, recent.long(), torch.ones_like(recent))[:, :size]
        values = logits.double() / sampling.CODE_TEMPERATURE
        values *= sampling.CODE_PENALTY ** torch.where(values < 0, counts, -counts)
        values[:, self._eos].masked_fill_(may_end[:, 0] == 0, -torch.inf)
        total = (values - values.amax(1, keepdim=True)).exp_().cumsum(1)
        mass = total[:, -1:]
        place = draw * mass
        code = torch.searchsorted(total, place, right=True).clamp_(max=size - 1)
        start = torch.where(code > 0, total.gather(1, (code - 1).clamp_(min=0)), 0)
        room = torch.minimum(place - start, total.gather(1, code) - place) / mass
        is_settled = (room > sampling.DOUBT) & torch.isfinite(logits).all(1, keepdim=True)
        return torch.cat((code.double(), is_settled.double()), 1)


def _unchosen(logits: Tensor) -> list[CodeLogits]:
    """Rows from which the host chooses, brought to it in one transfer."""
    return [CodeLogits(row) for row in fetch(logits)]


def _packed(choices: Sequence[CodeChoice], size: int) -> Tensor:
    """Each choice as a row: its codes, filled up with `size`, its draw, and `may_end`."""
    rows = [
        [*one.chunk, *[size] * (sampling.CODE_WINDOW - len(one.chunk)), one.draw, one.may_end]
        for one in choices
    ]
    return torch.tensor(rows, dtype=torch.float64)
