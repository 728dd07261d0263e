"""How a device computes rows of many sessions: as steps, together, or session by session.

On a GPU all rows are attended together (`attention.Spans`), and the most frequent lengths run as
captured steps of fixed sizes. A token, or the few rows of a unit, is little arithmetic in many
small kernels, so most time goes into launches. Each step is captured once as a CUDA graph: one
launch instead of 379 for a token, 6.8 ms instead of 9.0 for one of 16 sessions
(with the fused passes of `decoder.py`). A shorter length is filled up
with positions that are not seen and that the next ones overwrite; a smaller batch with sessions
that have no slot, and write to the store's spare positions. All but the capture is tested on CPUs,
which do not use it because it rounds differently.

On a GPU results depend on the batch, except in exact mode (`ComputeOptions`): steps of a length
have one size, and other work runs per session. Exactness is tested when steps are made; if it
fails, each step has one session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .attention import PAGE, KvSlots, Row, Spans, spans_of

# -- steps of fixed sizes -----------------------------------------------------------------------

BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sessions per step; each size is captured once for each length, in a second or less."""
NUMBERS_MAX: Final = 704 * 4096
"""Rows of a step times their width: with more, arithmetic takes longer than launches."""
WARM_UPS: Final = 2

T = TypeVar("T")
Out: TypeAlias = tuple[Tensor, ...]
"""What a network makes of each session, (B, ...) each; for a decoder, last hidden states, (B,
width), and logits, (B, ids), float32."""


def batches(slots: int, length: int, width: int) -> tuple[int, ...]:
    """The sizes of steps of some rows, ascending; if possible, the last holds all slots."""
    sizes = (*(size for size in BATCHES if size < slots), slots)
    return tuple(size for size in sizes if size * length * width <= NUMBERS_MAX) or (1,)


class Network(Protocol):
    """What steps run: rows of many sessions, over their slots.

    `name`: in words. `width`: of a row. `is_causal`: whether a row sees only those before it.
    """

    name: str
    store: KvSlots
    width: int
    is_causal: bool

    def forward(self, rows: Tensor, spans: Spans) -> Tensor:
        """Feed (B, T, width), each where its span says; (B * T, width)."""
        ...

    def finish(self, hidden: Tensor, spans: Spans) -> Out:
        """What each session gets of all rows, (B * T, width)."""
        ...


class Step:
    """A forward pass of one size: `batch` sessions, each feeding up to `length` rows."""

    def __init__(self, network: Network, batch: int, length: int) -> None:
        self._network, like = network, network.store.keys
        shape = (batch, length, network.width)
        self.rows = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.spans = Spans(network.store, batch, length, causal=network.is_causal)

    def compute(self) -> Out:
        """Feed the rows."""
        self.spans.take()
        return self._network.finish(self._network.forward(self.rows, self.spans), self.spans)


class CapturedGraph(Generic[T]):
    """Work captured once as a graph and replayed as one launch.

    Args:
        work: what to capture; it reads and writes the same memory each time.
        aside: the stream of all captures, since libraries keep memory per stream.
        pool: memory shared by all captures: a result must be taken before the next replay.
    """

    def __init__(self, work: Callable[[], T], aside: torch.cuda.Stream, pool: Any) -> None:
        aside.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its stream current; the surrounding context does not.
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):  # Triggers the libraries' first-use setup.
                work()
            # Another thread may serve meanwhile; its calls are not captured.
            mode = "thread_local"
            with torch.cuda.graph(self._graph, pool, aside, capture_error_mode=mode):
                self._out = work()
        torch.cuda.current_stream().wait_stream(aside)

    def __call__(self) -> T:
        """Replay the work; the next replay may overwrite the result."""
        self._graph.replay()
        return self._out


def captured(works: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
    """Capture works that share memory: the largest first, so that the others reuse it."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = torch.cuda.graph_pool_handle()
    return [CapturedGraph(work, aside, pool) for work in works]


class Stepper:
    """Feeds rows to any number of sessions, in steps of fixed lengths and sizes.

    `sizes`: sessions of a step by length, both ascending.
    """

    def __init__(self, network: Network, sizes: Mapping[int, Sequence[int]]) -> None:
        self._store, self._is_causal = network.store, network.is_causal
        store = network.store
        self.sizes = {length: tuple(some) for length, some in sizes.items()}
        # The largest are captured first, so that the others reuse their memory.
        shapes = [(size, length) for length, some in self.sizes.items() for size in some]
        shapes.sort(key=lambda shape: shape[0] * shape[1], reverse=True)
        self._steps = {shape: Step(network, *shape) for shape in shapes}
        works: list[Callable[[], Out]] = [step.compute for step in self._steps.values()]
        if store.keys.is_cuda:
            works = captured(works)
            store.keys[:, 0, :, : max(sizes)] = 0  # The captures wrote there.
            store.values[:, 0, :, : max(sizes)] = 0
        self._compute = dict(zip(shapes, works, strict=True))

    @property
    def description(self) -> str:
        """Rows and sessions of the steps, on which bits depend."""
        return ", ".join(
            f"{length} x {'/'.join(map(str, some))}" for length, some in self.sizes.items()
        )

    def length_of(self, count: int, start: int) -> int | None:
        """The length of the step for `count` rows at a position; None if no step holds them."""
        length = next((length for length in self.sizes if length >= count), None)
        if length is None or start + length > self._store.capacity:
            return None
        return length if self._is_causal or length == count else None

    def run(self, length: int, rows: Sequence[Tensor], places: Sequence[Row]) -> Out:
        """Feed rows, (up to `length`, width), to distinct slots, in as many steps as it takes."""
        most = self.sizes[length][-1]
        for row in places:
            self._store.reach(row.slot, row.start + length)
        parts = [
            self._run(length, rows[begin : begin + most], places[begin : begin + most])
            for begin in range(0, len(rows), most)
        ]
        if len(parts) == 1:
            return parts[0]
        return tuple(torch.cat(some) for some in zip(*parts, strict=True))

    def _run(self, length: int, rows: Sequence[Tensor], places: Sequence[Row]) -> Out:
        count = len(rows)
        size = next(size for size in self.sizes[length] if size >= count)
        lacking = size - count
        step, counts = self._steps[size, length], [len(each) for each in rows]
        longest = max(counts)
        if lacking or min(counts) < length:  # Of what was there before, NaN would spread.
            step.rows.zero_()
        packed = torch.stack([*rows]) if min(counts) == longest else pad_sequence([*rows], True)
        step.rows[:count, :longest] = packed
        nowhere = Row(slot=self._store.slots, start=0)
        step.spans.aim([*places, *[nowhere] * lacking], [*counts, *[length] * lacking])
        out = self._compute[size, length]()
        return tuple(part[:count].clone() for part in out)

    def is_exact(self) -> bool:
        """Whether a session's bits do not depend on the other sessions in the step.

        Tested with random rows after random keys: repeated, reordered, unbatched, and in another
        slot. The store is overwritten, and empty afterwards.
        """
        try:
            self._store.scramble()
            return all(map(self._are_their_own, self.sizes))
        finally:
            self._store.clear()

    def _are_their_own(self, length: int) -> bool:
        store, most = self._store, self.sizes[length][-1]
        width = self._steps[most, length].rows.shape[2]
        places = self._spread(length, most)
        count = len(places)
        rows = list(torch.randn(count, length, width).mul(0.02).to(store.keys))
        whole = self.run(length, rows, places)

        def is_equal(which: Sequence[int], where: Sequence[Row]) -> bool:
            outs = self.run(length, [rows[index] for index in which], where)
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

    def _spread(self, length: int, count: int) -> list[Row]:
        """Places for as many rows as a step has, or as there is room for, in all slots."""
        store, slots = self._store, self._store.slots
        room = store.capacity
        if store.positions < slots * room:
            room = min(room, store.positions // slots // PAGE * PAGE)
        most = max(0, room - length)
        along = max(1, min(-(-count // slots), most // length))
        return [
            Row(slot=slot, start=most * (place * slots + slot + 1) // (along * slots))
            for place in range(along)
            for slot in range(slots)
        ]


# -- how a device computes ----------------------------------------------------------------------

ROWS_MIN: Final = 16
"""On a CPU, rows from which on a matrix product gives each row the same bits; see `decoder.py`."""
EXACT_SIZES: Final[Mapping[int, int]] = {16: 64, 128: 8}
"""Sessions of an exact step of up to so many rows, in any number of slots: a replay has one."""

Sizes = Callable[[int, int], Sequence[int]]
"""The sessions of steps of so many rows of a width, ascending."""
_log = logging.getLogger("antiphon.model")


@attrs.frozen(kw_only=True)
class ComputeOptions:
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


ON_CPU: Final = ComputeOptions(rows_min=ROWS_MIN)


def exact_sizes(length: int, _width: int) -> tuple[int, ...]:
    """The one size of an exact step of a length, whatever its width."""
    return (next((size for most, size in EXACT_SIZES.items() if length <= most), 1),)


def options_for(device: torch.device, slots: int, *, exact: bool) -> ComputeOptions:
    """Choose how to compute; `exact`: results are bitwise independent of the batch, as on a CPU."""
    if device.type != "cuda":
        return ON_CPU
    sizes = exact_sizes if exact else partial(batches, slots)
    return ComputeOptions(is_flash=True, sizes=sizes, is_alone=exact)


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
    options: ComputeOptions
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
            if self.options.is_alone and length is None:
                yield from ((None, [index]) for index in some)
            elif self.options.is_alone or steps is None or length is None:
                yield length, some
            else:  # What no step holds is arithmetic enough without one.
                same = len({len(rows[index]) for index in some}) == 1
                yield length if len(some) <= steps.sizes[length][-1] or not same else None, some

    def _together(self, rows: Sequence[Tensor], places: Sequence[Row]) -> Out:
        """Feed rows of one length, launched kernel by kernel."""
        network = self.network
        spans = spans_of(network.store, places, len(rows[0]), causal=network.is_causal)
        return network.finish(network.forward(torch.stack([*rows]), spans), spans)


def batched(network: Network, options: ComputeOptions, lengths: Sequence[int]) -> Batched:
    """Run a network, with steps of `lengths` rows if possible; all slots must be empty."""
    for sizes in (options.sizes, _one) if options.is_alone else (options.sizes,):
        if sizes is None:
            break
        try:
            with torch.inference_mode():
                fitting = sorted(length for length in lengths if length <= network.store.capacity)
                chosen = {length: sizes(length, network.width) for length in fitting}
                steps = Stepper(network, chosen)
                if not options.is_alone or steps.is_exact():
                    return Batched(network, options, steps)
        except Exception:  # Of the driver or a library, of any type.
            _log.exception("no fixed steps of %s: all is launched kernel by kernel", network.name)
            if network.store.keys.is_cuda:
                torch.cuda.synchronize()  # Raises if the GPU is lost to this process.
            break
        _log.warning("steps of %s are not exact for several sessions", network.name)
    return Batched(network, options, None)


def _one(_length: int, _width: int) -> tuple[int, ...]:
    return (1,)
