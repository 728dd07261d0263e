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

import attrs
import torch
from torch import Tensor

from .attention import KvSlots, Row


class Spans:
    """The positions that a forward pass feeds and sees, in fixed tensors shared by all layers.

    Args:
        batch: rows.
        length: positions that each row feeds.
        causal: as of `SlotCache`.
    """

    def __init__(self, store: KvSlots, batch: int, length: int, *, causal: bool = True) -> None:
        self._capacity, self._length, device = store.capacity, length, store.keys.device
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.starts = torch.zeros(batch, dtype=torch.int64, device=device)
        self.places = torch.zeros(batch, length, dtype=torch.int64, device=device)
        self._offsets = torch.arange(length, device=device)
        self._queries = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        self._begins = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(batch, dtype=torch.int32, device=device)
        # A single query needs no mask; without one the kernel splits its keys among processors.
        self._is_causal = causal and length > 1 and store.window is None
        self._before = None if store.window is None else store.window - 1
        self._after = 0 if causal and store.window is not None else None
        self._is_pinned = device.type == "cuda"

    def aim(self, rows: Sequence[Row]) -> None:
        """Set each row's slot and start position."""
        # Made again: torch keeps pinned memory until copies from it are done, also after a failure.
        where = [[row.slot for row in rows], [row.start for row in rows]]
        sent = torch.tensor(where, pin_memory=self._is_pinned)
        self.slots.copy_(sent[0], non_blocking=True)
        self.starts.copy_(sent[1], non_blocking=True)

    def take(self) -> None:
        """Compute the positions on the device."""
        self.places.copy_(self.starts[:, None] + self._offsets)
        self._begins[:-1].copy_(self.slots * self._capacity)
        self._seen.copy_(self.starts + self._length)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend: query (batch * length, H, D), bf16 or fp16; all slots' keys (positions, K, D)."""
        out: Tensor = torch.ops.aten._flash_attention_forward.default(
            query,
            keys,
            values,
            self._queries,
            self._begins,
            self._length,
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

    @classmethod
    def of(
        cls, store: KvSlots, rows: Sequence[Row], count: int, _groups: int, *, causal: bool = True
    ) -> SpanCache:
        """Make the cache for rows of `count` positions each; a `CacheOf`."""
        spans = Spans(store, len(rows), count, causal=causal)
        for row in rows:
            store.reach(row.slot, row.start + count)
        spans.aim(rows)
        spans.take()
        return cls(store, spans)

    def get_seq_length(self, _layer: int = 0) -> int:
        """Unused, as in `SlotCache`."""
        return 0

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Spanned, None]:
        """Write a layer's new keys and values, (B, K, T, D); return what the rows see."""
        spans = self._spans
        self._store.write(layer_idx, spans.slots[:, None], spans.places, key, value)
        keys, values = self._store.layer(layer_idx)
        return Spanned(keys, values, spans), None


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
