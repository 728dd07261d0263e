"""Chunks of several sessions in a few fixed shapes, which a GPU captures as graphs.

A chunk is some 6,000 small kernels, most of them in the flow, and on a GPU launching them takes
longer than computing them. Here chunks are filled up to one length, caches to the longest, and
sessions to a few numbers: what fills up is not seen by attention, and comes after all that counts
where rows are convolved. The encoder, a step of the flow, and HiFT at its most frequent lengths
become one launch each. The flow's whole loop is not captured as one graph, since the caches of all
its steps would be in place at once, at ten times the memory.

All but the capture is tested on CPUs, which do not use it: they would gain nothing, and attention
over longer rows adds them up in another order.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from ..backends.minicpmo.batched import batches, captured
from . import encoder, flow
from .config import MEL
from .encoder import LOOKAHEAD, UP
from .flow import Flow
from .hift import FRAME, Hift

CODES: Final = 25
"""Codes of a chunk, without those ahead."""
FRAMES: Final = UP * CODES
CACHE: Final = 414
"""Frames of a cache: those of a prompt of 6 s, and 100. With those of a chunk they are a multiple
of 8, and so are its codes, as attention wants its masks."""
MEL_KEPT: Final = 8
"""Mel frames before a chunk that HiFT runs over again; their sound is faded into the chunk's."""
SOUNDS: Final = ((MEL_KEPT + FRAMES, MEL_KEPT), (FRAMES, 0), (30, 0))
"""Frames of HiFT's most frequent inputs, the most first, and how many of them are kept ones."""
SOUNDS_MAX: Final = 8
"""Sessions of a step of HiFT; more are arithmetic enough without one."""

_log = logging.getLogger("antiphon.model")


def sizes_on(device: torch.device, slots: int, width: int, *, exact: bool) -> tuple[int, ...]:
    """Sessions that a flow of a width computes together, ascending; none: each by itself."""
    if device.type == "cpu":
        return ()
    return (1,) if exact else batches(slots, 2 * FRAMES, width)


def mask_of(places: int, *seen: tuple[Tensor, Tensor]) -> Tensor:
    """0 from a start, (B,), to an end of what is seen, elsewhere -inf: (B, 1, 1, places)."""
    at, mask = torch.arange(places), torch.full((len(seen[0][0]), places), -math.inf)
    for start, end in seen:
        mask[(at >= start[:, None]) & (at < end[:, None])] = 0
    return mask[:, None, None]


class Fixed:
    """Work over tensors that stay in place, so that it can be captured.

    The next call may overwrite a result.
    """

    def __init__(self, compute: Callable[[], Any], *places: Tensor) -> None:
        self.compute, self._places = compute, places

    def __call__(self, *given: Tensor) -> Any:
        """Copy tensors to the beginnings of their places, and compute."""
        for place, tensor in zip(self._places, given, strict=True):
            place[tuple(map(slice, tensor.shape))].copy_(tensor)
        return self.compute()


class Padded:
    """Chunks of at most `size` sessions; rows without a session keep what was in them.

    Attributes:
        code_rows: the encoder's caches, (blocks, B, H, P, 2 D).
        frame_rows: those after its upsampling.
        rows: the flow's, of one step, (depth, 2, B, H, P, 2 D).
        encode: computes `Flow.encode` from codes, (B, 28), and of `encoder.Past` what is not a
            cache, in its order.
    """

    def __init__(self, flows: Flow, size: int, take: Callable[..., Tensor]) -> None:
        config, dit, int64 = flows.config.encoder, flows.config.dit, torch.int64
        heads, row, given = config.heads, 2 * (config.width // config.heads), CODES + LOOKAHEAD
        self.code_rows = take("code rows", config.blocks, size, heads, CACHE // UP, row)
        self.frame_rows = take("frame rows", config.up_blocks, size, heads, CACHE, row)
        shapes = {
            "ahead": (encoder.CONV_ROWS, config.width),
            "doubled": (encoder.UP_ROWS, config.width),
            "codes_mask": (1, 1, CACHE // UP + CODES),
            "frames_mask": (1, 1, CACHE + FRAMES),
            "given": (given, 1),
        }
        seen = {name: take(name, size, *shape) for name, shape in shapes.items()}
        seen["ends"] = take("counts", size, dtype=int64)
        codes, caches = take("codes", size, given, dtype=int64), (self.code_rows, self.frame_rows)
        encoded = encoder.Past(codes=caches[0].unbind(), frames=caches[1].unbind(), **seen)
        encode = partial(flows.encode, codes, encoded, last=False)
        self.encode = Fixed(encode, codes, *seen.values())
        row = 2 * dit.head_width
        self.rows = take("rows", dit.depth, 2, size, dit.heads, CACHE, row)
        news = take("news", dit.depth, 2, size, dit.heads, FRAMES, row)
        x = take("x", size, FRAMES, MEL, dtype=torch.float32)
        conditions = take("conditions", 2, size, FRAMES, 3 * MEL)
        time = [take("blocks", dit.depth, 3 * flow.PARTS, dit.width), take("final", 2, dit.width)]
        time.append(take("delta", dtype=torch.float32))
        before = take("before", dit.depth, 2, size, 2, flow.BEFORE, dit.width)
        mask, ends = take("mask", 2, size, 1, 1, FRAMES + CACHE), take("ends", 2, size, dtype=int64)
        rows, earlier = self.rows.flatten(1, 2), before.flatten(1, 2)
        past = flow.Past(rows=rows, before=earlier, mask=mask.flatten(0, 1), ends=ends.flatten())

        def step() -> tuple[Tensor, Tensor, Tensor]:
            after, rows, kept = flows.step(x, conditions.flatten(0, 1), time, past)
            news.copy_(rows.view_as(news))  # A result for each size would take too much memory.
            return after, news, kept.view_as(before)

        self.steps = Fixed(step, x, conditions, *time, before, mask, ends)

    def step(
        self, x: Tensor, conditions: Tensor, time: flow.Time, past: flow.Past
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `Flow.step` for (B, T, 80), with the cache that is in place."""
        assert past.mask is not None
        assert past.ends is not None
        count, before = len(x), past.before
        conditions, mask, ends = (
            each.view(2, count, *each.shape[1:]) for each in (conditions, past.mask, past.ends)
        )
        before = before.view(len(before), 2, count, *before.shape[2:])
        x, rows, kept = self.steps(x, conditions, *time, before, mask, ends)
        return x[:count], rows[:, :, :count].flatten(1, 2), kept[:, :, :count].flatten(1, 2)


class VoiceSteps:
    """The fixed shapes of a voice.

    Args:
        sizes: sessions that are computed together, ascending; fewer are filled up.
    """

    def __init__(self, flows: Flow, hift: Hift, sizes: Sequence[int]) -> None:
        self.sizes, self._hift, self._like = tuple(sizes), hift, flows.encoder_proj.weight
        self._few = [size for size in sizes if size <= SOUNDS_MAX]
        self._places = dict[str, Tensor]()
        # The largest come first, so that the others reuse their memory.
        self._padded = [Padded(flows, size, self._take) for size in reversed(self.sizes)]
        self._sounds = {
            (frames, kept): [self._sound(size, frames, kept) for size in reversed(self._few)]
            for frames, kept in SOUNDS
        }

    def _take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that shares its memory with smaller ones of the name."""
        count = math.prod(shape)
        if name not in self._places:
            self._places[name] = self._like.new_zeros(count, dtype=dtype or self._like.dtype)
        return self._places[name][:count].view(shape)

    def _sound(self, size: int, frames: int, kept: int) -> Fixed:
        shapes = {"mel": (frames, MEL), "noise": (frames * FRAME,), "source": (kept * FRAME,)}
        places = [
            self._take(name, size, *shape, dtype=torch.float32) for name, shape in shapes.items()
        ]
        return Fixed(partial(self._hift.speak, *places), *places)

    @property
    def bytes(self) -> int:
        """Memory of what stays in place."""
        return sum(each.numel() * each.element_size() for each in self._places.values())

    def padded(self, count: int) -> Padded:
        """The smallest shape for so many sessions."""
        return self._padded[-1 - bisect_left(self.sizes, count)]

    def sound(self, mel: Tensor, noise: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """`Hift.speak`, in a fixed shape if it is a frequent one."""
        count, frames, _ = mel.shape
        found = self._sounds.get((frames, before.shape[1] // FRAME))
        if found is None or (at := bisect_left(self._few, count)) == len(found):
            return self._hift.speak(mel, noise, before)
        source, sound = found[-1 - at](mel, noise, before)
        return source[:count].clone(), sound[:count].clone()

    def capture(self) -> None:
        """Capture all; what cannot be captured is launched kernel by kernel."""
        encoders, steps = zip(*((each.encode, each.steps) for each in self._padded), strict=True)
        kinds = [encoders, steps, *self._sounds.values()]
        try:
            with torch.inference_mode():
                # A result is overwritten by those of its kind only.
                works = [captured([each.compute for each in some]) for some in kinds]
        except Exception:  # Of the driver or a library, of any type.
            _log.exception("no captured steps of the voice: it is launched kernel by kernel")
            torch.cuda.synchronize()  # Raises if the GPU is lost to this process.
        else:
            for each, work in zip(chain(*kinds), chain(*works), strict=True):
                each.compute = work
