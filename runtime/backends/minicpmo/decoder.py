"""A decoder with its memory, and how it computes on the device that it lies on.

What a session gets on a CPU does not depend on what it is computed with:

- attention is computed row by row (`attention.py`);
- what is computed for all rows together is matrix products and functions of single rows. A product
  gives each row the same bits however many others there are, as long as there are at least
  `ROWS_MIN`: below that the CPU's libraries take other kernels. So smaller batches are padded.

On a GPU all rows are attended together (`flash.py`), and what is fed most often goes in steps of
fixed sizes (`steps.py`), where they can be made. There a product's kernel depends on the number of
rows, so what a session gets depends on its company; but where it is told to be exact (`Means`),
steps are of one size, and what is fed otherwise goes alone. Whether steps are exact is tried when
they are made: if not, they are of one session each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .attention import CacheOf, KvSlots, Row, SlotCache
from .flash import SpanCache
from .steps import Stepper, batches
from .work import Feed, Speak

ROWS_MIN: Final = 16
"""Rows of a matrix product from which on each row's bits are its own; see above."""

EXACT_SIZE: Final = 64
"""Sessions of a step that is to be exact, however many slots there are: a replay has one."""

_log = logging.getLogger("antiphon.model")


def _padded(rows: Tensor, count: int) -> Tensor:
    """Rows (B, ...) with zeros behind them, `count` at least."""
    lacking = max(0, count - len(rows))
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, lacking)) if lacking else rows


@attrs.frozen(kw_only=True)
class Means:
    """How a device computes; what comes out is the same up to rounding.

    Attributes:
        cache_of: how rows are attended.
        sizes: sessions of a step, ascending; none: there are no steps.
        rows_min: rows that a matrix product is filled up to.
        is_alone: steps are made so that what a session gets is bitwise its own, and what is not fed
            in a step is computed for each session by itself.
    """

    cache_of: CacheOf = SlotCache
    sizes: Sequence[int] = ()
    rows_min: int = 1
    is_alone: bool = False


ON_CPU: Final = Means(rows_min=ROWS_MIN)


def means_on(device: torch.device, slots: int, *, exact: bool) -> Means:
    """How to compute on a device.

    Args:
        device: which.
        slots: sessions at once.
        exact: what a session gets is to be bitwise its own; on a CPU it is in any case.
    """
    if device.type != "cuda":
        return ON_CPU
    sizes = (EXACT_SIZE,) if exact else batches(slots)
    return Means(cache_of=SpanCache.of, sizes=sizes, is_alone=exact)


@attrs.frozen(eq=False)
class Decoder:
    """A decoder with its memory.

    Attributes:
        model: stock, without its head.
        head: last hidden states to logits, (B, width) -> (B, ids).
        store: keys and values of all slots.
        means: how it computes.
        steps: feeds what is fed most often; None feeds it as anything else.
    """

    model: nn.Module
    head: Callable[[Tensor], Tensor]
    store: KvSlots
    means: Means
    steps: Stepper | None

    def steps_take(self, count: int) -> bool:
        """Whether so many rows of a session go in a step."""
        return self.steps is not None and count in self.steps.lengths

    def run(self, works: Sequence[Feed | Speak]) -> tuple[Tensor, Tensor]:
        """Run rows of one length; gives their last hidden states (B, width) and logits (B, ids)."""
        count = len(works[0].rows)
        rows = [Row(slot=work.slot, start=work.start) for work in works]
        if self.steps is not None and self.steps_take(count):
            return self.steps.run([work.rows for work in works], rows)
        x = _padded(torch.stack([work.rows for work in works]), -(-self.means.rows_min // count))
        starts = torch.tensor([work.start for work in works] + [0] * (len(x) - len(works)))
        positions = (starts[:, None] + torch.arange(count)).to(x.device)
        heads = int(self.model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
        cache = self.means.cache_of(self.store, rows, count, heads // self.store.keys.shape[2])
        out = self.model(
            inputs_embeds=x, position_ids=positions, past_key_values=cache, use_cache=True
        )
        hidden: Tensor = out.last_hidden_state[: len(works), -1]
        logits = self.head(_padded(hidden, self.means.rows_min)).float()[: len(works)]
        return hidden, logits


def make_decoder(
    model: nn.Module,
    head: Callable[[Tensor], Tensor],
    store: KvSlots,
    means: Means,
    lengths: Sequence[int],
) -> Decoder:
    """A decoder, with steps where they can be made; without, it does all the same, and slower.

    Args:
        model: as of `Decoder`.
        head: as of `Decoder`.
        store: as of `Decoder`; all slots are empty.
        means: how it is to compute.
        lengths: rows of a session that are fed most often.
    """
    name = type(model).__name__
    sizes = [means.sizes, (1,)] if means.is_alone else [means.sizes]
    for some in sizes if means.sizes else ():
        try:
            with torch.inference_mode():
                steps = Stepper(model, head, store, some, lengths)
                if not means.is_alone or steps.is_exact():
                    return Decoder(model, head, store, means, steps)
        except Exception:  # Of the driver or a library: what, no caller can know.
            _log.exception("no fixed steps for %s: all is launched kernel by kernel", name)
            if store.keys.is_cuda:
                torch.cuda.synchronize()  # Raises where the GPU is lost to this process.
            break
        _log.warning("steps of %d sessions are not exact for %s", some[-1], name)
    return Decoder(model, head, store, means, None)
