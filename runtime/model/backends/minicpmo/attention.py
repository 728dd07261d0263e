"""Attention over slots: the keys and values of all sessions, and how rows attend to them.

`KvSlots` holds the keys and values of a decoder for all sessions; its memory is fixed. Slots may
share it: each then has the pages that it needs so far, in one piece, which is moved when it cannot
grow where it is. So a kernel finds the same numbers in the same order, whatever a slot has. A cache
is a view of it for one forward pass: stock models take it as `past_key_values`, and it appends each
row's new keys to its slot. The attention function that they call, registered as `ATTENTION`, then
attends to what the cache returned:

- `SlotCache`, on CPUs: each row by itself over exactly the positions that it sees, without padding,
  masks over absent positions or repeated keys, so a result does not depend on other rows.
- `SpanCache`, on GPUs: all rows of any length in one call of flash attention, over the slots in
  place. 48 sessions launch 379 operators a token instead of 5,502.

Without a cache it is plain causal attention over whole sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface

# -- row by row ---------------------------------------------------------------------------------

ATTENTION: Final = "antiphon"
PAGE: Final = 256
"""Positions by which slots grow that share them: 20 s of sound; a copy moves few of them."""


@attrs.frozen(kw_only=True, eq=False)
class KvCopy:
    """A copy of some positions of a slot; keys and values are (layers, heads, T, width)."""

    keys: Tensor
    values: Tensor


class KvSlots:
    """Keys and values of one decoder, for all slots: (layers, slots, heads, capacity, width).

    A layer is one row of positions (`layer`), of which a slot has some consecutive ones, from
    `place` on. After the last slot come `spare` positions, of no session.

    Args:
        slots: maximum concurrent sessions.
        heads: key and value heads.
        capacity: positions per slot.
        width: of a head.
        window: positions that a query sees, itself included; None: all.
        spare: positions for rows that only fill a step up.
        positions: that slots share; None: each has its own. Then `keys` and `values` are as of one
            slot with all positions.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        capacity: int,
        width: int,
        window: int | None = None,
        spare: int = 0,
        positions: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._is_shared = positions is not None
        count = slots * capacity if positions is None else positions
        shape = (layers, heads, count + spare, width)
        self._flat = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        # A move allocates nothing: without memory in the middle, a session would be half moved.
        moved = (heads, capacity * self._is_shared, width)
        self._moved = torch.empty(moved, dtype=dtype, device=device)
        parts = (layers, heads, 1 if self._is_shared else slots, -1, width)
        self.keys, self.values = (
            flat[:, :, :count].view(parts).transpose(1, 2) for flat in self._flat
        )
        self.slots, self.capacity, self.positions = slots, capacity, count
        self.window = window
        self._written = [0] * slots
        self._begins = [0 if self._is_shared else slot * capacity for slot in range(slots)]
        self._begins.append(count)  # Of no slot: the spare positions.
        self._sizes = [*[0 if self._is_shared else capacity] * slots, 0]

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot, in bytes; the average, if they share it."""
        return 2 * self.keys.numel() * self.keys.element_size() // self.slots

    @property
    def free(self) -> int:
        """Positions that no slot has."""
        return self.positions - sum(self._sizes)

    @property
    def used_slots(self) -> int:
        """Slots that have positions."""
        return sum(size > 0 for size in self._sizes)

    def place(self, slot: int, at: int = 0) -> int:
        """Where a slot's position is in a layer, until another slot grows."""
        return self._begins[slot] + at

    def heads(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as views (heads, positions + spare, width)."""
        keys, values = (flat[index] for flat in self._flat)
        return keys, values

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as views (positions + spare, heads, width)."""
        keys, values = (part.transpose(0, 1) for part in self.heads(index))
        return keys, values

    def write(self, index: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write a layer's rotated keys and values (B, K, T, D) to `places`, (B, T)."""
        for part, new in zip(self.heads(index), (key, value), strict=True):
            part[:, places] = new.transpose(0, 1)  # (K, B, T, D)

    def scramble(self) -> None:
        """Fill with random keys and values: among zeros, a wrong position could go unnoticed."""
        for flat in self._flat:
            flat.normal_()

    def reach(self, slot: int, end: int) -> None:
        """Register that a slot is about to be written up to `end`."""
        assert end <= self.capacity, (end, self.capacity)
        if not self.reserve(slot, end):
            raise RuntimeError(f"{end} positions of slot {slot} were not reserved")
        self._written[slot] = max(self._written[slot], end)

    def reserve(self, slot: int, end: int, leaving: int = 0) -> bool:
        """Let a slot have its positions up to `end`, unless fewer than `leaving` stayed free."""
        size = min(self.capacity, _pages(end))
        more = size - self._sizes[slot]
        if more <= 0:
            return True
        if self.free - more < leaving:
            return False
        self._grow(slot, size)
        return True

    def _grow(self, slot: int, size: int) -> None:
        """Find a place for a larger slot: where it is, else in the first gap, else make one."""
        others = sorted(
            (other for other in range(self.slots) if other != slot and self._sizes[other]),
            key=self._begins.__getitem__,
        )
        here = self._begins[slot] if self._sizes[slot] else None
        begin, place = 0, None
        for other in (*others, self.slots):
            end = self._begins[other]
            if here is not None and begin <= here <= end - size:
                place = here
                break
            if place is None and end - begin >= size:
                place = begin
            begin = end + self._sizes[other]
        if place is None:
            place = self._gather(others, self.positions if here is None else here)
        self._move(slot, place)
        self._sizes[slot] = size

    def _gather(self, others: Sequence[int], middle: int) -> int:
        """Move all slots below a position down, those above it up; where the gap begins."""
        low, high = 0, self.positions
        for other in others:
            if self._begins[other] < middle:
                self._move(other, low)
                low += self._sizes[other]
        for other in reversed(others):
            if self._begins[other] > middle:
                high -= self._sizes[other]
                self._move(other, high)
        return low

    def _move(self, slot: int, begin: int) -> None:
        before, count = self._begins[slot], self._written[slot]
        self._begins[slot] = begin
        if begin == before or not count:
            return
        for flat in self._flat:
            for layer in flat:  # One by one: a copy of all would take gigabytes.
                kept = self._moved[:, :count].copy_(layer[:, before : before + count])
                layer[:, before : before + count].zero_()
                layer[:, begin : begin + count].copy_(kept)

    def take(self, slot: int, start: int, stop: int) -> KvCopy:
        """Copy positions `start` to `stop` of a slot."""
        keys, values = (part.clone() for part in self._parts(slot, start, stop))
        return KvCopy(keys=keys, values=values)

    def _parts(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        begin = self._begins[slot]
        keys, values = (flat[:, :, begin + start : begin + stop] for flat in self._flat)
        return keys, values

    def put(self, slot: int, start: int, kept: KvCopy) -> None:
        """Write copied positions, from `start` on."""
        end = start + kept.keys.shape[2]
        self.reach(slot, end)
        for part, new in zip(self._parts(slot, start, end), (kept.keys, kept.values), strict=True):
            part.copy_(new)

    def clear(self) -> None:
        """Zero all slots entirely."""
        for flat in self._flat:
            flat.zero_()
        self._written = [0] * self.slots
        if self._is_shared:
            self._sizes = [0] * (self.slots + 1)

    def wipe(self, slot: int, start: int = 0) -> None:
        """Zero everything written to a slot, from position `start` on, and give it to others."""
        end = self._written[slot]
        for part in self._parts(slot, start, max(start, end)):
            part.zero_()
        self._written[slot] = min(start, end)
        if self._is_shared:
            self._sizes[slot] = min(self._sizes[slot], _pages(self._written[slot]))

    def trim(self, slot: int, end: int) -> None:
        """Give what a slot has from `end` on to others, all but a first page, if they share it."""
        if self._is_shared and self._sizes[slot]:
            self.wipe(slot, end)
            self.reserve(slot, max(1, end))


def _pages(positions: int) -> int:
    """So many positions, in whole pages."""
    return -(-positions // PAGE) * PAGE


@attrs.frozen(kw_only=True)
class Row:
    """One row of a batch: the slot that it feeds, and the start position."""

    slot: int
    start: int


@attrs.frozen(eq=False, kw_only=True)
class Places:
    """Where rows go: their positions in the session, and in a layer of all slots; int64, (N,)."""

    of: Tensor
    flat: Tensor


@attrs.frozen(eq=False)
class KvView:
    """What one row of a forward pass sees in one layer.

    Attributes:
        keys: (K, S, D), a view into the slot; the last T positions are the row's own.
        mask: (G * T, S), True where seen; None sees all.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


@attrs.frozen(eq=False)
class KvViews:
    """What each real row sees, in batch order; further rows are padding."""

    rows: Sequence[KvView]

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Attend row by row; zero for padding."""
        b, h, t, d = query.shape
        out = query.new_zeros(b, h, t, d)
        for index, view in enumerate(self.rows):
            k = view.keys.shape[0]
            folded = query[index].reshape(1, k, h // k * t, d)  # A group's queries go into T.
            seen = F.scaled_dot_product_attention(
                folded, view.keys[None], view.values[None], attn_mask=view.mask, scale=scale
            )
            out[index] = seen.reshape(h, t, d)
        return out.transpose(1, 2)


def causal_mask(queries: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """The mask (queries, seen), True where seen, of the last `queries` positions."""
    at = torch.arange(seen - queries, seen, device=device)[:, None]
    of = torch.arange(seen, device=device)[None]
    mask = of <= at
    return mask if window is None else mask & (at - of < window)


class SlotCache:
    """The cache of one forward pass; stock models call `update` once per layer.

    Args:
        rows: the real rows of the batch; further rows are padding, which write and see nothing.
        count: positions that each row feeds.
        groups: query heads per key head.
        causal: False lets the new positions see each other both ways (audio).
    """

    def __init__(
        self, store: KvSlots, rows: Sequence[Row], count: int, groups: int, *, causal: bool = True
    ) -> None:
        self._store, self._rows = store, rows
        self._spans = []
        for row in rows:
            end = row.start + count
            store.reach(row.slot, end)
            low = 0 if store.window is None else max(0, end - count + 1 - store.window)
            mask = None
            if causal and (count > 1):
                window = store.window
                mask = causal_mask(count, end - low, window, store.keys.device)
                mask = mask.repeat(groups, 1)  # (G * T, S)
            self._spans.append((low, end, mask))
        device = store.keys.device
        begins = [store.place(row.slot, row.start) for row in rows]
        starts = torch.tensor(begins, device=device)[:, None]
        self._places = starts + torch.arange(count, device=device)  # (B, T)

    def get_seq_length(self, _layer: int = 0) -> int:
        """Unused: positions are passed explicitly, and no mask is derived from it."""
        return 0

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[KvViews, None]:
        """Write rotated keys and values (B, K, T, D); return what each real row sees, and None."""
        real = len(self._rows)
        self._store.write(layer_idx, self._places, key[:real], value[:real])
        keys, values = self._store.heads(layer_idx)
        views = []
        for row, (low, end, mask) in zip(self._rows, self._spans, strict=True):
            seen = slice(self._store.place(row.slot, low), self._store.place(row.slot, end))
            views.append(KvView(keys[:, seen], values[:, seen], mask))
        return KvViews(views), None


def attend_whole(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Causal attention over whole sequences, (B, H, T, D) and (B, K, T, D) -> (B, T, H, D)."""
    b, h, t, d = query.shape
    groups = h // key.shape[1]
    mask = causal_mask(t, t, window, query.device).repeat(groups, 1)  # (G * T, T)
    folded = query.reshape(b, key.shape[1], groups * t, d)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(b, h, t, d).transpose(1, 2)


def _attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor | Seen,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that the stock models call; see the module's docstring."""
    if isinstance(key, Tensor):
        return attend_whole(query, key, value, scaling, sliding_window), None
    return key.attend(query, scaling), None


def joined(*parts: nn.Linear) -> Tensor:
    """Join the weights of some layers, of which each keeps a view."""
    whole = torch.cat([part.weight.detach() for part in parts])
    pieces = whole.split_with_sizes([len(part.weight) for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.weight = nn.Parameter(piece, requires_grad=False)
    return whole


AttentionInterface.register(ATTENTION, _attention)


# -- all rows in one call, for GPUs -------------------------------------------------------------

APART_MAX: Final = 2
"""Rows of a session that are attended as queries by themselves: one query shares the keys among the
heads of a group, where several read them once for each head."""


class Spans:
    """The positions that a forward pass feeds and sees, in fixed tensors shared by all layers.

    A layer is one long row of positions (`KvSlots.layer`); per query the kernel gets where its slot
    begins and the number of positions seen, its own included. Keys are neither gathered nor
    repeated for groups. The kernel is that of `torch.nn.attention.varlen`, called directly, since
    the API has the number of positions only from torch 2.12 on; it needs bf16 or fp16 on Ampere or
    later. Nothing waits for the device, and after `aim` no value comes from the host, so a pass can
    be captured.

    Args:
        batch: sessions.
        length: positions that each feeds.
        causal: as of `SlotCache`.
    """

    def __init__(self, store: KvSlots, batch: int, length: int, *, causal: bool = True) -> None:
        device = store.keys.device
        self._store = store
        self._aimed = torch.zeros(3, batch, dtype=torch.int64, device=device)
        self.begins, self.starts, self.lasts = self._aimed
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
        """Set where each session begins, its start position, and how many positions it uses.

        No slot may grow from then on until the pass is computed.
        """
        # Made again: torch keeps pinned memory until copies from it are done, also after a failure.
        lasts = [count - 1 for count in counts]
        begins = [self._store.place(row.slot) for row in rows]
        where = [begins, [row.start for row in rows], lasts]
        sent = torch.tensor(where, pin_memory=self._is_pinned)
        self._aimed.copy_(sent, non_blocking=True)

    def take(self) -> None:
        """Compute the positions on the device."""
        begins = self.begins
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
            self._store.capacity,
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
class SpanView:
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

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[SpanView, None]:
        """Write a layer's new keys and values, (B, K, T, D); return what the rows see."""
        keys, values = self._store.layer(layer_idx)
        for target, new in ((keys, key), (values, value)):
            target[self._spans.places.flat] = new.transpose(1, 2).flatten(0, 1)
        return SpanView(keys, values, self._spans), None


Seen = KvViews | SpanView
"""The keys and values that the rows of a forward pass see in one layer."""
Cache = SlotCache | SpanCache
"""The cache of one forward pass; stock models require more methods, but never call them."""


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
