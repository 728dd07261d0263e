"""The next token's logits: on the host, or on the device with a shortlist on the host.

A GPU would send 151,748 numbers per token and session. So `Shortlists` finds the highest on the
device, and brings those of a whole batch in one transfer; the full row is fetched only on request,
or when a shortlist does not settle a choice (`candidates.py`). A row on the device keeps its whole
batch's memory, so a long-lived one is moved to the host at once by `whole`.
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

from .candidates import Candidates, Mass, TooShortError
from .device import fetch
from .tokens import Tokens

SHORTLIST: Final = 256
"""Ids of a row sent to the host: enough for the best 100 if half of them are forbidden."""
INLINE_MAX: Final = 16_384
"""Logits that are hashed sooner than a thread is woken."""
NOT_FINITE: Final = "the model's logits are not all finite"

Rule = Callable[[Candidates], int]
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
            except TooShortError:
                pass
        return rule(Candidates(values=numbers_of(self.whole())))


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
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        named: Sequence[int],
        ends: int,
        count: int = SHORTLIST,
    ) -> None:
        ids = sorted(set(named))
        self._index = torch.tensor(ids, dtype=torch.int64, device=device)  # (C,)
        self._ends, self._count, self._listed = ends, count, count + len(ids)
        self.settled = self.unsettled = 0

    @classmethod
    def of(cls, tokens: Tokens, device: torch.device | str) -> Shortlists:
        """Shortlists for the rules of `decide.py`."""
        ids = tokens.ids
        named = (ids.listen, ids.turn_eos, ids.chunk_eos, *tokens.endings)
        return cls(device, named=named, ends=ids.chunk_eos)

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
        except TooShortError:
            self.unsettled += 1
            raise
        self.settled += 1
        return index

    def _candidates(self, numbers: NDArray[np.float64]) -> Candidates:
        """Unpack one row, (2 (K + C) + 5,), as candidates."""
        listed = self._listed
        bound, total, before, own = numbers[-5:-1].tolist()
        return Candidates(
            values=numbers[:listed].copy(),
            ids=numbers[listed : 2 * listed].astype(np.int64),
            bound=bound,
            mass=Mass(index=self._ends, start=before / total, stop=(before + own) / total),
        )


def shortlists_on(device: torch.device | str, tokens: Tokens) -> Shortlists | None:
    """Shortlists for a device; None on a CPU, which has all logits."""
    return None if torch.device(device).type == "cpu" else Shortlists.of(tokens, device)
