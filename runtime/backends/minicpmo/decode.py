"""One token for each of many sessions at once, in memory that never moves: for GPUs.

Decoding a token is little arithmetic behind many small kernels. On a GPU the time goes into
launching them one by one, and into attention row by row. So there a step is

- of a fixed size: a few batch sizes (`batches`), a smaller batch filled up with copies of its first
  row, which write the same values to the same places;
- one call of flex attention a layer for all rows: a layer's slots lie in one row of positions
  (`KvSlots.layer`), and a block mask says which blocks each row sees. Keys are never repeated for
  the groups, nor copied. What a row sees is computed on the device from its slot and its place;
  blocks that are seen whole are not listed apart (`Aim`);
- captured once as a CUDA graph and replayed. Going in: the rows, and slots and places through
  pinned memory. Coming out: hidden states and logits.

All of it but the capture runs on any device, and is tested on CPUs against `SlotCache`. It rounds
otherwise than rows by themselves do, so CPUs do not use it. It has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .attention import KvSlots

BLOCK: Final = 128
"""Positions of a block of the mask; slots are whole blocks."""
BATCHES: Final = (1, 4, 16, 32, 64)
"""Rows of a step: each size is compiled and captured once, and reads all weights whatever it is."""
WARM_UPS: Final = 3
COMPILED_MAX: Final = 64
"""Shapes that flex attention is compiled for in a process, one a size of each decoder: by itself
torch refuses the ninth."""


Attend = Callable[..., Any]
"""Flex attention, compiled or not: (B, H, 1, D) over (1, K, S, D)."""


def batches(slots: int) -> tuple[int, ...]:
    """The sizes of steps for so many sessions, ascending; the last one holds them all."""
    return (*(size for size in BATCHES if size < slots), slots)


class Aim:
    """Which positions of a store each row of a step sees: its own slot, up to its place.

    Its tensors stay where they are, and are filled on the device. All layers share them.

    The mask is asked of every block, also of those that a row sees whole: where such blocks are
    listed apart, flex attention divides the work between processors by the length of the whole
    store, not of what is seen, and one processor gets all blocks of a row.

    Args:
        store: the slots; their capacity is a multiple of `BLOCK`.
        batch: rows.
    """

    def __init__(self, store: KvSlots, batch: int) -> None:
        assert store.capacity % BLOCK == 0, store.capacity
        self._window, self._capacity = store.window, store.capacity
        slots, device = store.keys.shape[1], store.keys.device
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.places = torch.zeros(batch, dtype=torch.int64, device=device)
        self._first = torch.zeros(batch, dtype=torch.int64, device=device)
        self._last = torch.zeros(batch, dtype=torch.int64, device=device)
        self._steps = torch.arange(store.capacity // BLOCK, device=device)
        blocks = slots * store.capacity // BLOCK
        self._count = torch.zeros(batch, 1, 1, dtype=torch.int32, device=device)
        self._blocks = torch.zeros(batch, 1, 1, blocks, dtype=torch.int32, device=device)
        self.mask = BlockMask.from_kv_blocks(
            self._count,
            self._blocks,
            BLOCK_SIZE=BLOCK,
            mask_mod=self._sees,
            seq_lengths=(1, slots * store.capacity),
            compute_q_blocks=False,
        )

    def _sees(self, row: Tensor, _head: Tensor, _query: Tensor, position: Tensor) -> Tensor:
        return (position >= self._first[row]) & (position <= self._last[row])

    def take(self) -> None:
        """Work out what is seen from `slots` and `places`; nothing here waits for the device."""
        base = self.slots * self._capacity
        self._last.copy_(base + self.places)
        reach = self._capacity if self._window is None else self._window
        start = self.places - (reach - 1)
        self._first.copy_(base + start.clamp_min(0))
        first, last = self._first // BLOCK, self._last // BLOCK
        self._count.copy_((last - first + 1)[:, None, None])
        ascending = first[:, None] + self._steps  # Those behind the last are never read.
        self._blocks[:, 0, 0, : len(self._steps)] = torch.minimum(ascending, last[:, None])


@attrs.frozen(eq=False)
class Aimed:
    """What all rows of a step see in one layer; see `Seen`."""

    keys: Tensor
    values: Tensor
    mask: BlockMask
    flex: Attend

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Attention of (B, H, 1, D); gives (B, 1, H, D)."""
        grouped = query.shape[1] != self.keys.shape[1]
        out: Tensor = self.flex(
            query, self.keys, self.values, block_mask=self.mask, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)


class StepCache:
    """The cache of a step; the stock models call `update` once a layer.

    Args:
        store: the slots.
        aim: which positions are fed and seen.
        flex: flex attention.
    """

    def __init__(self, store: KvSlots, aim: Aim, flex: Attend) -> None:
        self._store, self._aim, self._flex = store, aim, flex

    def get_seq_length(self, _layer: int = 0) -> int:
        """Never needed: see `SlotCache`."""
        return 0

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Aimed, None]:
        """Write a layer's new keys and values, (B, K, 1, D); gives what the rows see."""
        slots, places = self._aim.slots, self._aim.places
        self._store.keys[layer_idx][slots, :, places] = key[:, :, 0]
        self._store.values[layer_idx][slots, :, places] = value[:, :, 0]
        keys, values = self._store.layer(layer_idx)
        return Aimed(keys, values, self._aim.mask, self._flex), None


class Step:
    """A step of one size.

    Args:
        decoder: a stock model without its head.
        head: last hidden states to logits, (B, width) -> (B, ids).
        store: its slots.
        batch: rows.
        flex: flex attention.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: Callable[[Tensor], Tensor],
        store: KvSlots,
        batch: int,
        flex: Attend,
    ) -> None:
        width = int(decoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
        like = store.keys
        self.rows = torch.zeros(batch, 1, width, dtype=like.dtype, device=like.device)
        self.aim = Aim(store, batch)
        self._cache = StepCache(store, self.aim, flex)
        self._decoder, self._head = decoder, head

    def compute(self) -> tuple[Tensor, Tensor]:
        """Feed the rows; gives their last hidden states (B, width) and logits (B, ids), float32."""
        self.aim.take()
        out = self._decoder(
            inputs_embeds=self.rows,
            position_ids=self.aim.places[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state[:, -1]
        return hidden, self._head(hidden).float()


class Replayed:
    """A step that was captured once: what it computes is replayed, kernel by kernel, as one launch.

    Args:
        step: of one size; what it writes while it is captured goes to slot 0, position 0.
        aside: where it is captured; libraries keep memory for each stream, so all steps share one.
    """

    def __init__(self, step: Step, aside: torch.cuda.Stream) -> None:
        aside.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its stream current: what is around it does not.
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):  # Compiles, and makes what libraries make at first use.
                step.compute()
            with torch.cuda.graph(self._graph, stream=aside):
                self._out = step.compute()
        torch.cuda.current_stream().wait_stream(aside)

    def compute(self) -> tuple[Tensor, Tensor]:
        """See `Step.compute`; the next call writes over what it gives."""
        self._graph.replay()
        return self._out


class Stepper:
    """Decodes a token for each of any number of sessions, in steps of fixed sizes.

    Args:
        decoder: as of `Step`.
        head: as of `Step`.
        store: as of `Step`; all slots are empty.
        sizes: of the steps, ascending; the last holds all sessions that can come.
        flex: flex attention.

    Attributes:
        sizes: of the steps.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: Callable[[Tensor], Tensor],
        store: KvSlots,
        sizes: Sequence[int],
        flex: Attend,
    ) -> None:
        device = store.keys.device
        self._store, self.sizes = store, tuple(sizes)
        self._steps = [Step(decoder, head, store, size, flex) for size in sizes]
        self._replayed: list[Step | Replayed] = list(self._steps)
        if device.type == "cuda":
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._replayed = [Replayed(step, aside) for step in self._steps]
            store.keys[:, 0, :, 0] = 0
            store.values[:, 0, :, 0] = 0
        self._is_pinned = device.type == "cuda"

    def decode(
        self, rows: Sequence[Tensor], places: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Feed one row to each of some sessions.

        Args:
            rows: embeddings, (width,) each.
            places: the slot of each, and the tokens that it holds; no slot twice.

        Returns:
            Last hidden states (B, width) and logits (B, ids), float32, both on the device.
        """
        count = len(rows)
        which = next(n for n, size in enumerate(self.sizes) if size >= count)
        step, lacking = self._steps[which], self.sizes[which] - count
        for slot, place in places:
            self._store.reach(slot, place + 1)
        filled = [*places, *[places[0]] * lacking]
        # Made anew: torch keeps pinned memory until copies from it are done, also after a failure.
        where = torch.tensor(list(zip(*filled, strict=True)), pin_memory=self._is_pinned)
        step.rows.copy_(torch.stack([*rows, *[rows[0]] * lacking])[:, None])
        step.aim.slots.copy_(where[0], non_blocking=True)
        step.aim.places.copy_(where[1], non_blocking=True)
        hidden, logits = self._replayed[which].compute()
        return hidden[:count].clone(), logits[:count].clone()


def stepper(decoder: nn.Module, head: Callable[[Tensor], Tensor], store: KvSlots) -> Stepper:
    """A stepper for the device that the store lies on, its attention compiled.

    Args:
        decoder: as of `Stepper`.
        head: as of `Stepper`.
        store: as of `Stepper`.

    Raises:
        Exception: whatever the compiler or the driver raises where a step cannot be made.
    """
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def flex(*args: Any, **options: Any) -> Any:
        with dynamo.patch(recompile_limit=COMPILED_MAX):
            return compiled(*args, **options)

    return Stepper(decoder, head, store, batches(store.keys.shape[1]), flex)
