"""Attention over slots in one call for all rows, for GPUs.

`SlotCache` attends row by row: on a GPU, one launch per row and layer. Flash attention takes rows
of any length at once: packed queries, and keys in place. A layer's slots are one long row of
positions (`KvSlots.layer`); per row the kernel gets the slot's start and the number of positions
seen, its own included. Keys are neither gathered nor repeated for groups.

The kernel is that of `torch.nn.attention.varlen`, called directly, since the API has the number of
positions only from torch 2.12 on. It needs bf16 or fp16 on Ampere or later. Nothing here waits for
the device, and after `Spans.aim` no value comes from the host, so a pass can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from .attention import KvSlots, Row
from .kernels import Places

APART_MAX: Final = 2
"""Rows of a session that are attended as queries by themselves: one query shares the keys among the
heads of a group, where several read them once for each head."""


class Spans:
    """The positions that a forward pass feeds and sees, in fixed tensors shared by all layers.

    Args:
        batch: sessions.
        length: positions that each feeds.
        causal: as of `SlotCache`.
    """

    def __init__(self, store: KvSlots, batch: int, length: int, *, causal: bool = True) -> None:
        device = store.keys.device
        self._capacity = store.capacity
        self._aimed = torch.zeros(3, batch, dtype=torch.int64, device=device)
        self.slots, self.starts, self.lasts = self._aimed
        zeros = torch.zeros(batch * length, dtype=torch.int64, device=device)
        self.places = Places(of=zeros, flat=zeros.clone())
        self._offsets = torch.arange(length, device=device)
        is_apart = causal and length <= APART_MAX
        self._asked = 1 if is_apart else length  # Positions of a query.
        count = batch * length // self._asked
        self._queries = torch.arange(count + 1, dtype=torch.int32, device=device) * self._asked
        self._begins = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(count, dtype=torch.int32, device=device)
        # A single query needs no mask; without one the kernel splits its keys among processors.
        self._is_causal = causal and self._asked > 1 and store.window is None
        self._before = None if store.window is None else store.window - 1
        self._after = 0 if causal and store.window is not None else None
        self._is_pinned = device.type == "cuda"
        self._firsts = torch.arange(batch, device=device) * length

    def aim(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Set each session's slot, its start position, and how many of its positions are used."""
        # Made again: torch keeps pinned memory until copies from it are done, also after a failure.
        lasts = [count - 1 for count in counts]
        where = [[row.slot for row in rows], [row.start for row in rows], lasts]
        sent = torch.tensor(where, pin_memory=self._is_pinned)
        self._aimed.copy_(sent, non_blocking=True)

    def take(self) -> None:
        """Compute the positions on the device."""
        begins = self.slots * self._capacity
        places = self.starts[:, None] + self._offsets  # (B, T)
        self.places.of.copy_(places.flatten())
        self.places.flat.copy_((begins[:, None] + places).flatten())
        ends = places[:, self._asked - 1 :: self._asked] + 1
        self._begins[:-1].copy_(begins[:, None].expand(ends.shape).flatten())
        self._seen.copy_(ends.flatten())

    def last(self, hidden: Tensor) -> Tensor:
        """The last used row of each session, (B, width), of (B * T, width)."""
        return hidden.index_select(0, self._firsts + self.lasts)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend: query (batch * length, H, D), bf16 or fp16; all slots' keys (positions, K, D)."""
        out: Tensor = torch.ops.aten._flash_attention_forward.default(
            query,
            keys,
            values,
            self._queries,
            self._begins,
            self._asked,
            self._capacity,
            0.0,
            self._is_causal,
            False,
            scale=scale,
            window_size_left=self._before,
            window_size_right=self._after,
            seqused_k=self._seen,
        )[0]
        return out


def spans_of(store: KvSlots, rows: Sequence[Row], count: int, *, causal: bool = True) -> Spans:
    """Spans of sessions that feed `count` positions each."""
    spans = Spans(store, len(rows), count, causal=causal)
    for row in rows:
        store.reach(row.slot, row.start + count)
    spans.aim(rows, [count] * len(rows))
    spans.take()
    return spans


@attrs.frozen(eq=False)
class Spanned:
    """What all rows of a forward pass see in one layer."""

    keys: Tensor
    values: Tensor
    spans: Spans

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Attend with (B, H, T, D); returns (B, T, H, D)."""
        b, h, t, d = query.shape
        packed = query.transpose(1, 2).reshape(b * t, h, d)
        return self.spans.attend(packed, self.keys, self.values, scale).view(b, t, h, d)


class SpanCache:
    """The cache of a forward pass whose rows are attended together; see `SlotCache`."""

    def __init__(self, store: KvSlots, spans: Spans) -> None:
        self._store, self._spans = store, spans

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Spanned, None]:
        """Write a layer's new keys and values, (B, K, T, D); return what the rows see."""
        keys, values = self._store.layer(layer_idx)
        for target, new in ((keys, key), (values, value)):
            target[self._spans.places.flat] = new.transpose(1, 2).flatten(0, 1)
        return Spanned(keys, values, self._spans), None


def can_attend(store: KvSlots) -> bool:
    """Whether a kernel supports the store's device and format, tested with one query."""
    spans = Spans(store, 1, 1)
    spans.take()
    keys, values = store.layer(0)
    try:
        spans.attend(keys[:1], keys, values, 1.0)
    except (NotImplementedError, RuntimeError):  # No such operator, or unsupported arguments.
        return False
    return True
