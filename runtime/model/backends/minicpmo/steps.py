"""Forward passes of fixed sizes in fixed memory, for GPUs.

A token, or the few rows of a unit, is little arithmetic in many small kernels, so on a GPU most
time goes into launches. There the most frequent lengths run in steps of a few batch sizes
(`batches`), filled with copies of the first row, which write the same values to the same places. A
step attends in one call a layer (`flash.py`), and is captured once as a CUDA graph. All but the
kernel and the capture is tested on CPUs, which do not use it because it rounds differently. It has
never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from .attention import KvSlots, Row
from .flash import SpanCache, Spans

BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sessions per step; each size is captured once for each length, in a second or less."""
WARM_UPS: Final = 2

Out: TypeAlias = tuple[Tensor, Tensor]
"""Last hidden states (B, width), and logits (B, ids), float32."""


def batches(slots: int) -> tuple[int, ...]:
    """The step sizes for a number of slots, ascending; the last holds them all."""
    return (*(size for size in BATCHES if size < slots), slots)


@attrs.frozen(eq=False)
class Network:
    """A decoder's parts.

    Attributes:
        model: stock, without its head.
        head: last hidden states to logits, (B, width) -> (B, ids).
        store: its slots.
    """

    model: nn.Module
    head: Callable[[Tensor], Tensor]
    store: KvSlots


class Step:
    """A forward pass of one size: `batch` sessions, each feeding `length` rows."""

    def __init__(self, network: Network, batch: int, length: int) -> None:
        self._network, store = network, network.store
        width, like = int(network.model.config.hidden_size), store.keys  # type: ignore[union-attr, arg-type]
        self.rows = torch.zeros(batch, length, width, dtype=like.dtype, device=like.device)
        self.spans = Spans(store, batch, length)
        self._cache = SpanCache(store, self.spans)

    def compute(self) -> Out:
        """Feed the rows."""
        self.spans.take()
        out = self._network.model(
            inputs_embeds=self.rows,
            position_ids=self.spans.places,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state[:, -1]
        return hidden, self._network.head(hidden).float()


class Replayed:
    """A step captured once as a graph and replayed as one launch.

    Args:
        step: of one size; its capture writes to slot 0, from position 0 on.
        aside: the stream of all captures, since libraries keep memory per stream.
        pool: memory shared by all steps: a result must be taken before the next step.
    """

    def __init__(self, step: Step, aside: torch.cuda.Stream, pool: Any) -> None:
        aside.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its stream current; the surrounding context does not.
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):  # Triggers the libraries' first-use setup.
                step.compute()
            # Another thread may serve meanwhile; its calls are not captured.
            mode = "thread_local"
            with torch.cuda.graph(self._graph, pool, aside, capture_error_mode=mode):
                self._out = step.compute()
        torch.cuda.current_stream().wait_stream(aside)

    def compute(self) -> Out:
        """Replay the step; the next step may overwrite the result."""
        self._graph.replay()
        return self._out


class Stepper:
    """Feeds a few rows to each of any number of sessions, in steps of fixed sizes and lengths."""

    def __init__(self, network: Network, sizes: Sequence[int], lengths: Sequence[int]) -> None:
        self._store = store = network.store
        self.sizes, self.lengths = tuple(sizes), tuple(lengths)
        # The largest are captured first, so that the others reuse their memory.
        shapes = [(size, length) for size in self.sizes[::-1] for length in sorted(lengths)[::-1]]
        self._steps = {shape: Step(network, *shape) for shape in shapes}
        self._computed: dict[tuple[int, int], Step | Replayed] = dict(self._steps)
        if store.keys.is_cuda:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            pool = torch.cuda.graph_pool_handle()
            self._computed = {
                shape: Replayed(step, aside, pool) for shape, step in self._steps.items()
            }
            store.keys[:, 0, :, : max(lengths)] = 0
            store.values[:, 0, :, : max(lengths)] = 0

    def run(self, rows: Sequence[Tensor], places: Sequence[Row]) -> Out:
        """Feed rows, (T, width), to distinct slots; return the outputs of each last row."""
        most, length = self.sizes[-1], len(rows[0])
        for row in places:
            self._store.reach(row.slot, row.start + length)
        parts = [
            self._run(rows[begin : begin + most], places[begin : begin + most])
            for begin in range(0, len(rows), most)
        ]
        if len(parts) == 1:
            return parts[0]
        hidden, logits = zip(*parts, strict=True)
        return torch.cat(hidden), torch.cat(logits)

    def _run(self, rows: Sequence[Tensor], places: Sequence[Row]) -> Out:
        count = len(rows)
        size = next(size for size in self.sizes if size >= count)
        shape, lacking = (size, len(rows[0])), size - count
        step = self._steps[shape]
        step.rows.copy_(torch.stack([*rows, *[rows[0]] * lacking]))
        step.spans.aim([*places, *[places[0]] * lacking])
        hidden, logits = self._computed[shape].compute()
        return hidden[:count].clone(), logits[:count].clone()

    def is_exact(self) -> bool:
        """Whether a session's bits do not depend on the other sessions in the step.

        Tested with random rows after random keys: repeated, reordered, unbatched, and in another
        slot. The store is overwritten, and empty afterwards.
        """
        try:
            self._store.scramble()
            return all(map(self._are_their_own, self.lengths))
        finally:
            self._store.clear()

    def _are_their_own(self, length: int) -> bool:
        store, width = self._store, next(iter(self._steps.values())).rows.shape[2]
        places = self._spread(length)
        count = len(places)
        rows = list(torch.randn(count, length, width).mul(0.02).to(store.keys))
        whole = self.run(rows, places)

        def is_equal(which: Sequence[int], where: Sequence[Row]) -> bool:
            outs = self.run([rows[index] for index in which], where)
            return all(
                torch.equal(out, own[list(which)]) for out, own in zip(outs, whole, strict=True)
            )

        order = list(range(count))
        some = sorted({0, count // 2, count - 1})
        if not (is_equal(order, places) and is_equal(order[::-1], places[::-1])):
            return False
        if not all(is_equal([index], [places[index]]) for index in some):
            return False
        last = places[-1]
        store.put(0, 0, store.take(last.slot, 0, last.start))
        return is_equal(order[-1:], [Row(slot=0, start=last.start)])

    def _spread(self, length: int) -> list[Row]:
        """Places for as many rows as the largest step has, spread over all slots and positions."""
        slots, most = self._store.keys.shape[1], self._store.capacity - length
        along = max(1, min(-(-self.sizes[-1] // slots), most // length))
        return [
            Row(slot=slot, start=most * (place * slots + slot + 1) // (along * slots))
            for place in range(along)
            for slot in range(slots)
        ]
