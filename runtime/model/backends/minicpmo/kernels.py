"""What lies between a decoder's matrix products, in a kernel each on a GPU.

A stock layer launches some 20 small kernels there. Here a norm comes with the sum before it, and
the rotation of queries and keys with their norms and with the writing of keys and values. Each row
is computed by itself, in float32, and rounded once; the sum that runs through all layers is not
rounded. The kernels need Triton, which torch brings for GPUs; without it, torch's own operators
compute the same, in more launches (`Operators`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

GATE_BLOCK: Final = 1024
TRIED_ROWS: Final = 3
CLOSE: Final = 2e-2
"""What two ways of rounding to 16 bits may be apart."""


@attrs.frozen(eq=False, kw_only=True)
class Rotation:
    """How queries and keys of a decoder are turned, and where its heads are.

    Attributes:
        heads, groups: query heads, and key heads.
        norms: the weights of the norms of each query and key head, (heads + groups, D), or None.
        cos, sin: by position, float32, (positions, D / 2).
    """

    heads: int
    groups: int
    norms: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor


@attrs.frozen(eq=False, kw_only=True)
class Places:
    """Where rows go: their positions in the session, and in a layer of all slots; int64, (N,)."""

    of: Tensor
    flat: Tensor


class Operators:
    """The operations, by torch's operators; N rows."""

    name = "torch"

    def norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of (N, width), or of `residual`, float32, to which it is added in place."""
        whole = x.float() if residual is None else residual.add_(x)
        return F.rms_norm(whole, weight.shape, weight.float(), eps).to(x)

    def rotate(
        self, qkv: Tensor, rotation: Rotation, places: Places, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Turn queries and keys, and write keys and values.

        Takes (N, (heads + 2 groups) D) and a layer of `KvSlots`; returns queries, (N, heads, D).
        """
        heads, groups = rotation.heads, rotation.groups
        rows = qkv.view(len(qkv), heads + 2 * groups, -1)
        values[places.flat] = rows[:, heads + groups :]
        turned = rows[:, : heads + groups].float()
        if rotation.norms is not None:
            turned = F.rms_norm(turned, turned.shape[-1:], eps=rotation.eps)
            turned = turned * rotation.norms.float()
        low, high = turned.chunk(2, dim=-1)
        cos, sin = rotation.cos[places.of][:, None], rotation.sin[places.of][:, None]
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(qkv)
        keys[places.flat] = turned[:, heads:]
        return turned[:, :heads]

    def gate(self, both: Tensor) -> Tensor:
        """The gated product of (N, 2 width): `silu` of the first half times the second."""
        gate, up = both.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(both)


def try_operators(found: Operators, like: Tensor, *, heads: int, groups: int, width: int) -> None:
    """Try a decoder's shapes with few rows; `width`: of a head.

    `AssertionError` if they compute something else than `Operators` on a tensor's device.
    """
    shape = (heads, groups, width)
    made = [[*_tried(operators, like, *shape)] for operators in (Operators(), found)]
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=CLOSE, atol=CLOSE)


def _tried(
    operators: Operators, like: Tensor, heads: int, groups: int, width: int
) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    at = torch.arange(TRIED_ROWS, device=like.device)
    places, turns = Places(of=at + 1, flat=at + 5), (drawn(9, width // 2), drawn(9, width // 2))
    rotation = Rotation(
        heads=heads, groups=groups, norms=None, eps=1e-6, cos=turns[0].float(), sin=turns[1].float()
    )
    whole = heads * width
    for norms in (None, drawn(heads + groups, width)):
        keys, values = (drawn(groups, 16, width).transpose(0, 1) for _ in range(2))
        turned, rows = attrs.evolve(rotation, norms=norms), whole + 2 * groups * width
        yield operators.rotate(drawn(TRIED_ROWS, rows), turned, places, keys, values)
        yield from (keys, values)
    for residual in (None, drawn(TRIED_ROWS, whole).float()):
        yield operators.norm(drawn(TRIED_ROWS, whole), residual, drawn(whole), 1e-6)
        if residual is not None:
            yield residual
    yield operators.gate(drawn(TRIED_ROWS, 2 * whole))
