"""How a device computes rows of many sessions: as steps, together, or session by session.

On a GPU all rows are attended together (`flash.py`), and the most frequent lengths run as captured
steps of fixed sizes (`steps.py`). There results depend on the batch, except in exact mode
(`Means`): steps of a length have one size, and other work runs per session. Exactness is tested
when steps are made; if it fails, each step has one session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import attrs
import torch
from torch import Tensor

from .attention import Row
from .flash import spans_of
from .steps import Network, Out, Stepper, batches

ROWS_MIN: Final = 16
"""On a CPU, rows from which on a matrix product gives each row the same bits; see `decoder.py`."""
EXACT_SIZES: Final[Mapping[int, int]] = {16: 64, 128: 8}
"""Sessions of an exact step of up to so many rows, in any number of slots: a replay has one."""

Sizes = Callable[[int, int], Sequence[int]]
"""The sessions of steps of so many rows of a width, ascending."""
_log = logging.getLogger("antiphon.model")


@attrs.frozen(kw_only=True)
class Means:
    """How a device computes; results are equal up to rounding.

    Attributes:
        is_flash: rows are attended together.
        sizes: of steps; None: there are none.
        rows_min: rows that a matrix product is padded to.
        is_alone: steps give bitwise the same result in any batch, and other work runs per session.
    """

    is_flash: bool = False
    sizes: Sizes | None = None
    rows_min: int = 1
    is_alone: bool = False


ON_CPU: Final = Means(rows_min=ROWS_MIN)


def exact_sizes(length: int, _width: int) -> tuple[int, ...]:
    """The one size of an exact step of a length, whatever its width."""
    return (next((size for most, size in EXACT_SIZES.items() if length <= most), 1),)


def means_on(device: torch.device, slots: int, *, exact: bool) -> Means:
    """Choose how to compute; `exact`: results are bitwise independent of the batch, as on a CPU."""
    if device.type != "cuda":
        return ON_CPU
    sizes = exact_sizes if exact else partial(batches, slots)
    return Means(is_flash=True, sizes=sizes, is_alone=exact)


def in_order(outs: Sequence[Out], order: Sequence[int]) -> Out:
    """Join what groups of sessions got, in whose place `order` has each session's own."""
    if len(outs) == 1:
        return outs[0]
    back = torch.tensor(order).argsort().to(outs[0][0].device)
    return tuple(torch.cat(parts)[back] for parts in zip(*outs, strict=True))


@attrs.frozen(eq=False)
class Batched:
    """Runs rows of many sessions through a network; without `steps`, none is captured."""

    network: Network
    means: Means
    steps: Stepper | None

    def run(self, rows: Sequence[Tensor], places: Sequence[Row]) -> Out:
        """Feed rows, (T, width) each, to distinct slots."""
        order: list[int] = []
        outs: list[Out] = []
        for length, some in self._groups(rows, places):
            chosen = [rows[index] for index in some], [places[index] for index in some]
            if length is None or self.steps is None:
                outs.append(self._together(*chosen))
            else:
                outs.append(self.steps.run(length, *chosen))
            order += some
        return in_order(outs, order)

    def _groups(
        self, rows: Sequence[Tensor], places: Sequence[Row]
    ) -> Iterator[tuple[int | None, list[int]]]:
        """Which rows go together, by their indices, and the length of their step."""
        steps, groups = self.steps, dict[tuple[int | None, int], list[int]]()
        for index, (each, place) in enumerate(zip(rows, places, strict=True)):
            length = None if steps is None else steps.length_of(len(each), place.start)
            groups.setdefault((length, 0 if length else len(each)), []).append(index)
        for (length, _), some in groups.items():
            if self.means.is_alone and length is None:
                yield from ((None, [index]) for index in some)
            elif self.means.is_alone or steps is None or length is None:
                yield length, some
            else:  # What no step holds is arithmetic enough without one.
                same = len({len(rows[index]) for index in some}) == 1
                yield length if len(some) <= steps.sizes[length][-1] or not same else None, some

    def _together(self, rows: Sequence[Tensor], places: Sequence[Row]) -> Out:
        """Feed rows of one length, launched kernel by kernel."""
        network = self.network
        spans = spans_of(network.store, places, len(rows[0]), causal=network.is_causal)
        return network.finish(network.forward(torch.stack([*rows]), spans), spans)


def batched(network: Network, means: Means, lengths: Sequence[int]) -> Batched:
    """Run a network, with steps of `lengths` rows if possible; all slots must be empty."""
    for sizes in (means.sizes, _one) if means.is_alone else (means.sizes,):
        if sizes is None:
            break
        try:
            with torch.inference_mode():
                fitting = sorted(length for length in lengths if length <= network.store.capacity)
                chosen = {length: sizes(length, network.width) for length in fitting}
                steps = Stepper(network, chosen)
                if not means.is_alone or steps.is_exact():
                    return Batched(network, means, steps)
        except Exception:  # Of the driver or a library, of any type.
            _log.exception("no fixed steps of %s: all is launched kernel by kernel", network.name)
            if network.store.keys.is_cuda:
                torch.cuda.synchronize()  # Raises if the GPU is lost to this process.
            break
        _log.warning("steps of %s are not exact for several sessions", network.name)
    return Batched(network, means, None)


def _one(_length: int, _width: int) -> tuple[int, ...]:
    return (1,)
