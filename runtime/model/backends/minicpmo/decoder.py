"""A decoder with its KV cache, and how it computes on its device.

On a CPU a session's result does not depend on its batch: attention is computed row by row
(`attention.py`), and a matrix product gives each row the same bits in any batch of at least
`ROWS_MIN`, to which smaller ones are padded. On a GPU all rows are attended together (`flash.py`),
and the most frequent lengths run as captured steps of fixed sizes (`steps.py`). There results
depend on the batch, except in exact mode (`Means`): steps have one size, and other work runs per
session. Exactness is tested when steps are made; if it fails, each step has one session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .attention import CacheOf, Row, SlotCache
from .flash import SpanCache
from .steps import Network, Stepper, batches
from .work import Feed, Speak

ROWS_MIN: Final = 16
"""Rows from which on a matrix product gives each row the same bits; see above."""

EXACT_SIZE: Final = 64
"""Sessions of an exact step, whatever the number of slots: a replay has one."""

_log = logging.getLogger("antiphon.model")


def _padded(rows: Tensor, count: int) -> Tensor:
    lacking = max(0, count - len(rows))
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, lacking)) if lacking else rows


@attrs.frozen(kw_only=True)
class Means:
    """How a device computes; results are equal up to rounding.

    Attributes:
        cache_of: makes the attention cache.
        sizes: sessions per step, ascending; empty: no steps.
        rows_min: rows that a matrix product is padded to.
        is_alone: steps give bitwise the same result in any batch, and other work runs per session.
    """

    cache_of: CacheOf = SlotCache
    sizes: Sequence[int] = ()
    rows_min: int = 1
    is_alone: bool = False


ON_CPU: Final = Means(rows_min=ROWS_MIN)


def means_on(device: torch.device, slots: int, *, exact: bool) -> Means:
    """Choose how to compute; `exact`: results are bitwise independent of the batch, as on a CPU."""
    if device.type != "cuda":
        return ON_CPU
    sizes = (EXACT_SIZE,) if exact else batches(slots)
    return Means(cache_of=SpanCache.of, sizes=sizes, is_alone=exact)


@attrs.frozen(eq=False)
class Decoder:
    """A decoder with its KV cache.

    `steps`: runs the most frequent lengths; None: no captured steps.
    """

    network: Network
    means: Means
    steps: Stepper | None

    def steps_take(self, count: int) -> bool:
        """Whether `count` rows of a session run as a step."""
        return self.steps is not None and count in self.steps.lengths

    def run(self, works: Sequence[Feed | Speak]) -> tuple[Tensor, Tensor]:
        """Run rows of one length; return last hidden states (B, width) and logits (B, ids)."""
        count = len(works[0].rows)
        rows = [Row(slot=work.slot, start=work.start) for work in works]
        if self.steps is not None and self.steps_take(count):
            return self.steps.run([work.rows for work in works], rows)
        x = _padded(torch.stack([work.rows for work in works]), -(-self.means.rows_min // count))
        starts = torch.tensor([work.start for work in works] + [0] * (len(x) - len(works)))
        positions = (starts[:, None] + torch.arange(count)).to(x.device)
        model, store = self.network.model, self.network.store
        heads = int(model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
        cache = self.means.cache_of(store, rows, count, heads // store.keys.shape[2])
        out = model(inputs_embeds=x, position_ids=positions, past_key_values=cache, use_cache=True)
        hidden: Tensor = out.last_hidden_state[: len(works), -1]
        logits = self.network.head(_padded(hidden, self.means.rows_min)).float()[: len(works)]
        return hidden, logits


def make_decoder(network: Network, means: Means, lengths: Sequence[int]) -> Decoder:
    """Make a decoder, with steps for `lengths` if possible; all slots must be empty."""
    name = type(network.model).__name__
    sizes = [means.sizes, (1,)] if means.is_alone else [means.sizes]
    for some in sizes if means.sizes else ():
        try:
            with torch.inference_mode():
                steps = Stepper(network, some, lengths)
                if not means.is_alone or steps.is_exact():
                    return Decoder(network, means, steps)
        except Exception:  # Of the driver or a library, of any type.
            _log.exception("no fixed steps for %s: all is launched kernel by kernel", name)
            if network.store.keys.is_cuda:
                torch.cuda.synchronize()  # Raises if the GPU is lost to this process.
            break
        _log.warning("steps of %d sessions are not exact for %s", some[-1], name)
    return Decoder(network, means, None)
