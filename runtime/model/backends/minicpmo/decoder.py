"""A decoder with its KV cache, on a CPU or on a GPU.

On a CPU a session's result does not depend on its batch: attention is computed row by row
(`attention.py`), and a matrix product gives each row the same bits in any batch of at least
`ROWS_MIN`, to which smaller ones are padded. So the stock model runs there. On a GPU its pass has
fewer launches (`fused.py`), and sessions run as `batched.py` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .attention import KvSlots, Row, SlotCache
from .batched import Batched, Means, in_order
from .flash import Spans
from .fused import FusedDecoder, operators_for
from .steps import Out
from .work import Feed, Speak


@attrs.frozen(eq=False, kw_only=True)
class Stock:
    """A decoder's parts.

    Attributes:
        name: of what it decodes, in words.
        model: stock, without its head.
        head: last hidden states to logits, (B, width) -> (B, ids).
        store: its slots.
    """

    name: str
    model: Any
    head: Callable[[Tensor], Tensor]
    store: KvSlots


class Decoder(Protocol):
    """Runs rows of sessions."""

    def run(self, works: Sequence[Feed | Speak]) -> Out:
        """Feed the rows of each request, of any lengths, to its slot.

        Returns last hidden states, (B, width), and logits, (B, ids), float32.
        """
        ...


@attrs.frozen(eq=False)
class RowByRow:
    """A decoder that runs the stock model, and attends row by row."""

    stock: Stock
    means: Means

    def run(self, works: Sequence[Feed | Speak]) -> Out:
        """See `Decoder`; requests of one length run together."""
        order = sorted(range(len(works)), key=lambda index: len(works[index].rows))
        runs = groupby((works[index] for index in order), key=lambda work: len(work.rows))
        return in_order([self._run(list(some), count) for count, some in runs], order)

    def _run(self, works: Sequence[Feed | Speak], count: int) -> Out:
        rows = [Row(slot=work.slot, start=work.start) for work in works]
        x = _padded(torch.stack([work.rows for work in works]), -(-self.means.rows_min // count))
        starts = torch.tensor([work.start for work in works] + [0] * (len(x) - len(works)))
        positions = (starts[:, None] + torch.arange(count)).to(x.device)
        model, store = self.stock.model, self.stock.store
        groups = int(model.config.num_attention_heads) // store.keys.shape[2]
        cache = SlotCache(store, rows, count, groups)
        out = model(inputs_embeds=x, position_ids=positions, past_key_values=cache, use_cache=True)
        hidden: Tensor = out.last_hidden_state[: len(works), -1]
        logits = self.stock.head(_padded(hidden, self.means.rows_min)).float()[: len(works)]
        return hidden, logits


def _padded(rows: Tensor, count: int) -> Tensor:
    lacking = max(0, count - len(rows))
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, lacking)) if lacking else rows


class DecoderNetwork:
    """A decoder's pass for many sessions; see `Network`."""

    is_causal = True

    def __init__(self, stock: Stock) -> None:
        self.store, self._head = stock.store, stock.head
        operators = operators_for(stock.store, int(stock.model.config.num_attention_heads))
        self.name = f"{stock.name} by {operators.name}"
        self._decoder = FusedDecoder(stock.model, stock.store, operators)
        self.width = self._decoder.width

    def forward(self, rows: Tensor, spans: Spans) -> Tensor:
        """See `Network.forward`."""
        return self._decoder.forward(rows, spans)

    def finish(self, hidden: Tensor, spans: Spans) -> Out:
        """The last hidden state of each session, and its logits."""
        last = spans.last(hidden)
        return last, self._head(last).float()


@attrs.frozen(eq=False)
class Together:
    """A decoder that runs all sessions together."""

    batched: Batched

    def run(self, works: Sequence[Feed | Speak]) -> Out:
        """See `Decoder`."""
        places = [Row(slot=work.slot, start=work.start) for work in works]
        return self.batched.run([work.rows for work in works], places)
